"""A shape out of a config alone, without torch: for the families that an `AttentionSpec` describes.

What a family has is said by its facts in presets.toml, which hold whatever of a config its class in transformers reads
and sizes follow from. A config that leaves a size to its class, or that has a value not described there, is left to
`cost.built`, which asks transformers.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from headwise.cost.shape import Experts, Flops, Heads, Kept, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError
from headwise.families import OURS
from headwise.masks import Causal, Window
from headwise.spec import AttentionSpec, LatentSpec

_FILE = resources.files("headwise.cost").joinpath("presets.toml")
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = PRESETS.pop("families")
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
}
ALIASES = NAMES | {"tie_word_embeddings": ("tied",)}
# of a model whose config says neither
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# what any family calls these two, which each config has, at the top or in a part
ANY_OF = {
    "hidden_size": ("n_embd", "d_model", "emb_dim", "embed_dim", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
}
# names of fields that count something, which no model has below 0
COUNTED = re.compile(
    r"^(num|n)_(?!images)|(?<!chunk)_(size|dim|heads|layers|experts|rank)$"
)
SLIDES = {"full_attention": False, "sliding_attention": True}


class UndescribedError(HeadwiseError):
    """A config that no spec describes exactly: the model has to be built."""


class Fields:
    """The fields of one config, and the facts of its family."""

    def __init__(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.config, self.facts = config, facts

    def get(self, name: str) -> Any:
        """The value under this name or another name of it; None where it is null or missing and may be.

        Raises UndescribedError where the class has a default that is not known here.
        """
        names = [name, *ALIASES.get(name, ())]
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

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise HeadwiseError(f"{name}={short(value)} must be true or false")
        return value

    def has(self, what: str, default: bool = False) -> bool:
        """Is there a bias, a sink, ...? The facts say so by a constant, or by the name of a flag of the config."""
        answer = self.facts.get(what, default)
        return self.flag(answer) if isinstance(answer, str) else bool(answer)


def check_size(name: str, value: Any, most: int = LARGEST) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise HeadwiseError(
            f"{name}={short(value)} must be a whole number from 1 to {most:,}"
        )
    return value


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is built."""
    for part in _parts(config):
        for usual, aliases in NAMES.items():
            for name in (usual, *aliases):
                value = part.get(name)
                for each in value if isinstance(value, list | tuple) else [value]:
                    if each is not None:
                        check_size(name, each, MOST.get(usual, LARGEST))
        for name, value in part.items():
            is_size = COUNTED.search(str(name)) and isinstance(value, int | float)
            # `not >=`: NaN, too
            if is_size and not value >= 0:
                raise HeadwiseError(f"{name}={short(value)} must be a number from 0 up")


