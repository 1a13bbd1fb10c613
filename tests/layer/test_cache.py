"""The cache changes speed, never the answer: whole = in chunks = one token at a time."""

import copy
import functools
import io
import operator
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from cases import refuses, refuses_table
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same, in_chunks, noisy, normal
from torch import Tensor

import headwise as hw

B, T = 2, 11
MASKS = (hw.Causal(), hw.Window(3, 0), hw.Causal() & hw.Alibi(), hw.Window(0, 0))
YARN = hw.RoPE(scaling="yarn", factor=3.0, original_context=101, dim=4, beta_fast=5.0, beta_slow=2.0)
EARLY = hw.RoPE(before_norm=True)
ROPES = (None, hw.RoPE(), hw.RoPE(theta=53.0, interleaved=True), hw.RoPE(dim=4), YARN, EARLY)
specs = st.fixed_dictionaries(
    {
        "n_kv_heads": st.sampled_from([1, 2, 3, 6]), "value_dim": st.sampled_from([None, 7]),
        "kv_bias": st.booleans(), "qk_norm": st.booleans(), "rope": st.sampled_from(ROPES),
        "mask": st.sampled_from(MASKS), "softcap": st.sampled_from([None, 1.3]), "sink": st.booleans(),
    }
)  # fmt: skip
cuts = st.lists(st.integers(1, T - 1), max_size=T - 1, unique=True).map(lambda inner: [0, *sorted(inner), T])
ONE_BY_ONE = list(range(T + 1))


def draw() -> Tensor:
    return normal(B, T, 31)


@given(specs, cuts, st.booleans())
@pytest.mark.slow
def test_whole_equals_chunks_equals_one_by_one(spec: dict[str, Any], at: list[int], gated: bool) -> None:
    layer, x = noisy(**spec), draw()
    gate = torch.linspace(-1, 2, 6, dtype=torch.float64) if gated else None
    with torch.no_grad():
        whole = layer(x, gate=gate)
        assert_same(in_chunks(layer, x, at, gate=gate), whole)
        assert_same(in_chunks(layer, x, ONE_BY_ONE, gate=gate), whole)


def gradients(layer: hw.MultiHeadAttention, x: Tensor, at: list[int]) -> list[Tensor | None]:
    """Of a weighted sum of the output, for x and for every parameter that is not frozen."""
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    out = layer(x) if len(at) == 2 else in_chunks(layer, x, at)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), wanted))


@settings(max_examples=25)
@given(specs, cuts)
def test_gradients_flow_through_the_cache(spec: dict[str, Any], at: list[int]) -> None:
    layer, x = noisy(**spec), draw()
    for actual, expected in zip(gradients(layer, x, at), gradients(layer, x, [0, T]), strict=True):
        assert_same(actual, expected)


def test_a_prompt_read_without_gradients_is_a_constant() -> None:
    layer, x, cache = noisy(**{"mask": hw.Causal(), "rope": hw.RoPE()}), draw(), hw.KVCache()
    with torch.no_grad():
        layer(x[:, :7], cache=cache)
    rest = layer(x[:, 7:], cache=cache)
    assert_same(rest, layer(x)[:, 7:])
    rest.sum().backward()
    assert layer.k_proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_a_cache_takes_no_more_room_than_it_needs() -> None:
    cache, place, moves, n = hw.KVCache(), None, 0, 1000
    for _ in range(n):
        k, _ = cache.append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5))
        moves += k.data_ptr() != place
        place = k.data_ptr()
    assert cache.length == n
    assert moves <= 11  # 1, 2, 4, ..., 1024
    cache, places = hw.KVCache(max_length=7), set()
    with torch.no_grad():
        for _ in range(7):
            places.add(cache.append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5))[0].data_ptr())
        with pytest.raises(hw.HeadwiseError, match=r"max_length=7 and holds 7; 1 more make 8"):
            cache.append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5))
    assert len(places) == 1
    assert cache.length == 7
    cache, first = hw.KVCache(), torch.randn(2, 3, 5, 7)
    k, _ = cache.append(first, first)
    before = k.clone()
    for _ in range(9):
        cache.append(torch.randn(2, 3, 1, 7), torch.randn(2, 3, 1, 7))
    assert torch.equal(k, before)


