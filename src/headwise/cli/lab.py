"""`headwise ladder`: the ways to build one layer, compared."""

from __future__ import annotations

import typer

from headwise.cli.app import Count, Progress, Seed, SomeCount, command, needs_torch, print_json, screen, wants_json


@command()
def ladder(
    width: Count = 64,
    heads: Count = 4,
    kv_heads: SomeCount = None,
    tokens: Count = 16,
    batch: Count = 1,
    seed: Seed = 0,
) -> None:
    """Compare loop and fast kernel on one draw, then time them.

    One set of weights and one input go through every way to build the layer, from plain loops to the fused kernel.
    First the largest difference at each stage and of each gradient; then, only for rungs that agree, time and memory.
    Exit code 1 when one does not agree.
    """
    with needs_torch():
        from headwise.lab.ladder import run_ladder
    from headwise.view.lab import print_ladder

    with Progress("drawing weights") as progress:
        sizes = (width, heads, kv_heads, tokens, batch)  # kv_heads None: as many as heads
        record = run_ladder(*sizes, seed=seed, report=lambda rung, done, total: progress("rung", done, total, rung))
    if wants_json():
        print_json("ladder", vars(record))
    else:
        print_ladder(screen, record)
    if not record.agrees:
        raise typer.Exit(1)
