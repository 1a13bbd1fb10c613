"""Claims that a clock settles: the forms that courses build, and decoding with shared keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lab.compare.results import FAILS, HOLDS, Cell, Claim, Table, of_all
from headwise.lab.compare.timing import Times, in_turn, median_ratio, milliseconds
from headwise.lab.courses.stacked import MultiHeadAttentionWrapper, MultiHeadAttn, wrapper_from_class
from headwise.layer.importing.importers import from_course
from headwise.masks import Causal
from headwise.rungs.tensor import attend
from headwise.spec import Options

FASTER = 1.1  # from this ratio of speeds on: smaller ones are lost among other differences
CLASS, WRAPPER, FUSED, PRINTED = "vectorised class", "stacked wrapper", "fused", "wrapper as printed"
COURSE = '"Build a Large Language Model (From Scratch)", section 3.6'


class LayerSize(NamedTuple):
    batch: int
    tokens: int
    width: int
    heads: int

    def __str__(self) -> str:
        return f"({self.batch},{self.tokens},{self.width}), {self.heads} heads"


LAYERS = (LayerSize(1, 16, 64, 8), LayerSize(16, 64, 128, 4), LayerSize(2, 1024, 768, 12))


def course_forms(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> tuple[Claim, Table]:
    """The stacked heads, the vectorised class and the fused layer, with the same weights: one function."""
    all_times = {size: _course_times(size, (WRAPPER, CLASS, FUSED), rounds) for size in sizes}
    ratios = {size: median_ratio(times, WRAPPER, CLASS) for size, times in all_times.items()}
    fused = {size: median_ratio(times, CLASS, FUSED) for size, times in all_times.items()}
    each = "; ".join(f"{ratios[size]:.2f} at {size}" for size in sizes)
    claim = Claim(
        "The vectorised class is faster than the wrapper that stacks single heads.",
        f"Time of the wrapper over that of the class, forward: {each}. The fused layer has {min(fused.values()):.1f} "
        f"to {max(fused.values()):.1f} times the speed of the class.",
        of_all([ratio >= FASTER for ratio in ratios.values()]),
        f"Holds if the class is at least {FASTER:g} times as fast at every size; does not hold if at none.",
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (str(size), *(milliseconds(times, name) for name in (WRAPPER, CLASS, FUSED)), ratios[size])
        for size, times in all_times.items()
    )
    columns = ("size", f"{WRAPPER}, ms", f"{CLASS}, ms", f"{FUSED}, ms", "wrapper / class")
    note = (
        f"Causal, forward, float32, one thread, medians of {rounds} rounds. All three compute one function of the "
        "same weights: the wrapper's heads have width d / h, and a projection follows."
    )
    return claim, Table(f"The forms of {COURSE}: (batch, tokens, width)", columns, rows, note)


def printed_wrapper(sizes: Sequence[LayerSize] = LAYERS, rounds: int = 9) -> tuple[Claim, Table]:
    """The wrapper as the course prints it, whose heads each have the whole of d_out, weighed and timed."""
    rows: list[tuple[Cell, ...]] = []
    same, each = [], []
    for size in sizes:
        layers = _course_layers(size)
        times = _course_times(size, (PRINTED, CLASS), rounds)
        x = torch.zeros(1, 1, size.width)
        with torch.no_grad():
            widths = {name: layers[name](x).shape[-1] for name in times}
        weights = {name: sum(p.numel() for p in layers[name].parameters()) for name in times}
        ratio = median_ratio(times, PRINTED, CLASS)
        same.append(widths[PRINTED] == widths[CLASS] and weights[PRINTED] == weights[CLASS])
        each.append(
            f"at {size} {weights[PRINTED]:,} weights against {weights[CLASS]:,}, an output {widths[PRINTED]:,} wide "
            f"against {widths[CLASS]:,}, and {ratio:.2f} times the time"
        )
        rows += [(f"{size}, {name}", weights[name], widths[name], milliseconds(times, name)) for name in times]
    claim = Claim(
        "The wrapper that stacks single heads and the vectorised class are two forms of one layer.",
        f"As printed, each head of the wrapper has the whole of d_out, and no projection follows: {'; '.join(each)}. "
        "With heads of width d_out / h and a projection they are one function.",
        HOLDS if all(same) else FAILS,
        "Holds if the printed wrapper has as many weights and as wide an output as the class at every size.",
    )
    note = f"d_in = d_out. Causal, forward, float32, one thread, medians of {rounds} rounds. After {COURSE}."
    return claim, Table(
        "The wrapper as printed", ("size and form", "weights", "width of the output", "ms"), tuple(rows), note
    )


def _course_layers(size: LayerSize) -> dict[str, nn.Module]:
    """With the same weights, but for the printed wrapper, which is another function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        course = MultiHeadAttn(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        printed = MultiHeadAttentionWrapper(size.width, size.width, size.tokens, 0.0, size.heads).eval()
        stacked = nn.Sequential(*wrapper_from_class(course))
        return {WRAPPER: stacked, CLASS: course, FUSED: from_course(course).layer, PRINTED: printed}


def _course_times(size: LayerSize, names: Sequence[str], rounds: int) -> Times:
    layers = _course_layers(size)
    x = torch.randn(size.batch, size.tokens, size.width, generator=torch.Generator().manual_seed(1))
    return in_turn({name: partial(layers[name], x) for name in names}, rounds)


DECODE_HEADS, DECODE_WIDTH = 32, 64
CACHED = (1024, 8192)


def decoding(cached: Sequence[int] = CACHED, rounds: int = 15) -> tuple[Claim, Table]:
    """One new token against cached keys and values, shared as they are or repeated for every query head."""
    all_times = {n: in_turn(_decode_ways(n), rounds) for n in cached}
    names = [name for name in next(iter(all_times.values())) if name != "MHA"]
    ratios = {n: {name: median_ratio(times, "MHA", name) for name in names} for n, times in all_times.items()}
    speeds = "; ".join(
        f"after {n:,} tokens " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.items())
        for n, each in ratios.items()
    )
    claim = Claim(
        "GQA and MQA decode faster than MHA.",
        f"Speed of the attention of a decode step relative to MHA: {speeds}.",
        of_all([ratio >= FASTER for each in ratios.values() for ratio in each.values()]),
        f"Holds if every way is at least {FASTER:g} times as fast as MHA, repeated or not; depends if some are; "
        "does not hold if none is.",
    )
    rows = tuple(
        (name, n, milliseconds(times, name), median_ratio(times, "MHA", name))
        for n, times in all_times.items()
        for name in times
    )
    columns = ("way", "cached tokens", "ms", "speed relative to MHA")
    note = (
        f"{DECODE_HEADS} query heads of {DECODE_WIDTH}, batch 1, attention alone, float32, one thread, medians of "
        f"{rounds} rounds. Repeated: K and V are copied for each query head before the call."
    )
    return claim, Table("One decode step, with and without repeated keys and values", columns, rows, note)


def _decode_ways(cached: int) -> dict[str, Callable[[], Tensor]]:
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
