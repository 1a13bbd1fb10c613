"""What a price says, as plain data; `dataclasses.asdict` gives the JSON of `headwise cost`.

All sizes are exact counts. FLOPs and bytes follow the conventions at the top of `formulas.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What a price depends on besides the model."""

    context: int  # tokens of each text, those to come included
    source: int | None  # tokens that an encoder reads beside it; None without one
    batch: int  # texts side by side
    dtype: str  # of the weights
    cache_dtype: str
    gpu_memory: int | None  # bytes
    bandwidth: int | None  # bytes a second


@dataclass(frozen=True)
class HeadPrice:
    """One attention of a layer. Removing a query head saves what it adds; the cache shrinks with key/value heads."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    sink: bool
    latent: int | None  # numbers that a squeezed cache keeps for all heads together
    query_head_parameters: int
    kv_head_parameters: int
    shared_parameters: int
    parameters: int
    cache_bytes_per_token: int


@dataclass(frozen=True)
class LayerPrice:
    name: str
    parameters: int
    active_parameters: int
    attention: HeadPrice
    cross: HeadPrice | None
    feed_forward_parameters: int
    norm_parameters: int
    experts: tuple[int, int] | None  # how many a token is sent to, of how many


@dataclass(frozen=True)
class Parameters:
    """`active` is what one token meets: no experts that it is not sent to, and no tables in which it reads a row."""

    total: int
    active: int
    parts: dict[str, int]


@dataclass(frozen=True)
class CachePrice:
    """Bytes that wait between steps. A windowed layer keeps the last min(context, window) tokens."""

    bytes_per_token: int  # what one more token adds while no window is full
    bytes_per_token_beyond_windows: int  # what it adds once all windows are full
    bytes_per_source_token: int  # cross keys and values of one token that the encoder read
    text_bytes: int  # of the whole batch
    source_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ForwardPrice:
    """FLOPs to read the batch once. `dense_flops` is what a kernel spends that computes every pair and every logit."""

    layer_flops: int
    attention_flops: int
    outside_flops: int
    total_flops: int
    dense_flops: int


@dataclass(frozen=True)
class DecodePrice:
    """One step that gives every text of the batch a token, the last of its context."""

    flops: int
    expanded_flops: int  # of a step that turns a latent cache into keys and values; else the same
    weight_bytes: int  # read once for the batch
    cache_bytes: int
    bytes_per_token: float  # of both, shared by the batch
    flops_per_byte: float  # the arithmetic intensity
    tokens_per_second: float | None  # at most, if the bandwidth is all that limits; of the batch together


@dataclass(frozen=True)
class MemoryPrice:
    """What fits beside the weights. Activations and the runtime's own memory come on top."""

    free_bytes: int
    longest_context: int | None  # at this batch; None: the cache stops growing
    largest_batch: int  # at this context


@dataclass(frozen=True)
class Price:
    model: str
    family: str
    setting: Setting
    parameters: Parameters
    weight_bytes: int
    layers: tuple[LayerPrice, ...]
    cache: CachePrice
    prefill: ForwardPrice
    decode: DecodePrice | None  # None: an encoder writes nothing
    memory: MemoryPrice | None  # None where no memory was given, or there is no cache to fill it
    notes: tuple[str, ...]
