"""The face of the backends: what `attend` and `trace` take, and how a trace shows itself."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from cases import refuses
from helpers import NATIVE, Sizes, draw

import headwise as hw
from headwise.backends.autograd import Value
from headwise.records import PICTURED

N = Sizes(B=2, H=3, G=1, T=5, S=7, D=11, E=13)
BACKENDS = ("plain", "array", "explicit")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_says_its_shapes_and_its_dtype(backend: str) -> None:
    t = hw.trace(**draw(N, mask="causal").arguments(NATIVE[backend]))
    dtype = {"plain": "nested lists", "array": "float64", "explicit": "torch.float64"}[backend]
    assert repr(t) == f"Trace({dtype}: scores, capped, masked, weights (2, 3, 5, 7), lse (2, 3, 5), out (2, 3, 5, 13))"


def shades(html: str) -> list[float]:
    """The weight of each square, line by line."""
    return [float(weight) for weight in re.findall(r'title="([\d.]+)"', html)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_in_a_notebook_shows_the_weights_of_each_head(backend: str) -> None:
    """One key has weight 1, all others 0; of two documents the first is shown."""
    problem = draw(N, mask="window offset")
    arguments = problem.arguments(NATIVE[backend]) | {"mask": hw.Window(0, 0)}
    html = hw.trace(**arguments)._repr_html_()
    assert html.count("<p>head ") == 3
    assert shades(html) == [float(j == i + 2) for i in range(5) for j in range(7)] * 3


@pytest.mark.slow
def test_traces_at_the_edge_show_themselves() -> None:
    q = [[[Value(1.0)], [Value(2.0)]]]
    assert len(shades(hw.trace(q, q, q)._repr_html_())) == 4
    x = torch.ones(1, 2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    assert len(shades(hw.trace(x, x, x)._repr_html_())) == 2 * 3 * 3
    x = torch.ones(5, 37, 101, 1)
    assert len(shades(hw.trace(x, x, x)._repr_html_())) == PICTURED**3
    x = torch.ones(1, 2, 0, 5)
    assert hw.trace(x, x, x)._repr_html_() == repr(hw.trace(x, x, x))

    class Odd:
        shape, dtype = (0,), "<script>"

    steps: Any = [Odd()] * 6
    assert "&lt;script&gt;" in hw.Trace(*steps)._repr_html_()


def test_one_head_goes_without_its_axes() -> None:
    q, k, v = (torch.randn(n, width) for n, width in ((5, 11), (7, 11), (7, 13)))
    expected = hw.trace(q[None, None], k[None, None], v[None, None], hw.Causal())
    for wrap in (lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()):
        steps = hw.trace(wrap(q), wrap(k), wrap(v), hw.Causal())
        torch.testing.assert_close(torch.as_tensor(steps.weights), expected.weights[0, 0])
        out = torch.as_tensor(hw.attend(wrap(q), wrap(k), wrap(v), hw.Causal()))
        torch.testing.assert_close(out, expected.out[0, 0])


def test_arguments_of_torchs_function_are_named_as_they_are_here() -> None:
    q = [[[[0.5]]]]
    function: Any
    for function in (hw.attend, hw.trace):
        refuses(partial(function, q, q, q, is_causal=True, dropout_p=0.1), "is_causal= is here mask=hw.Causal")
        for word, way in {"n_heads": "axis of q", "h": "axis of q", "d_k": "last axis", "block_size": "Causal"}.items():
            refuses(partial(function, q, q, q, **{word: 4}), f"{word}= is here .*{way}")
        with pytest.raises(TypeError, match="colour"):
            function(q, q, q, colour=1)
