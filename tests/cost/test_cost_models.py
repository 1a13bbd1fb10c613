"""Prices beside the real thing, counted on tiny models of transformers; and those of the presets."""

from typing import Any

import pytest
import torch
import transformers
from cases import refuses
from real_models import BATCH, CASES, PRESETS, TABLES, TOKENS, build, cache_bytes, inputs, run
from small_models import past

from headwise.cost import Price, price
from headwise.models.ask import cache_in

ENCODERS = ("bert", "roberta")
DECODING = [case for case in CASES if not case.startswith(ENCODERS)]


def priced(config: dict[str, Any], **setting: Any) -> Price:
    """At the batch and lengths of the tests."""
    return price(config, **{"batch": BATCH, "dtype": "fp32", "context": TOKENS} | setting)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_counted_and_a_forward_pass_costs_what_torch_counts(case: str) -> None:
    model, config = build(case)
    price = priced(config)
    assert price.prefill.dense_flops == run(model, **inputs(config))[1]
    assert price.parameters.total == sum(p.numel() for p in model.parameters())
    assert sum(price.parameters.parts.values()) == price.parameters.total
    assert price.weight_bytes == 4 * price.parameters.total


@pytest.mark.parametrize("case", DECODING)
def test_the_cache_holds_what_the_price_says(case: str) -> None:
    """To the byte. Between steps transformers keeps window - 1 tokens of a full window: the next one completes it."""
    model, config = build(case)
    cache, price = cache_in(run(model, **inputs(config), use_cache=True)[0]), priced(config)
    assert cache_bytes(cache) == price.cache.total_bytes


@pytest.mark.parametrize("case", [case for case in DECODING if "deepseek" not in case])
def test_a_step_costs_what_torch_counts(case: str) -> None:
    """One token more: a window is full within the step. transformers expands a latent; the price leaves it as it is."""
    model, config = build(case)
    tokens = inputs(config, TOKENS - 1)
    first = run(model, **tokens, use_cache=True)[0]
    step: dict[str, Any] = past(first) | {"use_cache": True, "input_ids": torch.full((BATCH, 1), 7)}
    price = priced(config)
    assert price.decode is not None
    assert price.decode.flops == run(model, **step)[1]


@pytest.mark.parametrize("case", ["mistral", "qwen2", "gemma2", "gemma3", "gpt_oss"])
def test_windows_cap_what_is_kept(case: str) -> None:
    _, config = build(case)
    short, long = priced(config, context=4), priced(config, context=4099)
    sliding = [layer for layer in long.layers if layer.kind == "sliding"]
    assert sliding and {(layer.attention.window, layer.cache_rows) for layer in sliding if layer.attention} == {(5, 4)}
    assert short.cache.total_bytes == 4 * BATCH * short.cache.bytes_per_token
    beyond = long.cache.bytes_per_token_beyond_windows
    assert long.cache.total_bytes - short.cache.total_bytes == (4099 - 4) * BATCH * beyond
    assert beyond == long.cache.bytes_per_token - sum(layer.cache_bytes_per_token for layer in sliding)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_active_parameters_are_those_that_a_token_meets(case: str) -> None:
    """Its gradient of one token reaches those experts alone; of the token table it reaches one row."""
    model, config = build(case)
    model(input_ids=torch.tensor([[7]])).logits.sum().backward()
    met = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None or "embed_tokens" in name:
            continue
        one_each = "experts." in name and "shared" not in name
        met += sum(x.numel() for x in parameter.grad if x.any()) if one_each else parameter.numel()
    assert priced(config).parameters.active == met


TOTALS, CACHE, CLASSES = (TABLES[name] for name in ("totals", "cache", "classes"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_size(name: str) -> None:
    bill = price(name, dtype="bf16")
    assert bill.parameters.total == TOTALS[name]
    assert bill.cache.bytes_per_token == CACHE[name]


FAMILIES = {config["model_type"]: name for name, config in PRESETS.items() if name != "palm-540b"}


@pytest.mark.parametrize("name", FAMILIES.values())
def test_transformers_builds_a_model_of_that_size(name: str) -> None:
    """One of each family, on the meta device, where weights have shapes and no memory. PaLM has no class there."""
    config = PRESETS[name]
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
    refuses(lambda: price(misspelt), f"no preset '{misspelt}'.*{offered}")
