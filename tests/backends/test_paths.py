"""Blocks of a window and documents apart: the answers of the explicit path, its gradients, and nothing that leaks."""

import math
from typing import Any

import pytest
import torch
from cases import every
from helpers import spied_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.backends import paths

# 37 to 131 tokens: the narrowest blocks have 32 queries.
LENGTHS = (37, 101, 131)
WINDOWS = (
    lambda T, S: None,
    lambda T, S: hw.Causal(),
    lambda T, S: hw.Causal(offset=0),
    lambda T, S: hw.Causal(offset=-5),
    lambda T, S: hw.Window(3, 0),
    lambda T, S: hw.Window(2, 7, offset=0),
    lambda T, S: hw.Window(None, 4),
    lambda T, S: hw.Window(5, None),
    lambda T, S: hw.Window(11, 0, offset=S // 2),
    lambda T, S: hw.Window(1, 0, offset=[3, 0, 7]),
)


def ids(n: int, random: Any) -> list[int]:
    """Neighbours of one document have its id; ids need not grow."""
    names = random.sample(range(9), 4)
    cuts = sorted(random.choices(range(n + 1), k=3))
    return [names[sum(cut <= i for cut in cuts)] for i in range(n)]


def others(T: int, S: int, random: Any) -> dict[str, hw.Mask | None]:
    begin, end = sorted(random.choices(range(S + 1), k=2))
    padding = [[[[j >= begin for j in range(S)]]], [[[j < end for j in range(S)]]], [[[True] * S]]]
    return {
        "none": None,
        "lengths": hw.Lengths([S, random.randint(0, S), 2]),
        "padding": hw.Allowed(padding),
        "segments": hw.Segments(
            torch.tensor([ids(T, random) for _ in range(3)]), torch.tensor([ids(S, random) for _ in range(3)])
        ),
        "alibi": hw.Alibi(),
    }


@st.composite
def calls(draw: Any) -> tuple[list[Tensor], dict[str, Any]]:
    T, S = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    S = draw(st.sampled_from([S, T, T]))
    random = draw(st.randoms(use_true_random=False))
    H, G = draw(st.sampled_from([(4, 4), (6, 2), (3, 1)]))
    masks = [draw(st.sampled_from(WINDOWS))(T, S)]
    table = others(T, S, random)
    masks += [table[name] for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=2, unique=True))]
    mask = None
    for part in masks:
        if part is not None:
            mask = part if mask is None else mask & part
    generator = torch.Generator().manual_seed(random.randint(0, 999))
    shapes = (3, H, T, 5), (3, G, S, 5), (3, G, S, draw(st.sampled_from([5, 7])))
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    options: dict[str, Any] = {"mask": mask, "scale": draw(st.sampled_from([None, 0.7, -0.3]))}
    for name in ("sink", "gate"):
        if draw(st.booleans()):
            options[name] = torch.randn(H, generator=generator, dtype=torch.float64)
    if draw(st.integers(0, 3)) == 0:
        options["kv_index"] = [h % G for h in range(H)]
    if draw(st.integers(0, 5)) == 0:
        options["softcap"] = 0.9
    return tensors, options


def answers(attend: Any, tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of all that is drawn."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    learned = {name: options[name].clone().requires_grad_() for name in ("sink", "gate") if name in options}
    out = attend(*leaves, **{**options, **learned})
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (*leaves, *learned.values()))]


taken: set[str] = set()


@pytest.mark.slow
@settings(max_examples=400)
@given(calls())
def test_every_way_gives_the_answer_of_the_explicit_one(call: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CALL", 0)  # documents of a few tokens go apart, too
        choose = paths.choose
        patch.setattr(paths, "choose", lambda *args: noted(choose(*args)))
        ours = answers(hw.attend, *call)
        theirs = answers(lambda *args, **named: hw.trace(*args, **named).out, *call)
    for actual, expected in zip(ours, theirs, strict=True):
        expected = torch.zeros_like(actual) if expected is None else expected
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def noted(path: paths.Path) -> paths.Path:
    taken.add(path.name)
    return path


def test_which_ways_were_tried() -> None:
    assert not taken or {paths.BLOCKS, paths.APART, paths.CAUSAL, paths.MASKED} <= taken


def drawn(T: int, H: int = 6, G: int = 2, B: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, heads, T, 5) for heads in (H, G, G)]


PACKED = torch.arange(131).div(37, rounding_mode="floor")[None].repeat(3, 1)


@every("mask, shapes", [
    (hw.Window(9, 0), [(5, 18, 32)]),
    (hw.Window(19, 20, offset=0), None),
    (hw.Segments(PACKED, PACKED) & hw.Causal(), [(3, 6, n) for n in (37, 37, 37, 20)]),
    (hw.Lengths([131, 60, 60]) & hw.Causal(), [(1, 6, 131), (2, 6, 60), (2, 6, 71)]),
    (hw.Segments(PACKED, PACKED) & hw.Bias([[0.5]]), None),
])  # fmt: skip
def test_what_the_kernel_is_asked(mask: hw.Mask, shapes: list[tuple[int, ...]] | None) -> None:
    with spied_kernel() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CALL", 0)
        hw.attend(*drawn(131), mask=mask)
    assert [tuple(call["query"].shape[:3]) for call in calls] == (shapes or [(3, 6, 131)])


@every("mask, foreign", [
    (hw.Segments(PACKED, PACKED), slice(37, 74)),
    (hw.Lengths([131, 37, 5]) & hw.Causal(), slice(37, 131)),
    (hw.Window(9, 0), slice(99, 131)),
])  # fmt: skip
def test_a_key_that_others_see_leaks_no_nan(mask: hw.Mask, foreign: slice) -> None:
    """Of the second document; its first 37 queries see none of these keys."""
    q, k, v = drawn(131)
    for x in (k, v):
        x[1, :, foreign] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CALL", 0)
        assert hw.attend(q, k, v, mask=mask)[1, :, :37].isfinite().all()


def test_dropout_goes_into_every_call() -> None:
    with spied_kernel() as calls:
        hw.attend(*drawn(131), mask=hw.Window(9, 0), dropout=0.25)
    assert [call["dropout_p"] for call in calls] == [0.25]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_lengths_may_be_mapped_over() -> None:
    """Under vmap no number can be read: the mask is made of tensors."""
    q, k, v = drawn(7)
    lengths = torch.tensor([7, 3, 0])
    mapped = torch.func.vmap(lambda q, k, v, n: hw.attend(q[None], k[None], v[None], hw.Lengths(n[None]))[0])
    torch.testing.assert_close(mapped(q, k, v, lengths), hw.attend(q, k, v, hw.Lengths(lengths)))
