"""`headwise verify`: is the cache of a model right, is its padding right, do its documents stay apart?"""

from __future__ import annotations

import typer

from headwise.cli.app import (
    Model,
    command,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.families import check_model, check_reads_tokens
from headwise.view import Progress, screen


@command()
def verify(model: Model, device: str = "cpu") -> None:
    """Check a model's cache, its padding and its batches.

    A text is read whole, and then token by token, in chunks, padded, and beside another text. Where a result differs by
    more than rounding, the layer and the token are named where it begins. Exit code 1 says that one differs.

    Example: headwise verify gemma-3-270m
    """
    check_model(model)
    check_reads_tokens(model)
    with needs_torch():
        from headwise.models.open import open_folder
        from headwise.models.verify import verify
    with Progress("opening the model") as progress:
        opened = open_folder(model, device=device).model
        progress("reading a text in nine ways", 0, 0)
        verified = verify(opened)
    if wants_json():
        print_json("verify", {**vars(verified), "right": verified.right})
    else:
        screen.print(verified.text())
        screen.say(
            "All that was asked is equal." if verified.right else "They are NOT equal."
        )
    if not verified.right:
        raise typer.Exit(1)
