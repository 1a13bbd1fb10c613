"""The report's table of all heads: plain HTML that is whole without a script, which then sorts and filters it."""

from __future__ import annotations

import math

from headwise.heads.profiles import HeadProfile, Survey
from headwise.intervals import Interval
from headwise.markup import escaped, number
from headwise.view.survey_roles import badge_html
from headwise.view.survey_words import Badge, Column, badges_of, both_names, bounds, only_here, short, value_of

PARTS = {"this": "this", "other": "other", "difference": "diff."}  # of a column, where two models are compared


def table_section(survey: Survey, columns: tuple[Column, ...], against: Survey | None) -> str:
    """One line a head; a cell holds its interval and control as text that is seen on demand."""
    badges = badges_of(survey.roles)
    others = {} if against is None else {profile.name: profile for profile in against.profiles}
    rows = "".join(
        _row(place, profile, columns, badges, others.get(profile.name) if against else None, against is not None)
        for place, profile in enumerate(survey.profiles)
    )
    extra = not all(column.main for column in columns)
    box = '<input type="checkbox" autocomplete="off" id="all-columns">'
    every = f'<label class="switch" hidden>{box} all statistics</label>'
    return (
        '<section aria-labelledby="table-title"><h2 id="table-title">Every head in numbers</h2>'
        f'<p class="caption">{_reading(against)}</p><div class="bar">{every if extra else ""}'
        '<span class="caption matches"></span></div>'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="table-title"><table id="table">'
        f"{_head(columns, against)}<tbody>{rows}</tbody></table></div>{_legend(columns)}{_missing(survey, against)}"
        "</section>"
    )


def _reading(against: Survey | None) -> str:
    text = "Means over rows, then over documents. A cell tells its 95 % interval and what even attention gives."
    if against is None:
        return text
    return f"{text} Of each number: this model, {escaped(against.model)}, and the first minus the second."


def _head(columns: tuple[Column, ...], against: Survey | None) -> str:
    """Headings; what the script needs to sort by them stands in `data-` attributes."""
    rows = ' rowspan="2"' if against else ""
    fixed = f'<th scope="col" class="name" data-sort="name"{rows}>head</th>'
    fixed += f'<th scope="col" class="roles" data-sort="roles"{rows}>roles</th>'
    if against is None:
        return f"<thead><tr>{fixed}{''.join(_heading(place, c) for place, c in enumerate(columns))}</tr></thead>"
    groups = "".join(
        f'<th scope="colgroup" colspan="3" class="group{"" if column.main else " extra"}">{escaped(column.label)}</th>'
        for column in columns
    )
    parts = "".join(
        f'<th scope="col" data-sort="{place}" data-part="{part}"{_class(column)}>{heading}</th>'
        for place, column in enumerate(columns)
        for part, heading in PARTS.items()
    )
    return f"<thead><tr>{fixed}{groups}</tr><tr>{parts}</tr></thead>"


def _heading(place: int, column: Column) -> str:
    return f'<th scope="col" data-sort="{place}"{_class(column)}>{escaped(column.label)}</th>'


def _class(column: Column) -> str:
    return "" if column.main else ' class="extra"'


def _row(
    place: int,
    profile: HeadProfile,
    columns: tuple[Column, ...],
    badges: dict[str, Badge],
    other: HeadProfile | None,
    compared: bool,
) -> str:
    names = " ".join(badge_html(badges[role]) for role in profile.roles)
    words = ", ".join(short(role) for role in profile.roles)
    roles = f'{names} <span class="words" aria-hidden="true">{escaped(words)}</span>' if names else ""
    cells = "".join(_cells(profile, column, other, compared) for column in columns)
    return (
        f'<tr data-number="{place}"><th scope="row" class="name">{escaped(both_names(profile, other))}</th>'
        f'<td class="roles">{roles}</td>{cells}</tr>'
    )


def _cells(profile: HeadProfile, column: Column, other: HeadProfile | None, compared: bool) -> str:
    value = value_of(profile, column.key)
    cells = [_cell(value, column, profile.uniform.get(column.key))]
    if compared:
        theirs = None if other is None else value_of(other, column.key)
        cells.append(_cell(theirs, column, None if other is None else other.uniform.get(column.key)))
        gap = None if value is None or theirs is None else value.mean - theirs.mean
        cells.append(f"<td{_class(column)}>{number(gap, column.decimals, signed=True)}</td>")
    return "".join(cells)


def _cell(value: Interval | None, column: Column, even: float | None) -> str:
    mean = None if value is None else value.mean
    more = bounds(value, column)
    if even is not None and math.isfinite(even):
        more += f", even attention {number(even, column.decimals)}"
    shown = number(mean, column.decimals, column.signed)
    return f'<td{_class(column)}>{shown}<span class="more">, {more}</span></td>'


def _legend(columns: tuple[Column, ...]) -> str:
    items = "".join(f"<dt>{escaped(column.label)}</dt><dd>{escaped(column.meaning)}</dd>" for column in columns)
    return f'<details class="meanings"><summary>What the columns mean</summary><dl>{items}</dl></details>'


def _missing(survey: Survey, against: Survey | None) -> str:
    """Heads that only one of two models has, by name."""
    if against is None:
        return ""
    lines = []
    for one, other in ((survey, against), (against, survey)):
        names = only_here(one, other)
        if names:
            lines.append(f"<p>Only in {escaped(one.model)}: {escaped(', '.join(names))}.</p>")
    return f'<div class="notice" id="only">{"".join(lines)}</div>' if lines else ""
