"""Continuing a text as a stranger does it: `hw.generate(model, ids, n)` beside `model.generate` of transformers.

Gemma 3 270M in bfloat16 (`build/models/gemma-3-270m`; without it random weights of its shape) and a Llama of 45 M
random weights in float32. Greedy. Nothing is made before: the times to the first token and of each later one are what
a caller waits, and a form is made between the first token and the second. Both sides take turns, in an order that is
drawn each time, within one process; processor time stands beside wall clock, for the machine may be busy.
"""

from __future__ import annotations

import copy
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from benchmarks.decode import NEW, SHAPE, _transformers
from headwise.gpt.gpt import GPT, GPTConfig

GEMMA = Path("build/models/gemma-3-270m")
PROMPTS = (64, 2048)
Times = list[tuple[float, float]]  # wall clock and processor, when it began and when each token came


def run(runs: int) -> dict[str, Any]:
    rows = []
    for name, make in (("Llama 45 M, float32", _llama), ("Gemma 3 270M, bfloat16", _gemma)):
        model = make()
        for tokens in PROMPTS:
            rows.append({"model": name, "prompt": tokens} | _row(model, tokens, max(3, runs)))
            print(_line(rows[-1]), file=sys.stderr)
    return {"rows": rows, "table": "\n".join(map(_line, rows))}


def compiled(runs: int) -> dict[str, Any]:
    """The Llama again, beside itself compiled, with the static cache that a compiler wants; the first call compiles."""
    model = _llama()
    other = copy.deepcopy(model)
    other.forward = torch.compile(other.forward)
    row = {"model": "Llama 45 M, float32", "prompt": 64} | _row(model, 64, max(3, runs), other)
    return {"rows": [row], "table": _line(row)}


def _llama() -> Any:
    torch.manual_seed(0)
    return _transformers(GPT(GPTConfig(**SHAPE, context=4096)).eval())  # type: ignore[arg-type]


def _gemma() -> Any:
    if GEMMA.is_dir():
        return hw.open(GEMMA)
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    print(f"{GEMMA} is not there (`make models`); random weights of its shape", file=sys.stderr)
    torch.manual_seed(0)
    shape = {"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, eos_token_id=None)).eval().bfloat16()  # type: ignore[arg-type]


def _row(model: Any, tokens: int, runs: int, compiled: Any = None) -> dict[str, Any]:
    ids = torch.randint(3, 8000, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    ways: dict[str, Callable[[], tuple[list[int], Times]]] = {
        "stock": lambda: _stock(model, ids),
        "ours": lambda: _ours(model, ids),
    }
    if compiled is not None:
        ways["compiled"] = lambda: _stock(compiled, ids, cache_implementation="static")
    first: dict[str, list[tuple[float, ...]]] = {}
    later: dict[str, list[tuple[float, ...]]] = {}
    whole: dict[str, list[tuple[float, ...]]] = {}
    same = True
    for round_ in range(runs + 1):
        texts, order = [], list(ways)
        random.shuffle(order)
        for name in order:
            text, times = ways[name]()
            texts.append(text)
            steps = [[b - a for a, b in itertools.pairwise(clock)] for clock in zip(*times, strict=True)]
            if round_:  # the first warms up
                first.setdefault(name, []).append(tuple(clock[0] for clock in steps))
                later.setdefault(name, []).append(tuple(statistics.median(clock[2:]) for clock in steps))
                whole.setdefault(name, []).append(tuple(map(sum, steps)))
        same = same and all(text == texts[0] for text in texts)
    return {
        "threads": torch.get_num_threads(),
        "rounds": runs,
        "same": same,
        "first_ms": {name: _middle(values) for name, values in first.items()},
        "token_ms": {name: _middle(values) for name, values in later.items()},
        "over": {
            side: {
                "first token": _ratios(first, side),
                "later token": _ratios(later, side),
                "all": _ratios(whole, side),
            }
            for side in list(ways)[1:]
        },
    }


def _middle(values: list[tuple[float, ...]]) -> list[float]:
    """Medians, in milliseconds, of wall clock and processor."""
    return [1000 * statistics.median(clock) for clock in zip(*values, strict=True)]


def _ratios(values: dict[str, list[tuple[float, ...]]], side: str) -> list[float]:
    """The time of stock over that of a side, round by round: medians of wall clock and processor."""
    rounds = [
        [stock / other for stock, other in zip(*pair, strict=True)]
        for pair in zip(values["stock"], values[side], strict=True)
    ]
    return [statistics.median(clock) for clock in zip(*rounds, strict=True)]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _ours(model: Any, ids: torch.Tensor) -> tuple[list[int], Times]:
    times, text = [_now()], []
    for token in hw.generate(model, ids[0].tolist(), NEW, temperature=0.0):
        text.append(token)
        times.append(_now())
    return text, times


def _stock(model: Any, ids: torch.Tensor, **options: Any) -> tuple[list[int], Times]:
    from transformers import StoppingCriteriaList

    times = [_now()]

    def note(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        times.append(_now())
        return torch.zeros(len(ids), dtype=torch.bool)

    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([note]), **options,
    )  # fmt: skip
    return text[0, ids.shape[1] :].tolist(), times


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['model']}, prompt {row['prompt']}, {row['threads']} thread(s), {row['rounds']} rounds:"]
    for side, ratios in row["over"].items():
        told = (f"{what} x {wall:.2f} wall, x {own:.2f} processor" for what, (wall, own) in ratios.items())
        parts.append(f"{side} {', '.join(told)};")
    ms = "; ".join(
        f"{side} {row['first_ms'][side][1]:.0f} and {row['token_ms'][side][1]:.1f}" for side in row["first_ms"]
    )
    return " ".join(parts) + f" processor ms {ms}; the same tokens: {row['same']}"
