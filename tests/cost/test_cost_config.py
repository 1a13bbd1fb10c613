"""Configs: defaults are those of the classes, old fields change nothing, and what cannot be priced is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import real_models
import transformers
from cases import refuses, refuses_table
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import CASES, TABLES, WIDE, fields_of
from transformers import CONFIG_MAPPING

from headwise import families
from headwise.cost import cache_bytes_per_token
from headwise.cost.build import REQUIRED
from headwise.errors import HeadwiseError
from headwise.families import Family
from headwise.gpt.gpt import GPTConfig
from headwise.models import price

CONFIG: dict[str, Any] = {"model_type": "llama", **WIDE}
OWN = {"vocab_size": 7, "context": 8, "n_layers": 1, "n_heads": 2, "d_model": 4}
# Read where a file has them, and no fields of the class: the modelling files look for head_dim, T5's class ties always.
NOT_IN_THE_CLASS = {
    ("qwen2", "head_dim"), ("qwen3_moe", "head_dim"),
    ("gemma3_text", "sliding_window_pattern"), ("phi3", "head_dim"), ("granite", "head_dim"),
    ("starcoder2", "head_dim"),
}  # fmt: skip


FAMILIES = families.families("price")
IN_TRANSFORMERS = [family for family in FAMILIES.values() if family.name != "palm"]


@pytest.mark.parametrize("family", IN_TRANSFORMERS, ids=lambda family: family.name)
def test_defaults_are_those_of_the_config_class(family: Family) -> None:
    config: Any = GPTConfig if family.name == "headwise" else CONFIG_MAPPING[family.name]
    assert family.price is not None
    defaults = dict.fromkeys(family.price.get("null", ())) | family.price["defaults"]
    for name, value in defaults.items():
        if (family.name, name) not in NOT_IN_THE_CLASS:
            assert getattr(config, name) == value, name
    assert not any(hasattr(config, name) for kind, name in NOT_IN_THE_CLASS if kind == family.name)


def test_sizes_left_out() -> None:
    config = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16}
    bill = price(config)
    real = transformers.MistralForCausalLM(transformers.MistralConfig(**config))
    assert bill.parameters.total == sum(p.numel() for p in real.parameters())
    assert "num_key_value_heads=8" in bill.notes[0] and "vocab_size=32000" in bill.notes[0]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3_text", "qwen2", "qwen3"])
def test_layers_that_slide_without_layer_types(name: str) -> None:
    """A published file may leave the pattern to the class."""
    fields = {**WIDE, "hidden_size": 60, "num_hidden_layers": 7, "sliding_window": 5}
    if name.startswith("qwen"):
        fields |= {"use_sliding_window": True, "max_window_layers": 3}
    config = CONFIG_MAPPING[name](**fields)
    windows = [layer.attention.window for layer in price({"model_type": name, **fields}).layers]
    assert windows == [5 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert {5, None} == set(windows)


@pytest.mark.parametrize("case", TABLES["published"], ids=lambda case: case["config"]["model_type"])
def test_fields_of_published_files_change_nothing(case: dict[str, Any]) -> None:
    config, old = fields_of(case["config"]), case["old"]
    assert price(config | old, dtype="fp32").parameters == price(config, dtype="fp32").parameters


def test_what_cannot_be_priced_is_refused_by_name() -> None:
    for act in (price, lambda config: cache_bytes_per_token(config, "fp32")):
        refuses_table("priced", globals() | {"priced": lambda act=act, **changes: act(CONFIG | changes)})


def test_refusals_of_other_families() -> None:
    refuses_table("families", vars(real_models) | {"price": price, "OWN": OWN})
    assert families.families("reshape").keys() <= FAMILIES.keys()  # the cache of what is shared or pruned is priced


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[1]", "a JSON list"),
        ("[" * 100_000, "is no JSON"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "is no JSON"),
        ('{"model_type": "llama"}', "hidden_size is missing"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for place in (path, tmp_path, str(path)):
        with pytest.raises(HeadwiseError, match=message) as refused:
            price(place)
        assert str(refused.value).count(str(path)) == 1


def test_folders_and_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    refuses(lambda: price(folder), r"holds no config\.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float16"}))
    bill = price(folder)
    assert bill.model == "small" and bill.setting.dtype == "fp16"
    assert price(folder / "config.json") == bill
    refuses(lambda: price(tmp_path / "nowhere.json"), r"nowhere\.json does not exist")


ANYTHING = st.sampled_from(
    [None, True, False, 0, -1, 2, 3, 7, 1.5, 10**30, "x", "", [], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"0": {}}]
)


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data(), case=st.sampled_from(sorted(CASES)), value=ANYTHING)
def test_any_value_in_any_field_is_priced_or_refused(data: st.DataObject, case: str, value: Any) -> None:
    """Never another error, and never a number that is not one."""
    name, fields = CASES[case]
    kind = getattr(transformers, name).config_class.model_type
    record = FAMILIES[kind].price or {}
    known = ["architectures", "model_type", "dtype"]
    for part in ("required", "null", "defaults", "aliases", "fixed"):
        known += record.get(part, REQUIRED if part == "required" else ())
    field = data.draw(st.sampled_from(known))
    config = {"model_type": kind, **fields, field: value}
    try:
        bill = price(config, context=11, batch=3, dtype="fp32")
    except HeadwiseError as error:
        assert len(str(error)) < 500
    else:
        assert 0 < bill.parameters.active <= 2 * bill.parameters.total
