"""The NumPy backend: attention in NumPy, whole tensors at a time. Needs no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.masks import BroadcastGrid, Mask, resolve
from headwise.records import Trace
from headwise.spec import (
    Options,
    Sizes,
    by_group,
    check_floats,
    check_per_head,
    check_scores,
    check_shapes,
    is_adjacent,
    living_keys,
    resolve_kv_index,
)

Array = NDArray[Any]


def attend(q: Array, k: Array, v: Array, options: Options) -> Array:
    """Multi-head attention of NumPy arrays; see `headwise.attend`."""
    return _steps(q, k, v, options, keep=False).out


def trace(q: Array, k: Array, v: Array, options: Options) -> Trace[Array]:
    """As `attend`, with every step kept. Steps are float32 for float16 and float32 inputs, else float64."""
    return _steps(q, k, v, options, keep=True)


def _steps(q: Array, k: Array, v: Array, options: Options, keep: bool) -> Trace[Array]:
    """All steps. Without `keep` the weights are written over the scores, and only `out` is to be read."""
    if options.dropout:
        raise HeadwiseError(
            f"dropout={options.dropout} on NumPy arrays: dropout needs the torch backend; pass torch tensors"
        )
    sizes = check_shapes(q.shape, k.shape, v.shape)
    check_scores(options.scale, options.softcap)
    check_floats(q, k, v, ".astype(numpy.float32)")
    # float16 is computed in float32; wider ones stay as they are
    dtype = np.promote_types(q.dtype, np.float32)
    sink = _per_head("sink", options.sink, sizes.H, dtype)
    gate = _per_head("gate", options.gate, sizes.H, dtype)
    index = resolve_kv_index(sizes.H, sizes.G, options.kv_index)
    allowed, bias = _masks(options.mask, sizes, dtype)

    # before k and v are repeated for query heads
    if allowed is not None:
        axes = (1,) * (4 - allowed.ndim)
        alive = living_keys(
            allowed.reshape(*axes, *allowed.shape), index, sizes, np.stack
        )
        if not alive.all():
            k = np.where(alive, k, 0)
            v = np.where(alive, v, 0)
    k = k.astype(dtype, copy=False)
    v = v.astype(dtype, copy=False)
    # `by_group` takes equal groups of adjacent heads; in any other order each query head gets its own copy of k and v.
    if not is_adjacent(index, sizes.H, sizes.G):
        k = k[:, index]
        v = v[:, index]

    # `dtype.type`: a scale or softcap that is a float64 of NumPy would widen the scores.
    scale = 1 / math.sqrt(sizes.D) if options.scale is None else float(options.scale)
    scores = by_group(
        q.astype(dtype, copy=False) * dtype.type(scale), k.swapaxes(-1, -2)
    )
    capped = scores
    if options.softcap is not None:
        softcap = dtype.type(options.softcap)
        capped = np.tanh(scores / softcap) * softcap
    masked = capped if bias is None else capped + bias
    if allowed is not None:
        masked = np.where(allowed, masked, dtype.type(-np.inf))
    # `masked` may be the same array as `scores`: writing over it changes both
    weights, lse = _softmax(masked, sink, None if keep else masked)
    out = by_group(weights, v)
    if gate is not None:
        out = out * gate
    return Trace(scores, capped, masked, weights, lse, out.astype(q.dtype, copy=False))


def _softmax(
    masked_bhts: Array, sink: Array | None, out: Array | None
) -> tuple[Array, Array]:
    """Weights (B,H,T,S), in `out` if given, and the log-sum-exp of scores and sink (B,H,T).

    A row of -inf gives zeros and -inf. The sink is one more logit of a row, whose own weight is left out.
    """
    # `initial`: there may be no keys, S = 0
    top = masked_bhts.max(-1, keepdims=True, initial=-np.inf)
    empty = top == -np.inf  # rows that may attend nothing
    if sink is not None:
        sink = np.minimum(sink, np.finfo(sink.dtype).max)  # inf - inf would be NaN
        top = np.maximum(top, sink)
    top = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
    weights = np.subtract(masked_bhts, top, out=out)
    np.exp(weights, out=weights)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    # the weights of an empty row are 0 already; 1 avoids 0 / 0
    total = np.where(empty, 1, total)
    weights /= total
    lse = np.where(empty, -np.inf, np.log(total) + top)
    return weights, lse[..., 0]


def _masks(
    mask: Mask | None, sizes: Sizes, dtype: np.dtype[Any]
) -> tuple[Array | None, Array | None]:
    """Who may attend (bool) and what is added, both broadcastable to (B,H,T,S), or None."""
    if mask is None:
        return None, None
    grid = BroadcastGrid((sizes.B, sizes.H, sizes.T, sizes.S), np.asarray, np.arange)
    mask.check(grid)

    def narrowed(bias: Array) -> Array:
        # A float64 such as -1e300 becomes -inf as float32, with a warning: that key may not be attended.
        with np.errstate(over="ignore"):
            return bias.astype(dtype, copy=False)

    allowed, bias = resolve(mask.parts(), grid, np.where, narrowed)
    if allowed is not None and allowed.all():
        allowed = None  # nothing is forbidden
    # `resolve` looks for -inf in a narrowed copy and returns the bias as it was; float64 would widen the scores.
    if bias is not None:
        bias = narrowed(bias)
    return allowed, bias


def _per_head(
    name: str, values: Any, n_heads: int, dtype: np.dtype[Any]
) -> Array | None:
    """sink or gate as (H,1,1), in the working dtype."""
    if values is None:
        return None
    array = np.asarray(values, dtype)
    check_per_head(name, array.shape, n_heads)
    return array.reshape(n_heads, 1, 1)
