"""The report's overview of roles, and its table of all heads: plain HTML that is whole without a script.

The script then filters by role, and sorts the table.
"""

from __future__ import annotations

import math

from headwise.heads.profiles import HeadProfile, Role, Survey
from headwise.markup import escaped, number, plural
from headwise.view.survey_words import (
    Badge,
    Column,
    badges_of,
    both_names,
    bounds,
    decimals_for,
    earners,
    label,
    mean_of,
    only_here,
    paired,
    short,
    value_of,
)

PARTS = {"this": "this", "other": "other", "difference": "diff."}  # of a column, where two models are compared
# The strip of one role, in the units of its view box.
WIDTH, HEIGHT, MARGIN = 320, 26, 6


def roles_section(survey: Survey) -> str:
    """One card a role, those that heads earn first; a card is a button that filters once the script runs."""
    if not survey.roles:
        return ""
    badges = badges_of(survey.roles)
    earned = earners(survey)
    ordered = sorted(survey.roles, key=lambda role: not earned[role.name])
    places = {role.name: place for place, role in enumerate(survey.roles)}
    cards = "".join(_card(survey, role, places[role.name], earned[role.name], badges[role.name]) for role in ordered)
    without = sum(not profile.roles for profile in survey.profiles)
    return (
        '<section aria-labelledby="roles-title"><h2 id="roles-title">What the heads do</h2>'
        '<p class="caption">A head has a role when its score reaches the threshold and lies above the controls. With '
        "several documents its whole interval must do so. "
        "In each strip a stroke is a head and the dashed line is the threshold. ▲ is the highest score of even "
        f"attention{', △ that of the untrained model' if survey.untrained is not None else ''}. "
        f'{_rest(without, len(survey.profiles))}</p><ul class="cards">{cards}</ul></section>'
    )


def _rest(without: int, heads: int) -> str:
    if without == heads:
        return "No head has any of these roles on this text."
    return f"{plural(without, 'head')} of {heads:,} have none." if without else "Every head has one."


def badge_html(badge: Badge) -> str:
    """The letter in its shape and colour; a screen reader says the name."""
    name = escaped(badge.role)
    return f'<span class="badge r{badge.kind}" role="img" aria-label="{name}" title="{name}">{badge.letter}</span>'


def _card(survey: Survey, role: Role, place: int, heads: list[str], badge: Badge) -> str:
    count = plural(len(heads), "head") if heads else "no head"
    return (
        f'<li class="role{"" if heads else " unearned"}"><button type="button" class="choose" data-role="{place}" '
        f'aria-pressed="false" disabled><span class="badge r{badge.kind}" aria-hidden="true">{badge.letter}</span>'
        f'<span class="role-name">{escaped(role.name)}</span> <span class="count">{count}</span></button>'
        f'<p class="meaning">{_capital(escaped(role.meaning))}.</p>{_strip(survey, role, badge)}'
        f'<p class="rule">{_rule(survey, role)} {escaped(role.source)}.</p></li>'
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _rule(survey: Survey, role: Role) -> str:
    """The score, the threshold and the controls in words."""
    even = _even(survey, role)
    parts = [f"{_capital(escaped(label(role.score)))} of at least {role.threshold:g}"]
    decimals = decimals_for([role.threshold])
    if even:
        low, high = number(min(even), decimals), number(max(even), decimals)
        parts.append(f"even attention: {low}" if low == high else f"even attention: {low} to {high}")
    if survey.untrained is not None and role.score in survey.untrained:
        parts.append(f"best untrained head: {number(survey.untrained[role.score], decimals)}")
    return "; ".join(parts) + "."


def _even(survey: Survey, role: Role) -> list[float]:
    values = [profile.uniform.get(role.score, math.nan) for profile in survey.profiles]
    return [value for value in values if math.isfinite(value)]


def _strip(survey: Survey, role: Role, badge: Badge) -> str:
    """Every head's score as a stroke on one axis, from 0 (or below, where scores are) to 1 (or above)."""
    scores = [(value_of(profile, role.score), role.name in profile.roles) for profile in survey.profiles]
    known = [(value.mean, has) for value, has in scores if value is not None and math.isfinite(value.mean)]
    if not known:
        return ""
    low, high = min(0.0, *(mean for mean, _ in known)), max(1.0, role.threshold, *(mean for mean, _ in known))

    def x(value: float) -> str:
        place = (min(high, max(low, value)) - low) / (high - low)
        return f"{MARGIN + (WIDTH - 2 * MARGIN) * place:.1f}"

    others = "".join(f"M{x(mean)} 8v7" for mean, has in known if not has)
    earners = "".join(f"M{x(mean)} 4v11" for mean, has in known if has)
    limit = x(role.threshold)
    untrained = (survey.untrained or {}).get(role.score, math.nan)
    controls = {"even": max(_even(survey, role), default=math.nan), "untrained": untrained}
    marks = "".join(
        f'<path class="{kind}" d="M{x(value)} 17l4 7h-8z"/>' for kind, value in controls.items() if math.isfinite(value)
    )
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="15" y2="15"/><path class="others" d="{others}"/>'
        f'<path class="earners r{badge.kind}" d="{earners}"/>'
        f'<line class="limit" x1="{limit}" x2="{limit}" y1="1" y2="18"/>{marks}</svg>'
    )


