"""The layer as an object: its spec, its copies, what it takes and what it refuses. test_matrix.py has its numbers."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from small_models import noisy, normal

import headwise as hw
from headwise.layer.layer import ELSEWHERE

B, T, S = 2, 5, 7
BASE: dict[str, Any] = {"d_model": 29, "n_heads": 6, "head_dim": 10}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "widths": {"d_in": 11, "d_out": 17, "n_kv_heads": 2, "value_dim": 7},
    "no output projection": {"out_proj": False, "value_dim": 3},
    "causal": {"mask": hw.Causal() & hw.Alibi(), "rope": hw.RoPE(dim=6), "qk_norm": True, "sink": True},
}
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def simple(**changes: Any) -> hw.MultiHeadAttention:
    """A layer of the base sizes with the given differences."""
    return noisy(seed=2, **{**BASE, **changes}).eval()


@pytest.fixture(params=CASES)
def layer(request: Any) -> hw.MultiHeadAttention:
    return simple(**CASES[request.param])


def test_a_layer_is_built_from_its_spec(layer: hw.MultiHeadAttention) -> None:
    assert layer.spec.n_parameters == sum(p.numel() for p in layer.parameters())
    x = normal(B, T, layer.spec.d_in)
    again = hw.MultiHeadAttention.from_spec(layer.spec).double().eval()
    assert again.spec == layer.spec
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    spec = hw.MultiHeadAttention(30, 6, n_kv_heads=3, mask=hw.Causal()).spec
    assert spec == hw.AttentionSpec(d_model=30, n_heads=6, n_kv_heads=3, mask=hw.Causal())
    fields = [field.name for field in dataclasses.fields(hw.AttentionSpec)]
    assert list(inspect.signature(hw.AttentionSpec).parameters) == fields
    parameters = inspect.signature(hw.MultiHeadAttention).parameters
    assert list(parameters) == [*fields, "device", "dtype"]
    by_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert by_name == list(parameters)[3:]


def test_the_state_and_where_it_lies() -> None:
    layer = simple(rope=hw.RoPE(), sink=True, qk_norm=True)
    layer(normal(B, T, 29))
    matrices = [f"{x}_proj.weight" for x in "kqov"]
    assert sorted(layer.state_dict()) == sorted([*matrices, "sink", "q_norm.weight", "k_norm.weight"])
    options = {"sink": True, "qk_norm": True, "out_bias": True}
    layer = hw.MultiHeadAttention(**BASE, **options, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    again = hw.MultiHeadAttention.from_spec(layer.spec, device="cpu", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in again.parameters()} == {("cpu", torch.float64)}
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in simple(**options).named_parameters()
    }


def test_values_from_another_sequence_or_one_document(layer: hw.MultiHeadAttention) -> None:
    plain, x, memory = simple(n_kv_heads=2), normal(B, T, 29), normal(B, S, 29, seed=4)
    assert torch.equal(plain(x, context=memory, values=memory), plain(x, context=memory))
    causal = simple(mask=hw.Causal())
    assert torch.equal(causal(x, context=x, values=x), causal(x))
    x, gate = normal(B, T, layer.spec.d_in), normal(6, seed=5)
    assert torch.equal(layer(x, x, x), layer(x))
    assert torch.equal(layer(x, x, x, mask=hw.Lengths([3, 5]), gate=gate), layer(x, mask=hw.Lengths([3, 5]), gate=gate))
    cache = hw.KVCache()
    steps = [layer(part, part, part, cache=cache) for part in x.split(2, 1)]
    if layer.spec.mask is not None:  # where later tokens may be seen, steps see fewer
        torch.testing.assert_close(torch.cat(steps, 1), layer(x), rtol=1e-6, atol=1e-6)  # float32 cosines
    assert (cache.length, cache.holds_context) == (T, False)
    x = normal(T, layer.spec.d_in)
    expected = layer(x[None])[0]
    assert torch.equal(layer(x), expected) and torch.equal(layer(x, x, x), expected)
    assert str(hw.explain(layer, x)) == str(hw.explain(layer, x[None]))


def test_queries_keys_and_values_are_watched_and_ablated() -> None:
    layer, q, k, v = simple(n_kv_heads=2), normal(B, T, 29), normal(B, S, 29, seed=4), normal(B, S, 29, seed=5)
    with torch.no_grad():
        with hw.watch(layer) as seen:
            whole = layer(q, k, v)
        with hw.watch(layer) as keys_alone:
            layer(q, k)
        with hw.ablate(layer, ["L0.H3"]):
            silenced = layer(q, k, v)
        layer.o_proj.weight[:, 30:40] = 0
    assert seen["L0.H3"].entropy == keys_alone["L0.H3"].entropy > 0
    assert "distance" not in seen["L0.H3"].rows  # two sequences have none
    torch.testing.assert_close(silenced, layer(q, k, v), **TOLERANCE)
    assert not torch.allclose(silenced, whole)


def test_a_wrong_layer_is_refused() -> None:
    build = {"layer": lambda **changes: hw.MultiHeadAttention(**{**BASE, **changes})}
    refuses_table("layer", globals() | build | {"math": math})


X = normal(B, T, 29)


def test_a_wrong_call_is_refused_and_not_explained() -> None:
    refuses_table("call", globals())
    explaining = {"simple": lambda **changes: functools.partial(hw.explain, simple(**changes))}
    refuses_table("call", globals() | explaining)


@pytest.mark.parametrize("shape", [(1,), (3,), (7,), (2, 1), (3, 5), (1, 1)])
def test_positions_of_another_length_are_refused(shape: tuple[int, ...]) -> None:
    refuses(lambda: simple(rope=hw.RoPE())(X, positions=torch.zeros(shape, dtype=torch.long)), "positions")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_an_input_of_another_dtype_is_refused_with_both(dtype: torch.dtype) -> None:
    layer, x = hw.MultiHeadAttention(30, 3, d_values=7), torch.zeros(B, T, 30)
    said = rf"is {dtype} and the weights of this layer are torch.float32; pass {{}}.to\(torch.float32\), or cast"
    for name, arguments in (
        ("x", (x.to(dtype), x, x[..., :7])),
        ("context", (x, x.to(dtype), x[..., :7])),
        ("values", (x, x, x[..., :7].to(dtype))),
    ):
        first, context, values = arguments
        with pytest.raises(hw.HeadwiseError, match=f"^{name} " + said.format(name)):
            layer(first, context=context, values=values)


def test_words_of_torch_are_translated() -> None:
    """Who comes from nn.MultiheadAttention reads in one line what it is called here."""
    layer, x = hw.MultiHeadAttention(30, 3), torch.zeros(B, T, 30)
    foreign: dict[Callable[..., Any], dict[str, str]] = {
        hw.MultiHeadAttention: {
            "embed_dim": "d_model=",
            "num_heads": "n_heads=",
            "batch_first": "(batch, tokens, width)",
        },
        functools.partial(hw.MultiHeadAttention, 30, 3): {"seed": "numpy_layer.MultiHeadAttention", "bias": "kv_bias="},
        functools.partial(layer, x, x, x): {
            "key_padding_mask": "hw.Allowed(~key_padding_mask[:, None, None])",
            "attn_mask": "True forbids in nn.MultiheadAttention, and allows in hw.Allowed",
            "need_weights": "hw.watch(layer, maps=True)",
            "is_causal": "mask=hw.Causal()",
        },
        layer: {"query": "layer(q, k, v)"},
    }
    for call, words in foreign.items():
        with pytest.raises(hw.HeadwiseError) as refusal:
            call(**dict.fromkeys(words))
        for word, name in words.items():
            assert f"{word}= is here " in str(refusal.value) and name in str(refusal.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        layer(x, colour=1)
    with pytest.raises(hw.HeadwiseError, match=r"True forbids in nn.MultiheadAttention \(pass Allowed\(~array\)\),"):
        layer(x, mask=torch.ones(T, T, dtype=torch.bool))
    assert list(inspect.signature(hw.MultiHeadAttention).parameters)[:2] == ["d_model", "n_heads"]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_advised_for_attention_mask_gives_a_padded_document_as_it_is_alone(side: str) -> None:
    advice = ELSEWHERE["called"]["attention_mask"].removeprefix("mask=").partition(", whichever")[0]
    layer, lengths = noisy(3, mask=hw.Causal(), rope=hw.RoPE()), (7, 5, 2)
    texts = [normal(n, 31, seed=n) for n in lengths]
    places = [slice(7 - n, 7) if side == "left" else slice(n) for n in lengths]
    x, attention_mask = torch.full((3, 7, 31), torch.nan).double(), torch.zeros(3, 7, dtype=torch.long)
    for b, (text, place) in enumerate(zip(texts, places, strict=True)):
        x[b, place], attention_mask[b, place] = text, 1
    out = layer(x, mask=eval(advice), positions=(attention_mask.cumsum(1) - 1).clamp(min=0))
    for b, (text, place) in enumerate(zip(texts, places, strict=True)):
        torch.testing.assert_close(out[b, place], layer(text))


def test_everything_is_drawn_after_the_meta_device() -> None:
    """As FSDP does: to_empty, then reset_parameters of every module that has it."""
    with torch.device("meta"):
        layer = hw.MultiHeadAttention(30, 6, sink=True, qk_norm=True)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 123.0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not layer.sink.any()
    assert all(parameter.abs().max() < 2 for parameter in layer.parameters())


def test_sizes_and_names_from_elsewhere() -> None:
    layer = hw.MultiHeadAttention(30, 6, 2, head_dim=7)
    assert (layer.n_heads, layer.n_kv_heads, layer.d_model, layer.head_dim) == (6, 2, 30, 7)
    with pytest.raises(AttributeError, match=r"no attribute 'W_Q'; it is here q_proj.weight"):
        layer.W_Q  # noqa: B018
    assert not hasattr(layer, "W_query") and not hasattr(layer, "nothing")
