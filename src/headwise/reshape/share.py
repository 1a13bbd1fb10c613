"""Share key/value heads: a model of G key/value heads becomes one of fewer, which the query heads read in groups.

Groups are neighbours, or chosen by expected cost (`group`); heads that are put side by side take their query heads
along, which is exact. `pool` makes one head of each group. Both know activations by their second moments (`moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, unknown
from headwise.models.open import Folder
from headwise.models.weights import AttentionWeights, cannot_carry, head_counts, read_layers, with_layers
from headwise.reshape.align import key_rule
from headwise.reshape.change import Change, Changed
from headwise.reshape.group import GROUPS, Groups, adjacent, best
from headwise.reshape.job import Job, Listener, run_job
from headwise.reshape.moments import moments
from headwise.reshape.pool import ALIGNING, BLIND, POOLS
from headwise.reshape.recipe import HealRecipe
from headwise.reshape.report import Reshaped
from headwise.reshape.text import Calibration, Ids


def share(
    model: nn.Module | str | Path,
    n_kv_heads: int,
    *,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    text: Path | str | Ids | None = None,
    out: str | Path | None = None,
    tokens: int | None = None,
    heal: int | None = None,
    batch: int = HealRecipe.batch,
    lr: float = HealRecipe.lr,
    hidden: float = HealRecipe.hidden,
    refit: int = HealRecipe.refit,
    seed: int = HealRecipe.seed,
    force: bool = False,
    resume: bool = False,
    listener: Listener | None = None,
) -> Reshaped:
    """Let query heads share key/value heads: a smaller cache.

        child = hw.share("runs/book", n_kv_heads=2, groups="best", heal=200)
        child.model, child.damage.loss.after, child.healed.loss.after

    model       a GPT, a model of transformers (Llama, Mistral, Qwen2, Qwen3), or the folder of one; it is left alone
    n_kv_heads  of the child, in each layer: a divisor of today's, and smaller
    method      how one head is made of several: first, mean, medoid, aligned, aligned+norm or principal (`pool`)
    groups      adjacent: neighbours share; best: heads whose sharing should cost least (`group`)

    The arguments from here on are also those of `prune`:

    text    to calibrate and heal on, and, its last tenth, to measure on: a file, a text, ids (N,), or documents of ids;
            default: what a run of headwise was trained on
    out     the folder to write, which a fresh process verifies; without it nothing is written
    tokens  of a document; default: the model's context, at most 1,024
    heal    steps in which the child learns to answer as its parent; 0 with `refit` fits W_O alone
    batch, lr, hidden, refit, seed  of the healing, see `HealRecipe`
    force   replace `out`, if share or prune wrote it
    resume  go on with a healing that was stopped; it needs `out`
    listener  hears what is being done, the first damage, and each evaluation of the healing

    Raises HeadwiseError for what cannot be done, and for a request that would change nothing; Stopped after Ctrl-C in a
    healing whose state waits beside `out`. Architecture: Ainslie et al. 2023, arXiv 2305.13245.
    """
    recipe = None if heal is None else HealRecipe(steps=heal, batch=batch, lr=lr, hidden=hidden, refit=refit, seed=seed)
    return run_job(Job(model, text, out, tokens, recipe, force, resume), sharing(n_kv_heads, method, groups), listener)


def sharing(n_kv_heads: int, method: str, groups: str) -> Change:
    """Sharing as a change."""

    def check(model: nn.Module) -> None:
        check_share(model, n_kv_heads, method, groups)

    def apply(source: Folder, calibration: Calibration) -> Changed:
        roots = moments(source.model, calibration.statistics) if needs_text(method, groups) else []
        return _changed(source.model, share_heads(source.model, n_kv_heads, method, groups, roots))

    return Change({"n_kv_heads": n_kv_heads, "method": method, "groups": groups}, check, apply)


@dataclass(frozen=True)
class Shared:
    """A model with fewer key/value heads, and how it came about."""

    model: nn.Module
    groups: tuple[Groups, ...]  # for each layer the key/value heads of the parent that share, in the new order
    turned: tuple[str, ...]  # for each layer what alignment of the keys was exact; "" where none was asked for


def _changed(parent: nn.Module, shared: Shared) -> Changed:
    (n_heads, before, _), after = head_counts(parent), head_counts(shared.model)[1]
    r = n_heads // before
    origins = [[g * r + i for group in groups for g in group for i in range(r)] for groups in shared.groups]
    turned = dict.fromkeys(rule for rule in shared.turned if rule)
    notes = [f"keys were aligned by what is exact here: {rule}" for rule in turned]
    if set(shared.groups) != {adjacent(before, after)}:
        rows = (" | ".join(" ".join(map(str, group)) for group in groups) for groups in shared.groups)
        notes += [f"layer {n}, key/value heads that share: {row}" for n, row in enumerate(rows)]
    what = f"key/value heads for {n_heads} query heads: {after}, {before} before"
    return Changed(shared.model, what, {"shared": shared.groups}, origins, tuple(notes))


def check_share(model: nn.Module, n_kv_heads: int, method: str, groups: str) -> None:
    """Raise HeadwiseError for what cannot be shared so, or would change nothing, before any text is read."""
    for name, value, known in (("method", method, tuple(POOLS)), ("groups", groups, GROUPS)):
        if value not in known:
            raise unknown(f"{name}={value!r} is not known", value, known)
    n_heads, now, _ = head_counts(model)
    divisors = [str(n) for n in range(1, now) if now % n == 0]
    remedy = f"pass one of {', '.join(divisors)}" if divisors else "there is nothing left to share"
    if n_kv_heads == now:
        raise HeadwiseError(
            f"n_kv_heads={now}: the model has {now} key/value heads already, so nothing changes and nothing is "
            f"written; {remedy}"
        )
    if n_kv_heads < 1:
        raise HeadwiseError(f"n_kv_heads={n_kv_heads} is not positive; {remedy}")
    if n_kv_heads > n_heads:
        raise HeadwiseError(f"n_kv_heads={n_kv_heads} exceeds the {n_heads} query heads; {remedy}")
    if n_kv_heads > now:
        raise HeadwiseError(
            f"n_kv_heads={n_kv_heads}: the model has {now} key/value heads for its {n_heads} query heads already, and "
            f"sharing only lowers their number; {remedy}"
        )
    if now % n_kv_heads:
        raise HeadwiseError(f"n_kv_heads={n_kv_heads} does not divide the model's {now} key/value heads; {remedy}")
    problem = cannot_carry(model, n_heads, n_kv_heads)
    if problem:
        raise HeadwiseError(problem)


def needs_text(method: str, groups: str) -> bool:
    """Must a text be read for it, or do the weights suffice?"""
    return groups == "best" or method not in BLIND


def share_heads(
    model: nn.Module,
    n_kv_heads: int,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    roots: Sequence[Tensor] = (),
) -> Shared:
    """The model with n_kv_heads key/value heads in each layer; `model` itself is left alone.

    roots  for each layer, from `moments`, where `needs_text`
    """
    check_share(model, n_kv_heads, method, groups)
    now = head_counts(model)[1]
    chosen: list[Groups] = []
    turned: list[str] = []

    def pooled(weights: AttentionWeights, root: Tensor) -> AttentionWeights:
        weights = weights.double()
        sharing = adjacent(now, n_kv_heads) if groups == "adjacent" else best(weights, root, n_kv_heads, POOLS[method])
        chosen.append(sharing)
        turned.append(key_rule(weights).description if method in ALIGNING else "")
        return POOLS[method](weights.permuted([g for group in sharing for g in group]), root, n_kv_heads)

    before = read_layers(model)
    read = roots if needs_text(method, groups) else [torch.empty(0)] * len(before)
    layers = (pooled(weights, root) for weights, root in zip(before, read, strict=True))
    child = with_layers(model, layers, n_kv_heads=n_kv_heads)
    return Shared(child, tuple(chosen), tuple(turned))
