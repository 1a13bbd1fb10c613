"""A shape out of a config alone, without torch: for the families that an `AttentionSpec` describes.

What a family has is said by its facts in presets.toml. Nothing is guessed: a config with a field that is missing, or
that may change sizes in a way not known here, is left to `cost.built`, which asks transformers.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

from headwise.cost.shape import Experts, Heads, Kept, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError
from headwise.families import OURS
from headwise.masks import Causal, Window
from headwise.spec import AttentionSpec, LatentSpec

_TABLE = tomllib.loads(
    resources.files("headwise.cost")
    .joinpath("presets.toml")
    .read_text(encoding="utf-8")
)
FAMILIES: dict[str, dict[str, Any]] = _TABLE.pop("families")
# fields that read like sizes and change none, and words of which one is in the name of a field that may be a size
HARMLESS, SIZE_WORDS = (
    frozenset(_TABLE.pop(name)) for name in ("harmless", "size_words")
)
PRESETS: dict[str, dict[str, Any]] = _TABLE
# For each preset its notes. They are taken out of PRESETS, in which a preset is then a config like any other.
NOTES: dict[str, list[str]] = {
    name: config.pop("notes", []) for name, config in PRESETS.items()
}

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
    "tie_word_embeddings": ("tied",),
}
NO_SIZE = frozenset({"tie_word_embeddings"})
# of a model whose config says neither
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")


class UndescribedError(HeadwiseError):
    """A config that no spec describes exactly: the model has to be built."""


class Fields:
    """The fields of one config, and the facts of its family."""

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.config, self.facts = config, facts
        self.fixed: dict[str, Any] = facts.get("fixed", {})

    def check(self) -> None:
        """Raise UndescribedError for fields that may change sizes and are not known here."""
        known = {*HARMLESS, *self.facts.get("flags", ()), *self.facts.get("sizes", ())}
        known |= {fact for fact in self.facts.values() if isinstance(fact, str)}
        for name, aliases in NAMES.items():
            known |= {name, *aliases}
        if "windows" in self.facts:
            known.add("layer_types")
        for name, value in self.config.items():
            if name in self.fixed:
                # Where that value is off, anything empty is off, too.
                if value not in (None, self.fixed[name]) and (
                    value or self.fixed[name]
                ):
                    raise UndescribedError(f"{name}={short(value)}")
            elif name not in known and _sizes_something(name, value):
                raise UndescribedError(f"{name}={short(value)}")

    def get(self, name: str) -> Any:
        """The value under this name or another name of it; None where it is null or missing and may be.

        Raises UndescribedError where the class has a default that is not known here.
        """
        names = [name, *NAMES.get(name, ())]
        for alias in names:
            if self.config.get(alias) is not None:
                return self.config[alias]
        if name in self.facts.get("flags", {}):
            return self.facts["flags"][name]
        if name not in self.facts.get("null", ()) and not self.config.keys() & {*names}:
            raise UndescribedError(f"no {name}")
        return None

    def size(self, name: str) -> int:
        value = self.get(name)
        if value is None:
            raise UndescribedError(f"{name}=null")
        return check_size(name, value)

    def optional(self, name: str) -> int | None:
        return None if self.get(name) is None else self.size(name)

    def has(self, what: str, default: bool = False) -> bool:
        """Is there a bias, a sink, ...? The facts say so by a constant, or by the name of a flag of the config."""
        answer = self.facts.get(what, default)
        if isinstance(answer, str):
            value = self.get(answer)
            if not isinstance(value, bool):
                raise HeadwiseError(f"{answer}={short(value)} must be true or false")
            return value
        return bool(answer)


def check_size(name: str, value: Any, most: int = LARGEST) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise HeadwiseError(
            f"{name}={short(value)} must be a whole number from 1 to {most:,}"
        )
    return value


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is built."""
    for usual, aliases in NAMES.items():
        for name in (usual, *aliases):
            value = config.get(name)
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is not None and usual not in NO_SIZE:
                    check_size(name, each, MOST.get(usual, LARGEST))


def _sizes_something(name: str, value: Any) -> bool:
    """May a field change sizes, by its name and value?

    Not if it is null, off, a text or a fraction; nor if it is private, is about dropout, or is the id of a token.
    """
    if not value or isinstance(value, str | float):
        return False
    ids = ("_token_id", "_token_index", "_token_ids")
    if name.startswith("_") or "drop" in name or name.endswith(ids):
        return False
    return bool(SIZE_WORDS & set(re.split(r"[_\d]+", name.lower())))


