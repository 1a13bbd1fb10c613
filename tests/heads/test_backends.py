"""Under every backend of transformers a head has the numbers that it has under `sdpa`, or is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch
from cases import every
from families import T, build, inputs_of, model_of
from flash import flash_attn_func, flash_stand_in, uncompiled_flex, use_backend
from helpers import watch_call
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

import headwise as hw
from headwise.heads.watch import Seen
from headwise.masks import Allowed
from headwise.models import reading
from headwise.models.reading import Asked, options_of

# of grouped heads; of a window; of softcaps and windows; of norms; of mixed windows; of sinks
SIX = ("llama", "mistral", "gemma2", "qwen3", "gemma3", "gpt_oss")
LONG, SHORT = 17, 29 - 17


def assert_same(some: Seen, others: Seen, message: str) -> None:
    assert list(some) == list(others), message
    for name in others:
        rows = some[name].rows
        assert set(rows) == set(others[name].rows), message
        for statistic in rows:
            values = others[name].rows[statistic]
            scale = max(1.0, float(np.abs(values).max()))
            np.testing.assert_allclose(rows[statistic], values, rtol=0, atol=1e-5 * scale, err_msg=message)


def in_parts(model: Any, ids: Tensor, mask: Tensor | None = None) -> Seen:
    """A text behind a cache, in chunks and by one token."""
    end, past = 0, None
    with torch.no_grad(), hw.watch(model) as seen:
        for piece in torch.split(ids, [LONG, SHORT - 1, 1], 1):
            end += piece.shape[1]
            told = {} if mask is None else {"attention_mask": mask[:, :end]}
            past = model(input_ids=piece, cache=past, use_cache=True, **told).past_key_values
    return seen


def in_six_situations(family: str, model: Any) -> dict[str, Seen]:
    """What is seen of a text whole, padded on either side, behind a cache, so and padded, and in part on each side."""
    ids, left, right = inputs_of(family)["input_ids"], inputs_of(family, "left"), inputs_of(family, "right")
    both = torch.stack([right["attention_mask"][1], left["attention_mask"][1]])
    return {
        "causal, windowed": watch_call(model, ids),
        "left-padded": watch_call(model, **left),
        "right-padded": watch_call(model, **right),
        "behind a cache": in_parts(model, ids),
        "left-padded, behind a cache": in_parts(model, **{name.split("_")[-1]: x for name, x in left.items()}),
        "padded on both sides": watch_call(model, ids, attention_mask=both),
    }


@pytest.mark.slow
@every("family", SIX)
def test_flash_attention_in_six_situations(family: str) -> None:
    """The kernel alone is a stand-in: masks, lengths and the way to it are those of transformers."""
    model = build(family)
    expected = in_six_situations(family, model)
    use_backend(model, "flash_attention_2")
    with flash_stand_in():
        seen = in_six_situations(family, model)
    for situation in expected:
        assert_same(seen[situation], expected[situation], f"{family}, {situation}")


@every("family", ["bert", "vit", "whisper"])
def test_flash_attention_that_looks_both_ways(family: str) -> None:
    model, inputs = build(family), inputs_of(family, "left")
    expected = watch_call(model, **inputs)
    use_backend(model, "flash_attention_2")
    with flash_stand_in():
        assert_same(watch_call(model, **inputs), expected, family)


@pytest.mark.slow
@every("family", ["llama", "mistral", "gemma2", "gemma3", "bert", "whisper", "vit"])
def test_flex_attention(family: str) -> None:
    model, inputs = build(family), inputs_of(family, "left")
    expected = watch_call(model, **inputs)
    model.set_attn_implementation("flex_attention")
    with uncompiled_flex():
        with torch.no_grad():
            plain = model(**inputs)[0]
        with torch.no_grad(), hw.watch(model) as seen:
            assert torch.equal(model(**inputs)[0], plain)
        assert_same(seen, expected, family)


@pytest.mark.slow
@every("backend", ["flex_attention", "flash_attention_2"])
def test_causes_under_other_backends(backend: str) -> None:
    model, (text, other) = build("gemma2"), inputs_of("gemma2")["input_ids"]

    def causes() -> dict[str, Any]:
        effects = {}
        with torch.no_grad():
            with hw.ablate(model, ["L0.H1", "L1.H2"], how="mean"):
                effects["ablate"] = model(text[None]).logits.numpy()
            with hw.steer(model, {"L0.H3": 0.5}):
                effects["steer"] = model(text[None]).logits.numpy()
        parts = hw.attribute(model, text, target=(7, 11))
        effects["attribute"] = np.array([parts.total, *parts.heads.values()])
        for at in ("out", "weights", "q", "k", "v"):
            found = hw.patch(model, text, other, target=(7, 11), at=at).effects
            effects[at] = np.array([effect.mean for effect in found.values()])
        return effects

    expected = causes()
    use_backend(model, backend)
    with flash_stand_in(), uncompiled_flex():
        for name, values in causes().items():
            np.testing.assert_allclose(values, expected[name], atol=1e-4, err_msg=name)


def test_a_backend_of_ones_own_is_read_by_its_mask_function() -> None:
    def mine(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **keywords: Any) -> Any:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)

    def lengths(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **keywords: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, softmax_scale=scaling, causal=True), None

    def blocks(batch_size: int, q_length: int, kv_length: int, **more: Any) -> Any:
        return sdpa_mask(batch_size, q_length, kv_length, **{**more, "allow_is_causal_skip": False})

    model, inputs = build("llama"), inputs_of("llama", "left")
    expected, whole = watch_call(model, **inputs), watch_call(model, inputs["input_ids"])
    maps = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = [dict(each) for each in maps]
    try:
        AttentionInterface.register("mine", mine)
        for masks in (sdpa_mask, blocks):
            AttentionMaskInterface.register("mine", masks)
            assert_same(watch_call(use_backend(model, "mine"), **inputs), expected, str(masks))
        AttentionInterface.register("lengths", lengths)
        AttentionMaskInterface.register("lengths", flash_attention_mask)
        assert_same(watch_call(use_backend(model, "lengths"), inputs["input_ids"]), whole, "lengths")
        said = "its attention gives .*watching it would give wrong numbers"
        with pytest.raises(hw.HeadwiseError, match=said):  # its function forgets the padding
            watch_call(model, **inputs)
        AttentionInterface.register("unmasked", mine)
        said = r"by 'unmasked', which has no mask function, .*AttentionMaskInterface.register\('unmasked', sdpa_mask\)"
        with pytest.raises(hw.HeadwiseError, match=said):
            watch_call(use_backend(model, "unmasked"), inputs["input_ids"])
    finally:
        for each, entries in zip(maps, before, strict=True):
            each.clear()
            each.update(entries)


def asked(implementation: str, mask: Any = None, T: int = 5, S: int = 7, n_texts: int = 2, **keywords: Any) -> Asked:
    """A call of which only the mask is read."""
    q, k, none = torch.zeros(n_texts, 3, T, 2), torch.zeros(n_texts, 3, S, 2), torch.empty(0)
    module: Any = torch.nn.Module()
    return Asked(module, q, k, k, mask, keywords, implementation, sdpa_attention_forward, none)


def seen_by(call: Asked) -> Tensor:
    """(B,T,S), what is allowed in a call."""
    q, k = call.q, call.k
    steps = hw.trace(q, k, k, mask=options_of(call).mask)
    return (steps.masked > -torch.inf)[:, 0]


def test_flash_attention_reads_real_tokens_side_by_side() -> None:
    """A window counts the real tokens between, and a text that is shorter than its cache ends with it."""
    model_of("llama")  # transformers is loaded
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    rows = seen_by(asked("flash_attention_2", mask, T=1, sliding_window=3))
    assert rows[0].int().tolist() == [[0, 0, 1, 0, 0, 1, 1]] and rows[1].int().tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    rows = seen_by(asked("flash_attention_2", mask[:, :5], T=2, sliding_window=2))  # with the room of a static cache
    assert rows[1].int().tolist() == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]] and not rows[0].any()
    rows = seen_by(asked("flash_attention_2", T=7, is_causal=False, sliding_window=2))  # so many to either side
    assert rows[0].sum(1).tolist() == [2, 3, 3, 3, 3, 3, 2]


def test_a_block_mask_is_asked_for_what_is_looked_at() -> None:
    lengths, slopes = torch.tensor([4, 7]), torch.tensor([0, 1, 2])

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < lengths[b]) & (j <= i + 2 + slopes[h])

    blocks = create_block_mask(allowed, 2, 3, 5, 7, device="cpu")
    mask: Any = options_of(asked("flex_attention", blocks)).mask
    dense = torch.tensor([[[[allowed(*torch.tensor([b, h, i, j])) for j in range(7)] for i in range(5)]
                           for h in range(3)] for b in range(2)])  # fmt: skip
    q, k = torch.zeros(2, 3, 5, 2), torch.zeros(2, 3, 7, 2)
    for heads in ([0, 1, 2], [2, 0]):
        steps = hw.trace(q[:, heads], k[:, heads], k[:, heads], mask=mask.for_heads(heads, 3))
        assert torch.equal(steps.masked > -torch.inf, dense[:, heads])
    added = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    assert not any(isinstance(part, Allowed) and not part.array.all() for part in reading.masks_of(added, False))


def test_what_no_backend_of_transformers_hides_is_refused() -> None:
    model, inputs = build("llama"), inputs_of("llama")
    use_backend(model, "flash_attention_2")
    edges = torch.tensor([0, T, 2 * T], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": T, "max_length_k": T}
    with flash_stand_in(), pytest.raises(hw.HeadwiseError, match="watching it would give wrong numbers"):
        watch_call(model, inputs["input_ids"].reshape(1, -1), **lengths)
