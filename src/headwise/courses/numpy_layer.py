"""Multi-head attention in NumPy alone: head by head, all heads in one product, and by einsum.

`MultiHeadAttention` has the names and the random weights of a course, and computes in float32. `attend_loop`,
`attend_batched` and `attend_einsum` are the attention itself: three ways to the same result, in the precision of their
inputs, also with fewer key/value heads than query heads. Suffixes name the axes: h query head, g key/value head,
t query position, s key position, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.spec import require_size

Array = NDArray[Any]
# scores (...,h,t,s), weights (...,h,t,s), outputs of the heads (...,h,t,d)
Steps = tuple[Array, Array, Array]


def attend_loop(
    q_htd: Array, k_gsd: Array, v_gsd: Array, mask_ts: Array | None
) -> Steps:
    """One head after another, each a small attention of its own; without a batch.

    `mask_ts` is added to the scores of each head, here and below: 0 allows, -inf forbids; None allows all.
    """
    # with groups of 3, query heads 0, 1 and 2 read key/value head 0
    group = len(q_htd) // len(k_gsd)
    scores = []
    weights = []
    heads = []
    for h in range(len(q_htd)):
        q = q_htd[h]
        k = k_gsd[h // group]
        v = v_gsd[h // group]
        head_scores = q @ k.T / math.sqrt(q.shape[1])
        if mask_ts is not None:
            head_scores = head_scores + mask_ts
        scores.append(head_scores)
        weights.append(softmax(head_scores))
        heads.append(weights[-1] @ v)
    return np.stack(scores), np.stack(weights), np.stack(heads)


def attend_batched(
    q_htd: Array, k_gsd: Array, v_gsd: Array, mask_ts: Array | None
) -> Steps:
    """All heads at once, and a batch before them: `@` multiplies the last two axes for each place of the others.

    K and V are repeated for the heads that share them.
    """
    group = q_htd.shape[-3] // k_gsd.shape[-3]
    if group > 1:
        k_gsd = k_gsd.repeat(group, axis=-3)
        v_gsd = v_gsd.repeat(group, axis=-3)
    scores = q_htd @ k_gsd.swapaxes(-1, -2) / math.sqrt(q_htd.shape[-1])
    if mask_ts is not None:
        scores = scores + mask_ts
    weights = softmax(scores)
    return scores, weights, weights @ v_gsd


def attend_einsum(
    q_htd: Array, k_gsd: Array, v_gsd: Array, mask_ts: Array | None
) -> Steps:
    """The same as sums over named axes. Axis r holds the query heads of one key/value head; K, V are not repeated."""
    *batch, H, T, d = q_htd.shape
    q_grtd = q_htd.reshape(*batch, k_gsd.shape[-3], -1, T, d)
    # `optimize` makes einsum use matrix products: ten times as fast for 8 heads and 128 tokens.
    scores = np.einsum("...grtd,...gsd->...grts", q_grtd, k_gsd, optimize=True)
    scores = scores / math.sqrt(d)
    if mask_ts is not None:
        scores = scores + mask_ts
    weights = softmax(scores)
    heads = np.einsum("...grts,...gsd->...grtd", weights, v_gsd, optimize=True)
    shape = (*batch, H, T, -1)  # g and r on one axis again, h; the last axis is s or d
    return scores.reshape(shape), weights.reshape(shape), heads.reshape(shape)


def softmax(x: Array) -> Array:
    """exp x / sum exp x along the last axis; a row of -inf, which may look at nothing, gives zeros."""
    top = x.max(axis=-1, keepdims=True)
    # Subtracting the row's maximum keeps exp from overflowing. In a row of -inf, 0 is subtracted, as -inf - -inf is
    # nan, and 1 divides, as the total is 0.
    powers = np.exp(x - np.where(top == -np.inf, 0, top))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def causal_mask(T: int) -> NDArray[np.float32]:
    """(T,T) float32, to be added to scores: 0 where key j stands at or before query i, -inf where it comes after.

    T  number of tokens, at least 1
    """
    require_size("T", T)
    return np.where(np.tri(T, dtype=bool), 0, -np.inf).astype(np.float32)


class MultiHeadAttention:
    """Four square matrices W_Q, W_K, W_V, W_O around `attend_batched`. (T,d_model) -> (T,d_model), float32.

    d_model   width of the tokens; each head has d_head = d_model / n_heads of it
    n_heads   must divide d_model; AssertionError where it does not, as in the course
    seed      of the weights: standard normal times 1/sqrt(d_model), drawn from `numpy.random.default_rng(seed)` in the
              order W_Q, W_K, W_V, W_O, each (d_model, d_model) and used as y = x @ W
    """

    def __init__(self, d_model: int, n_heads: int, seed: int = 0) -> None:
        require_size("d_model", d_model)
        require_size("n_heads", n_heads)
        assert d_model % n_heads == 0, (
            f"n_heads={n_heads} does not divide d_model={d_model}; pass a width that {n_heads} divides"
        )
        self.d_model = d_model
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        rng = np.random.default_rng(seed)
        # With 1/sqrt(d_model), x @ W has variance 1 where the features of x have.
        weights = rng.standard_normal((4, d_model, d_model)) / math.sqrt(d_model)
        self.W_Q, self.W_K, self.W_V, self.W_O = weights.astype(np.float32)

    def forward(self, x: Array, mask: Array | None = None) -> Array:
        """All heads at once. x (T,d_model) -> (T,d_model), float32.

        mask  (T,T), added to the scores before the softmax: 0 allows, -inf (or -1e9) forbids; None allows all.
              `causal_mask` makes the usual one
        """
        return self._forward(attend_batched, x, mask)

    __call__ = forward

    def forward_loop(self, x: Array, mask: Array | None = None) -> Array:
        """The same, head by head."""
        return self._forward(attend_loop, x, mask)

    def _forward(
        self, attend: Callable[..., Steps], x: Array, mask: Array | None
    ) -> Array:
        """The layer around `attend`, which is one of the three functions above."""
        x, mask = self._checked(x, mask)
        # (T,h*d) -> (h,T,d): head i owns the i-th slice of the width
        shape = (len(x), self.n_heads, self.d_head)
        q, k, v = (
            (x @ W).reshape(shape).swapaxes(0, 1)
            for W in (self.W_Q, self.W_K, self.W_V)
        )
        heads_htd = attend(q, k, v, mask)[-1]
        # (h,T,d) -> (T,h*d)
        joined = heads_htd.swapaxes(0, 1).reshape(len(x), self.d_model)
        return joined @ self.W_O

    def _checked(self, x: Array, mask: Array | None) -> tuple[Array, Array | None]:
        """Both in float32: one float64 among them would make everything after it float64.

        HeadwiseError where a shape does not fit, or the mask is bool.
        """
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != self.d_model or len(x) == 0:
            raise HeadwiseError(
                f"x has shape {x.shape}; this layer takes (tokens, d_model) with d_model={self.d_model}"
            )
        x = x.astype(np.float32, copy=False)
        if mask is None:
            return x, None
        mask = np.asarray(mask)
        # added to the scores it would be 1 and 0, and forbid nothing
        if mask.dtype == np.bool_:
            raise HeadwiseError(
                "mask is bool, and this layer adds its mask to the scores; "
                "pass causal_mask(tokens), or numpy.where(allowed, 0, -numpy.inf), with True = may attend"
            )
        if mask.shape != (len(x), len(x)):
            raise HeadwiseError(
                f"mask has shape {mask.shape}; {len(x)} tokens need {(len(x), len(x))}"
            )
        return x, mask.astype(np.float32, copy=False)
