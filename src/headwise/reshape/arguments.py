"""What can be asked of a model, and what is refused by numbers and names alone: before it is read, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from headwise.errors import HeadwiseError
from headwise.families import RECORD
from headwise.gpt.presets import check_seed
from headwise.records import parse_head
from headwise.words import unknown

METHODS = ("mean", "aligned", "aligned+norm")  # of share.py
GROUPS = ("adjacent", "best")
SCORES = ("importance", "ablation", "role")
HEALING = ("batch", "lr", "hidden", "seed")  # options that are about healing


@dataclass(frozen=True, kw_only=True)
class HealRecipe:
    """How a child is healed: its attention learns, all else stays the parent's. The rates are peaks of one schedule.

    `lr` and `hidden` were tried on 8 key/value heads shared as 2: rates of 0.012 to 0.02 healed alike, 0.03 worse;
    `hidden` of 10 and of 100 worse than 30 (LOG.md, sharing heads 4:1). The other defaults are usual or round.
    """

    steps: int
    batch: int = 4  # documents a step
    lr: float = 0.015  # Muon, on matrices (Jordan et al. 2024)
    vector_lr: float = 1e-3  # AdamW, on biases and gains
    hidden: float = 30.0  # weight of the hidden states' error beside the divergence
    warmup: float = 0.05  # fraction of the steps
    evaluations: int = 10  # while it heals, beside the one before the first step
    patience: int = 5  # evaluations without a better one before it stops
    clip: float = 1.0  # largest norm of all gradients together
    seed: int = 0  # of the order of the documents

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations", "patience"):
            if getattr(self, name) < 1:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be at least 1")
        for name in ("lr", "vector_lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise HeadwiseError(f"heal {name}={getattr(self, name)} must be a positive number")
        if not 0 <= self.hidden < math.inf:
            raise HeadwiseError(
                f"heal hidden={self.hidden} must be 0 or more; 0 leaves the hidden states out"
            )
        # and `warmup` needs no check: at least one step is warm-up, whatever it is
        check_seed(self.seed)


class Options(TypedDict, total=False):
    """What `share` and `prune` have in common; `share` explains it."""

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
    device: str


def recipe_of(options: Options) -> HealRecipe | None:
    """How the child is healed; None where it is not. Refuses options without the one that they are about."""
    # as Python refuses an unknown argument
    for name in options.keys() - Options.__annotations__.keys():
        raise TypeError(f"{name}= is no option; there are {', '.join(Options.__annotations__)}")
    healing: dict[str, Any] = {name: value for name, value in options.items() if name in HEALING}
    steps = options.get("heal")
    if steps is None:
        for name, value in healing.items():
            if value != getattr(HealRecipe, name):  # a default asks for nothing
                raise HeadwiseError(f"{name}= is about healing; pass heal=STEPS with it")
    if options.get("out") is None and options.get("force"):  # there is no folder to replace
        raise HeadwiseError("force=True is about the folder that is written; pass out=")
    return None if steps is None else HealRecipe(steps=steps, **healing)


# Each of these raises HeadwiseError.


def check_sharing(method: str, groups: str) -> None:
    for name, value, known in (("method", method, METHODS), ("groups", groups, GROUPS)):
        if value not in known:
            raise unknown(f"{name}={value!r} is not known", value, known)


def check_kv_heads(n_kv_heads: int, n_heads: int, now: int) -> None:
    """Refuse a number of key/value heads that a model of `n_heads` query heads, which has `now`, cannot be given."""
    divisors = [n for n in range(1, now) if now % n == 0]
    if n_kv_heads in divisors:
        return
    now_has = f"n_kv_heads={n_kv_heads}: the model has {now} key/value heads for its {n_heads} query heads"
    if not divisors:
        raise HeadwiseError(f"{now_has}, the least there can be")
    raise HeadwiseError(
        f"{now_has}; sharing lowers their number to one of {', '.join(map(str, divisors))}"
    )


def check_pruning(heads: str | Sequence[str] | None, keep: float | None, by: str | None) -> None:
    if (heads is None) == (keep is None):  # neither, or both
        raise HeadwiseError(
            "say which heads go: heads='L0.H1,L3.H5', or keep=0.75 with by=; one of the two"
        )
    if heads is not None and by is not None:  # a score chooses heads, and these are chosen
        raise HeadwiseError(
            f"by={by!r} chooses heads where keep= says how many stay; heads= names them"
        )
    if by not in (None, *SCORES):
        raise unknown(f"by={by!r} is not known", by, SCORES)
    if keep == 1:
        raise HeadwiseError(
            f"keep={keep} keeps every head: nothing changes, nothing is written; 0.75 removes a quarter"
        )
    if keep is not None and not 0 < keep < 1:
        raise HeadwiseError(
            f"keep={keep} must lie between 0 and 1; 0.75 removes a quarter of the heads"
        )


def chosen_heads(
    names: str | Sequence[str], n_layers: int, n_heads: int
) -> tuple[tuple[int, ...], ...]:
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
    if not any(chosen):
        raise HeadwiseError("no head is named; pass heads='L0.H1,L3.H5', or keep= with by=")
    for layer, gone in enumerate(chosen):
        if len(gone) == n_heads:
            raise HeadwiseError(
                f"all {n_heads} heads of layer {layer} are to go; a layer needs one"
            )
    return tuple(tuple(sorted(gone)) for gone in chosen)


def check_tokens(tokens: int | None, context: int | None) -> None:
    """Refuse documents of so many tokens for a model that takes `context` at a time; None: without a bound."""
    if tokens is not None and tokens < 2:
        raise HeadwiseError(
            f"tokens={tokens} must be at least 2: a token, and the one that follows it"
        )
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(f"tokens={tokens} exceeds the model's context of {context}")


def check_place(source: Path, out: Path) -> None:
    """Raise HeadwiseError where no model may be written, whatever lies there now."""
    here, there = source.resolve(), out.resolve()
    foreign = f" exists already and has no {RECORD}: share or prune did not write it and will not replace it"
    # A folder with a RECORD is one that a job has written.
    for wrong, why in (
        (
            here in (there, *there.parents),
            f" lies in the source {source}, which is never changed; pass another",
        ),
        (there in here.parents, f" holds the source {source}; pass a folder elsewhere"),
        (
            there == Path.cwd() or there in Path.cwd().parents,
            " is the folder you are in, or holds it; pass another",
        ),
        (out.is_symlink(), " is a link; pass the folder itself"),
        (out.exists() and not out.is_dir(), " is a file; pass a folder"),
        (not there.parent.is_dir(), f": the folder {out.parent} does not exist"),
        (
            out.is_dir() and any(out.iterdir()) and not (out / RECORD).exists(),
            f"{foreign}; pass another folder",
        ),
    ):
        if wrong:
            raise HeadwiseError(f"out={str(out)!r}{why}")


def check_free(out: Path, force: bool) -> None:
    """Raise HeadwiseError where a folder lies that must not be replaced, for lack of `force`; an empty one may be."""
    if out.exists() and any(out.iterdir()) and not force:
        raise HeadwiseError(
            f"out={str(out)!r} exists already; pass force=True to replace it, or another folder"
        )
