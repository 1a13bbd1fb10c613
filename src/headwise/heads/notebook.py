"""What was seen of the heads, as a notebook shows it: a table with small pictures, and one head in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.markup import escaped, number, picture, table

if TYPE_CHECKING:
    from headwise.heads.seen import Array, SeenHead

BLUE = "30,90,200"


def heads_table(heads: Mapping[str, SeenHead]) -> str:
    """A line for each head: its picture, and the mean of each statistic."""
    names = list(dict.fromkeys(name for head in heads.values() for name in head.rows))
    rows = (
        [
            escaped(name),
            picture(head.thumbnail.tolist(), f"{name}: keys to the right, queries downwards", 64),
            *(number(head[key], 3) if key in head.rows else "" for key in names),
        ]
        for name, head in heads.items()
    )
    return table(["head", "map", *map(escaped, names)], rows)


def head_card(head: SeenHead) -> str:
    """One head: its numbers in words, and its map; on the tokens where the text is short enough."""
    drawn = (
        picture(head.thumbnail.tolist(), f"{head.name}: keys to the right, queries downwards", 160)
        if head.tokens is None
        else token_map(head.thumbnail, *head.tokens)
    )
    return f"<div><p><b>{escaped(head.name)}</b> {escaped(in_words(head))}</p>{drawn}</div>"


def in_words(head: SeenHead) -> str:
    """The main numbers of a head as one sentence."""
    parts = []
    if "distance" in head.rows:
        distance = head.distance
        parts.append(f"looks {abs(distance):.1f} tokens {'back' if distance >= 0 else 'ahead'} on average")
    parts.append(f"its largest weight is {head.confidence:.2f} on average")
    parts.append(f"{100 * head.first:.0f} % of its attention rests on the first token")
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
