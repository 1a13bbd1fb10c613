"""The courses' layers: the right function, the exact maps between their forms, what they refuse; the ladder."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses, refuses_table
from invoking import Invoke
from small_models import course_classes
from torch import nn

import headwise as hw
from headwise.courses import ladder as study
from headwise.courses import numpy_layer
from headwise.courses.from_scratch import (
    CausalAttention,
    MultiHeadAttentionWrapper,
    MultiHeadAttn,
    class_from_wrapper,
    wrapper_from_class,
)
from headwise.courses.ladder import run_ladder

B, T, D_IN, D, H, CONTEXT = 2, 5, 7, 3, 11, 13  # different primes; d_out = H * D = 33
CLOSE = 1e-13


def text(seed: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.randn(B, tokens, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def course_class(bias: bool = False, dropout: float = 0.0) -> MultiHeadAttn:
    torch.manual_seed(1)
    return MultiHeadAttn(D_IN, H * D, CONTEXT, dropout, H, qkv_bias=bias).double()


@pytest.mark.parametrize("bias", [False, True])
def test_the_class_taken_apart_is_the_same_function_with_the_same_gradients(bias: bool) -> None:
    layer = course_class(bias)
    wrapper, projection = wrapper_from_class(layer)
    assert [head.W_query.weight.shape for head in wrapper.heads] == [(D, D_IN)] * H
    whole, apart = layer(text()), projection(wrapper(text()))
    torch.testing.assert_close(apart, whole, rtol=0, atol=CLOSE)
    cotangent = torch.randn(B, T, H * D, dtype=torch.float64)
    for out in (whole, apart):
        (out * cotangent).sum().backward()
    for name in ("W_query", "W_key", "W_value"):
        joined = torch.cat([getattr(head, name).weight.grad for head in wrapper.heads])
        torch.testing.assert_close(joined, getattr(layer, name).weight.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(projection.weight.grad, layer.out_proj.weight.grad, rtol=0, atol=1e-12)


def test_the_class_there_and_back_has_weights_of_its_own() -> None:
    layer = course_class(bias=True)
    back = class_from_wrapper(*wrapper_from_class(layer))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert before.keys() == back.state_dict().keys()
    for name, value in back.state_dict().items():
        assert torch.equal(value, before[name]), name
        value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_wrapper_as_the_course_uses_it_is_another_function() -> None:
    """Each head has the whole of d_out, and nothing follows: h times as wide, h times the weights, no mixing."""
    wrapper = MultiHeadAttentionWrapper(D_IN, H * D, CONTEXT, 0.0, H).double()
    layer = course_class()
    assert wrapper(text()).shape == (B, T, H * (H * D))
    assert layer(text()).shape == (B, T, H * D)
    weights = {module: sum(p.numel() for p in module.parameters()) for module in (wrapper, layer)}
    assert weights[wrapper] == H * 3 * (H * D) * D_IN
    assert weights[layer] == 3 * (H * D) * D_IN + (H * D) ** 2 + H * D


@pytest.mark.parametrize("build", [CausalAttention, MultiHeadAttn])
def test_dropout_is_on_the_weights_and_in_training_only(build: Any) -> None:
    layer = build(D_IN, H * D, CONTEXT, 0.5, *(() if build is CausalAttention else (H,))).double()
    dropped: list[torch.Tensor] = []
    layer.dropout.register_forward_hook(lambda module, given, made: dropped.append(made / given[0]))
    torch.manual_seed(3)
    layer(text())
    seen = dropped[0][torch.isfinite(dropped[0])]
    assert set(seen.unique().tolist()) == {0.0, 2.0}  # dropped, or made up for
    assert 0.35 < (seen == 0).double().mean() < 0.65
    layer.eval()
    assert torch.equal(layer(text()), layer(text()))


def test_what_the_torch_classes_refuse() -> None:
    refuses_table("torch_classes", globals())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_the_wrapper_of_a_notebook_becomes_a_class(bias: bool, projected: bool) -> None:
    torch.manual_seed(5)
    printed = course_classes()["MultiHeadedAttentionWrapper"]  # code that is not ours
    wrapper = printed(D_IN, D, CONTEXT, 0.2, H, qkv_bias=bias).double().eval()
    projection = nn.Linear(H * D, H * D).double() if projected else None
    layer = class_from_wrapper(wrapper, projection)
    expected = wrapper(text()) if projection is None else projection(wrapper(text()))
    assert (layer.num_heads, layer.head_dim, layer.d_out, layer.dropout.p) == (H, D, H * D, 0.2)
    torch.testing.assert_close(layer(text()), expected, rtol=0, atol=CLOSE)


def statistics_of(model: nn.Module, x: torch.Tensor, names: list[str]) -> dict[str, float]:
    with hw.watch(model) as seen, torch.no_grad():
        model(x)
    assert list(seen) == names
    return {
        f"{name} of {head}": getattr(seen[head], name) for head in seen for name in ("entropy", "previous", "first")
    }


def test_heads_of_courses_are_watched() -> None:
    course, names = course_class(bias=True), [f"L0.H{h}" for h in range(H)]
    before = course(text())
    ours = statistics_of(course, text(), names)
    theirs = statistics_of(hw.from_torch(course), text(), names)
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert torch.equal(course(text()), before)
    course = course_class()
    wrapper, projection = wrapper_from_class(course)
    names = [f"L0.H{h}" for h in range(H)]
    assert statistics_of(nn.Sequential(wrapper, projection), text(), names) == pytest.approx(
        statistics_of(course, text(), names), rel=1e-9
    )
    single = CausalAttention(D_IN, D, CONTEXT, 0.0).double()
    statistics_of(single, text(), ["L0.H0"])
    statistics_of(nn.Sequential(single, CausalAttention(D, D, CONTEXT, 0.0).double()), text(), ["L0.H0", "L1.H0"])


@pytest.mark.parametrize("form", ["class", "wrapper"])
def test_a_head_of_the_courses_is_silenced_by_its_name(form: str) -> None:
    course = course_class()
    wrapper, projection = wrapper_from_class(course)
    model = course if form == "class" else nn.Sequential(wrapper, projection)
    with torch.no_grad(), hw.ablate(model, ["L0.H3"], how="zero"):
        silenced = model(text())
    with torch.no_grad():
        course.out_proj.weight[:, 3 * D : 4 * D] = 0
    torch.testing.assert_close(silenced, course(text()), rtol=0, atol=CLOSE)


# What a notebook of the course does, its import line changed. The text is ours, the calls and assertions are theirs.

NOTEBOOK_C = Path(__file__).with_name("notebook_c.txt").read_text(encoding="utf-8")
NOTEBOOK_D = Path(__file__).with_name("notebook_d.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "source",
    [
        NOTEBOOK_C.format(wrapper="MultiHeadedAttentionWrapper", name="MultiHeadAttn"),
        NOTEBOOK_C.format(wrapper="MultiHeadAttentionWrapper", name="MultiHeadAttention"),
        NOTEBOOK_D,
    ],
    ids=["the course's names", "the book's names", "NumPy"],
)
def test_a_notebook_runs_with_its_import_line_changed(source: str) -> None:
    exec(compile(source, "notebook", "exec"), {})


WIDTH, HEADS = 35, 5  # heads of width 7


def course_d() -> numpy_layer.MultiHeadAttention:
    return numpy_layer.MultiHeadAttention(WIDTH, HEADS, seed=11)


def masks() -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(5)
    causal = np.where(np.tri(11, dtype=bool), 0, -np.inf)
    return {
        "none": None,
        "causal": causal,
        "causal, -1e9": np.where(np.tri(11, dtype=bool), 0, -1e9).astype(np.float32),
        "bias": rng.normal(size=(11, 11)),
        "bias and causal": rng.normal(size=(11, 11)) + causal,
        "whole numbers": -np.abs(np.arange(11)[:, None] - np.arange(11)),
    }


@pytest.mark.parametrize("name", masks())
def test_loop_and_batched_are_the_plain_loop_in_single_precision(name: str) -> None:
    layer, mask = course_d(), masks()[name]
    x = np.random.default_rng(7).normal(size=(11, WIDTH)).astype(np.float32)

    def split(y: np.ndarray) -> list[Any]:
        return y.astype(np.float64).reshape(11, HEADS, 7).swapaxes(0, 1).tolist()

    wide = x.astype(np.float64)
    bias = None if mask is None else hw.Bias(np.asarray(mask, np.float64))
    heads = hw.attend(*(split(wide @ W) for W in (layer.W_Q, layer.W_K, layer.W_V)), mask=bias)
    expected = np.array(heads).swapaxes(0, 1).reshape(11, WIDTH) @ layer.W_O
    for out in (layer.forward(x, mask), layer.forward_loop(x, mask)):
        assert out.shape == (11, WIDTH) and out.dtype == np.float32
        np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)  # sums of 35 numbers near 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_stays_in_single_precision(dtype: Any) -> None:
    x = np.ones((11, WIDTH), dtype)
    for mask in masks().values():
        for form in (course_d().forward, course_d().forward_loop):
            assert form(x, mask).dtype == np.float32
    for attend in (numpy_layer.attend_loop, numpy_layer.attend_batched, numpy_layer.attend_einsum):
        steps = attend(*np.ones((3, 5, 11, 7), np.float32), np.zeros((11, 11), np.float32))
        assert [step.dtype for step in steps] == [np.float32] * 3


def test_draws_and_rows() -> None:
    layer = course_d()
    assert (layer.W_Q[0, 0], layer.W_O[-1, -1]) == pytest.approx((0.005779632367, 0.166004523635), rel=1e-6)
    rng = np.random.default_rng(11)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        expected = rng.standard_normal((WIDTH, WIDTH)) / math.sqrt(WIDTH)
        np.testing.assert_allclose(getattr(layer, name), expected, rtol=1e-7)
    assert not np.array_equal(numpy_layer.MultiHeadAttention(WIDTH, HEADS).W_Q, layer.W_Q)  # the seed counts
    mask = np.zeros((11, 11))
    mask[4] = -np.inf
    x = np.random.default_rng(3).normal(size=(11, WIDTH))
    for form in (course_d().forward, course_d().forward_loop):
        out = form(x, mask)
        assert not out[4].any() and out[3].any() and np.isfinite(out).all()


@pytest.mark.parametrize("tokens", [1, 11])
def test_the_causal_mask_is_additive_and_safe(tokens: int) -> None:
    mask = numpy_layer.causal_mask(tokens)
    assert mask.dtype == np.float32 and mask.shape == (tokens, tokens)
    assert all(mask[i, j] == (0 if j <= i else -np.inf) for i in range(tokens) for j in range(tokens))
    weights = numpy_layer.softmax(np.zeros((tokens, tokens), np.float32) + mask)
    np.testing.assert_allclose(weights, np.tri(tokens) / np.arange(1, tokens + 1)[:, None], rtol=1e-6)
    refuses(lambda: numpy_layer.causal_mask(0), "T=0 must be a positive whole number")


def test_what_the_numpy_layer_refuses() -> None:
    refuses_table("numpy_layer", globals())


TOKENS = 11


def test_eight_ways_agree_within_rounding() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found = run_ladder(WIDTH, HEADS, TOKENS, seed=3, rounds=1)
    assert torch.equal(torch.rand(3), expected)  # nobody's random state has moved
    assert found.agrees and len(found.ways) == 8 and found.ways[0].difference == 0
    assert all(way.ms > 0 and way.difference <= found.tolerance for way in found.ways)  # type: ignore[operator]
    assert found.ways[1].difference < 1e-13  # type: ignore[operator]  # in float64, as the loops
    assert all(way.difference > 0 for way in found.ways[1:])  # type: ignore[operator]  # each computes by itself
    assert run_ladder(WIDTH, 1, 1, rounds=1).agrees


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda call: lambda: call() * factor


SPOILED: dict[str, Callable[[Any], Any]] = {
    "scaled": scaled(1.01),
    "rounded to bfloat16": lambda call: lambda: call().bfloat16().float(),
    "not a number": scaled(float("nan")),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_way_is_found_out(how: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    honest = study.ways

    def spoiled(*given: Any) -> dict[str, Callable[[], Any]]:
        calls = honest(*given)
        return calls | {"course class": SPOILED[how](calls["course class"])}

    monkeypatch.setattr(study, "ways", spoiled)
    outcome = invoke("ladder", "--width", WIDTH, "--heads", HEADS, "--json")
    record = json.loads(outcome.out)
    assert outcome.code == 1 and record["agrees"] is False
    wrong = [way["name"] for way in record["ways"] if not (way["difference"] or 1.0) <= record["tolerance"]]
    assert wrong[-1] == "course class"


def test_sizes_that_do_not_fit_are_refused() -> None:
    refuses_table("ladder", {"run_ladder": run_ladder})
