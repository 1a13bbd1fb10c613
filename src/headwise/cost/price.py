"""The price of a model: parameters, cache, FLOPs, bytes moved, what fits in memory, at one setting.

Whatever describes a model becomes a shape (`shape_of`), and a shape a price. `records.plain_data` of a Price is the
JSON of `headwise cost`.
"""

from __future__ import annotations

import importlib.util
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from headwise.cost.config import (
    NOTES,
    PRESETS,
    UndescribedError,
    check_sizes,
    layer_of,
    shape_by_formula,
)
from headwise.cost.shape import (
    ForwardPrice,
    Heads,
    Kept,
    Layer,
    ModelShape,
    decode_flops,
    decode_parameters,
    forward_price,
    kv_divisors,
)
from headwise.errors import HeadwiseError
from headwise.files import read_json
from headwise.models import BITS, config_source, number_format
from headwise.spec import AttentionSpec
from headwise.table import DECIMAL, amount, scaled
from headwise.words import unknown

# Bytes of a unit, its letters small: "kb" 1000, "kib" 1024, up to "pb" and "pib".
UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
# bytes, 8 EiB: more than any device holds or moves in a second, so a larger number is a slip
LARGEST = 2**63
# of a model that sets no longest text, such as T5, which was trained on 512 tokens
DEFAULT_CONTEXT = 512
DEFAULT_DTYPE = "bf16"  # where neither the caller nor the config names one
# tokens of a text, or texts of a batch: far above any real one, so a larger number is a slip
MOST = 2**40
# Tokens: more than any window keeps, so that a cache that stops growing has stopped by then.
LONGEST = 2**62
# The presets that `headwise cost` without a model shows: the six that courses compare, in their order, and the two
# that they name for multi-query attention.
TABLE = (
    "bert-base", "bert-large", "gpt2", "gpt3", "llama-2-70b", "mistral-7b", "palm-540b", "falcon-7b",
)  # fmt: skip


