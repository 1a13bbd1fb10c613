"""A change to the heads of a model, as the job around it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headwise.models.open import Folder
from headwise.models.weights import read_layers
from headwise.reshape.damage import HeadPairs
from headwise.reshape.text import Calibration

Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


@dataclass(frozen=True)
class Changed:
    """A child, and what is known about it."""

    model: nn.Module
    what: str
    details: dict[str, object]
    origins: Sequence[Sequence[int]]  # for each layer the parent's number of each head
    notes: tuple[str, ...] = ()
    silent: Gone = ()  # heads that are zero and must stay so while the child heals

    @property
    def pairs(self) -> HeadPairs:
        """The heads that give something in both models."""
        silent = self.silent or ((),) * len(self.origins)
        rows = zip(self.origins, silent, strict=True)
        return [[(old, new) for new, old in enumerate(row) if new not in zeros] for row, zeros in rows]


@dataclass(frozen=True)
class Change:
    """A way to reshape: `check` refuses before a text is read, `apply` makes the child."""

    settings: dict[str, object]
    check: Callable[[nn.Module], None]
    apply: Callable[[Folder, Calibration], Changed]


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    for weights, gone in zip(read_layers(model), heads, strict=True):
        for tensor in (weights.wq, weights.bq, weights.wo.transpose(0, 1)):
            if tensor is not None and gone:
                tensor[list(gone)] = 0
