"""Scalar reverse-mode differentiation: a number that remembers how it was made, in the manner of micrograd.

Each `Value` keeps the numbers it came from and the slope of itself along each of them. `backward` walks the graph
once from the end to the beginning and adds up slopes (the chain rule). `dot` is one node instead of 2n - 1, since
attention is made of dot products. The functions take plain floats too, so the loop backend runs with or without
gradients.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

_birth = itertools.count().__next__  # each call gives the next number


class Value:
    """One number, its gradient (filled by `backward`), and where it came from."""

    # A graph has very many Values: slots spare each of them a dict.
    __slots__ = ("_born", "_inputs", "_slopes", "data", "grad")

    def __init__(
        self, data: float, inputs: tuple[Value, ...] = (), slopes: Sequence[float] = ()
    ) -> None:
        self.data = data
        self.grad = 0.0
        self._inputs = inputs
        self._slopes = slopes  # d self / d input, one for each input
        # a Value is younger than its inputs: to sort by birth is to sort the graph
        self._born = _birth()

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
        return Value(
            self.data**exponent, (self,), (exponent * self.data ** (exponent - 1),)
        )

    def __neg__(self) -> Value:
        return self * -1.0

    def __sub__(self, other: Scalar) -> Value:
        return self + -other

    # A quotient is a product with a power, a difference a sum with the negative: so their slopes come by themselves.
    def __truediv__(self, other: Scalar) -> Value:
        return self * other**-1

    def __rsub__(self, other: float) -> Value:
        return -self + other

    def __rtruediv__(self, other: float) -> Value:
        return self**-1 * other

    __radd__ = __add__
    __rmul__ = __mul__

    def backward(self) -> None:
        """Fill `.grad` of every Value that this one depends on with d self / d that Value, added to what is there."""
        layer = {self}
        below = {self}
        while layer:
            layer = set().union(*[node._inputs for node in layer]) - below
            below |= layer
        # apart from `grad`, so that what an earlier walk left there is not sent down again
        slopes = defaultdict[Value, float](float)
        slopes[self] = 1.0  # d self / d self
        for node in sorted(below, key=attrgetter("_born"), reverse=True):
            slope = slopes[node]  # all that it has an effect on is younger
            node.grad += slope
            for parent, along in zip(node._inputs, node._slopes, strict=True):
                slopes[parent] += along * slope


Scalar = float | Value


def number(x: Scalar) -> float:
    """The plain number, without its history."""
    return x.data if isinstance(x, Value) else x


def exp(x: Scalar) -> Scalar:
    y = math.exp(number(x))
    return _node(y, (x,), [y])  # the slope of exp is exp itself


def log(x: Scalar) -> Scalar:
    return _node(math.log(number(x)), (x,), [1.0 / number(x)])


def tanh(x: Scalar) -> Scalar:
    y = math.tanh(number(x))
    return _node(y, (x,), [1.0 - y * y])  # the slope of tanh is 1 - tanh^2


def dot(xs: Sequence[Scalar], ys: Sequence[Scalar]) -> Scalar:
    """sum_i x_i y_i as a single node; a plain float when no Value takes part."""
    # `number`, without the price of a call
    x_data = [x.data if isinstance(x, Value) else x for x in xs]
    y_data = [y.data if isinstance(y, Value) else y for y in ys]
    total = sum([x * y for x, y in zip(x_data, y_data, strict=True)])
    # the slope along each x is its y, and along each y its x
    return _node(total, (*xs, *ys), y_data + x_data)


def _node(data: float, inputs: Sequence[Scalar], slopes: list[float]) -> Scalar:
    """A Value made of these inputs; a plain float when none of them is a Value."""
    if Value not in map(type, inputs):
        return data
    values = (x if isinstance(x, Value) else Value(x) for x in inputs)
    return Value(data, tuple(values), slopes)
