"""A shape without torch: out of a config, for the families that an `AttentionSpec` describes, or of a preset.

families.toml holds whatever of a config its class in transformers reads and sizes follow from. A config that leaves a
size to its class, or that has a value not described there, is left to `cost.built`, which asks transformers. Presets
are layers as data, which `python studies/presets.py` writes out of configs.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from headwise.cost.shape import Flops, Heads, Kept, Layer, ModelShape, Outside
from headwise.errors import HeadwiseError
from headwise.families import OURS
from headwise.masks import Causal, Mask, Window
from headwise.records import record_of
from headwise.spec import AttentionSpec, LatentSpec

_FILES = resources.files("headwise.cost")
FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(
    (_FILES / "families.toml").read_text(encoding="utf-8")
)
PRESETS: dict[str, dict[str, Any]] = json.loads(
    (_FILES / "presets.json").read_text(encoding="utf-8")
)

LARGEST = 2**40  # of one size: far above any real one, so a larger number is a slip
# far above any real model; each layer is built, so a slip would take for ever
MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 4096}
# What families call the same size, the usual name first.
NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
    "head_dim": (),
    "vocab_size": (),
    "intermediate_size": ("n_inner", "d_ff", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "context"),
}
USUAL = {"tied": "tie_word_embeddings"}
for _usual, _others in NAMES.items():
    USUAL |= dict.fromkeys((_usual, *_others), _usual)
# of a model whose config says neither
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")


class UndescribedError(HeadwiseError):
    """A config that no spec describes exactly: the model has to be built."""


class Fields(dict[str, Any]):
    """The fields of one config by their usual names, those with a default of their class among them."""

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(dict.fromkeys(facts.get("null", ())) | facts["flags"])
        self.facts = facts
        for name, value in config.items():
            name = USUAL.get(name, name)
            if value is not None or name not in self:
                self[name] = value

    def __missing__(self, name: str) -> Any:
        raise UndescribedError(f"no {name}")

    def size(self, name: str) -> int:
        size: int | None = self.optional(name)
        if size is None:
            raise UndescribedError(f"{name}=null")
        return size

    def optional(self, name: str) -> Any:
        value = self[name]
        return value if value is None else check_size(name, value)

    def has(self, what: str, default: bool = False) -> bool:
        """Is there a bias, a gate, ...? The facts say so by a constant, or by the name of a flag of the config."""
        name = value = self.facts.get(what, default)
        if isinstance(name, str):
            value = self[name]
        if not isinstance(value, bool):
            raise HeadwiseError(f"{name}={short(value)} must be true or false")
        return value


def check_size(name: str, value: Any, most: int = LARGEST) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise HeadwiseError(
            f"{name}={short(value)} must be a whole number from 1 to {most:,}"
        )
    return value


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is built; also those of the dicts inside."""
    for name, value in config.items():
        usual = USUAL.get(name)
        if isinstance(value, dict):
            check_sizes(value)
        elif usual in NAMES and value is not None and not isinstance(value, list):
            check_size(name, value, MOST.get(usual, LARGEST))


def short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def preset(name: str) -> ModelShape:
    """The sizes of a known model: rows of layers, and which layer is which row."""
    fields = {**PRESETS[name], "layers": ()}
    rows = [record_of(Layer, {"name": "", **row}) for row in fields.pop("rows")]
    layers = []
    for n, number in enumerate(fields.pop("order")):
        layers.append(replace(rows[number], name=f"L{n}"))
    return replace(record_of(ModelShape, fields), layers=tuple(layers))


