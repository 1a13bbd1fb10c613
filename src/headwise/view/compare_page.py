"""Comparisons and the ledger as files: one HTML page, whose script writes the tables and draws the plots, and a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from headwise.lab.compare.results import Comparison, Ledger, Table
from headwise.markup import escaped
from headwise.view.compare import metric_table, setting, shown, spent, with_unit
from headwise.view.figure import figure_class, write_figure
from headwise.view.page.assemble import json_block, package_text, page, word
from headwise.view.survey_data import plain_data

SEED, ACCENT = "#8c8794", "#2c4f8f"  # in a PNG; the page has its own colours, for light and dark


def page_html(record: Comparison | Ledger, lang: str = "en") -> str:
    """One comparison, or the ledger with all of its comparisons. What was measured stays as the record says it."""
    data: dict[str, Any] = {"comparisons": [_comparison_data(record)]} if isinstance(record, Comparison) else {}
    if isinstance(record, Comparison):
        title, lede = record.question, setting(record)
        heading = f'<h1 lang="en">{escaped(title)}</h1>'
    else:
        title, lede, heading = word("compare.ledger", "title"), spent(record), word("compare.ledger", "h1")
        data = {
            "claims": [asdict(claim) for claim in record.claims],
            "tables": list(map(_table_data, record.tables)),
            "comparisons": list(map(_comparison_data, record.comparisons)),
            "facts": {"command": record.command, **record.machine, "seeds": f"{record.seeds[0]} to {record.seeds[-1]}"},
        }
    return page(
        "compare",
        Template(package_text("compare.html")).substitute(heading=heading, lede=escaped(lede)),
        title=title,
        styles=("compare.css",),
        scripts=("compare.js",),
        data={"record": json_block(plain_data(data))},
        words=("compare",),
        lang=lang,
    )


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    metrics = [
        {"name": metric.name, "words": metric.words, "table": _table_data(metric_table(comparison, metric))}
        for metric in comparison.metrics
    ]
    tables = list(map(_table_data, comparison.tables))
    return {**asdict(comparison), "setting": setting(comparison), "metrics": metrics, "tables": tables}


def _table_data(table: Table) -> dict[str, Any]:
    return {**asdict(table), "rows": [list(map(shown, row)) for row in table.rows]}


def write_png(path: str | Path, comparisons: Sequence[Comparison]) -> None:
    """Of the first metric of each comparison every seed with the mean, and beside it the differences' intervals."""
    heights = [len(comparison.arms) + 2.5 for comparison in comparisons]
    figure = figure_class()(figsize=(11, 0.4 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for comparison, (values, differences) in zip(comparisons, panels, strict=True):
        metric = comparison.metrics[0]
        for row, arm in enumerate(comparison.arms):
            score = arm.scores.get(metric.name)
            if score is not None:
                values.plot(score.values, [row] * len(score.values), "o", color=SEED, alpha=0.55)
                values.plot(score.mean.mean, row, "|", color=ACCENT, markersize=16, markeredgewidth=2.5)
            if score is not None and (difference := score.difference) is not None:
                differences.errorbar(difference.mean, row, xerr=difference.half_width, fmt="o", color=ACCENT)
        values.set_title(f"{comparison.name}: {setting(comparison)}", fontsize=9, loc="left", parse_math=False)
        values.set_xlabel(with_unit(metric), fontsize=9)
        differences.set_xlabel("difference from the first arm, with its 95 % interval", fontsize=9)
        differences.axvline(0, color=SEED)
        for axes in (values, differences):
            axes.set_yticks(range(len(comparison.arms)), [arm.name for arm in comparison.arms], parse_math=False)
            axes.set_ylim(len(comparison.arms) - 0.5, -0.5)
            axes.grid(axis="x", alpha=0.4)
    write_figure(path, figure)
