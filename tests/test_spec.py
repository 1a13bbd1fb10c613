"""AttentionSpec and its masks, against tables and an oracle that shares no line with them; Student's interval."""

import math
from dataclasses import FrozenInstanceError
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from cases import read_table, refuses, refuses_table, rows
from helpers import MASK_NAMES, as_list, as_numpy, mask_cases, mask_tables, paper_slope

import headwise as hw
from headwise.intervals import Interval, interval_of, t_quantile
from headwise.masks import Both, Part, alibi_slopes
from headwise.shapes import shape_of
from headwise.spec import Sizes, check_shapes

Spec = hw.AttentionSpec


def test_sizes_follow_and_are_counted() -> None:
    spec = Spec(d_model=21, n_heads=3)
    assert (spec.n_kv_heads, spec.head_dim, spec.value_dim) == (3, 7, 7)
    assert (spec.d_in, spec.d_context, spec.d_out) == (21, 21, 21)
    assert (spec.q_bias, spec.kv_bias, spec.out_bias, spec.out_proj, spec.qk_norm, spec.sink) == (0, 0, 0, 1, 0, 0)
    assert (spec.mask, spec.rope, spec.softcap, spec.dropout) == (None, None, None, 0)
    spec = wide()
    assert (spec.q_dim, spec.k_dim, spec.v_dim, spec.joined_dim) == (42, 14, 22, 66)
    assert spec.cache_values_per_token == 2 * (7 + 11)
    assert spec.kv_index == (0, 0, 0, 1, 1, 1)
    # How many parameters there are is held against those of layers, in layer/test_matrix.py and test_layer.py.
    gpt2 = Spec(d_model=768, n_heads=12, q_bias=True, kv_bias=True, out_bias=True)
    assert gpt2.n_parameters == 4 * 768 * 768 + 4 * 768


@pytest.mark.parametrize(("fields", "name", "size"), rows("sizes_that_follow"))
def test_a_size_follows_another(fields: dict, name: str, size: int) -> None:
    assert getattr(Spec(d_model=21, n_heads=3, **fields), name) == size


def wide() -> hw.AttentionSpec:
    return Spec(d_model=5, n_heads=6, n_kv_heads=2, head_dim=7, value_dim=11, d_in=13, d_context=17, d_out=19)


def test_specs_are_values() -> None:
    with pytest.raises(FrozenInstanceError):
        wide().n_heads = 3  # type: ignore[misc]
    assert {wide(): 1}[wide()] == 1
    spec = Spec(d_model=21, n_heads=3).replace(d_model=22, mask=hw.Causal())
    assert (spec.d_model, spec.head_dim, spec.d_in, spec.mask) == (22, 7, 21, hw.Causal())
    refuses(lambda: wide().replace(n_kv_heads=4), "n_kv_heads=4 does not divide n_heads=6")
    with pytest.raises(TypeError, match="n_head"):
        wide().replace(n_head=4)
    with pytest.raises(TypeError, match="positional"):
        Spec(30, 6)  # type: ignore[misc]


def spec(**fields: Any) -> Spec:
    return Spec(**{"d_model": 30, "n_heads": 6, **fields})


def test_refused() -> None:
    refuses_table("spec", globals())


def test_fine_sizes() -> None:
    assert Spec(d_model=100, n_heads=6, head_dim=17).q_dim == 102
    of_numpy = Spec(d_model=np.int64(30), n_heads=np.int32(6), n_kv_heads=np.int64(2))
    assert of_numpy == Spec(d_model=30, n_heads=6, n_kv_heads=2) and type(of_numpy.n_kv_heads) is int
    assert Spec(d_model=30, n_heads=6, rope=hw.RoPE(dim=4)).head_dim == 5
    assert check_shapes((2, 6, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)) == Sizes(B=2, H=6, G=3, T=5, S=11, D=7, E=13)


def test_rope_refuses() -> None:
    refuses_table("rope", globals())


def test_reprs() -> None:
    assert repr(Spec(d_model=21, n_heads=3, head_dim=7, d_out=21)) == "AttentionSpec(d_model=21, n_heads=3)"
    spec = wide().replace(kv_index=(0, 1, 1, 1, 0, 0), rope=hw.RoPE(31.0, dim=2), mask=hw.Causal(), scale=0.5)
    assert repr(spec) == (
        "AttentionSpec(d_model=5, n_heads=6, n_kv_heads=2, kv_index=(0, 1, 1, 1, 0, 0), head_dim=7, value_dim=11, "
        "d_in=13, d_context=17, d_out=19, mask=Causal(offset=None), rope=RoPE(theta=31.0, dim=2), scale=0.5)"
    )
    names = {name: getattr(hw, name) for name in ("AttentionSpec", "Causal", "RoPE")}
    assert eval(repr(spec), names) == spec


# Two-sided 95 %, as printed in every table of Student's t.
@pytest.mark.parametrize(("degrees", "expected"), rows("quantiles"))
def test_quantiles(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-5)


