"""The ladder's certificate: how far a rung is from the plain loop, and how far two right computations may be apart.

The tolerance comes from running error analysis (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section
3.3): beside each number stands the most by which rounding can have moved it, with sums in any order. It is a worst case
that never accuses a right rung; real differences are a thousandth of it, and in float64 a step taken in float32 exceeds
it.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.lab.ladder_rungs import RUNGS, Rung
from headwise.records import LadderRung, LadderSizes
from headwise.rungs.autograd import Value, dot

Array = NDArray[np.float64]

STAGES = ("q", "k", "v", "scores", "weights", "heads", "joined", "output")
LEAVES = ("W_Q", "W_K", "W_V", "W_O", "x")
TIMED_DTYPE = {"plain": "float64", "array": "float32", "tensor": "float32"}
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
EXP_ULPS = 20  # of the least exact exp in use: the vectorised one of torch's fused CPU kernels


def draw_leaves(n: LadderSizes, seed: int) -> dict[str, Array]:
    """The leaves, in float64: the square matrices first, as the NumPy course draws them."""
    rng = np.random.default_rng(seed)
    rows = {"W_Q": n.d_model, "W_K": n.kv_width, "W_V": n.kv_width, "W_O": n.d_model}
    leaves = {name: rng.standard_normal((count, n.d_model)) / math.sqrt(n.d_model) for name, count in rows.items()}
    return leaves | {"x": rng.standard_normal((n.batch, n.tokens, n.d_model))}


def cast_leaves(leaves: Mapping[str, Array], kind: str, dtype: str) -> dict[str, Any]:
    if kind == "plain":
        return {name: array.tolist() for name, array in leaves.items()}
    cast = {name: array.astype(dtype) for name, array in leaves.items()}
    return cast if kind == "array" else {name: torch.from_numpy(array) for name, array in cast.items()}


class Certificate:
    """One draw, what the plain loop makes of it, and the tolerances; rungs are then held to it one by one."""

    def __init__(self, sizes: LadderSizes, seed: int) -> None:
        self.sizes = sizes
        self.leaves = draw_leaves(sizes, seed)
        self.cotangent = np.random.default_rng([seed, 1]).standard_normal(self.leaves["x"].shape)
        wide, narrow = (
            layer_bounds(self.leaves, self.cotangent, sizes.n_heads, sizes.n_kv_heads, dtype) for dtype in UNIT
        )
        self.tolerances = {name: 2 * bound for name, bound in wide.items()}
        self.tolerances["timed float64"] = 2 * wide["output"]
        self.tolerances["timed float32"] = wide["output"] + narrow["output"]
        plain = RUNGS[0]
        began = time.perf_counter()
        self.steps = {name: _numbers(step) for name, step in self._steps(plain).items()}
        self.seconds = time.perf_counter() - began  # of a call of the scalar loops
        self.slopes = self._slopes(plain)

    def certify(self, rung: Rung) -> LadderRung:
        n, dtype = self.sizes, TIMED_DTYPE[rung.kind]
        result = LadderRung(rung.name, rung.how, dtype, rung.parameters(n))
        if n.n_kv_heads != n.n_heads and not rung.grouped:
            refused = f"it cannot share {n.n_kv_heads} key/value heads among {n.n_heads} heads"
            return replace(result, refused=refused, not_timed=refused)
        steps, slopes = self._steps(rung), {} if rung.kind == "array" else self._slopes(rung)
        differences = {name: self._difference(name, steps[name], self.steps[name]) for name in STAGES if name in steps}
        gradients = {name: self._difference(name, slope, self.slopes[name]) for name, slope in slopes.items()}
        leaves = cast_leaves(self.leaves, rung.kind, dtype)
        with torch.no_grad():
            timed = self._difference("output", rung.prepare(n, leaves)(leaves["x"], None), self.steps["output"])
        everything = differences | gradients | {f"timed {dtype}": timed}
        wrong = [name for name, far in everything.items() if far is None or far > self.tolerances[name]]
        return replace(
            result,
            differences=differences,
            gradients=gradients or None,
            timed_difference=timed,
            agrees=not wrong,
            not_timed=f"it disagrees in {', '.join(wrong)}" if wrong else None,
        )

    def _steps(self, rung: Rung) -> dict[str, Any]:
        leaves = cast_leaves(self.leaves, rung.kind, "float64")
        keep: dict[str, Any] = {}
        with torch.no_grad():
            output = rung.prepare(self.sizes, leaves)(leaves["x"], keep)
        return keep | {"output": output}

    def _slopes(self, rung: Rung) -> dict[str, Any]:
        """The slope of sum(output * cotangent) along every leaf, on the path that training takes."""
        leaves = cast_leaves(self.leaves, rung.kind, "float64")
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
        numbers, n = _numbers(step), self.sizes
        if name in ("k", "v") and numbers.ndim == 4 and numbers.shape[1] == n.n_kv_heads:
            numbers = numbers.repeat(n.n_heads // n.n_kv_heads, axis=1)  # the plain loop has a copy for each query head
        if numbers.shape != expected.shape:
            return None
        gap = abs(numbers - expected)
        if name == "scores":  # what stands where a query may not look does not count
            gap = np.where(np.tri(n.tokens, dtype=bool), gap, 0)
        largest = float(gap.max())
        return largest if math.isfinite(largest) else None


def _numbers(step: Any) -> Array:
    """Lists, arrays and tensors as a float64 array."""
    if step is None:
        return np.zeros(0)  # of no stage's shape
    return np.asarray(step.detach() if isinstance(step, torch.Tensor) else step, np.float64)


class Bounded:
    """An array and a bound on the error of each of its numbers, for arithmetic with relative error `unit`."""

    def __init__(self, value: Array, error: Array | float, unit: float) -> None:
        self.value, self.unit = value, unit
        self.error = np.broadcast_to(np.asarray(error, np.float64), value.shape)

    @property
    def largest(self) -> float:
        return float(self.error.max())

    def move(self, change: Callable[[Array], Any]) -> Bounded:
        """The same numbers in other places: `change` reshapes, transposes, picks or repeats."""
        return Bounded(change(self.value), change(self.error), self.unit)

    def times(self, factor: float) -> Bounded:
        return Bounded(self.value * factor, abs(factor) * (self.error + 2 * self.unit * abs(self.value)), self.unit)

    def __matmul__(self, other: Bounded) -> Bounded:
        """A sum of n products has the relative error n u / (1 - n u), whatever its order."""
        return self._product(operator.matmul, other, self._sum_of(self.value.shape[-1]))

    def __mul__(self, other: Bounded) -> Bounded:
        return self._product(operator.mul, other, self.unit)

    def _product(self, multiply: Callable[[Array, Array], Array], other: Bounded, rounding: float) -> Bounded:
        a, b = abs(self.value), abs(other.value) + other.error
        inherited = multiply(a, other.error) + multiply(self.error, b)
        added = rounding * multiply(a + self.error, b)
        return Bounded(multiply(self.value, other.value), inherited + added, self.unit)

    def __add__(self, other: Bounded) -> Bounded:
        value, inherited = self.value + other.value, self.error + other.error
        return Bounded(value, inherited + self.unit * (abs(value) + inherited), self.unit)

    def __sub__(self, other: Bounded) -> Bounded:
        return self + Bounded(-other.value, other.error, self.unit)

    def row_sums(self) -> Bounded:
        error = self.error + self._sum_of(self.value.shape[-1]) * (abs(self.value) + self.error)
        return Bounded(self.value.sum(-1, keepdims=True), error.sum(-1, keepdims=True), self.unit)

    def softmax(self, allowed: NDArray[np.bool_]) -> Bounded:
        """Over the allowed places of the last axis. An error e of the exponent is a factor of exp(e)."""
        top = np.where(allowed, self.value, -math.inf).max(-1, keepdims=True)
        below = np.where(allowed, self.value - top, 0)
        powers = np.where(allowed, np.exp(below), 0)
        weights = powers / powers.sum(-1, keepdims=True)
        exponent = np.where(allowed, self.error + 2 * self.unit * (abs(below) + EXP_ULPS), 0)
        factor = exponent + exponent.max(-1, keepdims=True) + self._sum_of(self.value.shape[-1] + 2)
        return Bounded(weights, weights * np.expm1(factor), self.unit)

    def _sum_of(self, n: int) -> float:
        return n * self.unit / (1 - n * self.unit)


def layer_bounds(
    leaves: Mapping[str, Array], cotangent: Array, n_heads: int, n_kv_heads: int, dtype: str
) -> dict[str, float]:
    """The largest error of every stage of a causal attention layer, and of every gradient (names W_Q to x).

    leaves     W_Q (C,C), W_K and W_V (g*d,C), W_O (C,C) and x (B,T,C), exact; float32 rounds them first
    cotangent  (B,T,C), the slope of the loss along the output
    """
    unit = UNIT[dtype]
    rounded = 0.0 if dtype == "float64" else unit
    w_q, w_k, w_v, w_o, x = (Bounded(leaves[name], rounded * abs(leaves[name]), unit) for name in LEAVES)
    slope = Bounded(cotangent, rounded * abs(cotangent), unit)
    B, T, _ = x.value.shape
    d, group = w_q.value.shape[0] // n_heads, n_heads // n_kv_heads
    q, k, v = (_split(x @ _turned(w), d) for w in (w_q, w_k, w_v))
    k_bhsd, v_bhsd = (y.move(lambda a: a.repeat(group, axis=1)) for y in (k, v))
    scores = (q @ _turned(k_bhsd)).times(1 / math.sqrt(d))
    weights = scores.softmax(np.tri(T, dtype=bool))
    heads = weights @ v_bhsd
    joined = _rows(heads)
    output = joined @ _turned(w_o)

    # Backward: for y = W x, dW = dy x' and dx = W' dy; through the softmax, ds = p (dp - sum p dp). Where query heads
    # share keys, their slopes add up: the heads of a group are folded into the rows of one product.
    def folded(y: Bounded) -> Bounded:
        return y.move(lambda a: a.reshape(B, n_kv_heads, group * T, -1))

    d_output, x_rows = (y.move(lambda a: a.reshape(B * T, -1)) for y in (slope, x))
    d_heads = _split((d_output @ w_o).move(lambda a: a.reshape(B, T, -1)), d)
    d_weights = d_heads @ _turned(v_bhsd)
    d_scores = (weights * (d_weights - (weights * d_weights).row_sums())).times(1 / math.sqrt(d))
    d_q = _rows(d_scores @ k_bhsd)
    d_k = _rows(_turned(folded(d_scores)) @ folded(q))
    d_v = _rows(_turned(folded(weights)) @ folded(d_heads))
    bounded = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "heads": heads, "joined": joined}
    bounded |= {"output": output, "x": d_q @ w_q + d_k @ w_k + d_v @ w_v, "W_O": _turned(d_output) @ joined}
    bounded |= {name: _turned(dy) @ x_rows for name, dy in (("W_Q", d_q), ("W_K", d_k), ("W_V", d_v))}
    return {name: array.largest for name, array in bounded.items()}


def _split(y_btc: Bounded, d: int) -> Bounded:  # (B,T,h*d) -> (B,h,T,d)
    B, T, width = y_btc.value.shape
    return y_btc.move(lambda a: a.reshape(B, T, width // d, d).swapaxes(1, 2))


def _rows(y_bhtd: Bounded) -> Bounded:  # (B,h,T,d) -> (B*T,h*d)
    B, h, T, d = y_bhtd.value.shape
    return y_bhtd.move(lambda a: a.swapaxes(1, 2).reshape(B * T, h * d))


def _turned(y: Bounded) -> Bounded:
    return y.move(lambda a: a.swapaxes(-1, -2))
