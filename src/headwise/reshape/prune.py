"""Remove query heads: what the format can carry without is taken out of the weights, the rest is silenced.

All families here have one number of heads for every layer and one number of query heads for each key/value head.
Heads go out of the weights where what remains is such a model: the same number from every layer, as whole groups or
evenly from each group. Otherwise they are zeroed: their rows of W_Q and columns of W_O become 0, which computes the
same function as a gate of 0 but saves nothing. The cache holds keys and values, so that it shrinks only with whole
groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.models.weights import attentions, cannot_carry, family_of, head_counts, read_layers, with_layers

Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


@dataclass(frozen=True)
class Pruned:
    """A model without some heads."""

    model: nn.Module
    heads: Gone  # that are gone, for each layer
    reason: str | None  # why they are zeroed; None where they are out of the weights

    @property
    def names(self) -> list[str]:
        return [f"L{layer}.H{head}" for layer, heads in enumerate(self.heads) for head in heads]


def named_heads(model: nn.Module, names: str) -> Gone:
    """`L0.H1,L3.H5` as numbers. Raises HeadwiseError for what is no head of the model, and for a layer left without."""
    n_layers, (n_heads, _, _) = len(attentions(model)), head_counts(model)
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    for name in filter(None, (part.strip() for part in names.split(","))):
        match = re.fullmatch(r"L(\d+)\.H(\d+)", name)
        if match is None:
            raise HeadwiseError(f"{name!r} is no head; write L3.H5 for layer 3, head 5, both counted from 0")
        layer, head = map(int, match.groups())
        if layer >= n_layers or head >= n_heads:
            raise HeadwiseError(
                f"the model has no head {name}: {n_layers} layers of {n_heads} heads, L0.H0 to "
                f"L{n_layers - 1}.H{n_heads - 1}"
            )
        chosen[layer].add(head)
    if not any(chosen):
        raise HeadwiseError("no head is named; pass --heads L0.H1,L3.H5, or --keep with --by")
    return _checked(chosen, n_heads)


def weakest(model: nn.Module, scores: Mapping[str, float], keep: float, uniform: bool) -> Gone:
    """The heads with the lowest scores, so that a share `keep` of all remains.

    uniform  the same number from each layer, in the shape that the format can carry: whole groups of those that read
             one key/value head, by their mean score; where that is more than is to go, evenly from each group
    """
    n_layers, (n_heads, n_kv_heads, _) = len(attentions(model)), head_counts(model)
    if not 0 < keep < 1:
        raise HeadwiseError(f"keep={keep} must lie between 0 and 1; 0.75 removes a quarter of the heads")
    table = [[scores[f"L{layer}.H{head}"] for head in range(n_heads)] for layer in range(n_layers)]
    if uniform:
        shares = _uniform_shares(model)
        gone = [_weakest_evenly(row, n_kv_heads, keep) for row in table]
        if all(gone):
            return tuple(gone)
        known = f"{', '.join(f'{share:.3g}' for share in shares)} would" if shares else "no share can"
        raise HeadwiseError(f"keep={keep} with --uniform removes no head of a layer; {known}")
    ranked = sorted((score, layer, head) for layer, row in enumerate(table) for head, score in enumerate(row))
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    wanted = _n_gone(n_layers * n_heads, keep)
    for _, layer, head in ranked:
        if sum(map(len, chosen)) < wanted and len(chosen[layer]) < n_heads - 1:  # a layer keeps one
            chosen[layer].add(head)
    if not any(chosen):
        raise HeadwiseError(f"keep={keep} of {n_layers * n_heads} heads removes none; pass a smaller one")
    return _checked(chosen, n_heads)


def _n_gone(n: int, keep: float) -> int:
    """How many of n go: the nearest number, and of two that are equally near the smaller one."""
    return math.ceil((1 - keep) * n - 0.5 - 1e-9)


def _weakest_evenly(scores: Sequence[float], n_kv_heads: int, keep: float) -> tuple[int, ...]:
    """Of one layer; none where that share takes neither a whole group nor one from each."""
    r = len(scores) // n_kv_heads
    groups = [range(g * r, (g + 1) * r) for g in range(n_kv_heads)]
    n_groups, n_each = (min(_n_gone(n, keep), n - 1) for n in (n_kv_heads, r))
    if n_groups:
        order = sorted(groups, key=lambda group: sum(scores[h] for h in group))
        return tuple(sorted(h for group in order[:n_groups] for h in group))
    if n_each:
        return tuple(sorted(h for group in groups for h in sorted(group, key=lambda h: scores[h])[:n_each]))
    return ()


def _checked(chosen: Sequence[Iterable[int]], n_heads: int) -> Gone:
    for layer, heads in enumerate(chosen):
        if len(set(heads)) == n_heads:
            raise HeadwiseError(f"all {n_heads} heads of layer {layer} are to go; a layer needs one")
    return tuple(tuple(sorted(heads)) for heads in chosen)


def prune(model: nn.Module, heads: Gone, uniform: bool = False) -> Pruned:
    """The model without those heads; it computes what the parent computes with a gate of 0 on them.

    With `uniform` the heads must go out of the weights, and HeadwiseError says why where they cannot.
    """
    reason = obstacle(model, heads, uniform)
    layers = read_layers(model)
    if reason is not None:
        child = with_layers(model, layers)
        zero(child, heads)
        return Pruned(child, heads, reason)
    kept, kv_kept = _remaining(model, heads)
    chosen = (w.selected(h, g) for w, h, g in zip(layers, kept, kv_kept, strict=True))
    return Pruned(with_layers(model, chosen, len(kept[0]), len(kv_kept[0])), heads, None)


def obstacle(model: nn.Module, heads: Gone, uniform: bool = False) -> str | None:
    """Why these heads cannot leave the weights; None where they can. With `uniform` that is a HeadwiseError."""
    kept, kv_kept = _remaining(model, heads)
    n_heads, n_kv_heads, _ = head_counts(model)
    reason = _uneven(heads, kept, n_heads // n_kv_heads) or cannot_carry(model, len(kept[0]), len(kv_kept[0]))
    if reason is None:
        return None
    if uniform:
        raise HeadwiseError(f"{reason}; leave out --uniform to have the heads zeroed instead")
    shares = _uniform_shares(model)
    return f"{reason}; --uniform --keep {shares[0]:.3g} would take as many from each layer" if shares else reason


def _uniform_shares(model: nn.Module) -> list[float]:
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
    counts = [len(gone) for gone in heads]
    if len(set(counts)) > 1:
        return (
            f"the layers would lose {min(counts)} to {max(counts)} heads and the config has one number of heads for all"
        )
    for layer, remaining in enumerate(kept):
        sizes: dict[int, int] = {}
        for h in remaining:
            sizes[h // r] = sizes.get(h // r, 0) + 1
        if len(set(sizes.values())) > 1:
            return (
                f"in layer {layer} some key/value heads would be read by {min(sizes.values())} query heads and some by "
                f"{max(sizes.values())}; the config has one number, so whole groups of {r} go, or as many from each"
            )
    groups = {len({h // r for h in remaining}) for remaining in kept}
    if len(groups) > 1:
        return (
            f"the layers would have {min(groups)} to {max(groups)} key/value heads; the config has one number for all"
        )
    return None


@torch.no_grad()
def zero(model: nn.Module, heads: Gone) -> None:
    """Silence heads in place: their rows of W_Q, with the bias, and their columns of W_O become 0."""
    for weights, gone in zip(read_layers(model), heads, strict=True):
        for tensor in (weights.wq, weights.bq, weights.wo.transpose(0, 1)):
            if tensor is not None and gone:
                tensor[list(gone)] = 0


def cache_note(model: nn.Module, pruned: Pruned) -> str:
    """What became of the cache, and what would shrink it."""
    n_heads, n_kv_heads, _ = head_counts(model)
    now, r = head_counts(pruned.model)[1], n_heads // n_kv_heads
    if now < n_kv_heads:
        return f"the cache shrinks from {n_kv_heads} to {now} key/value heads a layer"
    if family_of(model).name == "bert":
        return "the model keeps no cache"
    shareable = n_kv_heads > 1 and cannot_carry(model, n_heads, 1) is None
    if pruned.reason is not None:
        why = "the cache does not shrink: zeroed heads keep their keys and values"
        return f"{why}; `headwise share` lets heads share theirs" if shareable else why
    why = f"the cache does not shrink: each key/value head is read by {r} query heads, and all {r} must go"
    return f"{why}; prune whole groups, or lower --kv-heads with `headwise share`" if shareable else why