def test_intervals() -> None:
    found = interval_of([1.0, 2.0, 3.0, 4.0, 5.0])
    # mean 3, standard error sqrt(2.5 / 5), t of 4 degrees
    assert found.mean == 3.0
    assert found.high - 3.0 == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-5)
    assert found.low == pytest.approx(6.0 - found.high)
    assert found.excludes(0.5) and not found.excludes(2.0)
    assert interval_of([1.0, math.nan, 3.0]) == interval_of([1.0, 3.0])
    assert interval_of([2.0]) == interval_of([2.0]).of_fraction() == Interval(2.0, -math.inf, math.inf, 1)
    assert interval_of([0.0, 0.0, 1.0]).of_fraction() == Interval(1 / 3, 0.0, 1.0, 3)
    found = interval_of([])
    assert math.isnan(found.mean) and found.n == 0


SIZES = [Sizes(2, 6, 3, 5, 7, 1, 1), Sizes(2, 3, 1, 7, 5, 1, 1), Sizes(3, 2, 2, 5, 5, 1, 1), Sizes(2, 5, 1, 1, 7, 1, 1)]
SHAPE_NAMES = ["T<S", "T>S", "T=S", "T=1"]


def picture(mask: hw.Mask, T: int, S: int) -> list[str]:
    allowed, _ = mask_tables(mask, Sizes(1, 1, 1, T, S, 1, 1))
    return ["".join("01"[int(ok)] for ok in row) for row in allowed[0, 0]]


TABLES = read_table("masks")


@pytest.mark.parametrize(("mask", "T", "S", "drawn"), TABLES["pictures"])
def test_a_mask_is_what_its_picture_says(mask: str, T: int, S: int, drawn: list[str]) -> None:
    assert picture(eval(mask), T, S) == drawn  # our own table


@pytest.mark.parametrize("wrap", [as_list, as_numpy])
@pytest.mark.parametrize("n", SIZES, ids=SHAPE_NAMES)
@pytest.mark.parametrize("name", MASK_NAMES)
def test_each_mask_means_what_its_oracle_says(name: str, n: Sizes, wrap) -> None:
    case = mask_cases(n)[name]
    allowed, bias = mask_tables(case.build(wrap), n)
    # A bias of -inf forbids; whether the mask or the backend turns it into "may not" is the backend's affair.
    np.testing.assert_array_equal(allowed & (bias > -np.inf), case.allowed(n))
    np.testing.assert_allclose(np.where(case.allowed(n), bias, 0), np.where(case.allowed(n), case.bias(n), 0))


def test_and_joins() -> None:
    n = SIZES[0]
    cases = mask_cases(n)
    for first, second in combinations(MASK_NAMES, 2):
        case = cases[first] & cases[second]
        may, adds = case.allowed(n), case.bias(n)
        allowed, bias = mask_tables(case.build(as_numpy), n)
        np.testing.assert_array_equal(allowed & (bias > -np.inf), may, f"{first} & {second}")
        np.testing.assert_allclose(np.where(may, bias, 0), np.where(may, adds, 0), err_msg=f"{first} & {second}")
    a, b, c = hw.Causal(), hw.Lengths([1]), hw.Window(1, 1)
    assert ((a & b) & c) == (a & (b & c)) == Both((a, b, c))


@pytest.mark.parametrize(("n_heads", "powers"), TABLES["slopes"])
def test_alibi_slopes_are_the_papers(n_heads: int, powers: list[int]) -> None:
    expected = [2.0**-power for power in powers]
    assert alibi_slopes(n_heads) == expected == [paper_slope(h, n_heads) for h in range(n_heads)]


def test_what_a_mask_takes() -> None:
    assert [shape_of(x) for x in (3, [], [[1, 2, 3]], np.zeros((2, 0)), [[]])] == [(), (0,), (1, 3), (2, 0), (1, 0)]
    nested = torch.nested.nested_tensor([torch.randn(3, 5, 7), torch.randn(3, 4, 7)], layout=torch.jagged)
    refuses(lambda: hw.attend(nested, nested, nested), "a nested tensor has texts of several lengths; pad it")
    for offset in (np.int64(1), np.array(1), torch.tensor(1)):
        assert not hw.Causal(offset=offset).by_document
        assert picture(hw.Causal(offset=offset), 2, 3) == ["110", "111"]
        assert hw.Causal(offset=offset).band(2, 3) == (None, 1)
    q = torch.randn(3, 3, 5, 7)
    for mask in (hw.Allowed(torch.ones(3, 5, 5).bool()), hw.Bias(torch.zeros(3, 5, 5))):
        with pytest.raises(hw.HeadwiseError, match=r"has shape \(3, 5, 5\), and B = H = 3: it may mean \(B,T,S\) or "):
            hw.attend(q, q, q, mask)
    alone = q[:1]
    assert hw.attend(alone, alone, alone, hw.Allowed(torch.ones(3, 5, 5).bool())).shape == (1, 3, 5, 7)
    assert picture(hw.Allowed([[[True, False], [False, True]]]), 2, 2) == ["10", "01"]


def test_what_masks_say_of_themselves() -> None:
    """Same for all heads; may its bias forbid; counted from the first key; how many tokens of document 1 are real."""
    for text, (*expected, real) in TABLES["says"].items():
        mask = eval(text)
        alike, counts = mask.alike, mask.counts_from_first()
        assert [alike, mask.bias_may_forbid(), counts] == expected, mask
        assert mask.real_length(1) == (None if real < 0 else real), mask
        assert {mask: 1}[eval(text)] == 1  # masks are values, which compare and have a hash
    fixed = hw.Causal(offset=0)
    assert fixed.without_bias().aligned() is Part(fixed, "t", range(1), 3).aligned() is fixed.aligned() is False
