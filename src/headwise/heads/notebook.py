"""Heads as a notebook shows them: a table with small pictures; one head in words. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.markup import escaped, number, picture, table

if TYPE_CHECKING:
    from headwise.heads.profiles import HeadProfile, Survey
    from headwise.heads.seen import Array, SeenHead

BLUE = "30,90,200"


def heads_table(heads: Mapping[str, SeenHead]) -> str:
    """A line for each head: its picture, and the mean of each statistic."""
    names = list(dict.fromkeys(name for head in heads.values() for name in head.rows))
    rows = (
        [
            escaped(name),
            _picture(name, head.thumbnail, 64),
            *(number(head[key], 3) if key in head.rows else "" for key in names),
        ]
        for name, head in heads.items()
    )
    return table(["head", "map", *map(escaped, names)], rows)


def head_card(head: SeenHead) -> str:
    """One head: its numbers in words, and its map; on the tokens where the text is short enough."""
    drawn = _picture(head.name, head.thumbnail, 160) if head.tokens is None else token_map(head.thumbnail, *head.tokens)
    words = in_words({name: head[name] for name in head.rows})
    return f"<div><p><b>{escaped(head.name)}</b> {escaped(words)}</p>{drawn}</div>"


def in_words(means: Mapping[str, float]) -> str:
    """The main numbers of a head as one sentence."""
    parts = []
    if "distance" in means:
        distance = means["distance"]
        parts.append(f"looks {abs(distance):.1f} tokens {'back' if distance >= 0 else 'ahead'} on average")
    parts.append(f"its largest weight is {means['confidence']:.2f} on average")
    parts.append(f"{100 * means['first']:.0f} % of its attention rests on the first token")
    sentence = "; ".join(parts) + "."
    return sentence[0].upper() + sentence[1:]


def token_map(weights: Array, rows: Sequence[str], keys: Sequence[str]) -> str:
    """The weights (T,S) as a table whose lines are the tokens that look, and whose columns those that are looked at."""
    lines = (
        [escaped(token), *(_cell(float(weight)) for weight in line)] for token, line in zip(rows, weights, strict=True)
    )
    return table(["", *map(escaped, keys)], lines)


def _cell(weight: float) -> str:
    style = f"background:rgba({BLUE},{weight:.3f});width:1.4em;height:1.4em"
    return f'<div title="{weight:.3f}" style="{style}"></div>'


def survey_table(survey: Survey) -> str:
    """A line for each head: its picture, its roles, what breaks without it, and the mean of each statistic."""
    rows = (
        [
            escaped(profile.name),
            _picture(profile.name, profile.thumbnail, 64),
            escaped(", ".join(profile.roles)),
            number(None if profile.ablation is None else profile.ablation.mean, 3, signed=True),
            *(number(profile.scores[key].mean, 3) if key in profile.scores else "" for key in survey.statistics),
        ]
        for profile in survey.profiles
    )
    return table(["head", "map", "roles", "loss without it", *map(escaped, survey.statistics)], rows)


def profile_card(profile: HeadProfile) -> str:
    """One head of a survey: its roles, its numbers in words, and its map of the first document."""
    roles = f" ({', '.join(profile.roles)})" if profile.roles else ""
    words = in_words({name: score.mean for name, score in profile.scores.items()})
    drawn = _picture(profile.name, profile.thumbnail, 160)
    return f"<div><p><b>{escaped(profile.name)}</b>{escaped(roles)} {escaped(words)}</p>{drawn}</div>"


def _picture(name: str, thumbnail: Array, height: int) -> str:
    return picture(thumbnail.tolist(), f"{name}: keys to the right, queries downwards", height)
