"""Take query heads out of a model: out of the weights where the format can carry what remains, else by silence.

All families here have one number of heads for every layer and one number of query heads for each key/value head.
Heads go out of the weights where what remains is such a model: the same number from every layer, as whole groups or
evenly from each group. Otherwise they are zeroed: their rows of W_Q and columns of W_O become 0, which computes the
same function as a gate of 0 but saves nothing. The cache holds keys and values, so that it shrinks only with whole
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.models.weights import cannot_carry, head_counts, read_layers, with_layers
from headwise.records import head_name
from headwise.reshape.damage import cache_bytes

Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


@dataclass(frozen=True)
class Pruned:
    """A model without some heads."""

    model: nn.Module
    heads: Gone  # that are gone, for each layer
    reason: str | None  # why they are zeroed; None where they are out of the weights

    @property
    def names(self) -> list[str]:
        return [head_name(layer, head) for layer, heads in enumerate(self.heads) for head in heads]


def prune_heads(model: nn.Module, heads: Gone, uniform: bool = False) -> Pruned:
    """The model without those heads; it computes what the parent computes with a gate of 0 on them.

    With `uniform` the heads must go out of the weights, and HeadwiseError says why where they cannot.
    """
    reason = obstacle(model, heads, uniform)
    layers = read_layers(model)
    if reason is not None:
        child = with_layers(model, layers)
        silence(child, heads)
        return Pruned(child, heads, reason)
    kept, kv_kept = _remaining(model, heads)
    chosen = (w.selected(h, g) for w, h, g in zip(layers, kept, kv_kept, strict=True))
    return Pruned(with_layers(model, chosen, len(kept[0]), len(kv_kept[0])), heads, None)


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    for weights, gone in zip(read_layers(model), heads, strict=True):
        for tensor in (weights.wq, weights.bq, weights.wo.transpose(0, 1)):
            if tensor is not None and gone:
                tensor[list(gone)] = 0


def obstacle(model: nn.Module, heads: Gone, uniform: bool = False) -> str | None:
    """Why these heads cannot leave the weights; None where they can. With `uniform` that is a HeadwiseError."""
    kept, kv_kept = _remaining(model, heads)
    n_heads, n_kv_heads, _ = head_counts(model)
    reason = _uneven(heads, kept, n_heads // n_kv_heads) or cannot_carry(model, len(kept[0]), len(kv_kept[0]))
    if reason is None:
        return None
    if uniform:
        raise HeadwiseError(f"{reason}; leave out --uniform to have the heads zeroed instead")
    shares = uniform_shares(model)
    return f"{reason}; --uniform --keep {shares[0]:.3g} would take as many from each layer" if shares else reason


def uniform_shares(model: nn.Module) -> list[float]:
    """The shares of the heads that may stay where as many leave the weights of each layer, the largest first."""
    n_heads, n_kv_heads, _ = head_counts(model)
    r = n_heads // n_kv_heads
    sizes = {((n_kv_heads - n) * r, n_kv_heads - n) for n in range(1, n_kv_heads)}
    sizes |= {(n_kv_heads * (r - n), n_kv_heads) for n in range(1, r)}
    return sorted({size[0] / n_heads for size in sizes if cannot_carry(model, *size) is None}, reverse=True)


def _remaining(model: nn.Module, heads: Gone) -> tuple[list[list[int]], list[list[int]]]:
    """For each layer the query heads, and the key/value heads, that are still read."""
    n_heads, n_kv_heads, _ = head_counts(model)
    kept = [[h for h in range(n_heads) if h not in gone] for gone in heads]
    return kept, [sorted({h // (n_heads // n_kv_heads) for h in row}) for row in kept]


def _uneven(heads: Gone, kept: Sequence[Sequence[int]], r: int) -> str | None:
    """Why what remains is not a model of the format; None where it is."""
    lost = {len(gone) for gone in heads}
    if len(lost) > 1:
        return f"the layers would lose {min(lost)} to {max(lost)} heads and the config has one number of heads for all"
    for layer, remaining in enumerate(kept):
        readers = set(Counter(h // r for h in remaining).values())
        if len(readers) > 1:
            return (
                f"in layer {layer} some key/value heads would be read by {min(readers)} query heads and some by "
                f"{max(readers)}; the config has one number, so whole groups of {r} go, or as many from each"
            )
    groups = {len({h // r for h in remaining}) for remaining in kept}
    if len(groups) > 1:
        return (
            f"the layers would have {min(groups)} to {max(groups)} key/value heads; the config has one number for all"
        )
    return None


def cache_note(model: nn.Module, pruned: Pruned) -> str:
    """What became of the cache, and what would shrink it."""
    n_heads, n_kv_heads, _ = head_counts(model)
    now, r = head_counts(pruned.model)[1], n_heads // n_kv_heads
    if now < n_kv_heads:
        return f"the cache shrinks from {n_kv_heads} to {now} key/value heads a layer"
    if not cache_bytes(model):
        return "the model keeps no cache"
    shareable = n_kv_heads > 1 and cannot_carry(model, n_heads, 1) is None
    if pruned.reason is not None:
        why = "the cache does not shrink: zeroed heads keep their keys and values"
        return f"{why}; `headwise share` lets heads share theirs" if shareable else why
    why = f"the cache does not shrink: each key/value head is read by {r} query heads, and all {r} must go"
    return f"{why}; prune whole groups, or lower --kv-heads with `headwise share`" if shareable else why
