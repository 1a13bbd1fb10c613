"""The price of a model at one setting: the bill, filled in."""

from __future__ import annotations

from collections import Counter

from headwise.cost import formulas
from headwise.cost.bill import (
    CachePrice,
    DecodePrice,
    ForwardPrice,
    HeadPrice,
    LayerPrice,
    MemoryPrice,
    Parameters,
    Price,
    Setting,
)
from headwise.cost.shape import MAIN, VISION, Attention, Layer, ModelShape
from headwise.cost.units import BITS, bytes_of, number_format, read_bytes
from headwise.errors import HeadwiseError

DEFAULT_CONTEXT = 512  # of a model that sets no longest text, such as T5, which was trained on 512 tokens
DEFAULT_DTYPE = "bf16"  # where neither the caller nor the config names one
MOST = 2**40  # tokens or texts


def make_setting(
    shape: ModelShape,
    context: int | None = None,
    batch: int = 1,
    source: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    gpu_memory: str | int | None = None,
    bandwidth: str | int | None = None,
) -> Setting:
    """The setting with its defaults filled in: the model's own length and number format, and no limits."""
    context = context if context is not None else shape.positions or DEFAULT_CONTEXT
    for name, value in (("context", context), ("batch", batch), ("source", source)):
        if value is not None and not 1 <= value <= MOST:
            raise HeadwiseError(f"{name}={value} is outside 1 to {MOST:,}; give a number of {_counted(name)}")
    for name, given in (("bandwidth", bandwidth), ("cache-dtype", cache_dtype)):
        if given is not None and not shape.generates:
            said = f"is about decoding, and a {shape.family} encoder writes nothing; leave it out"
            raise HeadwiseError(f"{name}={given} {said}")
    weights = number_format(dtype or shape.dtype or DEFAULT_DTYPE)
    return Setting(
        context=context,
        source=_source(shape, source, context),
        batch=batch,
        dtype=weights,
        cache_dtype=number_format(cache_dtype) if cache_dtype else weights,
        gpu_memory=None if gpu_memory is None else read_bytes("gpu-memory", gpu_memory),
        bandwidth=None if bandwidth is None else read_bytes("bandwidth", bandwidth, per_second=True),
    )


def _source(shape: ModelShape, source: int | None, context: int) -> int | None:
    """How many tokens the encoder reads: what is given, its one length, else as many as the decoder."""
    if not shape.two_sided and source is not None:
        raise HeadwiseError(f"source={source} needs an encoder with a decoder, and a {shape.family} model is not one")
    if shape.source_positions is not None and source not in (None, shape.source_positions):
        raise HeadwiseError(f"source={source}: {shape.family} always reads {shape.source_positions}; leave it out")
    return (source or shape.source_positions or context) if shape.two_sided else None


def _counted(name: str) -> str:
    return "texts" if name == "batch" else "tokens"


def price_shape(name: str, shape: ModelShape, setting: Setting) -> Price:
    """Everything that `headwise cost` says about one model. Raises HeadwiseError when the weights exceed the memory."""
    weights = bytes_of(shape.parameters, setting.dtype)
    return Price(
        model=name,
        family=shape.family,
        setting=setting,
        parameters=Parameters(shape.parameters, shape.active_parameters, _parts(shape)),
        weight_bytes=weights,
        layers=tuple(_layer(layer, shape, setting) for layer in shape.layers),
        cache=_cache(shape, setting),
        prefill=_prefill(shape, setting),
        decode=_decode(shape, setting) if shape.generates else None,
        memory=_memory(shape, setting, weights),
        notes=(*shape.notes, *_notes(shape, setting)),
    )


def _parts(shape: ModelShape) -> dict[str, int]:
    parts: Counter[str] = Counter()
    for piece in shape.pieces:
        parts["vision" if piece.stack == VISION else piece.part] += piece.parameters
    for layer in shape.layers:
        if layer.stack == VISION:
            parts["vision"] += layer.parameters
            continue
        parts["attention"] += layer.attention.parameters
        parts["feed-forward"] += layer.feed_forward.parameters
        parts["norms"] += layer.norm_parameters
        if layer.cross:
            parts["cross attention"] += layer.cross.parameters
    order = ("embeddings", "stem", "attention", "cross attention", "feed-forward", "norms", "head", "vision")
    return {part: parts[part] for part in order if part in parts}


