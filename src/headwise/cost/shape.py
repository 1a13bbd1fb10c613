"""The sizes of a model as frozen values, from which everything that `headwise cost` says is counted.

A count of parameters holds biases, norms and sinks; a count of weights only the entries of matrices, each of which
costs one multiply-add a token. Letters: c model width, h query heads, g key/value heads, d head width, e value width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headwise.errors import HeadwiseError
from headwise.plan import Kept, Plan, kept_rows
from headwise.spec import AttentionSpec

MAIN, ENCODER, VISION = "main", "encoder", "vision"  # stacks of layers; the main one reads the text and may write it


@dataclass(frozen=True)
class Latent:
    """Keys and values squeezed into one vector a token for all heads (DeepSeek-V2, arXiv 2405.04434)."""

    kv_rank: int
    rope_dim: int  # the part of the key that carries positions, shared by all heads
    q_rank: int | None = None  # queries are squeezed too; None = a full matrix
    norms: bool = True  # of what is squeezed


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention of one layer. With `latent`, g equals h and the matrices go through the ranks."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None  # keys a query sees, its own included; None = all
    causal: bool = True
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # two gains of width d, shared by the heads
    sink: bool = False  # one logit for each query head
    buckets: int = 0  # of a learned bias by distance, one number for each bucket and query head (T5)
    latent: Latent | None = None
    keep: tuple[Kept, ...] | None = None  # what a plan says of each key/value head

    @classmethod
    def equal_heads(cls, d_model: int, n_heads: int, head_dim: int, **options: Any) -> Attention:
        """As many key/value heads as query heads, and values as wide as keys, unless `options` say else."""
        sizes = {"n_kv_heads": n_heads, "value_dim": head_dim} | options
        return cls(d_model=d_model, n_heads=n_heads, head_dim=head_dim, **sizes)

    @classmethod
    def of(cls, spec: AttentionSpec) -> Attention:
        """That of a layer."""
        low, high = (spec.mask and spec.mask.band(1, 1)) or (None, None)  # j - i, where the mask is a band
        causal = high == 0
        same = ("d_model", "n_heads", "n_kv_heads", "head_dim", "value_dim", "q_bias", "out_bias", "qk_norm", "sink")
        ranks = (spec.rope_dim, spec.q_latent_dim, spec.latent_norm)
        return cls(
            **{name: getattr(spec, name) for name in same},
            window=1 - low if causal and low is not None else None,
            causal=causal,
            k_bias=spec.kv_bias,
            v_bias=spec.kv_bias,
            buckets=0 if spec.relative_bias is None else spec.relative_bias.n_buckets,
            latent=None if spec.latent_dim is None else Latent(spec.latent_dim, *ranks),
        )

    @property
    def variant(self) -> str:
        if self.latent:
            return "MLA"
        return "MHA" if self.n_kv_heads == self.n_heads else "MQA" if self.n_kv_heads == 1 else "GQA"

    @property
    def query_head_parameters(self) -> int:
        """What one query head adds: its rows of W_Q, its columns of W_O, its biases, sink and distances."""
        d_in = self.latent.q_rank if self.latent and self.latent.q_rank else self.d_model
        matrices = d_in * self.head_dim + self.value_dim * self.d_model
        bias = 0 if self.latent and self.latent.q_rank else self.q_bias * self.head_dim  # or of the squeezing
        return matrices + bias + self.sink + self.buckets

    @property
    def kv_head_parameters(self) -> int:
        """What one key/value head adds: its rows of W_K and W_V and their biases."""
        if self.latent:  # one for each query head, out of the latent; the key's rope part belongs to all
            return self.latent.kv_rank * (self.head_dim - self.latent.rope_dim + self.value_dim)
        biases = self.k_bias * self.head_dim + self.v_bias * self.value_dim
        return self.d_model * (self.head_dim + self.value_dim) + biases

    @property
    def shared_parameters(self) -> int:
        """What belongs to no head: the bias of W_O, the gains of qk-norm, the squeezing of a latent and its norms."""
        shared = self.out_bias * self.d_model + self.qk_norm * 2 * self.head_dim
        if self.latent:
            q_rank, kv_rank = self.latent.q_rank or 0, self.latent.kv_rank
            down = q_rank + kv_rank + self.latent.rope_dim
            biases = self.q_bias * q_rank + self.k_bias * (kv_rank + self.latent.rope_dim)
            shared += down * self.d_model + biases + self.latent.norms * (q_rank + kv_rank)
        return shared

    @property
    def parameters(self) -> int:
        heads = self.n_heads * self.query_head_parameters + self.n_kv_heads * self.kv_head_parameters
        return heads + self.shared_parameters

    @property
    def kv_weights(self) -> int:
        """Matrix entries that a token meets to become keys and values."""
        if self.latent:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.d_model + self.expanding_weights
        return self.n_kv_heads * (self.head_dim + self.value_dim) * self.d_model

    @property
    def expanding_weights(self) -> int:
        """Matrix entries that turn a cached latent into the keys and values of all heads; 0 without a latent."""
        return self.n_kv_heads * self.kv_head_parameters if self.latent else 0

    @property
    def qo_weights(self) -> int:
        """Matrix entries that a token meets to become queries, and on its way out through W_O."""
        q_rank = self.latent.q_rank if self.latent else None
        queries = self.n_heads * self.head_dim * (q_rank or self.d_model) + (q_rank or 0) * self.d_model
        return queries + self.n_heads * self.value_dim * self.d_model

    @property
    def cache_values(self) -> int:
        """Numbers that a cache keeps for one token: g * (d + e), or the latent and the rope part of the key."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return self.n_kv_heads * (self.head_dim + self.value_dim)

    def kept(self, tokens: int) -> dict[int, int]:
        """Tokens of a text that long whose key and value are cached -> for how many key/value heads."""
        seen = tokens if self.window is None else min(tokens, self.window)
        if self.keep is None:
            return {seen: self.n_kv_heads}
        return Counter(kept_rows(keep, tokens) if keep else seen for keep in self.keep)

    def rows(self, tokens: int) -> int:
        """The same over all key/value heads."""
        return sum(kept * heads for kept, heads in self.kept(tokens).items())

    @property
    def streaming(self) -> int:
        """Key/value heads that keep only their first tokens and their latest ones."""
        return sum(keep is not None for keep in self.keep or ())

    @property
    def growing_values(self) -> int:
        """Numbers that one more token adds once all windows are full."""
        return 0 if self.window else self.cache_values * (self.n_kv_heads - self.streaming) // self.n_kv_heads


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """down(act(up x)), or down(act(gate x) * up x) when gated; experts: a router sends a token to a few of them."""

    d_model: int
    width: int  # of one expert where there are experts
    gated: bool
    bias: bool = False
    n_experts: int = 0
    n_active: int = 0
    router_bias: bool = False
    shared_width: int = 0  # of what every token goes through beside the experts

    def _weights(self, width: int) -> int:
        return (3 if self.gated else 2) * self.d_model * width

    @property
    def expert_parameters(self) -> int:
        biases = self.bias * ((2 if self.gated else 1) * self.width + self.d_model)
        return self._weights(self.width) + biases

    @property
    def common_parameters(self) -> int:
        router = self.n_experts * (self.d_model + self.router_bias)
        return router + self._weights(self.shared_width)

    @property
    def parameters(self) -> int:
        return (self.n_experts or 1) * self.expert_parameters + self.common_parameters

    @property
    def active_parameters(self) -> int:
        return (self.n_active or 1) * self.expert_parameters + self.common_parameters

    @property
    def active_weights(self) -> int:
        experts = (self.n_active or 1) * self._weights(self.width)
        return experts + self.n_experts * self.d_model + self._weights(self.shared_width)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. `cross` is the attention to the encoder."""

    name: str
    stack: str = MAIN
    attention: Attention
    cross: Attention | None = None
    feed_forward: FeedForward
    norm_parameters: int

    @property
    def parameters(self) -> int:
        cross = self.cross.parameters if self.cross else 0
        return self.attention.parameters + cross + self.feed_forward.parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        return self.parameters - self.feed_forward.parameters + self.feed_forward.active_parameters


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something outside the layers: an embedding, a norm, a head, a stem."""

    name: str
    part: str  # embeddings | norms | head | stem
    parameters: int
    stack: str = MAIN
    row: int | None = None  # width of the one row that a token reads in a table
    weights: int = 0  # matrix entries that every token meets, borrowed ones included
    borrowed: int = 0  # those that belong to another piece: a head that is tied to the embedding
    once: int = 0  # multiply-adds made once for a sequence: a pooler, the convolutions over an image


