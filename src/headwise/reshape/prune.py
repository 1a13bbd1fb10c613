"""Prune query heads: those that are named, or those that matter least by a score.

Heads leave the weights where what remains has one number of heads for every layer and one of query heads for each
key/value head. Otherwise their rows of W_Q and columns of W_O become 0, which is a gate of 0 and saves nothing. The
cache shrinks only with whole groups.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.families import check_next
from headwise.heads.ablate import importance
from headwise.models.ask import predicts
from headwise.models.open import Folder
from headwise.models.weights import (
    attentions,
    cannot_carry,
    head_counts,
    read_layers,
    with_layers,
)
from headwise.records import head_name, parse_head
from headwise.reshape.heal import Gone, silence
from headwise.reshape.job import (
    Calibration,
    Change,
    Changed,
    Listener,
    Options,
    Reshaped,
    reshape,
)


def prune(
    model: nn.Module | str | Path,
    heads: str | Sequence[str] | None = None,
    *,
    keep: float | None = None,
    uniform: bool = False,
    listener: Listener = lambda event: None,
    **options: Unpack[Options],
) -> Reshaped:
    """Remove query heads from a model, which is left alone: those in `heads`, or else those that `keep` leaves over.

        child = hw.prune(model, ["L0.H1", "L3.H5"], text="book.txt")
        child = hw.prune(model, keep=0.75, heal=200)

    Heads leave the weights where the format can carry what remains, and are zeroed otherwise; `notes` says why. The
    other arguments are those of `share`, and so are the errors.

    Args:
        model: a GPT, a model of transformers, or the folder of one
        heads: those that go, by name, as a list or as "L0.H1,L3.H5"
        keep: or the fraction of all heads that stays, above 0 and below 1; those of least importance go, by gradients
            and relative to the layer (Michel et al. 2019, arXiv 1905.10650)
        uniform: as many heads from each layer, so that they leave the weights; an error where they cannot
    """
    return reshape(model, Pruning(heads, keep, uniform), listener, **options)


@dataclass(frozen=True)
class Pruning(Change):
    """What `prune` does."""

    heads: str | Sequence[str] | None = None
    keep: float | None = None
    uniform: bool = False

    def __post_init__(self) -> None:
        if (self.heads is None) == (self.keep is None):  # neither, or both
            raise HeadwiseError(
                "say which heads go: heads='L0.H1,L3.H5', or keep=0.75; one of the two"
            )
        if self.keep is not None and not 0 < self.keep < 1:
            raise HeadwiseError(
                f"keep={self.keep} must lie between 0 and 1; 0.75 removes a quarter of the heads"
            )

    def check_family(self, folder: Path) -> None:
        if self.keep:  # importance needs the loss of a next token
            check_next(folder, "pass heads=")

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        if self.heads is not None:
            chosen_heads(self.heads, n_layers, n_heads)

    def check(self, model: nn.Module) -> None:
        if self.keep and predicts(model) != "next":
            raise HeadwiseError(
                f"keep= needs the loss of a next token, and {type(model).__name__} predicts none; pass heads="
            )
        # Which heads go is not known yet, how many do is: as if all scores were equal (0 for any name).
        obstacle(model, self._gone(model, defaultdict(float)), self.uniform)

    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        model = source.model
        scores: dict[str, float] = {}
        if self.keep:
            scores = importance(model, calibration.statistics)
        changed = prune_heads(model, self._gone(model, scores), self.uniform)
        if not self.keep:
            return changed
        tokens = sum(map(torch.numel, calibration.statistics))
        ranked = f"ranked by importance on {tokens:,} tokens of the part that is not held out"
        details = changed.details | {"scores": scores}
        return replace(changed, details=details, notes=(ranked, *changed.notes))

    def _gone(self, model: nn.Module, scores: Mapping[str, float]) -> Gone:
        if self.heads is None:
            assert self.keep is not None  # one of the two is given
            return weakest(model, scores, self.keep, self.uniform)
        return chosen_heads(self.heads, len(attentions(model)), head_counts(model)[0])


def chosen_heads(names: str | Sequence[str], n_layers: int, n_heads: int) -> Gone:
    """For each layer the numbers of the heads named in a list, or in a text such as "L0.H1,L3.H5".

    Raises HeadwiseError for what is no head of the model, for no name at all, and for a layer left without a head.
    """
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    listed = names.split(",") if isinstance(names, str) else names
    for name in filter(None, map(str.strip, listed)):
        # `part`: a stack of a model with several, of which none is pruned
        part, layer, head = parse_head(name)
        if part or layer >= n_layers or head >= n_heads:
            last = f"L{n_layers - 1}.H{n_heads - 1}"
            raise HeadwiseError(
                f"the model has no head {name}: {n_layers} layers of {n_heads} heads, L0.H0 to {last}"
            )
        chosen[layer].add(head)
        if len(chosen[layer]) == n_heads:
            raise HeadwiseError(
                f"all {n_heads} heads of layer {layer} are to go; a layer needs one"
            )
    if not any(chosen):
        raise HeadwiseError("no head is named; pass heads='L0.H1,L3.H5', or keep=")
    return _sorted(chosen)


def _sorted(chosen: Iterable[Iterable[int]]) -> Gone:
    return tuple(tuple(sorted(heads)) for heads in chosen)


def weakest(
    model: nn.Module, scores: Mapping[str, float], keep: float, uniform: bool
) -> Gone:
    """The heads with the lowest scores, so that a fraction `keep` of all remains, and a head of every layer.

    uniform  the same number from each layer: whole groups by their mean score if `keep` takes one at least, else
             evenly from each group

    Raises HeadwiseError for a fraction that leaves too few heads, or that removes none.
    """
    n_layers = len(attentions(model))
    H, G, _ = head_counts(model)
    wanted = _n_gone(n_layers * H, keep)
    if wanted > n_layers * (H - 1):
        stay = n_layers * H - wanted
        raise HeadwiseError(
            f"keep={keep} leaves {stay} heads, and each of the {n_layers} layers needs one; pass "
            f"{1 / H:.3g} or more"
        )
    r = H // G
    groups = [[*range(g * r, g * r + r)] for g in range(G)]
    # `n` of each pool go: groups of a layer, or else heads of a group; one stays in any case.
    n = min(_n_gone(G, keep), G - 1)
    pools = [groups]
    if not n:
        n = min(_n_gone(r, keep), r - 1)
        pools = [[[head] for head in group] for group in groups]
    if not (n if uniform else wanted):
        raise HeadwiseError(f"keep={keep} removes no head; pass a smaller one")

    def score(layer: int, heads: Iterable[int]) -> float:
        return sum(scores[head_name(layer, head)] for head in heads)

    chosen: list[list[int]] = [[] for _ in range(n_layers)]
    if uniform:
        for layer, pool in product(range(n_layers), pools):
            chosen[layer] += chain(*sorted(pool, key=partial(score, layer))[:n])
        return _sorted(chosen)
    every = product(range(n_layers), range(H))
    for layer, head in sorted(every, key=lambda place: score(place[0], place[1:])):
        # a layer keeps one
        if sum(map(len, chosen)) < wanted and len(chosen[layer]) < H - 1:
            chosen[layer].append(head)
    return _sorted(chosen)


def _n_gone(n: int, keep: float) -> int:
    """How many of n go: the whole number nearest to (1 - keep) n, of two equally near ones the smaller.

    1e-9 is for rounding, by which a half could go up: (1 - 0.7) * 5 is 1.5000000000000002, and 1 of the 5 goes, not 2.
    """
    return math.ceil((1 - keep) * n - 0.5 - 1e-9)


def prune_heads(model: nn.Module, heads: Gone, uniform: bool = False) -> Changed:
    """The model without those heads, as with a gate of 0 on them; HeadwiseError where `uniform` cannot be had."""
    # `reason`: why the heads cannot leave the weights and become 0; None where they leave.
    reason = obstacle(model, heads, uniform)
    names = [head_name(layer, h) for layer, gone in enumerate(heads) for h in gone]
    notes = [f"gone: {', '.join(names)}"]
    details = {"heads": names, "zeroed": bool(reason)}
    what = f"{len(names)} of {len(heads) * head_counts(model)[0]}"
    if not reason:
        kept, readers = _kept(model, heads)
        layers = zip(read_layers(model), kept, readers, strict=True)
        chosen = (weights.selected(row, [*counts]) for weights, row, counts in layers)
        # all layers keep as many: `obstacle`
        child = with_layers(model, chosen, len(kept[0]), len(readers[0]))
        return Changed(
            child, f"heads out of the weights: {what}", details, tuple(notes)
        )
    child = copy.deepcopy(model)
    silence(child, heads)
    notes.insert(0, f"zeroed, not removed, so nothing is faster: {reason}")
    return Changed(child, f"heads zeroed: {what}", details, tuple(notes), heads)


def obstacle(model: nn.Module, heads: Gone, uniform: bool = False) -> str | None:
    """Why these heads cannot leave the weights; None where they can. With `uniform` that is a HeadwiseError."""
    kept, readers = _kept(model, heads)
    # by how many query heads each key/value head of a layer is read
    shapes = {tuple(counts.values()) for counts in readers}
    if len(shapes) > 1 or len(set(*shapes)) > 1:
        n_heads, n_kv_heads, _ = head_counts(model)
        reason: str | None = (
            f"the config has one number of heads for all layers, and one of query heads for each key/value head: whole "
            f"groups of {n_heads // n_kv_heads} leave each layer, or as many of each group"
        )
    else:
        reason = cannot_carry(model, len(kept[0]), len(readers[0]))
    if reason and uniform:
        raise HeadwiseError(
            f"{reason}; leave out uniform=True to have the heads zeroed instead"
        )
    return reason


def _kept(
    model: nn.Module, heads: Gone
) -> tuple[list[list[int]], list[dict[int, int]]]:
    """For each layer the query heads that stay, and each key/value head that they read: by how many it is read."""
    n_heads, n_kv_heads, _ = head_counts(model)
    kept = [[h for h in range(n_heads) if h not in gone] for gone in heads]
    return kept, [Counter(h * n_kv_heads // n_heads for h in row) for row in kept]
