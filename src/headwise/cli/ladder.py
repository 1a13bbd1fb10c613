"""`headwise ladder`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from headwise.cli.app import (
    Progress,
    command,
    needs_torch,
    out,
    print_json,
    wants_json,
)
from headwise.cli.early import language


@command()
def ladder(
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    tokens: int = 16,
    batch: int = 1,
    repeats: int = 7,
    seed: int = 0,
) -> None:
    """Compare loop and fast kernel on one draw, then time them.

    One set of weights and one input go through every way to build the layer, from plain loops to the fused kernel.
    First the largest difference at each stage and of each gradient; then, only for rungs that agree, time and memory.
    Exit code 1 when one does not agree.
    """
    with needs_torch():
        from headwise.lab.ladder import run_ladder
        from headwise.view.ladder import print_ladder
    with Progress("drawing weights") as progress:
        sizes = (width, heads, kv_heads, tokens, batch, repeats, seed)
        record = run_ladder(*sizes, report=lambda rung, done, total: progress("rung", done, total, rung))
    if wants_json():
        print_json("ladder", asdict(record))
    else:
        print_ladder(out, record, language())
    if not record.agrees:
        raise typer.Exit(1)
