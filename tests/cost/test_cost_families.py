"""Families that are built: named models by hand; and what studies/prices.py finds for a spread of families."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from headwise.cost import Price, make_setting, price, shape_of, variants
from headwise.cost.built import shape_of_config

sys.path.append(str(Path(__file__).parents[2] / "studies"))


def default(family: str, **fields: Any) -> Price:
    return price(CONFIG_MAPPING[family](**fields), context=131_072, dtype="bf16")


GRANITE = {
    "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)], "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
# By hand: layers x key/value heads x width x keys and values x 2 bytes; states are a convolution's tokens, then numbers
# of heads x width x state, in float32 where the family computes them so.
NAMED: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Qwen3-Next 80B": ("qwen3_next", {}, 12 * 2 * 256 * 2 * 2, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)),
    "Jamba 52B": ("jamba", {}, 4 * 8 * 128 * 2 * 2, 28 * (8192 * 4 * 2 + 8192 * 16 * 4)),
    "Falcon-H1": ("falcon_h1", {}, 32 * 8 * 128 * 2 * 2, 32 * ((1024 + 2 * 256) * 4 * 2 + 1024 * 256 * 4)),
    "Granite 4 small": ("granitemoehybrid", GRANITE, 4 * 8 * 128 * 2 * 2, 36 * (8448 * 4 * 2 + 8192 * 128 * 4)),
    # 25 layers slide with 4 key/value heads of 256, and 5 see all with 4 of 512
    "Gemma 4": ("gemma4_text", {}, (25 * 4 * 256 + 5 * 4 * 512) * 2 * 2, 0),
    "gpt-oss-120b": ("gpt_oss", {}, 36 * 8 * 64 * 2 * 2, 0),
    "DeepSeek-V3.2": ("deepseek_v32", {}, 61 * (512 + 64 + 128) * 2, 0),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_models_by_hand(name: str) -> None:
    family, fields, token, states = NAMED[name]
    bill = default(family, **fields)
    assert (bill.cache.bytes_per_token, bill.cache.state_bytes) == (token, states)


def test_gpt_oss_is_priced_in_the_format_of_its_config() -> None:
    """Experts in MXFP4, 4 bits a number and 8 for each 32 of them: the files of the release hold 13.76 GB."""
    bill, wide = price("gpt-oss-20b"), price("gpt-oss-20b", dtype="bf16")
    matrices = 24 * 32 * 3 * 2880 * 2880
    assert bill.weight_bytes == matrices * 17 // 32 + (bill.parameters.total - matrices) * 2
    assert round(bill.weight_bytes / 1e9, 2) == 13.76
    assert wide.weight_bytes == 2 * wide.parameters.total
    assert bill.decode and wide.decode and bill.decode.weight_bytes < wide.decode.weight_bytes


def test_layers_of_every_kind() -> None:
    assert default("llama4").notes[0] == "priced is the decoder of text alone"
    kinds = {family: [layer.kind for layer in default(family).layers] for family in ("gemma3n_text", "llama4_text")}
    assert kinds["gemma3n_text"][-15:] == ["shared"] * 15 and set(kinds["gemma3n_text"][:20]) == {"sliding", "full"}
    assert kinds["llama4_text"][:4] == ["chunked"] * 3 + ["full"]


@pytest.mark.parametrize("config", [{"model_type": "llama", "num_key_value_heads": 8}, {"model_type": "gpt2"}])
def test_both_ways_agree(config: dict[str, Any]) -> None:
    """Also of grouped heads, and of projections that are one matrix."""
    config = CONFIG_MAPPING[config["model_type"]](**config, num_hidden_layers=3).to_dict()
    formula, built = shape_of(config)[1], shape_of_config(config)
    assert (formula.way, built.way) == ("config", "built")
    assert built.parameters == formula.parameters and built.active_parameters == formula.active_parameters
    assert built.layers == formula.layers
    setting = make_setting(formula, memory="80GB")
    assert variants(dataclasses.replace(built, outside=formula.outside), setting) == variants(formula, setting)


def test_variants_where_the_projections_are_one_matrix() -> None:
    """Falcon packs W_Q, W_K and W_V; with one key/value head it is the class's own multi-query model."""
    falcon: dict[str, Any] = {"hidden_size": 66, "num_attention_heads": 3, "num_hidden_layers": 2, "bias": True}
    many, single = (CONFIG_MAPPING["falcon"](**falcon, multi_query=flag) for flag in (False, True))
    shape = shape_of(many)[1]
    assert variants(shape, make_setting(shape))[-1].parameters == price(single).parameters.total


@pytest.mark.parametrize("name", ["gpt2", "falcon-7b", "palm-540b"])
def test_presets_are_what_their_configs_give(name: str) -> None:
    """The layers kept as data, of a formula, of a model that is built, and of PaLM, which has no class."""
    import presets

    assert dataclasses.replace(shape_of(name)[1], notes=()) == dataclasses.replace(presets.preset_shape(name), notes=())


@pytest.mark.parametrize("family", ["nemotron_h", "prophetnet"])
def test_the_number_of_layers_has_many_names(family: str) -> None:
    assert default(family).parameters.total > 10**8


# one of each way that a cache grows; of the first three the default configuration, too
SPREAD = (
    "bloom", "gemma3", "mamba", "bamba", "deepseek_v4", "hy_v4", "lfm2", "llama4_text", "minimax", "mpt", "qwen3_next",
    "zamba2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", SPREAD)
def test_a_spread_of_families(family: str) -> None:
    """As many parameters as the model has, and the bytes that a small model keeps."""
    from prices import default_price, small_model, small_prices

    assert family not in SPREAD[:3] or default_price(family)[1]
    model = small_model(family)
    assert price(model).parameters.total == sum(p.numel() for p in model.parameters())
    rows = small_prices(model, (67, 307))
    assert rows and all(measured == ours for _, measured, ours in rows)
