"""A shape out of a config.json, as the `price` of its family's record says.

Nothing is guessed: an unknown field that reads like a size refuses the whole config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwise.cost.shape import ENCODER, MAIN, VISION, Attention, FeedForward, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError
from headwise.families import HARMLESS, SIZE_WORDS, Family, families
from headwise.masks import Causal, Window
from headwise.positions import RoPE
from headwise.spec import AttentionSpec
from headwise.words import Note

LARGEST = 2**40  # of one size; beyond it a number is a slip, and sums would take for ever to print
MOST_LAYERS, MOST_HEADS = 10_000, 4096

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
NORMS = (2, 1)  # gains of a layer, and of the norm behind all layers, in widths of the model: RMSNorms


def name_in(name: str, family: Family) -> str:
    """A family's own word for a field: `n_embd` for `hidden_size` in GPT-2."""
    aliases: dict[str, str] = (family.price or {}).get("aliases", {})
    return aliases.get(name, name)


class Fields:
    """The fields of one config.json. Every method raises HeadwiseError that names the field."""

    def __init__(self, config: dict[str, Any], family: Family) -> None:
        self.family, self.config = family, config
        self.record = dict(family.price or {})
        self.required = self.record.get("required", REQUIRED)
        self.defaults = dict.fromkeys(self.record.get("null", ())) | self.record.get("defaults", {})
        self.aliases: dict[str, str] = self.record.get("aliases", {})
        self.filled_in: dict[str, int] = {}  # sizes that the file leaves out, by the default of the class
        known = {*self.required, *self.defaults, *self.aliases, *self.record.get("derived", ()), *HARMLESS}
        fixed = self.record.get("fixed", {})
        for name, value in config.items():
            if name in fixed:
                is_absent = value in (None, False, [], {})
                if value != fixed[name] and not is_absent:
                    wanted = f"{name}={_short(fixed[name])}"
                    raise HeadwiseError(f"{name}={_short(value)} is not priced for {family.name}, only {wanted}")
            elif name not in known and _sizes_something(name, value):
                raise HeadwiseError(
                    f"{name}={_short(value)} is not a field of {family.name} that is known here, and it may "
                    f"change sizes; if it does not, price a copy of the config without it"
                )

    def name_of(self, name: str) -> str:
        return name_in(name, self.family)

    def is_set(self, value: bool | str) -> bool:
        """Is something there, which a record says by a constant, or by the name of a flag?"""
        return self.flag(value) if isinstance(value, str) else value

    def get(self, name: str) -> Any:
        """The value under this name or an alias, else the default of the config class; None where null is meant."""
        name = self.name_of(name)
        names = [name, *(alias for alias, field in self.aliases.items() if field == name)]
        values = {alias: self.config[alias] for alias in names if self.config.get(alias) is not None}
        if len(set(map(repr, values.values()))) > 1:
            both = " and ".join(f"{alias}={_short(value)}" for alias, value in values.items())
            raise HeadwiseError(f"{both} name one size of a {self.family.name} model; keep the right one")
        if values:
            return next(iter(values.values()))
        if name in self.required:
            raise HeadwiseError(f"{' or '.join(names)} is missing; a {self.family.name} model has no size without it")
        default = self.defaults.get(name)
        if any(alias in self.config for alias in names):
            if name not in NULLABLE and default is not None:
                raise HeadwiseError(f"{name}=null; give a value, or leave it out for {_short(default)}")
            return None
        if isinstance(default, int) and not isinstance(default, bool):
            self.filled_in[name] = default
        return default

    def size(self, name: str) -> int:
        return check_size(self.name_of(name), self.get(name))

    def optional_size(self, name: str) -> int | None:
        return None if self.get(name) is None else self.size(name)

    def count(self, name: str) -> int:
        """A size, or 0."""
        value = self.get(name)
        return 0 if value == 0 and type(value) is int else check_size(name, value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise HeadwiseError(f"{self.name_of(name)}={_short(value)} must be true or false")
        return value

    def choice(self, name: str, *known: str) -> str:
        value = self.get(name)
        if value not in known:
            raise HeadwiseError(f"{name}={value!r} is not known; one of {', '.join(known)}")
        return str(value)

    def side(self, name: str) -> tuple[int, int]:
        """Height and width of an image or a patch: one number for both, or a pair."""
        value = self.get(name)
        sides = value if isinstance(value, list | tuple) else [value, value]
        if len(sides) != 2:
            raise HeadwiseError(f"{name}={_short(value)} must be one number, or height and width")
        height, width = sides
        return check_size(name, height), check_size(name, width)

    def layers(self, name: str) -> range:
        return range(self._at_most(MOST_LAYERS, name, "layers"))

    def heads(self, name: str = "num_attention_heads") -> int:
        return self._at_most(MOST_HEADS, name, "heads")

    def _at_most(self, most: int, name: str, what: str) -> int:
        number = self.size(name)
        if number > most:
            raise HeadwiseError(f"{self.name_of(name)}={number} exceeds {most:,}, the most {what} priced")
        return number

    def pieces_of_class(self) -> list[str]:
        """The pieces that the class adds which `architectures` names."""
        heads: dict[str, list[str]] = self.record["heads"]
        classes = self.config.get("architectures") or list(heads)
        if not isinstance(classes, list) or not isinstance(classes[0], str) or classes[0] not in heads:
            fact = f"architectures={_short(classes)} is not priced for {self.family.name}"
            raise HeadwiseError(f"{fact}; known: {', '.join(heads)}")
        return heads[classes[0]]

    def kv_heads(self, name: str = "num_key_value_heads") -> int:
        heads = self.heads()
        number = self.optional_size(name) or heads
        if heads % number:
            fact = f"{self.name_of(name)}={number} does not divide {self.name_of('num_attention_heads')}={heads}"
            raise HeadwiseError(f"{fact}; each must serve as many query heads")
        return number

    def head_dim(self, heads: str = "num_attention_heads") -> int:
        explicit = self.optional_size("head_dim")
        if explicit is not None:
            return explicit
        d_model, number = self.size("hidden_size"), self.heads(heads)
        if d_model % number:
            raise HeadwiseError(
                f"{self.name_of(heads)}={number} does not divide {self.name_of('hidden_size')}={d_model}, and there is "
                f"no head_dim; give a width that {number} divides"
            )
        return d_model // number

    def notes(self) -> tuple[Note, ...]:
        if not self.filled_in:
            return ()
        sizes = ", ".join(f"{name}={value}" for name, value in self.filled_in.items())
        return (Note.of("price.taken", family=self.family.name, sizes=sizes),)


# Null says something there: no window, as many key/value heads as query heads, width / heads, no ranks.
NULLABLE = frozenset({"sliding_window", "num_key_value_heads", "head_dim", "q_lora_rank", "layer_types"})


def check_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise HeadwiseError(f"{name}={_short(value)} must be a whole number from 1 to {LARGEST:,}")
    return value


def _sizes_something(name: str, value: Any) -> bool:
    if not value or isinstance(value, str | float):
        return False
    if name.startswith("_") or "drop" in name or name.endswith(("_token_id", "_token_index", "_token_ids")):
        return False
    return bool(SIZE_WORDS & set(re.split(r"[_\d]+", name.lower())))


def _short(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Record = dict[str, Any]


def build(config: dict[str, Any], family: Family) -> ModelShape:
    """The sizes of the model, with a note of those that the file leaves to the class."""
    f = Fields(config, family)
    rule = RULES.get(f.record.get("rule", ""), one_stack)
    shape = rule(f)
    return replace(shape, family=family.name, notes=(*f.notes(), *shape.notes))


def one_stack(f: Fields, **changes: Any) -> ModelShape:
    """What reads a text or an image in one stack of layers; `changes` are of the record."""
    record = f.record | changes
    names = [*record.get("pieces", ["tokens"]), *f.pieces_of_class()]
    pieces = [*record.get("stem", ()), *(PIECES[name](f) for name in names), final_norm(f, record)]
    return ModelShape(
        d_model=f.size("hidden_size"),
        layers=tuple(layers_of(f, record)),
        pieces=tuple(pieces),
        positions=record.get("positions") or f.size("max_position_embeddings"),
        generates=not record.get("encoder", False),
    )


def layers_of(f: Fields, record: Record, stack: str = MAIN, prefix: str = "", cross: bool = False) -> list[Layer]:
    """The layers of a stack, whose windows and feed-forwards may differ; `cross` gives them an attention to another."""
    spec = record.get("spec") or attention_of(f, record)
    numbers = f.layers(record.get("layers", "num_hidden_layers"))
    windows = WINDOWS[record["windows"]](f) if "windows" in record else [None] * len(numbers)
    specs = dict.fromkeys(windows, spec)  # by window: layers that are alike share one spec
    if not record.get("encoder", False) and stack != ENCODER:
        for window in specs:
            specs[window] = spec.replace(mask=Causal() if window is None else Window(window - 1, 0))
    beside = {name: record[name] for name in ("key_bias", "joint_norms") if name in record}
    layers = []
    for n, window, forward in zip(numbers, windows, forwards_of(f, record, len(numbers)), strict=True):
        # The first layer holds the bias by distance of all.
        buckets = f.size(record["buckets"]) if n == 0 and "buckets" in record else 0
        layer = Layer(
            name=f"{prefix}L{n}",
            stack=stack,
            attention=Attention(spec=specs[window], buckets=buckets, **beside),
            cross=Attention(spec=spec, **beside) if cross else None,
            feed_forward=forward,
            norm_parameters=record.get("norms", NORMS)[0] * spec.d_model,
        )
        layers.append(layer)
    return layers


def attention_of(f: Fields, record: Record) -> AttentionSpec:
    """The attention of a layer, without its mask."""
    if record.get("latent"):
        return _latent_attention(f)
    bias = f.is_set(record.get("bias", False))
    qkv_bias = f.is_set(record["qkv_bias"]) if "qkv_bias" in record else bias
    if "n_heads" in record:  # a stack of two has a field of its own, and no grouped heads
        n_heads = n_kv_heads = f.heads(record["n_heads"])
    else:
        n_heads, n_kv_heads = f.heads(), record.get("n_kv_heads") or f.kv_heads()
    return AttentionSpec(
        d_model=f.size("hidden_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=f.head_dim(record.get("n_heads", "num_attention_heads")),
        q_bias=qkv_bias,
        kv_bias=qkv_bias,
        out_bias=bias,
        qk_norm=f.is_set(record.get("qk_norm", False)),
        sink=f.is_set(record.get("sink", False)),
    )


def _latent_attention(f: Fields) -> AttentionSpec:
    heads, bias = f.heads(), f.flag("attention_bias")
    if (f.optional_size("num_key_value_heads") or heads) != heads:
        names = f"num_key_value_heads={f.get('num_key_value_heads')} differs from num_attention_heads={heads}"
        raise HeadwiseError(f"{names}; a latent gives every head keys and values of its own")
    rope_dim, q_rank = f.size("qk_rope_head_dim"), f.optional_size("q_lora_rank")
    return AttentionSpec(
        d_model=f.size("hidden_size"),
        n_heads=heads,
        head_dim=f.size("qk_nope_head_dim") + rope_dim,
        value_dim=f.size("v_head_dim"),
        latent_dim=f.size("kv_lora_rank"),
        rope_dim=rope_dim,
        q_latent_dim=q_rank,
        q_bias=bias and q_rank is not None,  # a full matrix has none
        kv_bias=bias,
        out_bias=bias,
    )


# Which layers slide: the window of each, None where all before is seen.


def _every_window(f: Fields) -> list[int | None]:
    window = f.optional_size("sliding_window") if f.is_set(f.record.get("use_windows", True)) else None
    return [window] * len(f.layers("num_hidden_layers"))


def _windows(f: Fields, slides_by_default: Callable[[int], bool]) -> list[int | None]:
    """The window in the layers that `layer_types` names, or without such a list in those of the class's default."""
    n_layers, types = f.layers("num_hidden_layers"), f.get("layer_types")
    if types is None:
        slides = [slides_by_default(n) for n in n_layers]
    else:
        count = len(types) if isinstance(types, list) else 0
        if count != len(n_layers):
            raise HeadwiseError(f"layer_types has {count} entries for {len(n_layers)} layers; one for each is needed")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention", "attention")]
        if unknown:
            raise HeadwiseError(
                f"layer_types names {unknown[0]!r}; known: full_attention and sliding_attention, other layers keep "
                f"other caches"
            )
        slides = [kind == "sliding_attention" for kind in types]
    window = f.optional_size("sliding_window") if any(slides) else None
    if any(slides) and window is None:
        raise HeadwiseError("layer_types has sliding_attention and sliding_window is null; give the window")
    return [window if slide else None for slide in slides]


def _late_windows(f: Fields) -> list[int | None]:
    """Layers from max_window_layers on slide, where use_sliding_window says so."""
    has_windows = f.flag("use_sliding_window") and f.optional_size("sliding_window") is not None
    first = f.count("max_window_layers") if has_windows else 0
    windows = _windows(f, lambda n: has_windows and n >= first)
    if any(windows) and not has_windows:
        raise HeadwiseError("layer_types has sliding_attention and use_sliding_window is false; correct one of them")
    return windows


def _listed_windows(f: Fields) -> list[int | None]:
    n, windows = len(f.layers("num_hidden_layers")), f.get("windows")
    windows = [None] * n if windows is None else windows
    if not isinstance(windows, list | tuple) or len(windows) != n:
        raise HeadwiseError(f"windows={windows!r} must list a number of tokens, or null, for each of {n} layers")
    return [None if window is None else check_size("windows", window) for window in windows]


WINDOWS: dict[str, Callable[[Fields], list[int | None]]] = {
    "all": _every_window,
    "late": _late_windows,
    "listed": _listed_windows,
    "every other": lambda f: _windows(f, lambda n: n % 2 == 0),
    "pattern": lambda f: _windows(f, lambda n: (n + 1) % f.size("sliding_window_pattern") > 0),
}


def forwards_of(f: Fields, record: Record, n_layers: int) -> list[FeedForward]:
    """The feed-forward of each layer: plain, or with experts where the record and the config say so."""
    forward: Record = record.get("forward", {})
    if "experts" not in forward:
        return [_feed_forward(f, forward)] * n_layers
    active, number = f.size("num_experts_per_tok"), f.size(forward["experts"])
    if active > number:
        raise HeadwiseError(f"num_experts_per_tok={active} exceeds {forward['experts']}={number}; correct one of them")
    experts = replace(
        _feed_forward(f, forward | {"width": forward.get("expert_width", "intermediate_size")}),
        n_experts=number,
        n_active=active,
        router_bias=forward.get("router_bias", False),
    )
    if "shared" in forward:
        experts = replace(experts, shared_width=experts.width * f.size(forward["shared"]))
    first = f.count(forward["first"]) if "first" in forward else 0
    step = f.size(forward["step"]) if "step" in forward else 1
    listed = f.get(forward["dense"]) or [] if "dense" in forward else []
    if not isinstance(listed, list):
        raise HeadwiseError(f"{forward['dense']}={listed!r} must be a list of layers")
    is_plain = [n < first or n in listed or (n + 1) % step > 0 for n in range(n_layers)]
    plain = _feed_forward(f, forward) if any(is_plain) else experts  # else the fields of its sizes may be absent
    return [plain if without_experts else experts for without_experts in is_plain]


def _feed_forward(f: Fields, forward: Record) -> FeedForward:
    d, gated = f.size("hidden_size"), forward.get("gated", True)
    return FeedForward(
        d_model=d,
        width=f.optional_size(forward.get("width", "intermediate_size")) or 4 * d,
        gated=_is_gated(f) if gated == "feed_forward_proj" else f.is_set(gated),
        bias=f.is_set(forward.get("bias", False)),
    )


def _is_gated(f: Fields) -> bool:
    """T5 says so by the name of the activation."""
    kind = f.get("feed_forward_proj")
    parts = kind.split("-") if isinstance(kind, str) else []
    if len(parts) not in (1, 2) or (len(parts) == 2 and parts[0] != "gated"):
        raise HeadwiseError(f"feed_forward_proj={kind!r} is not priced; known: an activation, or gated-ACTIVATION")
    return len(parts) == 2


# What stands outside the layers.


def table(rows: int, width: int) -> Piece:
    return Piece(part="embeddings", parameters=rows * width, row=width)


def norm(parameters: int) -> Piece:
    return Piece(part="norms", parameters=parameters)


def final_norm(f: Fields, record: Record) -> Piece:
    return norm(record.get("norms", NORMS)[1] * f.size("hidden_size"))


def once(d_in: int, d_out: int) -> Piece:
    return Piece(part="head", parameters=d_in * d_out + d_out, once=d_in * d_out)


def lm_head(f: Fields) -> Piece:
    """The matrix from the last width to the vocabulary; tied, it is the token embedding."""
    size, tied = f.size("hidden_size") * f.size("vocab_size"), f.flag("tie_word_embeddings")
    return Piece(part="head", parameters=size * (not tied), weights=size, borrowed=size * tied)


def masked_lm_head(f: Fields) -> Piece:
    """BERT's and its kin's head; untied, the decoder's own bias is a second one beside the head's."""
    width, vocabulary, tied = _embedded(f), f.size("vocab_size"), f.flag("tie_word_embeddings")
    transform, decoder = f.size("hidden_size") * width, width * vocabulary
    biases, layer_norm = width + vocabulary, 2 * width
    parameters = transform + layer_norm + biases + (not tied) * (decoder + vocabulary)
    return Piece(part="head", parameters=parameters, weights=transform + decoder, borrowed=tied * decoder)


def _embedded(f: Fields) -> int:
    """The width of an embedding: that of the model, or a smaller one of its own (ALBERT)."""
    return f.optional_size("embedding_size") or f.size("hidden_size")


def widened(f: Fields) -> Piece:
    """The matrix from embeddings of a width of their own to the width of the model."""
    weights = _embedded(f) * f.size("hidden_size")
    return Piece(part="embeddings", parameters=weights + f.size("hidden_size"), weights=weights)


def frames(f: Fields) -> Piece:
    """Whisper's stem: two convolutions with kernels of 3 over a spectrogram, the second by 2 frames a step."""
    d, frames = f.size("hidden_size"), f.size("max_source_positions")
    first, second = 3 * f.size("num_mel_bins") * d, 3 * d * d
    return Piece(part="stem", parameters=first + second + 2 * d, once=first * 2 * frames + second * frames)


def patches(f: Fields) -> tuple[Piece, int]:
    """The stem of an image model, and how many patches it makes."""
    (height, width), (rows, columns) = f.side("image_size"), f.side("patch_size")
    if rows > height or columns > width:
        raise HeadwiseError(f"patch_size={rows}x{columns} exceeds image_size={height}x{width}: there is no patch")
    count, d_model = (height // rows) * (width // columns), f.size("hidden_size")
    weights = f.size("num_channels") * rows * columns * d_model
    return Piece(part="stem", parameters=weights + d_model, once=weights * count), count


def classes(f: Fields) -> Piece:
    names = f.config.get("id2label")
    if isinstance(names, dict) and names:
        number = len(names)
    else:  # transformers keeps silent about the usual two
        number = check_size("num_labels", f.config.get("num_labels", 2))
    return once(f.size("hidden_size"), number)


PIECES: dict[str, Callable[[Fields], Piece]] = {
    "tokens": lambda f: table(f.size("vocab_size"), _embedded(f)),
    "positions": lambda f: table(f.size("max_position_embeddings"), _embedded(f)),
    "segments": lambda f: table(f.size("type_vocab_size"), _embedded(f)),
    "source positions": lambda f: table(f.size("max_source_positions"), f.size("hidden_size")),
    "class token": lambda f: table(1, f.size("hidden_size")),
    "embedding norm": lambda f: norm(2 * _embedded(f)),
    "widened": widened,
    "frames": frames,
    "pooler": lambda f: once(f.size("hidden_size"), f.optional_size("pooler_output_size") or f.size("hidden_size")),
    "next sentence": lambda f: once(f.size("hidden_size"), 2),
    "classes": classes,
    "masked": masked_lm_head,
    "lm": lm_head,
}


# What a table cannot say: the rules that records name.


def ours(f: Fields) -> ModelShape:
    """Our own GPT, by the fields of GPTConfig; a latent's spec fills its sizes in by itself."""
    has_norm_bias = f.choice("norm", "rms", "layer") == "layer" and f.flag("bias")
    gains = f.flag("norm_gain") * (1 + has_norm_bias)
    learned = f.choice("position", "rope", "learned") == "learned"
    changes: Record = {"pieces": ["tokens", "positions"] if learned else ["tokens"]}
    if f.flag("embedding_norm"):
        changes["stem"] = [norm(gains * f.size("hidden_size"))]
    if f.get("latent_dim") is not None:
        names = ("d_model", "n_heads", "latent_dim", "rope_dim", "q_latent_dim")
        sizes: Record = {name: f.optional_size(name) for name in names} | {"head_dim": f.head_dim()}
        bias, rope = f.flag("bias"), None if learned else RoPE()
        changes["spec"] = AttentionSpec(**sizes, rope=rope, q_bias=bias, kv_bias=bias, out_bias=bias)
    return one_stack(f, norms=(2 * gains, f.flag("final_norm") * gains), **changes)


def falcon(f: Fields) -> ModelShape:
    """One key/value head, or a group's with new_decoder_architecture; LayerNorms with biases, one or two a layer."""
    new, heads = f.flag("new_decoder_architecture"), f.heads()
    groups = f.kv_heads("num_kv_heads") if new or not f.flag("multi_query") else 1
    norms = (f.optional_size("num_ln_in_parallel_attn") or 2) if new else 1
    shape = one_stack(f, norms=(2 * (norms if f.flag("parallel_attn") else 2), 2), n_kv_heads=groups)
    if new and groups < heads:
        return shape.noted(Note.of("price.cache_repeats", groups=groups, times=heads // groups))
    return shape


def roberta(f: Fields) -> ModelShape:
    """Positions count from after the padding token's id, so that many rows and one more are never a position."""
    unused, rows = f.count("pad_token_id") + 1, f.size("max_position_embeddings")
    if rows <= unused:
        raise HeadwiseError(f"max_position_embeddings={rows} leaves no position: {unused}, pad_token_id + 1, rest")
    return one_stack(f, positions=rows - unused)


def albert(f: Fields) -> ModelShape:
    """One layer, run again and again."""
    shape = one_stack(f)
    first, *others = shape.layers
    shape = replace(shape, layers=(first, *(replace(layer, repeats=True) for layer in others)))
    return shape.noted(Note.of("price.layers_repeat"))


def image(f: Fields) -> ModelShape:
    """Patches are its tokens, and a token for the class stands before them."""
    stem, count = patches(f)
    return one_stack(f, stem=[stem, table(count + 1, f.size("hidden_size"))], positions=count + 1)


def with_eyes(f: Fields) -> ModelShape:
    """Gemma 3: the text decoder, a SigLIP tower, and the projection between them."""
    text, vision = f.config.get("text_config"), f.config.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        missing = "vision_config" if isinstance(text, dict) else "text_config"
        raise HeadwiseError(f"{missing} is missing; gemma3 reads text and images (a model of text says gemma3_text)")
    if "vision_use_head" not in vision:
        raise HeadwiseError("vision_use_head is missing in vision_config, and only vision_use_head=false is priced")
    head = {"tie_word_embeddings": f.flag("tie_word_embeddings")}  # the outer one decides
    shape = build({**text, **head}, families()["gemma3_text"])
    eyes = Fields(vision, Family(name="siglip_vision_model", price=f.record["vision"]))
    d, (stem, count) = eyes.size("hidden_size"), patches(eyes)
    projection = Piece(part="stem", parameters=d * shape.d_model)
    tower = [stem, table(count, d), final_norm(eyes, eyes.record), projection, norm(d)]
    return replace(
        shape,
        layers=(*shape.layers, *layers_of(eyes, eyes.record, VISION, "vision.")),
        pieces=(*shape.pieces, *(replace(piece, stack=VISION) for piece in tower)),
        notes=(*shape.notes, *eyes.notes(), Note.of("price.images")),
    )


def two_stacks(f: Fields) -> ModelShape:
    """An encoder, and a decoder whose layers look across at it: T5 and Whisper."""
    layers, pieces = list[Layer](), list[Piece]()
    for side, stack in (("encoder", ENCODER), ("decoder", MAIN)):
        record = {**f.record, "encoder": False, **f.record[side]}
        if not f.get(record["layers"]):  # as many layers as the encoder has
            record["layers"] = f.record["encoder"]["layers"]
        layers += layers_of(f, record, stack, f"{side}.", cross=stack == MAIN)
        parts = [*(PIECES[name](f) for name in record.get("pieces", ())), final_norm(f, record)]
        pieces += [replace(part, stack=stack) for part in parts]
    pieces += [PIECES[name](f) for name in f.pieces_of_class()]
    source = f.record.get("source")
    return ModelShape(
        d_model=f.size("hidden_size"),
        layers=tuple(layers),
        pieces=tuple(pieces),
        positions=f.optional_size(f.record["positions"]),
        source_positions=None if source is None else f.size(source),
        notes=() if f.flag("tie_word_embeddings") or "untied" not in f.record else (Note.of(f.record["untied"]),),
    )


RULES: dict[str, Callable[[Fields], ModelShape]] = {
    "ours": ours,
    "falcon": falcon,
    "roberta": roberta,
    "albert": albert,
    "image": image,
    "with eyes": with_eyes,
    "two stacks": two_stacks,
}
