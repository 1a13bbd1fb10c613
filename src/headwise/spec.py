"""What an attention layer is, as one frozen value, and the conventions that every backend keeps.

Order of operations, decided once:

    project (+ bias) -> qk-norm -> RoPE -> scores q.k * scale -> softcap c*tanh(s/c) -> bias and mask -> sink logit
    -> softmax in float32 or wider -> dropout -> times V -> gate -> join heads -> W_O (+ bias)

- A row that may attend nothing gives output 0, weights 0, gradient 0 and lse -inf, on every path. A sink changes
  nothing about that.
- A key that no query may attend is never read: NaN there cannot leak. NaN in a query that may attend something makes
  its row of the output NaN.
- A sink of -inf takes nothing; one of +inf takes everything: it counts as the largest number of the dtype.
- Causal is a meaning, never a hint: a cache changes speed, never the answer.
- Nothing is dropped: every argument on every path is honoured, or refused with an error that names both.
- The output's dtype is the input's.

Axis letters: b batch, t query position, s key position, c model width, h query head, g key/value head,
r query heads per key/value head, d head width, e value width, f feed-forward, v vocabulary, n layer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from headwise.errors import HeadwiseError
from headwise.masks import Mask, bare_mask_error, bounds
from headwise.positions import RoPE
from headwise.shapes import shape_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# Each size with the one that it takes its default from. In this order they are filled in, so that what a size follows
# is known before; `_usual` has those that are more than a copy.
SIZES = {
    "n_kv_heads": "n_heads",
    "kv_index": "n_kv_heads",
    "head_dim": "d_model",
    "value_dim": "head_dim",
    "d_in": "d_model",
    "d_context": "d_in",
    "d_values": "d_context",
    "d_out": "d_model",
}
# The default of a size: None. Typed Any, as the fields are declared int, which they are once they are filled in.
USUAL: Any = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSpec:
    """Every field of one attention layer; sizes left as None are filled in, so that all of them can be read.

    Attributes:
        d_model: width that sets the defaults below
        n_heads: query heads h
        n_kv_heads: key/value heads g, a divisor of n_heads; default n_heads (MHA), 1 is MQA, between is GQA
        kv_index: kv_index[h] is the key/value head that query head h reads; default h // (n_heads / n_kv_heads).
            Where it is passed, n_kv_heads need not divide n_heads
        head_dim: query and key width d of one head; default d_model / n_heads
        value_dim: value width e of one head; default head_dim
        d_in: width of x; default d_model
        d_context: width of the context of cross attention, which keys are made of; default d_in
        d_values: width of what values are made of; default d_context
        d_out: width of the result; default d_model, or n_heads * value_dim without output projection
        q_bias: has W_Q a bias?
        kv_bias: have W_K and W_V biases?
        out_bias: has W_O a bias?
        out_proj: is there a W_O?
        mask: a mask that always holds, such as Causal()
        rope: rotary positions, or None
        qk_norm: RMSNorm with gain over each head's query and key, before RoPE (as in Qwen3)
        qk_norm_eps: added to the mean square in that norm
        scale: factor of q.k; None is 1/sqrt(head_dim)
        softcap: c of c*tanh(s/c) on the scores (Gemma 2), or None
        sink: one learned logit per head that takes a share of the softmax (gpt-oss)
        dropout: probability of dropping an attention weight while training
    """

    d_model: int
    n_heads: int
    n_kv_heads: int = USUAL
    kv_index: tuple[int, ...] = USUAL
    head_dim: int = USUAL
    value_dim: int = USUAL
    d_in: int = USUAL
    d_context: int = USUAL
    d_values: int = USUAL
    d_out: int = USUAL
    q_bias: bool = False
    kv_bias: bool = False
    out_bias: bool = False
    out_proj: bool = True
    mask: Mask | None = None
    rope: RoPE | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    scale: float | None = None
    softcap: float | None = None
    sink: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rope is not None and not isinstance(self.rope, RoPE):
            raise HeadwiseError(f"rope={self.rope!r} must be a RoPE, such as RoPE()")
        # The way around a frozen dataclass, which refuses self.rope = ...
        sizes = vars(self)
        for name in ("d_model", "n_heads"):
            sizes[name] = require_size(name, sizes[name])
        for name in SIZES:
            if sizes[name] is None:
                sizes[name] = self._usual(name)
            if name == "kv_index":
                heads = self.n_heads, self.n_kv_heads
                sizes[name] = resolve_kv_index(*heads, sizes[name])
            else:
                sizes[name] = require_size(name, sizes[name])
        self._check_options()

    def _usual(self, name: str) -> int | tuple[int, ...]:
        """What a size is where it is left as None; it follows from the sizes before it."""
        if name == "kv_index":
            if self.n_heads % self.n_kv_heads:
                divisors = ", ".join(
                    str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0
                )
                raise HeadwiseError(
                    f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; pass one of {divisors}"
                )
            return resolve_kv_index(self.n_heads, self.n_kv_heads, None)
        if name == "head_dim":
            if self.d_model % self.n_heads:
                raise HeadwiseError(
                    f"n_heads={self.n_heads} does not divide d_model={self.d_model}; pass head_dim=, or a "
                    f"width that {self.n_heads} divides"
                )
            return self.d_model // self.n_heads
        if name == "d_out" and not self.out_proj:
            return self.joined_dim
        size: int = getattr(self, SIZES[name])
        return size

    def _check_options(self) -> None:
        if not self.out_proj and self.d_out != self.joined_dim:
            raise HeadwiseError(
                f"d_out={self.d_out} needs an output projection: without one the heads join to "
                f"n_heads * value_dim = {self.joined_dim}; pass out_proj=True, or leave d_out out"
            )
        if self.out_bias and not self.out_proj:
            raise HeadwiseError(
                "out_bias=True needs out_proj=True: there is no projection to carry the bias"
            )
        if self.rope and (self.rope.dim or 0) > self.head_dim:
            raise HeadwiseError(
                f"rope dim={self.rope.dim} exceeds head_dim={self.head_dim}"
            )
        # RoPE itself refuses a `dim` that is odd
        if self.rope and (self.rope.dim or self.head_dim) % 2:
            raise HeadwiseError(
                f"rope turns features in pairs, and head_dim={self.head_dim} is odd; pass RoPE(dim=)"
            )
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise bare_mask_error(self.mask)
        require_number("qk_norm_eps", self.qk_norm_eps)
        if not self.qk_norm_eps >= 0:  # not `< 0`, as NaN is refused, too
            raise HeadwiseError(
                f"qk_norm_eps={self.qk_norm_eps} must be at least 0; 1e-6 is usual"
            )
        check_scores(self.scale, self.softcap)
        check_dropout(self.dropout)

    def _is_usual(self, name: str, value: Any) -> bool:
        """Is this value of a field the one that it has when it is left out?"""
        if name not in SIZES:
            return bool(value == getattr(type(self), name, None))
        try:
            return bool(value == self._usual(name))
        except HeadwiseError:  # no usual one: n_heads does not divide
            return False

    def __repr__(self) -> str:
        """The fields without a default, and those that are not as they would be if they were left out."""
        chosen = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if not self._is_usual(name, value)
        ]
        return f"{type(self).__name__}({', '.join(chosen)})"

    @property
    def q_dim(self) -> int:
        """Width of all queries together, h * d."""
        return self.n_heads * self.head_dim

    @property
    def k_dim(self) -> int:
        """Width of all keys together, g * d."""
        return self.n_kv_heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of all values together, g * e."""
        return self.n_kv_heads * self.value_dim

    @property
    def joined_dim(self) -> int:
        """Width of the joined heads, h * e, which W_O reads."""
        return self.n_heads * self.value_dim

    @property
    def variant(self) -> str:
        """What the field calls it: MHA, GQA or MQA."""
        return variant_of(self.n_heads, self.n_kv_heads)

    @property
    def q_weights(self) -> int:
        """Matrix entries that a token meets to become queries."""
        return self.d_in * self.q_dim

    @property
    def kv_weights(self) -> int:
        """Matrix entries that a token meets to become keys and values."""
        return self.d_context * self.k_dim + self.d_values * self.v_dim

    @property
    def o_weights(self) -> int:
        """Matrix entries that joined heads meet on their way out."""
        # a flag counts as 0 or 1, here and below
        return self.out_proj * self.joined_dim * self.d_out

    @property
    def query_head_parameters(self) -> int:
        """What one query head adds: its rows of W_Q, its columns of W_O, its bias and sink."""
        return (
            (self.d_in + self.q_bias) * self.head_dim
            + self.out_proj * self.value_dim * self.d_out
            + self.sink
        )

    @property
    def kv_head_parameters(self) -> int:
        """What one key/value head adds: its rows of W_K and W_V with their biases."""
        weights = self.d_context * self.head_dim + self.d_values * self.value_dim
        return weights + self.kv_bias * (self.head_dim + self.value_dim)

    @property
    def shared_parameters(self) -> int:
        """What belongs to no head: the bias of W_O, and the gains of qk-norm."""
        # one gain of queries, one of keys
        return self.out_bias * self.d_out + self.qk_norm * 2 * self.head_dim

    @property
    def n_parameters(self) -> int:
        """Number of weights of the layer, biases, norms and sinks included."""
        heads = (
            self.n_heads * self.query_head_parameters
            + self.n_kv_heads * self.kv_head_parameters
        )
        return heads + self.shared_parameters

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that a cache keeps for one token of one document: g * (d + e)."""
        return self.k_dim + self.v_dim

    @property
    def causal(self) -> bool:
        """Does its mask end at the query itself?"""
        return bounds(self.mask)[1] == 0

    @property
    def window(self) -> int | None:
        """Keys that a causal query sees, its own counted; None: all before it."""
        low, _ = bounds(self.mask)
        # -low keys before the query, and its own
        return 1 - low if self.causal and low is not None else None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated anew; other sizes stay as they are."""
        fields = dict(vars(self))
        if self._is_usual("kv_index", self.kv_index):  # it follows the changes
            fields["kv_index"] = None
        return type(self)(**{**fields, **changes})


