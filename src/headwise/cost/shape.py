"""The sizes of a model as frozen values, and what it costs to run, counted from them.

Two ways lead here: `cost.config` counts by formulas, `cost.built` on a model of transformers without memory. A count of
parameters holds biases, norms and sinks; FLOPs are matrix products alone, two for a multiply-add: linear layers,
scores, weights times values, convolutions; not softmax, norms, activations, rotations, biases and look-ups, a per cent
or so. T causal queries have T(T+1)/2 pairs; with a window w none sees more than w keys. The dense count is that of a
kernel which computes every pair, and logits at every position (`torch.utils.flop_counter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd


@dataclass(frozen=True, kw_only=True)
class Heads:
    """All heads of one attention of a layer, what one of them has, and what they have together.

    With a latent, `latent` is all that is cached of a token: the latent itself and the one rotary key beside it.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = (
        None  # keys that a query sees, its own counted; None: all before it
    )
    causal: bool = True
    chunked: bool = False  # is the window a chunk of the text, so that its first query sees itself alone?
    sink: bool = False
    latent: int | None = None
    query_head_parameters: int  # of one head
    kv_head_parameters: int  # of one head
    shared_parameters: int  # of no head, such as the bias of W_O
    parameters: int  # of all heads together
    weights: int  # entries of their matrices, each of which a token meets once

    @property
    def variant(self) -> str:
        """What the field calls it: MHA, GQA or MQA; MLA with a latent."""
        if self.latent is not None:
            return "MLA"
        if self.n_kv_heads == self.n_heads:
            return "MHA"
        return "MQA" if self.n_kv_heads == 1 else "GQA"

    def pairs(self, tokens: int) -> int:
        """Pairs of a query and a key that it sees in a text of that many tokens."""
        if not self.causal:
            return tokens * tokens
        most = min(tokens, self.window or tokens)
        if self.chunked:
            chunks, rest = divmod(tokens, most)
            return (chunks * most * (most + 1) + rest * (rest + 1)) // 2
        # the first queries see 1, 2, ... keys, all later ones `most`
        return most * (most + 1) // 2 + (tokens - most) * most

    def seen(self, tokens: int) -> int:
        """Keys that the last of so many tokens sees."""
        return min(tokens, self.window or tokens)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a layer keeps of one text between two steps.

    `values` numbers of each token; of the last `rows` tokens at most; of each whole block of `every` tokens, or of the
    tokens behind the last whole block (`open_block`); or once (`grows` is false), as a state that each token changes.
    """

    values: int
    rows: int | None = None
    every: int = 1
    open_block: bool = False
    grows: bool = True
    bits: int | None = (
        None  # of a number, where the model fixes them whatever its own format
    )
    heads: bool = False  # are these keys and values of heads, so that fewer heads make them fewer?

    def at(self, tokens: int) -> int:
        """Numbers kept of a text of that many tokens."""
        if not self.grows:
            return self.values
        if self.open_block:
            return self.values * (tokens % self.every)
        return self.values * (min(tokens, self.rows or tokens) // self.every)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A router sends a token to `active` of `count` experts; the sizes of one of them."""

    count: int
    active: int
    parameters: int
    matrices: int  # entries of its matrices, which a packed format such as MXFP4 holds

    def read(self, batch: int) -> float:
        """Experts that some text of the batch meets: a mean, as if all were chosen equally often."""
        if batch == 1:  # of one text the number is exact
            return self.active
        # One text misses an expert with probability 1 - active / count, and all with that to the power of `batch`.
        return self.count * (1 - (1 - self.active / self.count) ** batch)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer; FLOPs are of one token (`linear`), or of one pair of a query and a key (`pair`).

    `step` and `step_pair` are those of one new token beside a cache, and `expanded` and `expanded_pair` the same where
    a latent cache is turned into keys and values at every step.
    """

    name: str  # "L0"
    kind: str  # full | sliding | chunked | latent | indexed | linear | conv | shared | none, or transformers' own word
    heads: Heads | None
    kept: tuple[Kept, ...] = ()
    mixer_parameters: int = 0  # of a linear attention, a state space, a convolution
    feed_forward_parameters: int = 0
    norm_parameters: int = 0
    experts: Experts | None = None
    linear: int
    pair: int
    step: int
    step_pair: int
    expanded: int = 0
    expanded_pair: int = 0

    @property
    def parameters(self) -> int:
        attention = self.heads.parameters if self.heads else 0
        others = (
            self.mixer_parameters + self.feed_forward_parameters + self.norm_parameters
        )
        return attention + others

    @property
    def common_parameters(self) -> int:
        """Those that every token meets."""
        experts = self.experts
        return self.parameters - (experts.count * experts.parameters if experts else 0)

    @property
    def active_parameters(self) -> int:
        experts = self.experts
        return self.common_parameters + (
            experts.active * experts.parameters if experts else 0
        )

    def decode_flops(self, tokens: int, expand: bool = False) -> int:
        """FLOPs of one new token, the last of so many."""
        seen = self.heads.seen(tokens) if self.heads else 0
        if expand and self.expanded:
            return self.expanded + self.expanded_pair * seen
        return self.step + self.step_pair * seen

    def with_kv_heads(self, n: int, d_model: int) -> Layer:
        """The layer with so many key/value heads, in the place of those it has, or of a latent."""
        heads = self.heads
        if (
            heads is None
            or self.kind == "shared"
            or (heads.n_kv_heads, heads.latent) == (n, None)
        ):
            return self
        width = heads.head_dim + heads.value_dim
        weights = parameters = (heads.n_heads + n) * d_model * width
        if heads.latent is None:
            more = n - heads.n_kv_heads
            weights = heads.weights + more * d_model * width
            parameters = heads.parameters + more * heads.kv_head_parameters
        linear = self.linear + 2 * (weights - heads.weights)
        step = linear if heads.latent else self.step + linear - self.linear
        kept = [part for part in self.kept if not part.heads]
        rows = next((part.rows for part in self.kept if part.heads), None)
        return replace(
            self,
            heads=replace(
                heads, n_kv_heads=n, latent=None, weights=weights, parameters=parameters
            ),
            kept=(Kept(values=n * width, rows=rows, heads=True), *kept),
            linear=linear,
            step=step,
            step_pair=self.pair if heads.latent else self.step_pair,
            expanded=0,
            expanded_pair=0,
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something outside the layers: an embedding, a norm, a head."""

    part: str  # embeddings | norms | head | others
    parameters: int
    # width of the one row that a token reads in a table; None: it is no table
    row: int | None = None
    flops: int = 0  # of each position whose logits are wanted
    borrowed: int = (
        0  # matrix entries of another piece: of a head that is tied to the embedding
    )
    once: int = 0  # FLOPs for a whole text: of a pooler


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model."""

    family: str
    d_model: int
    layers: tuple[Layer, ...]
    pieces: tuple[Piece, ...]
    positions: int | None  # of the longest text that it was made for
    generates: bool = True  # False: an encoder, which keeps no cache
    dtype: str | None = None  # of the weights, where the config names it
    packed: str | None = (
        None  # of the matrices of experts, where the config names one of their own
    )
    way: str = "config"  # or "built": on a model of transformers
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        layers = sum(layer.parameters for layer in self.layers)
        return layers + sum(piece.parameters for piece in self.pieces)

    @property
    def active_parameters(self) -> int:
        """What one token of text meets: no table, of which it reads a row, but a head that is tied to one."""
        layers = sum(layer.common_parameters for layer in self.layers)
        experts = sum(each.active * each.parameters for each in self.experts)
        pieces = (piece for piece in self.pieces if piece.row is None)
        return (
            layers
            + experts
            + sum(piece.parameters + piece.borrowed for piece in pieces)
        )

    @property
    def experts(self) -> Iterator[Experts]:
        return (layer.experts for layer in self.layers if layer.experts)

    @property
    def kept(self) -> Iterator[Kept]:
        """All that is kept of a text between two steps."""
        return (part for layer in self.layers if self.generates for part in layer.kept)

    def noted(self, *notes: str) -> ModelShape:
        return replace(self, notes=(*self.notes, *notes))

    def with_kv_heads(self, n: int) -> ModelShape:
        layers = tuple(layer.with_kv_heads(n, self.d_model) for layer in self.layers)
        return replace(self, layers=layers)


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


def forward_price(shape: ModelShape, batch: int, tokens: int) -> ForwardPrice:
    """What it takes to read texts of `tokens` tokens."""
    linear = attention = dense = 0
    for layer in shape.layers:
        linear += tokens * layer.linear
        dense += tokens * tokens * layer.pair
        if layer.heads:
            attention += layer.heads.pairs(tokens) * layer.pair
    per_token = sum(piece.flops for piece in shape.pieces)
    once = sum(piece.once for piece in shape.pieces)
    # what follows a prompt needs the last logits alone
    outside = once + per_token * (1 if shape.generates else tokens)
    return ForwardPrice(
        layer_flops=batch * linear,
        attention_flops=batch * attention,
        outside_flops=batch * outside,
        total_flops=batch * (linear + attention + outside),
        dense_flops=batch * (linear + dense + once + per_token * tokens),
    )


def decode_flops(shape: ModelShape, tokens: int, expand: bool = False) -> int:
    """FLOPs of one new token of one text, the last of `tokens`, beside the cache of the others.

    A latent cache is read as it is, its expanding matrix folded into query and output; with `expand` keys and
    values are made of all of it at every step.
    """
    layers = sum(layer.decode_flops(tokens, expand) for layer in shape.layers)
    return layers + sum(piece.flops for piece in shape.pieces)


def decode_parameters(shape: ModelShape, batch: int) -> tuple[float, float]:
    """Parameters read for one step, which serves every text of the batch: those of matrices of experts, and others."""
    matrices = others = 0.0
    for layer in shape.layers:
        others += layer.common_parameters
        if layer.experts:
            number = layer.experts.read(batch)
            matrices += number * layer.experts.matrices
            others += number * (layer.experts.parameters - layer.experts.matrices)
    for piece in shape.pieces:
        others += (
            piece.row * batch
            if piece.row is not None
            else piece.parameters + piece.borrowed
        )
    return matrices, others


def kv_divisors(shape: ModelShape) -> list[int]:
    """The numbers of key/value heads that all attentions of the model could have, the most first."""
    common = gcd(*(layer.heads.n_heads for layer in shape.layers if layer.heads))
    return [n for n in range(common, 0, -1) if common % n == 0]
