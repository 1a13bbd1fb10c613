"""`watch` over the plain pass of a narrow Llama: 6 layers, width 384, 8 heads on 2, random weights, float32.

Beside TransformerLens, where it is installed (`pip install transformer-lens`): its bridge over
the same weights keeps the maps and the values by head, from which the same statistics are made.

There the statistics weigh most: little of the plain pass is products. All statistics of all heads, one document of
random tokens; both ways in turn, in an order that is drawn each time, within one process. Ratios are taken round by
round; processor time stands beside wall clock, for the machine may be busy.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import headwise as hw
from benchmarks.heads import dense_statistics

LENGTHS = {256: 15, 1024: 7, 4096: 3}  # tokens, and rounds
VOCABULARY = 8192


def run(runs: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "max_position_embeddings": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads)).eval()  # type: ignore[arg-type]
    rows = []
    for length, rounds in LENGTHS.items():
        ids = torch.randint(VOCABULARY, (1, length))
        rows.append({"tokens": length} | _row(_ways(model.model, ids), max(runs, rounds)))
        print(_line(rows[-1]), file=sys.stderr)
    ids = torch.randint(VOCABULARY, (1, 256))
    bridge = _bridge(model)
    if bridge is not None:
        ways = {**_ways(model, ids), **_lens(bridge, ids)}
        rows.append({"tokens": 256} | _row(ways, max(runs, LENGTHS[256])))
        print(_line(rows[-1]), file=sys.stderr)
    return {"rows": rows, "table": "\n".join(map(_line, rows))}


def _ways(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    def plain() -> None:
        model(ids, use_cache=False)

    def watched() -> None:
        with hw.watch(model):
            model(ids, use_cache=False)

    return {"plain": plain, "watch": watched}


def _bridge(model: Any) -> Any:
    """TransformerLens over a copy of the model, whose modules it replaces; None where it is not installed."""
    try:
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    except ImportError as error:
        print(f"TransformerLens is not there ({error}): no row beside it", file=sys.stderr)
        return None
    return build_bridge_from_module(copy.deepcopy(model), "LlamaForCausalLM", hf_config=model.config)


def _lens(bridge: Any, ids: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Its cache of maps and of values by head alone, and with our statistics of them."""

    def wanted(name: str) -> bool:
        return name.endswith(("attn.hook_pattern", "attn.hook_z"))

    def cache() -> Any:
        return bridge.run_with_cache(ids, names_filter=wanted)[1]

    def lens() -> None:
        kept = cache()
        for layer, block in enumerate(bridge.blocks):
            dense_statistics(kept[f"blocks.{layer}.attn.hook_pattern"][0], ids[0])
            z = kept[f"blocks.{layer}.attn.hook_z"][0]  # (T,H,D)
            torch.einsum("thd,hdc->thc", z, block.attn.W_O).norm(dim=-1)

    return {"lens": lens, "lens, maps alone": cache}


@torch.no_grad()
def _row(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    order = list(ways)
    for round_ in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            began = time.perf_counter(), time.process_time()
            ways[name]()
            if round_:  # the first warms up
                times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    over: dict[str, list[float]] = {}  # watched over each other way, processor and wall clock
    for name in ways:
        pairs = zip(times["watch"], times[name], strict=True)
        ratios = [[ours / theirs for ours, theirs in zip(*pair, strict=True)] for pair in pairs]
        wall, processor = (statistics.median(clock) for clock in zip(*ratios, strict=True))
        over[name] = [processor, wall]
    del over["watch"]
    seconds = {name: statistics.median(clock[1] for clock in each) for name, each in times.items()}
    return {"over": over, "seconds": seconds, "rounds": rounds, "threads": torch.get_num_threads()}


def _line(row: dict[str, Any]) -> str:
    ratios = "; ".join(
        f"over {name} x {processor:.2f} processor, x {wall:.2f} wall" for name, (processor, wall) in row["over"].items()
    )
    seconds = ", ".join(f"{name} {1000 * value:.0f}" for name, value in row["seconds"].items())
    return (
        f"{row['tokens']} tokens, {row['threads']} thread(s), {row['rounds']} rounds: watched {ratios}; "
        f"processor ms {seconds}"
    )
