"""Variants beside prices of configs written by hand, and the rules of thumb."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.cost import PRESETS, Choice, choose, make_setting, price, read_shape, variants
from headwise.cost.read import model_shape
from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError

LLAMA = PRESETS["llama-3-8b"]


def shape_of(**changes: Any) -> ModelShape:
    return model_shape(LLAMA | changes)


def test_each_variant_is_the_price_of_that_config() -> None:
    limits: dict[str, Any] = {"context": 5003, "batch": 3, "gpu_memory": "24GiB", "bandwidth": "900GB/s"}
    shape = shape_of()
    rows = variants(shape, make_setting(shape, **limits))
    assert [row.name for row in rows] == ["MHA", "GQA-16", "GQA-8", "GQA-4", "GQA-2", "MQA"]
    assert [row.n_kv_heads for row in rows] == [32, 16, 8, 4, 2, 1]
    assert [row.name for row in rows if row.present] == ["GQA-8"]
    for row in rows:
        bill = price(LLAMA | {"num_key_value_heads": row.n_kv_heads}, **limits)
        assert bill.decode is not None and bill.memory is not None
        assert row.parameters == bill.parameters.total
        assert row.weight_bytes == bill.weight_bytes
        assert row.cache_bytes_per_token == bill.cache.bytes_per_token
        assert row.cache_bytes == bill.cache.total_bytes
        assert row.longest_context == bill.memory.longest_context
        assert row.bytes_per_token == bill.decode.bytes_per_token
        assert row.tokens_per_second == bill.decode.tokens_per_second
        assert row.fits == (bill.cache.total_bytes <= bill.memory.free_bytes)


def test_attention_costs_the_same_flops_in_every_variant() -> None:
    prices = [price(LLAMA | {"num_key_value_heads": n}).prefill for n in (32, 8, 1)]
    assert len({bill.attention_flops for bill in prices}) == 1
    assert len({bill.layer_flops for bill in prices}) == 3


def test_a_variant_whose_weights_exceed_the_memory_holds_no_token() -> None:
    shape = shape_of()
    rows = variants(shape, make_setting(shape, gpu_memory="16.5GB"))
    assert [row.longest_context == 0 for row in rows] == [True, True, False, False, False, False]
    assert [row.fits for row in rows] == [False, False, False, True, True, True]


def test_a_latent_stands_beside_the_heads_that_it_replaces() -> None:
    _, shape = read_shape("deepseek-v3")
    rows = variants(shape, make_setting(shape))
    assert [row.name for row in rows if row.present] == ["MLA"]
    assert rows[0].cache_bytes_per_token == 61 * 576 * 2
    assert rows[1].name == "MHA" and rows[1].cache_bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert rows[0].longest_context is None


def test_no_number_of_heads_takes_long() -> None:
    shape = shape_of(hidden_size=2**31, num_attention_heads=2**30, num_key_value_heads=2**15, head_dim=None)
    rows = variants(shape, make_setting(shape))
    assert [row.n_kv_heads for row in rows] == [2**n for n in range(30, -1, -1)]


def test_encoders_have_no_variants() -> None:
    _, shape = read_shape("bert-base")
    with pytest.raises(HeadwiseError, match="a bert encoder keeps none"):
        variants(shape, make_setting(shape))


def test_variants_of_a_decoder_with_an_encoder_share_cross_heads_too() -> None:
    shape = model_shape({"model_type": "t5", "d_model": 31, "d_kv": 7, "num_layers": 2, "num_heads": 6})
    rows = variants(shape, make_setting(shape, context=11, source=13, dtype="fp32"))
    assert [row.cache_bytes for row in rows] == [2 * n * 14 * (11 + 13) * 4 for n in (6, 3, 2, 1)]
    one_head = 2 * 31 * 7  # W_K and W_V, in both attentions of both decoder layers
    assert rows[0].parameters - rows[-1].parameters == 2 * 2 * 5 * one_head


def chosen(memory: str | None = None, context: int | None = None, **changes: Any) -> Choice:
    shape = shape_of(**changes)
    return choose(shape, make_setting(shape, gpu_memory=memory, context=context))


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({}, (32, 8, 128)),  # Llama 3 8B follows the rules
        ({"num_key_value_heads": 32}, (32, 8, 128)),
        ({"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12}, (12, 3, 64)),  # GPT-2's heads
        ({"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}, (8, 2, 64)),
        ({"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}, (4, 4, 64)),  # too narrow
        ({"hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}, (8, 2, 128)),  # too wide
        ({"hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16}, (42, 7, 128)),  # Gemma 3 27B
        ({"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}, (4, 4, 16)),  # Mini-GPT
        ({"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}, (4, 4, 4)),  # microgpt
        ({"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 6}, (3, 3, 14)),  # 4 does not divide it
        ({"hidden_size": 4544, "num_attention_heads": 71, "num_key_value_heads": 1}, (71, 71, 64)),  # Falcon 7B
    ],
)
def test_the_rules_of_thumb(changes: dict[str, Any], advised: tuple[int, int, int]) -> None:
    choice = chosen(**changes)
    assert (choice.n_heads, choice.n_kv_heads, choice.head_dim) == advised
    assert [rule.advised for rule in choice.rules] == [advised[0], advised[2], advised[1]]
    assert all(rule.source and rule.arithmetic for rule in choice.rules)
    assert choice.cache_bytes_per_token == 32 * advised[1] * 2 * advised[2] * 2
    assert choice.fits is None


def test_memory_forces_fewer_key_value_heads_and_says_so() -> None:
    free = chosen("80GB", 8192)
    assert free.n_kv_heads == 8 and free.fits
    tight = chosen("18GB", 20_000)
    assert tight.n_kv_heads == 4 and tight.fits
    assert "memory forces 4" in tight.rules[2].arithmetic
    single = chosen("18GB", 100_000)
    assert single.n_kv_heads == 1 and single.fits
    none = chosen("18GB", 1_000_000)
    assert none.n_kv_heads == 1 and none.fits is False
    assert "not even 1 fits" in none.rules[2].arithmetic


@pytest.mark.parametrize("name", ["deepseek-v3", "bert-base"])
def test_nothing_to_share(name: str) -> None:
    _, shape = read_shape(name)
    choice = choose(shape, make_setting(shape))
    assert "nothing to save" in choice.rules[2].arithmetic
    assert choice.cache_bytes_per_token == choice.present_cache_bytes_per_token
