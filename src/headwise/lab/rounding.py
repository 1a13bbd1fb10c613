"""How far apart two right computations of one attention layer may be: numbers that carry a bound on their own error.

This is running error analysis (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.3): beside each
number stands the most by which rounding can have moved it, with sums taken in any order. Two computations, each within
its bound, differ by at most the sum of the two. It is a worst case, in which every rounding errs to the same side: real
differences are a thousandth of it or less. It never accuses a right rung, and in float64 a step taken in float32
already exceeds it, to say nothing of a wrong formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
LEAVES = ("W_Q", "W_K", "W_V", "W_O", "x")
EXP_ULPS = 20  # of the least exact exp in use: the vectorised one of torch's fused CPU kernels


class Bounded:
    """An array and a bound on the error of each of its numbers, for arithmetic with relative error `unit`."""

    def __init__(self, value: Array, error: Array | float, unit: float) -> None:
        self.value, self.unit = value, unit
        self.error = np.broadcast_to(np.asarray(error, np.float64), value.shape)

    @property
    def largest(self) -> float:
        """The largest error of any of the numbers."""
        return float(self.error.max())

    def move(self, change: Callable[[Array], Any]) -> Bounded:
        """The same numbers in other places: `change` reshapes, transposes, picks or repeats."""
        return Bounded(change(self.value), change(self.error), self.unit)

    def times(self, factor: float) -> Bounded:
        return Bounded(self.value * factor, abs(factor) * (self.error + 2 * self.unit * abs(self.value)), self.unit)

    def __matmul__(self, other: Bounded) -> Bounded:
        """A sum of n products has the relative error n u / (1 - n u), whatever its order."""
        a, b, n = abs(self.value), abs(other.value), self.value.shape[-1]
        inherited = a @ other.error + self.error @ (b + other.error)
        own = self._sum_of(n) * ((a + self.error) @ (b + other.error))
        return Bounded(self.value @ other.value, inherited + own, self.unit)

    def __mul__(self, other: Bounded) -> Bounded:
        a, b = abs(self.value), abs(other.value)
        inherited = a * other.error + self.error * (b + other.error)
        own = self.unit * (a + self.error) * (b + other.error)
        return Bounded(self.value * other.value, inherited + own, self.unit)

    def __add__(self, other: Bounded) -> Bounded:
        return self._joined(self.value + other.value, other)

    def __sub__(self, other: Bounded) -> Bounded:
        return self._joined(self.value - other.value, other)

    def _joined(self, value: Array, other: Bounded) -> Bounded:
        inherited = self.error + other.error
        return Bounded(value, inherited + self.unit * (abs(value) + inherited), self.unit)

    def row_sums(self) -> Bounded:
        """Sums along the last axis, which stays with length 1."""
        error = (self.error + self._sum_of(self.value.shape[-1]) * (abs(self.value) + self.error)).sum(
            -1, keepdims=True
        )
        return Bounded(self.value.sum(-1, keepdims=True), error, self.unit)

    def softmax(self, allowed: NDArray[np.bool_]) -> Bounded:
        """Along the last axis, over the allowed places; what is taken off before exp cancels.

        An error e of the exponent is a factor of exp(e). The denominator is off by no more than its worst term.
        """
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
    return {name: one.largest for name, one in bounded.items()}


def _split(y_btc: Bounded, d: int) -> Bounded:
    """(B,T,h*d) -> (B,h,T,d)"""
    B, T, width = y_btc.value.shape
    return y_btc.move(lambda a: a.reshape(B, T, width // d, d).swapaxes(1, 2))


def _rows(y_bhtd: Bounded) -> Bounded:
    """(B,h,T,d) -> (B*T,h*d)"""
    B, h, T, d = y_bhtd.value.shape
    return y_bhtd.move(lambda a: a.swapaxes(1, 2).reshape(B * T, h * d))


def _turned(y: Bounded) -> Bounded:
    return y.move(lambda a: a.swapaxes(-1, -2))