def _layer(layer: Layer, shape: ModelShape, setting: Setting) -> LayerPrice:
    forward = layer.feed_forward
    return LayerPrice(
        name=layer.name,
        parameters=layer.parameters,
        active_parameters=layer.active_parameters,
        attention=_heads(layer.attention, layer.stack == MAIN and shape.generates, setting),
        cross=_heads(layer.cross, True, setting) if layer.cross else None,
        feed_forward_parameters=forward.parameters,
        norm_parameters=layer.norm_parameters,
        experts=(forward.n_active, forward.n_experts) if forward.n_experts else None,
    )


def _heads(attention: Attention, cached: bool, setting: Setting) -> HeadPrice:
    return HeadPrice(
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        window=attention.window,
        sink=attention.sink,
        latent=attention.cache_values if attention.latent else None,
        query_head_parameters=attention.query_head_parameters,
        kv_head_parameters=attention.kv_head_parameters,
        shared_parameters=attention.shared_parameters,
        parameters=attention.parameters,
        cache_bytes_per_token=bytes_of(attention.cache_values, setting.cache_dtype) if cached else 0,
    )


def _cache(shape: ModelShape, setting: Setting) -> CachePrice:
    per_token = sum(attention.cache_values for attention in shape.cached)
    beyond = sum(attention.cache_values for attention in shape.cached if attention.window is None)
    per_source = sum(attention.cache_values for attention in shape.crossed)
    text = formulas.cache_values(shape, setting.context, 0) * setting.batch
    source = per_source * (setting.source or 0) * setting.batch
    sizes = (bytes_of(n, setting.cache_dtype) for n in (per_token, beyond, per_source, text, source, text + source))
    return CachePrice(*sizes)


def _prefill(shape: ModelShape, setting: Setting) -> ForwardPrice:
    flops = formulas.forward_flops(shape, setting.context, setting.source or 0)
    return ForwardPrice(*(setting.batch * flops[name] for name in ("layers", "attention", "outside", "total", "dense")))


def _decode(shape: ModelShape, setting: Setting) -> DecodePrice:
    source, batch = setting.source or 0, setting.batch
    flops = formulas.decode_flops(shape, setting.context, source) * batch
    weights = bytes_of(round(formulas.decode_parameters(shape, batch)), setting.dtype)
    cache = _cache(shape, setting).total_bytes
    moved = weights + cache
    return DecodePrice(
        flops=flops,
        expanded_flops=formulas.decode_flops(shape, setting.context, source, expand=True) * batch,
        weight_bytes=weights,
        cache_bytes=cache,
        bytes_per_token=moved / batch,
        flops_per_byte=flops / moved,
        tokens_per_second=None if setting.bandwidth is None else setting.bandwidth * batch / moved,
    )


def _memory(shape: ModelShape, setting: Setting, weights: int) -> MemoryPrice | None:
    if setting.gpu_memory is None:
        return None
    if weights > setting.gpu_memory:
        raise HeadwiseError(
            f"gpu-memory={setting.gpu_memory:,} bytes is less than the weights alone, {shape.parameters:,} in "
            f"{setting.dtype} = {weights:,} bytes; give more memory, or a smaller --dtype"
        )
    return fit(shape, setting, setting.gpu_memory - weights) if shape.generates else None


def fit(shape: ModelShape, setting: Setting, free: int) -> MemoryPrice:
    """What the caches of a batch may grow to in `free` bytes."""
    source = setting.source or 0
    values = free * 8 // BITS[setting.cache_dtype]
    one = formulas.cache_values(shape, setting.context, source)
    return MemoryPrice(
        free_bytes=free,
        longest_context=formulas.longest_context(shape, values // setting.batch, source),
        largest_batch=values // one,
    )


def _notes(shape: ModelShape, setting: Setting) -> list[str]:
    notes = []
    if shape.positions is not None and setting.context > shape.positions:
        notes.append(f"context {setting.context:,} is beyond the {shape.positions:,} positions the model was made for")
    if shape.source_positions is None and setting.source is not None and setting.source > (shape.positions or MOST):
        notes.append(f"source {setting.source:,} is beyond the {shape.positions:,} tokens the model was made for")
    if setting.batch > 1 and any(layer.feed_forward.n_experts for layer in shape.layers):
        notes.append(f"experts read for a batch of {setting.batch}: the mean, if every choice were as likely")
    if not shape.generates:
        notes.append("an encoder writes nothing: it keeps no cache, and every text is one forward pass")
        if setting.gpu_memory is not None:
            notes.append(
                "the weights fit in the memory; how many texts do depends on activations, which are not counted"
            )
    return notes
