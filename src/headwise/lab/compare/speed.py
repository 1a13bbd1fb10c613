"""Claims that a clock settles: the forms that courses build, and decoding with shared keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lab.compare.results import Cell, Claim, Table
from headwise.lab.compare.timing import Times, in_turn, median_ratio, milliseconds
from headwise.lab.compare.verdict import of_all
from headwise.lab.courses.stacked import MultiHeadAttn, wrapper_from_class
from headwise.layer.importing.importers import from_course
from headwise.masks import Causal
from headwise.rungs.tensor import attend
from headwise.spec import Options

FASTER = 1.1  # from this ratio of speeds on: smaller ones are lost among other differences
CLASS, WRAPPER, FUSED = "vectorised class", "stacked wrapper", "fused"


class LayerSize(NamedTuple):
    """Of one call of a layer."""

    batch: int
    tokens: int
    width: int
    heads: int

    def __str__(self) -> str:
        return f"({self.batch},{self.tokens},{self.width}), {self.heads} heads"


LAYERS = (LayerSize(1, 16, 64, 8), LayerSize(16, 64, 128, 4), LayerSize(2, 1024, 768, 12))


def course_forms(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> tuple[Claim, Table]:
    """The stacked heads, the vectorised class and the fused layer, with the same weights: one function."""
    found = {size: _course_times(size, rounds) for size in sizes}
    ratios = {size: median_ratio(times, WRAPPER, CLASS) for size, times in found.items()}
    fused = {size: median_ratio(times, CLASS, FUSED) for size, times in found.items()}
    told = "; ".join(f"{ratios[size]:.2f} at {size}" for size in sizes)
    claim = Claim(
        "The vectorised class is faster than the wrapper that stacks single heads.",
        f"Time of the wrapper over that of the class, forward: {told}. The fused layer has {min(fused.values()):.1f} "
        f"to {max(fused.values()):.1f} times the speed of the class.",
        of_all([ratio >= FASTER for ratio in ratios.values()]),
        f"Holds if the class is at least {FASTER:g} times as fast at every size; does not hold if at none.",
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (str(size), *(milliseconds(times, name) for name in (WRAPPER, CLASS, FUSED)), ratios[size])
        for size, times in found.items()
    )
    columns = ("size", f"{WRAPPER}, ms", f"{CLASS}, ms", f"{FUSED}, ms", "wrapper / class")
    note = (
        f"Causal, forward, float32, one thread, medians of {rounds} rounds. All three compute one function of the "
        "same weights: the wrapper's heads have width d / h, and a projection follows."
    )
    return claim, Table("The forms of course C: (batch, tokens, width)", columns, rows, note)


def _course_times(size: LayerSize, rounds: int) -> Times:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        course = MultiHeadAttn(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        x = torch.randn(size.batch, size.tokens, size.width)
        ways: dict[str, nn.Module] = {
            WRAPPER: nn.Sequential(*wrapper_from_class(course)),
            CLASS: course,
            FUSED: from_course(course).layer,
        }
        return in_turn({name: partial(way, x) for name, way in ways.items()}, rounds)


DECODE_HEADS, DECODE_WIDTH = 32, 64
CACHED = (1024, 8192)


def decoding(cached: Sequence[int] = CACHED, rounds: int = 15) -> tuple[Claim, Table]:
    """One new token against cached keys and values, shared as they are or repeated for every query head."""
    found = {n: in_turn(_decode_ways(n), rounds) for n in cached}
    names = [name for name in next(iter(found.values())) if name != "MHA"]
    ratios = {n: {name: median_ratio(times, "MHA", name) for name in names} for n, times in found.items()}
    told = "; ".join(
        f"after {n:,} tokens " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.items())
        for n, each in ratios.items()
    )
    claim = Claim(
        "GQA and MQA decode faster than MHA.",
        f"Speed of the attention of a decode step relative to MHA: {told}.",
        of_all([ratio >= FASTER for each in ratios.values() for ratio in each.values()]),
        f"Holds if every way is at least {FASTER:g} times as fast as MHA, repeated or not; depends if some are; "
        "does not hold if none is.",
    )
    rows = tuple(
        (name, n, milliseconds(times, name), median_ratio(times, "MHA", name))
        for n, times in found.items()
        for name in times
    )
    columns = ("way", "cached tokens", "ms", "speed relative to MHA")
    note = (
        f"{DECODE_HEADS} query heads of {DECODE_WIDTH}, batch 1, attention alone, float32, one thread, medians of "
        f"{rounds} rounds. Repeated: K and V are copied for each query head before the call."
    )
    return claim, Table("One decode step, with and without repeated keys and values", columns, rows, note)


def _decode_ways(cached: int) -> dict[str, Callable[[], Tensor]]:
    """A way for each number of key/value heads, and the same after a repeat."""
    q = torch.ones(1, DECODE_HEADS, 1, DECODE_WIDTH)
    ways: dict[str, Callable[[], Tensor]] = {}
    for name, kv_heads in (("MHA", DECODE_HEADS), ("GQA", 8), ("MQA", 1)):
        k, v = (torch.ones(1, kv_heads, cached, DECODE_WIDTH) for _ in range(2))
        ways[name] = partial(attend, q, k, v, Options(mask=Causal()))
        if kv_heads < DECODE_HEADS:
            ways[f"{name}, repeated"] = partial(_repeated, q, k, v)
    return ways


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))
