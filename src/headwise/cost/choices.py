"""The same model with other key/value heads, side by side, and what the rules of thumb would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.cost.pricing import Setting, bytes_of, cache_price, decode_price, fit
from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError
from headwise.words import Note

NARROW, WIDE = 64, 128  # usual widths of a head
FEWEST = 4  # heads of a small model
# The six models that courses compare, in their order, and the two that they name for multi-query attention: presets.
TABLE = ("bert-base", "bert-large", "gpt2", "gpt3", "llama-2-70b", "mistral-7b", "palm-540b", "falcon-7b")
ATTENTION = "Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2"


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
        kv, how_kv = heads, Note.of("price.latent_is_shared" if spec.latent_dim else "price.encoder_keeps_none")
        advised = shape
    else:
        kv, how_kv = _choose_kv_heads(shape, setting, sizes)
        advised = shape.with_heads(**sizes, n_kv_heads=kv)
    share = f"{shape.d_model} / {heads} = {width}"
    rules = (
        Rule("query heads", Note.of("price.of_heads"), Note.of("price.by_courses"), how, spec.n_heads, heads),
        Rule("head width", "d_model / heads", ATTENTION, share, spec.head_dim, width),
        Rule("key/value heads", Note.of("price.of_kv_heads"), Note.of("price.by_papers"), how_kv, spec.n_kv_heads, kv),
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


def _choose_heads(d_model: int, present: int, present_width: int) -> tuple[int, Note]:
    divisors = _divisors(d_model)
    if d_model < FEWEST * NARROW:
        heads = max(n for n in divisors if n <= FEWEST)
        left = f"{d_model / NARROW:g}"
        return heads, Note.of("price.would_leave", narrow=NARROW, left=left, heads=heads, d_model=d_model)
    span = f"{d_model} / {NARROW} = {d_model / NARROW:g}, {d_model} / {WIDE} = {d_model / WIDE:g}"
    if present * present_width == d_model and NARROW <= present_width <= WIDE:
        return present, Note.of("price.lies_between", span=span, heads=present)
    wanted = min(max(present_width, NARROW), WIDE)
    # Of the widths in the usual range, or else of all, the one that is nearest.
    heads = min(divisors, key=lambda n: (not NARROW <= d_model / n <= WIDE, abs(d_model / n - wanted)))
    return heads, Note.of("price.divides", span=span, heads=heads, d_model=d_model)


def _choose_kv_heads(shape: ModelShape, setting: Setting, sizes: dict[str, int]) -> tuple[int, Note]:
    heads = sizes["n_heads"]
    between = [n for n in _divisors(heads) if n > 1 and heads / 8 <= n <= heads / 4]
    if heads % 8 == 0 and heads > 8:
        start, how = 8, Note.of("price.eight_divides", heads=heads)
    elif between:
        start = between[0]
        span = f"h / 4 = {heads / 4:g}, h / 8 = {heads / 8:g}"
        how = Note.of("price.within", span=span, start=start, heads=heads)
    else:
        start, how = heads, Note.of("price.too_few", heads=heads)
    if setting.gpu_memory is None:
        return start, how
    for n in _divisors(heads):
        if n > start or not _fits(shape.with_heads(**sizes, n_kv_heads=n), setting):
            continue
        return n, how if n == start else Note.of("price.forced", how=how, n=n)
    return 1, Note.of("price.not_even_one", how=how)


def _fits(shape: ModelShape, setting: Setting) -> bool | None:
    """None where no memory was given."""
    if setting.gpu_memory is None:
        return None
    return bytes_of(shape.parameters, setting.dtype) + cache_price(shape, setting).total_bytes <= setting.gpu_memory
