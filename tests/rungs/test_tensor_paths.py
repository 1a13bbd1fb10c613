"""Which way the tensor rung goes: the fused kernel where it gives the same answer, and how lean its call is."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from helpers import NATIVE, Problem, Sizes, draw

import headwise as hw
from headwise.rungs import paths, tensor

GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=11)
SQUARE = GQA._replace(T=7)
DECODE = GQA._replace(T=1)
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Spy:
    """Stands before the kernel and notes what each call got."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
        self.calls.append(defaults | dict(zip(NAMES, args, strict=False)) | kwargs)
        return self.kernel(*args, **kwargs)

    @property
    def call(self) -> dict[str, Any]:
        assert len(self.calls) == 1
        return self.calls[0]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy(tensor.F.scaled_dot_product_attention)
    monkeypatch.setattr(tensor.F, "scaled_dot_product_attention", spy)
    return spy


def attend(n: Sizes, mask: hw.Mask | None = None, **options: Any) -> dict[str, Any]:
    """Run it; the arguments it was given."""
    problem: Problem = draw(n, **options)
    arguments = problem.arguments(NATIVE["fused"]) | {"mask": mask}
    out = hw.attend(**arguments)
    assert out.shape == (n.B, n.H, n.T, n.E)
    return arguments


def test_no_mask(spy: Spy) -> None:
    arguments = attend(GQA)
    assert spy.call["attn_mask"] is None
    assert not spy.call["is_causal"]
    assert spy.call["scale"] == pytest.approx(GQA.D**-0.5)
    for name, argument in (("query", "q"), ("key", "k"), ("value", "v")):  # the very same memory: nothing was copied
        assert spy.call[name].data_ptr() == arguments[argument].data_ptr()


def test_grouped_heads_are_not_repeated(spy: Spy) -> None:
    attend(GQA)
    assert spy.call["enable_gqa"]
    assert spy.call["query"].shape[1] == 6
    assert spy.call["key"].shape[1] == spy.call["value"].shape[1] == 3


def test_equal_heads_need_no_grouping(spy: Spy) -> None:
    attend(GQA._replace(H=3))
    assert not spy.call["enable_gqa"]


def test_decoding_costs_no_mask(spy: Spy) -> None:
    attend(DECODE, hw.Causal())
    assert spy.call["attn_mask"] is None
    assert not spy.call["is_causal"]


def test_decoding_copies_neither_keys_nor_values(spy: Spy) -> None:
    arguments = attend(DECODE, hw.Causal())
    assert spy.call["key"].data_ptr() == arguments["k"].data_ptr()
    assert spy.call["value"].data_ptr() == arguments["v"].data_ptr()


def test_a_sink_is_one_more_key(spy: Spy) -> None:
    attend(GQA, hw.Causal(), sink=True)
    assert spy.call["key"].shape[2] == GQA.S + 1
    assert not spy.call["value"][:, :, -1].any()


def test_dropout_goes_to_the_kernel(spy: Spy) -> None:
    attend(GQA, dropout=0.25)
    assert spy.call["dropout_p"] == 0.25


def test_unequal_widths_are_padded_for_the_kernel(spy: Spy) -> None:
    for E in (7, 13):
        attend(GQA._replace(E=E))
    for call in spy.calls:
        assert call["query"].shape[-1] == call["key"].shape[-1] == call["value"].shape[-1]


def test_a_softcap_takes_the_explicit_path(spy: Spy) -> None:
    attend(GQA, softcap=2.0)
    assert not spy.calls


def test_trace_takes_the_explicit_path(spy: Spy) -> None:
    hw.trace(**draw(GQA).arguments(NATIVE["explicit"]))
    assert not spy.calls


@pytest.mark.parametrize(
    "mask",
    [
        hw.Causal(),
        hw.Causal(offset=0),
        hw.Window(None, 0),
        hw.Causal() & hw.Window(None, 3),
        hw.Causal() & hw.Window(6, None),
    ],
    ids=repr,
)
def test_square_causal_is_the_kernels_flag(mask: hw.Mask, spy: Spy) -> None:
    attend(SQUARE, mask)
    assert spy.call["is_causal"]
    assert spy.call["attn_mask"] is None


