"""`headwise ladder`: eight ways to compute one layer."""

from __future__ import annotations

import typer

from headwise.cli.app import Count, command, needs_torch, print_json, wants_json
from headwise.table import Table
from headwise.view import Progress, screen


@command()
def ladder(width: Count = 64, heads: Count = 4) -> None:
    """Compute one layer in eight ways, compare them, and time them.

    One draw of weights and one text go through plain loops, microgpt's head loop, NumPy, the classes of courses,
    torch's module and our layer. Exit code 1 when one differs by more than rounding explains.

    Args:
        width: Width of the model.
        heads: Query heads.

    Example: headwise ladder --width 96 --heads 6
    """
    with needs_torch():
        from headwise.courses.ladder import run_ladder

    with Progress("computing in eight ways"):
        record = run_ladder(width, heads)
    if wants_json():
        print_json("ladder", vars(record))
    else:
        slowest = max(way.ms for way in record.ways)
        rows = []
        for way in record.ways:
            far = "not finite" if way.difference is None else f"{way.difference:.0g}"
            rows.append((way.name, far, way.ms, f"{slowest / way.ms:,.0f}x"))
        title = (
            f"One causal layer: {record.tokens} tokens, width {width}, {heads} heads"
        )
        note = f"Differences are the largest from the loops; rounding in float32 explains up to {record.tolerance:.0e}."
        Table(("way", "difference", "ms", "speed"), rows, title, note).print(screen)
        screen.say(
            "All eight compute the same."
            if record.agrees
            else "They do NOT compute the same."
        )
    if not record.agrees:
        raise typer.Exit(1)
