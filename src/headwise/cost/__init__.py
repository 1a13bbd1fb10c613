"""The price of a model, out of its config.json alone: parameters, cache, FLOPs, bytes moved, what fits in memory.

    hw.price("llama-2-70b", context=4096, dtype="bf16").cache.bytes_per_token     # 327,680
    hw.price(config, batch=8, gpu_memory="24GiB").memory.longest_context          # the dict of a config.json, a model

This is the way in: a preset, a file, a folder, a dict or a model becomes a shape, and a shape a price. The same model
is priced with other key/value heads, side by side (`variants`).

Needs neither torch nor a network. What cannot be priced exactly is refused with a HeadwiseError that names the field.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from headwise.cost.build import build
from headwise.cost.pricing import (
    Price,
    Setting,
    bytes_of,
    cache_price,
    decode_price,
    fit,
    make_setting,
    number_format,
    price_shape,
)
from headwise.cost.shape import FeedForward, Layer, ModelShape, cache_values
from headwise.errors import HeadwiseError
from headwise.families import OURS, families, family_for
from headwise.files import read_json
from headwise.spec import AttentionSpec, LatentSpec
from headwise.words import unknown

__all__ = [
    "PRESETS",
    "TABLE",
    "Price",
    "Setting",
    "Variant",
    "cache_bytes_per_token",
    "make_setting",
    "price_shape",
    "read_shape",
    "variants",
]

CONFIG = "config.json"
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("headwise.cost").joinpath("presets.toml").read_text(encoding="utf-8")
)
# For each preset its notes. They are taken out of PRESETS, in which a preset is then a config like any other.
NOTES: dict[str, list[str]] = {name: config.pop("notes", []) for name, config in PRESETS.items()}


def cache_bytes_per_token(config: dict[str, Any], dtype: str, tokens: int = 1) -> float:
    """Bytes of cache that a text of so many tokens takes, divided by its tokens: less for a long one with windows.

    Args:
        config: the dict of a config.json
        dtype: the number format of the cache
        tokens: of the text
    """
    shape = model_shape(config)
    return bytes_of(cache_values(shape, tokens), number_format(dtype)) / tokens


def read_shape(config: Any) -> tuple[str, ModelShape]:
    """A short name and the sizes of whatever `price` takes as its `config`.

    The text "gpt2" is the preset, also where a folder gpt2 lies: for the folder write "./gpt2".

    Raises:
        HeadwiseError: for what is no description of a model, and with the field for what cannot be priced.
    """
    if isinstance(config, str | Path):
        return _read_description(config)
    if isinstance(config, AttentionSpec):
        return "attention", _spec_shape(config)
    if isinstance(config, dict):
        return "config", model_shape(config)
    name = type(config).__name__
    if hasattr(config, "to_dict"):  # a config of transformers
        return name, model_shape(config.to_dict())
    # a GPTConfig; is_dataclass is also true of a class
    if is_dataclass(config) and not isinstance(config, type):
        return name, model_shape({"model_type": "headwise", "headwise": asdict(config)})
    # of a model, or of an attention layer
    inner = getattr(config, "config", getattr(config, "spec", None))
    if inner is None:
        raise HeadwiseError(
            f"a {name} has no price; pass a preset, a path, the dict of a config, or a model"
        )
    return name, read_shape(inner)[1]


def _read_description(description: str | Path) -> tuple[str, ModelShape]:
    """What `read_shape` says of a preset by its name, and of what lies at a path."""
    path, name = Path(description), str(description)
    if name in PRESETS:
        return name, model_shape(PRESETS[name]).noted(*NOTES[name])
    if not path.exists():
        # it was meant as a path, and otherwise as a preset
        if len(path.parts) > 1 or path.suffix == ".json":
            raise HeadwiseError(
                f"{path} does not exist; pass a folder with {CONFIG}, such a file, or a preset"
            )
        # In small letters, as presets are written: "LLaMA-2-7B" is then near llama-2-70b.
        raise unknown(
            f"no preset {name!r}, and no file or folder of that name", name.lower(), PRESETS
        )
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise HeadwiseError(f"{path} holds no {CONFIG}; pass the folder of a model")
    # Whose name the model gets: llama/config.json and llama give "llama", sizes.json gives "sizes.json". The path is
    # resolved, for the folder "." has no name.
    named = path.resolve().parent if path.name == CONFIG else path.resolve()
    config = read_json(file)
    try:  # whatever is wrong with the config is said with its file
        if not isinstance(config, dict):
            raise HeadwiseError(
                f"a JSON {type(config).__name__}, and a config is an object with fields"
            )
        return named.name, model_shape(config)
    except HeadwiseError as error:
        raise HeadwiseError(f"{file}: {error}") from None


def _spec_shape(spec: AttentionSpec) -> ModelShape:
    """A model of one layer with that attention, and a feed-forward of width 0, which costs nothing."""
    if {spec.d_in, spec.d_context, spec.d_out} != {spec.d_model} or not spec.out_proj:
        raise HeadwiseError(
            f"d_in={spec.d_in}, d_context={spec.d_context}, d_out={spec.d_out}, out_proj={spec.out_proj}: only an "
            f"attention from d_model={spec.d_model} to the same width, with W_O, is priced"
        )
    nothing = FeedForward(d_model=spec.d_model, width=0, gated=False)
    layer = Layer(name="L0", attention=spec, feed_forward=nothing, norm_parameters=0)
    return ModelShape(
        family="attention", d_model=spec.d_model, layers=(layer,), pieces=(), positions=None
    )


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The sizes that the dict of a config.json says; a model of ours is read from its section `headwise` alone."""
    kind = OURS if "headwise" in config else config.get("model_type")
    section = config.get("headwise", {}) if kind == OURS else config
    if not section or not isinstance(section, dict):
        raise HeadwiseError(
            "the section `headwise` is missing or no table; a run folder's config.json has one"
        )
    if kind is None:
        raise HeadwiseError(f"model_type is missing; known: {', '.join(families('price'))}")
    shape = build(section, family_for("price", kind))
    # The format of the weights: `torch_dtype` is its older name, and "auto" names none.
    named = [config.get(field) for field in ("dtype", "torch_dtype")]
    dtype = next((name for name in named if isinstance(name, str) and name != "auto"), None)
    if config.get("quantization_config"):
        shape = shape.noted(
            "quantization_config: all weights are priced in one number format, and scales are not counted"
        )
    # Two names of one thing: layers that predict further tokens in training, and have no part in generating.
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        shape = shape.noted(
            "the layers that predict further tokens while training are not counted; transformers drops them"
        )
    return replace(shape, dtype=dtype)


