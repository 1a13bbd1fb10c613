"""What each bug of the catalogue changes in `headwise.teach.form`: for every bug the ways to write it."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

SWITCHES: Mapping[str, Sequence[Mapping[str, Any]]] = tomllib.loads(
    (files("headwise.teach") / "switches.toml").read_text(encoding="utf-8")
)
WEAK = (0.0, 1e-9, -1e-9, -1.0, 1.0)  # what is written for -inf where the source has no number that could be meant
STARTS = (1, -1, "tokens", "-tokens", 2, -2)  # how far queries may be ahead of keys


def changes(bug: str, base: Mapping[str, Any], fills: Sequence[float] = ()) -> Iterator[dict[str, Any]]:
    """Every way in which a bug changes a layer whose correct settings are `base`.

    fills  numbers of the learner's source that may stand in the place of a forbidden score
    """
    for change in (*_made(bug, base.get("rope"), fills), *SWITCHES[bug]):
        if any(key not in base or base[key] != value for key, value in change.items()):
            yield dict(change)


def _made(bug: str, rope: Any, fills: Sequence[float]) -> Iterator[Mapping[str, Any]]:
    """The ways that depend on the source, or on the layout that is right."""
    if bug == "mask-weak-fill":
        for weak in ([fill for fill in fills if fill > -1e4], WEAK):
            for at, by, fill in itertools.product(("scaled", "raw"), ("replace", "add"), weak):
                yield {"fill": fill, "fill_by": by, "fill_at": at}
    if bug == "group-axis":
        for axes, axis, way in itertools.product(("bgsd", "bsgd"), range(4), ("repeat", "tile")):
            if axis != axes.index("g"):
                yield {"group": (axes, axis, way)}
    if rope and bug == "rope-mixed-layout":
        turn, _, theta = rope
        other = "half" if turn == "interleaved" else "interleaved"
        right, wrong, still = (turn, turn, theta), (other, other, theta), ("none", "none", theta)
        yield from ({"rope": way} for way in ((turn, other, theta), (other, turn, theta)))
        pairs = (right, wrong), (wrong, right), (right, still), (still, right)
        yield from ({"rope": q, "rope_k": k} for q, k in pairs)
    if rope and bug == "rope-positions":
        yield from ({"start": start} for start in STARTS)
        yield {"rope": None}
