"""Heads changed while the model runs: `ablate` and `steer`; and what breaks without each head.

An `Edit` is a change at one place, and `edited` writes it; of such edits `patch` makes the variants of a text.
`ablation` is the change in loss when one head at a time is silenced; `importance` comes from gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.backends.torch_ import attend
from headwise.errors import HeadwiseError
from headwise.heads.documents import Document, Progress, listening, no_progress
from headwise.heads.statistics import unknown_head
from headwise.intervals import Interval, interval_of
from headwise.models.ask import (
    evaluating,
    next_token_losses,
    require_next,
    run_body,
)
from headwise.models.hook import attach
from headwise.models.open import texts_of
from headwise.models.sites import Site, sites_of
from headwise.records import Call
from headwise.spec import resolve_kv_index

Documents = Sequence[Document]  # of a call
# What becomes of what a head gives, (B,T,E), in a call of these documents.
Change = Callable[[Tensor, Documents], Tensor]

Places = slice | list[int]  # texts, heads or tokens at which something is changed
ALL = slice(None)
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
READ = ("q", *SHARED)  # what a head makes of the residual stream


class Edit(NamedTuple):
    """What a head of an attention, or at k and v a key/value head, has instead of its own."""

    site: str  # the name of the attention
    at: str  # "out", one of READ, or "weights"
    n: int | slice  # the number of the head; ALL, at "out" alone: each of them
    # (T,E), (T,D), (S,D) or (T,S); of ALL heads with an axis of these before it
    value: Tensor
    tokens: Places = ALL


def edited(call: Call, edits: Sequence[tuple[int, Edit]]) -> Tensor:
    """What the heads of a call give, (B,H,T,E), with edits; before each edit the number of the text that has it."""
    out = call.out.clone()
    index = kv_index_of(call)
    anew = [(row, edit) for row, edit in edits if edit.at in READ]
    parts = {at: getattr(call, at).clone() for at in READ if anew} | {"out": out}
    for row, (_, at, n, value, tokens) in edits:
        if at == "weights":
            at = "out"
            value = value @ call.v[row, index[n]].to(value)
            if call.options.gate is not None:
                value = value * torch.as_tensor(call.options.gate).to(value)[n]
        part = parts[at][row, n]  # a view: what is written there is in `parts`
        part[..., tokens, :] = value[..., tokens, :].to(part)
    if not anew:
        return out
    q, k, v = (parts[at] for at in READ)
    if call.weights is None:
        made = attend(q, k, v, call.options).to(out)
    elif all(edit.at == "v" for _, edit in anew):
        made = call.weights.to(out) @ v[:, index].to(out)
    else:
        raise HeadwiseError(
            f"{type(call.layer).__name__} makes its weights itself, and what it makes them of is not known; pass "
            f"at='out', 'weights' or 'v'"
        )
    for row, edit in anew:
        numbers = index if edit.at in SHARED else range(len(index))
        heads = [h for h, number in enumerate(numbers) if number == edit.n]
        out[row, heads] = made[row, heads]
    return out


def kv_index_of(call: Call) -> list[int]:
    """Of each query head the key/value head that it reads."""
    sizes = call.out.shape[1], call.k.shape[1]
    return list(resolve_kv_index(*sizes, call.options.kv_index))


def ablate(
    model: nn.Module, heads: Iterable[str], how: str = "zero", texts: Any = None
) -> AbstractContextManager[None]:
    """Silence heads of a model inside this block, in training and in eval.

        with hw.ablate(model, ["L3.H5", "cross.L0.H2"]):
            model(ids)

    Inside the block a compiled model of transformers runs without its compiler.

    Args:
        model: any model that `watch` watches
        heads: names, such as "L3.H5"
        how: "zero": the head's output becomes 0 (Michel et al. 2019, arXiv 1905.10650, section 2.2: the head
            mask). "mean": it becomes its mean over the real rows of the call, which a step with a cache has too few
            of. "resample": at every position it becomes what the head gives there in another of `texts`
        texts: for "resample": texts, or ids (N,T), at least as long as those that are read in the block. Its first
            document gets the outputs of the first of them, and so on in turn

    Raises:
        HeadwiseError: for a head that the model does not have, and at the end of a block in which none of the
            heads was reached.
    """
    if isinstance(heads, str):
        raise HeadwiseError(f"heads={heads!r} must be a list of names: [{heads!r}]")
    _check_how(how, (*WAYS, "resample"))
    if (texts is None) == (how == "resample"):
        raise HeadwiseError(
            f"how={how!r} with texts={texts!r:.60}: in how='resample' alone heads get what they give in texts"
        )
    if how != "resample":
        return _changing(model, dict.fromkeys(heads, WAYS[how]))
    others: dict[str, list[Tensor]] = {name: [] for name in heads}

    def keep(site: Site, call: Call) -> None:
        for name, out in zip(site.heads, call.out[0], strict=True):
            if name in others:
                others[name].append(out)

    for text in texts_of(model, texts):
        with attach(sites_of(model), keep), evaluating(model), torch.no_grad():
            run_body(model, text[None])
    return _changing(
        model, {name: partial(_resampled, gave) for name, gave in others.items()}
    )


def _row_mean(out: Tensor, documents: Documents) -> Tensor:
    """The mean over real rows of what a head gives, at each row, (B,T,E); a constant: no gradient flows through it."""
    # All documents of a call start alike. In cross attention none has a start, and all its keys are there at once.
    T = out.shape[1]
    past = documents[0].start or 0
    if T == 1 or past > 0:
        raise HeadwiseError(
            f"how='mean' in a step of {T} tokens with {past} in the cache has too few rows for a mean, and a cache "
            f"must not change the answer; read the whole text at once"
        )
    rows = []
    for of_document, document in zip(out.detach(), documents, strict=True):
        real = document.real_rows
        rows.append(of_document if real is None else of_document[real])
    real_rows = torch.cat(rows)
    return (real_rows.sum(0) / max(1, len(real_rows))).expand_as(out)


WAYS: dict[str, Change] = {
    "zero": lambda out, documents: torch.zeros_like(out),
    "mean": _row_mean,
}


def _resampled(others: list[Tensor], out: Tensor, documents: Documents) -> Tensor:
    """For each document of `out` (B,T,E) the rows that one of the other texts has in its place."""
    past = documents[0].start or 0
    T = past + out.shape[1]
    shortest = min(map(len, others))
    if shortest < T:
        raise HeadwiseError(
            f"how='resample' at {T} tokens with a text of {shortest}; pass texts of at least {T} tokens"
        )
    rows = [others[b % len(others)][past:T] for b in range(len(out))]
    return torch.stack(rows).to(out)


def steer(model: nn.Module, changes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Scale what heads give, add to it, or replace it, inside this block, in every call and at every token.

        with hw.steer(model, {"L0.H1": vector, "L1.H2": 0.5, "L1.H3": lambda z: z.relu()}):
            model(ids)

    It acts where W_O reads the head: behind a gate, and on each head apart, also where several read the same keys and
    values (Turner et al. 2023, arXiv 2308.10248).

    Args:
        model: any model that `watch` watches
        changes: for each head a number by which its output (E,) before W_O is multiplied, a vector (E,) that is
            added to it, or a function of its output (B,T,E) that gives what takes its place

    Raises:
        HeadwiseError: for a head that the model does not have, for a vector of another width than the head's, and
            at the end of a block in which none of the heads was reached.
    """
    for name, change in changes.items():
        if not callable(change) and not torch.as_tensor(change).isfinite().all():
            raise HeadwiseError(f"the change of {name} is not finite")
    return _changing(
        model,
        {name: partial(_steered, name, change) for name, change in changes.items()},
    )