def check_present(config: Mapping[str, Any]) -> None:
    """Refuse a config that leaves to its class what sizes every model."""
    names = {name for part in _parts(config) for name in part}
    for usual, others in ANY_OF.items():
        if not names & {usual, *others}:
            raise HeadwiseError(
                f"{usual} is missing; a {config['model_type']} model has no size without it"
            )


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config, and the dicts inside."""
    parts = [config]
    for part in parts:  # those that are found follow
        parts += [value for value in part.values() if isinstance(value, dict)]
    return parts


def short(value: Any) -> str:
    text = json.dumps(value, default=repr)
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
    for name, value in facts.get("fixed", {}).items():
        other = section.get(name)
        # where that value is off, anything empty is off, too
        if other not in (None, value) and (other or value):
            raise UndescribedError(f"{name}={short(other)}")
    if kind == OURS:
        f.facts = {**facts, **_ours(f)}
    norms = f.facts.get("norms", [2, 1])
    width = f.size("hidden_size")
    layers = []
    for n, window in enumerate(_windows(f)):
        layer = layer_of(f"L{n}", _attention(f, window), kind == OURS)
        if f.has("sees_all"):
            layer = replace(layer, kept=())
        layers.append(
            _with_forward(replace(layer, norm_parameters=norms[0] * width), n, f)
        )
    tables = [
        Piece(part="embeddings", parameters=f.size(rows) * width, row=width)
        for rows in ("vocab_size", *f.facts.get("tables", ()))
    ]
    return ModelShape(
        family=str(kind),
        d_model=width,
        layers=tuple(layers),
        pieces=(*tables, Piece(part="norms", parameters=norms[1] * width), *_head(f)),
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
    # parameters of a norm, in widths of the model: 0, 1 or 2
    of_norm = f.flag("norm_gain") * (1 + (f.get("norm") == "layer" and f.has("bias")))
    outside = f.flag("embedding_norm") + f.flag("final_norm")
    is_learned = f.get("position") == "learned"
    return {
        "norms": [2 * of_norm, outside * of_norm],
        "tables": ["max_position_embeddings"] if is_learned else [],
    }


def layer_of(name: str, spec: AttentionSpec, whole_window: bool = True) -> Layer:
    """A layer with this attention alone.

    whole_window  does its cache keep a whole window between steps? That of transformers keeps one token less
    """
    weights = spec.q_weights + spec.kv_weights + spec.o_weights
    values, rows = spec.cache_values_per_token, spec.window
    pair = 2 * spec.n_heads * (spec.head_dim + spec.value_dim)
    latent, kind = None, "full" if rows is None else "sliding"
    reading = writing = expanding = Flops(2 * weights, pair)
    if isinstance(spec, LatentSpec):
        latent, kind, more = values, "latent", 2 * spec.expanding_weights
        # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
        read_as = 2 * spec.n_heads * (values + spec.latent_dim)
        # the new token's own keys and values are among the products of all of them
        expanding = Flops(2 * weights, pair + more)
        reading, writing = reading.plus(more), Flops(2 * weights + more, read_as)
    heads = Heads(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=rows,
        causal=spec.causal,
        sink=spec.sink,
        latent=latent,
        query_head_parameters=spec.query_head_parameters,
        kv_head_parameters=spec.kv_head_parameters,
        shared_parameters=spec.shared_parameters,
        parameters=spec.n_parameters,
        weights=reading.token // 2,
    )
    if rows and not whole_window:
        rows -= 1
    return Layer(
        name=name,
        kind=kind,
        attention=heads,
        kept=(Kept(values=values, rows=rows, heads=True),) if rows != 0 else (),
        reading=reading,
        writing=writing,
        expanding=expanding,
    )


def _attention(f: Fields, window: int | None) -> AttentionSpec:
    """The attention of a layer.

    That of DeepSeek makes keys and values of a latent, queries of another latent or of the input. A query and a key are
    each a part without positions and a part that is rotated, side by side, which all heads share of keys.
    """
    bias, heads = f.has("bias"), f.size("num_attention_heads")
    groups = 1 if f.has("multi_query") else f.optional("num_key_value_heads") or heads
    # A window counts the query itself, and `Window` only what stands before it.
    mask = Causal() if window is None else Window(window - 1, 0)
    sizes: dict[str, Any] = {
        "d_model": f.size("hidden_size"),
        "n_heads": heads,
        "out_bias": bias,
        "mask": None if f.has("sees_all") else mask,
    }
    if f.has("latent"):
        if groups != heads:
            raise HeadwiseError(
                f"num_key_value_heads={groups} differs from num_attention_heads={heads}; a latent gives every "
                f"head keys and values of its own"
            )
        rope_dim, q_rank = f.size("qk_rope_head_dim"), f.optional("q_lora_rank")
        return LatentSpec(
            **sizes,
            head_dim=f.size("qk_nope_head_dim") + rope_dim,
            value_dim=f.size("v_head_dim"),
            latent_dim=f.size("kv_lora_rank"),
            rope_dim=rope_dim,
            q_latent_dim=q_rank,
            # where W_Q is one matrix, DeepSeek gives it no bias
            q_bias=bias and q_rank is not None,
            kv_bias=bias,
        )
    # as `bias`, where the facts do not tell them apart
    qkv_bias, head_dim = f.has("qkv_bias", bias), f.get("head_dim")
    if head_dim is not None:
        check_size("head_dim", head_dim)
    return AttentionSpec(
        **sizes,
        n_kv_heads=groups,
        head_dim=head_dim,
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        qk_norm=f.has("qk_norm"),
        sink=f.has("sink"),
    )


def _windows(f: Fields) -> list[int | None]:
    """The window of each layer, None where all before is seen."""
    n_layers, rule = f.size("num_hidden_layers"), f.facts.get("windows")
    types = f.config.get("windows" if rule == "listed" else "layer_types")
    if rule is None or (rule == "listed" and types is None):
        return [None] * n_layers
    if rule == "all" and f.optional("sliding_window") is None:
        return [None] * n_layers
    if types is None:
        # of each so many layers the last one sees all: of 2 in gpt-oss
        every = n_layers + 1 if rule == "all" else rule
        every = f.size(every) if isinstance(every, str) else every
        slides = [(n + 1) % every > 0 for n in range(n_layers)]
    elif not isinstance(types, list | tuple) or len(types) != n_layers:
        raise HeadwiseError(
            f"{short(types)} must list the window or the kind of each of {n_layers} layers"
        )
    elif rule == "listed":  # by our own GPT
        return [each and check_size("windows", each) for each in types]
    elif {*map(str, types)} <= SLIDES.keys():
        slides = [SLIDES[kind] for kind in types]
    else:
        raise UndescribedError(f"layer_types={short(types)}")
    window = f.size("sliding_window") if any(slides) else None
    return [window if slide else None for slide in slides]


def _with_forward(layer: Layer, n: int, f: Fields) -> Layer:
    """Layer n with its feed-forward, down(act(up x)) or down(act(gate x) * up x); or with experts of that form.

    A router sends a token to a few experts; some families add experts that every token meets.
    """
    d_model, factors = f.size("hidden_size"), 2 + f.has("gated", True)
    # DeepSeek's first layers have no experts
    first = f.get("first_k_dense_replace") if f.has("shared") else 0
    if type(first) is not int or first < 0:
        raise HeadwiseError(
            f"first_k_dense_replace={short(first)} must be a whole number"
        )
    field, experts, width = f.facts.get("experts"), None, None
    if field is None or n < first:
        width = f.optional("intermediate_size")
    else:
        width = f.size(f.facts.get("expert_width", "intermediate_size"))
    width = width or 4 * d_model
    weights = factors * d_model * width
    # The biases are those of up and, where there is one, of gate, each `width` long, and that of down.
    parameters = weights + f.has("ff_bias") * ((factors - 1) * width + d_model)
    if field is not None and n >= first:
        count, active = f.size(field), f.size("num_experts_per_tok")
        if active > count:
            raise HeadwiseError(
                f"num_experts_per_tok={active} exceeds {field}={count}; correct one of them"
            )
        experts = Experts(
            count=count, active=active, parameters=parameters, matrices=weights
        )
        common = f.size("n_shared_experts") * weights if f.has("shared") else 0
        common += count * d_model  # the router
        parameters = count * (parameters + f.has("router_bias")) + common
        weights = active * weights + common
    return replace(
        layer,
        feed_forward_parameters=parameters,
        experts=experts,
        reading=layer.reading.plus(2 * weights),
        writing=layer.writing.plus(2 * weights),
        expanding=layer.expanding.plus(2 * weights),
    )


def _head(f: Fields) -> list[Piece]:
    """What the class adds behind the layers: the first of `architectures`, or of the facts where it names none."""
    classes: dict[str, str] = f.facts["heads"]
    named = f.config.get("architectures") or list(classes)
    if not isinstance(named, list) or named[0] not in list(classes):
        raise UndescribedError(f"architectures={short(named)}")
    head, width, rows = classes[named[0]], f.size("hidden_size"), f.size("vocab_size")
    if not head:
        return []
    square = width * width
    if (
        head == "pooler"
    ):  # a Linear with bias that reads one token of a text: BERT's [CLS]
        return [Piece(part="head", parameters=square + width, once=2 * square)]
    is_tied, weights = f.has("tied"), width * rows
    borrowed, parameters = is_tied * weights, (not is_tied) * weights
    if head == "masked":
        # of BERT: a Linear and a LayerNorm before it; untied it has a second bias
        weights += square
        parameters += square + 3 * width + rows * (2 - is_tied)
    return [
        Piece(part="head", parameters=parameters, flops=2 * weights, borrowed=borrowed)
    ]
