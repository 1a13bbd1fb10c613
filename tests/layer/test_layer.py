"""The layer against its own definition: four matrices, split into heads by hand, around `attend`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from torch import Tensor

import headwise as hw
from headwise.records import Call

B, T, S = 2, 5, 7
BASE: dict[str, Any] = {"d_model": 29, "n_heads": 6, "head_dim": 10}
CASES: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_kv_heads": 2},
    "mqa": {"n_kv_heads": 1},
    "q bias": {"q_bias": True},
    "kv bias": {"kv_bias": True, "n_kv_heads": 3},
    "out bias": {"out_bias": True},
    "value_dim": {"value_dim": 7, "n_kv_heads": 3},
    "widths": {"d_in": 11, "d_out": 17},
    "no output projection": {"out_proj": False, "value_dim": 3},
    "qk_norm": {"qk_norm": True, "n_kv_heads": 2},
    "rope": {"rope": hw.RoPE(), "n_kv_heads": 2},
    "rope interleaved": {"rope": hw.RoPE(theta=31.0, interleaved=True)},
    "rope in part": {"rope": hw.RoPE(dim=4)},
    "sink": {"sink": True},
    "softcap": {"softcap": 0.7},
    "causal": {"mask": hw.Causal()},
    "all": {
        "d_in": 11,
        "d_out": 17,
        "n_kv_heads": 2,
        "value_dim": 7,
        "q_bias": True,
        "kv_bias": True,
        "out_bias": True,
        "mask": hw.Causal() & hw.Alibi(),
        "rope": hw.RoPE(dim=6),
        "qk_norm": True,
        "softcap": 1.3,
        "sink": True,
    },
}
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
ROPE_TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}  # cosines and sines are kept in float32


@pytest.fixture(params=CASES)
def layer(request: Any, shaken: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(1)
    made: hw.MultiHeadAttention = shaken(hw.MultiHeadAttention(**BASE, **CASES[request.param]).double())
    return made


@pytest.fixture
def simple(shaken: Any) -> Any:
    """A layer of the base sizes with the given differences."""

    def make(**changes: Any) -> hw.MultiHeadAttention:
        torch.manual_seed(2)
        made: hw.MultiHeadAttention = shaken(hw.MultiHeadAttention(**{**BASE, **changes}).double())
        return made

    return make


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(projection: torch.nn.Linear, x: Tensor, width: int) -> Tensor:
    """(B,T,c) -> (B,heads,T,width), head by head out of the rows of the matrix."""
    heads = []
    for start in range(0, projection.out_features, width):
        rows = slice(start, start + width)
        bias = 0 if projection.bias is None else projection.bias[rows]
        heads.append(torch.einsum("btc,dc->btd", x, projection.weight[rows]) + bias)
    return torch.stack(heads, 1)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain


def by_hand(
    layer: hw.MultiHeadAttention,
    x: Tensor,
    turn: Any,
    context: Tensor | None = None,
    mask: hw.Mask | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """What the layer's docstring promises, without its forward."""
    spec, source = layer.spec, x if context is None else context
    q = split(layer.q_proj, x, spec.head_dim)
    k, v = split(layer.k_proj, source, spec.head_dim), split(layer.v_proj, source, spec.value_dim)
    if spec.qk_norm:
        q, k = normed(q, layer.q_norm.weight), normed(k, layer.k_norm.weight)
    if spec.rope:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        q, k = turn(q, spec.rope, positions), turn(k, spec.rope, positions)
    out = hw.attend(q, k, v, mask=mask, softcap=spec.softcap, sink=layer.sink, gate=gate)
    if not spec.out_proj:
        return torch.cat([out[:, h] for h in range(spec.n_heads)], -1)
    e, result = spec.value_dim, 0.0
    for h in range(spec.n_heads):
        result = result + out[:, h] @ layer.o_proj.weight[:, h * e : (h + 1) * e].T
    return result if layer.o_proj.bias is None else result + layer.o_proj.bias


