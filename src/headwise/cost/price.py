"""The price of a model: parameters, cache, FLOPs, bytes moved, what fits in memory, at one setting.

Whatever describes a model becomes a shape (`shape_of`), and a shape a price. `records.plain_data` of a Price is the
JSON of `headwise cost`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from headwise.cost.config import (
    PRESETS,
    UndescribedError,
    check_sizes,
    layer_of,
    preset,
    shape_by_formula,
    shape_of_modules,
)
from headwise.cost.shape import (
    Heads,
    Kept,
    Layer,
    ModelShape,
    bytes_of,
    bytes_per_token,
    whole_bytes,
)
from headwise.errors import HeadwiseError
from headwise.files import read_json, read_toml
from headwise.models import BITS, config_source, number_format
from headwise.spec import AttentionSpec, variant_of
from headwise.table import DECIMAL, amount, plural, scaled, shown
from headwise.words import Facts, unknown

# bytes, 8 EiB: more than any device holds or moves in a second, so a larger number is a slip
LARGEST = 2**63
# of a model that sets no longest text, such as T5, which was trained on 512 tokens
DEFAULT_CONTEXT = 512
DEFAULT_DTYPE = "bf16"  # where neither the caller nor the config names one
# tokens of a text, or texts of a batch: far above any real one, so a larger number is a slip
MOST = 2**40
# Tokens: more than any text that fits in LARGEST.
LONGEST = 2**62
# The presets that `headwise cost` without a model shows: the six that courses compare, in their order, and the two
# that they name for multi-query attention.
TABLE = (
    "bert-base", "bert-large", "gpt2", "gpt3", "llama-2-70b", "mistral-7b", "palm-540b", "falcon-7b",
)  # fmt: skip
ROWS = read_toml("cost/costs.toml")
GGUF = "a GGUF file: all weights are priced in one number format, however the file packs them"
QUANTIZED = "quantization_config: all weights are priced in one number format, and scales are not counted"
AHEAD = "the layers that predict further tokens while training are not counted; transformers drops them"


def read_bytes(name: str, text: str | int) -> int:
    """24GiB, 80 GB, or an int of bytes, as bytes; errors call the value `name`.

    A text without a unit is refused: it may be meant in GB as well as in bytes.
    """
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)B\s*", str(text).upper())
    if type(text) is int:  # isinstance would let True pass as 1
        value = text
    elif size is None:
        raise HeadwiseError(
            f"{name}={text!r} is no size; write a number and a unit, such as 24GiB"
        )
    else:
        base = 1024 if size[3] else 1000
        value = float(size[1]) * base ** " KMGTP".index(size[2] or " ")
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
    if isinstance(config, dict):
        return "config", shape_of_fields(config)
    name = type(config).__name__
    # a model or a layer has its description there
    inner = getattr(config, "config", getattr(config, "spec", config))
    if isinstance(inner, AttentionSpec):  # one layer with that attention alone
        layer = layer_of("L0", inner)
        return name, ModelShape(
            family="attention", d_model=inner.d_model, layers=(layer,)
        )
    if hasattr(inner, "to_dict"):  # a config of transformers
        fields = inner.to_dict()
        if inner is not config:
            fields["architectures"] = [name]
        return name, shape_of_fields(fields)
    if type(inner).__module__ == "headwise.gpt.gpt":
        return name, shape_of_fields({"headwise": asdict(inner)})
    if hasattr(config, "named_modules"):
        return name, shape_of_modules(config)
    raise HeadwiseError(
        f"a {name} has no price; pass a preset, a path, the dict of a config, an attention layer, or a model with "
        f"a `config` of transformers or of headwise"
    )


def _shape_at(description: str | Path) -> tuple[str, ModelShape]:
    """The shape of a preset by its name, and of what lies at a path or is called so on the hub."""
    name = str(description)
    if name in PRESETS:
        return name, preset(name)
    is_path = "/" in name or name.endswith((".json", ".gguf")) or Path(name).exists()
    if not is_path:
        # In small letters, as presets are written: "LLaMA-2-7B" is then near llama-2-70b.
        what = f"no preset {name!r}, and no file or folder of that name"
        raise unknown(what, name.lower(), PRESETS)
    called, config = config_source(description)
    notes: tuple[str, ...] = ()
    if isinstance(config, Path):
        name = str(config)
        config = read_json(config)
    else:
        notes = (GGUF,)
    try:  # whatever is wrong with the config is said with its file
        if not isinstance(config, dict):
            raise HeadwiseError(
                f"a JSON {type(config).__name__}, and a config is an object with fields"
            )
        return called, shape_of_fields(config).noted(*notes)
    except HeadwiseError as error:
        raise HeadwiseError(f"{name}: {error}") from None


def shape_of_fields(config: Facts) -> ModelShape:
    """The sizes that the dict of a config.json says: by formulas, else those of the model that is built of it."""
    is_ours = "headwise" in config
    if not is_ours and not isinstance(config.get("model_type"), str):
        raise HeadwiseError(
            f"model_type={config.get('model_type')!r}; a config names its family there, such as llama"
        )
    check_sizes({"headwise": config["headwise"]} if is_ours else config)
    try:
        shape = shape_by_formula(config)
    except UndescribedError as error:
        if is_ours:
            raise HeadwiseError(
                f"a run of headwise with {error} has no formula here"
            ) from None
        shape = _built(config, str(error))
    notes = []
    packing = config.get("quantization_config")
    packed = packing.get("quant_method") if isinstance(packing, dict) else None
    if packing and packed not in BITS:
        notes.append(QUANTIZED)
        packed = None
    # two names of one thing
    if config.get("num_nextn_predict_layers") or config.get("num_mtp_layers"):
        notes.append(AHEAD)
    # The format of the weights: `torch_dtype` is its older name, and "auto" names none.
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype == "auto" or not isinstance(dtype, str):
        dtype = None
    return replace(shape.noted(*notes), dtype=dtype, packed=packed)


def _built(config: Facts, reason: str) -> ModelShape:
    """The shape of a model that no formula describes, for this reason; it is built without memory."""
    try:
        from headwise.cost.built import shape_of_config

        return shape_of_config(config)
    except ModuleNotFoundError as error:
        raise HeadwiseError(
            f"{reason} of a {config['model_type']} has no formula here, and to build the model needs {error.name}: "
            f"pip install 'headwise[hf]'; a preset needs nothing: {', '.join(PRESETS)}"
        ) from None


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
class Parameters:
    """Parameters in all, those that one token meets (`active`), and of each part of the model.

    A token does not meet the experts that it is not sent to, nor the tables in which it reads one row.
    """

    total: int
    active: int
    parts: dict[str, int]


@dataclass(frozen=True)
class CachePrice:
    """Bytes that wait between steps."""

    bytes_per_token: float  # what one more token adds while no window is full
    bytes_per_token_beyond_windows: float  # what it adds once all windows are full
    state_bytes: int  # of one text, however long
    text_bytes: int  # of one text of the setting's context
    total_bytes: int  # of the whole batch


@dataclass(frozen=True)
class ForwardPrice:
    """FLOPs to read the batch once.

    `layer_flops` are those of linear layers, `attention_flops` of the pairs that queries may see, `outside_flops` of
    what stands outside the layers, such as logits. `dense_flops` is the total where a kernel computes every pair of a
    query and a key, and the logits of every token.
    """

    layer_flops: int
    attention_flops: int
    outside_flops: int
    total_flops: int
    dense_flops: int


@dataclass(frozen=True)
class DecodePrice:
    """One step that gives every text of the batch a token, the last of its context."""

    flops: int
    weight_bytes: int  # read once for the batch
    cache_bytes: int
    bytes_per_token: float  # of both, shared by the batch
    flops_per_byte: float  # the arithmetic intensity


@dataclass(frozen=True)
class MemoryPrice:
    """What fits beside the weights. Activations and the runtime's own memory come on top."""

    free_bytes: int
    # at this batch; 0: not a token fits; None: the cache stops growing
    longest_context: int | None
    largest_batch: int  # at this context

    @property
    def longest(self) -> str:
        return context_text(self.longest_context)


