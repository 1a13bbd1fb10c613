"""What can be asked of a model, and what is refused by numbers and names alone: before it is read, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from headwise.errors import HeadwiseError
from headwise.gpt.presets import check_seed
from headwise.records import parse_head
from headwise.words import unknown

METHODS = ("mean", "aligned", "aligned+norm", "principal")  # of pool.py
GROUPS = ("adjacent", "best")
SCORES = ("importance", "ablation", "role")
HEALING = ("batch", "lr", "hidden", "seed")  # options that are about healing


@dataclass(frozen=True, kw_only=True)
class HealRecipe:
    """How a child is healed: its attention learns, all else stays the parent's. The rates are peaks of one schedule."""

    steps: int
    batch: int = 4  # documents a step
    lr: float = 0.015  # Muon, on matrices (Jordan et al. 2024)
    vector_lr: float = 1e-3  # AdamW, on biases and gains
    hidden: float = 30.0  # weight of the hidden states' error beside the divergence
    warmup: float = 0.05  # fraction of the steps
    evaluations: int = 10
    patience: int = 5  # evaluations without a better one before it stops
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations", "patience"):
            if getattr(self, name) < 1:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be at least 1")
        for name in ("lr", "vector_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be a positive number")
        if not 0 <= self.hidden < math.inf:
            raise HeadwiseError(f"heal hidden={self.hidden} must be 0 or more; 0 leaves the hidden states out")
        check_seed(self.seed)


class Options(TypedDict, total=False):
    """What `share`, `prune` and `narrow` have in common; `share` explains it."""

    text: Any  # a path, a text, or ids
    out: str | Path | None
    tokens: int | None
    documents: int | None
    heal: int | None
    batch: int
    lr: float
    hidden: float
    seed: int
    force: bool
    resume: bool
    stream: bool | None
    device: str


def recipe_of(options: Options) -> HealRecipe | None:
    """How the child is healed; None where it is not. Refuses options without the one that they are about."""
    for name in options.keys() - Options.__annotations__.keys():
        raise TypeError(f"{name}= is no option; there are {', '.join(Options.__annotations__)}")
    healing: dict[str, Any] = {name: value for name, value in options.items() if name in HEALING}
    steps = options.get("heal")
    if steps is None:
        for name, value in healing.items():
            if value != getattr(HealRecipe, name):
                raise HeadwiseError(f"{name}= is about healing; pass heal=STEPS with it")
    if options.get("out") is None and (options.get("force") or options.get("resume")):
        raise HeadwiseError("force=True and resume=True are about the folder that is written; pass out=")
    if options.get("resume") and steps is None:
        raise HeadwiseError("resume=True goes on with a healing; pass heal= with the steps it began with")
    return None if steps is None else HealRecipe(steps=steps, **healing)


def check_sharing(method: str, groups: str) -> None:
    for name, value, known in (("method", method, METHODS), ("groups", groups, GROUPS)):
        if value not in known:
            raise unknown(f"{name}={value!r} is not known", value, known)


def check_kv_heads(n_kv_heads: int, n_heads: int, now: int) -> None:
    """Refuse a number of key/value heads that a model of `n_heads` query heads, which has `now`, cannot be given."""
    if now == 1:
        raise HeadwiseError(
            f"n_kv_heads={n_kv_heads}: each layer has one key/value head for its {n_heads} query heads already; a "
            f"window makes the cache smaller: `headwise narrow`"
        )
    if n_kv_heads == now:
        fact = f": the model has {now} key/value heads already, so nothing changes and nothing is written"
    elif n_kv_heads < 1:
        fact = " is not positive"
    elif n_kv_heads > n_heads:
        fact = f" exceeds the {n_heads} query heads"
    elif n_kv_heads > now:
        fact = (
            f": the model has {now} key/value heads for its {n_heads} query heads already, and sharing only lowers "
            f"their number"
        )
    elif now % n_kv_heads:
        fact = f" does not divide the model's {now} key/value heads"
    else:
        return
    divisors = [str(n) for n in range(1, now) if now % n == 0]
    remedy = f"pass one of {', '.join(divisors)}" if divisors else "there is nothing left to share"
    raise HeadwiseError(f"n_kv_heads={n_kv_heads}{fact}; {remedy}")


def check_pruning(heads: str | Sequence[str] | None, keep: float | None, by: str | None) -> None:
    if (heads is None) == (keep is None):
        raise HeadwiseError("say which heads go: heads='L0.H1,L3.H5', or keep=0.75 with by=; one of the two")
    if heads is not None and by is not None:
        raise HeadwiseError(f"by={by!r} chooses heads where keep= says how many stay; heads= names them")
    if by not in (None, *SCORES):
        raise unknown(f"by={by!r} is not known", by, SCORES)
    if keep == 1:
        raise HeadwiseError(
            f"keep={keep} keeps every head: nothing changes, nothing is written; 0.75 removes a quarter"
        )
    if keep is not None and not 0 < keep < 1:
        raise HeadwiseError(f"keep={keep} must lie between 0 and 1; 0.75 removes a quarter of the heads")


def chosen_heads(names: str | Sequence[str], n_layers: int, n_heads: int) -> tuple[tuple[int, ...], ...]:
    """For each layer the heads of these names, or of `L0.H1,L3.H5`.

    Raises HeadwiseError for what is no head, and for a layer left without.
    """
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    listed = names.split(",") if isinstance(names, str) else names
    for name in filter(None, map(str.strip, listed)):
        part, layer, head = parse_head(name)
        if part or layer >= n_layers or head >= n_heads:
            raise HeadwiseError(
                f"the model has no head {name}: {n_layers} layers of {n_heads} heads, L0.H0 to "
                f"L{n_layers - 1}.H{n_heads - 1}"
            )
        chosen[layer].add(head)
    if not any(chosen):
        raise HeadwiseError("no head is named; pass heads='L0.H1,L3.H5', or keep= with by=")
    for layer, gone in enumerate(chosen):
        if len(gone) == n_heads:
            raise HeadwiseError(f"all {n_heads} heads of layer {layer} are to go; a layer needs one")
    return tuple(tuple(sorted(gone)) for gone in chosen)


def check_narrowing(tolerance: float | None, cache: float | None, window: int | None) -> None:
    if tolerance is not None and cache is not None:
        raise HeadwiseError("tolerance= says how many nats may be lost, cache= what is kept; pass one of them")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise HeadwiseError(f"tolerance={tolerance} must be 0 or more nats; 0.01 is a hundredth")
    if cache is not None and not 0 < cache < 1:
        raise HeadwiseError(f"cache={cache} must lie between 0 and 1; 0.5 keeps half of the bytes")
    if window is not None and window < 1:
        raise HeadwiseError(f"window={window} must be at least 1 token")


def check_tokens(tokens: int | None, context: int | None) -> None:
    """Refuse documents of so many tokens for a model that takes `context` at a time; None: without a bound."""
    if tokens is not None and tokens < 2:
        raise HeadwiseError(f"tokens={tokens} must be at least 2: a token, and the one that follows it")
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(f"tokens={tokens} exceeds the model's context of {context}")
