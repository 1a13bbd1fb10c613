"""How a child is healed, and what reshaping reports, in plain types: for the terminal, `--json` and headwise.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.records import Ancestor

if TYPE_CHECKING:
    from torch import nn


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


STATE = "heal.safetensors"  # a healing that waits, in OUT.partial
HEALING = ("batch", "lr", "hidden", "refit", "seed")  # options that are about healing


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `share`, `prune` and `narrow` have in common; `share` explains it."""

    text: Any = None  # a path, a text, or ids
    out: str | Path | None = None
    tokens: int | None = None
    heal: int | None = None
    batch: int = HealRecipe.batch
    lr: float = HealRecipe.lr
    hidden: float = HealRecipe.hidden
    refit: int = HealRecipe.refit
    seed: int = HealRecipe.seed
    force: bool = False
    resume: bool = False
    stream: bool | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.heal is None:
            for name in HEALING:
                if getattr(self, name) != getattr(HealRecipe, name):
                    raise HeadwiseError(
                        f"--{name} is about healing; pass --heal STEPS with it, or --heal 0 --refit TOKENS"
                    )
        if self.out is None and (self.force or self.resume):
            raise HeadwiseError("--force and --resume are about the folder that is written; pass --out")
        if self.resume and self.heal is None:
            raise HeadwiseError("--resume goes on with a healing; pass --heal with the steps it began with")

    @property
    def recipe(self) -> HealRecipe | None:
        """None where nothing is healed. Raises HeadwiseError for numbers that make no recipe."""
        if self.heal is None:
            return None
        return HealRecipe(steps=self.heal, **{name: getattr(self, name) for name in HEALING})


class OptionsOf(TypedDict, total=False):
    """The fields of `Options` as arguments of a function, for editors and type checkers."""

    text: Any
    out: str | Path | None
    tokens: int | None
    heal: int | None
    batch: int
    lr: float
    hidden: float
    refit: int
    seed: int
    force: bool
    resume: bool
    stream: bool | None
    device: str


@dataclass(frozen=True)
class HealPoint:
    """One evaluation while a child heals, on held-out text."""

    step: int
    tokens: int  # of the text, read so far
    train_loss: float | None  # what is minimised, the mean since the evaluation before; None before the first step
    held_out_loss: float | None  # nats per token; None where the model predicts no next token
    distance: float  # KL to the parent in nats per token, or the relative error of its hidden states


@dataclass(frozen=True)
class Pair:
    """A number of the parent and that of its child."""

    before: float
    after: float


@dataclass(frozen=True)
class Speed(Pair):
    """Tokens a second: medians of `runs` runs of each model, in turn."""

    before_range: tuple[float, float]  # between these the true median lies, with a probability of 0.96
    after_range: tuple[float, float]
    runs: int
    told_apart: bool  # do the two ranges not overlap?


@dataclass(frozen=True)
class Damage:
    """What a reshaped model has lost and won against its parent, on held-out text."""

    loss: Pair | None  # nats per token; None where the model predicts no next token
    kl: float | None  # KL(parent || child), nats per token; None where the model ends in no distribution
    error: float | None  # of the last hidden states, relative; where there is no KL
    entropy: tuple[Pair, ...]  # nats, for each layer: the mean over the heads that both have
    cache_bytes: Pair  # a token of a text of `context`, all layers, in the model's own number format
    parameters: Pair
    tokens_per_second: Speed | None  # of one text being generated; None for a model that generates none
    decode_context: int  # tokens in the cache while that was measured
    context: int = 0  # the longest text
    texts: Pair | None = None  # of that length, whose caches fit beside the weights in 24 GiB


@dataclass(frozen=True, repr=False)
class Reshaped:
    """A model that was shared or pruned, and what that cost."""

    model: nn.Module = field(compare=False)  # the child, in eval mode
    source: str
    out: str | None  # None where nothing was written
    what: str  # one line: what was done
    notes: tuple[str, ...]  # what a reader must know besides
    details: dict[str, object]  # groups or heads, and the settings that determine the result
    ancestors: tuple[Ancestor, ...]  # the source, then those that it comes from itself
    damage: Damage  # before any training
    curve: tuple[HealPoint, ...] = ()  # of healing; empty without
    healed: Damage | None = None
    verified: str | None = None  # how the folder was read back; None where nothing was written

    def __repr__(self) -> str:
        return f"Reshaped({self.what};\n         {self.won})"

    @property
    def won(self) -> str:
        """One line: cache, texts that fit, loss, speed."""
        last = self.healed or self.damage
        cache, texts, speed = last.cache_bytes, last.texts, last.tokens_per_second
        parts = []
        if cache.before:
            unit, size = ("KiB", 1024) if min(cache.before, cache.after) >= 1024 else ("bytes", 1)
            before, after = (f"{n / size:,.4g}" for n in vars(cache).values())
            change = f"{before} -> {after} {unit}" if after != before else f"as before, {after} {unit},"
            parts.append(f"cache {change} a token at {last.context:,} tokens")
        if texts is not None and texts.before and texts.after != texts.before:
            parts.append(f"{texts.after / texts.before:.2g} x as many texts in 24 GiB")
        if last.loss is not None:
            parts.append(f"loss {last.loss.after - last.loss.before:+.3f} nats")
        if speed is not None:
            low, high = speed.after_range[0] / speed.before_range[1], speed.after_range[1] / speed.before_range[0]
            parts.append(f"decode x {speed.after / speed.before:.2g} ({low:.2g} to {high:.2g})")
        return ", ".join(parts)

    def document(self) -> dict[str, Any]:
        """All but the model, as JSON has it."""
        fields = {name: value for name, value in vars(self).items() if name != "model"} | {"won": self.won}
        document: dict[str, Any] = json.loads(json.dumps(fields, default=vars))
        return document
