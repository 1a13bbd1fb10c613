"""The ladder: one set of weights through every way to compute attention, from scalar loops to the fused kernel.

First the certificate (`ladder_certificate`), of each rung and of its output exactly as it will be timed. Then the price
of the rungs that agree.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler import profile

from headwise.errors import HeadwiseError
from headwise.lab.ladder_certificate import TIMED_DTYPE, Array, Certificate, cast_leaves, draw_leaves
from headwise.lab.ladder_rungs import RUNGS, Forward, Rung
from headwise.records import Ladder, LadderRung, LadderSizes
from headwise.spec import require_size

Report = Callable[[str, int, int], None]  # is told what begins, how many tasks are done, how many there are

SCALAR_WORK = 600_000  # what the scalar autograd does in about half a second; see `_work`


def run_ladder(
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    tokens: int = 16,
    batch: int = 1,
    repeats: int = 7,
    seed: int = 0,
    longest: float = 3.0,
    report: Report | None = None,
) -> Ladder:
    """Run one causal attention layer on every rung: the certificate, then the costs of the rungs that agree.

    width     of the tokens; heads of width / heads each
    kv_heads  key/value heads, a divisor of heads; default as many as heads
    repeats   timed calls of each rung, in turn, the median counts; fewer where they would take long
    seed      of the weights W_Q, W_K, W_V, W_O (standard normal times 1/sqrt(width)) and of x (standard normal)
    longest   seconds; the scalar loops are not timed when one call would take longer

    What is too large for the scalar loops is certified at a smaller size: see `certified` and `note`. Costs are of
    forward calls without gradients, in float32 (scalars: float64). HeadwiseError for sizes that do not fit.
    """
    sizes = LadderSizes(batch, tokens, width, heads, heads if kv_heads is None else kv_heads)
    _check(sizes, repeats, seed)
    small, total = certificate_sizes(sizes), 2 * len(RUNGS) + 1
    tell = report or (lambda text, done, total: None)
    with torch.random.fork_rng(devices=[]):  # the modules draw weights of their own before they are given these
        certificate = Certificate(small, seed)
        results = []
        for i, rung in enumerate(RUNGS):
            tell(f"certify {rung.name}", i, total)
            results.append(replace(certificate.certify(rung), parameters=rung.parameters(sizes)))
        leaves, calls, scalar_call = draw_leaves(sizes, seed), {}, certificate.seconds * _work(sizes) / _work(small)
        for i, rung in enumerate(RUNGS):
            tell(f"call {rung.name}", len(RUNGS) + i, total)
            if rung.kind == "plain" and scalar_call > longest:
                reason = f"a call would take about {scalar_call:.0f} s, more than longest={longest:g}"
                results[i] = replace(results[i], not_timed=results[i].not_timed or reason)
            elif results[i].agrees:
                calls[i] = _Timed(rung, sizes, leaves, repeats, longest)
        tell("time all in turn", total - 1, total)
        for call in list(calls.values()) * repeats:  # in turn, so that a slow moment of the machine is shared
            call.once_more()
    tell("done", total, total)
    priced = tuple(calls[i].priced(result) if i in calls else result for i, result in enumerate(results))
    agree = all(result.agrees for result in priced if result.refused is None)
    note = f"certified at {small}: the scalar loops would take too long at the size asked for"
    threads = torch.get_num_threads()
    return Ladder(sizes, small, seed, threads, certificate.tolerances, priced, agree, None if small == sizes else note)


def _check(n: LadderSizes, repeats: int, seed: int) -> None:
    names = ("batch", "tokens", "width", "heads", "kv_heads", "repeats")
    for name, value in zip(names, (*vars(n).values(), repeats), strict=True):
        require_size(name, value)
    if seed < 0:
        raise HeadwiseError(f"seed={seed} is negative; pass 0 or more")
    if n.d_model % n.n_heads:
        raise HeadwiseError(
            f"heads={n.n_heads} does not divide width={n.d_model}; pass a width that {n.n_heads} divides"
        )
    if n.n_heads % n.n_kv_heads:
        raise HeadwiseError(
            f"kv_heads={n.n_kv_heads} does not divide heads={n.n_heads}; query heads share in equal groups"
        )


def certificate_sizes(sizes: LadderSizes) -> LadderSizes:
    """The sizes themselves, or smaller ones that the scalar autograd gets through in about half a second."""

    def sizes_of(batch: int, tokens: int, head_dim: int, kv_heads: int, group: int) -> LadderSizes:
        return LadderSizes(batch, tokens, kv_heads * group * head_dim, kv_heads * group, kv_heads)

    n = sizes
    axes = [n.batch, n.tokens, n.d_model // n.n_heads, n.n_kv_heads, n.n_heads // n.n_kv_heads]
    for i, least in enumerate((2, 11, 5, 3, 2)):  # still tells all axes apart
        while _work(sizes_of(*axes)) > SCALAR_WORK and axes[i] > least:
            axes[i] = max(least, axes[i] // 2)
    return sizes_of(*axes)


def _work(n: LadderSizes) -> float:
    """A scalar loop's multiplications; a place of the attention map costs it about 100 besides."""
    linear, attention = 2 * n.d_model * (n.d_model + n.kv_width), n.tokens * (2 * n.d_model + 100 * n.n_heads)
    return n.batch * n.tokens * (linear + attention)


class _Timed:
    """A rung made ready: called once for a start, once for its memory, and then to be timed."""

    def __init__(
        self, rung: Rung, sizes: LadderSizes, leaves: Mapping[str, Array], repeats: int, longest: float
    ) -> None:
        arrays = cast_leaves(leaves, rung.kind, TIMED_DTYPE[rung.kind])
        self.forward, self.x = rung.prepare(sizes, arrays), arrays["x"]
        self.seconds: list[float] = []
        self.count = 1
        self.once_more()
        # The first call pays for what is loaded and allocated at first use, so it counts only where it must.
        first = self.seconds[0]
        if first <= longest:
            self.seconds, self.count = [], min(repeats, math.ceil(longest / first))
        with torch.no_grad():
            self.peak = (_torch_peak if rung.kind == "tensor" else _python_peak)(self.forward, self.x)

    def once_more(self) -> None:
        if self.count > 0:
            self.count -= 1
            with torch.no_grad():
                self.seconds.append(_seconds(self.forward, self.x))

    def priced(self, result: LadderRung) -> LadderRung:
        ms = 1000 * statistics.median(self.seconds)
        return replace(result, ms=ms, repeats=len(self.seconds), peak_bytes=self.peak)


def _seconds(forward: Forward, x: Any) -> float:
    began = time.perf_counter()
    forward(x, None)
    return time.perf_counter() - began


def _python_peak(forward: Forward, x: Any) -> int:
    """The most bytes that Python and NumPy held at a time."""
    tracemalloc.start()
    try:
        forward(x, None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _torch_peak(forward: Forward, x: Any) -> int:
    """The most bytes that torch's allocator held at a time for a call."""
    with _quiet_stderr(), profile(use_kineto=False, profile_memory=True) as profiled:
        forward(x, None)
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """torch's profiler writes lines of its own, past Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