# The same model with other key/value heads, side by side.

# The presets that `headwise cost` without a model shows: the six that courses compare, in their order, and the two
# that they name for multi-query attention.
TABLE = (
    "bert-base",
    "bert-large",
    "gpt2",
    "gpt3",
    "llama-2-70b",
    "mistral-7b",
    "palm-540b",
    "falcon-7b",
)


@dataclass(frozen=True)
class Variant:
    """What a model would cost with another number of key/value heads.

    What fewer of them cost in quality is not in these numbers: that has to be measured.
    """

    name: str  # MHA, GQA-8, MQA; MLA for a latent
    n_kv_heads: int
    present: bool  # is it the model as it is?
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int  # of the setting's context and batch
    fits: bool | None  # weights and that cache in the memory; None where no memory was given
    # 0 where the weights alone exceed it; None without memory, or where nothing grows
    longest_context: int | None
    bytes_per_token: float  # moved to decode one


def variants(shape: ModelShape, setting: Setting) -> tuple[Variant, ...]:
    """The model with as many key/value heads as each divisor of its query heads: MHA first, then GQA, MQA last.

    A model with a latent stands before them as it is; those after it have keys and values in its place.

    Raises:
        HeadwiseError: for an encoder, which keeps no cache.
    """
    if not shape.generates:
        raise HeadwiseError(
            f"variants compare caches, and a {shape.family} encoder keeps none; price a decoder"
        )
    # the first layer's: `build` gives all layers of a stack the same heads
    spec = next(shape.cached)
    # True: this is the model as it is
    rows = [_variant(shape, setting, True)] if isinstance(spec, LatentSpec) else []
    for n in (n for n in range(spec.n_heads, 0, -1) if spec.n_heads % n == 0):
        present = not isinstance(spec, LatentSpec) and n == spec.n_kv_heads
        rows.append(_variant(shape.with_heads(n_kv_heads=n), setting, present))
    return tuple(rows)


def _variant(shape: ModelShape, setting: Setting, present: bool) -> Variant:
    spec = next(shape.cached)
    weights, cache = bytes_of(shape.parameters, setting.dtype), cache_price(shape, setting)
    free = None if setting.gpu_memory is None else setting.gpu_memory - weights
    longest = (
        None if free is None else fit(shape, setting, free).longest_context if free >= 0 else 0
    )
    return Variant(
        name=f"GQA-{spec.n_kv_heads}" if spec.variant == "GQA" else spec.variant,
        n_kv_heads=spec.n_kv_heads,
        present=present,
        parameters=shape.parameters,
        weight_bytes=weights,
        cache_bytes_per_token=cache.bytes_per_token,
        cache_bytes=cache.total_bytes,
        fits=None if free is None else cache.total_bytes <= free,
        longest_context=longest,
        bytes_per_token=decode_price(shape, setting).bytes_per_token,
    )
