"""The ladder at two sizes: one causal attention layer on every rung, forward, float32 (the scalar loops: float64).

The small size has the scalar loops in it, the large one only what computes with whole arrays: there one call of the
loops would take hours. A rung has a time only if it was certified to compute the same function. The peers are the
course's two forms, NumPy and `torch.nn.MultiheadAttention`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from headwise.lab.ladder import run_ladder
from headwise.records import Ladder

SIZES = (
    {"batch": 1, "tokens": 256, "width": 64, "heads": 4},
    {"batch": 8, "tokens": 1024, "width": 768, "heads": 12},
)
LONGEST = 30.0  # seconds for all calls of a rung
PEER = "torch.nn"


def run(runs: int) -> dict[str, Any]:
    ladders = [run_ladder(**size, repeats=runs, longest=LONGEST, report=_say) for size in SIZES]
    return {"ladders": [asdict(ladder) for ladder in ladders], "table": "\n\n".join(map(_table, ladders))}


def _say(task: str, done: int, total: int) -> None:
    print(f"ladder {done}/{total}: {task}", file=sys.stderr)


def _table(ladder: Ladder) -> str:
    n = ladder.sizes
    peer = next(rung.ms for rung in ladder.rungs if rung.name == PEER)
    rows = [
        f"({n.batch},{n.tokens},{n.d_model}), {n.n_heads} heads, {ladder.threads} torch threads",
        "rung                  ms  of torch.nn      MiB  output differs by",
    ]
    for rung in ladder.rungs:
        if rung.ms is None or rung.peak_bytes is None:
            rows.append(f"{rung.name:14}  {rung.not_timed}")
            continue
        ratio = "" if peer is None else f"{rung.ms / peer:.2f}"
        costs = f"{rung.ms:8.2f}  {ratio:>11}  {rung.peak_bytes / 2**20:7.2f}"
        rows.append(f"{rung.name:14}  {costs}  {rung.timed_difference:17.0e}")
    return "\n".join(rows)