def table(name: str, rows: int, width: int, stack: str = MAIN) -> Piece:
    return Piece(name=name, part="embeddings", parameters=rows * width, stack=stack, row=width)


def norm(name: str, parameters: int, stack: str = MAIN) -> Piece:
    return Piece(name=name, part="norms", parameters=parameters, stack=stack)


def lm_head(width: int, vocabulary: int, tied: bool) -> Piece:
    """The matrix from the last width to the vocabulary; tied, it is the token embedding."""
    size = width * vocabulary
    return Piece(name="lm_head", part="head", parameters=size * (not tied), weights=size, borrowed=size * tied)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model."""

    family: str = ""  # set by the family that reads it
    d_model: int
    layers: tuple[Layer, ...]
    pieces: tuple[Piece, ...]
    positions: int | None  # of the longest text that it was made for
    source_positions: int | None = None  # of an encoder whose input has one fixed length
    generates: bool = True  # False: an encoder, which keeps no cache
    dtype: str | None = None  # of the weights, where the config names it
    notes: tuple[str, ...] = ()

    @property
    def two_sided(self) -> bool:
        return any(layer.cross for layer in self.layers)

    @property
    def main_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.stack == MAIN)

    @property
    def cached(self) -> Iterator[Attention]:
        return (layer.attention for layer in self.main_layers if self.generates)

    @property
    def crossed(self) -> Iterator[Attention]:
        return (layer.cross for layer in self.main_layers if layer.cross)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + sum(piece.parameters for piece in self.pieces)

    @property
    def active_parameters(self) -> int:
        """What one token of text meets."""
        layers = sum(layer.active_parameters for layer in self.layers if layer.stack != VISION)
        pieces = (piece for piece in self.pieces if piece.row is None and piece.stack != VISION)
        return layers + sum(piece.parameters + piece.borrowed for piece in pieces)

    def noted(self, *notes: str) -> ModelShape:
        return replace(self, notes=(*self.notes, *notes))

    def with_heads(self, **heads: Any) -> ModelShape:
        """The same model with other n_kv_heads, n_heads, head_dim or value_dim in the main stack; no latent or plan."""
        layers = []
        for layer in self.layers:
            if layer.stack == MAIN:
                cross = replace(layer.cross, latent=None, **heads) if layer.cross else None
                layer = replace(layer, attention=replace(layer.attention, latent=None, keep=None, **heads), cross=cross)
            layers.append(layer)
        return replace(self, layers=tuple(layers))

    def with_plan(self, plan: Plan) -> ModelShape:
        """The same model with a cache that holds what the plan says. Raises HeadwiseError where it does not fit."""
        heads = [0 if attention.latent else attention.n_kv_heads for attention in self.cached]
        if 0 in (heads or [0]):
            raise HeadwiseError(f"a plan is about cached keys and values of single heads, and {self.family} has none")
        plan.check(len(heads), max(heads))
        keeps = dict(zip(map(id, self.main_layers), plan.keep, strict=True))
        layers = (replace(x, attention=replace(x.attention, keep=keeps.get(id(x)))) for x in self.layers)
        return replace(self, layers=tuple(layers))
