"""How a survey is put into words: its columns, the signs of its roles, and what two surveys do not share."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable
from dataclasses import dataclass

from headwise.heads.profiles import ROLES, HeadProfile, Role, Survey
from headwise.intervals import Interval
from headwise.markup import plural

MAIN = ("entropy", "confidence", "distance", "first", "previous", "self", "delimiter", "duplicate", "prefix")
FEW = 10  # so many statistics are all shown at once
KINDS = 10  # kinds of badges in the style sheet


@dataclass(frozen=True)
class Column:
    """A number that each head has."""

    key: str  # a statistic, "importance" or "ablation"
    label: str
    meaning: str
    decimals: int
    signed: bool = False
    main: bool = True  # shown at once; the others on demand


@dataclass(frozen=True)
class Badge:
    """The sign of a role: a letter of its own, and one of the shapes and colours of the style sheet."""

    role: str
    letter: str
    kind: int


def label(key: str) -> str:
    """What the reader calls a statistic: `same token` for same_token, `offset 3` for offset_3."""
    return key.replace("_", " ")


def columns_of(survey: Survey, against: Survey | None = None) -> tuple[Column, ...]:
    """Every statistic in the order of the survey, then importance and ablation where they were measured.

    With `against`, statistics that only one of the two has are left out.
    """
    surveys = [survey] if against is None else [survey, against]
    shared = [key for key in survey.statistics if all(key in each.statistics for each in surveys)]
    meanings = {key: survey.statistics[key] for key in shared}
    effects = {
        "importance": "mean size of the loss's slope with respect to a gate on the head (Michel et al. 2019)",
        "ablation": f"change in loss without the head ({survey.ablated or 'silenced'}), nats per token",
    }
    columns = []
    for key, meaning in {**meanings, **effects}.items():
        values = [value_of(profile, key) for each in surveys for profile in each.profiles]
        known = [value.mean for value in values if value is not None]
        if key in effects and not known:
            continue
        followed = any(key == relation.name for relation in survey.relations)
        main = key in effects or followed or key in MAIN or len(shared) <= FEW
        columns.append(Column(key, label(key), meaning, decimals_for(known), key == "ablation", main))
    return tuple(columns)


def value_of(profile: HeadProfile | None, key: str) -> Interval | None:
    """A number of a head with its interval; importance has none, and n is 0 there."""
    if profile is None:
        return None
    if key == "importance":
        value = profile.importance
        return None if value is None else Interval(value, -math.inf, math.inf, 0)
    return profile.ablation if key == "ablation" else profile.scores.get(key)


def mean_of(profile: HeadProfile | None, key: str) -> float:
    """The number alone; nan where there is none."""
    value = value_of(profile, key)
    return math.nan if value is None else value.mean


def decimals_for(values: Iterable[float]) -> int:
    """So many decimals for a whole column that its largest number has three or four digits; at most six."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not largest:
        return 3
    order = math.floor(math.log10(largest))
    return max(0, 3 - order) if order >= 0 else min(6, 2 - order)


def badges_of(roles: Iterable[Role]) -> dict[str, Badge]:
    """A badge for each role, the same in every report; the letter is the first of its name that is not taken yet."""
    names = [role.name for role in roles]
    badges: dict[str, Badge] = {}
    for place, name in enumerate(dict.fromkeys([*(role.name for role in ROLES), *names])):
        taken = {badge.letter for badge in badges.values()}
        candidates = [*filter(str.isalpha, name.upper()), *string.ascii_uppercase, *string.digits]
        badges[name] = Badge(name, next((c for c in candidates if c not in taken), "?"), place % KINDS)
    return {name: badges[name] for name in names}


def short(role: str) -> str:
    """`previous` for the role `previous token`."""
    return role.removesuffix(" token")


def n_layers(survey: Survey) -> int:
    return len({(profile.part, profile.layer) for profile in survey.profiles})


def extent(survey: Survey) -> tuple[str, str]:
    """How many heads in how many layers, and how many tokens in how many documents."""
    heads = f"{plural(len(survey), 'head')} in {plural(n_layers(survey), 'layer')}"
    return heads, f"{plural(survey.n_tokens, 'token')} in {plural(survey.n_documents, 'document')}"


def earners(survey: Survey) -> dict[str, list[str]]:
    """For each role the names of the heads that have it."""
    return {role.name: [p.name for p in survey.profiles if role.name in p.roles] for role in survey.roles}


def paired(survey: Survey, against: Survey | None) -> list[tuple[HeadProfile, HeadProfile | None]]:
    """Each head with that of the same name in `against`."""
    others = {} if against is None else {profile.name: profile for profile in against.profiles}
    return [(profile, others.get(profile.name)) for profile in survey.profiles]


def only_here(survey: Survey, against: Survey | None) -> list[tuple[str, str]]:
    """Of two models each that has heads which the other does not have, and the names of those."""
    if against is None:
        return []
    missing = [
        (first.model, ", ".join(profile.name for profile, other in paired(first, second) if other is None))
        for first, second in ((survey, against), (against, survey))
    ]
    return [(model, names) for model, names in missing if names]


def both_names(profile: HeadProfile, other: HeadProfile | None) -> str:
    """The name of a head, and in brackets that of the head it is compared with, where it is another."""
    was = "" if other is None else other.was
    return profile.name if was in ("", profile.name) else f"{profile.name} ({was})"


def notes_of(survey: Survey, against: Survey | None) -> list[str]:
    """The notes of a survey; what keeps two from being compared number by number; and which heads are compared."""
    notes = list(survey.notes)
    if against is None:
        return notes
    sizes = [{(p.part, p.layer, p.head) for p in each.profiles} for each in (survey, against)]
    if sizes[0] != sizes[1] and not any(profile.was for profile in against.profiles):
        notes.append(
            f"{survey.model} and {against.model} do not have the same layers and heads, and neither is known to come "
            f"from the other: heads are compared by name alone."
        )
    if any(both_names(profile, other) != profile.name for profile, other in paired(survey, against)):
        notes.append(
            f"Heads of {survey.model} are compared with those of {against.model} that they belong to; where the name "
            f"there is another, it stands in brackets."
        )
    for first, second in ((survey, against), (against, survey)):
        extra = [label(key) for key in first.statistics if key not in second.statistics]
        if extra:
            notes.append(f"Only {first.model} has {', '.join(extra)}; left out of the comparison.")
    if survey.tokens != against.tokens or survey.n_tokens != against.n_tokens:
        notes.append(
            f"{survey.model} was looked at on {survey.n_tokens:,} tokens and {against.model} on "
            f"{against.n_tokens:,}, and the tokens are not the same: a difference may come from the text."
        )
    if survey.ablated != against.ablated:
        notes.append(
            f"Heads of {survey.model} were silenced by {survey.ablated or 'nothing'}, "
            f"those of {against.model} by {against.ablated or 'nothing'}."
        )
    return notes
