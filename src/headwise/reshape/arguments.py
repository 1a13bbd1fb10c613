"""What can be asked of a model, and what is refused by numbers and names alone: before it is read, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from headwise.gpt.presets import check_seed
from headwise.models.lineage import RECORD
from headwise.records import parse_head
from headwise.words import Note, refusal, unknown

METHODS = ("mean", "aligned", "aligned+norm", "principal")  # of share.py
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
                raise refusal("heal_least", name=name, value=getattr(self, name))
        for name in ("lr", "vector_lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise refusal("heal_positive", name=name, value=getattr(self, name))
        if not 0 <= self.hidden < math.inf:
            raise refusal("heal_hidden", hidden=self.hidden)
        check_seed(self.seed)  # and `warmup` needs no check: at least one step is warm-up, whatever it is


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
    for name in options.keys() - Options.__annotations__.keys():  # as Python refuses an unknown argument
        raise TypeError(f"{name}= is no option; there are {', '.join(Options.__annotations__)}")
    healing: dict[str, Any] = {name: value for name, value in options.items() if name in HEALING}
    steps = options.get("heal")
    if steps is None:
        for name, value in healing.items():
            if value != getattr(HealRecipe, name):  # a default asks for nothing
                raise refusal("about_healing", name=name)
    if options.get("out") is None and options.get("force"):  # there is no folder to replace
        raise refusal("about_folder")
    return None if steps is None else HealRecipe(steps=steps, **healing)


# Each of these raises HeadwiseError: `refusal` takes the key of a phrase in `[refused]` of words.toml.


def check_sharing(method: str, groups: str) -> None:
    for name, value, known in (("method", method, METHODS), ("groups", groups, GROUPS)):
        if value not in known:
            raise unknown(Note.of("refused.not_known", name=name, value=repr(value)), value, known)


def check_kv_heads(n_kv_heads: int, n_heads: int, now: int) -> None:
    """Refuse a number of key/value heads that a model of `n_heads` query heads, which has `now`, cannot be given."""
    if now == 1:  # apart from the reasons below, whose messages offer divisors of `now` that are less
        raise refusal("kv_single", n_kv_heads=n_kv_heads, heads=n_heads)
    # The first reason that holds.
    if n_kv_heads == now:
        key = "kv_unchanged"
    elif n_kv_heads < 1:
        key = "kv_negative"
    elif n_kv_heads > n_heads:
        key = "kv_exceeds"
    elif n_kv_heads > now:
        key = "kv_raised"
    elif now % n_kv_heads:
        key = "kv_divides"
    else:
        return
    divisors = [str(n) for n in range(1, now) if now % n == 0]
    raise refusal(key, n_kv_heads=n_kv_heads, now=now, heads=n_heads, divisors=divisors)


def check_pruning(heads: str | Sequence[str] | None, keep: float | None, by: str | None) -> None:
    if (heads is None) == (keep is None):  # neither, or both
        raise refusal("which_heads")
    if heads is not None and by is not None:  # a score chooses heads, and these are chosen
        raise refusal("by_and_heads", by=repr(by))
    if by not in (None, *SCORES):
        raise unknown(Note.of("refused.not_known", name="by", value=repr(by)), by, SCORES)
    if keep == 1:
        raise refusal("keep_all", keep=keep)
    if keep is not None and not 0 < keep < 1:
        raise refusal("keep_between", keep=keep)


def chosen_heads(names: str | Sequence[str], n_layers: int, n_heads: int) -> tuple[tuple[int, ...], ...]:
    """For each layer the numbers of the heads named in a list, or in a text such as "L0.H1,L3.H5".

    Raises HeadwiseError for what is no head of the model, for no name at all, and for a layer left without a head.
    """
    chosen: list[set[int]] = [set() for _ in range(n_layers)]
    listed = names.split(",") if isinstance(names, str) else names
    for name in filter(None, map(str.strip, listed)):
        part, layer, head = parse_head(name)  # `part`: a stack of a model with several, of which none is pruned
        if part or layer >= n_layers or head >= n_heads:
            last = f"L{n_layers - 1}.H{n_heads - 1}"
            raise refusal("no_such_head", name=name, layers=n_layers, heads=n_heads, last=last)
        chosen[layer].add(head)
    if not any(chosen):
        raise refusal("none_named")
    for layer, gone in enumerate(chosen):
        if len(gone) == n_heads:
            raise refusal("layer_without", heads=n_heads, layer=layer)
    return tuple(tuple(sorted(gone)) for gone in chosen)


def check_tokens(tokens: int | None, context: int | None) -> None:
    """Refuse documents of so many tokens for a model that takes `context` at a time; None: without a bound."""
    if tokens is not None and tokens < 2:
        raise refusal("two_tokens", tokens=tokens)
    if tokens is not None and context is not None and tokens > context:
        raise refusal("tokens_over", tokens=tokens, context=context)


def check_place(source: Path, out: Path) -> None:
    """Raise HeadwiseError where no model may be written, whatever lies there now."""
    here, there = source.resolve(), out.resolve()
    # Keys of `[refused]` in words.toml, and whether each holds. A folder with a RECORD is one that a job has written.
    for key, wrong in (
        ("out_is_source", here == there),
        ("out_in_source", here in there.parents),
        ("out_holds_source", there in here.parents),
        ("out_is_here", there == Path.cwd() or there in Path.cwd().parents),
        ("out_is_link", out.is_symlink()),
        ("out_is_file", out.exists() and not out.is_dir()),
        ("out_nowhere", not there.parent.is_dir()),
        ("out_foreign", out.is_dir() and any(out.iterdir()) and not (out / RECORD).exists()),
    ):
        if wrong:
            raise refusal(key, folder=repr(str(out)), source=source, parent=out.parent, record=RECORD)


def check_free(out: Path, force: bool) -> None:
    """Raise HeadwiseError where a folder lies that must not be replaced, for lack of `force`; an empty one may be."""
    if out.exists() and any(out.iterdir()) and not force:
        raise refusal("out_exists", folder=repr(str(out)))
