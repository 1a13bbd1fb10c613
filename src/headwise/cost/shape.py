"""The sizes of a model as frozen values: a list of layers, and what stands outside them.

A count of parameters holds biases, norms and sinks; FLOPs are matrix products alone, two for a multiply-add: linear
layers, scores, weights times values, convolutions; not softmax, norms, activations, rotations, biases and look-ups, a
per cent or so. T causal queries have T(T+1)/2 pairs; with a window w none sees more than w keys. The dense count is
that of a kernel which computes every pair, and logits at every position (`torch.utils.flop_counter`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headwise.spec import variant_of


@dataclass(frozen=True, kw_only=True)
class Heads:
    """All heads of one attention of a layer, what one of them has, and what they have together.

    With a latent, `latent` is all that is cached of a token: the latent itself and the one rotary key beside it.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    # keys that a query sees, its own counted; None: all before it
    window: int | None = None
    causal: bool = True
    chunked: bool = False  # is the window a chunk of the text, so that its first query sees itself alone?
    sink: bool = False
    latent: int | None = None
    kv_head_parameters: int  # of one head
    parameters: int  # of all heads together

    @property
    def variant(self) -> str:
        """What the field calls it: MHA, GQA or MQA; MLA with a latent."""
        if self.latent is not None:
            return "MLA"
        return variant_of(self.n_heads, self.n_kv_heads)

    def pairs(self, tokens: int) -> int:
        """Pairs of a query and a key that it sees in a text of that many tokens."""
        if not self.causal:
            return tokens * tokens
        most = self.seen(tokens)
        # the first queries see 1, 2, ... keys
        first = most * (most + 1) // 2
        if not self.chunked:
            return first + (tokens - most) * most
        chunks, rest = divmod(tokens, most)
        return chunks * first + rest * (rest + 1) // 2

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
    # of a number, where the model fixes them whatever its own format
    bits: float | None = None
    # are these keys and values of heads, so that fewer heads make them fewer?
    heads: bool = False

    def at(self, tokens: int) -> int:
        """Numbers kept of a text of that many tokens."""
        if not self.grows:
            return self.values
        if self.open_block:
            return self.values * (tokens % self.every)
        return self.values * (min(tokens, self.rows or tokens) // self.every)


def bytes_of(kept: Iterable[Kept], tokens: int) -> int:
    """Bytes of all that is kept of a text of that many tokens; of 0 tokens its states alone are left."""
    return whole_bytes(*((part.at(tokens), part.bits or 0) for part in kept))


def bytes_per_token(kept: Iterable[Kept]) -> float:
    """Bytes that one token adds: a mean where a block of tokens is kept as one."""
    bits = 0.0
    for part in kept:
        if part.grows and not part.open_block:
            bits += part.values * (part.bits or 0) / part.every
    return int(bits / 8) if bits % 8 == 0 else bits / 8


def whole_bytes(*numbers: tuple[int, float]) -> int:
    """Bytes of numbers, whole ones: how many there are, and the bits of one of them, which MXFP4 has 4.25 of."""
    return int(-(-sum(count * bits for count, bits in numbers) // 8))


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A router sends a token to `active` of `count` experts; the sizes of one of them."""

    active: int
    count: int
    parameters: int
    matrices: int  # entries of its matrices, which a packed format such as MXFP4 holds

    @property
    def idle(self) -> int:
        """Parameters of those that a token is not sent to."""
        return (self.count - self.active) * self.parameters

    def read(self, batch: int) -> float:
        """Experts that some text of the batch meets: a mean, as if all were chosen equally often."""
        if batch == 1:  # of one text the number is exact
            return self.active
        # One text misses an expert with probability 1 - active / count, and all with that to the power of `batch`.
        return self.count * (1 - (1 - self.active / self.count) ** batch)


class Flops(NamedTuple):
    """FLOPs of a token, and of one pair of a query and a key."""

    token: int
    pair: int

    def plus(self, weights: int) -> Flops:
        """With so many entries of a matrix more, each of which a token meets once."""
        return Flops(self.token + 2 * weights, self.pair)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its parameters by what has them, what it keeps of a text, and its FLOPs."""

    name: str  # "L0"
    # full | sliding | chunked | latent | indexed | compressed | linear | conv | shared | none, or two of them
    kind: str
    attention: Heads | None
    variant: str | None = field(init=False)  # MHA, GQA, MQA, or MLA
    parameters: int = field(init=False)
    active_parameters: int = field(init=False)  # those that one token meets
    mixer_parameters: int = 0  # of a linear attention, a state space, a convolution
    feed_forward_parameters: int = 0
    norm_parameters: int = 0
    experts: Experts | None = None
    kept: tuple[Kept, ...] = ()
    reading: Flops  # of a prompt
    writing: Flops  # of one new token beside a cache
    # in bytes, once a price has filled in the bits of a number
    cache_bytes_per_token: float = field(init=False)  # while no window is full
    cache_rows: int | None = field(init=False)  # the most tokens kept; None: all
    state_bytes: int = field(init=False)  # that do not grow with the text

    def __post_init__(self) -> None:
        heads = self.attention
        total = self.mixer_parameters + self.norm_parameters
        total += self.feed_forward_parameters + (heads.parameters if heads else 0)
        rows = [part.rows for part in self.kept if part.grows]
        vars(self).update(
            variant=heads.variant if heads else None,
            parameters=total,
            active_parameters=total - (self.experts.idle if self.experts else 0),
            cache_bytes_per_token=bytes_per_token(self.kept),
            cache_rows=max(filter(None, rows)) if rows and all(rows) else None,
            state_bytes=bytes_of(self.kept, 0),
        )

    def beside(self, parameters: int, matrix: int) -> Layer:
        """The layer with a module more: so many parameters, and of them entries of a matrix that each token meets."""
        part = "feed_forward_parameters" if matrix else "norm_parameters"
        changes = {part: getattr(self, part) + parameters}
        for name in ("reading", "writing"):
            changes[name] = getattr(self, name).plus(matrix)
        return replace(self, **changes)

    def with_kv_heads(self, n: int, d_model: int) -> Layer:
        """What the layer has and keeps with so many key/value heads, in the place of its own, or of a latent.

        FLOPs stay those of the layer as it is.
        """
        heads = self.attention
        if heads is None or self.kind == "shared":
            return self
        width = heads.head_dim + heads.value_dim
        parameters = heads.parameters
        parameters += (n - heads.n_kv_heads) * heads.kv_head_parameters
        if heads.latent is not None:
            parameters = (heads.n_heads + n) * d_model * width
        heads = replace(heads, n_kv_heads=n, latent=None, parameters=parameters)
        kept = []
        for part in self.kept:
            if part.heads:
                part = replace(part, values=n * width)
            kept.append(part)
        return replace(self, attention=heads, kept=tuple(kept))


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What stands outside the layers: parameters of its parts, and what a head does."""

    embeddings: int = 0
    row: int = 0  # of these what a token reads: a row of each table
    norms: int = 0
    others: int = 0
    head: int | None = None  # None: without a head
    # matrix entries of a table that the head is tied to
    borrowed: int = 0
    flops: int = 0  # of each position whose logits are wanted
    once: int = 0  # FLOPs for a whole text: of a pooler

    @property
    def active(self) -> int:
        """Parameters that every token meets: of no table, but of a head that is tied to one."""
        return self.norms + self.others + (self.head or 0) + self.borrowed


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model."""

    family: str
    d_model: int
    layers: tuple[Layer, ...]
    outside: Outside = Outside()
    positions: int | None = None  # of the longest text that it was made for
    generates: bool = True  # False: an encoder, which keeps no cache
    dtype: str | None = None  # of the weights, where the config names it
    # of the matrices of experts, where the config names a format of their own
    packed: str | None = None
    notes: tuple[str, ...] = ()
    way: str = "config"  # or "built": counted on a model

    @property
    def parameters(self) -> int:
        outside = self.outside.active + self.outside.embeddings - self.outside.borrowed
        return outside + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """What one token of text meets: no table, of which it reads a row, but a head that is tied to one."""
        active = sum(layer.active_parameters for layer in self.layers)
        return active + self.outside.active

    @property
    def experts(self) -> list[Experts]:
        """Those of each layer that has some."""
        return [layer.experts for layer in self.layers if layer.experts]

    @property
    def kept(self) -> list[Kept]:
        """All that is kept of a text between two steps."""
        return [part for layer in self.layers for part in layer.kept]

    def noted(self, *notes: str) -> ModelShape:
        return replace(self, notes=(*self.notes, *notes))

    def with_kv_heads(self, n: int) -> ModelShape:
        layers = tuple(layer.with_kv_heads(n, self.d_model) for layer in self.layers)
        return replace(self, layers=layers)