@dataclass(frozen=True, kw_only=True, repr=False)
class LatentSpec(AttentionSpec):
    """Multi-head latent attention (MLA): DeepSeek-V2, arXiv 2405.04434, section 2.1. Every head has its own keys.

    Attributes:
        latent_dim: width of the one vector a token from which every head makes its keys and values
        rope_dim: the last features of queries and keys, which carry positions; one key's for all heads
        q_latent_dim: width of the vector from which all queries are made, or None
        latent_norm: RMSNorm with gain over these vectors; `qk_norm_eps` is added to the mean square
        q_bias, kv_bias: of the matrix that makes the latent, where there is one
    """

    latent_dim: int
    rope_dim: int = 0
    q_latent_dim: int | None = None
    latent_norm: bool = True

    def _check_options(self) -> None:
        for name in ("latent_dim", "q_latent_dim"):
            size = getattr(self, name)
            if size is not None or name == "latent_dim":
                vars(self)[name] = require_size(name, size)
        if self.rope_dim % 2 or not 0 <= self.rope_dim < self.head_dim:
            raise HeadwiseError(
                f"rope_dim={self.rope_dim} of head_dim={self.head_dim} must be even, 0 or more, and leave features for "
                f"what the latent says; pass a smaller rope_dim, or a larger head_dim"
            )
        if self.rope and (self.rope.dim or self.rope_dim) != self.rope_dim:
            raise HeadwiseError(
                f"rope dim={self.rope.dim} and rope_dim={self.rope_dim} name one size; drop one"
            )
        if self.rope and not self.rope_dim:
            raise HeadwiseError(
                "rope= with rope_dim=0: nothing is left to rotate; pass rope_dim="
            )
        super()._check_options()

    @property
    def content_dim(self) -> int:
        """Features of one head's query and key that are not rotated with the position, d - rope_dim."""
        return self.head_dim - self.rope_dim

    @property
    def up_dim(self) -> int:
        """What is made of the latent for one head: the content of its key, and its value."""
        return self.content_dim + self.value_dim

    @property
    def variant(self) -> str:
        return "MLA"

    @property
    def q_weights(self) -> int:
        return (
            super().q_weights
            if self.q_latent_dim is None
            else self.q_latent_dim * (self.d_in + self.q_dim)
        )

    @property
    def kv_weights(self) -> int:
        """Matrix entries that a token meets to become what is kept of it."""
        return self.d_in * self.cache_values_per_token

    @property
    def expanding_weights(self) -> int:
        """Matrix entries that make keys and values of a latent."""
        return self.latent_dim * self.n_heads * self.up_dim

    @property
    def query_head_parameters(self) -> int:
        if self.q_latent_dim is None:
            return super().query_head_parameters
        return self.q_latent_dim * self.head_dim + self.value_dim * self.d_out

    @property
    def kv_head_parameters(self) -> int:
        """What one head adds: the rows that make its key and its value of the latent."""
        return self.latent_dim * self.up_dim

    @property
    def shared_parameters(self) -> int:
        """What belongs to no head: the bias of W_O, and what makes latents, with biases and gains."""
        shared = self.out_bias * self.d_out
        # The rotary key beside the latent is not normed.
        shared += (
            self.kv_weights
            + self.kv_bias * self.cache_values_per_token
            + self.latent_norm * self.latent_dim
        )
        if self.q_latent_dim is not None:
            shared += self.q_latent_dim * (self.d_in + self.q_bias + self.latent_norm)
        return shared

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that a cache keeps for one token of one document: the latent and the rotary key."""
        return self.latent_dim + self.rope_dim


PerHead: TypeAlias = (
    "Sequence[Any] | NDArray[Any] | Tensor"  # (H,) one number for each query head
)


class Options(NamedTuple):
    """What an attention call takes besides q, k and v; `headwise.attend` explains each."""

    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: PerHead | None = None
    dropout: float = 0.0
    gate: PerHead | None = None
    kv_index: Sequence[int] | None = None


class Sizes(NamedTuple):
    """The axis lengths of one attention call: q (B,H,T,D), k (B,G,S,D), v (B,G,S,E)."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int


