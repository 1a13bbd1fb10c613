"""The same model with other key/value heads, side by side, and what the rules of thumb would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.cost import formulas
from headwise.cost.bill import Setting
from headwise.cost.pricing import fit
from headwise.cost.shape import ModelShape
from headwise.cost.units import bytes_of
from headwise.errors import HeadwiseError

NARROW, WIDE = 64, 128  # usual widths of a head


@dataclass(frozen=True)
class Variant:
    """One number of key/value heads. What a smaller one costs in quality no formula says: measure it."""

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
    attention = next(iter(shape.cached))
    rows = [_variant("MLA", attention.n_heads, True, shape, setting)] if attention.latent else []
    for n in _divisors(attention.n_heads):
        present = not attention.latent and n == attention.n_kv_heads
        rows.append(_variant(_name(n, attention.n_heads), n, present, shape.with_heads(n_kv_heads=n), setting))
    return tuple(rows)


def _variant(name: str, n_kv_heads: int, present: bool, shape: ModelShape, setting: Setting) -> Variant:
    weights = bytes_of(shape.parameters, setting.dtype)
    cache = bytes_of(_cache_values(shape, setting), setting.cache_dtype)
    free = None if setting.gpu_memory is None else setting.gpu_memory - weights
    read = bytes_of(round(formulas.decode_parameters(shape, setting.batch)), setting.dtype)
    return Variant(
        name=name,
        n_kv_heads=n_kv_heads,
        present=present,
        parameters=shape.parameters,
        weight_bytes=weights,
        cache_bytes_per_token=_per_token(shape, setting),
        cache_bytes=cache,
        fits=None if free is None else cache <= free,
        longest_context=None if free is None else 0 if free < 0 else fit(shape, setting, free).longest_context,
        bytes_per_token=(read + cache) / setting.batch,
        tokens_per_second=None if setting.bandwidth is None else setting.bandwidth * setting.batch / (read + cache),
    )


def _cache_values(shape: ModelShape, setting: Setting) -> int:
    return setting.batch * formulas.cache_values(shape, setting.context, setting.source or 0)


def _per_token(shape: ModelShape, setting: Setting) -> int:
    return bytes_of(sum(attention.cache_values for attention in shape.cached), setting.cache_dtype)


def _name(n_kv_heads: int, n_heads: int) -> str:
    return "MHA" if n_kv_heads == n_heads else "MQA" if n_kv_heads == 1 else f"GQA-{n_kv_heads}"


def _divisors(n: int) -> list[int]:
    """All of them, the largest first; up to the root alone, so that no number of heads takes long."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({n // d for d in small} | set(small), reverse=True)


@dataclass(frozen=True)
class Rule:
    """One guideline with the arithmetic that applies it."""

    name: str
    guideline: str
    arithmetic: str
    present: int
    advised: int


@dataclass(frozen=True)
class Choice:
    """What the courses' guidelines choose. Rules of thumb, from models of many sizes: none of them is a measurement."""

    rules: tuple[Rule, ...]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    present_cache_bytes_per_token: int
    cache_bytes_per_token: int
    fits: bool | None  # the advised weights and cache in the memory; None where no memory was given


def choose(shape: ModelShape, setting: Setting) -> Choice:
    """Width 64 to 128 a head, d_model / 64 heads, 8 key/value heads or h/8 to h/4; one only where memory forces it."""
    attention = shape.main_layers[0].attention
    width, width_rule = _choose_width(attention.head_dim)
    heads, heads_rule = _choose_heads(shape.d_model, width, attention.n_heads, attention.head_dim)
    sizes = {"n_heads": heads, "head_dim": width}
    if width != attention.head_dim:
        sizes["value_dim"] = width
    if attention.latent or not shape.generates:
        kept = "a latent is shared by all heads already" if attention.latent else "an encoder keeps no cache"
        kv, how = heads, f"{kept}: nothing to save"
        advised = shape
    else:
        kv, how = _choose_kv_heads(shape, setting, sizes)
        advised = shape.with_heads(**sizes, n_kv_heads=kv)
    guideline = "8, or h/8 to h/4; 1 only if memory forces it"
    return Choice(
        rules=(width_rule, heads_rule, Rule("key/value heads g", guideline, how, attention.n_kv_heads, kv)),
        n_heads=heads,
        n_kv_heads=kv,
        head_dim=width,
        present_cache_bytes_per_token=_per_token(shape, setting),
        cache_bytes_per_token=_per_token(advised, setting),
        fits=_fits(advised, setting),
    )


def _choose_width(present: int) -> tuple[int, Rule]:
    width = min(max(present, NARROW), WIDE)
    side = f"{present} lies within" if width == present else f"{present} lies outside; the nearest is {width}"
    return width, Rule("head width d", f"{NARROW} to {WIDE}", side, present, width)


def _choose_heads(d_model: int, width: int, present: int, present_width: int) -> tuple[int, Rule]:
    """The present number from d_model / 128 to d_model / 64, else what shares d_model out at this width."""
    low, high = d_model / WIDE, d_model / NARROW
    keep = low <= present <= high and width == present_width
    heads = present if keep else max(1, d_model // width)
    how = f"{d_model} / {NARROW} = {high:g}, {d_model} / {WIDE} = {low:g}"
    if not keep:
        how += f", and heads of {width} share {d_model} out among {heads}"
    return heads, Rule("query heads h", f"d_model / {NARROW}, fewer if wider", how, present, heads)


def _choose_kv_heads(shape: ModelShape, setting: Setting, sizes: dict[str, int]) -> tuple[int, str]:
    """The advised number and why."""
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
    """Do weights and cache fit in the memory? None where no memory was given."""
    if setting.gpu_memory is None:
        return None
    cache = bytes_of(_cache_values(shape, setting), setting.cache_dtype)
    return bytes_of(shape.parameters, setting.dtype) + cache <= setting.gpu_memory