def table_section(survey: Survey, columns: tuple[Column, ...], against: Survey | None) -> str:
    """One line a head; a cell holds its interval and control as text that is seen on demand."""
    badges = badges_of(survey.roles)
    rows = "".join(
        _row(place, profile, columns, badges, other, against is not None)
        for place, (profile, other) in enumerate(paired(survey, against))
    )
    extra = not all(column.main for column in columns)
    box = '<input type="checkbox" autocomplete="off" id="all-columns">'
    every = f'<label class="switch" hidden>{box} all statistics</label>'
    missing = "".join(
        f"<p>Only in {escaped(model)}: {escaped(names)}.</p>" for model, names in only_here(survey, against)
    )
    notice = f'<div class="notice" id="only">{missing}</div>' if missing else ""
    return (
        '<section aria-labelledby="table-title"><h2 id="table-title">Every head in numbers</h2>'
        f'<p class="caption">{_reading(against)}</p><div class="bar">{every if extra else ""}'
        '<span class="caption matches"></span></div>'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="table-title"><table id="table">'
        f"{_head(columns, against)}<tbody>{rows}</tbody></table></div>{_legend(columns)}{notice}"
        "</section>"
    )


def _reading(against: Survey | None) -> str:
    text = "Means over rows, then over documents. Each cell also has its 95 % interval and the value of even attention."
    if against is None:
        return text
    return f"{text} Three columns for each number: this model, {escaped(against.model)}, and the difference."


def _head(columns: tuple[Column, ...], against: Survey | None) -> str:
    """Headings; what the script needs to sort by them stands in `data-` attributes."""
    rows = ' rowspan="2"' if against else ""
    fixed = f'<th scope="col" class="name" data-sort="name"{rows}>head</th>'
    fixed += f'<th scope="col" class="roles" data-sort="roles"{rows}>roles</th>'
    if against is None:
        headings = (
            f'<th scope="col" data-sort="{place}"{_class(column)}>{escaped(column.label)}</th>'
            for place, column in enumerate(columns)
        )
        return f"<thead><tr>{fixed}{''.join(headings)}</tr></thead>"
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
    if not compared:
        return _cell(profile, column)
    gap = number(mean_of(profile, column.key) - mean_of(other, column.key), column.decimals, signed=True)
    return f"{_cell(profile, column)}{_cell(other, column)}<td{_class(column)}>{gap}</td>"


def _cell(profile: HeadProfile | None, column: Column) -> str:
    more = bounds(value_of(profile, column.key), column)
    even = math.nan if profile is None else profile.uniform.get(column.key, math.nan)
    if math.isfinite(even):
        more += f", even attention {number(even, column.decimals)}"
    shown = number(mean_of(profile, column.key), column.decimals, column.signed)
    return f'<td{_class(column)}>{shown}<span class="more">, {more}</span></td>'


def _legend(columns: tuple[Column, ...]) -> str:
    items = "".join(f"<dt>{escaped(column.label)}</dt><dd>{escaped(column.meaning)}</dd>" for column in columns)
    return f'<details class="meanings"><summary>What the columns mean</summary><dl>{items}</dl></details>'
