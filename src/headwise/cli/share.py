"""`headwise share`."""

from __future__ import annotations

from typing import Annotated

import typer

from headwise.cli.app import Debug, Json, app, needs_torch
from headwise.cli.reshape import (
    Batch,
    Force,
    Heal,
    Hidden,
    Model,
    Options,
    Out,
    Rate,
    Refit,
    Resume,
    Seed,
    Text,
    Tokens,
    reshape,
)


@app.command(
    epilog="Example: headwise share runs/book --kv-heads 2 --text book.txt --group best --heal 200 --out runs/book-2kv"
)
def share(
    model: Model,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of each layer; a divisor of today's.")],
    text: Text = None,
    method: Annotated[
        str, typer.Option(help="first, mean, medoid, aligned, aligned+norm or principal.")
    ] = "aligned+norm",
    group: Annotated[
        str, typer.Option(help="adjacent: neighbours share; best: heads whose sharing should cost least.")
    ] = "adjacent",
    heal: Heal = None,
    out_folder: Out = None,
    tokens: Tokens = None,
    batch: Batch = 4,
    lr: Rate = 0.015,
    hidden: Hidden = 30.0,
    refit: Refit = 0,
    seed: Seed = 0,
    force: Force = False,
    resume: Resume = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let query heads share key/value heads: a smaller cache.

    MODEL is a run of headwise or a folder of Llama, Mistral, Qwen2 or Qwen3. The damage is measured before any
    training, then healed if asked for, and --out is verified by a fresh process before it appears. The last tenth of
    TEXT is held out to measure on.
    """
    with needs_torch():
        from headwise.reshape.changes import sharing
    options = Options(model, text, out_folder, tokens, heal, batch, lr, hidden, refit, seed, force, resume, as_json)
    reshape(sharing(kv_heads, method, group), options)
