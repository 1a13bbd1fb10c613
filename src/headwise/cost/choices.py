"""The same model with other key/value heads, side by side, and what the rules of thumb would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.cost.pricing import Setting, bytes_of, cache_price, decode_price, fit
from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError

NARROW, WIDE = 64, 128  # usual widths of a head
FEWEST = 4  # heads of a small model
# The six models that courses compare, in their order, and the two that they name for multi-query attention: presets.
TABLE = ("bert-base", "bert-large", "gpt2", "gpt3", "llama-2-70b", "mistral-7b", "palm-540b", "falcon-7b")
RULE_OF_HEADS = "a divisor of d_model that makes heads 64 to 128 wide; 4 narrower heads in a model below 256"
RULE_OF_KV_HEADS = "8, or h/8 to h/4; 1 only if memory forces it"
ATTENTION = "Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2"
SIZES = "the models that courses compare"
SHARING = "Ainslie et al. 2023, arXiv 2305.13245; for 1 Shazeer 2019, arXiv 1911.02150"


@dataclass(frozen=True)
class Variant:
    """One number of key/value heads; what a smaller one costs in quality is for measuring."""

    name: str  # MHA, GQA-8, MQA; MLA for a latent
    n_kv_heads: int
    present: bool  # is it the model as it is?
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int  # of the setting's context and batch
    fits: bool | None  # weights and that cache in the memory; None where no memory was given
    longest_context: int | None  # 0 where the weights alone exceed it; None without memory, or where nothing grows
    bytes_per_token: float  # moved to decode one
    tokens_per_second: float | None


def variants(shape: ModelShape, setting: Setting) -> tuple[Variant, ...]:
    """MHA, GQA at each divisor of the query heads, MQA; a latent first. Encoders keep no cache and are refused."""
    if not shape.generates:
        raise HeadwiseError(f"variants compare caches, and a {shape.family} encoder keeps none; price a decoder")
    spec = next(iter(shape.cached)).spec
    rows = [_variant(shape, setting, True)] if spec.latent_dim else []
    for n in _divisors(spec.n_heads):
        present = not spec.latent_dim and n == spec.n_kv_heads
        rows.append(_variant(shape.with_heads(n_kv_heads=n), setting, present))
    return tuple(rows)


def _variant(shape: ModelShape, setting: Setting, present: bool) -> Variant:
    spec = next(iter(shape.cached)).spec
    weights = bytes_of(shape.parameters, setting.dtype)
    cache, decode = cache_price(shape, setting), decode_price(shape, setting)
    longest = None
    if setting.gpu_memory is not None:
        free = setting.gpu_memory - weights
        longest = 0 if free < 0 else fit(shape, setting, free).longest_context
    return Variant(
        name=f"GQA-{spec.n_kv_heads}" if spec.variant == "GQA" else spec.variant,
        n_kv_heads=spec.n_kv_heads,
        present=present,
        parameters=shape.parameters,
        weight_bytes=weights,
        cache_bytes_per_token=cache.bytes_per_token,
        cache_bytes=cache.total_bytes,
        fits=_fits(shape, setting),
        longest_context=longest,
        bytes_per_token=decode.bytes_per_token,
        tokens_per_second=decode.tokens_per_second,
    )


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({n // d for d in small} | set(small), reverse=True)


@dataclass(frozen=True)
class Rule:
    """One guideline."""

    name: str
    guideline: str
    source: str
    arithmetic: str
    present: int
    advised: int


@dataclass(frozen=True)
class Choice:
    """What the guidelines choose."""

    rules: tuple[Rule, ...]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    present_cache_bytes_per_token: int
    cache_bytes_per_token: int
    fits: bool | None  # the advised weights and cache in the memory; None where no memory was given


def choose(shape: ModelShape, setting: Setting) -> Choice:
    """The guidelines of courses, applied to one width: rules of thumb, none of them a measurement.

    In a model narrower than 256, 4 heads that are narrower than 64 (microgpt: 16 = 4 x 4; Mini-GPT: 64 = 4 x 16).
    """
    spec = shape.main_layers[0].attention.spec
    heads, how = _choose_heads(shape.d_model, spec.n_heads, spec.head_dim)
    width = shape.d_model // heads
    sizes = {"n_heads": heads, "head_dim": width}
    if width != spec.head_dim:
        sizes["value_dim"] = width
    if spec.latent_dim or not shape.generates:
        kept = "a latent is shared by all heads already" if spec.latent_dim else "an encoder keeps no cache"
        kv, how_kv = heads, f"{kept}: nothing to save"
        advised = shape
    else:
        kv, how_kv = _choose_kv_heads(shape, setting, sizes)
        advised = shape.with_heads(**sizes, n_kv_heads=kv)
    share = f"{shape.d_model} / {heads} = {width}"
    rules = (
        Rule("query heads", RULE_OF_HEADS, SIZES, how, spec.n_heads, heads),
        Rule("head width", "d_model / heads", ATTENTION, share, spec.head_dim, width),
        Rule("key/value heads", RULE_OF_KV_HEADS, SHARING, how_kv, spec.n_kv_heads, kv),
    )
    return Choice(
        rules=rules,
        n_heads=heads,
        n_kv_heads=kv,
        head_dim=width,
        present_cache_bytes_per_token=cache_price(shape, setting).bytes_per_token,
        cache_bytes_per_token=cache_price(advised, setting).bytes_per_token,
        fits=_fits(advised, setting),
    )


def _choose_heads(d_model: int, present: int, present_width: int) -> tuple[int, str]:
    divisors = _divisors(d_model)
    if d_model < FEWEST * NARROW:
        heads = max(n for n in divisors if n <= FEWEST)
        return heads, f"heads of {NARROW} would leave {d_model / NARROW:g}; {heads} divides {d_model}"
    span = f"{d_model} / {NARROW} = {d_model / NARROW:g}, {d_model} / {WIDE} = {d_model / WIDE:g}"
    if present * present_width == d_model and NARROW <= present_width <= WIDE:
        return present, f"{span}: {present} lies between"
    width = min(max(present_width, NARROW), WIDE)
    heads = min(divisors, key=lambda n: (not NARROW <= d_model / n <= WIDE, abs(d_model / n - width)))
    return heads, f"{span}, and {heads} divides {d_model}"


def _choose_kv_heads(shape: ModelShape, setting: Setting, sizes: dict[str, int]) -> tuple[int, str]:
    heads = sizes["n_heads"]
    within = [n for n in _divisors(heads) if n > 1 and heads <= 8 * n and 4 * n <= heads]
    if heads % 8 == 0 and heads > 8:
        start, how = 8, f"8 divides h = {heads}"
    elif within:
        start, how = within[0], f"h / 4 = {heads / 4:g}, h / 8 = {heads / 8:g}: {within[0]} divides h = {heads}"
    else:
        start, how = heads, f"h = {heads} is too few to share: no divisor above 1 lies in h/8 to h/4"
    if setting.gpu_memory is None:
        return start, how
    for n in _divisors(heads):
        if n <= start and _fits(shape.with_heads(**sizes, n_kv_heads=n), setting):
            return n, how if n == start else f"{how}, but memory forces {n}"
    return 1, f"{how}, but not even 1 fits in the memory at this context and batch"


def _fits(shape: ModelShape, setting: Setting) -> bool | None:
    """None where no memory was given."""
    if setting.gpu_memory is None:
        return None
    return bytes_of(shape.parameters, setting.dtype) + cache_price(shape, setting).total_bytes <= setting.gpu_memory
