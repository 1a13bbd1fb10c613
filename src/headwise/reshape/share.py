"""Share key/value heads: a model of G key/value heads becomes one of fewer, which the query heads read in groups.

`group` chooses groups; their heads are put side by side with their query heads, which is exact; `pool` makes one head
of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, unknown
from headwise.markup import plural
from headwise.models.weights import AttentionWeights, cannot_carry, head_counts, layers_in_turn, with_layers
from headwise.reshape.align import key_rule
from headwise.reshape.group import GROUPS, Groups, adjacent, best
from headwise.reshape.job import Change, Changed, Job, Listener
from headwise.reshape.moments import moments
from headwise.reshape.pool import ALIGNING, BLIND, POOLS
from headwise.reshape.report import Options, OptionsOf, Reshaped


def share(
    model: nn.Module | str | Path,
    n_kv_heads: int,
    *,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    listener: Listener | None = None,
    **options: Unpack[OptionsOf],
) -> Reshaped:
    """Let query heads share key/value heads: a smaller cache.

        child = hw.share("runs/book", n_kv_heads=2, groups="best", heal=200)
        child.model, child.damage.loss.after, child.healed.loss.after

    model       a GPT, a model of transformers (Llama, Mistral, Qwen2, Qwen3), or the folder of one; it is left alone
    n_kv_heads  of the child, in each layer: a divisor of today's, and smaller
    method      how one head is made of several: first, mean, medoid, aligned, aligned+norm or principal (`pool`)
    groups      adjacent: neighbours share; best: heads whose sharing should cost least (`group`)

    options, which are also those of `prune` and `narrow`:

    text    to calibrate and heal on, and, its last tenth, to measure on: a file, a text, ids (N,), or documents of ids;
            default: what a run of headwise was trained on
    out     the folder to write, which a fresh process verifies; without it nothing is written
    tokens  of a document; default: the model's context, at most 1,024
    heal    steps in which the child learns to answer as its parent; 0 with `refit` fits W_O alone
    batch, lr, hidden, refit, seed  of the healing, see `HealRecipe`
    force   replace `out`, if share, prune or narrow wrote it
    resume  go on with a healing that was stopped; it needs `out`
    stream  read a folder layer by layer; default: where its weights would not fit into the free memory (`open_model`)
    device  where a folder is opened; heads themselves are folded in float64 on the processor
    listener  hears what is being done, the first damage, and each evaluation of the healing

    Raises HeadwiseError for what cannot be done, and for a request that would change nothing; Stopped after Ctrl-C in a
    healing whose state waits beside `out`. Architecture: Ainslie et al. 2023, arXiv 2305.13245.
    """
    return Job(model, Sharing(n_kv_heads, method, groups), Options(**options), listener or Listener()).run()


@dataclass(frozen=True)
class Sharing(Change):
    """The arguments of `share` that say what is shared, and how."""

    n_kv_heads: int
    method: str
    groups: str

    def check(self, model: nn.Module) -> None:
        check_share(model, self.n_kv_heads, self.method, self.groups)

    def apply(self, job: Job) -> Changed:
        model = job.source.model
        blind = self.groups == "adjacent" and self.method in BLIND
        roots = () if blind else moments(model, job.calibration.statistics)
        return share_heads(model, self.n_kv_heads, self.method, self.groups, roots)


def check_share(model: nn.Module, n_kv_heads: int, method: str, groups: str) -> None:
    for name, value, known in (("method", method, tuple(POOLS)), ("groups", groups, GROUPS)):
        if value not in known:
            raise unknown(f"{name}={value!r} is not known", value, known)
    n_heads, now, _ = head_counts(model)
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
        problem = cannot_carry(model, n_heads, n_kv_heads)
        if problem:
            raise HeadwiseError(problem)
        return
    divisors = [str(n) for n in range(1, now) if now % n == 0]
    remedy = f"pass one of {', '.join(divisors)}" if divisors else "there is nothing left to share"
    raise HeadwiseError(f"n_kv_heads={n_kv_heads}{fact}; {remedy}")


def share_heads(
    model: nn.Module,
    n_kv_heads: int,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    roots: Iterable[Tensor] = (),
) -> Changed:
    """The model with n_kv_heads key/value heads in each layer; `model` itself is left alone.

    roots  for each layer, from `moments`; a method of `BLIND` on adjacent groups needs none
    """
    check_share(model, n_kv_heads, method, groups)
    n_heads, before, _ = head_counts(model)
    neighbours = adjacent(before, n_kv_heads)
    chosen: list[Groups] = []  # for each layer the key/value heads of the parent that share, in the new order
    rules: dict[str, None] = {}  # what alignment of the keys is exact, each once

    def pooled(weights: AttentionWeights, root: Tensor) -> AttentionWeights:
        weights = weights.double()
        sharing = neighbours if groups == "adjacent" else best(weights, root, n_kv_heads, POOLS[method])
        chosen.append(sharing)
        if method in ALIGNING:
            rules[key_rule(weights).description] = None
        if sharing != neighbours:
            weights = weights.permuted([g for group in sharing for g in group])
        return POOLS[method](weights, root, n_kv_heads)

    pairs = zip(layers_in_turn(model), roots or itertools.repeat(torch.empty(0)), strict=False)
    child = with_layers(model, (pooled(*pair) for pair in pairs), n_kv_heads=n_kv_heads)
    r = n_heads // before
    origins = [[g * r + i for group in sharing for g in group for i in range(r)] for sharing in chosen]
    notes = [f"keys were aligned by what is exact here: {rule}" for rule in rules]
    if set(chosen) != {neighbours}:
        rows = (" | ".join(" ".join(map(str, group)) for group in sharing) for sharing in chosen)
        notes += [f"layer {n}, key/value heads that share: {row}" for n, row in enumerate(rows)]
    what = f"{plural(n_kv_heads, 'key/value head')} for {n_heads} query heads, {before} before"
    return Changed(child, what, {"shared": tuple(chosen)}, origins, tuple(notes))