def short(value: Any) -> str:
    text = (
        json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def shape_by_formula(config: Mapping[str, Any]) -> ModelShape:
    """The sizes that the dict of a config.json says; a model of ours is read from its section `headwise` alone.

    Raises UndescribedError where only the built model has them, and HeadwiseError for what no model has.
    """
    kind = OURS if "headwise" in config else config.get("model_type")
    section = config.get("headwise") if kind == OURS else config
    if not section or not isinstance(section, dict):
        raise HeadwiseError(
            "the section `headwise` is missing or no table; a run folder's config.json has one"
        )
    facts = _facts(kind)
    f = Fields(section, facts)
    for name in REQUIRED:
        if all(section.get(alias) is None for alias in (name, *NAMES[name])):
            raise HeadwiseError(
                f"{name} is missing; a {kind} model has no size without it"
            )
    f.check()
    if kind == OURS:
        f.facts = {**facts, **_ours(f)}
    attentions, forwards = _attentions(f), _forwards(f)
    norms = f.facts.get("norms", [2, 1])
    width = f.size("hidden_size")
    layers = []
    for n, (spec, forward) in enumerate(zip(attentions, forwards, strict=True)):
        layer = layer_of(f"L{n}", spec, kind == OURS)
        flops = 2 * forward.weights
        layer = replace(
            layer,
            feed_forward_parameters=forward.parameters,
            norm_parameters=norms[0] * width,
            experts=forward.experts,
            linear=layer.linear + flops,
            step=layer.step + flops,
            expanded=layer.expanded and layer.expanded + flops,
        )
        layers.append(layer)
    pieces = [*_tables(f), Piece(part="norms", parameters=norms[1] * width), *_head(f)]
    return ModelShape(
        family=str(kind),
        d_model=width,
        layers=tuple(layers),
        pieces=tuple(pieces),
        positions=f.size("max_position_embeddings"),
        generates=not f.has("sees_all"),
    )


def _facts(kind: Any) -> dict[str, Any]:
    """What is known of a family, with what it shares with another one."""
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UndescribedError(f"model_type={kind!r}")
    facts = FAMILIES[kind]
    return {**_facts(facts["like"]), **facts} if "like" in facts else facts


def _ours(f: Fields) -> dict[str, Any]:
    """The facts of our own GPT, by the fields of GPTConfig."""
    for name, known in (("norm", ("rms", "layer")), ("position", ("rope", "learned"))):
        if f.get(name) not in known:
            raise HeadwiseError(
                f"{name}={f.get(name)!r} is not known; one of {', '.join(known)}"
            )
    has_norm_bias = f.get("norm") == "layer" and f.has("bias")
    # parameters of a norm, in widths of the model: 0, 1 or 2
    of_norm = f.get("norm_gain") * (1 + has_norm_bias)
    before = f.get("embedding_norm") * of_norm
    return {
        "norms": [2 * of_norm, before + f.get("final_norm") * of_norm],
        "positions": f.get("position") == "learned",
    }


def layer_of(name: str, spec: AttentionSpec, whole_window: bool = True) -> Layer:
    """A layer with this attention alone.

    whole_window  does its cache keep a whole window between steps? That of transformers keeps one token less
    """
    weights = spec.q_weights + spec.kv_weights + spec.o_weights
    values = spec.cache_values_per_token
    pair = step_pair = 2 * spec.n_heads * (spec.head_dim + spec.value_dim)
    expanded = expanded_pair = 0
    if isinstance(spec, LatentSpec):
        weights += spec.expanding_weights
        # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
        step_pair = 2 * spec.n_heads * (values + spec.latent_dim)
        # the new token's own keys and values are among its other products
        expanded = 2 * (weights - spec.expanding_weights)
        expanded_pair = pair + 2 * spec.expanding_weights
    heads = Heads(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=spec.window,
        causal=spec.causal,
        sink=spec.sink,
        latent=values if isinstance(spec, LatentSpec) else None,
        query_head_parameters=spec.query_head_parameters,
        kv_head_parameters=spec.kv_head_parameters,
        shared_parameters=spec.shared_parameters,
        parameters=spec.n_parameters,
        weights=weights,
    )
    rows = spec.window
    if rows and not whole_window:
        rows -= 1
    kind = "latent" if heads.latent else "sliding" if rows is not None else "full"
    return Layer(
        name=name,
        kind=kind,
        heads=heads,
        kept=(Kept(values=values, rows=rows, heads=True),) if rows != 0 else (),
        linear=2 * weights,
        pair=pair,
        step=2 * weights,
        step_pair=step_pair,
        expanded=expanded,
        expanded_pair=expanded_pair,
    )


def _attentions(f: Fields) -> list[AttentionSpec]:
    """The attention of each layer, whose windows may differ."""
    spec = _latent(f) if f.has("latent") else _attention(f)
    specs = {}  # by window: layers that are alike share one spec
    windows = _windows(f)
    for window in windows:
        # A window counts the query itself, and `Window` only what stands before it.
        mask = Causal() if window is None else Window(window - 1, 0)
        specs[window] = spec if f.has("sees_all") else spec.replace(mask=mask)
    return [specs[window] for window in windows]


def _attention(f: Fields) -> AttentionSpec:
    bias = f.has("bias")
    qkv_bias = f.has(
        "qkv_bias", bias
    )  # as `bias`, where the facts do not tell them apart
    width, heads = f.size("hidden_size"), f.size("num_attention_heads")
    groups = 1 if f.has("multi_query") else f.optional("num_key_value_heads") or heads
    if heads % groups:
        raise HeadwiseError(
            f"num_key_value_heads={groups} does not divide num_attention_heads={heads}; each must serve "
            f"as many query heads"
        )
    head_dim = f.optional("head_dim")
    if head_dim is None and width % heads:
        raise HeadwiseError(
            f"num_attention_heads={heads} does not divide hidden_size={width}, and there is no head_dim; "
            f"give a width that {heads} divides"
        )
    return AttentionSpec(
        d_model=width,
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=head_dim or width // heads,
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        out_bias=bias,
        qk_norm=f.has("qk_norm"),
        sink=f.has("sink"),
    )


def _latent(f: Fields) -> LatentSpec:
    """The attention of DeepSeek: keys and values are made of a latent, queries of another latent or of the input.

    A query and a key are each a part without positions and a part that is rotated, side by side. The rotated part of
    keys is made of the input, and all heads share it.
    """
    heads, bias = f.size("num_attention_heads"), f.has("bias")
    groups = f.optional("num_key_value_heads") or heads
    if groups != heads:
        raise HeadwiseError(
            f"num_key_value_heads={groups} differs from num_attention_heads={heads}; a latent gives every "
            f"head keys and values of its own"
        )
    rope_dim, q_rank = f.size("qk_rope_head_dim"), f.optional("q_lora_rank")
    return LatentSpec(
        d_model=f.size("hidden_size"),
        n_heads=heads,
        head_dim=f.size("qk_nope_head_dim") + rope_dim,
        value_dim=f.size("v_head_dim"),
        latent_dim=f.size("kv_lora_rank"),
        rope_dim=rope_dim,
        q_latent_dim=q_rank,
        q_bias=bias
        and q_rank is not None,  # where W_Q is one matrix, DeepSeek gives it no bias
        kv_bias=bias,
        out_bias=bias,
    )


def _windows(f: Fields) -> list[int | None]:
    """The window of each layer, None where all before is seen."""
    n_layers, rule = f.size("num_hidden_layers"), f.facts.get("windows")
    listed = f.config.get("windows")
    if rule == "listed" and listed is not None:  # by our own GPT
        if not isinstance(listed, list | tuple) or len(listed) != n_layers:
            raise HeadwiseError(
                f"windows={listed!r} must list a number of tokens, or null, for each of {n_layers} layers"
            )
        return [
            None if window is None else check_size("windows", window)
            for window in listed
        ]
    flag = f.facts.get("use_windows")
    if rule in (None, "listed") or (flag and not f.has("use_windows")):
        return [None] * n_layers
    types = f.config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != n_layers:
            count = len(types) if isinstance(types, list) else 0
            raise HeadwiseError(
                f"layer_types has {count} entries for {n_layers} layers; one for each is needed"
            )
        # "attention" is an older name of full_attention.
        if not {*map(str, types)} <= {
            "full_attention",
            "sliding_attention",
            "attention",
        }:
            raise UndescribedError(f"layer_types={short(types)}")
        slides = [kind == "sliding_attention" for kind in types]
    elif rule == "all":
        slides = [f.optional("sliding_window") is not None] * n_layers
    elif (
        rule != "types"
    ):  # of each so many layers the last one sees all: of 2 in gpt-oss
        every = rule if isinstance(rule, int) else f.size(rule)
        slides = [(n + 1) % every > 0 for n in range(n_layers)]
    else:
        raise UndescribedError("no layer_types")
    window = f.optional("sliding_window")
    if any(slides) and window is None:
        raise HeadwiseError(
            "some layers slide, and sliding_window is null; give the window"
        )
    return [window if slide else None for slide in slides]


class Forward(NamedTuple):
    """down(act(up x)), or down(act(gate x) * up x); with experts a router sends a token to a few of them."""

    parameters: int
    weights: int  # that a token meets
    experts: Experts | None = None


def _forward(f: Fields, width: int, experts: tuple[int, int] | None = None) -> Forward:
    d_model, gated, bias = f.size("hidden_size"), f.has("gated", True), f.has("ff_bias")
    matrices = (2 + gated) * d_model * width
    # The biases are those of up and, where there is one, of gate, each `width` long, and that of down.
    parameters = matrices + bias * ((1 + gated) * width + d_model)
    if not experts:
        return Forward(parameters, matrices)
    active, count = experts
    each = Experts(count=count, active=active, parameters=parameters, matrices=matrices)
    common = count * d_model + matrices * (
        f.size("n_shared_experts") if f.has("shared") else 0
    )
    total = count * (parameters + f.has("router_bias")) + common
    return Forward(total, active * matrices + common, each)


def _forwards(f: Fields) -> list[Forward]:
    """The feed-forward of each layer: plain, or with experts."""
    n_layers, field = f.size("num_hidden_layers"), f.facts.get("experts")
    if field is None:
        width = f.optional("intermediate_size") or 4 * f.size("hidden_size")
        return [_forward(f, width)] * n_layers
    active, count = f.size("num_experts_per_tok"), f.size(field)
    if active > count:
        raise HeadwiseError(
            f"num_experts_per_tok={active} exceeds {field}={count}; correct one of them"
        )
    width = f.size(f.facts.get("expert_width", "intermediate_size"))
    forward = _forward(f, width, (active, count))
    # DeepSeek's first layers have none
    first = f.get("first_k_dense_replace") if f.has("shared") else 0
    if not isinstance(first, int) or not first >= 0:
        raise HeadwiseError(
            f"first_k_dense_replace={short(first)} must be a whole number"
        )
    plain = (
        [_forward(f, f.size("intermediate_size"))] * min(first, n_layers)
        if first
        else []
    )
    return plain + [forward] * (n_layers - len(plain))


def _tables(f: Fields) -> list[Piece]:
    """The tables that a token reads a row of, and the norm behind them."""
    width = f.size("hidden_size")
    rows = [f.size("vocab_size")]
    if f.has("positions"):
        rows.append(f.size("max_position_embeddings"))
    if f.has("segments"):
        rows.append(f.size("type_vocab_size"))
    return [
        Piece(part="embeddings", parameters=count * width, row=width) for count in rows
    ]


def _head(f: Fields) -> list[Piece]:
    """What the class adds behind the layers: the first of `architectures`, or of the facts where it names none."""
    classes: dict[str, str] = f.facts["heads"]
    named = f.config.get("architectures") or list(classes)
    if not isinstance(named, list) or named[0] not in list(classes):
        raise UndescribedError(f"architectures={short(named)}")
    width, vocabulary = f.size("hidden_size"), f.size("vocab_size")
    pieces = []
    for head in classes[named[0]].split():
        if head in (
            "pooler",
            "two",
        ):  # a Linear with bias that reads one token of a text, such as BERT's [CLS]
            out = 2 if head == "two" else width
            pieces.append(
                Piece(part="head", parameters=width * out + out, once=2 * width * out)
            )
            continue
        tied, size = f.has("tied", False), width * vocabulary
        parameters, weights = (not tied) * size, size
        if (
            head == "masked"
        ):  # of BERT: a Linear and a LayerNorm before it; untied it has a second bias
            weights += width * width
            parameters += width * width + 3 * width + vocabulary * (2 - tied)
        pieces.append(
            Piece(
                part="head",
                parameters=parameters,
                flops=2 * weights,
                borrowed=tied * size,
            )
        )
    return pieces
