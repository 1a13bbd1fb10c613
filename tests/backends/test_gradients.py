"""Gradients: the loop backend against finite differences, the two torch paths against it; the scalar autograd."""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, read_table
from helpers import NOBODY, TORCH_PATHS, Sizes, assert_same, dead_keys, draw, mask_cases

import headwise as hw
from headwise.backends import autograd
from headwise.backends.autograd import Value, dot, number

Leaves = dict[str, np.ndarray]
Call = Callable[[dict[str, Any]], dict[str, Any]]  # what the leaves become on a backend -> the arguments of a call

GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=2, E=3)
SQUARE = GQA._replace(T=5, S=5)
DECODE = GQA._replace(T=1)


TABLES = read_table("options")
CASES: dict[str, tuple[Sizes, tuple[str, ...], Call]] = {
    name: (eval(n), tuple(learned), eval(f"lambda x: {call}"))  # our own table
    for name, (n, learned, call) in TABLES["gradients"].items()
}


def leaves_of(n: Sizes, names: tuple[str, ...]) -> Leaves:
    problem, rng = draw(n), np.random.default_rng(1)
    extra = {"sink": (n.H,), "gate": (n.H,), "slopes": (n.H,), "bias": (n.H, n.T, n.S)}
    return {"q": problem.q, "k": problem.k, "v": problem.v} | {name: rng.normal(size=extra[name]) for name in names}


def cotangent(n: Sizes) -> np.ndarray:
    """The loss is the output times these numbers, so that every output counts differently."""
    return np.random.default_rng(2).normal(size=(n.B, n.H, n.T, n.E))


def values(array: np.ndarray) -> Any:
    return np.vectorize(Value, otypes=[object])(array).tolist()


def plain_loss(leaves: dict[str, Any], call: Call, n: Sizes) -> Any:
    out = hw.attend(leaves["q"], leaves["k"], leaves["v"], **call(leaves))
    return (np.array(out, object) * cotangent(n)).sum()


def plain_gradients(leaves: Leaves, call: Call, n: Sizes) -> Leaves:
    held = {name: values(array) for name, array in leaves.items()}
    plain_loss(held, call, n).backward()
    grad = np.vectorize(lambda value: value.grad, otypes=[float])
    return {name: grad(np.array(lists, object)) for name, lists in held.items()}


def torch_gradients(path: str, leaves: Leaves, call: Call, n: Sizes) -> Leaves:
    held = {name: torch.tensor(array, requires_grad=True) for name, array in leaves.items()}
    arguments = {name: held[name] for name in "qkv"} | call(held)
    out = hw.attend(**arguments) if path == "fused" else hw.trace(**arguments).out
    (out * torch.tensor(cotangent(n))).sum().backward()
    return {name: leaf.grad.numpy() for name, leaf in held.items()}


@pytest.mark.parametrize("case", CASES)
def test_plain_gradients_are_finite_differences(case: str) -> None:
    n, names, call = CASES[case]
    leaves, step = leaves_of(n, names), 1e-5
    gradients = plain_gradients(leaves, call, n)
    rng = np.random.default_rng(3)
    for name, array in leaves.items():
        for place in rng.choice(array.size, min(array.size, 4), replace=False):
            sides = []
            for sign in (1, -1):
                moved = array.copy()
                moved.flat[place] += sign * step
                sides.append(plain_loss({key: x.tolist() for key, x in (leaves | {name: moved}).items()}, call, n))
            # step^2 times a third derivative of order 1, and rounding of 1e-15 over the step: about 1e-10 both.
            assert gradients[name].flat[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7), name


@pytest.mark.parametrize("path", TORCH_PATHS)
@pytest.mark.parametrize("case", CASES)
def test_torch_gradients_are_the_plain_ones(case: str, path: str) -> None:
    n, names, call = CASES[case]
    leaves = leaves_of(n, names)
    expected = plain_gradients(leaves, call, n)
    for name, gradient in torch_gradients(path, leaves, call, n).items():
        assert_same(gradient, expected[name], f"gradient of {name}", 1e-11)


def test_every_differentiable_argument_has_a_case() -> None:
    not_numbers_to_learn = {"mask", "scale", "softcap", "dropout", "kv_index"}
    learned = {"q", "k", "v"} | {name for _, names, _ in CASES.values() for name in names}
    assert set(inspect.signature(hw.attend).parameters) - not_numbers_to_learn <= learned


@every("learned, softcap, poison", [((), None, math.nan), ((), None, math.inf), ((), 0.9, math.nan),
                                    (("sink", "gate"), 0.9, math.inf)])  # fmt: skip
@pytest.mark.parametrize("mask", ["lengths", "segments", "allowed per head", "allowed per key", "window offset",
                                  "causal offset -2", "bias that forbids", "causal offsets", *NOBODY])  # fmt: skip
@every("path", ("plain", *TORCH_PATHS))
def test_what_stands_in_a_dead_key_never_reaches_a_gradient(
    path: str, mask: str, learned: tuple[str, ...], softcap: float | None, poison: float
) -> None:
    """And where nobody may attend anything, no gradient is other than 0; the plain output has none at all."""
    n = Sizes(B=2, H=4, G=2, T=3, S=7, D=2, E=3)
    if mask in NOBODY:
        masks, dead = NOBODY[mask], np.ones((n.B, n.G, n.S), bool)
    else:
        case = mask_cases(n, seed=7)[mask]
        masks, dead = (lambda: case.build(np.ndarray.tolist)), dead_keys(draw(n, mask=case))

    def call(x: dict[str, Any]) -> dict[str, Any]:
        return {"mask": masks(), "softcap": softcap, **{name: x[name] for name in learned}}

    def gradients(leaves: Leaves) -> Leaves:
        if path != "plain":
            return torch_gradients(path, leaves, call, n)
        return plain_gradients(leaves, call, n) if not dead.all() else {}

    clean = leaves_of(n, learned)
    poisoned = clean | {name: np.where(dead[..., None], poison, clean[name]) for name in "kv"}
    assert dead.any()
    expected = gradients(clean)
    for name, gradient in gradients(poisoned).items():
        assert_same(gradient, expected[name], f"gradient of {name}")
        if name in "kv":
            assert not gradient[dead].any()
        assert mask not in NOBODY or not gradient.any()


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