def _steered(name: str, change: Any, out: Tensor, documents: Documents) -> Tensor:
    """What a head gives, (B,T,E), with the change that `steer` was given for it."""
    if callable(change):
        made = torch.as_tensor(change(out.clone()))
        if made.shape != out.shape:
            raise HeadwiseError(
                f"the function of {name} was given {(*out.shape,)} and gave {(*made.shape,)}; give as much"
            )
        return made
    factor = torch.as_tensor(change).to(out)
    if factor.ndim == 0:
        return out * factor
    if factor.shape != out.shape[-1:]:
        raise HeadwiseError(
            f"{name} gives vectors of {out.shape[-1]} before W_O, and its change is {(*factor.shape,)}"
        )
    return out + factor


def _changing(
    model: nn.Module, changes: Mapping[str, Change]
) -> AbstractContextManager[None]:
    """A block in which heads give something else."""
    sites = sites_of(model)
    known = [name for site in sites for name in site.heads]
    unknown = [name for name in changes if name not in known]
    # A module of somebody's own may not tell its number of heads before it has run: 0 until then.
    for site in sites:
        if unknown and not site.n_heads:
            raise HeadwiseError(
                f"how many heads {site.name} has, a {type(site.module).__name__}, is known after it has run: "
                f"run the model once inside hw.watch(model), or give the module an attribute n_heads"
            )
    if unknown:
        raise unknown_head(unknown[0], known)

    def changed(site: Site, call: Call, documents: Documents) -> Tensor:
        out = call.out.clone()
        # A call that was not read has no documents: replaced nevertheless, it is refused with the reason.
        for h, name in enumerate(site.heads if documents else ()):
            if name in changes:
                out[:, h] = changes[name](call.out[:, h], documents)
        return out

    chosen = [site for site in sites if not changes.keys().isdisjoint(site.heads)]
    return listening(model, changed, sites=chosen)


