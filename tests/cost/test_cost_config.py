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

import headwise
from headwise.cost import price
from headwise.cost.config import FAMILIES, USUAL, UndescribedError, shape_by_formula
from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPTConfig

CONFIG: dict[str, Any] = {"model_type": "llama", **WIDE}
OWN = {"vocab_size": 7, "context": 8, "n_layers": 1, "n_heads": 2, "d_model": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_left_out_have_the_default_of_the_config_class(family: str) -> None:
    config: Any = GPTConfig if family == "headwise" else CONFIG_MAPPING[family]
    for name, value in FAMILIES[family].get("flags", {}).items():
        assert getattr(config, name) == value, name


def test_a_config_that_leaves_sizes_to_its_class_is_built() -> None:
    config = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16}
    with pytest.raises(UndescribedError, match=r"no (sliding_window|vocab_size|intermediate_size)"):
        shape_by_formula(config)
    bill = price(config)
    real = transformers.MistralForCausalLM(transformers.MistralConfig(**config))
    assert bill.parameters.total == sum(p.numel() for p in real.parameters()) and bill.way == "built"


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "gemma3_text"])
def test_layers_that_slide_without_layer_types(name: str) -> None:
    """A published file may leave the pattern to the class."""
    fields = {**WIDE, "hidden_size": 60, "num_hidden_layers": 7, "sliding_window": 5}
    if name == "gpt_oss":
        fields |= {"num_local_experts": 7, "num_experts_per_tok": 3}
    config = CONFIG_MAPPING[name](**fields)
    bill = price({"model_type": name, **fields})
    windows = [layer.attention.window for layer in bill.layers if layer.attention]
    assert windows == [5 if kind == "sliding_attention" else None for kind in config.layer_types]
    assert {5, None} == set(windows)


@pytest.mark.parametrize("case", TABLES["published"], ids=lambda case: case["config"]["model_type"])
def test_fields_of_published_files_change_nothing(case: dict[str, Any]) -> None:
    config, old = fields_of(case["config"]), case["old"]
    assert price(config | old, dtype="fp32").parameters == price(config, dtype="fp32").parameters


def test_what_cannot_be_priced_is_refused_by_name() -> None:
    refuses_table("priced", globals() | {"priced": lambda **changes: price(CONFIG | changes)})


def test_refusals_of_other_families() -> None:
    refuses_table("families", vars(real_models) | {"price": price, "OWN": OWN, "hw": headwise})


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
    refuses(lambda: price(folder), r"small/config\.json does not exist; pass a folder with config\.json")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float16"}))
    bill = price(folder)
    assert bill.model == "small" and bill.setting.dtype == "fp16"
    assert price(folder / "config.json") == bill
    refuses(lambda: price(tmp_path / "nowhere.json"), r"nowhere\.json does not exist")


# small models of the families that a spec describes
DESCRIBED = [c for c, (name, _) in CASES.items() if getattr(transformers, name).config_class.model_type in FAMILIES]
ANYTHING = st.sampled_from(
    [None, True, False, 0, -1, 2, 3, 7, 1.5, 10**30, "x", "", [], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"0": {}}]
)


@pytest.mark.slow
@settings(max_examples=400)
@given(data=st.data(), case=st.sampled_from(DESCRIBED), value=ANYTHING)
def test_any_value_in_any_field_is_priced_or_refused(data: st.DataObject, case: str, value: Any) -> None:
    """Never another error, and never a number that is not one."""
    name, fields = CASES[case]
    kind = getattr(transformers, name).config_class.model_type
    known = ["architectures", "dtype", *USUAL]
    for part in ("null", "flags", "off"):
        known += FAMILIES[kind].get(part, ())
    field = data.draw(st.sampled_from(known))
    config = {"model_type": kind, **fields, field: value}
    try:
        shape = shape_by_formula(config)
    except HeadwiseError as error:
        assert len(str(error)) < 500
    else:
        assert 0 < shape.active_parameters <= 2 * shape.parameters
