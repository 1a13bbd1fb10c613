"""A shape out of a config.json, as the `price` of its family's record in families.toml says; its keys stand there.

Nothing is guessed: an unknown field that reads like a size refuses the whole config.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwise.cost.shape import FeedForward, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError
from headwise.families import HARMLESS, SIZE_WORDS, Family
from headwise.masks import Causal, Window
from headwise.spec import AttentionSpec, LatentSpec

LARGEST = 2**40  # of one size: far above any real one, so a larger number is a slip
# far above any real model; each layer is built, so a slip would take for ever
MOST_LAYERS, MOST_HEADS = 10_000, 4096

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Parameters of the norms of a layer, and of the norm behind all layers, in widths of the model. Usual are RMSNorms,
# two a layer and one behind them, with a gain of one width each; a LayerNorm has a bias, too, and so counts twice.
NORMS = (2, 1)
# Fields in which null says something, also where the class has a number as default: no window, as many key/value
# heads as query heads, heads of width / heads, queries that are made of no latent.
NULLABLE = frozenset({"sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank"})


class Fields:
    """The fields of one config.json, and the record of its family. Every method raises HeadwiseError with the field."""

    def __init__(self, config: dict[str, Any], family: Family) -> None:
        self.family, self.config = family, config
        self.record = dict(family.price or {})  # `part` changes a copy
        # Like `defaults` in the family's own words: a record that renames the usual three lists them itself.
        self.required = self.record.get("required", REQUIRED)
        # What the config class fills in; `null` are fields whose default is None.
        self.defaults = dict.fromkeys(self.record.get("null", ())) | self.record.get("defaults", {})
        # sizes that the file leaves out, by the default of the class
        self.filled_in: dict[str, int] = {}
        self.aliases: dict[str, str] = self.record.get("aliases", {})
        known = {
            *self.required,
            *self.defaults,
            *self.aliases,
            *self.record.get("derived", ()),
            *HARMLESS,
        }
        fixed = self.record.get("fixed", {})
        for name, value in config.items():
            if name in fixed:  # an option that changes sizes: null, or the one value that is priced
                # Where that value is off, anything empty is off, too.
                if value not in (None, fixed[name]) and (value or fixed[name]):
                    wanted = f"{name}={_short(fixed[name])}"
                    raise HeadwiseError(
                        f"{name}={_short(value)} is not priced for {family.name}, only {wanted}"
                    )
            elif name not in known and _sizes_something(name, value):
                raise HeadwiseError(
                    f"{name}={_short(value)} is not a field of {family.name} that is known here, and it may "
                    f"change sizes; if it does not, price a copy of the config without it"
                )

    def part(self, **changes: Any) -> Fields:
        """The same fields, for a part of the model of which the record says something else."""
        # not a deep copy: all parts note what they fill in in one `filled_in`
        fields = copy.copy(self)
        fields.record = self.record | changes
        return fields

    def name_of(self, name: str) -> str:
        """The family's own word for a field: `n_embd` for `hidden_size` in GPT-2; the usual one where it has none."""
        return self.aliases.get(name, name)

    def has(self, what: str, default: bool | str = False) -> bool:
        """Is there a bias, a sink, ...? The record says so by a constant, or by the name of a flag of the config."""
        answer: bool | str = self.record.get(what, default)
        return self.flag(answer) if isinstance(answer, str) else answer

    def get(self, name: str) -> Any:
        """The value under this name or an alias, else the default of the config class; None where null is meant."""
        name = self.name_of(name)
        names = [name, *(alias for alias, field in self.aliases.items() if field == name)]
        value = next(
            (self.config[alias] for alias in names if self.config.get(alias) is not None), None
        )
        if value is not None:
            return value
        if name in self.required:
            raise HeadwiseError(
                f"{' or '.join(names)} is missing; a {self.family.name} model has no size without it"
            )
        default = self.defaults.get(name)
        if any(alias in self.config for alias in names):  # it is there, and null
            if name not in NULLABLE and default is not None:
                raise HeadwiseError(
                    f"{name}=null; give a value, or leave it out for {_short(default)}"
                )
            return None
        if type(default) is int:  # a size: flags and names are not worth a note
            self.filled_in[name] = default
        return default

    def size(self, name: str, most: int = LARGEST) -> int:
        return check_size(self.name_of(name), self.get(name), most)

    def optional_size(self, name: str) -> int | None:
        return None if self.get(name) is None else self.size(name)

    def count(self, name: str) -> int:
        """A size, or 0."""
        value = self.get(name)
        # False == 0, and is no count
        return 0 if value == 0 and type(value) is int else self.size(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise HeadwiseError(f"{self.name_of(name)}={_short(value)} must be true or false")
        return value

    def choice(self, name: str, *known: str) -> str:
        """One of some words, which only our own GPT asks for: by no alias, so `name` is what stands in the file."""
        value = self.get(name)
        if value not in known:
            raise HeadwiseError(f"{name}={value!r} is not known; one of {', '.join(known)}")
        return str(value)

    def n_layers(self) -> int:
        return self.size("num_hidden_layers", MOST_LAYERS)

    def n_heads(self) -> int:
        return self.size("num_attention_heads", MOST_HEADS)

    def n_kv_heads(self) -> int:
        name, heads = "num_key_value_heads", self.n_heads()
        number = self.optional_size(name) or heads
        if heads % number:
            fact = f"{self.name_of(name)}={number} does not divide {self.name_of('num_attention_heads')}={heads}"
            raise HeadwiseError(f"{fact}; each must serve as many query heads")
        return number

    def head_dim(self) -> int:
        explicit = self.optional_size("head_dim")
        if explicit is not None:
            return explicit
        d_model, heads = self.size("hidden_size"), self.n_heads()
        if d_model % heads:
            raise HeadwiseError(
                f"{self.name_of('num_attention_heads')}={heads} does not divide {self.name_of('hidden_size')}="
                f"{d_model}, and there is no head_dim; give a width that {heads} divides"
            )
        return d_model // heads

    def notes(self) -> tuple[str, ...]:
        if not self.filled_in:
            return ()
        sizes = ", ".join(f"{name}={value}" for name, value in self.filled_in.items())
        return (f"left out of the config, so the default of the {self.family.name} class: {sizes}",)


def check_size(name: str, value: Any, most: int = LARGEST) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise HeadwiseError(f"{name}={_short(value)} must be a whole number from 1 to {most:,}")
    return value


def _sizes_something(name: str, value: Any) -> bool:
    """May a field change sizes, by its name and value?

    Not if it is null, off, a text or a fraction; nor if it is private, is about dropout, or is the id of a token.
    """
    if not value or isinstance(value, str | float):
        return False
    if (
        name.startswith("_")
        or "drop" in name
        or name.endswith(("_token_id", "_token_index", "_token_ids"))
    ):
        return False
    return bool(SIZE_WORDS & set(re.split(r"[_\d]+", name.lower())))


def _short(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def build(config: dict[str, Any], family: Family) -> ModelShape:
    """The sizes of the model, with a note of those that the file leaves to the class."""
    f = Fields(config, family)
    # Most records name no rule: then there is one stack.
    shape = RULES.get(f.record.get("rule", ""), one_stack)(f)
    return replace(shape, family=family.name, notes=(*f.notes(), *shape.notes))


def one_stack(f: Fields, positions: int | None = None) -> ModelShape:
    """The shape of a model with one stack of layers.

    positions  tokens of the longest text, where max_position_embeddings does not say it
    """
    pieces = [*pieces_of(f), final_norm(f), *class_pieces(f)]
    return ModelShape(
        d_model=f.size("hidden_size"),
        layers=tuple(layers_of(f)),
        pieces=tuple(pieces),
        positions=positions or f.size("max_position_embeddings"),
        generates=not f.has("sees_all"),
    )


def layers_of(f: Fields) -> list[Layer]:
    """The layers, whose windows and feed-forwards may differ."""
    spec, windows = attention_of(f), windows_of(f)
    specs = dict.fromkeys(windows, spec)  # by window: layers that are alike share one spec
    if not f.has("sees_all"):
        for window in specs:
            # A window counts the query itself, and `Window` only what stands before it.
            specs[window] = spec.replace(mask=Causal() if window is None else Window(window - 1, 0))
    layers = []
    for n, (window, forward) in enumerate(zip(windows, forwards_of(f), strict=True)):
        layer = Layer(
            name=f"L{n}",
            attention=specs[window],
            feed_forward=forward,
            norm_parameters=f.record.get("norms", NORMS)[0] * spec.d_model,
        )
        layers.append(layer)
    return layers


def attention_of(f: Fields) -> AttentionSpec:
    """The attention of a layer, without its mask."""
    if f.record.get("latent"):
        return deepseek_latent(f)
    bias = f.has("bias")
    qkv_bias = f.has("qkv_bias", bias)  # as `bias`, where the record does not tell them apart
    return AttentionSpec(
        d_model=f.size("hidden_size"),
        n_heads=f.n_heads(),
        # `falcon` says whether it is
        n_kv_heads=1 if f.record.get("multi_query") else f.n_kv_heads(),
        head_dim=f.head_dim(),
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        out_bias=bias,
        qk_norm=f.has("qk_norm"),
        sink=f.has("sink"),
    )


def deepseek_latent(f: Fields) -> LatentSpec:
    """The attention of DeepSeek: keys and values are made of a latent, queries of another latent or of the input.

    A query and a key are each a part without positions and a part that is rotated, side by side. The rotated part of
    keys is made of the input, and all heads share it.
    """
    heads, bias = f.n_heads(), f.flag("attention_bias")
    if (f.optional_size("num_key_value_heads") or heads) != heads:
        names = f"num_key_value_heads={f.get('num_key_value_heads')} differs from num_attention_heads={heads}"
        raise HeadwiseError(f"{names}; a latent gives every head keys and values of its own")
    rope_dim, q_rank = f.size("qk_rope_head_dim"), f.optional_size("q_lora_rank")
    return LatentSpec(
        d_model=f.size("hidden_size"),
        n_heads=heads,
        head_dim=f.size("qk_nope_head_dim") + rope_dim,
        value_dim=f.size("v_head_dim"),
        latent_dim=f.size("kv_lora_rank"),
        rope_dim=rope_dim,
        q_latent_dim=q_rank,
        q_bias=bias and q_rank is not None,  # where W_Q is one matrix, DeepSeek gives it no bias
        kv_bias=bias,
        out_bias=bias,
    )


# Which layers n, from 0, slide (see a window), as their class has it, where no `layer_types` of the file says so.
SLIDES: dict[str, Callable[[Fields, int], bool]] = {
    "all": lambda f, n: True,
    "late": lambda f, n: n >= f.count("max_window_layers"),  # Qwen2 and Qwen3
    "every other": lambda f, n: n % 2 == 0,  # Gemma 2, gpt-oss
    # Gemma 3: of each so many layers the last one sees all.
    "pattern": lambda f, n: (n + 1) % f.size("sliding_window_pattern") > 0,
}


def windows_of(f: Fields) -> list[int | None]:
    """The window of each layer, None where all before is seen.

    Raises HeadwiseError where fields contradict each other: they name a sliding layer without a window, say.
    """
    rule, n_layers = f.record.get("windows"), f.n_layers()
    if rule == "listed":
        return _listed_windows(f, n_layers)
    may_slide = rule is not None and f.has("use_windows", True)
    # their classes read a null window as: no layer slides
    if may_slide and rule in ("all", "late"):
        may_slide = f.optional_size("sliding_window") is not None
    # not every class reads the field
    types = f.get("layer_types") if "layer_types" in f.defaults else None
    if types is None:
        slides = [may_slide and SLIDES[str(rule)](f, n) for n in range(n_layers)]
    else:
        count = len(types) if isinstance(types, list) else 0
        if count != n_layers:
            raise HeadwiseError(
                f"layer_types has {count} entries for {n_layers} layers; one for each is needed"
            )
        # "attention" is an older name of full_attention.
        unknown = [
            kind
            for kind in types
            if kind not in ("full_attention", "sliding_attention", "attention")
        ]
        if unknown:
            raise HeadwiseError(
                f"layer_types names {unknown[0]!r}; known: full_attention and sliding_attention, other layers keep "
                f"other caches"
            )
        slides = [kind == "sliding_attention" for kind in types]
    if not any(slides):
        return [None] * n_layers
    window = f.optional_size("sliding_window")
    if window is None:
        raise HeadwiseError("some layers slide, and sliding_window is null; give the window")
    # then `layer_types` made them slide, and the flag that `use_windows` names is off
    if not may_slide:
        raise HeadwiseError(
            "layer_types has sliding_attention and use_sliding_window is false; correct one of them"
        )
    return [window if slide else None for slide in slides]


def _listed_windows(f: Fields, n_layers: int) -> list[int | None]:
    # Our own GPT: its config has the window of each layer, or null where none has one.
    windows = f.get("windows")
    windows = [None] * n_layers if windows is None else windows
    if not isinstance(windows, list | tuple) or len(windows) != n_layers:
        raise HeadwiseError(
            f"windows={windows!r} must list a number of tokens, or null, for each of {n_layers} layers"
        )
    return [None if window is None else check_size("windows", window) for window in windows]


def forwards_of(f: Fields) -> list[FeedForward]:
    """The feed-forward of each layer: plain, or with experts where the record and the config say so."""
    # The bias of the record itself is that of the attention: a feed-forward has one where `forward` says so.
    forward, n_layers = f.part(**{"bias": False, **f.record.get("forward", {})}), f.n_layers()
    record = forward.record
    if "experts" not in record:
        return [_feed_forward(forward)] * n_layers
    active, number = f.size("num_experts_per_tok"), f.size(record["experts"])
    if active > number:
        raise HeadwiseError(
            f"num_experts_per_tok={active} exceeds {record['experts']}={number}; correct one of them"
        )
    experts = replace(
        _feed_forward(forward.part(width=record.get("expert_width", "intermediate_size"))),
        n_experts=number,
        n_active=active,
        router_bias=record.get("router_bias", False),
    )
    if "shared" in record:  # so many further experts, which every token goes through
        experts = replace(experts, shared_width=experts.width * f.size(record["shared"]))
    # Layers without experts: the first ones, those of the list `dense`, and all but each `step`-th.
    first = f.count(record["first"]) if "first" in record else 0
    step = f.size(record["step"]) if "step" in record else 1
    listed = f.get(record["dense"]) or [] if "dense" in record else []
    if not isinstance(listed, list):
        raise HeadwiseError(f"{record['dense']}={listed!r} must be a list of layers")
    is_plain = [n < first or n in listed or (n + 1) % step > 0 for n in range(n_layers)]
    # Without such a layer the fields that size it may be absent, and `plain` is not used.
    plain = _feed_forward(forward) if any(is_plain) else experts
    return [plain if without_experts else experts for without_experts in is_plain]


def _feed_forward(f: Fields) -> FeedForward:
    d_model = f.size("hidden_size")
    return FeedForward(
        d_model=d_model,
        # Where a class lets the width be null (GPT-2's n_inner, our d_ff) null stands for 4 times the model's.
        width=f.optional_size(f.record.get("width", "intermediate_size")) or 4 * d_model,
        gated=f.has("gated", True),
        bias=f.has("bias"),
    )


# What stands outside the layers: the pieces that a record names.


def pieces_of(f: Fields) -> list[Piece]:  # those before the layers
    return [PIECES[name](f) for name in f.record.get("pieces", ["tokens"])]


def class_pieces(f: Fields) -> list[Piece]:
    """Those that the class adds behind the layers: the first of `architectures`, or by default of the record."""
    heads: dict[str, list[str]] = f.record["heads"]  # class -> names in PIECES
    classes = f.config.get("architectures") or list(heads)
    if not isinstance(classes, list) or not isinstance(classes[0], str) or classes[0] not in heads:
        fact = f"architectures={_short(classes)} is not priced for {f.family.name}"
        raise HeadwiseError(f"{fact}; known: {', '.join(heads)}")
    return [PIECES[name](f) for name in heads[classes[0]]]


def table(rows: int, width: int) -> Piece:  # a token reads one row of it
    return Piece(part="embeddings", parameters=rows * width, row=width)


def norm(parameters: int) -> Piece:
    return Piece(part="norms", parameters=parameters)


def final_norm(f: Fields) -> Piece:
    return norm(f.record.get("norms", NORMS)[1] * f.size("hidden_size"))


def once(f: Fields, d_out: int) -> Piece:
    """A Linear with bias to d_out features, which reads one token of a text, such as BERT's [CLS]."""
    weights = f.size("hidden_size") * d_out
    return Piece(part="head", parameters=weights + d_out, once=weights)


def lm_head(f: Fields) -> Piece:
    """The matrix from the last width to the vocabulary; tied, it is the token embedding."""
    size, tied = f.size("hidden_size") * f.size("vocab_size"), f.flag("tie_word_embeddings")
    return Piece(part="head", parameters=size * (not tied), weights=size, borrowed=size * tied)


def masked_lm_head(f: Fields) -> Piece:
    """The head of BERT and its kin: a Linear, a LayerNorm, a decoder to the vocabulary.

    Tied, the decoder is the token embedding, with a bias that the head holds; untied, it has a bias of its own, too.
    """
    width, vocabulary, tied = (
        f.size("hidden_size"),
        f.size("vocab_size"),
        f.flag("tie_word_embeddings"),
    )
    transform, decoder = width * width, width * vocabulary
    biases, layer_norm = width + vocabulary, 2 * width
    # True counts as 1
    parameters = transform + layer_norm + biases + (not tied) * (decoder + vocabulary)
    return Piece(
        part="head", parameters=parameters, weights=transform + decoder, borrowed=tied * decoder
    )


PIECES: dict[str, Callable[[Fields], Piece]] = {
    "tokens": lambda f: table(f.size("vocab_size"), f.size("hidden_size")),
    "positions": lambda f: table(f.size("max_position_embeddings"), f.size("hidden_size")),
    "segments": lambda f: table(f.size("type_vocab_size"), f.size("hidden_size")),
    "embedding norm": lambda f: norm(2 * f.size("hidden_size")),  # a LayerNorm: gain and bias
    # Half of what a layer has: a layer of ours has two such norms.
    "our embedding norm": lambda f: norm(f.record["norms"][0] // 2 * f.size("hidden_size")),
    "pooler": lambda f: once(f, f.size("hidden_size")),
    "next sentence": lambda f: once(f, 2),
    "masked": masked_lm_head,
    "lm": lm_head,
}


# What a table cannot say: the rules that records name.


def ours(f: Fields) -> ModelShape:
    """Our own GPT, by the fields of GPTConfig."""
    has_norm_bias = f.choice("norm", "rms", "layer") == "layer" and f.flag("bias")
    # parameters of a norm, in widths of the model: 0, 1 or 2
    of_norm = f.flag("norm_gain") * (1 + has_norm_bias)
    pieces = ["tokens"]
    if f.choice("position", "rope", "learned") == "learned":
        pieces.append("positions")
    if f.flag("embedding_norm"):
        pieces.append("our embedding norm")
    changes: dict[str, Any] = {
        "pieces": pieces,
        "norms": (2 * of_norm, f.flag("final_norm") * of_norm),
    }
    return one_stack(f.part(**changes))


def falcon(f: Fields) -> ModelShape:
    """One key/value head (multi_query); side by side (parallel_attn) attention and feed-forward share a LayerNorm."""
    changes: dict[str, Any] = {
        "norms": (2 if f.flag("parallel_attn") else 4, 2),
        "multi_query": f.flag("multi_query"),
    }
    return one_stack(f.part(**changes))


def roberta(f: Fields) -> ModelShape:
    """Positions are counted from pad_token_id + 1 on: the rows of the table before that are never a position."""
    unused, rows = f.count("pad_token_id") + 1, f.size("max_position_embeddings")
    if rows <= unused:
        raise HeadwiseError(
            f"max_position_embeddings={rows} leaves no position: {unused}, pad_token_id + 1, rest"
        )
    return one_stack(f, rows - unused)


# What a record calls its `rule` is the name of the function.
RULES = {rule.__name__: rule for rule in (ours, falcon, roberta)}
