"""The face of the rungs: what `attend` and `trace` take, and how a trace shows itself."""

import base64
import re
import struct
import zlib
from typing import Any

import pytest
import torch
from helpers import NATIVE, Sizes, draw

import headwise as hw
from headwise.records import PICTURED
from headwise.rungs.autograd import Value

N = Sizes(B=2, H=3, G=1, T=5, S=7, D=11, E=13)
RUNGS = ("plain", "array", "explicit")


@pytest.mark.parametrize("rung", RUNGS)
def test_a_trace_says_its_shapes_and_its_dtype(rung: str) -> None:
    t = hw.trace(**draw(N, mask="causal").arguments(NATIVE[rung]))
    dtype = {"plain": "nested lists", "array": "float64", "explicit": "torch.float64"}[rung]
    assert repr(t) == (
        f"Trace({dtype}: scores, capped, masked, weights (2, 3, 5, 7), lse (2, 3, 5), out (2, 3, 5, 13))"
    )


def pixels(html: str) -> list[tuple[tuple[int, int], bytes]]:
    """Width and height of each picture, and its colours, a filter byte before each row."""
    pictures = []
    for source in re.findall(r"base64,([^\"]+)", html):
        data = base64.b64decode(source)
        start = data.index(b"IDAT")
        length = struct.unpack(">I", data[start - 4 : start])[0]
        pictures.append((struct.unpack(">II", data[16:24]), zlib.decompress(data[start + 4 : start + 4 + length])))
    return pictures


@pytest.mark.parametrize("rung", RUNGS)
def test_a_trace_in_a_notebook_shows_the_weights_of_each_head(rung: str) -> None:
    """One key of weight 1 is the darkest blue; all others are white."""
    problem = draw(N, mask="window offset")
    arguments = problem.arguments(NATIVE[rung]) | {"mask": hw.Window(0, 0)}
    pictures = pixels(hw.trace(**arguments)._repr_html_())
    white, blue = bytes((255, 255, 255)), bytes((0, 0, 255))
    rows = [b"\0" + b"".join(blue if j == i + 2 else white for j in range(7)) for i in range(5)]
    assert pictures == [((7, 5), b"".join(rows))] * 6


@pytest.mark.slow
def test_traces_at_the_edge_show_themselves() -> None:
    q = [[[Value(1.0)], [Value(2.0)]]]
    assert len(pixels(hw.trace(q, q, q)._repr_html_())) == 1
    x = torch.ones(1, 2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    assert len(pixels(hw.trace(x, x, x)._repr_html_())) == 2
    x = torch.ones(5, 37, 101, 1)
    html = hw.trace(x, x, x)._repr_html_()
    pictures = pixels(html)
    assert len(pictures) == PICTURED["documents"] * PICTURED["heads"]
    assert pictures[0][0] == (96, 96)
    assert "96 of 101 queries, 96 of 101 keys" in html
    x = torch.ones(1, 2, 0, 5)
    assert hw.trace(x, x, x)._repr_html_() == repr(hw.trace(x, x, x))

    class Odd:
        shape, dtype = (0,), "<script>"

    steps: Any = [Odd()] * 6
    assert "&lt;script&gt;" in hw.Trace(*steps)._repr_html_()
