"""Tokens a second of a 45 M GPT, random weights, beside transformers' `generate` and beside the bound.

12 layers, width 512, 8 heads on 2, feed-forward 1536, vocabulary 8,192, float32, greedy, random prompts. The bound: the
same products of the same rows and one fused attention call a layer, nothing else. All sides in turn within each round.
transformers' static cache with compile was not measured; a compiled step of ours took 31 s to make and was slower.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

import headwise as hw
from benchmarks import attention, llamacpp
from headwise.gpt.generate import Decoder
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.models.generate import decode_form, decode_loss, steps

SHAPE = {"n_layers": 12, "d_model": 512, "n_heads": 8, "n_kv_heads": 2, "d_ff": 1536, "vocab_size": 8192}
CASES = ((64, 1), (2048, 1), (64, 8))  # tokens of a prompt, texts side by side
NEW = 32


def run(runs: int, cases: tuple[tuple[int, int], ...] = CASES) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, context=4096)).eval()  # type: ignore[arg-type]
    theirs, rows = _transformers(model), []
    with TemporaryDirectory() as folder:
        others = llamacpp.readers(theirs, Path(folder), 4096)
    for tokens, batch in cases:
        began = time.perf_counter()
        forms = {"fp32": decode_form(model, rows=batch)}
        made = time.perf_counter() - began
        forms["int8"] = decode_form(model, int8=True, rows=batch)
        rows.append(
            _row(theirs, forms, others, tokens, batch, max(3, runs))
            | {"tokens": tokens, "batch": batch, "made_s": made}
        )
        print(_line(rows[-1]), file=sys.stderr)
    step = attention.decode(runs) if cases == CASES else {"table": ""}
    return {"rows": rows, "attention": step, "table": "\n".join([*map(_line, rows), step["table"]])}


def _transformers(model: GPT) -> Any:
    """The same weights in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headwise.gpt.checkpoint import hf_config, to_hf

    config = hf_config(model.config, None)
    config = {name: value for name, value in config.items() if name not in ("headwise", "architectures", "model_type")}
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    theirs.load_state_dict(to_hf(model))
    return theirs


class _Clock:
    """A streamer of transformers that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _row(
    theirs: Any, forms: dict[str, Decoder], others: dict[str, Any], tokens: int, batch: int, runs: int
) -> dict[str, Any]:
    prompts = torch.randint(SHAPE["vocab_size"], (batch, tokens))
    prefill: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for round_ in range(runs + 1):
        sides = [*_sides(theirs, forms, prompts)]
        if batch == 1:
            sides += [(name, llamacpp.greedy(reader, prompts[0].tolist(), NEW)) for name, reader in others.items()]
        for name, times in sides:
            if round_:
                prefill.setdefault(name, []).append(times[1] - times[0])
                each = [after - before for before, after in itertools.pairwise(times[1:])]
                rates.setdefault(name, []).append(batch / statistics.median(each))
    text = next(iter(hw.generate_batch(forms["fp32"], [prompts[0].tolist()], 64)))
    return {
        "threads": torch.get_num_threads(),
        "prefill_s": {name: statistics.median(each) for name, each in prefill.items()},
        "tokens_per_s": {name: [statistics.median(each), min(each), max(each)] for name, each in rates.items()},
        "of_bound": _ratio(rates["fp32"], rates["bound"]),
        **{name: _ratio(rates[name], rates["transformers"]) for name in rates},
        "int8_loss": decode_loss(forms["int8"], text),
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _sides(theirs: Any, forms: dict[str, Decoder], prompts: torch.Tensor) -> Iterator[tuple[str, list[float]]]:
    """For each side when it began, and when each token came."""
    clock, began = _Clock(), time.perf_counter()
    with torch.no_grad():
        _transformers_generate(theirs, prompts, clock)
    yield "transformers", [began, *clock.times]
    for name, form in forms.items():
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in steps(form, prompts.tolist(), NEW, temperature=0.0)]
        yield name, times
    yield "bound", _bound(forms["fp32"], *prompts.shape)


def _transformers_generate(theirs: Any, prompts: torch.Tensor, clock: _Clock) -> None:
    """Its streamers take one text alone; a stopping rule that never stops is called after each step of any number."""

    def note(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        clock.put(ids)
        return torch.zeros(len(ids), dtype=torch.bool)

    from transformers import StoppingCriteriaList

    theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([note]),
    )  # fmt: skip


@torch.inference_mode()
def _bound(form: Decoder, batch: int, tokens: int) -> list[float]:
    spec, times = form.spec, [time.perf_counter()]
    q = torch.randn(batch, spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, spec.head_dim)
    cache = torch.randn(len(form.layers), 2, batch, spec.n_kv_heads, tokens + NEW // 2, spec.head_dim)
    wide, hidden = torch.randn(batch, SHAPE["d_model"]), torch.randn(batch, SHAPE["d_ff"])
    sizes = {"heads": (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim, "up": 2 * SHAPE["d_ff"]}
    place = {name: torch.empty(batch, size) for name, size in sizes.items()}
    out, logits = torch.empty_like(wide), torch.empty(batch, SHAPE["vocab_size"])
    for _ in range(NEW):
        for layer, (k, v) in zip(form.layers, cache, strict=True):
            layer.heads(wide, place["heads"])
            F.scaled_dot_product_attention(q, k, v)
            layer.out(wide, out)
            layer.up(wide, place["up"])
            layer.down(hidden, out)
        form.head(wide, logits)
        times.append(time.perf_counter())
    return times


def _line(row: dict[str, Any]) -> str:
    speeds = ", ".join(
        f"{name} {middle:.0f} ({low:.0f} to {high:.0f})" for name, (middle, low, high) in row["tokens_per_s"].items()
    )
    first = ", ".join(f"{name} {1000 * s:.0f}" for name, s in row["prefill_s"].items() if name != "bound")
    peers = "".join(f"; {name} x {row[name]:.2f}" for name in row["tokens_per_s"] if name.startswith("llama.cpp"))
    return (
        f"{row['batch']} x {row['tokens']} tokens, {row['threads']} threads, tokens/s: {speeds}; fp32 "
        f"x {row['fp32']:.2f} transformers, {row['of_bound']:.2f} of the bound; int8 x {row['int8']:.2f}{peers}, "
        f"{row['int8_loss']:.5f} nats a token lost; first token, ms: {first}; form made in {row['made_s']:.2f} s"
    )