def test_equals_the_heads_composed_by_hand(layer: hw.MultiHeadAttention, by_paper: Any) -> None:
    x = draw(B, T, layer.spec.d_in)
    tolerance = ROPE_TOLERANCE if layer.spec.rope else TOLERANCE
    torch.testing.assert_close(layer(x), by_hand(layer, x, by_paper, mask=layer.spec.mask), **tolerance)


def test_calls_and_layers_join(layer: hw.MultiHeadAttention, by_paper: Any, simple: Any) -> None:
    x, lengths = draw(B, T, layer.spec.d_in), hw.Lengths([3, 5])
    both = lengths if layer.spec.mask is None else layer.spec.mask & lengths
    tolerance = ROPE_TOLERANCE if layer.spec.rope else TOLERANCE
    torch.testing.assert_close(layer(x, mask=lengths), by_hand(layer, x, by_paper, mask=both), **tolerance)
    assert not torch.equal(layer(x, mask=lengths), layer(x))
    x, gate = draw(B, T, layer.spec.d_in), draw(6, seed=5)
    expected = by_hand(layer, x, by_paper, mask=layer.spec.mask, gate=gate)
    tolerance = ROPE_TOLERANCE if layer.spec.rope else TOLERANCE
    torch.testing.assert_close(layer(x, gate=gate), expected, **tolerance)
    layer, x = simple(out_bias=True, value_dim=7), draw(B, T, 29)
    gated = layer(x, gate=torch.tensor([1.0, 1, 1, 0, 1, 1]))
    with torch.no_grad():
        layer.o_proj.weight[:, 21:28] = 0
    torch.testing.assert_close(gated, layer(x), **TOLERANCE)


@pytest.mark.parametrize("n_kv_heads", [6, 2, 1])
def test_cross_attention_between_widths(simple: Any, by_paper: Any, n_kv_heads: int) -> None:
    layer = simple(d_in=11, d_context=13, d_out=17, value_dim=7, n_kv_heads=n_kv_heads, qk_norm=True)
    x, memory, mask = draw(B, T, 11), draw(B, S, 13, seed=4), hw.Lengths([3, 6])
    expected = by_hand(layer, x, by_paper, memory, mask)
    assert expected.shape == (B, T, 17)
    torch.testing.assert_close(layer(x, context=memory, mask=mask), expected, **TOLERANCE)


def test_a_layer_is_built_from_its_spec(layer: hw.MultiHeadAttention) -> None:
    assert layer.spec.n_parameters == sum(p.numel() for p in layer.parameters())
    x = draw(B, T, layer.spec.d_in)
    again = hw.MultiHeadAttention.from_spec(layer.spec).double().eval()
    assert again.spec == layer.spec
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    spec = hw.MultiHeadAttention(30, 6, n_kv_heads=3, mask=hw.Causal()).spec
    sizes = (spec.head_dim, spec.value_dim, spec.d_in, spec.d_context, spec.d_out)
    assert sizes == (5, 5, 30, 30, 30)
    assert spec == hw.AttentionSpec(d_model=30, n_heads=6, n_kv_heads=3, mask=hw.Causal())
    fields = [field.name for field in dataclasses.fields(hw.AttentionSpec)]
    assert list(inspect.signature(hw.AttentionSpec).parameters) == fields
    parameters = inspect.signature(hw.MultiHeadAttention).parameters
    assert list(parameters) == [*fields, "device", "dtype"]
    by_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert by_name == list(parameters)[3:]


