"""The sizes of a model as frozen values, and what it costs to run, counted from them.

A count of parameters holds biases, norms and sinks; a count of weights only the entries of matrices, each of which
costs one multiply-add a token. Letters: c model width, h query heads, g key/value heads, d head width, e value width.

One multiply-add is two FLOPs. Counted are matrix products: linear layers, scores, weights times values, convolutions;
not softmax, norms, activations, rotations, biases and look-ups, a per cent or so. T causal queries have T(T+1)/2 pairs;
with a window w none sees more than w keys. The dense count is that of a kernel which computes every pair, and logits at
every position (`torch.utils.flop_counter`). A cache keeps min(T, window) tokens, all that the query at T may see;
between two steps transformers keeps one fewer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headwise.spec import AttentionSpec, LatentSpec

# In sums of this file True counts as 1 and False as 0.


def rows_kept(spec: AttentionSpec, tokens: int) -> int:
    """How many tokens of a text that long are cached."""
    return tokens if spec.window is None else min(tokens, spec.window)


def growing_values(spec: AttentionSpec) -> int:
    """Numbers that one more token adds to the cache once all windows are full."""
    return 0 if spec.window else spec.cache_values_per_token


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

    @property
    def n_matrices(self) -> int:
        """Matrices of d_model x width: up, down and, where there is one, gate."""
        return 2 + self.gated

    @property
    def expert_parameters(self) -> int:
        """Of one expert; without experts, of the whole feed-forward.

        The biases are those of up and, where there is one, of gate, each `width` long, and that of down.
        """
        biases = self.bias * ((1 + self.gated) * self.width + self.d_model)
        return self.n_matrices * self.d_model * self.width + biases

    @property
    def common_parameters(self) -> int:
        """Of the router, and of what every token goes through."""
        router = self.n_experts * (self.d_model + self.router_bias)
        # No bias: of the families that are priced none has one there.
        return router + self.n_matrices * self.d_model * self.shared_width

    @property
    def parameters(self) -> int:
        # Without experts n_experts is 0, and the feed-forward counts as a single one.
        return (self.n_experts or 1) * self.expert_parameters + self.common_parameters

    @property
    def active_parameters(self) -> int:
        # What one token meets: its experts, and what all tokens meet.
        return (self.n_active or 1) * self.expert_parameters + self.common_parameters

    @property
    def active_weights(self) -> int:
        # The matrix entries among them, which cost a multiply-add each.
        widths = (self.n_active or 1) * self.width + self.shared_width
        # the router has a row for each expert
        return self.d_model * (self.n_matrices * widths + self.n_experts)


@dataclass(frozen=True, kw_only=True)
class Layer:
    name: str  # "L0"
    attention: AttentionSpec
    feed_forward: FeedForward
    norm_parameters: int

    @property
    def parameters(self) -> int:
        return self.attention.n_parameters + self.feed_forward.parameters + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        return self.parameters - self.feed_forward.parameters + self.feed_forward.active_parameters


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something outside the layers: an embedding, a norm, a head."""

    part: str  # embeddings | norms | head
    parameters: int
    # width of the one row that a token reads in a table; None: it is no table
    row: int | None = None
    weights: int = 0  # matrix entries that every token meets, borrowed ones included
    borrowed: int = 0  # those that belong to another piece: a head that is tied to the embedding
    once: int = 0  # multiply-adds made once for a sequence: a pooler


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model."""

    family: str = ""  # set by the family that reads it
    d_model: int
    layers: tuple[Layer, ...]
    pieces: tuple[Piece, ...]
    positions: int | None  # of the longest text that it was made for
    generates: bool = True  # False: an encoder, which keeps no cache
    dtype: str | None = None  # of the weights, where the config names it
    notes: tuple[str, ...] = ()

    @property
    # those that keep keys and values of the text, layer by layer
    def cached(self) -> Iterator[AttentionSpec]:
        return (layer.attention for layer in self.layers if self.generates)

    @property
    def parameters(self) -> int:
        layers = sum(layer.parameters for layer in self.layers)
        return layers + sum(piece.parameters for piece in self.pieces)

    @property
    def active_parameters(self) -> int:
        """What one token of text meets: no table, of which it reads a row, but a head that is tied to one."""
        layers = sum(layer.active_parameters for layer in self.layers)
        pieces = (piece for piece in self.pieces if piece.row is None)
        return layers + sum(piece.parameters + piece.borrowed for piece in pieces)

    def noted(self, *notes: str) -> ModelShape:
        return replace(self, notes=(*self.notes, *notes))

    def with_heads(self, **heads: Any) -> ModelShape:
        """The same model with other n_kv_heads, n_heads, head_dim or value_dim; without a latent.

        Without RoPE, too: it costs nothing that is counted, and its width may not fit another head_dim. The result is
        for a price alone.
        """
        layers = []
        for layer in self.layers:
            fields = {
                name: getattr(layer.attention, name) for name in AttentionSpec.__dataclass_fields__
            }
            # None: groups of neighbours
            spec = AttentionSpec(**fields | {"rope": None, "kv_index": None} | heads)
            layers.append(replace(layer, attention=spec))
        return replace(self, layers=tuple(layers))


# What it costs to run.

# Tokens: more than any window keeps, so that a cache that stops growing has stopped by then.
LONGEST = 2**62


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


def score_pairs(spec: AttentionSpec, tokens: int) -> int:
    """Pairs of a query and a key that it sees. Without a causal mask all: no family here has a window on both sides."""
    if not spec.causal:
        return tokens * tokens
    # the first queries see 1, 2, ... keys, all later ones `most`
    most = min(tokens, spec.window or tokens)
    return most * (most + 1) // 2 + (tokens - most) * most


def pair_flops(spec: AttentionSpec, pairs: int) -> int:
    """FLOPs of scores and weighted values: for a pair each query head takes a product of width d and one of width e."""
    return 2 * spec.n_heads * (spec.head_dim + spec.value_dim) * pairs


def forward_price(shape: ModelShape, batch: int, tokens: int) -> ForwardPrice:
    """What it takes to read texts of `tokens` tokens."""
    linear = attention = dense = 0
    for layer in shape.layers:
        spec = layer.attention
        linear += 2 * tokens * (_token_weights(spec) + layer.feed_forward.active_weights)
        attention += pair_flops(spec, score_pairs(spec, tokens))
        dense += pair_flops(spec, tokens * tokens)
    per_token, once = (
        2 * sum(piece.weights for piece in shape.pieces),
        2 * sum(piece.once for piece in shape.pieces),
    )
    # what follows a prompt needs the last logits alone
    outside = once + per_token * (1 if shape.generates else tokens)
    return ForwardPrice(
        layer_flops=batch * linear,
        attention_flops=batch * attention,
        outside_flops=batch * outside,
        total_flops=batch * (linear + attention + outside),
        dense_flops=batch * (linear + dense + once + per_token * tokens),
    )


def _token_weights(spec: AttentionSpec) -> int:
    """Matrix entries of a self attention that each token meets: for its query, key and value, and in W_O.

    With a latent these are what makes it and what makes keys and values of it.
    """
    return spec.q_weights + spec.kv_weights + spec.o_weights + _expanding(spec)


def _expanding(spec: AttentionSpec) -> int:
    return spec.expanding_weights if isinstance(spec, LatentSpec) else 0


def decode_flops(shape: ModelShape, tokens: int, expand: bool = False) -> int:
    """FLOPs of one new token of one text, the last of `tokens`, beside the cache of the others.

    A latent cache is read as it is, its expanding matrix folded into query and output; with `expand` keys and
    values are made of all of it at every step, as transformers does.
    """
    total = 2 * sum(piece.weights for piece in shape.pieces)
    for layer in shape.layers:
        spec, rows = layer.attention, rows_kept(layer.attention, tokens)
        total += 2 * (_token_weights(spec) + layer.feed_forward.active_weights)
        if isinstance(spec, LatentSpec) and not expand:
            # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
            total += 2 * spec.n_heads * (spec.cache_values_per_token + spec.latent_dim) * rows
        else:
            total += pair_flops(spec, rows)
            # the new token's own is among its other products
            total += 2 * _expanding(spec) * (rows - 1)
    return total


def decode_parameters(shape: ModelShape, batch: int) -> float:
    """Parameters read for one step, which serves every text of the batch: a mean where there are experts."""
    total: float = 0
    for layer in shape.layers:
        total += (
            layer.attention.n_parameters
            + layer.norm_parameters
            + experts_read(layer.feed_forward, batch)
        )
    for piece in shape.pieces:
        total += piece.row * batch if piece.row is not None else piece.parameters + piece.borrowed
    return total


def experts_read(feed_forward: FeedForward, batch: int) -> float:
    """Parameters that some text of the batch meets: of its experts a mean, as if all were chosen equally often."""
    n = feed_forward.n_experts
    if batch == 1 or not n:  # of one text the number is exact
        return feed_forward.active_parameters
    # One text misses an expert with probability 1 - n_active / n, and all of them with that to the power of `batch`.
    # experts that at least one text chooses
    distinct = n * (1 - (1 - feed_forward.n_active / n) ** batch)
    return float(distinct * feed_forward.expert_parameters + feed_forward.common_parameters)


def cache_values(shape: ModelShape, tokens: int) -> int:
    """Numbers that the cache of one text of so many tokens keeps."""
    return sum(spec.cache_values_per_token * rows_kept(spec, tokens) for spec in shape.cached)


def longest_context(shape: ModelShape, values: int) -> int | None:
    """The longest text whose cache holds at most `values` numbers; None where any text's does: it stops growing before.

    0 where not even that of one token does.
    """
    growing = sum(map(growing_values, shape.cached))
    # No text that fits is longer: each token adds at least `growing`.
    most = values // growing if growing else LONGEST
    if not growing and cache_values(shape, most) <= values:
        return None
    # The cache grows with the text: of the lengths 1, 2, ... as many fit as the longest that fits has tokens.
    return bisect_right(range(1, most + 1), values, key=lambda tokens: cache_values(shape, tokens))