@dataclass(frozen=True, repr=False)
class Price:
    """What `headwise.price` returns. Printed, it is the whole bill."""

    model: str
    family: str
    d_model: int
    setting: Setting
    parameters: Parameters
    weight_bytes: int
    layers: tuple[Layer, ...]
    cache: CachePrice
    prefill: ForwardPrice
    decode: DecodePrice | None  # None: a model that keeps no cache
    # None where no memory was given, or there is no cache to fill it
    memory: MemoryPrice | None
    notes: tuple[str, ...]
    way: str  # "config" by formulas, or "built" on a model

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def first_heads(self) -> Heads | None:
        """The attention of the first layer that has one."""
        return next(filter(None, (layer.attention for layer in self.layers)), None)

    @property
    def heading(self) -> str:
        """The sizes of the model, and the setting in a second line."""
        setting = self.setting
        heads = self.first_heads
        sizes = f"{plural(self.n_layers, 'layer')}, width {self.d_model:,}"
        if heads:
            sizes += (
                f", {plural(heads.n_heads, 'head')} of {heads.head_dim}, "
                f"{heads.n_kv_heads} key/value ({heads.variant})"
            )
        formats = setting.dtype
        if setting.expert_dtype != setting.dtype:
            formats += f", experts {setting.expert_dtype}"
        if setting.kv_dtype != setting.dtype:
            formats += f", cache {setting.kv_dtype}"
        return (
            f"{self.model} ({self.family}): {sizes}\n"
            f"context {setting.context:,}, batch {setting.batch:,}, {formats}"
        )

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache.total_bytes

    def rows(self) -> list[tuple[str, str, str]]:
        """Each cost: what it is, the exact number, and the number with a unit that is easy to read."""
        rows = []
        for label, (path, unit, *same) in ROWS.items():
            value = self._at(path)
            if value is None or (value == 0 and path.startswith("cache")):
                continue
            if value not in map(self._at, same):
                rows.append((label, *_told(value, unit)))
        return rows

    def _at(self, path: str) -> Any:
        """The number at a path of fields; None where the model has none."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def __repr__(self) -> str:
        lines = [self.heading, f"  {'parameters':<33}{self.parameters.total:>27,}"]
        for what, exact, short in self.rows():
            lines.append(f"  {what:<33}{exact:>27}  {short}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _told(value: Any, unit: str) -> tuple[str, str]:
    """A number in full, and short with its unit."""
    if unit == "bytes":
        exact = f"{value:,.1f}".removesuffix(".0")
        return f"{exact} bytes", amount(value)
    if unit == "FLOP":
        return f"{value:,}", scaled(
            value, 1000, [f"{letter}FLOP" for letter in DECIMAL]
        )
    return shown(value), unit


def context_text(tokens: int | None) -> str:
    """The longest context that fits, where there is one."""
    return "no limit" if tokens is None else f"{tokens:,}"


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
    context = shape.positions or DEFAULT_CONTEXT if context is None else context
    sizes = ("context", context, "tokens"), ("batch", batch, "texts")
    for argument, value, unit in sizes:
        if type(value) is not int or not 1 <= value <= MOST:
            raise HeadwiseError(
                f"{argument}={value!r} is no whole number of {unit} from 1 to {MOST:,}"
            )
    if kv_dtype and not shape.generates:
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
    bill = _priced(name, shape, setting)
    if setting.memory is not None and bill.weight_bytes > setting.memory:
        raise HeadwiseError(
            f"memory={setting.memory:,} bytes is less than the weights alone, {shape.parameters:,} in "
            f"{setting.dtype} = {bill.weight_bytes:,} bytes; give more memory, or a smaller format as dtype="
        )
    return bill


def _priced(name: str, shape: ModelShape, setting: Setting) -> Price:
    """The price; `free_bytes` are negative where the weights exceed the memory."""
    # A state has the format that the model fixes, or the one it computes in.
    state = max(16, BITS[setting.dtype])
    rows = BITS[setting.kv_dtype]
    layers = []
    for layer in shape.layers:
        kept = [
            replace(part, bits=part.bits or (rows if part.grows else state))
            for part in layer.kept
        ]
        layers.append(replace(layer, kept=tuple(kept)))
    shape = replace(shape, layers=tuple(layers))
    packed = sum(each.count * each.matrices for each in shape.experts)
    weights = _weight_bytes(packed, shape.parameters - packed, setting)
    cache = _cache(shape.kept, setting)
    decode = None
    memory = None
    if shape.generates:
        decode = _decode(shape, setting, cache.total_bytes)
        if setting.memory is not None:
            memory = _fit(shape.kept, setting, setting.memory - weights)
    return Price(
        model=name,
        family=shape.family,
        d_model=shape.d_model,
        setting=setting,
        parameters=Parameters(shape.parameters, shape.active_parameters, _parts(shape)),
        weight_bytes=weights,
        layers=shape.layers,
        cache=cache,
        prefill=_forward(shape, setting.batch, setting.context),
        decode=decode,
        memory=memory,
        notes=(*shape.notes, *_notes(shape, setting)),
        way=shape.way,
    )


def _weight_bytes(packed: int, others: int, setting: Setting) -> int:
    """Bytes of so many parameters in the matrices of experts, and of others."""
    size = whole_bytes((packed, BITS[setting.expert_dtype]))
    return size + whole_bytes((others, BITS[setting.dtype]))


def _parts(shape: ModelShape) -> dict[str, int]:
    """The parameters of each part that the model has; a head that is tied to a table has none of its own."""
    outside = shape.outside
    parts = {"embeddings": outside.embeddings, "attention": 0, "mixers": 0}
    parts |= {"feed-forward": 0, "norms": outside.norms, "others": outside.others}
    for layer in shape.layers:
        parts["attention"] += layer.attention.parameters if layer.attention else 0
        parts["mixers"] += layer.mixer_parameters
        parts["feed-forward"] += layer.feed_forward_parameters
        parts["norms"] += layer.norm_parameters
    parts = {part: count for part, count in parts.items() if count}
    return parts if outside.head is None else parts | {"head": outside.head}


def _cache(kept: Sequence[Kept], setting: Setting) -> CachePrice:
    """What the texts of a batch keep, and what one token more adds, before windows are full and after."""
    size = bytes_of(kept, setting.context)
    beyond = [part for part in kept if part.rows is None]
    return CachePrice(
        bytes_per_token=bytes_per_token(kept),
        bytes_per_token_beyond_windows=bytes_per_token(beyond),
        state_bytes=bytes_of(kept, 0),
        text_bytes=size,
        total_bytes=size * setting.batch,
    )


def _forward(shape: ModelShape, batch: int, tokens: int) -> ForwardPrice:
    """What it takes to read texts of `tokens` tokens."""
    linear = attention = dense = 0
    for layer in shape.layers:
        linear += tokens * layer.reading.token
        dense += tokens * tokens * layer.reading.pair
        if layer.attention:
            attention += layer.attention.pairs(tokens) * layer.reading.pair
    logits = shape.outside.flops * tokens
    # what follows a prompt needs the last logits alone
    outside = shape.outside.flops if shape.generates else logits
    outside += shape.outside.once
    return ForwardPrice(
        layer_flops=batch * linear,
        attention_flops=batch * attention,
        outside_flops=batch * outside,
        total_flops=batch * (linear + attention + outside),
        dense_flops=batch * (linear + dense + shape.outside.once + logits),
    )


def _decode(shape: ModelShape, setting: Setting, cache_bytes: int) -> DecodePrice:
    """A step reads the weights once for all texts, and each text's cache; a latent cache is read as it is.

    Of experts it reads those that some text is sent to: one text `active`, several texts a mean number (`read`).
    """
    batch = setting.batch
    flops = shape.outside.flops
    for layer in shape.layers:
        seen = layer.attention.seen(setting.context) if layer.attention else 0
        flops += layer.writing.token + layer.writing.pair * seen
    packed = 0.0
    read = 0.0 + shape.active_parameters + batch * shape.outside.row
    for experts in shape.experts:
        number = experts.read(batch)
        packed += number * experts.matrices
        # `active_parameters` have those of one text
        read += (number - experts.active) * experts.parameters
    weights = _weight_bytes(round(packed), round(read - packed), setting)
    moved = weights + cache_bytes
    return DecodePrice(
        flops=batch * flops,
        weight_bytes=weights,
        cache_bytes=cache_bytes,
        bytes_per_token=moved / batch,
        flops_per_byte=batch * flops / moved,
    )


def _fit(kept: Sequence[Kept], setting: Setting, free: int) -> MemoryPrice:
    """The longest texts that a batch may have with its caches in `free` bytes, and the most texts of this context."""

    def size(tokens: int) -> int:
        return setting.batch * bytes_of(kept, tokens)

    longest: int | None = bisect_right(range(1, LONGEST), free, key=size)
    if longest == LONGEST - 1:
        longest = None
    of_one = bytes_of(kept, setting.context)
    return MemoryPrice(free, longest, free // of_one if of_one else MOST)


def _notes(shape: ModelShape, setting: Setting) -> list[str]:
    """What a reader must know of these numbers: lengths beyond the model's, experts, models without a cache."""
    notes = []
    if shape.positions is not None and setting.context > shape.positions:
        notes.append(
            f"context {setting.context:,} is beyond the {shape.positions:,} positions the model was made for"
        )
    if setting.batch > 1 and shape.experts:
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
    cache_bytes_per_token: float
    cache_bytes: int  # of the setting's context and batch
    # weights and that cache in the memory; None where no memory was given
    fits: bool | None
    # 0 where the weights alone exceed it; None without memory, or where nothing grows
    longest_context: int | None
    bytes_per_token: float  # moved to decode one


