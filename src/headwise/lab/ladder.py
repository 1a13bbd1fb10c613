"""The ladder: one set of weights through every way to compute attention, from scalar loops to the fused kernel.

First the certificate: how far each rung is from the plain loop, at every stage that it hands out and in every gradient,
in float64, and in its output once more, computed exactly as it will be timed. Then the price, only of rungs that agree.

How far apart two right rungs may be is not guessed. `Bounded` computes, beside the numbers, the most by which rounding
can have moved each of them.

Axis letters as in `headwise.spec`. A matrix is (out,in), as in torch's Linear: y = W x.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.profiler import profile

from headwise.errors import HeadwiseError
from headwise.lab.ladder_rungs import RUNGS, Forward, Rung
from headwise.lab.rounding import LEAVES, UNIT, layer_bounds
from headwise.records import Ladder, LadderRung, LadderSizes
from headwise.rungs.autograd import Value, dot
from headwise.spec import require_size

Array = NDArray[np.float64]
Report = Callable[[str, int, int], None]  # is told what begins, how many tasks are done, how many there are

STAGES = ("q", "k", "v", "scores", "weights", "heads", "joined", "output")
TIMED_DTYPE = {"plain": "float64", "array": "float32", "tensor": "float32"}
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
    extra: Sequence[Rung] = (),
    report: Report | None = None,
) -> Ladder:
    """Run one causal attention layer on every rung: the certificate, then the costs of the rungs that agree.

    width     of the tokens; heads of width / heads each
    kv_heads  key/value heads, a divisor of heads; default as many as heads
    repeats   timed calls of each rung, in turn, the median counts; fewer where together they would take much longer
              than `longest`
    seed      of the weights W_Q, W_K, W_V, W_O (standard normal times 1/sqrt(width)) and of x (standard normal)
    longest   seconds; the scalar loops are not timed when one call would take longer
    extra     more rungs, held to the same
    report    is told each task as it begins: its name, how many are done, how many there are

    A size too large for the scalar loops is certified at a smaller one; `certified` and `note` say so. The costs are of
    forward calls without gradients, in float32 (scalars: float64). Memory is the most that a call held at a time
    besides weights and input: Python and NumPy by tracemalloc, torch by the allocations its profiler records, which
    leaves out only what a foreign library takes for itself. HeadwiseError for sizes that do not fit.
    """
    sizes = _checked(width, heads, kv_heads, tokens, batch, repeats, seed)
    rungs = (*RUNGS, *extra)
    tell = report or (lambda text, done, total: None)
    small, total = certificate_sizes(sizes), 2 * len(rungs) + 1
    with torch.random.fork_rng(devices=[]):  # the modules draw weights of their own before they are given these
        certificate = _Certificate(small, seed)
        results = []
        for i, rung in enumerate(rungs):
            tell(f"certify {rung.name}", i, total)
            results.append(certificate.certify(rung))
        problem, calls = _draw(sizes, seed), []
        for i, rung in enumerate(rungs):
            tell(f"call {rung.name}", len(rungs) + i, total)
            estimate = certificate.seconds * _work(sizes) / _work(small) if rung.kind == "plain" else 0.0
            calls.append(_Timed(rung, sizes, problem, repeats, longest, estimate) if results[i].agrees else None)
        tell("time all in turn", total - 1, total)
        for _ in range(repeats):  # in turn, so that a slow moment of the machine is shared
            for call in calls:
                if call is not None:
                    call.once_more()
    tell("done", total, total)
    timed = [one if call is None else call.priced(one) for one, call in zip(results, calls, strict=True)]
    agree = all(one.agrees for one in timed if one.refused is None)
    threads = torch.get_num_threads()
    return Ladder(sizes, small, seed, threads, certificate.tolerances, tuple(timed), agree, _note(sizes, small))


def _note(sizes: LadderSizes, small: LadderSizes) -> str | None:
    if small == sizes:
        return None
    return (
        f"certified at batch {small.batch}, {small.tokens} tokens, width {small.width}, {small.heads} heads, "
        f"{small.kv_heads} key/value heads: the scalar loops would take too long at the size asked for"
    )


def _checked(
    width: int, heads: int, kv_heads: int | None, tokens: int, batch: int, repeats: int, seed: int
) -> LadderSizes:
    for name, value in (("width", width), ("heads", heads), ("tokens", tokens), ("batch", batch), ("repeats", repeats)):
        require_size(name, value)
    if kv_heads is not None:
        require_size("kv_heads", kv_heads)
    if seed < 0:
        raise HeadwiseError(f"seed={seed} is negative; pass 0 or more")
    if width % heads:
        raise HeadwiseError(f"heads={heads} does not divide width={width}; pass a width that {heads} divides")
    if heads % (kv_heads or heads):
        raise HeadwiseError(f"kv_heads={kv_heads} does not divide heads={heads}; query heads share in equal groups")
    return LadderSizes(batch, tokens, width, heads, kv_heads or heads)


def certificate_sizes(sizes: LadderSizes) -> LadderSizes:
    """The sizes themselves, or smaller ones that the scalar autograd gets through in about half a second."""
    now = {
        "batch": sizes.batch,
        "tokens": sizes.tokens,
        "head_dim": sizes.width // sizes.heads,
        "kv_heads": sizes.kv_heads,
        "group": sizes.heads // sizes.kv_heads,
    }
    least = {"batch": 2, "tokens": 11, "head_dim": 5, "kv_heads": 3, "group": 2}  # still tells all axes apart

    def made() -> LadderSizes:
        n_heads = now["kv_heads"] * now["group"]
        return LadderSizes(now["batch"], now["tokens"], n_heads * now["head_dim"], n_heads, now["kv_heads"])

    for name, floor in least.items():
        while _work(made()) > SCALAR_WORK and now[name] > floor:
            now[name] = max(floor, now[name] // 2)
    return made()


def _work(n: LadderSizes) -> float:
    """What a scalar loop has to do, in multiplications; a place of the attention map costs it about 100 besides."""
    kv_width = n.width // n.heads * n.kv_heads
    return n.batch * n.tokens * (2 * n.width * (n.width + kv_width) + n.tokens * (2 * n.width + 100 * n.heads))


def _draw(n: LadderSizes, seed: int) -> dict[str, Array]:
    """The leaves, in float64: the square matrices first, as course D draws them."""
    rng = np.random.default_rng(seed)
    kv_width = n.width // n.heads * n.kv_heads
    rows = {"W_Q": n.width, "W_K": kv_width, "W_V": kv_width, "W_O": n.width}
    leaves = {name: rng.standard_normal((count, n.width)) / math.sqrt(n.width) for name, count in rows.items()}
    return leaves | {"x": rng.standard_normal((n.batch, n.tokens, n.width))}


def _cast(leaves: Mapping[str, Array], kind: str, dtype: str) -> dict[str, Any]:
    """The leaves in a rung's kind of array."""
    if kind == "plain":
        return {name: array.tolist() for name, array in leaves.items()}
    cast = {name: array.astype(dtype) for name, array in leaves.items()}
    return cast if kind == "array" else {name: torch.from_numpy(array) for name, array in cast.items()}