def shape_by_formula(config: Mapping[str, Any]) -> ModelShape:
    """The sizes that the dict of a config.json says; a model of ours is read from its section `headwise` alone.

    Raises UndescribedError where only the built model has them, and HeadwiseError for what no model has.
    """
    kind = OURS if "headwise" in config else config.get("model_type")
    section = config.get("headwise") if kind == OURS else config
    if not isinstance(section, dict):
        raise HeadwiseError(
            "the section `headwise` is missing or no table; a run folder's config.json has one"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UndescribedError(f"model_type={kind!r}")
    facts = FAMILIES[kind]
    while "like" in facts:
        base = FAMILIES[facts["like"]]
        facts = base | {name: facts[name] for name in facts if name != "like"}
    f = Fields(section, facts)
    for name in REQUIRED:
        if f.get(name) is None:
            raise HeadwiseError(
                f"{name} is missing; a {kind} model has no size without it"
            )
    for name, value in facts.get("fixed", {}).items():
        # where that value is off, anything empty is off, too
        if f.get(name) not in (None, value) and (f[name] or value):
            raise UndescribedError(f"{name}={short(f[name])}")
    width = f.size("hidden_size")
    n_norms, n_outside = facts["norms"]
    gains = width
    if kind == OURS:
        gains *= f.has("gain") * (1 + (f["norm"] == "layer" and f.has("bias")))
        n_outside = f.has("embedding_norm") + f.has("final_norm")
    layer = layer_of("", _attention(f), whole_window=False)
    layer = layer.beside(*_feed_forward(f)).beside(n_norms * gains, 0)
    names = [f"L{n}" for n in range(f.size("num_hidden_layers"))]
    return ModelShape(
        family=kind,
        d_model=width,
        layers=tuple(replace(layer, name=name) for name in names),
        outside=_outside(f, n_outside * gains),
        positions=f.size("max_position_embeddings"),
    )


def layer_of(name: str, spec: AttentionSpec, whole_window: bool = True) -> Layer:
    """A layer with this attention alone.

    whole_window  does its cache keep a whole window between steps? That of transformers keeps one token less
    """
    weights = spec.q_weights + spec.kv_weights + spec.o_weights
    values, rows = spec.cache_values_per_token, spec.window
    latent, kind = None, "full" if rows is None else "sliding"
    width = read_as = spec.head_dim + spec.value_dim
    if isinstance(spec, LatentSpec):
        latent, kind = values, "latent"
        weights += spec.expanding_weights
        # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
        read_as = values + spec.latent_dim
    heads = Heads(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=rows,
        causal=spec.causal,
        sink=spec.sink,
        latent=latent,
        kv_head_parameters=spec.kv_head_parameters,
        parameters=spec.n_parameters,
        weights=weights,
    )
    if rows and not whole_window:
        rows -= 1
    return Layer(
        name=name,
        kind=kind,
        attention=heads,
        kept=(Kept(values=values, rows=rows, heads=True),) if rows != 0 else (),
        reading=Flops(2 * weights, 2 * spec.n_heads * width),
        writing=Flops(2 * weights, 2 * spec.n_heads * read_as),
    )


def _attention(f: Fields) -> AttentionSpec:
    bias = f.has("bias")
    # as `bias`, where the facts do not tell them apart
    qkv_bias = f.has("qkv_bias", bias)
    window = f.optional(f.facts["window"]) if "window" in f.facts else None
    # A window counts the query itself, and `Window` only what stands before it.
    mask: Mask = Window(window - 1, 0) if window else Causal()
    return AttentionSpec(
        d_model=f.size("hidden_size"),
        n_heads=f.size("num_attention_heads"),
        n_kv_heads=f.optional("num_key_value_heads"),
        head_dim=f.optional("head_dim"),
        mask=mask,
        out_bias=bias,
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        qk_norm=f.has("qk_norm"),
    )


def _feed_forward(f: Fields) -> tuple[int, int]:
    """Parameters, and entries of matrices, of down(act(up x)), or of down(act(gate x) * up x)."""
    d_model, factors = f.size("hidden_size"), 2 + f.has("gated", True)
    width = f.optional("intermediate_size") or 4 * d_model
    weights = factors * d_model * width
    # The biases are those of up and, where there is one, of gate, each `width` long, and that of down.
    biases = f.has("ff_bias") * ((factors - 1) * width + d_model)
    return weights + biases, weights


def _outside(f: Fields, norms: int) -> Outside:
    """Tables, norms, and what the class adds behind the layers.

    The class is the first of `architectures`, or of the facts where it names none.
    """
    classes: dict[str, bool] = f.facts["heads"]
    named = f.get("architectures") or list(classes)
    if not isinstance(named, list) or named[0] not in list(classes):
        raise UndescribedError(f"architectures={short(named)}")
    width, rows = f.size("hidden_size"), f.size("vocab_size")
    tables = [rows, *map(f.size, f.facts.get("tables", ()))]
    if f.get("position") == "learned":  # our own GPT
        tables.append(f.size("max_position_embeddings"))
    has_head, is_tied, matrix = classes[named[0]], f.has("tied"), width * rows
    return Outside(
        embeddings=sum(tables) * width,
        row=len(tables) * width,
        norms=norms,
        head=(not is_tied) * matrix if has_head else None,
        borrowed=has_head * is_tied * matrix,
        flops=has_head * 2 * matrix,
    )
