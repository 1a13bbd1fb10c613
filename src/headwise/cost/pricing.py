"""The price of a model at one setting; `records.plain_data` of a Price is the JSON of `headwise cost`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal

from headwise.cost.shape import (
    ForwardPrice,
    Layer,
    ModelShape,
    cache_values,
    decode_flops,
    decode_parameters,
    forward_price,
    growing_values,
    longest_context,
)
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, LatentSpec
from headwise.table import DECIMAL, amount, scaled
from headwise.words import unknown

# Bits of one number. Formats that share a scale among a block of numbers take a little more; it is not counted.
BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}
LONG_NAMES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16"}
# those that models run in, as torch calls them
COMPUTED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Bytes of a unit, its letters small: "kb" 1000, "kib" 1024, up to "pb" and "pib".
UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
# bytes, 8 EiB: more than any device holds or moves in a second, so a larger number is a slip
LARGEST = 2**63


def number_format(name: object) -> str:
    """The short name, one of BITS, of a number format that is given by a name of it, or as a dtype of torch.

    Raises:
        HeadwiseError: for a name that is not known.
    """
    long = str(name).lower().removeprefix("torch.")  # str(torch.float16) is "torch.float16"
    # float16 -> fp16, float8_e4m3fn -> fp8: what follows the bits only says how they are used.
    short = LONG_NAMES.get(long) or re.sub(r"float(\d+)(_e\dm\d(fn)?(uz)?)?", r"fp\1", long)
    if short in BITS:
        return short
    raise unknown(f"no number format {name!r}", short, BITS)


def computed_in(dtype: str) -> str:
    """torch's name of a number format that models run in; "auto" as it is. Raises HeadwiseError for any other."""
    if dtype == "auto":
        return dtype
    short = number_format(dtype)
    if short not in COMPUTED:
        raise HeadwiseError(f"dtype={dtype} is not computed in; one of auto, {', '.join(COMPUTED)}")
    return COMPUTED[short]


