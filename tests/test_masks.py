"""The masks against tables: drawn by hand, and spoken by an oracle that shares no line with them."""

from itertools import combinations

import numpy as np
import pytest
import torch
from cases import read_table, refuses
from helpers import MASK_NAMES, Sizes, as_list, as_numpy, mask_cases, mask_tables, paper_slope

import headwise as hw
from headwise.masks import Both, Part, alibi_slopes
from headwise.shapes import shape_of

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
