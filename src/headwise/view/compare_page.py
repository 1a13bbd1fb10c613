"""Comparisons and the ledger as one HTML page, with plots drawn in it.

The page loads nothing, runs no script and can be opened from a disk. Names and texts are data: all are escaped.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from headwise.lab.compare.results import DEPENDS, FAILS, HOLDS, NOT_RUN, Claim, Comparison, Ledger, Metric, Table
from headwise.markup import escaped, table
from headwise.view.compare import metric_table, setting, shown, spent, with_unit
from headwise.view.compare_plot import DIFFERENCE, difference_plot, svg, value_plot
from headwise.view.page.assemble import package_text, page

BADGES = {HOLDS: "holds", FAILS: "fails", DEPENDS: "depends", NOT_RUN: "elsewhere"}
READING = (
    "Dots are seeds, the stroke is their mean. A bar is the 95 % interval (Student) of the differences from the first "
    "arm, seed by seed; where it touches the line at 0, no difference was detected. Each interval stands alone."
)


def page_html(record: Comparison | Ledger) -> str:
    """One comparison, or the ledger with all of its comparisons."""
    if isinstance(record, Comparison):
        return _page(record.question, setting(record), _comparison_sections(record))
    sections = {
        "The claims": "".join(map(_claim, record.claims)),
        "Counted and timed": "".join(map(_table, record.tables)),
    }
    for comparison in record.comparisons:
        name = f"<p><b>{escaped(comparison.name)}</b>: {escaped(setting(comparison))}</p>"
        sections[comparison.question] = name + "".join(_comparison_sections(comparison).values())
    seeds = f"{record.seeds[0]} to {record.seeds[-1]}"
    facts = {"command": record.command, **record.machine, "seeds": seeds}
    sections["The machine"] = _list(f"{name}: {value}" for name, value in facts.items())
    return _page("What is claimed, and what is so", spent(record), sections)


def _page(heading: str, lede: str, sections: dict[str, str]) -> str:
    names = {title: f"part-{number}" for number, title in enumerate(sections, 1)}
    bodies = [
        f'<section id="{names[title]}" aria-labelledby="{names[title]}-title">'
        f'<h2 id="{names[title]}-title">{escaped(title)}</h2>{body}</section>'
        for title, body in sections.items()
    ]
    body = string.Template(package_text("compare.html")).substitute(
        heading=escaped(heading),
        kicker="headwise compare",
        lede=escaped(lede),
        rounding=escaped(READING),
        links="".join(f'<li><a href="#{name}">{escaped(title)}</a></li>' for title, name in names.items()),
        sections="".join(bodies),
    )
    return page("compare", body, title=heading, styles=("compare.css",))


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escaped(line)}</li>" for line in lines) + "</ul>"


def _comparison_sections(comparison: Comparison) -> dict[str, str]:
    notes = "".join(f"<p>{escaped(line)}</p>" for line in comparison.notes)
    sections = {
        "The verdict": _list(comparison.verdicts) + notes,
        "The arms": "".join(_metric(comparison, metric) for metric in comparison.metrics),
    }
    if comparison.tables:
        sections["Measured besides"] = "".join(map(_table, comparison.tables))
    return sections


def _metric(comparison: Comparison, metric: Metric) -> str:
    plots = {with_unit(metric): value_plot(comparison, metric), DIFFERENCE: difference_plot(comparison, metric)}
    drawn = {escaped(caption): svg(plot) for caption, plot in plots.items() if plot is not None}
    figures = "".join(f"<figure>{svg}<figcaption>{name}</figcaption></figure>" for name, svg in drawn.items())
    return f'{_table(metric_table(comparison, metric))}<div class="plots">{figures}</div>'


def _claim(claim: Claim) -> str:
    return (
        f'<article class="claim"><p class="badge {BADGES[claim.verdict]}">{escaped(claim.verdict)}</p>'
        f"<h3>{escaped(claim.claim)}</h3><p>{escaped(claim.measured)}</p>"
        f'<p class="caption">{escaped(claim.rule)}</p></article>'
    )


def _table(figures: Table) -> str:
    rows = [[escaped(shown(cell)) for cell in row] for row in figures.rows]
    note = f'<p class="caption">{escaped(figures.note)}</p>' if figures.note else ""
    grid = table([escaped(column) for column in figures.columns], rows)
    return f'<h3>{escaped(figures.title)}</h3><div class="scroll" tabindex="0">{grid}</div>{note}'
