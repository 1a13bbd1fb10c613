"""`headwise share`."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.cli.app import app, needs_torch
from headwise.cli.reshape import Options, reshape, with_options


@app.command(
    epilog="Example: headwise share runs/book --kv-heads 2 --text book.txt --groups best --heal 200 --out runs/book-2kv"
)
@with_options
def share(
    options: Options,
    kv_heads: Annotated[
        int, typer.Option(help="Key/value heads of each layer: a divisor of today's number, and smaller.")
    ],
    method: Annotated[
        str, typer.Option(help="first, mean, medoid, aligned, aligned+norm or principal.")
    ] = "aligned+norm",
    groups: Annotated[
        str, typer.Option(help="adjacent: neighbours share; best: heads that an estimate finds cheap to share.")
    ] = "adjacent",
    group: Annotated[str | None, typer.Option(hidden=True, help="The earlier name of --groups.")] = None,
) -> None:
    """Let query heads share key/value heads: a smaller cache.

    MODEL is a run of headwise or a folder of Llama, Mistral, Qwen2 or Qwen3. The damage is measured before any
    training. With --heal the model then learns to answer as it did before. A fresh process verifies --out before it
    appears. The last tenth of TEXT is held out to measure on.
    """
    with needs_torch():
        from headwise.reshape.share import share as share_model
    reshape(
        options, lambda **common: share_model(options.model, kv_heads, method=method, groups=group or groups, **common)
    )
