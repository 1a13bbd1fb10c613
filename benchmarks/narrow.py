"""`watch` over the plain pass of a narrow Llama: 6 layers, width 384, 8 heads on 2, random weights, float32.

There the statistics weigh most: little of the plain pass is products. All statistics of all heads, one document of
random tokens; both ways in turn, in an order that is drawn each time, within one process. Ratios are taken round by
round; processor time stands beside wall clock, for the machine may be busy.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import headwise as hw

LENGTHS = {256: 15, 1024: 7, 4096: 3}  # tokens, and rounds
VOCABULARY = 8192


def run(runs: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "max_position_embeddings": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads)).eval()  # type: ignore[arg-type]
    rows = []
    for length, rounds in LENGTHS.items():
        rows.append({"tokens": length} | _row(model, torch.randint(VOCABULARY, (1, length)), max(runs, rounds)))
        print(_line(rows[-1]), file=sys.stderr)
    return {"rows": rows, "table": "\n".join(map(_line, rows))}


@torch.no_grad()
def _row(model: Any, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    def plain() -> None:
        model(ids, use_cache=False)

    def watched() -> None:
        with hw.watch(model):
            model(ids, use_cache=False)

    ways: dict[str, Callable[[], None]] = {"plain": plain, "watch": watched}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    order = list(ways)
    for round_ in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            began = time.perf_counter(), time.process_time()
            ways[name]()
            if round_:  # the first warms up
                times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(times["watch"], times["plain"], strict=True)]
    wall, processor = (statistics.median(clock) for clock in zip(*ratios, strict=True))
    seconds = {name: statistics.median(clock[1] for clock in each) for name, each in times.items()}
    threads = torch.get_num_threads()
    return {"wall": wall, "processor": processor, "seconds": seconds, "rounds": rounds, "threads": threads}


def _line(row: dict[str, Any]) -> str:
    seconds = ", ".join(f"{name} {1000 * value:.0f}" for name, value in row["seconds"].items())
    return (
        f"{row['tokens']} tokens, {row['threads']} thread(s), {row['rounds']} rounds: watched over plain "
        f"x {row['processor']:.2f} processor, x {row['wall']:.2f} wall; processor ms {seconds}"
    )
