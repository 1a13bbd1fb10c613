"""How a child is healed, as data. No torch here: the command line reads its defaults from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed


@dataclass(frozen=True, kw_only=True)
class HealRecipe:
    """How a child is healed: its attention learns, all else stays the parent's. The rates are peaks of one schedule."""

    steps: int
    batch: int = 4  # documents a step
    lr: float = 0.015  # Muon, on matrices (Jordan et al. 2024)
    vector_lr: float = 1e-3  # AdamW, on biases and gains
    hidden: float = 30.0  # weight of the hidden states' error beside the divergence
    refit: int = 0  # tokens on which W_O is fitted first, in closed form; 0 leaves that out
    warmup: float = 0.05  # share of the steps
    evaluations: int = 10
    patience: int = 5  # evaluations without a better one before it stops
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.steps == 0 and not self.refit):
            raise HeadwiseError(f"heal steps={self.steps} must be at least 1; 0 fits W_O alone, on --refit TOKENS")
        for name in ("batch", "evaluations", "patience"):
            if getattr(self, name) < 1:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be at least 1")
        if self.refit < 0:
            raise HeadwiseError(f"heal refit={self.refit} is negative; 0 leaves the fit of W_O out")
        for name in ("lr", "vector_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be a positive number")
        if not 0 <= self.hidden < math.inf:
            raise HeadwiseError(f"heal hidden={self.hidden} must be 0 or more; 0 leaves the hidden states out")
        check_seed(self.seed)
