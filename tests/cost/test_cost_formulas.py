"""The conventions, counted by hand, and our own models beside the ones that headwise builds."""

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cost import price
from headwise.cost.price import read_bytes
from headwise.cost.shape import Experts
from headwise.gpt.checkpoint import hf_config
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.spec import LatentSpec


def test_llama_2_70b_by_hand() -> None:
    """The arithmetic of one model, written out."""
    bill = price("llama-2-70b", context=4096, dtype="bf16", batch=3)
    d, f, layers, vocabulary = 8192, 28_672, 80, 32_000
    attention = d * 128 * 64 * 2 + d * 128 * 8 * 2
    assert bill.layers[0].attention.parameters == attention
    assert bill.layers[0].attention.kv_head_parameters == d * 128 * 2
    weights = layers * (attention + 3 * d * f)
    assert bill.parameters.total == weights + 2 * vocabulary * d + layers * 2 * d + d
    assert bill.cache.bytes_per_token == layers * 8 * 128 * 2 * 2 == 327_680
    assert bill.cache.total_bytes == 3 * 4096 * 327_680
    assert bill.total_bytes == 2 * bill.parameters.total + bill.cache.total_bytes
    pairs = 4096 * 4097 // 2  # a causal query sees (T + 1) / 2 keys on average
    assert bill.prefill.layer_flops == 3 * 2 * weights * 4096
    assert bill.prefill.attention_flops == 3 * layers * 2 * 64 * 256 * pairs
    assert bill.prefill.outside_flops == 3 * 2 * vocabulary * d
    assert bill.decode is not None
    assert bill.decode.flops == 3 * (2 * weights + 2 * vocabulary * d + layers * 2 * 64 * 256 * 4096)
    read = 2 * (weights + vocabulary * d + layers * 2 * d + d + 3 * d)
    assert bill.decode.weight_bytes == read
    moved = read + bill.cache.total_bytes
    assert bill.decode.bytes_per_token == moved / 3
    assert bill.decode.flops_per_byte == bill.decode.flops / moved


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "qk_norm": True}]
)
def test_our_own_models(preset: str, changes: dict[str, Any]) -> None:
    """A run's config.json, with and without a Hugging Face form; learned positions and odd norms among them."""
    config = GPTConfig(vocab_size=101, **PRESETS[preset].shape | changes)
    with torch.device("meta"):
        model = GPT(config)
    bill = price(hf_config(config, 0))
    spec = config.attention
    assert price(config).parameters == price(model).parameters == bill.parameters
    assert bill.parameters.total == model.n_parameters
    assert bill.parameters.parts["attention"] == config.n_layers * spec.n_parameters
    assert bill.cache.bytes_per_token == config.n_layers * spec.cache_values_per_token * 4
    assert bill.setting.context == config.context


def test_memory_holds_what_the_price_says_and_not_a_token_more() -> None:
    bill = price("gemma-3-27b", dtype="bf16", kv_dtype="fp8", context=9001, batch=5, memory="80GB")
    assert bill.memory is not None and bill.memory.longest_context is not None
    longest, most = bill.memory.longest_context, bill.memory.largest_batch
    free = 80 * 10**9 - bill.weight_bytes
    assert bill.memory.free_bytes == free

    def cache(context: int, batch: int) -> int:
        return price("gemma-3-27b", dtype="bf16", kv_dtype="fp8", context=context, batch=batch).cache.total_bytes

    assert cache(longest, 5) <= free < cache(longest + 1, 5)
    assert cache(9001, most) <= free < cache(9001, most + 1)


def test_windows_and_experts() -> None:
    bill = price("mistral-7b", memory="24GiB")
    assert bill.memory is not None
    assert bill.memory.longest_context is None
    small = price("mistral-7b", memory=bill.weight_bytes + 4094 * 131_072)
    assert small.memory is not None
    assert small.memory.longest_context == 4094
    # One text reads its own; many texts read them all; between, the mean of independent choices.
    experts = Experts(count=8, active=2, parameters=3 * 11 * 13, matrices=3 * 11 * 13)
    assert experts.read(1) == 2
    assert experts.read(2) == pytest.approx(2 + 2 * 6 / 8)
    assert experts.read(1000) == pytest.approx(8)
    # Per head and key: 512 + 64 features of the score and 512 of the value.
    short, long = (price("deepseek-v3", context=n).decode for n in (1000, 1001))
    assert short is not None and long is not None
    assert long.flops - short.flops == 61 * 2 * 128 * (512 + 64 + 512)
    bill = price(LatentSpec(d_model=66, n_heads=6, latent_dim=17, rope_dim=4, mask=hw.Causal()), context=23)
    assert bill.prefill.attention_flops == 2 * 6 * (11 + 11) * (23 * 24 // 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5tib", 3 * 2**39), (" 7B ", 7), ("0.5KB", 500), (12345, 12345)],
)
def test_sizes_with_units(text: str | int, value: int) -> None:
    assert read_bytes("memory", text) == value
