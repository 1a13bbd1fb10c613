"""Heads as a notebook shows them: a table with small pictures; one head in words. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.markup import escaped, number, picture, table

if TYPE_CHECKING:
    from headwise.heads.profiles import HeadProfile
    from headwise.heads.seen import Array, SeenHead

BLUE = "30,90,200"


def heads_table(
    heads: Sequence[SeenHead | HeadProfile], statistics: Iterable[str], columns: Mapping[str, Sequence[str]]
) -> str:
    """A line for each head: its picture, other `columns` of HTML, and the mean of each statistic."""
    names = list(statistics)
    rows = []
    for n, head in enumerate(heads):
        means = head.means
        cells = [column[n] for column in columns.values()]
        rows.append([escaped(head.name), _picture(head, 64), *cells, *(number(means.get(name), 3) for name in names)])
    return table(["head", "map", *columns, *map(escaped, names)], rows)


def head_card(head: SeenHead | HeadProfile, roles: str = "", drawn: str = "") -> str:
    """One head: its roles, its numbers in words, and its map, or what is drawn instead."""
    words = f" ({roles}) {in_words(head.means)}" if roles else f" {in_words(head.means)}"
    return f"<div><p><b>{escaped(head.name)}</b>{escaped(words)}</p>{drawn or _picture(head, 160)}</div>"


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
    style = "width:1.4em;height:1.4em"
    lines = []
    for token, line in zip(rows, weights.tolist(), strict=True):
        cells = (f'<div title="{p:.3f}" style="background:rgba({BLUE},{p:.3f});{style}"></div>' for p in line)
        lines.append([escaped(token), *cells])
    return table(["", *map(escaped, keys)], lines)


def _picture(head: SeenHead | HeadProfile, height: int) -> str:
    return picture(head.thumbnail.tolist(), f"{head.name}: keys to the right, queries downwards", height)
