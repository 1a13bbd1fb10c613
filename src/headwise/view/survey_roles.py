"""The report's overview of roles: who earns each, by which rule, and how far all heads are from it."""

from __future__ import annotations

import math

from headwise.heads.profiles import Role, Survey
from headwise.markup import escaped, number, plural
from headwise.view.survey_words import Badge, badges_of, decimals_for, label, value_of

# The strip of one role, in the units of its view box.
WIDTH, HEIGHT, MARGIN = 320, 26, 6


def roles_section(survey: Survey) -> str:
    """One card a role, those that heads earn first; a card is a button that filters once the script runs."""
    if not survey.roles:
        return ""
    badges = badges_of(survey.roles)
    earned = {role.name: [p.name for p in survey.profiles if role.name in p.roles] for role in survey.roles}
    ordered = sorted(survey.roles, key=lambda role: not earned[role.name])
    places = {role.name: place for place, role in enumerate(survey.roles)}
    cards = "".join(_card(survey, role, places[role.name], earned[role.name], badges[role.name]) for role in ordered)
    without = sum(not profile.roles for profile in survey.profiles)
    return (
        '<section aria-labelledby="roles-title"><h2 id="roles-title">What the heads do</h2>'
        '<p class="caption">A head earns a role when its score reaches the threshold and lies above the controls, with '
        "its whole interval where there are several documents. "
        "In a strip each stroke is a head and the dashed line is the threshold; ▲ marks the most that even attention "
        f"reaches{', △ the best head of the untrained model' if survey.untrained is not None else ''}. "
        f'{_rest(without, len(survey.profiles))}</p><ul class="cards">{cards}</ul></section>'
    )


def _rest(without: int, heads: int) -> str:
    if without == heads:
        return "No head earns any of these roles on this text."
    return f"{plural(without, 'head')} of {heads:,} earn none." if without else "Every head earns one."


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
    marks = "".join(_triangle(x(value), kind) for value, kind in _controls(survey, role))
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="15" y2="15"/><path class="others" d="{others}"/>'
        f'<path class="earners r{badge.kind}" d="{earners}"/>'
        f'<line class="limit" x1="{limit}" x2="{limit}" y1="1" y2="18"/>{marks}</svg>'
    )


def _controls(survey: Survey, role: Role) -> list[tuple[float, str]]:
    even = _even(survey, role)
    best = (survey.untrained or {}).get(role.score, math.nan)
    marks = [(max(even), "even")] if even else []
    return [*marks, (best, "untrained")] if math.isfinite(best) else marks


def _triangle(x: str, kind: str) -> str:
    return f'<path class="{kind}" d="M{x} 17l4 7h-8z"/>'
