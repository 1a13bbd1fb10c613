"""Comparisons in words: in the terminal, and the parts that the page and the ledger share."""

from __future__ import annotations

import itertools

from rich.console import Console

from headwise.lab.compare.results import Cell, Comparison, Ledger, Metric, Table
from headwise.view.tables import print_table, say

MISSING = "-"


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The question, a table for each metric, the verdicts, and what was measured besides."""
    say(console, f"{comparison.name}: {comparison.question}")
    say(console, setting(comparison))
    for metric in comparison.metrics:
        _print_table(console, metric_table(comparison, metric))
    for line in (*comparison.verdicts, *comparison.notes):
        say(console, line)
    for table in comparison.tables:
        _print_table(console, table)


def print_ledger(console: Console, ledger: Ledger) -> None:
    """Claim by claim: the verdict, what was measured, and the rule between the two."""
    for claim in ledger.claims:
        for line in (f"{claim.verdict.upper()}: {claim.claim}", f"  {claim.measured}", f"  {claim.rule}", ""):
            say(console, line)
    say(console, spent(ledger))


def setting(comparison: Comparison) -> str:
    """Data, steps and seeds in a line."""
    seeds = comparison.seeds
    return f"On {comparison.data}, {comparison.steps:,} steps, seeds {seeds[0]} to {seeds[-1]}."


def spent(ledger: Ledger) -> str:
    """How long the call took."""
    return f"Took {ledger.wall_seconds / 60:.1f} minutes, and {ledger.cpu_seconds / 60:.1f} minutes of processor time."


def metric_table(comparison: Comparison, metric: Metric) -> Table:
    """The arms under one metric: means with intervals, and differences from the first arm."""
    rows: list[tuple[Cell, ...]] = []
    for arm in comparison.arms:
        name = f"{arm.name}, {arm.about}" if arm.about else arm.name
        score = arm.scores.get(metric.name)
        if score is None:
            rows.append((name, arm.parameters, "diverged", *[MISSING] * 3))
            continue
        far = score.difference
        differs = (
            ("the first", MISSING) if far is None else (f"{far.mean:+z.3f}", f"{far.low:+z.3f} to {far.high:+z.3f}")
        )
        rows.append((name, arm.parameters, f"{score.mean.mean:.3f}", f"{score.mean.half_width:.3f}", *differs))
    return Table(with_unit(metric), ("arm", "parameters", "mean", "±", "difference", "95 % interval"), tuple(rows))


def with_unit(metric: Metric) -> str:
    """ "held-out loss, nats"; a share has no unit."""
    return f"{metric.words}, {metric.unit}" if metric.unit else metric.words


def shown(cell: Cell) -> str:
    """A cell as text: whole numbers in full, others to three digits."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def _print_table(console: Console, table: Table) -> None:
    say(console, "")
    columns = zip(*table.rows, strict=True)  # those of words at the beginning stand at the left
    words = itertools.takewhile(lambda column: all(isinstance(cell, str) for cell in column), columns)
    rows = [[shown(cell) for cell in row] for row in table.rows]
    print_table(console, table.title, table.columns, rows, range(max(1, len(list(words)))))
    if table.note:
        say(console, table.note)