class _Certificate:
    """One draw, what the plain loop makes of it, and the tolerances; rungs are then held to it one by one."""

    def __init__(self, sizes: LadderSizes, seed: int) -> None:
        self.sizes = sizes
        self.leaves = _draw(sizes, seed)
        self.cotangent = np.random.default_rng([seed, 1]).standard_normal(self.leaves["x"].shape)
        wide, narrow = (layer_bounds(self.leaves, self.cotangent, sizes.heads, sizes.kv_heads, dtype) for dtype in UNIT)
        self.tolerances = {name: 2 * bound for name, bound in wide.items()}
        self.tolerances["timed float64"] = 2 * wide["output"]
        self.tolerances["timed float32"] = wide["output"] + narrow["output"]
        plain = RUNGS[0]
        began = time.perf_counter()
        self.steps = {name: _numbers(step) for name, step in self._steps(plain).items()}
        self.seconds = time.perf_counter() - began  # of a call of the scalar loops
        slopes = self._slopes(plain)
        assert slopes is not None
        self.slopes = slopes

    def certify(self, rung: Rung) -> LadderRung:
        """How far a rung is from the plain loop, everywhere."""
        n, dtype = self.sizes, TIMED_DTYPE[rung.kind]
        result = LadderRung(rung.name, rung.how, dtype)
        if n.kv_heads != n.heads and not rung.grouped:
            refused = f"it cannot share {n.kv_heads} key/value heads among {n.heads} heads"
            return replace(result, refused=refused, not_timed=refused)
        steps, slopes = self._steps(rung), self._slopes(rung)
        differences = {name: self._difference(name, steps[name], self.steps[name]) for name in STAGES if name in steps}
        gradients = None
        if slopes is not None:
            gradients = {name: self._difference(name, slopes[name], self.slopes[name]) for name in LEAVES}
        leaves = _cast(self.leaves, rung.kind, dtype)
        with torch.no_grad():
            timed = self._difference("output", rung.prepare(n, leaves)(leaves["x"], None), self.steps["output"])
        found = differences | (gradients or {}) | {f"timed {dtype}": timed}
        wrong = [name for name, far in found.items() if far is None or far > self.tolerances[name]]
        return replace(
            result,
            differences=differences,
            gradients=gradients,
            timed_difference=timed,
            agrees=not wrong,
            not_timed=f"it disagrees in {', '.join(wrong)}" if wrong else None,
        )

    def _steps(self, rung: Rung) -> dict[str, Any]:
        leaves = _cast(self.leaves, rung.kind, "float64")
        keep: dict[str, Any] = {}
        with torch.no_grad():
            output = rung.prepare(self.sizes, leaves)(leaves["x"], keep)
        return keep | {"output": output}

    def _slopes(self, rung: Rung) -> dict[str, Any] | None:
        """The slope of sum(output * cotangent) along every leaf, on the path that training takes."""
        if rung.kind == "array":
            return None
        leaves = _cast(self.leaves, rung.kind, "float64")
        if rung.kind == "tensor":
            for leaf in leaves.values():
                leaf.requires_grad_()
            output = rung.prepare(self.sizes, leaves)(leaves["x"], None)
            (output * torch.from_numpy(self.cotangent)).sum().backward()
            return {name: leaf.grad for name, leaf in leaves.items()}
        values = {name: np.vectorize(Value, otypes=[object])(array) for name, array in self.leaves.items()}
        leaves = {name: array.tolist() for name, array in values.items()}
        output = np.array(rung.prepare(self.sizes, leaves)(leaves["x"], None), dtype=object)
        loss = dot(output.ravel().tolist(), self.cotangent.ravel().tolist())
        assert isinstance(loss, Value)
        loss.backward()
        return {name: np.vectorize(lambda value: value.grad, otypes=[float])(array) for name, array in values.items()}

    def _difference(self, name: str, step: Any, expected: Array) -> float | None:
        """The largest absolute one; None when the shapes differ or a number is not finite."""
        found = _numbers(step)
        if name in ("k", "v"):  # a rung may hand out a copy for each query head
            expected, found = (self._for_each_head(x) for x in (expected, found))
        if found.shape != expected.shape:
            return None
        gap = abs(found - expected)
        if name == "scores":  # what stands where a query may not look is nobody's business
            gap = np.where(np.tri(self.sizes.tokens, dtype=bool), gap, 0)
        largest = float(gap.max())
        return largest if math.isfinite(largest) else None

    def _for_each_head(self, x_bgsd: Array) -> Array:
        one_a_group = x_bgsd.ndim == 4 and x_bgsd.shape[1] == self.sizes.kv_heads
        return x_bgsd.repeat(self.sizes.heads // self.sizes.kv_heads, axis=1) if one_a_group else x_bgsd


def _numbers(step: Any) -> Array:
    """Lists, arrays and tensors as a float64 array."""
    if step is None:
        return np.zeros(0)  # of no stage's shape
    return np.asarray(step.detach() if isinstance(step, torch.Tensor) else step, np.float64)


class _Timed:
    """A rung that agrees, made ready: called once for a start, once for its memory, and then to be timed."""

    def __init__(
        self,
        rung: Rung,
        sizes: LadderSizes,
        problem: Mapping[str, Array],
        repeats: int,
        longest: float,
        estimate: float,
    ) -> None:
        self.seconds: list[float] = []
        self.count = 0
        self.peak: int | None = None
        self.refused: str | None = None
        if estimate > longest:
            self.refused = f"a call would take about {estimate:.0f} s, more than longest={longest:g}"
            return
        leaves = _cast(problem, rung.kind, TIMED_DTYPE[rung.kind])
        self.forward, self.x = rung.prepare(sizes, leaves), leaves["x"]
        with torch.no_grad():
            # The first call pays for what is loaded and allocated at first use, so it counts only where it must.
            first = _seconds(self.forward, self.x)
            if first > longest:
                self.seconds = [first]
            self.count = min(repeats, math.ceil(longest / first)) if first <= longest else 0
            self.peak = (_torch_peak if rung.kind == "tensor" else _python_peak)(self.forward, self.x)

    def once_more(self) -> None:
        if self.count > 0:
            self.count -= 1
            with torch.no_grad():
                self.seconds.append(_seconds(self.forward, self.x))

    def priced(self, result: LadderRung) -> LadderRung:
        """The result with time and memory, or with the reason why not."""
        if self.refused is not None:
            return replace(result, not_timed=self.refused)
        ms = 1000 * statistics.median(self.seconds)
        return replace(result, ms=ms, repeats=len(self.seconds), peak_bytes=self.peak)


def _seconds(forward: Forward, x: Any) -> float:
    began = time.perf_counter()
    forward(x, None)
    return time.perf_counter() - began


def _python_peak(forward: Forward, x: Any) -> int:
    """The most bytes that Python and NumPy held at a time for a call."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        forward(x, None)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not running:
            tracemalloc.stop()


def _torch_peak(forward: Forward, x: Any) -> int:
    """The most bytes that torch's allocator held at a time for a call, its kernels' own room included."""
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
    """torch's profiler writes a line of its own, past Python, when it starts and when it stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
