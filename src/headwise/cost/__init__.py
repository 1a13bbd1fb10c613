"""The price of a model, out of its config.json alone: parameters, cache, FLOPs, bytes moved, what fits in memory.

    hw.price("llama-2-70b", context=4096, dtype="bf16").cache.bytes_per_token     # 327,680
    hw.price(config, batch=8, gpu_memory="24GiB").memory.longest_context          # the dict of a config.json, a model

This is the way in: a preset, a file, a folder, a dict or a model becomes a shape, and a shape a price.
Needs neither torch nor a network. What cannot be priced exactly is refused with a HeadwiseError that names the field.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from headwise.cost.build import build, name_in
from headwise.cost.choices import TABLE, Choice, Variant, choose, variants
from headwise.cost.pricing import Price, Setting, bytes_of, make_setting, number_format, price_shape
from headwise.cost.shape import Attention, FeedForward, Layer, ModelShape, cache_values
from headwise.errors import HeadwiseError
from headwise.families import OURS, families, family_for
from headwise.files import read_text
from headwise.plan import Plan
from headwise.spec import AttentionSpec
from headwise.words import Note, unknown

__all__ = [
    "PRESETS",
    "TABLE",
    "Choice",
    "Price",
    "Setting",
    "Variant",
    "cache_bytes_per_token",
    "choose",
    "make_setting",
    "price",
    "price_shape",
    "read_shape",
    "variants",
]

CONFIG = "config.json"
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("headwise.cost").joinpath("presets.toml").read_text(encoding="utf-8")
)
NOTES: dict[str, str] = {name: config.pop("note") for name, config in PRESETS.items() if "note" in config}

# Sizes that both the section of our own and the fields around it say; where they differ, the file is not one model.
TWICE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def price(config: Any, plan: Plan | None = None, **setting: Any) -> Price:
    """What a model costs: parameters, cache, FLOPs, bytes moved, what fits in memory.

    Args:
        config: the name of a preset; the path of a config.json or of a folder that holds one; the dict of a
            config.json; an AttentionSpec (one layer, attention alone); a GPTConfig, a config of transformers, or
            a model that has one of these as `config` or `spec`
        plan: what each key/value head keeps of a text; None: all
        **setting: all optional: context (tokens; default the model's own length), batch (texts, 1), source
            (tokens of an encoder beside the decoder), dtype and cache_dtype (fp32, bf16, fp8, ...; default the
            config's), gpu_memory ("24GiB" or bytes), bandwidth ("900GB/s" or bytes a second)

    Raises:
        HeadwiseError: with the name of the field, for what cannot be priced exactly.
    """
    name, shape = read_shape(config)
    shape = shape if plan is None else shape.with_plan(plan)
    return price_shape(name, shape, make_setting(shape, **setting))


def cache_bytes_per_token(config: dict[str, Any], dtype: str, tokens: int = 1) -> float:
    """Bytes of cache that a token of one text takes, a mean over a text of that many, as numbers of `dtype`."""
    shape = model_shape(config)
    return bytes_of(cache_values(shape, tokens, 0), number_format(dtype)) / tokens


def read_shape(config: Any) -> tuple[str, ModelShape]:
    """A short name and the sizes of what `price` takes. A preset goes before a file: write ./gpt2 for a folder gpt2."""
    if isinstance(config, str | Path):
        return _read_description(config)
    if isinstance(config, AttentionSpec):
        return "attention", _spec_shape(config)
    if isinstance(config, dict):
        return "config", model_shape(config)
    name = type(config).__name__
    if hasattr(config, "to_dict"):
        return name, model_shape(config.to_dict())
    if is_dataclass(config) and not isinstance(config, type):
        return name, model_shape({"model_type": "headwise", "headwise": asdict(config)})
    inner = getattr(config, "config", getattr(config, "spec", None))
    if inner is None:
        raise HeadwiseError(f"a {name} has no price; pass a preset, a path, the dict of a config, or a model")
    return name, read_shape(inner)[1]


def _read_description(description: str | Path) -> tuple[str, ModelShape]:
    path = Path(description)
    if description in PRESETS or not path.exists():
        if len(path.parts) > 1 or path.suffix == ".json":
            raise HeadwiseError(f"{path} does not exist; pass a folder with {CONFIG}, such a file, or a preset")
        name = str(description)
        if name not in PRESETS:
            raise unknown(Note.of("refused.no_priced", name=repr(name)), name.lower(), PRESETS)
        return name, model_shape(PRESETS[name]).noted(*([Note.of(NOTES[name])] if name in NOTES else []))
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise HeadwiseError(f"{path} holds no {CONFIG}; pass the folder of a model")
    name = path.resolve().name if path.name != CONFIG else path.resolve().parent.name
    text = read_text(file)
    try:
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
            raise HeadwiseError(f"not a JSON document: {error}") from None
        if not isinstance(config, dict):
            raise HeadwiseError(f"a JSON {type(config).__name__}, and a config is an object with fields")
        return name, model_shape(config)
    except HeadwiseError as error:
        raise HeadwiseError(f"{file}: {error}") from None


def _spec_shape(spec: AttentionSpec) -> ModelShape:
    if {spec.d_in, spec.d_context, spec.d_out} != {spec.d_model} or not spec.out_proj:
        raise HeadwiseError(
            f"d_in={spec.d_in}, d_context={spec.d_context}, d_out={spec.d_out}, out_proj={spec.out_proj}: only an "
            f"attention from d_model={spec.d_model} to the same width, with W_O, is priced"
        )
    nothing = FeedForward(d_model=spec.d_model, width=0, gated=False)
    layer = Layer(name="L0", attention=Attention(spec=spec), feed_forward=nothing, norm_parameters=0)
    return ModelShape(family="attention", d_model=spec.d_model, layers=(layer,), pieces=(), positions=None)


def model_shape(config: dict[str, Any]) -> ModelShape:
    section = _own_section(config)
    kind = "headwise" if section is not None else config.get("model_type")
    if kind is None:
        raise HeadwiseError(f"model_type is missing; known: {', '.join(families('price'))}")
    shape = build(config if section is None else section, family_for("price", kind))
    text = config.get("text_config")
    dtype = None
    for place in (config, text if isinstance(text, dict) else {}):
        for name in (place.get("dtype"), place.get("torch_dtype")):
            if dtype is None and isinstance(name, str) and name != "auto":
                dtype = name
    notes = []
    if config.get("quantization_config"):
        notes.append(Note.of("price.quantized"))
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        notes.append(Note.of("price.further_tokens"))
    return replace(shape.noted(*notes), dtype=dtype)


def _own_section(config: dict[str, Any]) -> dict[str, Any] | None:
    section = config.get("headwise")
    if section is None and config.get("model_type") != "headwise":
        return None
    if not isinstance(section, dict):
        raise HeadwiseError("the section `headwise` is missing or no table; a run folder's config.json has one")
    around = families("price").get(str(config.get("model_type")))
    for field in TWICE:
        name = name_in(field, families()[OURS])
        theirs = field if around is None else name_in(field, around)
        sizes = section.get(name), config.get(theirs)
        if None not in sizes and sizes[0] != sizes[1]:
            raise HeadwiseError(
                f"headwise.{name}={sizes[0]} and {theirs}={sizes[1]} name one size; keep the right one, or take the "
                f"section `headwise` out"
            )
    return section