def variants(shape: ModelShape, setting: Setting) -> tuple[Variant, ...]:
    """The model with as many key/value heads as each divisor of its query heads: MHA first, then GQA, MQA last.

    A model with a latent, or whose layers differ, stands before them as it is.

    Raises:
        HeadwiseError: for a model that keeps no keys and values of heads.
    """
    counts = Counter(
        (layer.attention.n_kv_heads, layer.variant)
        for layer in shape.layers
        if layer.attention and layer.kind != "shared"
    )
    if not shape.generates or not counts:
        raise HeadwiseError(
            f"variants compare the keys and values of heads, and this {shape.family} keeps none; price a decoder"
        )
    (present, variant), *others = counts
    is_even = not others and variant != "MLA"
    choices = []
    if not is_even:
        choices.append(("as it is" if others else "MLA", present, shape, True))
    most = gcd(*(layer.attention.n_heads for layer in shape.layers if layer.attention))
    for n in range(most, 0, -1):
        if most % n == 0:
            name = variant_of(most, n).replace("GQA", f"GQA-{n}")
            is_present = is_even and n == present
            choices.append((name, n, shape.with_kv_heads(n), is_present))
    rows = []
    for name, n, changed, is_present in choices:
        bill = _priced(name, changed, setting)
        memory = bill.memory
        assert bill.decode is not None
        rows.append(
            Variant(
                name=name,
                n_kv_heads=n,
                present=is_present,
                parameters=changed.parameters,
                cache_bytes_per_token=bill.cache.bytes_per_token,
                cache_bytes=bill.cache.total_bytes,
                fits=bill.cache.total_bytes <= memory.free_bytes if memory else None,
                longest_context=memory.longest_context if memory else None,
                bytes_per_token=bill.decode.bytes_per_token,
            )
        )
    return tuple(rows)