def variant_of(n_heads: int, n_kv_heads: int) -> str:
    """What the field calls heads that share so many keys and values: MHA, GQA or MQA."""
    if n_kv_heads == n_heads:
        return "MHA"
    return "MQA" if n_kv_heads == 1 else "GQA"


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> Sizes:
    """The axis lengths of q (B,H,T,D), k (B,G,S,D), v (B,G,S,E), or an error with both shapes."""
    for name, shape, letters in (
        ("q", q, "(B,H,T,D)"),
        ("k", k, "(B,G,S,D)"),
        ("v", v, "(B,G,S,E)"),
    ):
        if len(shape) != 4:
            raise HeadwiseError(
                f"{name} has shape {tuple(shape)}, {len(shape)} axes; attention takes 4: {letters}; split the heads "
                f"first, or add the missing axis"
            )
    (B, H, T, D), (Bk, G, S, Dk), (Bv, Gv, Sv, E) = q, k, v
    if not B == Bk == Bv:
        raise HeadwiseError(f"batch sizes differ: q has {B}, k has {Bk}, v has {Bv}")
    if Dk != D:
        raise HeadwiseError(
            f"q has head width {D}, k has {Dk}; a score is their dot product, so they must be equal"
        )
    if (Gv, Sv) != (G, S):
        raise HeadwiseError(
            f"k has {G} heads of {S} keys, v has {Gv} heads of {Sv}; each key needs its value"
        )
    if D == 0:
        raise HeadwiseError("q and k have head width 0")
    return Sizes(B, H, G, T, S, D, E)


