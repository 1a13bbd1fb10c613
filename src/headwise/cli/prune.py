"""`headwise prune`."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.cli.app import app, needs_torch
from headwise.cli.reshape import Options, reshape, with_options


@app.command(epilog="Example: headwise prune runs/book --keep 0.5 --uniform --text book.txt --heal 200 --out runs/less")
@with_options
def prune(
    options: Options,
    heads: Annotated[str | None, typer.Option(help="Heads that go, as L0.H1,L3.H5.")] = None,
    keep: Annotated[
        float | None, typer.Option(help="Share of the heads that stays, below 1; --by chooses which.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="With --keep, what decides: importance (from gradients, the default), ablation (the loss without "
            "the head), or role (heads without a role go first)."
        ),
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="As many heads from each layer, so that they leave the weights.")
    ] = False,
) -> None:
    """Remove query heads from a model.

    Heads leave the weights where the format can carry what remains: as many from each layer, whole groups or evenly
    from each group. Otherwise they are zeroed, and the reason is printed. The rest is as in `headwise share`: the
    damage is measured, healed if you ask for it, and a verified folder is written.
    """
    with needs_torch():
        from headwise.reshape.prune import prune as prune_model
    reshape(
        options,
        lambda **common: prune_model(options.model, heads, keep=keep, by=by, uniform=uniform, **common),
    )
