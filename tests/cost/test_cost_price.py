"""`headwise.price`: whatever describes a model has one price, and the price prints itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from real_models import WIDE

import headwise as hw
from headwise.cost import price
from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT, GPTConfig

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


@pytest.mark.parametrize(
    "options", [{}, {"norm": "layer", "bias": True, "position": "learned", "embedding_norm": True}]
)
def test_a_model_of_ours_and_its_config(options: dict[str, Any]) -> None:
    config = GPTConfig(
        vocab_size=31, context=17, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=4, d_model=11, **options
    )
    model = GPT(config)
    for description in (config, model):
        assert price(description).parameters.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("mask", [hw.Causal(), hw.Window(6, 0), None])
def test_one_attention(mask: hw.Mask | None) -> None:
    options: dict[str, Any] = {
        "n_kv_heads": 3,
        "head_dim": 5,
        "value_dim": 7,
        "qk_norm": True,
        "kv_bias": True,
        "sink": True,
    }
    layer = hw.MultiHeadAttention(11, 6, mask=mask, **options)
    bill = price(layer, **SETTING)
    assert bill.parameters.total == bill.parameters.parts["attention"] == sum(p.numel() for p in layer.parameters())
    assert bill.cache.bytes_per_token == 3 * (5 + 7) * 4
    assert bill.cache.total_bytes == (7 if mask == hw.Window(6, 0) else 23) * 3 * bill.cache.bytes_per_token
    pairs = {None: 23 * 23, hw.Causal(): 23 * 24 // 2, hw.Window(6, 0): 7 * 8 // 2 + 16 * 7}[mask]
    assert bill.prefill.attention_flops == 3 * 2 * 6 * (5 + 7) * pairs
    spec = hw.AttentionSpec(d_model=11, n_heads=6, mask=mask, **options)
    assert price(spec, **SETTING).layers == bill.layers


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="a float has no price; pass a preset"):
        price(3.5)
    with pytest.raises(HeadwiseError, match=r"d_out=7.*with W_O, is priced"):
        price(hw.AttentionSpec(d_model=11, n_heads=6, head_dim=5, d_out=7))


def test_a_price_prints_itself() -> None:
    bill = price("llama-2-70b", context=4096, dtype="bf16")
    lines = repr(bill).splitlines()
    assert lines[0] == "llama-2-70b (llama): 80 layers, width 8,192, 64 heads of 128, 8 key/value (GQA)"
    assert any(line.split() == ["cache", "of", "one", "token", "327,680", "bytes", "320", "KiB"] for line in lines)
    page = price(CONFIG | {"model_type": "llama"})._repr_html_()
    assert page.count("<table>") == 1 and "parameters" in page
