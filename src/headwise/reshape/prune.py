"""Prune query heads: those that are named, or those that matter least by a score.

Heads leave the weights where what remains has one number of heads for every layer and one of query heads for each
key/value head. Otherwise their rows of W_Q and columns of W_O become 0, which is a gate of 0 and saves nothing. The
cache shrinks only with whole groups.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Unpack

from torch import nn

from headwise.errors import HeadwiseError
from headwise.families import check_next
from headwise.heads.ablate import ablation, importance
from headwise.models.ask import predicts
from headwise.models.open import Folder
from headwise.models.weights import (
    AttentionWeights,
    attentions,
    cannot_carry,
    head_counts,
    layers_in_turn,
    with_layers,
)
from headwise.records import head_name, parse_head
from headwise.reshape.heal import Gone, cache_bytes, silenced
from headwise.reshape.job import (
    OF_RUN,
    Calibration,
    Change,
    Changed,
    Listener,
    Options,
    Reshaped,
    n_tokens,
    reshape,
)
from headwise.words import unknown

SCORES = ("importance", "ablation")  # the first is the default


def prune(
    model: nn.Module | str | Path,
    heads: str | Sequence[str] | None = None,
    *,
    keep: float | None = None,
    by: str | None = None,
    uniform: bool = False,
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> Reshaped:
    """Remove query heads from a model, which is left alone: those in `heads`, or else those that `keep` leaves over.

        child = hw.prune(model, ["L0.H1", "L3.H5"], text="book.txt")
        child = hw.prune(model, keep=0.75, by="ablation", heal=200)

    Heads leave the weights where the format can carry what remains, and are zeroed otherwise; `notes` says why. The
    other arguments are those of `share`, and so are the errors.

    Args:
        model: a GPT, a model of transformers, or the folder of one
        heads: those that go, by name, as a list or as "L0.H1,L3.H5"
        keep: or the fraction of all heads that stays, above 0 and below 1; those with the lowest scores go
        by: the score: importance (by gradients, the default) or ablation (loss without the head); see `head_scores`
        uniform: as many heads from each layer, so that they leave the weights; an error where they cannot
    """
    return reshape(model, Pruning(heads, keep, by, uniform), listener, **options)


@dataclass(frozen=True)
class Pruning(Change):
    """What `prune` does."""

    heads: str | Sequence[str] | None = None
    keep: float | None = None
    by: str | None = None
    uniform: bool = False

    def __post_init__(self) -> None:
        heads, keep, by = self.heads, self.keep, self.by
        if (heads is None) == (keep is None):  # neither, or both
            raise HeadwiseError(
                "say which heads go: heads='L0.H1,L3.H5', or keep=0.75 with by=; one of the two"
            )
        if heads is not None and by is not None:
            raise HeadwiseError(
                f"by={by!r} chooses heads where keep= says how many stay; heads= names them"
            )
        if by not in (None, *SCORES):
            raise unknown(f"by={by!r} is not known", by, SCORES)
        if keep is None:
            return
        if not 0 < keep < 1:
            raise HeadwiseError(
                f"keep={keep} must lie between 0 and 1; 0.75 removes a quarter of the heads"
            )
        # a frozen record has no assignment to its fields
        vars(self)["by"] = by or SCORES[0]

    def check_family(self, folder: Path) -> None:
        if self.by is not None:  # a score needs the loss of a next token
            check_next(folder, "pass heads=")

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        if self.heads is not None:
            chosen_heads(self.heads, n_layers, n_heads)

    def check(self, model: nn.Module) -> None:
        if self.by is not None and predicts(model) != "next":
            raise HeadwiseError(
                f"by={self.by!r} needs the loss of a next token, and {type(model).__name__} predicts none; pass heads="
            )
        # Which heads go is not known yet, how many do is: as if all scores were equal (0 for any name).
        obstacle(model, self._gone(model, defaultdict(float)), self.uniform)

    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        model = source.model
        scores = {} if self.by is None else head_scores(self.by, source, calibration)
        gone = self._gone(model, scores)
        columns = [
            w.wo[:, list(h)] for w, h in zip(layers_in_turn(model), gone, strict=True)
        ]
        if not any(x.any() for x in columns):  # zeroed by an earlier pruning, say
            raise HeadwiseError(
                f"{', '.join(_names(gone))}: these heads give nothing already, so nothing changes and nothing is "
                f"written; name others with heads="
            )
        changed = prune_heads(model, gone, self.uniform)
        if self.by is None:
            return changed
        part = (
            "what the run held out" if calibration.name == OF_RUN else "the whole text"
        )
        tokens = n_tokens(calibration.statistics)
        ranked = (
            f"ranked by {self.by} on {tokens:,} tokens of the part that is not held "
            f"out; `headwise heads` measures on {part}, so its order may differ"
        )
        details = changed.details | {"scores": scores}
        return replace(changed, details=details, notes=(ranked, *changed.notes))

    def _gone(self, model: nn.Module, scores: Mapping[str, float]) -> Gone:
        if self.heads is not None:
            return chosen_heads(
                self.heads, len(attentions(model)), head_counts(model)[0]
            )
        assert self.keep is not None  # one of the two is given
        return weakest(model, scores, self.keep, self.uniform)


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
        raise HeadwiseError(
            "no head is named; pass heads='L0.H1,L3.H5', or keep= with by="
        )
    return tuple(tuple(sorted(gone)) for gone in chosen)


def head_scores(by: str, source: Folder, calibration: Calibration) -> dict[str, float]:
    """A score for each head, larger for those to keep.

    importance   by the gradient, relative to the layer (Michel et al. 2019, arXiv 1905.10650)
    ablation     the change in loss when the head alone is silenced
    """
    batches = calibration.statistics
    if by == "importance":
        return importance(source.model, batches)
    changes = ablation(source.model, batches)
    return {name: change.mean for name, change in changes.items()}


def weakest(
    model: nn.Module, scores: Mapping[str, float], keep: float, uniform: bool
) -> Gone:
    """The heads with the lowest scores, so that a fraction `keep` of all remains, and a head of every layer.

    uniform  the same number from each layer: whole groups by their mean score, else evenly from each group

    Raises HeadwiseError for a fraction that leaves too few heads, or that removes none.
    """
    n_layers, (n_heads, n_kv_heads, _) = len(attentions(model)), head_counts(model)
    wanted = _n_gone(n_layers * n_heads, keep)
    if wanted > n_layers * (n_heads - 1):
        stay = n_layers * n_heads - wanted
        raise HeadwiseError(
            f"keep={keep} leaves {stay} heads, and each of the {n_layers} layers needs one; pass "
            f"{1 / n_heads:.3g} or more"
        )
    chosen: list[list[int]] = []  # of each layer
    ranked: list[tuple[float, int, int]] = []
    for layer in range(n_layers):
        row = [scores[head_name(layer, head)] for head in range(n_heads)]
        ranked += [(score, layer, head) for head, score in enumerate(row)]
        chosen.append(_weakest_evenly(row, n_kv_heads, keep) if uniform else [])
    if uniform and not all(chosen):  # `keep` is so near to 1 that no layer loses a head
        fractions = ", ".join(
            f"{fraction:.3g}" for fraction in uniform_fractions(model)
        )
        raise HeadwiseError(
            f"keep={keep} with uniform=True removes no head of a layer; what would: {fractions or '-'}"
        )
    if not uniform and wanted == 0:
        raise HeadwiseError(
            f"keep={keep} of {n_layers * n_heads} heads removes none; pass a smaller one"
        )
    for _, layer, head in sorted(ranked) if not uniform else ():
        # a layer keeps one
        if sum(map(len, chosen)) < wanted and len(chosen[layer]) < n_heads - 1:
            chosen[layer].append(head)
    return tuple(tuple(sorted(heads)) for heads in chosen)


def _n_gone(n: int, keep: float) -> int:
    """How many of n go: the whole number nearest to (1 - keep) n, of two equally near ones the smaller.

    1e-9 is for rounding, by which a half could go up: (1 - 0.7) * 5 is 1.5000000000000002, and 1 of the 5 goes, not 2.
    """
    return math.ceil((1 - keep) * n - 0.5 - 1e-9)


def _weakest_evenly(scores: Sequence[float], n_kv_heads: int, keep: float) -> list[int]:
    """Of a layer the heads that go: whole groups if `keep` takes one at least, or as many heads from each group."""
    r = len(scores) // n_kv_heads
    groups = [range(g * r, (g + 1) * r) for g in range(n_kv_heads)]
    # How many groups of the layer go, or else how many heads of each group; one stays in any case.
    n_groups, n_each = (min(_n_gone(n, keep), n - 1) for n in (n_kv_heads, r))
    if n_groups:
        return list(
            chain(
                *sorted(groups, key=lambda group: sum(scores[h] for h in group))[
                    :n_groups
                ]
            )
        )
    return list(
        chain(*(sorted(group, key=scores.__getitem__)[:n_each] for group in groups))
    )


def prune_heads(model: nn.Module, heads: Gone, uniform: bool = False) -> Changed:
    """The model without those heads, as with a gate of 0 on them; HeadwiseError where `uniform` cannot be had."""
    # `reason`: why the heads cannot leave the weights and become 0; None where they leave.
    reason, names = obstacle(model, heads, uniform), _names(heads)
    kept, kv_kept = _remaining(model, heads)
    n_heads, notes = head_counts(model)[0], [f"gone: {', '.join(names)}"]
    silent: Gone = ()
    if reason is None:
        chosen = map(AttentionWeights.selected, layers_in_turn(model), kept, kv_kept)
        # all layers keep as many: `_reason`
        child = with_layers(model, chosen, len(kept[0]), len(kv_kept[0]))
        done = "out of the weights"
    else:
        child = with_layers(model, map(silenced, layers_in_turn(model), heads))
        notes.insert(0, f"zeroed, not removed: {reason}")
        done, silent = "zeroed", heads
    notes.append(_cache_note(model, child, zeroed=reason is not None))
    what = f"heads {done}: {len(names)} of {len(heads) * n_heads}"
    details = {"heads": names, "zeroed": reason is not None}
    return Changed(child, what, details, tuple(notes), silent)


def _names(heads: Gone) -> list[str]:
    return [head_name(layer, head) for layer, some in enumerate(heads) for head in some]


def obstacle(model: nn.Module, heads: Gone, uniform: bool = False) -> str | None:
    """Why these heads cannot leave the weights; None where they can. With `uniform` that is a HeadwiseError."""
    reason = _reason(model, heads)
    if reason is None:
        return None
    if uniform:
        raise HeadwiseError(
            f"{reason}; leave out uniform=True to have the heads zeroed instead"
        )
    fractions = uniform_fractions(model)
    if fractions:
        reason += f"; as many from each layer could leave, uniform at a keep of {fractions[0]:.3g}"
    return reason


def _reason(model: nn.Module, heads: Gone) -> str | None:
    # A config has one number of heads for all layers, and equal groups; and it must be able to say the new numbers.
    r = head_counts(model)[0] // head_counts(model)[1]
    kept, kv_kept = _remaining(model, heads)
    lost, sizes = set(map(len, heads)), set(map(len, kv_kept))
    if len(lost) > 1:
        return f"the layers would lose {min(lost)} to {max(lost)} heads and the config has one number of heads for all"
    for layer, row in enumerate(kept):
        readers = Counter(h // r for h in row).values()  # of each key/value head
        if len(set(readers)) > 1:
            return (
                f"in layer {layer} some key/value heads would be read by {min(readers)} query heads and some "
                f"by {max(readers)}; the config has one number, so whole groups of {r} go, or as many from each"
            )
    if len(sizes) > 1:
        return f"the layers would have {min(sizes)} to {max(sizes)} key/value heads; the config has one number for all"
    return cannot_carry(model, len(kept[0]), len(kv_kept[0]))


def uniform_fractions(model: nn.Module) -> list[float]:
    """The fractions of the heads that may stay where as many leave the weights of each layer, the largest first."""
    n_heads, n_kv_heads, _ = head_counts(model)
    r = n_heads // n_kv_heads
    # (query heads, key/value heads) that stay: n whole groups, or n heads of each group.
    sizes = [(n * r, n) for n in range(1, n_kv_heads)]
    sizes += [(n_kv_heads * n, n_kv_heads) for n in range(1, r)]
    carried = {
        size[0] / n_heads for size in sizes if cannot_carry(model, *size) is None
    }
    return sorted(carried, reverse=True)


def _remaining(
    model: nn.Module, heads: Gone
) -> tuple[list[list[int]], list[list[int]]]:
    """For each layer the query heads, and the key/value heads, that are still read."""
    n_heads, n_kv_heads, _ = head_counts(model)
    kept = [[h for h in range(n_heads) if h not in gone] for gone in heads]
    return kept, [sorted({h // (n_heads // n_kv_heads) for h in row}) for row in kept]


def _cache_note(model: nn.Module, child: nn.Module, zeroed: bool) -> str:
    """What becomes of the cache; where it stays as it is and `share` could make it smaller, that too."""
    (n_heads, n_kv_heads, _), now = head_counts(model), head_counts(child)[1]
    if now < n_kv_heads:
        return f"the cache shrinks from {n_kv_heads} to {now} key/value heads a layer"
    if not cache_bytes(model):
        return "the model keeps no cache"
    size = n_heads // n_kv_heads
    note = (
        f"the cache does not shrink: each key/value head is read by {size} query heads, "
        f"and all {size} must go"
    )
    if zeroed:
        note = "nothing is faster and the cache does not shrink: zeroed heads keep their keys and values"
    # tried with one key/value head
    if n_kv_heads > 1 and cannot_carry(model, n_heads, 1) is None:
        note += "; `headwise share` lets heads share theirs"
    return note