def bytes_of(count: float, dtype: str) -> int:
    """Bytes of that many numbers, rounded up to whole ones."""
    # -(-a // b) is a / b rounded up; of whole numbers it stays exact however large they are.
    return int(-(-count * Fraction(BITS[dtype]) // 8))


def read_bytes(name: str, text: str | int) -> int:
    """24GiB, 80 GB, or an int of bytes, as bytes; errors call the value `name`.

    A text without a unit is refused: it may be meant in GB as well as in bytes.
    """
    if type(text) is int:  # isinstance would let True pass as 1
        value = Decimal(text)
    else:
        # Digits with or without decimals, then letters, which UNITS must know. LARGEST has 19 digits:
        # these bounds are above it, and a million digits, times a unit, would overflow Decimal.
        size = re.fullmatch(
            r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{1,3})\s*", str(text), re.ASCII
        )
        if not size or size[2].lower() not in UNITS:
            raise HeadwiseError(
                f"{name}={text!r} is no size; write a number and a unit, such as 24GiB"
            )
        value = Decimal(size[1]) * UNITS[size[2].lower()]
    if not 1 <= value <= LARGEST:
        raise HeadwiseError(f"{name}={text!r} is outside 1 B to {LARGEST:,} B")
    return int(value)


# The shape of whatever describes a model.


def shape_of(config: Any) -> tuple[str, ModelShape]:
    """A short name and the sizes of whatever `price` takes as its `config`.

    The text "gpt2" is the preset, also where a folder gpt2 lies: for the folder write "./gpt2".

    Raises:
        HeadwiseError: for what is no description of a model, and with the reason for what cannot be priced.
    """
    if isinstance(config, str | Path):
        return _shape_at(config)
    if isinstance(config, AttentionSpec):
        return "attention", _spec_shape(config)
    if isinstance(config, dict):
        return "config", shape_of_fields(config)
    name = type(config).__name__
    if hasattr(config, "to_dict"):  # a config of transformers
        return name, shape_of_fields(config.to_dict())
    # a GPTConfig; is_dataclass is also true of a class
    if is_dataclass(config) and not isinstance(config, type):
        return name, shape_of_fields({"headwise": asdict(config)})
    # of a model, or of an attention layer
    inner = getattr(config, "config", getattr(config, "spec", None))
    if inner is None:
        raise HeadwiseError(
            f"a {name} has no price; pass a preset, a path, the dict of a config, or a model"
        )
    if hasattr(inner, "to_dict"):
        return name, shape_of_fields({**inner.to_dict(), "architectures": [name]})
    return name, shape_of(inner)[1]


def _shape_at(description: str | Path) -> tuple[str, ModelShape]:
    """The shape of a preset by its name, and of what lies at a path or is called so on the hub."""
    name = str(description)
    if name in PRESETS:
        return name, shape_of_fields(PRESETS[name]).noted(*NOTES[name])
    if (
        "/" not in name
        and not name.endswith((".json", ".gguf"))
        and not Path(name).exists()
    ):
        # In small letters, as presets are written: "LLaMA-2-7B" is then near llama-2-70b.
        raise unknown(
            f"no preset {name!r}, and no file or folder of that name",
            name.lower(),
            PRESETS,
        )
    called, source = config_source(description)
    notes = []
    if isinstance(source, Path):
        config = read_json(source)
    else:
        config = source
        notes = [
            "a GGUF file: all weights are priced in one number format, however the file packs them"
        ]
    try:  # whatever is wrong with the config is said with its file
        if not isinstance(config, dict):
            raise HeadwiseError(
                f"a JSON {type(config).__name__}, and a config is an object with fields"
            )
        return called, shape_of_fields(config).noted(*notes)
    except HeadwiseError as error:
        raise HeadwiseError(
            f"{source if isinstance(source, Path) else name}: {error}"
        ) from None


def _spec_shape(spec: AttentionSpec) -> ModelShape:
    """A model of one layer with that attention alone."""
    if {spec.d_in, spec.d_context, spec.d_out} != {spec.d_model} or not spec.out_proj:
        raise HeadwiseError(
            f"d_in={spec.d_in}, d_context={spec.d_context}, d_out={spec.d_out}, out_proj={spec.out_proj}: only an "
            f"attention from d_model={spec.d_model} to the same width, with W_O, is priced"
        )
    return ModelShape(
        family="attention",
        d_model=spec.d_model,
        layers=(layer_of("L0", spec),),
        pieces=(),
        positions=None,
    )


def shape_of_fields(config: dict[str, Any]) -> ModelShape:
    """The sizes that the dict of a config.json says: by formulas, else those of the model that is built of it."""
    kind = config.get("model_type")
    if "headwise" not in config and not isinstance(kind, str):
        raise HeadwiseError(
            f"model_type={kind!r}; a config names its family there, such as llama"
        )
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts if "headwise" not in config else ():
        check_sizes(part)
    try:
        shape = shape_by_formula(config)
    except UndescribedError as error:
        shape = _built(config, str(error))
    # The format of the weights: `torch_dtype` is its older name, and "auto" names none.
    named = [config.get(field) for field in ("dtype", "torch_dtype")]
    dtype = next(
        (name for name in named if isinstance(name, str) and name != "auto"), None
    )
    packing = config.get("quantization_config")
    packed = packing.get("quant_method") if isinstance(packing, dict) else None
    if packed not in BITS and packing:
        shape = shape.noted(
            "quantization_config: all weights are priced in one number format, and scales are not counted"
        )
    # Two names of one thing: layers that predict further tokens in training, and have no part in generating.
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        shape = shape.noted(
            "the layers that predict further tokens while training are not counted; transformers drops them"
        )
    return replace(shape, dtype=dtype, packed=packed if packed in BITS else None)


def _built(config: dict[str, Any], reason: str) -> ModelShape:
    lacking = [
        name
        for name in ("transformers", "torch")
        if importlib.util.find_spec(name) is None
    ]
    if lacking:
        raise HeadwiseError(
            f"{reason} of a {config['model_type']} has no formula here, and to build the model needs "
            f"{' and '.join(lacking)}: pip install 'headwise[hf]'"
        )
    from headwise.cost.built import shape_of_fields as build

    return build(config)


def price(config: Any, **setting: Any) -> Price:
    """What a model costs: parameters, cache, FLOPs, bytes moved, what fits in memory.

    Args:
        config: the name of a preset; the path of a config.json, of a folder that holds one or of a GGUF file; a name
            on the hub; the dict of a config.json; an AttentionSpec (one layer, attention alone); a GPTConfig, a config
            of transformers, or a model that has one of these as `config` or `spec`
        **setting: all optional: context (tokens; default the model's own length), batch (texts, 1), dtype and
            kv_dtype (fp32, bf16, fp8, ...; default the config's), memory ("24GiB" or bytes)

    Raises:
        HeadwiseError: with the reason, for what cannot be priced exactly.
    """
    name, shape = shape_of(config)
    return price_shape(name, shape, make_setting(shape, **setting))


def cache_bytes_per_token(config: dict[str, Any], dtype: str, tokens: int = 1) -> float:
    """Bytes of cache that a text of so many tokens takes, divided by its tokens: less for a long one with windows.

    Args:
        config: the dict of a config.json
        dtype: the number format of the cache
        tokens: of the text
    """
    shape = shape_of_fields(config)
    return _held(shape.kept, make_setting(shape, dtype=dtype), tokens) / tokens


@dataclass(frozen=True)
class Setting:
    """What a price depends on besides the model: texts, number formats, and the memory of a device."""

    context: int  # tokens of each text, those to come included
    batch: int  # texts side by side
    dtype: str  # of the weights
    expert_dtype: str  # of the matrices of experts
    kv_dtype: str
    memory: int | None  # bytes


@dataclass(frozen=True)
class LayerPrice:
    """One layer: its parameters by what has them, and what it keeps of a text."""

    name: str
    kind: str  # full | sliding | chunked | latent | indexed | compressed | linear | conv | shared | none
    parameters: int
    active_parameters: int
    attention: Heads | None
    variant: str | None  # MHA, GQA, MQA, or MLA
    mixer_parameters: int  # of a linear attention, a state space, a convolution
    feed_forward_parameters: int
    norm_parameters: int
    experts: tuple[int, int] | None  # how many a token is sent to, of how many
    cache_bytes_per_token: float  # what one token adds while no window is full
    cache_rows: int | None  # the most tokens that are kept; None: all
    state_bytes: int  # that do not grow with the text


@dataclass(frozen=True)
class Parameters:
    """Parameters in all, those that one token meets (`active`), and of each part of the model (`parts`, see PARTS).

    A token does not meet the experts that it is not sent to, nor the tables in which it reads one row.
    """

    total: int
    active: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Length:
    """What texts of one length keep."""

    tokens: int
    text_bytes: int  # one text
    total_bytes: int  # the batch


@dataclass(frozen=True)
class CachePrice:
    """Bytes that wait between steps."""

    bytes_per_token: float  # what one more token adds while no window is full
    bytes_per_token_beyond_windows: float  # what it adds once all windows are full
    state_bytes: int  # of one text, however long
    text_bytes: int  # of one text of the setting's context
    total_bytes: int  # of the whole batch
    lengths: tuple[Length, ...]  # a sixteenth of the context, a quarter, and all of it


@dataclass(frozen=True)
class DecodePrice:
    """One step that gives every text of the batch a token, the last of its context."""

    flops: int
    expanded_flops: (
        int  # of a step that turns a latent cache into keys and values; else the same
    )
    weight_bytes: int  # read once for the batch
    cache_bytes: int
    bytes_per_token: float  # of both, shared by the batch
    flops_per_byte: float  # the arithmetic intensity


@dataclass(frozen=True)
class MemoryPrice:
    """What fits beside the weights. Activations and the runtime's own memory come on top."""

    free_bytes: int
    longest_context: (
        int | None
    )  # at this batch; 0: not a token fits; None: the cache stops growing
    largest_batch: int  # at this context


@dataclass(frozen=True, repr=False)
class Price:
    """What `headwise.price` returns. Printed, it is the whole bill."""

    model: str
    family: str
    way: str  # config: by formulas from the config alone; built: on the model, without weights
    d_model: int
    setting: Setting
    parameters: Parameters
    weight_bytes: int
    layers: tuple[LayerPrice, ...]
    cache: CachePrice
    prefill: ForwardPrice
    decode: DecodePrice | None  # None: a model that keeps no cache
    memory: (
        MemoryPrice | None
    )  # None where no memory was given, or there is no cache to fill it
    notes: tuple[str, ...]

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def heading(self) -> str:
        """The sizes of the model, and the setting in a second line."""
        setting = self.setting
        formats = [setting.dtype]
        if setting.expert_dtype != setting.dtype:
            formats.append(f"experts {setting.expert_dtype}")
        if setting.kv_dtype != setting.dtype:
            formats.append(f"cache {setting.kv_dtype}")
        plural = "layer" if self.n_layers == 1 else "layers"
        sizes = f"{self.n_layers} {plural}, width {self.d_model:,}"
        heads = next(
            (layer.attention for layer in self.layers if layer.attention), None
        )
        if heads is not None:
            plural = "head" if heads.n_heads == 1 else "heads"
            sizes += f", {heads.n_heads} {plural} of {heads.head_dim}, {heads.n_kv_heads} key/value ({heads.variant})"
        return (
            f"{self.model} ({self.family}): {sizes}\ncontext {setting.context:,}, batch "
            f"{setting.batch:,}, {', '.join(formats)}"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Each cost: what it is, the exact number, and the number with a unit that is easy to read."""
        cache, decode, memory, setting = (
            self.cache,
            self.decode,
            self.memory,
            self.setting,
        )
        rows = [_bytes("weights", self.weight_bytes)]
        if decode is not None:
            rows.append(_bytes("grows: cache of one token", cache.bytes_per_token))
            if cache.bytes_per_token_beyond_windows != cache.bytes_per_token:
                rows.append(
                    _bytes(
                        "the same beyond the windows",
                        cache.bytes_per_token_beyond_windows,
                    )
                )
            rows.append(_bytes("does not grow: states of a text", cache.state_bytes))
            for length in cache.lengths:
                rows.append(
                    _bytes(f"cache of {length.tokens:,} tokens", length.text_bytes)
                )
                if setting.batch > 1:
                    rows.append(
                        _bytes(f"  of {setting.batch:,} such texts", length.total_bytes)
                    )
            rows.append(
                _bytes("weights and cache", self.weight_bytes + cache.total_bytes)
            )
        rows.append(
            _flops("prefill" if decode else "forward pass", self.prefill.total_flops)
        )
        rows.append(_flops("  of it in attention", self.prefill.attention_flops))
        rows.append(_flops("  if every pair is computed", self.prefill.dense_flops))
        if decode is not None:
            rows.append(_flops("decode, one step", decode.flops))
            if decode.expanded_flops != decode.flops:
                rows.append(
                    _flops("  if the latent is expanded", decode.expanded_flops)
                )
            rows.append(_bytes("weights read in a step", decode.weight_bytes))
            rows.append(
                _bytes("bytes moved for a new token", round(decode.bytes_per_token))
            )
            rows.append(
                (
                    "arithmetic intensity",
                    f"{decode.flops_per_byte:.3g}",
                    "FLOPs per byte",
                )
            )
        if memory is not None:
            longest = (
                "no limit"
                if memory.longest_context is None
                else f"{memory.longest_context:,}"
            )
            rows.append(_bytes("memory left for the cache", memory.free_bytes))
            at_batch = f"tokens at batch {setting.batch:,}"
            rows.append(("longest context that fits", longest, at_batch))
            texts = f"texts of {setting.context:,}"
            rows.append(("largest batch that fits", f"{memory.largest_batch:,}", texts))
        return rows

    def __repr__(self) -> str:
        total = self.parameters.total
        rows = [
            ("parameters", f"{total:,}", scaled(total, 1000, DECIMAL)),
            *self.rows(),
        ]
        # the last column needs none
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = (
            f"  {what:<{widths[0]}}  {exact:>{widths[1]}}  {short}"
            for what, exact, short in rows
        )
        return "\n".join(
            [self.heading, *lines, *(f"note: {note}" for note in self.notes)]
        )


# Rows of `Price.rows`. DECIMAL has prefixes alone: "25.1 k" parameters, but "25.1 kFLOP", where the unit is added.


def _bytes(label: str, count: float) -> tuple[str, str, str]:
    return label, f"{count:,} bytes", amount(count)


def _flops(label: str, count: int) -> tuple[str, str, str]:
    return label, f"{count:,}", scaled(count, 1000, [f"{unit}FLOP" for unit in DECIMAL])


def make_setting(
    shape: ModelShape,
    context: int | None = None,
    batch: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory: str | int | None = None,
) -> Setting:
    """The setting with its defaults filled in: the model's own length and number format, and no limit.

    Args:
        shape: the model that is to be priced
        context: tokens of each text; default: the longest that the model was made for
        batch: texts side by side
        dtype: the number format of the weights; default: the config's, or bf16
        kv_dtype: the number format of the cache; default: that of the weights
        memory: such as "24GiB", or bytes

    Raises:
        HeadwiseError: for a value out of range, and for one that means nothing for this model.
    """
    context = context if context is not None else shape.positions or DEFAULT_CONTEXT
    for name, value in (("context", context), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= MOST:
            what = "texts" if name == "batch" else "tokens"
            raise HeadwiseError(
                f"{name}={value!r} is no whole number of {what} from 1 to {MOST:,}"
            )
    if kv_dtype is not None and not shape.generates:
        raise HeadwiseError(
            f"kv_dtype={kv_dtype} is about a cache, and this {shape.family} keeps none; leave it out"
        )
    packed = None if dtype else shape.packed
    dtype = number_format(dtype or shape.dtype or DEFAULT_DTYPE)
    return Setting(
        context=context,
        batch=batch,
        dtype=dtype,
        expert_dtype=packed or dtype,
        kv_dtype=number_format(kv_dtype) if kv_dtype else dtype,
        memory=None if memory is None else read_bytes("memory", memory),
    )


def price_shape(name: str, shape: ModelShape, setting: Setting) -> Price:
    """Everything that `headwise cost` says about one model. Raises HeadwiseError when the weights exceed the memory."""
    weights, memory = weight_bytes(shape, setting), None
    if setting.memory is not None:
        if weights > setting.memory:
            raise HeadwiseError(
                f"memory={setting.memory:,} bytes is less than the weights alone, {shape.parameters:,} "
                f"in {setting.dtype} = {weights:,} bytes; give more memory, or a smaller format as dtype="
            )
        memory = (
            fit(shape, setting, setting.memory - weights) if shape.generates else None
        )
    return Price(
        model=name,
        family=shape.family,
        way=shape.way,
        d_model=shape.d_model,
        setting=setting,
        parameters=Parameters(shape.parameters, shape.active_parameters, _parts(shape)),
        weight_bytes=weights,
        layers=tuple(_layer(layer, shape, setting) for layer in shape.layers),
        cache=cache_price(shape, setting),
        prefill=forward_price(shape, setting.batch, setting.context),
        decode=decode_price(shape, setting) if shape.generates else None,
        memory=memory,
        notes=(*shape.notes, *_notes(shape, setting)),
    )


def weight_bytes(shape: ModelShape, setting: Setting) -> int:
    matrices = sum(experts.count * experts.matrices for experts in shape.experts)
    return packed_bytes(matrices, shape.parameters - matrices, setting)


def packed_bytes(matrices: int, others: int, setting: Setting) -> int:
    """Bytes of so many parameters in the matrices of experts, and of others."""
    return bytes_of(matrices, setting.expert_dtype) + bytes_of(others, setting.dtype)


# Where parameters stand, in the order of a bill; `head` is what stands behind the last layer, such as the matrix to the
# logits.
PARTS = ("embeddings", "attention", "mixers", "feed-forward", "norms", "others", "head")


def _parts(shape: ModelShape) -> dict[str, int]:
    """The parameters of each of PARTS that the model has."""
    parts: Counter[str] = Counter()
    for piece in shape.pieces:
        parts[piece.part] += piece.parameters
    for layer in shape.layers:
        parts["attention"] += layer.heads.parameters if layer.heads else 0
        parts["feed-forward"] += layer.feed_forward_parameters
        parts["norms"] += layer.norm_parameters
        if layer.mixer_parameters:
            parts["mixers"] += layer.mixer_parameters
    return {part: parts[part] for part in PARTS if part in parts}


def _layer(layer: Layer, shape: ModelShape, setting: Setting) -> LayerPrice:
    kept = layer.kept if shape.generates else ()
    experts, rows = layer.experts, [part.rows or LONGEST for part in kept if part.grows]
    return LayerPrice(
        name=layer.name,
        kind=layer.kind,
        parameters=layer.parameters,
        active_parameters=layer.active_parameters,
        attention=layer.heads,
        variant=layer.heads.variant if layer.heads else None,
        mixer_parameters=layer.mixer_parameters,
        feed_forward_parameters=layer.feed_forward_parameters,
        norm_parameters=layer.norm_parameters,
        experts=(experts.active, experts.count) if experts else None,
        cache_bytes_per_token=_growth(kept, setting),
        cache_rows=max(rows) if rows and max(rows) < LONGEST else None,
        state_bytes=_held(kept, setting, 0),
    )


def _held(kept: Iterable[Kept], setting: Setting, tokens: int) -> int:
    """Bytes of all that is kept of a text of that many tokens; of 0 tokens its states alone are left."""
    values: Counter[float] = Counter()
    for part in kept:
        values[_bits(part, setting)] += part.at(tokens)
    return sum(int(-(-count * Fraction(bits) // 8)) for bits, count in values.items())


def _bits(part: Kept, setting: Setting) -> float:
    """A state has the format that the model fixes, or the one it computes in."""
    state = max(16, BITS[setting.dtype])
    return part.bits or (BITS[setting.kv_dtype] if part.grows else state)


def _growth(kept: Iterable[Kept], setting: Setting, beyond: bool = False) -> float:
    """Bytes that one token adds: a mean where a block of tokens is kept as one."""
    bits = Fraction(0)
    for part in kept:
        if (
            part.grows
            and not part.open_block
            and not (beyond and part.rows is not None)
        ):
            bits += Fraction(part.values, part.every) * Fraction(_bits(part, setting))
    size = bits / 8
    return float(size) if size.denominator > 1 else int(size)


def cache_price(shape: ModelShape, setting: Setting) -> CachePrice:
    """What the texts of a batch keep, and what one token more adds, before windows are full and after."""
    lengths = []
    for part in (16, 4, 1):
        tokens = max(1, setting.context // part)
        size = _held(shape.kept, setting, tokens)
        lengths.append(Length(tokens, size, size * setting.batch))
    return CachePrice(
        bytes_per_token=_growth(shape.kept, setting),
        bytes_per_token_beyond_windows=_growth(shape.kept, setting, beyond=True),
        state_bytes=_held(shape.kept, setting, 0),
        text_bytes=lengths[-1].text_bytes,
        total_bytes=lengths[-1].total_bytes,
        lengths=tuple(dict.fromkeys(lengths)),
    )


def decode_price(shape: ModelShape, setting: Setting) -> DecodePrice:
    """A step reads the weights once for all texts, and each text's cache."""
    batch = setting.batch
    flops = decode_flops(shape, setting.context) * batch
    # Rounded, for with experts the parameters that are read are a mean.
    matrices, others = map(round, decode_parameters(shape, batch))
    weights = packed_bytes(matrices, others, setting)
    cache = cache_price(shape, setting).total_bytes
    return DecodePrice(
        flops=flops,
        expanded_flops=decode_flops(shape, setting.context, expand=True) * batch,
        weight_bytes=weights,
        cache_bytes=cache,
        bytes_per_token=(weights + cache) / batch,
        flops_per_byte=flops / (weights + cache),
    )


def fit(shape: ModelShape, setting: Setting, free: int) -> MemoryPrice:
    """The longest texts that a batch may have with its caches in `free` bytes, and the most texts of this context."""

    def size(tokens: int) -> int:
        return setting.batch * _held(shape.kept, setting, tokens)

    longest = None
    growth = _growth(shape.kept, setting, beyond=True)
    if growth or size(LONGEST) > free:
        # No text that fits is longer: each token adds at least `growth`, but for an open block.
        most = LONGEST if not growth else int(free / growth) + 2**20
        longest = bisect_right(range(1, most + 1), free, key=size)
    of_one = _held(shape.kept, setting, setting.context)
    return MemoryPrice(free, longest, free // of_one if of_one else MOST)


def _notes(shape: ModelShape, setting: Setting) -> list[str]:
    """What a reader must know of these numbers: lengths beyond the model's, experts, models without a cache."""
    notes = []
    if shape.positions is not None and setting.context > shape.positions:
        positions = f"{shape.positions:,}"
        notes.append(
            f"context {setting.context:,} is beyond the {positions} positions the model was made for"
        )
    if setting.batch > 1 and any(shape.experts):
        notes.append(
            f"experts read for a batch of {setting.batch}: the mean, if every choice were as likely"
        )
    if not shape.generates:
        notes.append(
            "it keeps no cache, as an encoder does: every text is one forward pass"
        )
        if setting.memory is not None:
            notes.append(
                "the weights fit in the memory; how many texts do depends on activations, which are not counted"
            )
    return notes


# The same model with other key/value heads, side by side.


@dataclass(frozen=True)
class Variant:
    """What a model would cost with another number of key/value heads.

    What fewer of them cost in quality is not in these numbers: that has to be measured.
    """

    name: str  # MHA, GQA-8, MQA; MLA for a latent, "as it is" where layers differ
    n_kv_heads: int
    present: bool  # is it the model as it is?
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: float
    cache_bytes: int  # of the setting's context and batch
    fits: (
        bool | None
    )  # weights and that cache in the memory; None where no memory was given
    # 0 where the weights alone exceed it; None without memory, or where nothing grows
    longest_context: int | None
    bytes_per_token: float  # moved to decode one


def variants(shape: ModelShape, setting: Setting) -> tuple[Variant, ...]:
    """The model with as many key/value heads as each divisor of its query heads: MHA first, then GQA, MQA last.

    A model with a latent, or whose layers differ, stands before them as it is.

    Raises:
        HeadwiseError: for a model that keeps no keys and values of heads.
    """
    heads = [
        layer.heads for layer in shape.layers if layer.heads and layer.kind != "shared"
    ]
    if not shape.generates or not heads:
        raise HeadwiseError(
            f"variants compare the keys and values of heads, and this {shape.family} keeps none; price a decoder"
        )
    counts = {(each.n_kv_heads, each.latent) for each in heads}
    rows = []
    is_even = len(counts) == 1 and heads[0].latent is None
    if not is_even:
        name = "MLA" if len(counts) == 1 else "as it is"
        rows.append(_variant(name, heads[0].n_kv_heads, shape, setting, True))
    divisors = kv_divisors(shape)
    for n in divisors:
        name = "MHA" if n == divisors[0] else "MQA" if n == 1 else f"GQA-{n}"
        present = is_even and n == heads[0].n_kv_heads
        rows.append(_variant(name, n, shape.with_kv_heads(n), setting, present))
    return tuple(rows)


def _variant(
    name: str, n: int, shape: ModelShape, setting: Setting, present: bool
) -> Variant:
    weights, cache = weight_bytes(shape, setting), cache_price(shape, setting)
    free = None if setting.memory is None else setting.memory - weights
    longest = None
    if free is not None:
        longest = fit(shape, setting, free).longest_context if free >= 0 else 0
    return Variant(
        name=name,
        n_kv_heads=n,
        present=present,
        parameters=shape.parameters,
        weight_bytes=weights,
        cache_bytes_per_token=cache.bytes_per_token,
        cache_bytes=cache.total_bytes,
        fits=None if free is None else cache.total_bytes <= free,
        longest_context=longest,
        bytes_per_token=decode_price(shape, setting).bytes_per_token,
    )
