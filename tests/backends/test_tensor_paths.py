"""Which way the torch backend goes: the fused kernel where it gives the same answer, and how lean its call is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import every, read_table
from helpers import NATIVE, Problem, Sizes, draw, spied_kernel

import headwise as hw

GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=11)
SQUARE = GQA._replace(T=7)
DECODE = GQA._replace(T=1)
Calls = list[dict[str, Any]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """What the kernel gets."""
    with spied_kernel() as calls:
        yield calls


def attend(n: Sizes, mask: hw.Mask | None = None, **options: Any) -> dict[str, Any]:
    """Run it; the arguments it was given."""
    problem: Problem = draw(n, **options)
    arguments = problem.arguments(NATIVE["fused"]) | {"mask": mask}
    out = hw.attend(**arguments)
    assert out.shape == (n.B, n.H, n.T, n.E)
    return arguments


TABLES = read_table("options")
FLAG = {"is_causal": True, "attn_mask": None}
NO_MASK = {"is_causal": False, "attn_mask": None}
SPELLED = {"is_causal": False, "attn_mask": "some mask"}


@every("n, mask, expected, q_shape, k_shape", TABLES["kernel"])
def test_what_the_kernel_gets(calls: Calls, n: str, mask: str, expected: str, q_shape: Any, k_shape: Any) -> None:
    calls.clear()
    wanted = eval(expected)  # our own table
    arguments = attend(eval(n), eval(mask))
    (call,) = calls
    if call["attn_mask"] is not None:
        call["attn_mask"] = "some mask"
    assert {name: call[name] for name in wanted} == wanted
    assert [*call["query"].shape] == q_shape and [*call["key"].shape] == [*call["value"].shape] == k_shape
    if "Lengths" in mask:  # what stands in dead keys is cleared in a copy
        return
    for name, argument in (("query", "q"), ("key", "k"), ("value", "v")):  # the very same memory: nothing was copied
        assert call[name].data_ptr() == arguments[argument].data_ptr()


def test_options_of_the_kernel_and_what_it_is_not_asked(calls: Calls) -> None:
    attend(GQA, softcap=2.0)
    hw.trace(**draw(GQA).arguments(NATIVE["explicit"]))
    assert not calls
    attend(GQA, hw.Causal(), sink=True)  # one more key
    attend(GQA, dropout=0.25)
    with_sink, dropping = calls
    assert with_sink["key"].shape[2] == GQA.S + 1 and not with_sink["value"][:, :, -1].any()
    assert dropping["dropout_p"] == 0.25


@pytest.mark.parametrize(("n", "mask", "first", "count", "masked"), TABLES["windows"])
def test_windows_shorten_the_keys(n: str, mask: str, first: int, count: int, masked: bool, calls: Calls) -> None:
    arguments = attend(eval(n), eval(mask))  # our own table
    (call,) = calls
    torch.testing.assert_close(call["key"], arguments["k"][:, :, first : first + count], rtol=0, atol=0)
    assert call["key"].untyped_storage().data_ptr() == arguments["k"].untyped_storage().data_ptr()  # a view
    assert (call["attn_mask"] is not None) == masked
