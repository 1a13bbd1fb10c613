"""Which way the torch backend goes, blocks and documents apart among them; what `attend` and `trace` take and show."""

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cases import every, read_table, refuses
from helpers import NATIVE, Problem, Sizes, draw, spied_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.backends import paths
from headwise.backends.autograd import Value

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


GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=11)
SQUARE = GQA._replace(T=7)
DECODE = GQA._replace(T=1)
Calls = list[dict[str, Any]]


@pytest.fixture
def kernel_calls() -> Iterator[Calls]:
    """What the kernel gets."""
    with spied_kernel() as kernel_calls:
        yield kernel_calls


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
def test_what_the_kernel_gets(
    kernel_calls: Calls, n: str, mask: str, expected: str, q_shape: Any, k_shape: Any
) -> None:
    kernel_calls.clear()
    wanted = eval(expected)  # our own table
    arguments = attend(eval(n), eval(mask))
    (call,) = kernel_calls
    if call["attn_mask"] is not None:
        call["attn_mask"] = "some mask"
    assert {name: call[name] for name in wanted} == wanted
    assert [*call["query"].shape] == q_shape and [*call["key"].shape] == [*call["value"].shape] == k_shape
    if "Lengths" in mask:  # what stands in dead keys is cleared in a copy
        return
    for name, argument in (("query", "q"), ("key", "k"), ("value", "v")):  # the very same memory: nothing was copied
        assert call[name].data_ptr() == arguments[argument].data_ptr()


def test_options_of_the_kernel_and_what_it_is_not_asked(kernel_calls: Calls) -> None:
    attend(GQA, softcap=2.0)
    hw.trace(**draw(GQA).arguments(NATIVE["explicit"]))
    assert not kernel_calls
    attend(GQA, hw.Causal(), sink=True)  # one more key
    attend(GQA, dropout=0.25)
    with_sink, dropping = kernel_calls
    assert with_sink["key"].shape[2] == GQA.S + 1 and not with_sink["value"][:, :, -1].any()
    assert dropping["dropout_p"] == 0.25


@pytest.mark.parametrize(("n", "mask", "first", "count", "masked"), TABLES["windows"])
def test_windows_shorten_the_keys(n: str, mask: str, first: int, count: int, masked: bool, kernel_calls: Calls) -> None:
    arguments = attend(eval(n), eval(mask))  # our own table
    (call,) = kernel_calls
    torch.testing.assert_close(call["key"], arguments["k"][:, :, first : first + count], rtol=0, atol=0)
    assert call["key"].untyped_storage().data_ptr() == arguments["k"].untyped_storage().data_ptr()  # a view
    assert (call["attn_mask"] is not None) == masked


N = Sizes(B=2, H=3, G=1, T=5, S=7, D=11, E=13)
BACKENDS = ("plain", "array", "explicit")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_says_its_shapes_and_its_dtype(backend: str) -> None:
    t = hw.trace(**draw(N, mask="causal").arguments(NATIVE[backend]))
    dtype = {"plain": "nested lists", "array": "float64", "explicit": "torch.float64"}[backend]
    assert repr(t) == f"Trace({dtype}: scores, capped, masked, weights (2, 3, 5, 7), lse (2, 3, 5), out (2, 3, 5, 13))"


def cells(html: str) -> list[float]:
    """The weight in each cell, line by line."""
    return [float(weight) for weight in re.findall(r"<td>([\d.]+)</td>", html)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trace_in_a_notebook_shows_the_weights_of_each_head(backend: str) -> None:
    """One key has weight 1, all others 0; of two documents the first is shown."""
    problem = draw(N, mask="window offset")
    html = hw.trace(**problem.arguments(NATIVE[backend]) | {"mask": hw.Window(0, 0)})._repr_html_()
    assert html.count("<p>head ") == 3
    assert cells(html) == [float(j == i + 2) for i in range(5) for j in range(7)] * 3


def test_traces_at_the_edge_show_themselves() -> None:
    q = [[[Value(1.0)], [Value(2.0)]]]
    assert len(cells(hw.trace(q, q, q)._repr_html_())) == 4
    x = torch.ones(1, 2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    assert len(cells(hw.trace(x, x, x)._repr_html_())) == 2 * 3 * 3
    assert len(cells(hw.trace(x[0, 0], x[0, 0], x[0, 0])._repr_html_())) == 3 * 3
    x = torch.ones(1, 17, 37, 1)
    assert len(cells(hw.trace(x, x, x)._repr_html_())) == 16**3
    x = torch.ones(1, 2, 0, 5)
    assert "<table" not in hw.trace(x, x, x)._repr_html_()


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
        for word, way in {"attn_mask": "Allowed", "valid_lens": "Lengths"}.items():
            refuses(partial(function, q, q, q, **{word: 4}), f"{word}= is here .*{way}")
        with pytest.raises(TypeError, match="colour"):
            function(q, q, q, colour=1)