def test_what_does_not_fit_a_cache_leaves_it_as_it_was() -> None:
    cache = hw.KVCache()
    cache.append(torch.zeros(2, 5, 3, 7), torch.zeros(2, 5, 3, 11))
    with pytest.raises(hw.HeadwiseError, match=r"holds values of .* \(2, 5, 11, .* and these are \(2, 5, 13, "):
        cache.append(torch.zeros(2, 5, 1, 7), torch.zeros(2, 5, 1, 13))
    assert cache.length == 3
    cache = hw.KVCache()
    cache.append(torch.zeros(2, 5, 3, 7), torch.zeros(2, 5, 3, 7))
    refuses_table("keys", {"append": lambda shape: cache.append(torch.zeros(shape), torch.zeros(shape))})
    assert cache.length == 3
    with pytest.raises(hw.HeadwiseError, match=r"holds keys of .*torch.float32.* these are .*torch.float64"):
        cache.append(torch.zeros(2, 5, 1, 7).double(), torch.zeros(2, 5, 1, 7).double())
    layer, x, cache = noisy(**{"mask": hw.Causal()}), draw(), hw.KVCache()
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        with pytest.raises(hw.HeadwiseError):
            layer(x[:, 5:], cache=cache, mask=hw.Lengths([3, 99]))
        assert cache.length == 5
        assert_same(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


KINDS: tuple[dict[str, int], ...] = ({}, {"max_length": T}, {"window": 5})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_cropped_was_never_there_and_reordered_rows_go_on(kind: dict[str, int], mode: Any) -> None:
    layer, x = noisy(mask=hw.Window(4, 0), rope=hw.RoPE()), draw()
    cache, order = hw.KVCache(**kind), torch.tensor([1, 1, 0])
    with mode():
        layer(x[:, :2], cache=cache)
        layer(torch.full_like(x[:, 2:5], torch.nan), cache=cache)
        cache.crop(2)
        assert cache.length == 2
        assert_same(layer(x[:, 2:7], cache=cache), layer(x)[:, 2:7])
        cache.reorder(order)
        assert_same(layer(x[order, 7:], cache=cache), layer(x[order])[:, 7:])


def test_a_rolled_cache_is_cropped_to_what_it_has() -> None:
    refuses(lambda: hw.KVCache().crop([2, 3]), "crop.* all documents of a cache have one length")
    refuses(lambda: hw.KVCache().load_state_dict({"keys": torch.ones(1)}), "no state of a cache: it has keys")
    cache = hw.KVCache(window=3)
    cache.append(torch.zeros(1, 2, 7, 3), torch.zeros(1, 2, 7, 5))
    refuses(lambda: cache.crop(5), "cannot crop to 5 of 7 tokens: the cache rolls and keeps 3")
    cache = hw.KVCache(window=3)
    cache.append(torch.zeros(1, 1, 5, 7), torch.zeros(1, 1, 5, 7))
    cache.crop(5)
    assert (cache.length, cache.kept) == (5, 3)


def test_a_wrong_cache_is_refused() -> None:
    refuses_table("cache", globals())


@torch.no_grad()
def test_a_layer_whose_mask_has_an_offset_is_the_same_in_pieces() -> None:
    layer, x = noisy(mask=hw.Window(5, 0, offset=0)), draw()
    assert_same(in_chunks(layer, x, [0, 3, T]), layer(x))
    refuses(lambda: in_chunks(layer, x, [0, 3, T], hw.KVCache(window=6)), "it counts from the first key")


def cross() -> tuple[hw.MultiHeadAttention, Tensor, Tensor]:
    layer = hw.MultiHeadAttention(31, 6, n_kv_heads=2, d_context=13, qk_norm=True, head_dim=5).double()
    return layer, draw(), normal(B, 7, 13, seed=2)


def test_a_context_is_projected_once_and_is_the_same_each_time() -> None:
    layer, x, memory = cross()
    cache, calls = hw.KVCache(), []
    layer.k_proj.register_forward_hook(lambda *arguments: calls.append(1))
    with torch.no_grad():
        expected = layer(x, context=memory)
        calls.clear()
        first = layer(x[:, :3], context=memory, cache=cache)
        parts = [first, layer(x[:, 3:4], cache=cache), layer(x[:, 4:], context=memory, cache=cache)]
    assert_same(torch.cat(parts, 1), expected)
    assert len(calls) == 1
    assert cache.length == 7
    refuses(lambda: layer(x, cache=cache, mask=hw.Causal()), "hangs on their number")
    refuses(lambda: cache.crop(3), "a cache of a context stays whole")
    x, cache = draw(), hw.KVCache()
    noisy(**{"mask": hw.Causal()})(x, cache=cache)
    refuses(lambda: noisy(**{"mask": hw.Causal()})(x, cache=cache), r"use one cache for each layer")
    layer, cache, x = hw.MultiHeadAttention(30, 6, 2), hw.KVCache(), torch.randn(B, T, 30)
    with torch.inference_mode():
        expected = layer(x, context=x[:, :5], cache=cache)
    out = layer(x, cache=cache)
    torch.testing.assert_close(out, expected)
    out.sum().backward()


def through_a_file(cache: hw.KVCache) -> hw.KVCache:
    file = io.BytesIO(safetensors.torch.save(cache.state_dict()))
    return type(cache)(cache.max_length, cache.window).load_state_dict(safetensors.torch.load(file.getvalue()))


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "file": through_a_file,
}  # fmt: skip


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_a_copy_serves_the_layer_that_it_is_passed_to(kind: dict[str, int], copied: Any) -> None:
    layer, x, cache = noisy(mask=hw.Window(4, 0), rope=hw.RoPE()), draw(), hw.KVCache(**kind)
    layer(x[:, :7], cache=cache)
    again = copied(cache)
    assert (again.max_length, again.window) == (cache.max_length, cache.window)
    twin = hw.MultiHeadAttention(**vars(layer.spec)).double()
    twin.load_state_dict(layer.state_dict())
    assert_same(twin(x[:, 7:], cache=again), layer(x)[:, 7:])
    refuses(lambda: layer(x[:, 7:], cache=again), "this cache was filled by another layer")


