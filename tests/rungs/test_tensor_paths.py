"""Which way the tensor rung goes: the fused kernel where it gives the same answer, and how lean its call is."""

import inspect
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from helpers import KERNEL_ARGUMENTS, NATIVE, Problem, Sizes, draw, spied_kernel

import headwise as hw
from headwise.rungs import paths

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


TABLES = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
FLAG = {"is_causal": True, "attn_mask": None}
NO_MASK = {"is_causal": False, "attn_mask": None}
SPELLED = {"is_causal": False, "attn_mask": "some mask"}


@every("n, mask, expected, q_shape, k_shape", TABLES["kernel"])
def test_what_the_kernel_gets(
    calls: Calls, n: str, mask: str, expected: str, q_shape: list[int], k_shape: list[int]
) -> None:
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


def test_unequal_widths_are_padded_for_the_kernel(calls: Calls) -> None:
    for E in (7, 13):
        attend(GQA._replace(E=E))
    for call in calls:
        assert call["query"].shape[-1] == call["key"].shape[-1] == call["value"].shape[-1]


@pytest.mark.parametrize(("n", "mask", "first", "count", "masked"), TABLES["windows"])
def test_windows_shorten_the_keys(n: str, mask: str, first: int, count: int, masked: bool, calls: Calls) -> None:
    arguments = attend(eval(n), eval(mask))  # our own table
    (call,) = calls
    torch.testing.assert_close(call["key"], arguments["k"][:, :, first : first + count], rtol=0, atol=0)
    assert call["key"].untyped_storage().data_ptr() == arguments["k"].untyped_storage().data_ptr()  # a view
    assert (call["attn_mask"] is not None) == masked


def test_the_spy_knows_the_kernels_arguments() -> None:
    """`inspect` cannot read a builtin's signature, but its documentation begins with it."""
    documentation = inspect.getdoc(torch.nn.functional.scaled_dot_product_attention) or ""
    signature = documentation.split(")")[0]
    assert all(name in signature for name in KERNEL_ARGUMENTS)


def test_a_band_that_leaves_a_row_without_keys_is_known() -> None:
    """Against a loop over rows: such a row gets zeros, and one taken for it costs an operation."""
    for T, S, low, high in product((1, 2, 3), (1, 2, 4), range(-4, 5), range(-4, 5)):
        rows = [any(low <= j - i <= high for j in range(S)) for i in range(T)]
        sizes = Sizes(B=1, H=1, G=1, T=T, S=S, D=5, E=5)
        assert paths.runs_off((low, high), sizes) is not all(rows), (T, S, low, high)


def test_edges_of_paths() -> None:
    options = hw.spec.Options(scale=paths.SMALLEST_SCALE / 2)
    assert paths.choose(GQA, options).name == paths.FUSED
    for sign in (1, -1):
        options = hw.spec.Options(scale=sign * paths.SMALLEST_SCALE / 2, sink=torch.zeros(6))
        assert paths.choose(GQA, options).name == paths.EXPLICIT
        options = options._replace(scale=sign * paths.SMALLEST_SCALE)
        assert paths.choose(GQA, options).name == paths.FUSED
    steps = hw.trace(*draw(GQA._replace(S=0)).arguments(NATIVE["fused"]).values())
    assert steps.weights.shape == (2, 6, 5, 0)
    assert steps.lse.shape == (2, 6, 5) and (steps.lse == -torch.inf).all()
    cases = (
        (hw.Causal(), 0.5, paths.CAUSAL, ""),
        (hw.Causal(), 0.0, paths.MASKED, "scale=0.0"),
        (hw.Causal(), -2.0, paths.MASKED, "scale=-2.0"),
        (hw.Window(2, 0), 0.5, paths.MASKED, "a window"),
    )
    for mask, scale, name, reason in cases:
        options = hw.spec.Options(mask=mask, scale=scale)
        path = paths.choose(SQUARE, options)
        assert path.name == name
        assert paths.refusals(path, SQUARE, options).get(paths.CAUSAL, "").startswith(reason)


@pytest.mark.parametrize("axis", "BHTSE")
def test_an_empty_axis_is_explicit(axis: str) -> None:
    assert paths.choose(GQA._replace(**{axis: 0}), hw.spec.Options()).name == paths.EXPLICIT
