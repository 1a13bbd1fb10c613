"""`headwise.price`: one price of whatever describes a model, with other heads side by side, and counted by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cases import refuses_table
from hypothesis import given
from hypothesis import strategies as st
from real_models import PRESETS, WIDE

import headwise as hw
from headwise.cost import make_setting, price, shape_of, variants
from headwise.cost.price import read_bytes
from headwise.cost.shape import Experts, ModelShape
from headwise.gpt.checkpoint import hf_config
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS as GPT_PRESETS
from headwise.masks import BroadcastGrid
from headwise.spec import LatentSpec

CONFIG = {"model_type": "llama", **WIDE}
SETTING: dict[str, Any] = {"context": 23, "batch": 3, "dtype": "fp32"}


def test_a_dict_a_file_a_config_and_a_model_have_one_price(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = transformers.LlamaConfig(**WIDE)
    model = transformers.LlamaForCausalLM(config)
    described = (CONFIG, tmp_path, str(tmp_path / "config.json"), config, model)
    bills = [str(price(description, **SETTING)).split(" ", 1)[1] for description in described]
    assert len({bill.split("note:")[0] for bill in bills}) == 1
    assert price(model).parameters.total == model.num_parameters()


@pytest.mark.parametrize("mask", [hw.Causal(), hw.Window(6, 0), hw.Window(6, 0) & hw.Alibi(), None])
def test_one_attention(mask: hw.Mask | None) -> None:
    options: Any = {"n_kv_heads": 3, "head_dim": 5, "value_dim": 7, "qk_norm": True, "kv_bias": True, "sink": True}
    layer = hw.MultiHeadAttention(11, 6, mask=mask, **options)
    bill = price(layer, **SETTING)
    assert bill.parameters.total == bill.parameters.parts["attention"] == sum(p.numel() for p in layer.parameters())
    assert bill.cache.bytes_per_token == 3 * (5 + 7) * 4
    # beside a bias the window is the same
    band = mask.parts()[0] if mask else None
    pairs = {None: 23 * 23, hw.Causal(): 23 * 24 // 2, hw.Window(6, 0): 7 * 8 // 2 + 16 * 7}[band]
    assert bill.prefill.attention_flops == 3 * 2 * 6 * (5 + 7) * pairs
    spec = hw.AttentionSpec(d_model=11, n_heads=6, mask=mask, **options)
    assert price(spec, **SETTING).layers == bill.layers


def test_prices_print_and_refuse() -> None:
    refuses_table("setting", globals())
    formats = ("float8_e4m3fn", "torch.float8_e5m2fnuz", torch.float8_e4m3fnuz)
    assert {price("gpt2", dtype=name).setting.dtype for name in formats} == {"fp8"}
    bill = price("llama-2-70b", context=4096, dtype="bf16")
    lines = repr(bill).splitlines()
    assert lines[0] == "llama-2-70b (llama): 80 layers, width 8,192, 64 heads of 128, 8 key/value (GQA)"
    assert "grows: cache of one token 327,680 bytes 320 KiB" in [" ".join(line.split()) for line in lines]


GROUPED = hw.GPTConfig(vocab_size=11, context=53, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=10, d_model=29, d_ff=7)


@given(window=st.none() | st.integers(1, 29), tokens=st.integers(1, 53), values=st.integers(0, 9000))
def test_pairs_and_numbers_are_those_of_the_mask(window: int | None, tokens: int, values: int) -> None:
    mask = hw.Causal() if window is None else hw.Window(window - 1, 0)
    spec = hw.AttentionSpec(d_model=29, n_heads=6, n_kv_heads=3, head_dim=10, mask=mask)
    bill = hw.price(spec, context=tokens, dtype="fp32")
    allowed = mask.allowed(BroadcastGrid((1, 6, tokens, tokens), np.asarray, np.arange))
    seen = np.broadcast_to(allowed, (1, 6, tokens, tokens))

    def rows(length: int) -> int:
        return 3 * min(length, window or length)

    assert bill.prefill.attention_flops == 4 * 10 * int(seen.sum())
    assert bill.cache.total_bytes == 2 * 10 * 4 * rows(tokens)
    assert bill.cache.total_bytes == 10 * 4 * int(seen[:, :, -1].sum())  # 2 queries read a row
    full = hw.price(spec.replace(mask=hw.Causal()), context=tokens, dtype="fp32")
    assert full.decode and bill.decode
    assert bill.decode.flops == full.decode.flops - 4 * 10 * 2 * (3 * tokens - rows(tokens))
    growing = 2 * 10 * 3 * (window is None)
    assert bill.cache.bytes_per_token_beyond_windows == 4 * growing
    limited = hw.price(spec, dtype="fp32", memory=full.weight_bytes + 4 * values)
    assert limited.memory
    longest = limited.memory.longest_context
    if longest is None:
        assert growing == 0 and 2 * 10 * rows(10**6) <= values
    else:
        assert 2 * 10 * rows(longest) <= values < 2 * 10 * rows(longest + 1)


def test_the_caches_of_a_model_hold_what_is_priced() -> None:
    model, ids = hw.GPT(GROUPED).double().eval(), torch.randint(11, (2, 23))
    caches = model.new_caches()
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 22), (22, 23)):
            out = model(ids[:, start:stop], caches)
        bill = hw.price(GROUPED, context=23, batch=2, dtype="fp64")
        assert sum(cache.nbytes for cache in caches) == bill.cache.total_bytes
        torch.testing.assert_close(out[:, -1], model(ids)[:, -1], rtol=1e-12, atol=1e-12)


LLAMA = PRESETS["llama-3-8b"]


def llama(**changes: Any) -> ModelShape:
    return shape_of(LLAMA | changes)[1]


def test_each_variant_is_the_price_of_that_config() -> None:
    limits: dict[str, Any] = {"context": 5003, "batch": 3, "memory": "24GiB"}
    shape = llama()
    rows = variants(shape, make_setting(shape, **limits))
    assert [row.name for row in rows] == ["MHA", "GQA-16", "GQA-8", "GQA-4", "GQA-2", "MQA"]
    assert [row.name for row in rows if row.present] == ["GQA-8"]
    for row in rows:
        bill = price(LLAMA | {"num_key_value_heads": row.n_kv_heads}, **limits)
        assert bill.decode is not None and bill.memory is not None
        assert row.parameters == bill.parameters.total
        assert row.cache_bytes_per_token == bill.cache.bytes_per_token
        assert row.cache_bytes == bill.cache.total_bytes
        assert row.longest_context == bill.memory.longest_context
        assert row.bytes_per_token == bill.decode.bytes_per_token
        assert row.fits == (bill.cache.total_bytes <= bill.memory.free_bytes)


def test_variants() -> None:
    prices = [price(LLAMA | {"num_key_value_heads": n}).prefill for n in (32, 8, 1)]
    assert [len({getattr(each, f"{part}_flops") for each in prices}) for part in ("attention", "layer")] == [1, 3]
    shape = llama()
    rows = variants(shape, make_setting(shape, memory="16.5GB"))
    assert [row.longest_context == 0 for row in rows] == [True, True, False, False, False, False]
    assert [row.fits for row in rows] == [False, False, False, True, True, True]
    _, shape = shape_of("deepseek-v3")
    rows = variants(shape, make_setting(shape))
    assert [row.name for row in rows if row.present] == ["MLA"]
    assert rows[0].cache_bytes_per_token == 61 * 576 * 2
    assert rows[1].name == "MHA" and rows[1].cache_bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert rows[0].longest_context is None
    shape = llama(hidden_size=2**14, num_attention_heads=2**12, num_key_value_heads=2**9, head_dim=None)
    rows = variants(shape, make_setting(shape))
    assert [row.n_kv_heads for row in rows] == [2**n for n in range(12, -1, -1)]


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


@pytest.mark.parametrize("preset", GPT_PRESETS)
@pytest.mark.parametrize(
    "changes", [{}, {"bias": True, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "qk_norm": True}]
)
def test_our_own_models(preset: str, changes: dict[str, Any]) -> None:
    """A run's config.json, with and without a Hugging Face form; learned positions and odd norms among them."""
    config = GPTConfig(vocab_size=101, **GPT_PRESETS[preset].shape | changes)
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
