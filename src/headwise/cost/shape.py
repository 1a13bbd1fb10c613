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
from headwise.plan import HeadPlan, Plan, kept_rows
from headwise.spec import AttentionSpec

MAIN, ENCODER, VISION = "main", "encoder", "vision"  # stacks of layers; the main one reads the text and may write it


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention of a model: its spec, which counts it, and what a price must know beside it."""

    spec: AttentionSpec
    keep: tuple[HeadPlan, ...] | None = None  # what a plan says of each key/value head
    buckets: int = 0  # parameters of each query head for a bias by distance (T5)
    key_bias: bool = True  # has W_K a bias where W_V has one? (not in Whisper)

    @property
    def query_head_parameters(self) -> int:
        return self.spec.query_head_parameters + self.buckets

    @property
    def kv_head_parameters(self) -> int:
        absent = self.spec.kv_bias and not self.key_bias
        return self.spec.kv_head_parameters - absent * self.spec.head_dim

    @property
    def parameters(self) -> int:
        spec = self.spec
        heads = spec.n_heads * self.query_head_parameters + spec.n_kv_heads * self.kv_head_parameters
        return heads + spec.shared_parameters

    def kept(self, tokens: int) -> dict[int, int]:
        """Tokens of a text that long whose key and value are cached -> for how many key/value heads."""
        seen = tokens if self.spec.window is None else min(tokens, self.spec.window)
        if self.keep is None:
            return {seen: self.spec.n_kv_heads}
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
        n = self.spec.n_kv_heads
        return 0 if self.spec.window else self.spec.cache_values_per_token * (n - self.streaming) // n


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
    repeats: bool = False  # are its weights those of a layer before?

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

    part: str  # embeddings | norms | head | stem
    parameters: int
    stack: str = MAIN
    row: int | None = None  # width of the one row that a token reads in a table
    weights: int = 0  # matrix entries that every token meets, borrowed ones included
    borrowed: int = 0  # those that belong to another piece: a head that is tied to the embedding
    once: int = 0  # multiply-adds made once for a sequence: a pooler, the convolutions over an image


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
        layers = sum(layer.parameters for layer in self.layers if not layer.repeats)
        return layers + sum(piece.parameters for piece in self.pieces)

    @property
    def active_parameters(self) -> int:
        """What one token of text meets."""
        layers = sum(layer.active_parameters for layer in self.layers if layer.stack != VISION and not layer.repeats)
        pieces = (piece for piece in self.pieces if piece.row is None and piece.stack != VISION)
        return layers + sum(piece.parameters + piece.borrowed for piece in pieces)

    def noted(self, *notes: str) -> ModelShape:
        return replace(self, notes=(*self.notes, *notes))

    def with_heads(self, **heads: Any) -> ModelShape:
        """The same model with other n_kv_heads, n_heads, head_dim or value_dim in the main stack; no latent or plan."""
        changes = dict.fromkeys(("latent_dim", "q_latent_dim", "rope_dim", "rope")) | heads

        def changed(attention: Attention) -> Attention:
            return replace(attention, spec=attention.spec.replace(**changes), keep=None)

        layers = []
        for layer in self.layers:
            if layer.stack == MAIN:
                cross = changed(layer.cross) if layer.cross else None
                layer = replace(layer, attention=changed(layer.attention), cross=cross)
            layers.append(layer)
        return replace(self, layers=tuple(layers))

    def with_plan(self, plan: Plan) -> ModelShape:
        """The same model with a cache that holds what the plan says. Raises HeadwiseError where it does not fit."""
        specs = [attention.spec for attention in self.cached]
        if not specs or any(spec.latent_dim for spec in specs):
            raise HeadwiseError(f"a plan is about cached keys and values of single heads, and {self.family} has none")
        plan.check(len(specs), max(spec.n_kv_heads for spec in specs))
        keeps = iter(plan.keep)
        layers = []
        for layer in self.layers:
            keep = next(keeps) if layer.stack == MAIN else None
            layers.append(replace(layer, attention=replace(layer.attention, keep=keep)))
        return replace(self, layers=tuple(layers))