def resolve_kv_index(
    n_heads: int, n_kv_heads: int, kv_index: Sequence[int] | None
) -> tuple[int, ...]:
    """Which key/value head each query head reads: h // (H // G), unless the caller says otherwise."""
    if kv_index is None:
        if n_kv_heads == 0 or n_heads % n_kv_heads:
            raise HeadwiseError(
                f"{n_kv_heads} key/value heads do not divide {n_heads} query heads; pass kv_index= to map them"
            )
        return tuple(h // (n_heads // n_kv_heads) for h in range(n_heads))
    try:
        index = tuple(operator.index(g) for g in kv_index)
        if any(isinstance(g, bool) for g in kv_index):
            raise TypeError
    except TypeError:
        raise HeadwiseError(
            f"kv_index={list(kv_index)} must hold whole numbers"
        ) from None
    if len(index) != n_heads:
        raise HeadwiseError(
            f"kv_index has {len(index)} entries for {n_heads} query heads; one for each is needed"
        )
    wrong = [g for g in index if not 0 <= g < n_kv_heads]
    if wrong:
        raise HeadwiseError(
            f"kv_index names key/value head {wrong[0]}; there are {n_kv_heads}, counted from 0"
        )
    return index


def is_adjacent(kv_index: Sequence[int], n_heads: int, n_kv_heads: int) -> bool:
    """Does query head h read key/value head h // (H // G), so that equal groups lie side by side?"""
    divides = n_kv_heads > 0 and n_heads % n_kv_heads == 0
    return divides and tuple(kv_index) == resolve_kv_index(n_heads, n_kv_heads, None)


def check_per_head(name: str, shape: Sequence[int], n_heads: int) -> None:
    """`sink` and `gate` carry one number per query head."""
    if tuple(shape) != (n_heads,):
        raise HeadwiseError(
            f"{name} has shape {tuple(shape)}; {n_heads} query heads need shape ({n_heads},)"
        )


def check_floats(q: Any, k: Any, v: Any, cast: str) -> None:
    """Arrays or tensors of one kind of float; `cast` is what makes floats of others."""
    if not q.dtype == k.dtype == v.dtype:
        raise HeadwiseError(
            f"dtypes differ: q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; cast them to one"
        )
    # NumPy's letter for floats of any width; a dtype of torch says it itself
    if not getattr(q.dtype, "is_floating_point", getattr(q.dtype, "kind", "f") == "f"):
        raise HeadwiseError(
            f"q, k, v are {q.dtype}; attention needs floats: pass {cast}"
        )


def living_keys(
    allowed_bhts: Any, index: Sequence[int], sizes: Sizes, stack: Any
) -> Any:
    """Keys (B|1, G|1, S|1, 1) that some query may attend, over the heads that read them; `stack` is the library's.

    Where others hold NaN it would leak, as 0 * NaN is NaN: they are to be read as zeros.
    """
    by_head = allowed_bhts.any(2)
    if sizes.H > 1 and by_head.shape[1] == sizes.H:  # the mask differs between heads
        readers = [[h for h in range(sizes.H) if index[h] == g] for g in range(sizes.G)]
        # Of no readers `any` is False: a key/value head that nobody reads has no living keys.
        by_head = stack([by_head[:, heads].any(1) for heads in readers], 1)
    return by_head[..., None]


def by_group(x_bhtm: Any, y_bgmn: Any) -> Any:
    """x @ y where each y serves a group of r = H // G adjacent heads: (B,G,r*T,m) @ (B,G,m,n), y is never repeated."""
    B, H, T, m = x_bhtm.shape
    G = y_bgmn.shape[1]
    n = y_bgmn.shape[3]
    # no key/value heads: then there are no query heads either
    rows = H // (G or 1) * T
    return (x_bhtm.reshape(B, G, rows, m) @ y_bgmn).reshape(B, H, T, n)


def check_scores(scale: float | None, softcap: float | None) -> None:
    """What scores are multiplied by is one number for all heads, and what caps them, too."""
    # The fused kernel takes the scale as a plain number, and its gradient would be lost. A softcap is never fused.
    if shape_of(scale) or getattr(scale, "requires_grad", False):
        raise HeadwiseError(
            f"scale={scale!r} must be one number without a gradient; multiply q by what is learned"
        )
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None:
            require_number(name, number)
    if scale is not None and not math.isfinite(scale):
        raise HeadwiseError(
            f"scale={scale} is not finite; pass None for 1/sqrt(head_dim)"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise HeadwiseError(
            f"softcap={softcap} must be positive and finite; pass None for no cap"
        )


def check_dropout(dropout: float) -> None:
    require_number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise HeadwiseError(f"dropout={dropout} is outside [0, 1)")


def require_number(name: str, value: object) -> None:
    if isinstance(value, float):  # torch.compile asks no symbol for its attributes
        return
    # numbers of NumPy and torch have __float__, as arrays do; True has it, too, and is no number
    if not hasattr(value, "__float__") or shape_of(value) or isinstance(value, bool):
        raise HeadwiseError(f"{name}={value!r} must be a number")


def require_size(name: str, value: Any) -> int:
    """A size as an int: a whole number of at least 1, also one of NumPy."""
    try:
        # True is 1 to Python, and no size
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size <= 0:
        raise HeadwiseError(f"{name}={value!r} must be a positive whole number")
    return size
