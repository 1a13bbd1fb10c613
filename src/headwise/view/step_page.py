"""The steps of a head as one HTML page."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path

from headwise.files import write_whole
from headwise.markup import escaped
from headwise.records import HeadSteps
from headwise.view.page.assemble import package_text, page
from headwise.view.step_tables import Content, Row, Section, Table, Token


def write_steps(path: str | Path, steps: HeadSteps, lang: str = "en") -> None:
    """Write the page of `steps_html`, whole or not at all."""
    write_whole(path, steps_html(steps, lang))


def steps_html(steps: HeadSteps, lang: str = "en") -> str:
    """Every step as one HTML page that loads nothing, runs no script and can be opened from a disk.

    Raises HeadwiseError for a language that is not en or es.
    """
    content = Content(steps, lang)
    sections = content.sections()
    links = (f'<li><a href="#{section.name}">{_prose(section.title)}</a></li>' for section in sections)
    body = string.Template(package_text("steps.html")).substitute(
        heading=escaped(content.heading),
        sections="".join(map(_section_html, sections)),
        links="".join(links),
        rounding=_prose(content.say("rounding")),
        **{name: escaped(content.say(name)) for name in ("kicker", "lede")},
    )
    return page("steps", body, title=content.heading, styles=("steps.css",), lang=lang)


def _prose(text: str) -> str:
    """This module's own words, escaped, with k_j as an index; tokens and names never come here."""
    return re.sub(r"\b([A-Za-z])_([A-Za-z]+)", r"\1<sub>\2</sub>", escaped(text))


def _section_html(section: Section) -> str:
    parts = []
    for part in section.parts:
        if isinstance(part, Table):
            parts.append(_table_html(part, section.title))
        elif isinstance(part, str):
            parts.append(f"<p>{_prose(part)}</p>")
        else:
            parts.append(f'<p class="tokens">{"".join(map(_token_html, part))}</p>')
    title = f'<h2 id="{section.name}-title">{_prose(section.title)}</h2>'
    return f'<section id="{section.name}" aria-labelledby="{section.name}-title">{title}{"".join(parts)}</section>'


def _token_html(token: Token) -> str:
    kind = "asked" if token.asked else "hidden-token" if token.hidden else ""
    before, after = str(replace(token, text="\n")).split("\n")
    return f'<span class="{kind}">{escaped(before)}<bdi>{escaped(token.text)}</bdi>{escaped(after)}</span> '


def _table_html(table: Table, title: str) -> str:
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in table.columns)
    features = [name.isdigit() for name in table.columns]  # shaded by size; sums and lengths would drown them
    shaded = (cell for row in table.rows for cell, shown in zip(row.cells, features, strict=True) if shown)
    largest = max((abs(float(cell)) for cell in shaded), default=0.0)
    longest = max((float(row.cells[-1]) for row in table.rows), default=0.0) if table.bars else 0.0
    body = "".join(_row_html(row, features, largest, longest) for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(title)}"><table data-name="{table.name}">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row_html(row: Row, features: list[bool], largest: float, longest: float) -> str:
    """One line; with `longest`, the last cell is drawn as a bar, too, but that of a sum."""
    token = f" <bdi>{escaped(row.token)}</bdi>" if row.token else ""
    shades = (_shade(float(cell), largest) if shown else "" for cell, shown in zip(row.cells, features, strict=True))
    cells = "".join(f"<td{shade}>{cell}</td>" for cell, shade in zip(row.cells, shades, strict=True))
    if longest and not row.strong:
        width = 100 * float(row.cells[-1]) / longest
        cells += f'<td class="bar"><svg aria-hidden="true"><rect width="{width:.1f}%" height="100%"/></svg></td>'
    kind = ' class="strong"' if row.strong else ""
    return f'<tr{kind}><th scope="row">{escaped(row.label)}{token}</th>{cells}</tr>'


def _shade(number: float, largest: float) -> str:
    """A class for how large a number is within its table: p1 to p3, n1 to n3 for negative ones, or none."""
    level = sum(abs(number) >= step * largest > 0 for step in (0.15, 0.4, 0.7))
    return f' class="{"n" if number < 0 else "p"}{level}"' if level else ""
