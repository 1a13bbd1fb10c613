"""Comparisons and the ledger as one HTML page, with plots drawn in it.

The page loads nothing and can be opened from a disk. Names and texts are data: all are escaped.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from headwise.lab.compare.results import DEPENDS, FAILS, HOLDS, NOT_RUN, Claim, Comparison, Ledger, Metric, Table
from headwise.markup import escaped, table
from headwise.view.compare import metric_table, setting, shown, spent, with_unit
from headwise.view.compare_plot import DIFFERENCE, difference_plot, svg, value_plot
from headwise.view.page.assemble import package_text, page, word

BADGES = {HOLDS: "holds", FAILS: "fails", DEPENDS: "depends", NOT_RUN: "elsewhere"}


def page_html(record: Comparison | Ledger, lang: str = "en") -> str:
    """One comparison, or the ledger with all of its comparisons. What was measured stays as the record says it."""
    if isinstance(record, Comparison):
        heading = f'<h1 lang="en">{escaped(record.question)}</h1>'
        return _page(record.question, heading, setting(record), _comparison_sections(record), lang)
    sections = {
        word("compare.claims"): "".join(map(_claim, record.claims)),
        word("compare.counted"): "".join(map(_table, record.tables)),
    }
    for comparison in record.comparisons:
        name = f"<p><b>{escaped(comparison.name)}</b>: {escaped(setting(comparison))}</p>"
        sections[escaped(comparison.question)] = name + "".join(_comparison_sections(comparison).values())
    seeds = f"{record.seeds[0]} to {record.seeds[-1]}"
    facts = {"command": record.command, **record.machine, "seeds": seeds}
    sections[word("compare.machine")] = _list(f"{name}: {value}" for name, value in facts.items())
    title, heading = word("compare.ledger", "title"), word("compare.ledger", "h1")
    return _page(title, heading, spent(record), sections, lang)


def _page(title: str, heading: str, lede: str, sections: dict[str, str], lang: str) -> str:
    """`heading` and the titles of sections are HTML."""
    names = {title: f"part-{number}" for number, title in enumerate(sections, 1)}
    bodies = [
        f'<section id="{names[title]}" aria-labelledby="{names[title]}-title">'
        f'<h2 id="{names[title]}-title">{title}</h2><div lang="en">{body}</div></section>'
        for title, body in sections.items()
    ]
    body = string.Template(package_text("compare.html")).substitute(
        heading=heading,
        lede=escaped(lede),
        links="".join(f'<li><a href="#{name}">{title}</a></li>' for title, name in names.items()),
        sections="".join(bodies),
    )
    return page("compare", body, title=title, styles=("compare.css",), words=("compare",), lang=lang)


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escaped(line)}</li>" for line in lines) + "</ul>"


def _comparison_sections(comparison: Comparison) -> dict[str, str]:
    notes = "".join(f"<p>{escaped(line)}</p>" for line in comparison.notes)
    sections = {
        word("compare.verdict"): _list(comparison.verdicts) + notes,
        word("compare.arms"): "".join(_metric(comparison, metric) for metric in comparison.metrics),
    }
    if comparison.tables:
        sections[word("compare.besides")] = "".join(map(_table, comparison.tables))
    return sections


def _metric(comparison: Comparison, metric: Metric) -> str:
    plots = {with_unit(metric): value_plot(comparison, metric), DIFFERENCE: difference_plot(comparison, metric)}
    drawn = {escaped(caption): svg(plot) for caption, plot in plots.items() if plot is not None}
    figures = "".join(f"<figure>{svg}<figcaption>{name}</figcaption></figure>" for name, svg in drawn.items())
    return f'{_table(metric_table(comparison, metric))}<div class="plots">{figures}</div>'


def _claim(claim: Claim) -> str:
    kind = BADGES[claim.verdict]
    badge = word(f"compare.{kind}", "p", f'class="badge {kind}"')
    return (
        f'<article class="claim">{badge}'
        f"<h3>{escaped(claim.claim)}</h3><p>{escaped(claim.measured)}</p>"
        f'<p class="caption">{escaped(claim.rule)}</p></article>'
    )


def _table(figures: Table) -> str:
    rows = [[escaped(shown(cell)) for cell in row] for row in figures.rows]
    note = f'<p class="caption">{escaped(figures.note)}</p>' if figures.note else ""
    grid = table([escaped(column) for column in figures.columns], rows)
    return f'<h3>{escaped(figures.title)}</h3><div class="scroll" tabindex="0">{grid}</div>{note}'
