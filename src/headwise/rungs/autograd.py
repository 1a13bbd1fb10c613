"""Scalar reverse-mode differentiation: a number that remembers how it was made.

Each `Value` keeps the numbers it came from and the slope of itself along each of them. `backward` walks the graph
once from the end to the beginning and adds up slopes (the chain rule). `dot` is one node instead of 2n - 1, since
attention is made of dot products. The functions take plain floats too, so the plain rung runs with or without
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union


class Value:
    """One number, its gradient (filled by `backward`), and where it came from."""

    __slots__ = ("_inputs", "_slopes", "data", "grad")

    def __init__(self, data: float, inputs: tuple[Value, ...] = (), slopes: Sequence[float] = ()) -> None:
        self.data = data
        self.grad = 0.0
        self._inputs = inputs
        self._slopes = slopes  # d self / d input, one for each input

    def __repr__(self) -> str:
        return f"Value({self.data})"

    def __add__(self, other: Scalar) -> Value:
        if isinstance(other, Value):
            return Value(self.data + other.data, (self, other), (1.0, 1.0))
        return Value(self.data + other, (self,), (1.0,))

    def __mul__(self, other: Scalar) -> Value:
        if isinstance(other, Value):
            return Value(self.data * other.data, (self, other), (other.data, self.data))
        return Value(self.data * other, (self,), (other,))

    def __pow__(self, exponent: float) -> Value:
        return Value(self.data**exponent, (self,), (exponent * self.data ** (exponent - 1),))

    def __neg__(self) -> Value:
        return self * -1.0

    def __sub__(self, other: Scalar) -> Value:
        return self + -other

    def __truediv__(self, other: Scalar) -> Value:
        return self * other**-1

    def __rsub__(self, other: float) -> Value:
        return -self + other

    def __rtruediv__(self, other: float) -> Value:
        return self**-1 * other

    __radd__ = __add__
    __rmul__ = __mul__

    def relu(self) -> Value:
        return Value(max(0.0, self.data), (self,), (float(self.data > 0),))

    def backward(self) -> None:
        """Fill `.grad` of every Value that this one depends on with d self / d that Value, added to what is there."""
        self.grad += 1.0
        for node in reversed(self._ancestors()):
            for parent, slope in zip(node._inputs, node._slopes, strict=True):
                parent.grad += slope * node.grad

    def _ancestors(self) -> list[Value]:
        """All Values below this one, inputs before what is made of them. A stack of our own: graphs are deep."""
        order: list[Value] = []
        seen = {self}
        stack = [(self, iter(self._inputs))]
        while stack:
            node, inputs = stack[-1]
            for parent in inputs:
                if parent not in seen:
                    seen.add(parent)
                    stack.append((parent, iter(parent._inputs)))
                    break
            else:
                order.append(node)
                stack.pop()
        return order


Scalar = Union[float, Value]  # noqa: UP007  # Value is still a name in strings above when this line runs


def number(x: Scalar) -> float:
    """The plain number, without its history."""
    return x.data if isinstance(x, Value) else x


def exp(x: Scalar) -> Scalar:
    y = math.exp(number(x))
    return Value(y, (x,), (y,)) if isinstance(x, Value) else y


def log(x: Scalar) -> Scalar:
    y = math.log(number(x))
    return Value(y, (x,), (1.0 / x.data,)) if isinstance(x, Value) else y


def tanh(x: Scalar) -> Scalar:
    y = math.tanh(number(x))
    return Value(y, (x,), (1.0 - y * y,)) if isinstance(x, Value) else y


def dot(xs: Sequence[Scalar], ys: Sequence[Scalar]) -> Scalar:
    """sum_i x_i y_i as a single node; a plain float when no Value takes part."""
    x_data, y_data = [number(x) for x in xs], [number(y) for y in ys]
    total = sum(x * y for x, y in zip(x_data, y_data, strict=True))
    sides = [(x, slope) for x, slope in zip(xs, y_data, strict=True) if isinstance(x, Value)]
    sides += [(y, slope) for y, slope in zip(ys, x_data, strict=True) if isinstance(y, Value)]
    if not sides:
        return total
    return Value(total, tuple(v for v, _ in sides), tuple(slope for _, slope in sides))
