"""The scalar autograd: each operation against finite differences, and the graph walk."""

import sys

import pytest
from cases import read_table

from headwise.backends import autograd
from headwise.backends.autograd import Value, dot, number

TABLES = read_table("options")
A, B = 1.3, 0.7


@pytest.mark.parametrize("operation", TABLES["operations"])
def test_the_value_is_that_of_plain_floats_and_the_slope_that_of_finite_differences(operation: str) -> None:
    f = eval(f"lambda a, b: {operation}", vars(autograd))  # our own table
    a, b, step = Value(A), Value(B), 1e-5
    result = f(a, b)
    assert number(result) == pytest.approx(f(A, B), rel=1e-15)
    result.backward()
    # A central difference errs by about step^2 times the third derivative, and by rounding / step: both about 1e-10.
    assert a.grad == pytest.approx((f(A + step, B) - f(A - step, B)) / (2 * step), abs=1e-8)
    assert b.grad == pytest.approx((f(A, B + step) - f(A, B - step)) / (2 * step), abs=1e-8)


def test_slopes_of_dots_and_reuse() -> None:
    assert dot([1.0, 2.0], [3.0, 4.0]) == 11.0
    with pytest.raises(ValueError, match="zip"):
        dot([1.0], [1.0, 2.0])
    xs = [Value(1.0) for _ in range(7)]
    assert set(dot(xs, xs)._inputs) == set(xs)
    x = Value(3.0)
    (x * x + x).backward()
    assert x.grad == 2 * 3 + 1
    x = Value(3.0)
    dot([x], [x]).backward()
    assert x.grad == 6


def test_large_graphs_are_walked_once() -> None:
    # 2^60 paths from end to beginning, 60 nodes.
    x = node = Value(1.0)
    for _ in range(60):
        node = node + node
    node.backward()
    assert x.grad == 2.0**60
    assert sys.getrecursionlimit() < 50_000
    x = node = Value(1.0)
    for _ in range(50_000):
        node = node + 1.0
    node.backward()
    assert (node.data, x.grad) == (50_001.0, 1.0)
    x = Value(2.0)
    x.backward()
    assert x.grad == 1.0


def test_gradients_add_up() -> None:
    # Two losses over one parameter, as in gradient accumulation.
    x = Value(3.0)
    (x * 2.0).backward()
    (x * 5.0).backward()
    assert x.grad == 7
    # What the first walk left on the shared number is not sent down again by the second.
    x = Value(3.0)
    y = x * 2.0
    (y * 1.0).backward()
    (y * 1.0).backward()
    assert (y.grad, x.grad) == (2.0, 4.0)
