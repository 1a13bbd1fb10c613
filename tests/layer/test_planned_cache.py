"""A cache with a plan holds fewer rows, and gives exactly what the mask of the plan gives on the whole text."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses, refuses_table
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same, in_chunks, noisy, normal
from torch import Tensor

import headwise as hw
from headwise.rungs import cache as cache_module

B, T, H = 2, 13, 6
ONE_BY_ONE = list(range(T + 1))
keeps = st.one_of(st.none(), st.builds(hw.Keep, st.integers(0, 5), st.integers(1, 15)))
specs = st.fixed_dictionaries(
    {
        "n_kv_heads": st.sampled_from([1, 2, 3, 6]),
        "value_dim": st.sampled_from([None, 7]),
        "kv_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "rope": st.sampled_from([None, hw.RoPE(), hw.RoPE(theta=53.0, interleaved=True)]),
        "mask": st.sampled_from([hw.Causal(), None, hw.Window(6, 0), hw.Causal() & hw.Alibi(), hw.Causal(offset=0)]),
        "softcap": st.sampled_from([None, 1.3]),
        "sink": st.booleans(),
        "relative_bias": st.sampled_from([None, hw.RelativeBias(n_buckets=4, max_distance=7)]),
    }
)
cuts = st.lists(st.integers(1, T - 1), max_size=T - 1, unique=True).map(lambda inner: [0, *sorted(inner), T])


def draw(tokens: int = T) -> Tensor:
    return normal(B, tokens, 31)


def spoken(keep: list, n_heads: int, tokens: int, kv_index: tuple[int, ...] | None = None) -> hw.Mask:
    """The mask of a plan as a table, written down without the masks of the package."""
    index = kv_index or [h * len(keep) // n_heads for h in range(n_heads)]
    table = np.zeros((1, n_heads, tokens, tokens), bool)
    for _, h, i, j in np.argwhere(~table):
        kept = keep[index[h]]
        table[0, h, i, j] = j <= i and (kept is None or j < kept.sinks or i - j < kept.window)
    return hw.Allowed(table)


@pytest.mark.slow
@settings(max_examples=60)
@given(specs, st.lists(keeps, min_size=6, max_size=6), cuts, st.booleans())
def test_it_gives_what_its_mask_gives(spec: dict[str, Any], keep: list, at: list[int], gated: bool) -> None:
    layer, x, keep = noisy(**spec), draw(), keep[: spec["n_kv_heads"]]
    gate = torch.linspace(-1, 2, H, dtype=torch.float64) if gated else None
    with torch.no_grad():
        whole = layer(x, mask=spoken(keep, H, T), gate=gate)
        for way in ([0, T], at, ONE_BY_ONE):
            cache = hw.KVCache(plan=keep)
            assert_same(in_chunks(layer, x, way, cache, gate=gate), whole)
            rows = sum(T if kept is None else min(T, kept.sinks + kept.window) for kept in keep)
            assert cache.nbytes == B * rows * (10 + (spec["value_dim"] or 10)) * 8
    assert_same(layer(x, mask=hw.Plan((tuple(keep),)).mask(0, H), gate=gate), whole)


@pytest.mark.slow
def test_prompts_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "CHUNK", 5)
    for mask in (hw.Causal(), hw.Causal() & hw.Alibi(), hw.Causal() & hw.Lengths([11, 23])):
        layer, x, keep = noisy(**{"n_kv_heads": 3, "mask": mask}), draw(23), [hw.Keep(3, 4), None, hw.Keep(0, 7)]
        with torch.no_grad():
            cache = hw.KVCache(plan=keep)
            if "Lengths" in repr(mask):
                assert_same(layer(x, cache=cache), layer(x, mask=spoken(keep, H, 23)))
            else:
                assert_same(in_chunks(layer, x, [0, 17, 18, 19, 23], cache), layer(x, mask=spoken(keep, H, 23)))
    # Pieces of 1, of a number that divides the prompt, and of one that does not.
    layer, x, keep = noisy(**{"n_kv_heads": 2, "mask": hw.Causal()}), draw(), [(1, 3), (0, 2)]
    with torch.no_grad():
        whole = layer(x, mask=spoken([hw.Keep(*pair) for pair in keep], H, T))
        for size in (1, 2, 3, T):
            monkeypatch.setattr(cache_module, "CHUNK", size)
            assert_same(in_chunks(layer, x, [0, T - 3, T], hw.KVCache(plan=keep)), whole)


@settings(max_examples=15)
@given(specs, st.lists(keeps, min_size=6, max_size=6), cuts)
def test_gradients_flow_through_it(spec: dict[str, Any], keep: list, at: list[int]) -> None:
    layer, keep = noisy(**{**spec, "mask": hw.Causal()}), keep[: spec["n_kv_heads"]]
    results = []
    for cached in (True, False):
        x = draw().requires_grad_()
        out = in_chunks(layer, x, at, hw.KVCache(plan=keep)) if cached else layer(x, mask=spoken(keep, H, T))
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        results.append(torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()], allow_unused=True))
    for actual, expected in zip(*results, strict=True):
        if expected is None:  # the output has no use for it, such as a query bias on one key
            assert actual is None
        else:
            assert_same(actual, expected)


def test_key_value_heads_in_any_order_and_a_prompt_without_gradients() -> None:
    # No query head reads the last two key/value heads.
    index, keep, x = (2, 0, 0, 1, 2), [hw.Keep(1, 4), None, hw.Keep(0, 3), hw.Keep(0, 2), hw.Keep(0, 2)], draw()
    layer = noisy(5, **{"n_kv_heads": 5, "kv_index": index, "mask": hw.Causal(), "rope": hw.RoPE()})
    cache, whole = hw.KVCache(plan=keep), layer(x, mask=spoken(keep, 5, T, index))
    with torch.no_grad():
        first = in_chunks(layer, x, [0, 7, 8], cache)
    rest = in_chunks(layer, x, [8, 9, 11, 12, 13], cache)
    assert_same(torch.cat([first, rest], 1), whole)
    rest.sum().backward()
    assert layer.k_proj.weight.grad.abs().max() > 0


def test_a_refused_crop_changes_nothing_and_reorders_are_counted() -> None:
    layer, x, cache = noisy(**{"n_kv_heads": 3, "mask": hw.Causal()}), draw(), hw.KVCache(plan=[(0, 9), None, (2, 3)])
    with torch.no_grad():
        layer(x[:, :7], cache=cache)
        refuses(lambda: cache.crop(6), "cannot crop to 6 of 7 tokens")
        assert [part.length for _, part in cache._kinds] == [7, 7, 7]
    # Who follows a text through its cache must know that its documents have changed places.
    for cache in (hw.KVCache(), hw.KVCache(plan=[None, (1, 2)])):
        assert cache.reorders == 0
        for times in (1, 2):
            cache.reorder(torch.tensor([0]))
            assert cache.reorders == times


def test_what_it_cannot_do_is_refused_and_leaves_it_as_it_was() -> None:
    layer, cache, x = noisy(**{"n_kv_heads": 2, "mask": hw.Causal()}), hw.KVCache(plan=[hw.Keep(1, 4), None]), draw()

    def watched() -> None:
        with hw.watch(layer):
            layer(draw(), cache=cache)

    with torch.no_grad():
        layer(x[:, :6], cache=cache)
        refuses_table("plan_of_a_cache", globals() | {"layer": layer, "cache": cache, "watched": watched})
        assert cache.length == 6
        expected = layer(x, mask=spoken([hw.Keep(1, 4), None], H, T))
        assert_same(in_chunks(layer, x, [6, 7, 13], cache), expected[:, 6:])


def test_rows_are_reordered_cropped_and_copied() -> None:
    keep, order = [hw.Keep(2, 3), None, (0, 5)], torch.tensor([1, 1, 0])
    layer, x, cache = noisy(**{"n_kv_heads": 3, "mask": hw.Causal(), "rope": hw.RoPE()}), draw(), hw.KVCache(plan=keep)
    mask = spoken([hw.Keep(2, 3), None, hw.Keep(0, 5)], H, T)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        layer(100 + x[:, 3:5], cache=cache)
        cache.crop(3)
        assert_same(in_chunks(layer, x, [3, 4, 9], cache), layer(x, mask=mask)[:, 3:9])
        copied = copy.deepcopy(cache)
        cache.reorder(order)
        assert_same(in_chunks(layer, x[order], [9, 10, 13], cache), layer(x[order], mask=mask)[:, 9:])
        assert_same(in_chunks(layer, x, [9, 10, 13], copied), layer(x, mask=mask)[:, 9:])
        refuses(lambda: cache.crop(11), "cannot crop to 11 of 13 tokens: the cache rolls and keeps 5")
        assert (cache.length, cache.batch, copied.batch) == (13, 3, 2)
    assert repr(cache).startswith("KVCache(plan=") and "length=13" in repr(cache)


def test_a_step_reads_each_kind_of_head_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, attend = [], cache_module.attend
    monkeypatch.setattr(
        cache_module, "attend", lambda q, k, v, o: shapes.append((k.shape, o.mask)) or attend(q, k, v, o)
    )
    layer, cache = (
        noisy(**{"n_kv_heads": 6, "mask": hw.Causal()}),
        hw.KVCache(plan=[None, (2, 3), None, (2, 3), (1, 2), None]),
    )
    with torch.no_grad():
        layer(draw(), cache=cache)
        shapes.clear()
        layer(draw(1), cache=cache)
    assert [tuple(shape) for shape, _ in shapes] == [(B, 3, T + 1, 10), (B, 2, 5, 10), (B, 1, 3, 10)]
    assert [mask for _, mask in shapes[1:]] == [None, None]


def test_it_takes_no_more_room_than_its_plan_says() -> None:
    cache = hw.KVCache(plan=[(3, 8)])
    layer = noisy(**{"n_kv_heads": 1, "mask": hw.Causal()})
    with torch.no_grad():
        for step in range(40):
            layer(draw(1), cache=cache)
            stream = cache._kinds[0][1]
            assert stream.kept == min(step + 1, 11)
            assert stream._buffers[0].shape[2] <= 11
