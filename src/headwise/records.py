"""The data that crosses rooms: what was measured, in plain types and NumPy arrays. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Trace:
    """Every step of one attention call, in the rung's own kind of array (nested lists on the plain rung)."""

    scores: Any  # (B,H,T,S)  q.k * scale, before anything is forbidden
    capped: Any  # (B,H,T,S)  after the softcap; the scores themselves where there is none
    masked: Any  # (B,H,T,S)  after bias and mask; -inf where a query may not attend
    weights: Any  # (B,H,T,S)  after softmax; a row sums to 1, to less beside a sink, to 0 if it may attend nothing
    lse: Any  # (B,H,T)    log of the softmax's denominator, sink included: weights = exp(masked - lse)
    out: Any  # (B,H,T,E)  weights (after dropout) times V, times the gate


@dataclass(frozen=True)
class HeadMap:
    """Where one head looked: `weights[i, j]` is how much position i (row) attends to position j (column)."""

    layer: int
    head: int
    weights: NDArray[np.float32]  # (T, S), each row sums to 1, or to less where a sink takes a share

    @property
    def name(self) -> str:
        """`L3.H5` is layer 3, head 5, both counted from 0."""
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class HeadMaps:
    """The exact attention maps of every head of a model on one short text."""

    model: str  # how the reader knows the model: the name of its run folder
    tokens: tuple[str, ...]  # one string a position, as the tokenizer shows it
    maps: tuple[HeadMap, ...]  # sorted by layer, then head


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation during training; losses are mean cross-entropies in nats per token."""

    step: int
    train_loss: float
    held_out_loss: float


@dataclass(frozen=True)
class RunSummary:
    """What a training run reports, for the terminal, the report and `--json`."""

    facts: dict[str, str]  # label -> value, in the order to be shown: preset, parameters, seconds, ...
    curve: tuple[CurvePoint, ...]
    held_out_loss: float
    baseline_loss: float | None  # n-gram baseline on the same held-out tokens, nats per token
    baseline_name: str | None  # for example "5-gram, Kneser-Ney"
    samples: tuple[str, ...] = field(default=())