@pytest.mark.parametrize(
    ("n", "mask"),
    [(GQA, hw.Causal()), (GQA, hw.Causal(offset=1)), (GQA._replace(T=7, S=5), hw.Causal(offset=0))],
    ids=["end", "shifted", "T>S"],
)
def test_the_flag_is_for_squares_only(n: Sizes, mask: hw.Mask, spy: Spy) -> None:
    """The kernel's flag aligns at the beginning here, at the end elsewhere; only in a square are they the same."""
    attend(n, mask)
    assert not spy.call["is_causal"]
    assert spy.call["attn_mask"].dtype == torch.bool


def test_an_early_offset_leaves_the_square_that_is_seen(spy: Spy) -> None:
    """Five queries at the first five of seven keys: the last two keys are cut off, and the flag does the rest."""
    attend(GQA, hw.Causal(offset=0))
    assert spy.call["is_causal"]
    assert spy.call["key"].shape[2] == 5


@pytest.mark.parametrize(
    "mask", [hw.Causal() & hw.Lengths([3, 7]), hw.Causal() & hw.Alibi(), hw.Window(2, 0)], ids=repr
)
def test_more_than_causal_needs_a_mask(mask: hw.Mask, spy: Spy) -> None:
    attend(SQUARE, mask)
    assert not spy.call["is_causal"]
    assert spy.call["attn_mask"] is not None


@pytest.mark.parametrize("mask", [hw.Causal(), None, hw.Lengths([3, 7]), hw.Alibi()], ids=repr)
def test_decoding_is_folded(mask: hw.Mask | None, spy: Spy) -> None:
    """(B,H,1,D) becomes (B,G,r,D): each key and value is read once a group."""
    attend(DECODE, mask)
    assert spy.call["query"].shape == (2, 3, 2, 11)
    assert spy.call["key"].shape == spy.call["value"].shape == (2, 3, 7, 11)
    assert not spy.call["enable_gqa"]


@pytest.mark.parametrize(
    ("n", "mask", "first", "count", "masked"),
    [
        (DECODE, hw.Window(2, 0), 4, 3, False),
        (DECODE, hw.Window(0, 0), 6, 1, False),
        (GQA, hw.Window(1, 0), 1, 6, True),
        (GQA._replace(T=2), hw.Window(1, 0), 4, 3, True),
        (GQA._replace(T=2), hw.Causal(offset=2), 0, 4, True),
        (GQA, hw.Window(None, 6), 0, 7, False),
    ],
    ids=repr,
)
def test_windows_shorten_the_keys(n: Sizes, mask: hw.Mask, first: int, count: int, masked: bool, spy: Spy) -> None:
    arguments = attend(n, mask)
    torch.testing.assert_close(spy.call["key"], arguments["k"][:, :, first : first + count], rtol=0, atol=0)
    assert spy.call["key"].untyped_storage().data_ptr() == arguments["k"].untyped_storage().data_ptr()  # a view
    assert (spy.call["attn_mask"] is not None) == masked


def test_the_spy_knows_the_kernels_arguments() -> None:
    """`inspect` cannot read a builtin's signature, but its documentation begins with it."""
    documentation = inspect.getdoc(torch.nn.functional.scaled_dot_product_attention) or ""
    signature = documentation.split(")")[0]
    assert all(name in signature for name in NAMES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [GQA, SQUARE, DECODE], ids=["T<S", "T=S", "T=1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": hw.Causal()},
        {"mask": hw.Lengths([0, 3])},
        {"mask": hw.Bias([0.5] * 7)},
        {"mask": hw.Alibi() & hw.Causal()},
        {"sink": [0.5] * 6},
        {"gate": [0.5] * 6},
        {"softcap": 2.0},
        {"dropout": 0.5},
        {"kv_index": [0, 1, 2, 2, 1, 0]},
        {"sink": torch.ones(6), "gate": torch.ones(6, dtype=torch.float64), "mask": hw.Bias(torch.ones(7))},
    ],
    ids=lambda options: "+".join(options) or "bare",
)
def test_the_outputs_dtype_is_the_inputs(options: dict, n: Sizes, dtype: torch.dtype) -> None:
    problem = draw(n)
    q, k, v = (torch.tensor(x, dtype=dtype) for x in (problem.q, problem.k, problem.v))
    assert hw.attend(q, k, v, **options).dtype == dtype
    record = hw.trace(q, k, v, **options)
    assert record.out.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert {getattr(record, name).dtype for name in ("scores", "capped", "masked", "weights", "lse")} == {wide}


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
