"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares: 0 changes nothing, 1 restores the clean answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError, unknown
from headwise.heads.study import SHARED, Study, chosen_heads
from headwise.intervals import Interval, interval_of
from headwise.models.ask import evaluating, require_next
from headwise.models.stacks import layers_of

PLACES = ("q", "k", "v", "out", "weights")

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Patching:
    """What each head brings back of the clean answer; the mean over pairs of texts, with its interval."""

    at: str  # q, k, v, out or weights
    effects: dict[str, Interval]  # head, or key/value head, -> share of the difference; 1 is all of it
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # (T,), where positions="each"

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return sorted(self.effects, key=lambda name: -abs(self.effects[name].mean))[:n]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3))
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


@torch.no_grad()
def patch(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    at: str = "out",
    *,
    heads: Iterable[str] | None = None,
    positions: Sequence[int] | str | None = None,
    target: Sequence[int] | Sequence[Sequence[int]] | None = None,
    together: bool = False,
    fast: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Patching:
    """Give one head at a time, while the model reads `corrupted`, what it had while reading `clean`.

    clean, corrupted  (T,) or (N,T): one pair of texts of the same length, or several
    at          "out": what the head adds to; "weights": where it looks; "q", "k", "v": what it asks with, is found by,
                hands over. Keys and values belong to key/value heads, which are named L3.KV1
    heads       names, default all
    positions   at which tokens: a list, default all; "each" tries every token alone and fills `by_position`
    target      two token ids, the answer to the clean text and the one to the corrupted text, or (N,2); default: what
                the model likes best after each
    together    patch all `heads` at once; the one effect is named "together"
    fast        an estimate from one backward pass, of `out` alone: (clean - corrupted) times the slope of the answer
                (Nanda 2023, "Attribution patching"; Syed et al. 2023, arXiv 2310.10348)
    progress    is called with the number of heads done, and of all

    The answer is read at the last position: the logit of the first target minus that of the second.
    """
    require_next(model)
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)
    if fast and (at != "out" or together):
        raise HeadwiseError(f"fast=True estimates heads one at a time and at='out' alone, not at={at!r}, {together=}")
    pairs, layers = _pairs(clean, corrupted, target), layers_of(model)
    effects, matrices, ends = _table(), _table(), []
    with evaluating(model):
        for number, pair in enumerate(pairs, 1):
            study = Study(model, layers, *pair)
            names = chosen_heads(study.names(at), heads, at)
            ends.append((study.clean, study.corrupted))
            if positions == "each":
                _append(matrices, study.by_position(at, names))
            rows = _positions(positions, len(pair[0]))
            _append(effects, study.estimate(names, rows) if fast else study.effects(at, names, rows, together))
            if progress is not None:
                progress(number, len(pairs))
    whole, none = (interval_of(list(values)) for values in zip(*ends, strict=True))
    return Patching(at, _intervals(effects), whole, none, {name: np.mean(rows, 0) for name, rows in matrices.items()})


def _table() -> dict[str, list[Any]]:
    """Of each head what every pair of texts gave."""
    return defaultdict(list)


def _append(table: Mapping[str, list[Any]], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        table[name].append(value)


def _intervals(effects: Mapping[str, list[float]]) -> dict[str, Interval]:
    return {name: interval_of(values) for name, values in effects.items()}


@torch.no_grad()
def path_effects(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    receiver: str,
    at: str = "q",
    *,
    target: Sequence[int] | Sequence[Sequence[int]] | None = None,
    senders: Iterable[str] | None = None,
) -> dict[str, Interval]:
    """Path patching: what each earlier head brings back of the clean answer through what one head reads.

    receiver  the head that reads, L3.H5, for at="q"; for "k" and "v" a key/value head, L3.KV1
    senders   heads of earlier layers, default all of them

    The sender gives its clean output; other heads between the two are frozen as they were in the corrupted text,
    feed-forwards run. The query, key or value that the receiver makes of this takes the place of its own, and
    everything after runs freely (Wang et al. 2022, section 3.1 and appendix B; Goldowsky-Dill et al. 2023,
    arXiv 2304.05969).
    """
    require_next(model)
    if at not in ("q", *SHARED):
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, ("q", *SHARED))
    pairs, layers = _pairs(clean, corrupted, target), layers_of(model)
    effects = _table()
    with evaluating(model):
        for pair in pairs:
            study = Study(model, layers, *pair)
            chosen_heads(study.names(at), [receiver], at)
            _append(effects, study.paths(receiver, at, senders))
    return _intervals(effects)


def _pairs(
    clean: Ids, corrupted: Ids, target: Sequence[int] | Sequence[Sequence[int]] | None
) -> list[tuple[Tensor, Tensor, list[int] | None]]:
    """Pairs of texts (T,), each with its two targets."""
    good, bad = (torch.as_tensor(ids) for ids in (clean, corrupted))
    if good.shape != bad.shape:
        raise HeadwiseError(
            f"clean is {tuple(good.shape)} and corrupted {tuple(bad.shape)}: pass as many tokens in both"
        )
    if good.ndim not in (1, 2) or good.numel() == 0:
        raise HeadwiseError(f"clean is {tuple(good.shape)}; pass ids (T,) or (N,T)")
    good, bad = (ids.reshape(-1, ids.shape[-1]) for ids in (good, bad))
    targets: list[list[int] | None] = [None] * len(good)
    if target is not None:
        rows = torch.as_tensor(target)
        if tuple(rows.shape) not in ((2,), (len(good), 2)):
            raise HeadwiseError(f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)")
        targets = rows.expand(len(good), 2).tolist()
    return list(zip(good, bad, targets, strict=True))


def _positions(positions: Sequence[int] | str | None, T: int) -> list[int] | None:
    if positions is None or positions == "each":
        return None
    if isinstance(positions, str):
        raise HeadwiseError(f"positions={positions!r} is not known; pass a list, or 'each'")
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return [position % T for position in positions]
