"""Circuits in the terminal: the heads by their weights, and the paths between them that stand out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from headwise.markup import number, plural
from headwise.view.tables import print_table, say

MOST_PATHS = 20
SCORES = ("copies", "suppresses", "succeeds")
WAYS = {"q": "queries", "k": "keys", "v": "values"}


def print_circuits(console: Console, circuits: Mapping[str, Any]) -> None:
    """What `Circuits.plain` gives, as two tables; a share stands beside that of chance."""
    rows = []
    for name, head in circuits["heads"].items():
        shares = [share for score in SCORES for share in _share(head[score])]
        rows.append([name, number(head["qk_rank"], 1), number(head["ov_rank"], 1), *shares])
    known = [place for place in range(3, 9) if any(row[place] != "-" for row in rows)]
    heading = ("head", "rank QK", "rank OV", "copies", "chance", "suppresses", "chance", "succeeds", "chance")
    chosen = [0, 1, 2, *known]
    print_table(console, "heads by their weights", [heading[i] for i in chosen], [[r[i] for i in chosen] for r in rows])
    say(
        console,
        "rank: how many directions a head compares (QK) and moves (OV), as the exponential of the entropy of its "
        "singular values; copies, suppresses: share of tokens whose own logit it puts among the highest or the lowest",
    )
    paths = circuits["paths"]
    say(console, f"\n{plural(len(paths), 'path')} stronger than chance" + (":" if paths else "."))
    for path in paths[:MOST_PATHS]:
        beside = f"{path['score']:.2f}, random directions {path['baseline']:.2f}"
        say(console, f"  {path['receiver']} reads {path['sender']} through its {WAYS[path['at']]}: {beside}")
    if len(paths) > MOST_PATHS:
        say(console, f"  ... and {len(paths) - MOST_PATHS} more; --json lists them all")


def _share(scored: Mapping[str, float] | None) -> tuple[str, str]:
    return ("-", "-") if scored is None else (number(scored["share"], 2), number(scored["control"], 2))