def test_a_copy_and_a_state_share_nothing(layer: hw.MultiHeadAttention, simple: Any) -> None:
    x = draw(B, T, layer.spec.d_in)
    before, twin = layer(x), copy.deepcopy(layer)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x), before)
    layer = simple(rope=hw.RoPE(), sink=True, qk_norm=True)
    layer(draw(B, T, 29))
    matrices = [f"{x}_proj.weight" for x in "kqov"]
    assert sorted(layer.state_dict()) == sorted([*matrices, "sink", "q_norm.weight", "k_norm.weight"])
    options = {"sink": True, "qk_norm": True, "relative_bias": hw.RelativeBias(), "out_bias": True}
    layer = hw.MultiHeadAttention(**BASE, **options, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    again = hw.MultiHeadAttention.from_spec(layer.spec, device="cpu", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in again.parameters()} == {("cpu", torch.float64)}
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in simple(**options).named_parameters()
    }


def test_values_from_another_sequence_or_one_document(simple: Any, layer: hw.MultiHeadAttention) -> None:
    # Against a layer whose values are those of a sequence as wide as the keys'.
    layer = simple(d_context=13, d_values=11, kv_bias=True)
    x, keys, others = draw(B, T, 29), draw(B, S, 13, seed=4), draw(B, S, 11, seed=5)
    both = simple(d_context=24, kv_bias=True)  # reads keys from the first 13 features, values from the rest
    state = layer.state_dict()
    state["k_proj.weight"] = torch.cat([state["k_proj.weight"], torch.zeros(60, 11)], 1)
    state["v_proj.weight"] = torch.cat([torch.zeros(60, 13), state["v_proj.weight"]], 1)
    both.load_state_dict(state)
    expected = both(x, context=torch.cat([keys, others], -1))
    torch.testing.assert_close(layer(x, context=keys, values=others), expected, **TOLERANCE)
    layer, x, memory = simple(n_kv_heads=2), draw(B, T, 29), draw(B, S, 29, seed=4)
    assert torch.equal(layer(x, context=memory, values=memory), layer(x, context=memory))
    causal = simple(mask=hw.Causal())
    assert torch.equal(causal(x, context=x, values=x), causal(x))
    x, gate = draw(B, T, layer.spec.d_in), draw(6, seed=5)
    assert torch.equal(layer(x, x, x), layer(x))
    assert torch.equal(layer(x, x, x, mask=hw.Lengths([3, 5]), gate=gate), layer(x, mask=hw.Lengths([3, 5]), gate=gate))
    cache = hw.KVCache()
    steps = [layer(part, part, part, cache=cache) for part in x.split(2, 1)]
    if layer.spec.mask is not None:  # where later tokens may be seen, steps see fewer
        torch.testing.assert_close(torch.cat(steps, 1), layer(x), **ROPE_TOLERANCE)
    assert (cache.length, cache.holds_context) == (T, False)
    x = draw(T, layer.spec.d_in)
    expected = layer(x[None])[0]
    assert torch.equal(layer(x), expected) and torch.equal(layer(x, x, x), expected)
    assert str(hw.explain(layer, x)) == str(hw.explain(layer, x[None]))


def test_queries_keys_and_values_are_watched_and_ablated(simple: Any) -> None:
    layer, q, k, v = simple(n_kv_heads=2), draw(B, T, 29), draw(B, S, 29, seed=4), draw(B, S, 29, seed=5)
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


def test_caches_know_contexts_and_values(simple: Any) -> None:
    layer, x, cache = simple(), draw(T, 29), hw.KVCache()
    keys, others = draw(S, 29, seed=4), draw(S, 29, seed=5)
    steps = [
        layer(x[:2], keys, others, cache=cache),
        layer(x[2:4], keys, others, cache=cache),
        layer(x[4:], cache=cache),
    ]
    torch.testing.assert_close(torch.cat(steps), layer(x, keys, others), **TOLERANCE)
    refuses(lambda: layer(x, keys.clone(), others, cache=cache), "the cache holds the keys of another context tensor")
    layer, x = simple(d_values=13), draw(B, T, 29)
    keys, others, cache = draw(B, S, 29, seed=4), draw(B, S, 13, seed=5), hw.KVCache()
    whole = layer(x, context=keys, values=others)
    steps = [layer(x[:, :1], context=keys, values=others, cache=cache) for _ in range(1)]
    steps += [layer(x[:, 1:2], cache=cache), layer(x[:, 2:], context=keys, values=others, cache=cache)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, **TOLERANCE)
    with pytest.raises(hw.HeadwiseError, match="the cache holds the values of another context tensor"):
        layer(x, context=keys, values=others.clone(), cache=cache)
    layer, x, memory, cache = simple(), draw(B, T, 29), draw(B, S, 29, seed=4), hw.KVCache()
    layer(x, context=memory, values=-memory, cache=cache)
    refuses(lambda: layer(x, context=memory, cache=cache), "the cache holds the values of another context tensor")