def _check_how(how: str, known: Collection[str]) -> None:
    if how not in known:
        raise HeadwiseError(f"how={how!r} is not known; one of {', '.join(known)}")


@torch.inference_mode(False)
def importance(
    model: nn.Module, batches: Iterable[Tensor], after: int | None = None
) -> dict[str, float]:
    """How much the loss hangs on each head, from one backward pass a batch of ids (B,T).

    Michel et al. 2019 (arXiv 1905.10650), section 4.1: the mean over rows of |head output . dL/d head output|, divided
    by the root of the sum of squares over the heads of its layer: head -> 0 to 1. L is the mean loss of a document
    times its length, also where `after`, which is that of `next_token_losses`, leaves fewer tokens to that mean. The
    parameters' own gradients are left alone.
    """
    require_next(model)
    # (H,) sums over rows, once there is one: 0.0 before
    totals: dict[Site, Any] = defaultdict(float)
    outs = []

    def keep(site: Site, call: Call) -> Tensor:
        # With frozen weights nothing asks for a gradient yet: the output itself becomes where it ends.
        out = call.out if call.out.requires_grad else call.out.detach().requires_grad_()
        outs.append((site, out))
        return out

    sites = sites_of(model)
    with evaluating(model):
        for ids in batches:
            outs.clear()
            with attach(sites, keep), torch.enable_grad():
                # A copy, for ids of inference_mode cannot be saved for the backward pass.
                losses = next_token_losses(model, ids.clone(), after)
                # of means: a document counts by its length
                loss = losses.sum() * (ids.shape[1] - 1)
                slopes = torch.autograd.grad(loss, [out for _, out in outs])
            for (site, out), slope in zip(outs, slopes, strict=True):
                of_rows = (out.detach() * slope).sum(-1).abs()  # (B,H,T)
                totals[site] += of_rows.sum((0, 2)).cpu().double()
    result: dict[str, float] = {}
    # sums do for means: the number of rows goes out with the norm
    for site, total in totals.items():
        # a silent layer's are 0, and not NaN
        scaled = total / total.norm().clamp(min=torch.finfo(total.dtype).tiny)
        result |= zip(site.heads, scaled.tolist(), strict=True)
    return result


@torch.no_grad()
def ablation(
    model: nn.Module,
    batches: Sequence[Tensor],
    how: str = "zero",
    progress: Progress = no_progress,
    after: int | None = None,
    whole: Sequence[Tensor] | None = None,
) -> dict[str, Interval]:
    """Change in next-token loss, in nats a token, when one head at a time is silenced; the interval is over documents.

    `progress(done, total)` counts heads, batch by batch; `after` is that of `next_token_losses`, and `whole` are the
    losses (B,) of the whole model on each batch where they are known.
    """
    require_next(model)
    _check_how(how, WAYS)
    changes = defaultdict(list)
    with evaluating(model):
        sites = dict.fromkeys(calls_of(model, batches[0][:1]))
        # each head counts once a batch
        done = 0
        total = sum(site.n_heads for site in sites) * len(batches)

        for n, ids in enumerate(batches):
            base = next_token_losses(model, ids, after) if whole is None else whole[n]
            for site in sites:
                for h, name in enumerate(site.heads):
                    with attach([site], partial(_silence, h, how)):
                        losses = next_token_losses(model, ids, after)
                    changes[name].extend((losses - base).tolist())
                    done += 1
                    progress(done, total)
    return {name: interval_of(values) for name, values in changes.items()}


def _silence(h: int, how: str, site: Site, call: Call) -> Tensor:
    """What the heads give, (B,H,T,E), without one of them. There is no padding: all rows are real."""
    out = call.out.clone()
    out[:, h] = 0 if how == "zero" else out[:, h].mean((0, 1))
    return out


def calls_of(model: nn.Module, ids: Tensor) -> list[Site]:
    """The site of each call of attention while the model reads ids (B,T): without a picture some layers do not run."""
    order = []
    sites = sites_of(model)

    def note(site: Site, call: Call) -> None:
        order.append(site)

    with attach(sites, note), evaluating(model), torch.no_grad():
        run_body(model, ids)
    return order
