"""Presets: their totals beside the published ones, and beside the real model built without memory."""

from __future__ import annotations

import pytest
import torch
import transformers

from headwise.cost import PRESETS, price
from headwise.errors import HeadwiseError

# Exact totals of the classes in transformers. They round to what the papers say: GPT-3 175.0 B (table 2.1), Qwen3-8B
# 8.2 B, gpt-oss-20b 20.9 B, DeepSeek-V3 671 B, whose 58 x 256 routing offsets transformers keeps as buffers. PaLM has
# no class: 540.35 B (table 1) is the total without the gains of the norms.
TOTALS = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt3": 174_604_259_328,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "palm-540b": 540_356_474_880,
    "falcon-7b": 6_921_720_704,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-3-27b": 27_432_406_640,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}
# 80 layers x 8 heads x 128 x keys and values x 2 bytes, and so on; DeepSeek keeps 512 + 64 numbers a layer.
CACHE = {
    "gpt2": 12 * 12 * 64 * 2 * 2,
    "gpt3": 96 * 96 * 128 * 2 * 2,
    "llama-2-70b": 327_680,
    "mistral-7b": 32 * 8 * 128 * 2 * 2,
    "palm-540b": 118 * 256 * 2 * 2,
    "falcon-7b": 32 * 64 * 2 * 2,
    "llama-3-8b": 32 * 8 * 128 * 2 * 2,
    "llama-3-70b": 327_680,
    "qwen3-0.6b": 28 * 8 * 128 * 2 * 2,
    "qwen3-8b": 36 * 8 * 128 * 2 * 2,
    "gemma-3-27b": 62 * 16 * 128 * 2 * 2,
    "gpt-oss-20b": 24 * 8 * 64 * 2 * 2,
    "deepseek-v3": 61 * 576 * 2,
    "bert-base": 0,
    "bert-large": 0,
}
CLASSES = {
    "bert": "BertModel",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "falcon": "FalconForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_size(name: str) -> None:
    bill = price(name, dtype="bf16")
    assert bill.parameters.total == TOTALS[name]
    assert bill.cache.bytes_per_token == CACHE[name]


@pytest.mark.parametrize("name", {config["model_type"]: name for name, config in PRESETS.items()}.values())
def test_transformers_builds_a_model_of_that_size(name: str) -> None:
    """One of each family, on the meta device, where weights have shapes and no memory."""
    config = PRESETS[name]
    if config["model_type"] not in CLASSES:
        assert name == "palm-540b"  # no class of transformers
        return
    model_class = getattr(transformers, CLASSES[config["model_type"]])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    assert price(name).parameters.total == sum(p.numel() for p in model.parameters())


def test_active_parameters_are_the_published_ones() -> None:
    """gpt-oss model card, table 1: 3.61 B, the head counted, the embedding not; DeepSeek-V3's weight page: 36.6 B."""
    assert round(price("gpt-oss-20b").parameters.active / 1e9, 2) == 3.61
    assert round(price("deepseek-v3").parameters.active / 1e9, 1) == 36.6


@pytest.mark.parametrize(
    ("misspelt", "offered"),
    [("llama-3-80b", "llama-3-8b"), ("GPT2", "gpt2"), ("deepseek", "deepseek-v3"), ("zzz", "there are bert-base")],
)
def test_an_unknown_preset_offers_the_nearest(misspelt: str, offered: str) -> None:
    with pytest.raises(HeadwiseError, match=f"no preset '{misspelt}'.*{offered}"):
        price(misspelt)
