"""`headwise ladder`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from headwise.cli.app import Debug, Json, Progress, app, needs_torch, out, print_json


@app.command(epilog="Example: headwise ladder --width 96 --heads 6 --kv-heads 2 --tokens 32")
def ladder(
    width: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads. Default: as many as query heads.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in each text.")] = 16,
    batch: Annotated[int, typer.Option(help="Number of texts processed together.")] = 1,
    repeats: Annotated[int, typer.Option(help="Calls of each rung. The median is shown.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed for weights and input.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that the loop and the fast kernel agree, then time them.

    One set of weights goes through every way to build the layer, from plain loops to the fused kernel. First the
    largest difference at each stage and of each gradient; then, only for rungs that agree, time and memory. Exit code
    1 when one does not agree.
    """
    with needs_torch():
        from headwise.lab.ladder import run_ladder
        from headwise.view.ladder import print_ladder
    with Progress() as progress:
        sizes = (width, heads, kv_heads, tokens, batch, repeats, seed)
        record = run_ladder(*sizes, report=lambda rung, done, total: progress("rung", done, total, rung))
    if as_json:
        print_json(asdict(record))
    else:
        print_ladder(out, record)
    if not record.agrees:
        raise typer.Exit(1)