def bytes_of(count: int, dtype: str) -> int:
    """Bytes of that many numbers, rounded up to whole ones."""
    # -(-a // b) is a / b rounded up, in whole numbers, which stay exact however large they are.
    return -(-count * BITS[dtype] // 8)


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


# of a model that sets no longest text, such as T5, which was trained on 512 tokens
DEFAULT_CONTEXT = 512
DEFAULT_DTYPE = "bf16"  # where neither the caller nor the config names one
# tokens of a text, or texts of a batch: far above any real one, so a larger number is a slip
MOST = 2**40


@dataclass(frozen=True)
class Setting:
    """What a price depends on besides the model: texts, number formats, and the memory of a device."""

    context: int  # tokens of each text, those to come included
    batch: int  # texts side by side
    dtype: str  # of the weights
    kv_dtype: str
    gpu_memory: int | None  # bytes


@dataclass(frozen=True)
class HeadPrice:
    """All heads of one attention of a layer, what one of them has, and what they have together.

    With a latent, `latent` is all that is cached of a token: the latent itself and the one rotary key beside it.
    """

    variant: str  # MHA, GQA, MQA, or MLA
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    sink: bool
    latent: int | None  # numbers that a squeezed cache keeps for all heads together
    query_head_parameters: int  # of one head
    kv_head_parameters: int  # of one head
    shared_parameters: int  # of no head, such as the bias of W_O
    parameters: int  # of all heads together
    cache_bytes_per_token: int  # of all heads together


# What a HeadPrice repeats of the spec.
OF_SPEC = (
    "variant", "n_heads", "n_kv_heads", "head_dim", "value_dim", "window", "sink", "query_head_parameters",
    "kv_head_parameters", "shared_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class LayerPrice:
    """The parameters of one layer by what has them."""

    name: str
    parameters: int
    active_parameters: int
    attention: HeadPrice
    feed_forward_parameters: int
    norm_parameters: int
    experts: tuple[int, int] | None  # how many a token is sent to, of how many


@dataclass(frozen=True)
class Parameters:
    """Parameters in all, those that one token meets (`active`), and of each part of the model (`parts`, see PARTS).

    A token does not meet the experts that it is not sent to, nor the tables in which it reads one row.
    """

    total: int
    active: int
    parts: dict[str, int]


@dataclass(frozen=True)
class CachePrice:
    """Bytes that wait between steps. A windowed layer keeps the last min(context, window) tokens."""

    bytes_per_token: int  # what one more token adds while no window is full
    bytes_per_token_beyond_windows: int  # what it adds once all windows are full
    total_bytes: int  # of the whole batch


@dataclass(frozen=True)
class DecodePrice:
    """One step that gives every text of the batch a token, the last of its context."""

    flops: int
    expanded_flops: int  # of a step that turns a latent cache into keys and values; else the same
    weight_bytes: int  # read once for the batch
    cache_bytes: int
    bytes_per_token: float  # of both, shared by the batch
    flops_per_byte: float  # the arithmetic intensity


@dataclass(frozen=True)
class MemoryPrice:
    """What fits beside the weights. Activations and the runtime's own memory come on top."""

    free_bytes: int
    longest_context: int | None  # at this batch; 0: not a token fits; None: the cache stops growing
    largest_batch: int  # at this context


@dataclass(frozen=True, repr=False)
class Price:
    """What `headwise.price` returns. Printed, it is the whole bill."""

    model: str
    family: str
    d_model: int
    setting: Setting
    parameters: Parameters
    weight_bytes: int
    layers: tuple[LayerPrice, ...]
    cache: CachePrice
    prefill: ForwardPrice
    decode: DecodePrice | None  # None: an encoder writes nothing
    memory: MemoryPrice | None  # None where no memory was given, or there is no cache to fill it
    notes: tuple[str, ...]

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def heading(self) -> str:
        """The sizes of the model, and the setting in a second line."""
        setting = self.setting
        heads = self.layers[0].attention
        formats = setting.dtype
        if setting.kv_dtype != setting.dtype:
            formats = f"{setting.dtype}, cache {setting.kv_dtype}"
        return (
            f"{self.model} ({self.family}): {self.n_layers} {'layer' if self.n_layers == 1 else 'layers'}, "
            f"width {self.d_model:,}, {heads.n_heads} {'head' if heads.n_heads == 1 else 'heads'} of "
            f"{heads.head_dim}, {heads.n_kv_heads} key/value ({heads.variant})\ncontext "
            f"{setting.context:,}, batch {setting.batch:,}, {formats}"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Each cost: what it is, the exact number, and the number with a unit that is easy to read."""
        cache, decode, memory, setting = self.cache, self.decode, self.memory, self.setting
        rows = [_bytes("weights", self.weight_bytes)]
        if decode is not None:
            rows.append(_bytes("cache of one token", cache.bytes_per_token))
            if cache.bytes_per_token_beyond_windows != cache.bytes_per_token:
                rows.append(
                    _bytes("the same beyond the windows", cache.bytes_per_token_beyond_windows)
                )
            rows.append(_bytes("cache in all", cache.total_bytes))
        rows.append(_flops("prefill" if decode else "forward pass", self.prefill.total_flops))
        rows.append(_flops("  of it in attention", self.prefill.attention_flops))
        rows.append(_flops("  if every pair is computed", self.prefill.dense_flops))
        if decode is not None:
            rows.append(_flops("decode, one step", decode.flops))
            if decode.expanded_flops != decode.flops:
                rows.append(_flops("  if the latent is expanded", decode.expanded_flops))
            rows.append(_bytes("weights read in a step", decode.weight_bytes))
            rows.append(_bytes("bytes moved for a new token", round(decode.bytes_per_token)))
            rows.append(("arithmetic intensity", f"{decode.flops_per_byte:.3g}", "FLOPs per byte"))
        if memory is not None:
            longest = (
                "no limit" if memory.longest_context is None else f"{memory.longest_context:,}"
            )
            rows.append(_bytes("memory left for the cache", memory.free_bytes))
            at_batch = f"tokens at batch {setting.batch:,}"
            rows.append(("longest context that fits", longest, at_batch))
            texts = f"texts of {setting.context:,}"
            rows.append(("largest batch that fits", f"{memory.largest_batch:,}", texts))
        return rows

    def __repr__(self) -> str:
        total = self.parameters.total
        rows = [("parameters", f"{total:,}", scaled(total, 1000, DECIMAL)), *self.rows()]
        # the last column needs none
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = (
            f"  {what:<{widths[0]}}  {exact:>{widths[1]}}  {short}" for what, exact, short in rows
        )
        return "\n".join([self.heading, *lines, *(f"note: {note}" for note in self.notes)])


# Rows of `Price.rows`. DECIMAL has prefixes alone: "25.1 k" parameters, but "25.1 kFLOP", where the unit is added.


def _bytes(label: str, count: int) -> tuple[str, str, str]:
    return label, f"{count:,} bytes", amount(count)


def _flops(label: str, count: int) -> tuple[str, str, str]:
    return label, f"{count:,}", scaled(count, 1000, [f"{unit}FLOP" for unit in DECIMAL])


def make_setting(
    shape: ModelShape,
    context: int | None = None,
    batch: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    gpu_memory: str | int | None = None,
) -> Setting:
    """The setting with its defaults filled in: the model's own length and number format, and no limit.

    Args:
        shape: the model that is to be priced
        context: tokens of each text; default: the longest that the model was made for
        batch: texts side by side
        dtype: the number format of the weights; default: the config's, or bf16
        kv_dtype: the number format of the cache; default: that of the weights
        gpu_memory: such as "24GiB", or bytes

    Raises:
        HeadwiseError: for a value out of range, and for one that means nothing for this model.
    """
    context = context if context is not None else shape.positions or DEFAULT_CONTEXT
    for name, value in (("context", context), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= MOST:
            what = "texts" if name == "batch" else "tokens"
            raise HeadwiseError(f"{name}={value!r} is no whole number of {what} from 1 to {MOST:,}")
    if kv_dtype is not None and not shape.generates:  # an encoder keeps no cache
        raise HeadwiseError(
            f"kv_dtype={kv_dtype} is about decoding, and a {shape.family} encoder writes nothing; leave it out"
        )
    dtype = number_format(dtype or shape.dtype or DEFAULT_DTYPE)
    return Setting(
        context=context,
        batch=batch,
        dtype=dtype,
        kv_dtype=number_format(kv_dtype) if kv_dtype else dtype,
        gpu_memory=None if gpu_memory is None else read_bytes("gpu_memory", gpu_memory),
    )


def price_shape(name: str, shape: ModelShape, setting: Setting) -> Price:
    """Everything that `headwise cost` says about one model. Raises HeadwiseError when the weights exceed the memory."""
    weights, memory = bytes_of(shape.parameters, setting.dtype), None
    if setting.gpu_memory is not None:
        if weights > setting.gpu_memory:
            raise HeadwiseError(
                f"gpu_memory={setting.gpu_memory:,} bytes is less than the weights alone, {shape.parameters:,} "
                f"in {setting.dtype} = {weights:,} bytes; give more memory, or a smaller format as dtype="
            )
        memory = fit(shape, setting, setting.gpu_memory - weights) if shape.generates else None
    return Price(
        model=name,
        family=shape.family,
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


# Where parameters stand, in the order of a bill; `head` is what stands behind the last layer, such as the matrix to the
# logits.
PARTS = ("embeddings", "attention", "feed-forward", "norms", "head")


def _parts(shape: ModelShape) -> dict[str, int]:
    """The parameters of each of PARTS that the model has."""
    parts: Counter[str] = Counter()
    for piece in shape.pieces:
        parts[piece.part] += piece.parameters
    for layer in shape.layers:
        parts["attention"] += layer.attention.n_parameters
        parts["feed-forward"] += layer.feed_forward.parameters
        parts["norms"] += layer.norm_parameters
    return {part: parts[part] for part in PARTS if part in parts}


def _layer(layer: Layer, shape: ModelShape, setting: Setting) -> LayerPrice:
    forward = layer.feed_forward
    return LayerPrice(
        name=layer.name,
        parameters=layer.parameters,
        active_parameters=layer.active_parameters,
        attention=_heads(layer.attention, shape.generates, setting),
        feed_forward_parameters=forward.parameters,
        norm_parameters=layer.norm_parameters,
        experts=(forward.n_active, forward.n_experts) if forward.n_experts else None,
    )


def _heads(spec: AttentionSpec, cached: bool, setting: Setting) -> HeadPrice:
    values = spec.cache_values_per_token
    return HeadPrice(
        **{name: getattr(spec, name) for name in OF_SPEC},
        latent=values if isinstance(spec, LatentSpec) else None,
        parameters=spec.n_parameters,
        cache_bytes_per_token=bytes_of(values, setting.kv_dtype) if cached else 0,
    )


def cache_price(shape: ModelShape, setting: Setting) -> CachePrice:
    """What the texts of a batch keep, and what one token more adds, before windows are full and after."""
    per_token = sum(spec.cache_values_per_token for spec in shape.cached)
    beyond = sum(map(growing_values, shape.cached))
    total = cache_values(shape, setting.context) * setting.batch
    return CachePrice(
        *(bytes_of(values, setting.kv_dtype) for values in (per_token, beyond, total))
    )


def decode_price(shape: ModelShape, setting: Setting) -> DecodePrice:
    """A step reads the weights once for all texts, and each text's cache."""
    batch = setting.batch
    flops = decode_flops(shape, setting.context) * batch
    # Rounded, for with experts the parameters that are read are a mean.
    weights = bytes_of(round(decode_parameters(shape, batch)), setting.dtype)
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
    # How many numbers fit, rounded down: a part of one is of no use.
    values = free * 8 // BITS[setting.kv_dtype]
    longest = longest_context(shape, values // setting.batch)
    return MemoryPrice(free, longest, values // cache_values(shape, setting.context))


def _notes(shape: ModelShape, setting: Setting) -> list[str]:
    """What a reader must know of these numbers: lengths beyond the model's, experts, encoders."""
    notes = []
    if shape.positions is not None and setting.context > shape.positions:
        positions = f"{shape.positions:,}"
        notes.append(
            f"context {setting.context:,} is beyond the {positions} positions the model was made for"
        )
    if setting.batch > 1 and any(layer.feed_forward.n_experts for layer in shape.layers):
        notes.append(
            f"experts read for a batch of {setting.batch}: the mean, if every choice were as likely"
        )
    if not shape.generates:
        notes.append(
            "an encoder writes nothing: it keeps no cache, and every text is one forward pass"
        )
        if setting.gpu_memory is not None:
            notes.append(
                "the weights fit in the memory; how many texts do depends on activations, which are not counted"
            )
    return notes