def heads_out(layer: hw.MultiHeadAttention, x: Tensor) -> Tensor:
    """(B,H,T,E), what each head gives before the heads are joined."""
    seen: list[Call] = []
    layer.watchers.append(seen.append)
    layer(x)
    layer.watchers.remove(seen.append)
    return seen[0].out


def test_watchers_receive_the_call_and_what_it_read(layer: hw.MultiHeadAttention, simple: Any) -> None:
    seen: list[Call] = []
    layer.watchers.append(seen.append)
    x, spec = draw(B, T, layer.spec.d_in), layer.spec
    layer(x, gate=draw(6, seed=8))
    (call,) = seen
    assert call.layer is layer
    assert call.q.shape == (B, 6, T, spec.head_dim)
    assert call.k.shape == (B, spec.n_kv_heads, T, spec.head_dim)
    assert call.v.shape == (B, spec.n_kv_heads, T, spec.value_dim)
    assert torch.equal(hw.attend(call.q, call.k, call.v, **call.options._asdict()), call.out)
    layer, x, cache, seen = simple(mask=hw.Causal()), draw(B, T, 29), hw.KVCache(), []
    layer(x[:, :3], cache=cache)
    layer.watchers.append(seen.append)
    layer(x[:, 3:], cache=cache)
    assert seen[0].q.shape[2] == 2
    assert seen[0].k.shape[2] == 5
    layer, x, calls = simple(scale=0.9, mask=hw.Causal()), draw(B, T, 29), []
    layer.watchers.append(calls.append)
    with hw.watch(layer) as seen:
        layer(x)
    q, k = calls[0].q, calls[0].k
    scores = (0.9 * q @ k.transpose(2, 3)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 2))
    assert [seen[f"L0.H{h}"].entropy for h in range(6)] == pytest.approx(entropy.tolist(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_output_has_the_input_s_dtype(dtype: torch.dtype) -> None:
    layer = hw.MultiHeadAttention(30, 3, rope=hw.RoPE(), qk_norm=True, sink=True).to(dtype)
    assert layer(draw(B, T, 30).to(dtype)).dtype == dtype


def test_a_wrong_layer_is_refused() -> None:
    refuses_table("layer", globals() | {"layer": lambda **changes: hw.MultiHeadAttention(**{**BASE, **changes})})


X = draw(B, T, 29)


def test_a_wrong_call_is_refused(simple: Any) -> None:
    refuses_table("call", globals() | {"simple": simple})


@pytest.mark.parametrize("shape", [(1,), (3,), (7,), (2, 1), (3, 5), (1, 1)])
def test_positions_of_another_length_are_refused(simple: Any, shape: tuple[int, ...]) -> None:
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
            "key_padding_mask": "hw.Lengths(n)",
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
    with pytest.raises(
        hw.HeadwiseError, match=r"True forbids in nn.MultiheadAttention \(pass Allowed\(~array\)\), allows in"
    ):
        layer(x, mask=torch.ones(T, T, dtype=torch.bool))
    assert list(inspect.signature(hw.MultiHeadAttention).parameters)[:2] == ["d_model", "n_heads"]
