"""Circuits in the terminal: the heads by their weights, and the paths between them that stand out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from headwise.markup import number, plural
from headwise.table import Table, say

MOST_PATHS = 20
SCORES = ("copies", "suppresses", "succeeds")
WAYS = {"q": "queries", "k": "keys", "v": "values"}


def print_circuits(console: Console, circuits: Mapping[str, Any]) -> None:
    """What `Circuits.plain` gives, as two tables; a share stands beside that of chance."""
    rows = []
    for name, head in circuits["heads"].items():
        row = [name, number(head["qk_rank"], 1), number(head["ov_rank"], 1)]
        for score in SCORES:
            scored = head[score]
            row += ["-", "-"] if scored is None else [number(scored["share"], 2), number(scored["control"], 2)]
        rows.append(row)
    known = [place for place in range(3, 9) if any(row[place] != "-" for row in rows)]
    heading = ("head", "rank QK", "rank OV", "copies", "chance", "suppresses", "chance", "succeeds", "chance")
    chosen = [0, 1, 2, *known]
    table = Table(
        [heading[place] for place in chosen],
        [[row[place] for place in chosen] for row in rows],
        "heads by their weights",
        "rank: how many directions a head compares (QK) and moves (OV), as the exponential of the entropy of its "
        "singular values; copies, suppresses: share of tokens whose own logit it puts among the highest or the lowest",
    )
    table.print(console)
    paths = circuits["paths"]
    say(console, f"\n{plural(len(paths), 'path')} stronger than chance" + (":" if paths else "."))
    for path in paths[:MOST_PATHS]:
        beside = f"{path['score']:.2f}, random directions {path['baseline']:.2f}"
        say(console, f"  {path['receiver']} reads {path['sender']} through its {WAYS[path['at']]}: {beside}")
    if len(paths) > MOST_PATHS:
        say(console, f"  ... and {len(paths) - MOST_PATHS} more; the JSON lists them all")
