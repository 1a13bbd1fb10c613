"""Comparisons and the ledger of claims: in the terminal and as an HTML page."""

from __future__ import annotations

from dataclasses import asdict
from string import Template
from typing import Any

from rich.console import Console

from headwise.lab.results import Comparison, Ledger, Metric
from headwise.records import plain_data
from headwise.table import Cell, Table, escaped, say, shown
from headwise.view.page import json_block, package_text, page, word
from headwise.words import Note, said, translator

MISSING = "-"


def print_comparison(console: Console, comparison: Comparison, lang: str = "en") -> None:
    """The question, a table for each metric, the verdicts and notes."""
    say(console, f"{comparison.name}: {said(comparison.question, lang)}")
    say(console, said(setting(comparison), lang))
    for metric in comparison.metrics:
        say(console, "")
        metric_table(comparison, metric).print(console, speak=translator("comparison", lang))
    for line in (*comparison.verdicts, *comparison.notes):
        say(console, said(line, lang))


def print_ledger(console: Console, ledger: Ledger) -> None:
    """Claim by claim: the verdict, what was measured, and the rule between the two."""
    for claim in ledger.claims:
        for line in (f"{claim.verdict.upper()}: {claim.claim}", f"  {claim.measured}", f"  {claim.rule}", ""):
            say(console, line)
    say(console, spent(ledger))


def setting(comparison: Comparison) -> Note:
    """Data, steps and seeds in a line."""
    facts = {"data": comparison.data, "steps": f"{comparison.steps:,}"}
    return Note.of("comparison.setting", **facts, first=comparison.seeds[0], last=comparison.seeds[-1])


def spent(ledger: Ledger) -> str:
    """How long the call took."""
    return f"Took {ledger.wall_seconds / 60:.1f} minutes, and {ledger.cpu_seconds / 60:.1f} minutes of processor time."


def metric_table(comparison: Comparison, metric: Metric) -> Table:
    """The arms under one metric: means with intervals, and differences from the first arm."""
    rows: list[tuple[Cell, ...]] = []
    for arm in comparison.arms:
        name = Note.of("comparison.with_about", name=arm.name, about=arm.about) if arm.about else arm.name
        score = arm.scores.get(metric.name)
        if score is None:
            rows.append((name, arm.parameters, "diverged", *[MISSING] * 3))
            continue
        row: list[Cell] = [name, arm.parameters, f"{score.mean.mean:.3f}", f"{score.mean.half_width:.3f}"]
        far = score.difference
        if far is None:
            rows.append((*row, "the first", MISSING))
        else:
            interval = Note.of("comparison.from_to", low=f"{far.low:+z.3f}", high=f"{far.high:+z.3f}")
            rows.append((*row, f"{far.mean:+z.3f}", interval))
    columns = ("arm", "parameters", "mean", "±", "difference", "95 % interval")
    title = Note.of("comparison.with_about", name=metric.words, about=metric.unit) if metric.unit else metric.words
    return Table(columns, tuple(rows), title)


def page_html(record: Comparison | Ledger, lang: str = "en") -> str:
    """One comparison, or the ledger with all of its comparisons. What was measured stays as the record says it."""
    data: dict[str, Any] = {"comparisons": [_comparison_data(record)]} if isinstance(record, Comparison) else {}
    if isinstance(record, Comparison):
        title, lede = record.question, str(setting(record))
        heading = f'<h1 lang="en">{escaped(title)}</h1>'
    else:
        title, lede, heading = word("compare.ledger", "title"), spent(record), word("compare.ledger", "h1")
        data = {
            "claims": record.claims,
            "tables": list(map(_table_data, record.tables)),
            "comparisons": list(map(_comparison_data, record.comparisons)),
            "facts": {"command": record.command, **record.machine, "seeds": f"{record.seeds[0]} to {record.seeds[-1]}"},
        }
    return page(
        "compare",
        Template(package_text("compare.html")).substitute(heading=heading, lede=escaped(lede)),
        title=title,
        styles=("compare.css",),
        script="compare.js",
        data={"record": json_block(plain_data(data))},
        words=("compare",),
        lang=lang,
    )


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    metrics = [
        {"name": metric.name, "words": metric.words, "table": _table_data(metric_table(comparison, metric))}
        for metric in comparison.metrics
    ]
    return {**asdict(comparison), "setting": setting(comparison), "metrics": metrics}


def _table_data(table: Table) -> dict[str, Any]:
    return {**asdict(table), "rows": [list(map(shown, row)) for row in table.rows]}
