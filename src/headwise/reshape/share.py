"""Share key/value heads: a model of G key/value heads becomes one of fewer, which the query heads read in groups.

Groups are neighbours, or chosen by expected cost (`group`); heads that are put side by side take their query heads
along, which is exact. `pool` makes one head of each group. Both know activations by their second moments (`moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.weights import AttentionWeights, cannot_carry, head_counts, read_layers, with_layers
from headwise.reshape.align import key_rule
from headwise.reshape.group import GROUPINGS, Groups, adjacent, best
from headwise.reshape.pool import ALIGNING, BLIND, POOLS


@dataclass(frozen=True)
class Shared:
    """A model with fewer key/value heads, and how it came about."""

    model: nn.Module
    groups: tuple[Groups, ...]  # for each layer the key/value heads of the parent that share, in the new order
    turned: tuple[str, ...]  # for each layer what alignment of the keys was exact; "" where none was asked for


def check_share(model: nn.Module, n_kv_heads: int, method: str, grouping: str) -> None:
    """Raise HeadwiseError for what cannot be shared so, before any text is read."""
    for name, value, known in (("method", method, tuple(POOLS)), ("group", grouping, GROUPINGS)):
        if value not in known:
            raise HeadwiseError(f"{name}={value!r} is not known; one of {', '.join(known)}")
    n_heads, now, _ = head_counts(model)
    divisors = ", ".join(str(n) for n in range(1, max(now, 2)) if now % n == 0)
    if n_kv_heads < 1:
        raise HeadwiseError(f"kv_heads={n_kv_heads} is not positive; pass one of {divisors}")
    if n_kv_heads > n_heads:
        raise HeadwiseError(f"kv_heads={n_kv_heads} exceeds the {n_heads} query heads; pass one of {divisors}")
    if n_kv_heads > now:
        raise HeadwiseError(
            f"kv_heads={n_kv_heads}: the model has {now} key/value heads for its {n_heads} query heads already, and "
            f"sharing only lowers their number; pass one of {divisors}"
        )
    if now % n_kv_heads:
        raise HeadwiseError(
            f"kv_heads={n_kv_heads} does not divide the model's {now} key/value heads; pass one of {divisors}"
        )
    problem = cannot_carry(model, n_heads, n_kv_heads)
    if problem:
        raise HeadwiseError(problem)


def needs_text(method: str, grouping: str) -> bool:
    """Must a text be read for it, or do the weights suffice?"""
    return grouping == "best" or method not in BLIND


def share(
    model: nn.Module,
    n_kv_heads: int,
    method: str = "aligned+norm",
    grouping: str = "adjacent",
    roots: Sequence[Tensor] = (),
) -> Shared:
    """The model with n_kv_heads key/value heads in each layer; `model` itself is left alone.

    roots  for each layer, from `moments`, where `needs_text`. As many heads as the model has are the identity.
    """
    check_share(model, n_kv_heads, method, grouping)
    now = head_counts(model)[1]
    groups: list[Groups] = []
    turned: list[str] = []

    def pooled(weights: AttentionWeights, root: Tensor) -> AttentionWeights:
        weights = weights.double()
        chosen = adjacent(now, n_kv_heads) if grouping == "adjacent" else best(weights, root, n_kv_heads, POOLS[method])
        groups.append(chosen)
        turned.append(key_rule(weights).said if method in ALIGNING else "")
        return POOLS[method](weights.permuted([g for group in chosen for g in group]), root, n_kv_heads)

    before = read_layers(model)
    if n_kv_heads == now:
        return Shared(with_layers(model, before), (adjacent(now, now),) * len(before), ("",) * len(before))
    read = roots if needs_text(method, grouping) else [torch.empty(0)] * len(before)
    layers = (pooled(weights, root) for weights, root in zip(before, read, strict=True))
    child = with_layers(model, layers, n_kv_heads=n_kv_heads)
    return Shared(child, tuple(groups), tuple(turned))
