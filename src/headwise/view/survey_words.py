"""How a survey is put into words: a sentence a head, columns, the signs of roles, what two surveys do not share."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable
from dataclasses import dataclass

from headwise.heads.table import ROLES, HeadProfile, Role, Survey
from headwise.intervals import Interval
from headwise.markup import number
from headwise.words import check_lang, key_of, marked, phrase, table

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
    """Ablation and importance where they were measured, then every statistic in the order of the survey.

    With `against`, statistics that only one of the two has are left out.
    """
    surveys = [survey] if against is None else [survey, against]
    shared = [key for key in survey.statistics if all(key in each.statistics for each in surveys)]
    meanings = {key: survey.statistics[key] for key in shared}
    effects = {
        "ablation": f"change in loss without the head ({survey.ablated or 'silenced'}), nats per token",
        "importance": "mean size of the loss's slope with respect to a gate on the head (Michel et al. 2019)",
    }
    columns = []
    for key, meaning in {**effects, **meanings}.items():
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
    """The notes of a survey, and those of a comparison in English."""
    return [*survey.notes, *(phrase(key, **values) for key, values in compared_notes(survey, against))]


def compared_notes(survey: Survey, against: Survey | None) -> list[tuple[str, dict[str, str]]]:
    """What keeps two surveys from being compared number by number, and which heads are compared: phrases, values."""
    if against is None:
        return []
    notes = []
    models = {"model": survey.model, "other": against.model}
    sizes = [{(p.part, p.layer, p.head) for p in each.profiles} for each in (survey, against)]
    if sizes[0] != sizes[1] and not any(profile.was for profile in against.profiles):
        notes.append(("against.sizes", models))
    if any(both_names(profile, other) != profile.name for profile, other in paired(survey, against)):
        notes.append(("against.brackets", models))
    for first, second in ((survey, against), (against, survey)):
        extra = ", ".join(label(key) for key in first.statistics if key not in second.statistics)
        if extra:
            notes.append(("against.statistics", {"model": first.model, "names": extra}))
    if survey.tokens != against.tokens or survey.n_tokens != against.n_tokens:
        counts = {"count": f"{survey.n_tokens:,}", "other_count": f"{against.n_tokens:,}"}
        notes.append(("against.tokens", models | counts))
    if survey.ablated != against.ablated:
        ways = {"how": survey.ablated or "nothing", "other_how": against.ablated or "nothing"}
        notes.append(("against.ablated", models | ways))
    return notes


# The roles from the most telling to the least; where a head has several, the first one makes the sentence.
TELLING = (
    "induction",
    "duplicate token",
    "previous token",
    "next token",
    "delimiter",
    "rare token",
    "positional",
    "self",
    "first token",
    "copying",
)
CLOSE = 0.0005  # nats; a smaller change rounds to nothing

Part = tuple[str, dict[str, str]]  # key of a phrase and its values


def head_sentence(survey: Survey, profile: HeadProfile, lang: str = "en", marks: tuple[str, str] = ("*", "*")) -> str:
    """`At *él* it looks at *write* (0.97; translation, 0.76 on average). Without it the loss rises by 0.67 nats.`

    lang  "en" or "es"; HeadwiseError for another

    Tokens stand between `*`. `head_parts` has the same as keys of phrases with their values.
    """
    check_lang(lang)
    return " ".join(marked(key, lang, _said(values, lang), marks) for key, values in head_parts(survey, profile))


def head_parts(survey: Survey, profile: HeadProfile) -> list[Part]:
    """The sentence as phrases of the words table and their values, which are text."""
    if profile.means.get("norm") == 0:
        return [("sentence.silent", {})]
    return [_look(survey, profile), *_effect(profile.ablation)]


def _look(survey: Survey, profile: HeadProfile) -> Part:
    followed = [name for name in profile.roles if name in profile.relations]
    if followed:
        role = max(followed, key=lambda name: profile.relations[name].mass.mean)
        score = profile.relations[role]
        looks, at, weight = score.example
        pair = {"looks": looks, "at": at, "weight": number(weight, 2)}
        return "sentence.relation", pair | {"role": role, "mean": number(score.mass.mean, 2)}
    scores = {role.name: role.score for role in survey.roles}
    for role in TELLING:
        if role in profile.roles:
            return key_of("sentence", role), {"mean": number(profile.means[scores[role]], 2)}
    if not profile.examples:
        return "sentence.nothing", {"mean": number(profile.means.get("confidence"), 2)}
    hardest = profile.examples[0]
    pair = {"looks": hardest.looks.strip(), "at": hardest.at.strip()}
    return "sentence.strongest", pair | {"weight": number(hardest.weight, 2)}


def _effect(change: Interval | None) -> list[Part]:
    """What silencing does; a change whose interval holds zero is not said to be one."""
    if change is None or math.isnan(change.mean):
        return []
    known = math.isfinite(change.low) and math.isfinite(change.high)
    if abs(change.mean) < CLOSE or (known and not change.excludes(0)):
        return [("sentence.unclear", {"change": number(change.mean, 3, signed=True)})]
    size = abs(change.mean)
    key = "sentence.rises" if change.mean > 0 else "sentence.falls"
    return [(key, {"change": number(size, 2 if size >= 0.1 else 3)})]


def _said(values: dict[str, str], lang: str) -> dict[str, str]:
    """The values, a role by its name in that language where it has one."""
    key = key_of("role", values.get("role", ""))
    return values | {"role": phrase(key, lang)} if key in table() else values
