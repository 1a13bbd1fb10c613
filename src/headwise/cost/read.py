"""The way in: a preset, a file, a folder or a dict becomes a shape, and a shape a price."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.cost.bill import Price
from headwise.cost.families import model_shape
from headwise.cost.presets import NOTES, PRESETS, find_preset
from headwise.cost.pricing import make_setting, price_shape
from headwise.cost.shape import ModelShape
from headwise.cost.units import bytes_of, number_format
from headwise.errors import HeadwiseError
from headwise.files import read_text

CONFIG = "config.json"


def price(description: str | Path, **setting: Any) -> Price:
    """The price of a preset by its name, of a config.json, or of a folder that holds one.

    Settings, all optional: context (tokens; default the model's own length), batch (texts, 1), source (tokens of an
    encoder beside the decoder), dtype and cache_dtype (fp32, bf16, fp8, ...; default the config's), gpu_memory
    ("24GiB" or bytes), bandwidth ("900GB/s" or bytes a second).
    """
    name, shape = read_shape(description)
    return price_shape(name, shape, make_setting(shape, **setting))


def price_config(config: dict[str, Any], name: str = "config", **setting: Any) -> Price:
    """The price of the model that the dict of a config.json describes; settings as in `price`."""
    shape = model_shape(config)
    return price_shape(name, shape, make_setting(shape, **setting))


def cache_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes that one more token adds to the cache of one text, while no window is full.

    `config` is the dict of a config.json, `dtype` the cache's (fp32, bf16, fp8, ... or torch's names). Cross keys and
    values of an encoder are not among them, and an encoder by itself keeps none.
    """
    shape = model_shape(config)
    return bytes_of(sum(attention.cache_values for attention in shape.cached), number_format(dtype))


def read_shape(description: str | Path) -> tuple[str, ModelShape]:
    """A short name and the sizes. A preset's name comes before a file's: write ./gpt2 for a folder gpt2."""
    path = Path(description)
    if description in PRESETS or not path.exists():
        if len(path.parts) > 1 or path.suffix == ".json":
            raise HeadwiseError(f"{path} does not exist; pass a folder with {CONFIG}, such a file, or a preset")
        name = str(description)
        shape = model_shape(find_preset(name))
        return name, replace(shape, notes=(*shape.notes, *([NOTES[name]] if name in NOTES else [])))
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise HeadwiseError(f"{path} holds no {CONFIG}; pass the folder of a model")
    name = path.resolve().name if path.name != CONFIG else path.resolve().parent.name
    text = read_text(file)
    try:
        return name, model_shape(_parse(text))
    except HeadwiseError as error:
        raise HeadwiseError(f"{file}: {error}") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        raise HeadwiseError(f"not a JSON document: {error}") from None
    if not isinstance(config, dict):
        raise HeadwiseError(f"a JSON {type(config).__name__}, and a config is an object with fields")
    return config