def test_a_copy_of_a_cache_of_a_context_needs_no_context() -> None:
    layer, x, memory = cross()
    cache = hw.KVCache()
    expected = layer(x, context=memory, cache=cache)
    assert_same(layer(x, cache=pickle.loads(pickle.dumps(cache))), expected)


@torch.no_grad()
def test_a_mask_that_is_an_array_is_that_of_the_whole_text() -> None:
    """A prefix of 5 tokens that see each other; the array may be longer than the text."""
    place = torch.arange(T + 2)
    prefix = (place <= place[:, None]) | (place < 5)
    x, by_row = draw(), torch.arange(T + 2)[:, None] % 3 > 0
    masks = (
        hw.Allowed(prefix), hw.Allowed(prefix.tolist()), hw.Causal() & hw.Allowed(by_row),
        hw.Bias(torch.where(prefix, 0.3 * place, -torch.inf)[None, None]),
    )  # fmt: skip
    for mask in masks:
        short = [type(part)(torch.as_tensor(part.array)[..., :T, :T]) if hasattr(part, "array") else part
                 for part in mask.parts()]  # fmt: skip
        whole = noisy(mask=None)(x, mask=functools.reduce(operator.and_, short))
        assert_same(in_chunks(noisy(mask=mask), x, [0, 7, 8, T]), whole)
    for array in (prefix, prefix.tolist()):
        layer = noisy(mask=hw.Allowed(array))
        refuses(lambda layer=layer: in_chunks(layer, x, [0, 3, T]), "lets tokens 0 to 2 look at later ones")
    refuses(lambda: in_chunks(noisy(mask=hw.Allowed(prefix[:7, :7])), x, [0, 7, T]), "the text has 11 tokens")
