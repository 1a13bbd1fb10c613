"""Claims that a clock settles: the forms that courses build, and decoding with shared keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lab.compare.results import FAILS, HOLDS, Cell, Claim, Table, measured_claim, of_all
from headwise.lab.compare.timing import FASTER, Times, in_turn, median_ratio, milliseconds
from headwise.lab.courses.stacked import MultiHeadAttentionWrapper, MultiHeadAttn, wrapper_from_class
from headwise.layer.importing.importers import from_course
from headwise.masks import Causal
from headwise.rungs.tensor import attend
from headwise.spec import Options

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
    rows: list[tuple[Cell, ...]] = [
        (str(size), *(milliseconds(times, name) for name in (WRAPPER, CLASS, FUSED)), ratios[size])
        for size, times in all_times.items()
    ]
    verdict = of_all([ratio >= FASTER for ratio in ratios.values()])
    figures = {"slowest": min(fused.values()), "fastest": max(fused.values()), "bar": FASTER, "rounds": rounds}
    return measured_claim("course-forms", verdict, rows, each=each, course=COURSE, **figures)


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
    verdict, words = HOLDS if all(same) else FAILS, "; ".join(each)
    return measured_claim("printed-wrapper", verdict, rows, each=words, rounds=rounds, course=COURSE)


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
    rows = (
        (name, n, milliseconds(times, name), median_ratio(times, "MHA", name))
        for n, times in all_times.items()
        for name in times
    )
    verdict = of_all([ratio >= FASTER for each in ratios.values() for ratio in each.values()])
    figures = {"heads": DECODE_HEADS, "width": DECODE_WIDTH, "rounds": rounds, "bar": FASTER}
    return measured_claim("decoding", verdict, rows, speeds=speeds, **figures)


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
