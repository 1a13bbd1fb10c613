"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares of the difference between the two answers: 0
changes nothing, 1 restores the clean answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.backends.torch_ import attend
from headwise.errors import HeadwiseError
from headwise.heads.ablate import slopes_of
from headwise.heads.statistics import unknown_head
from headwise.intervals import Interval, interval_of
from headwise.models.ask import (
    answer_logits,
    device_of,
    evaluating,
    require_next,
    require_slopes,
    vocabulary_of,
)
from headwise.models.hook import attach, hooked, inside
from headwise.models.open import ids_of, token_of
from headwise.models.sites import Layer, Site, layers_of
from headwise.records import Call, head_name
from headwise.spec import resolve_kv_index
from headwise.words import unknown

# what of a head can be patched: `at` of `patch`, and fields of a `Call`
PLACES = ("q", "k", "v", "out", "weights")

# As `patch` explains them.
Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Target = Sequence[int | str] | Sequence[Sequence[int]] | Tensor
ALL = slice(None)  # every token
# Numbers of the residual stream, T times C of each text, that run as one batch. More leave the processor's cache, and
# larger batches of long texts took longer.
LARGEST = 2**19
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
READ = ("q", *SHARED)  # what a head makes of the residual stream

# a clean and a corrupted text (T,), and two targets or none
Pair = tuple[Tensor, Tensor, list[int] | None]
# the name of a site, and the query heads whose output changes there
Place = tuple[str, tuple[int, ...]]
# ("q", "L3.H5") or ("k", "L3.KV1"): what of a head, or key/value head, reads
Receiver = tuple[str, str]
Change = Callable[[Call], Tensor]  # gives what takes the place of `out` in a call of one text
# a text in which some heads give something else, by the names of their sites
Variant = Mapping[str, Change]
Key = TypeVar("Key", bound=Hashable)
Rows = slice | list[int]  # the tokens at which something is changed
Progress = Callable[[int, int], None]  # steps done, and of all


def no_progress(done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Patching:
    """What each head brings back of the clean answer, with its interval over pairs of texts.

    Over several pairs it is the share of the means: what comes back on average, over the mean difference. A mean of
    shares would hang on the pair whose two answers are nearest to each other.
    """

    at: str  # q, k, v, out or weights
    # head, or key/value head, -> share of the difference; 1 is all of it
    effects: dict[str, Interval]
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval  # the same of the corrupted ones
    # (T,), where positions="each"
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    # (N,) share of each pair's own difference
    by_pair: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return sorted(self.effects, key=lambda name: -abs(self.effects[name].mean))[:n]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3))
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


# Also where the caller is in inference mode: a tensor of that mode could take no part in the backward pass of `fast`.
@torch.inference_mode(False)
@torch.no_grad()
def patch(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    at: str = "out",
    *,
    heads: Iterable[str] | None = None,
    positions: Sequence[int] | str | None = None,
    target: Target | None = None,
    together: bool = False,
    fast: bool = False,
    contexts: int | None = None,
    progress: Progress | None = None,
) -> Patching:
    """Give one head at a time, while the model reads `corrupted`, what it had while reading `clean`.

    The answer is read at the last position: the logit of the first target minus that of the second.

    Args:
        model: any model that `watch` watches and that answers with logits
        clean: ids (T,) of one text, or (N,T) of several; or, of a model that `open` opened, a string
        corrupted: as many, each of the same length as its clean one
        at: "out": what the head adds to; "weights": where it looks; "q", "k", "v": what it asks with, is found
            by, hands over. Keys and values belong to key/value heads, which are named L3.KV1
        heads: names, default all
        positions: at which tokens: a list, default all; "each" tries every token alone and fills `by_position`
        target: two token ids, or words such as " Mary": the answer to the clean text and the one to the corrupted
            text, or ids (N,2); default: what the model likes best after each
        together: patch all `heads` at once; the one effect is named "together"
        fast: an estimate from one backward pass, of `out` alone: (clean - corrupted) times the slope of the
            answer (Nanda 2023, "Attribution patching"; Syed et al. 2023, arXiv 2310.10348)
        contexts: of `out` alone, and of all heads: the largest of what a head brings to the corrupted text, of
            what it takes from the clean one, and of what it does beside as many random halves of the heads. It
            finds heads that are needed together and heads that stand in for each other; 0 has no random halves
        progress: is called with the number of pairs of texts done, and of all
    """
    require_next(model)
    if at not in PLACES:
        raise unknown(f"at={at!r} is no place of a head", at, PLACES)
    if fast and (at != "out" or together):
        raise HeadwiseError(
            f"fast=True estimates heads one at a time and at='out' alone, not at={at!r}, {together=}"
        )
    is_narrowed = at != "out" or together or fast or heads is not None or positions is not None
    if contexts is not None and (is_narrowed or contexts < 0):
        raise HeadwiseError(
            f"contexts={contexts} tries all heads at all tokens, at='out': 0 or more, no others"
        )
    if fast:
        require_slopes(model)
    pairs = _pairs(model, clean, corrupted, target)
    effects = defaultdict(list)  # head -> its effect in each pair of texts
    # head -> its effect at each token of the first pair, then of the next
    by_position = defaultdict(list)
    ends = []  # of each pair the difference that its clean text has, and its corrupted one
    with evaluating(model):
        for study in _studies(model, pairs):
            names = chosen_heads(study.names(at), heads, at)
            ends.append((study.clean, study.corrupted))
            T = study.text.ids.numel()
            if positions == "each":
                for t in range(T):
                    for name, effect in study.effects(at, alone(names), [t]).items():
                        by_position[name].append(effect)
            rows = _positions(positions, T)  # with "each" all tokens: `effects` are of them at once
            if contexts is not None:
                table = study.carried(contexts)
            elif fast:
                table = study.estimate(names, rows)
            else:
                table = study.effects(at, {"together": names} if together else alone(names), rows)
            for name, effect in table.items():
                effects[name].append(effect)
            if progress is not None:
                progress(len(ends), len(pairs))
    of_clean, of_corrupted = (interval_of(list(values)) for values in zip(*ends, strict=True))
    intervals = _shares(effects, ends)
    size = np.subtract(*np.transpose(ends))  # (pairs,)
    # (pairs,T): all texts have the same length.
    means = {
        name: size @ np.reshape(values, (len(pairs), -1)) / size.sum()
        for name, values in by_position.items()
    }
    by_pair = {name: np.array(values) for name, values in effects.items()}
    return Patching(at, intervals, of_clean, of_corrupted, means, by_pair)


def _studies(model: nn.Module, pairs: Sequence[Pair]) -> Iterator[Study]:
    """The study of each pair; an error names the pair."""
    passes = Passes(model, layers_of(model))
    for number, (clean, corrupted, target) in enumerate(pairs):
        texts = passes.read(clean), passes.read(corrupted)
        first, second = target or [int(text.answer.argmax()) for text in texts]
        try:
            study = Study(passes, *texts, (first, second))
        except HeadwiseError as error:
            if len(pairs) == 1:
                raise
            raise HeadwiseError(f"pair {number} of {len(pairs)}, counted from 0: {error}") from None
        yield study


def _shares(
    effects: Mapping[str, Sequence[float]], ends: Sequence[tuple[float, float]]
) -> dict[str, Interval]:
    """Of each head the share of the means, from its share in each pair; `ends` are both differences of each pair."""
    size = np.subtract(*np.transpose(ends))  # (pairs,) what there is to bring back
    if size.mean() == 0:
        raise HeadwiseError(
            f"over the {len(ends)} pairs clean and corrupted texts differ by 0 on average"
        )
    intervals = {}
    for name, values in effects.items():
        share = float(size @ values / size.sum())
        # A ratio of two means, to first order: its mean is the share, and its spread that of the ratio.
        intervals[name] = interval_of(
            (share + (np.array(values) - share) * size / size.mean()).tolist()
        )
    return intervals


@torch.no_grad()
def path_effects(
    model: nn.Module,
    clean: Ids,
    corrupted: Ids,
    receiver: str,
    at: str = "q",
    *,
    target: Target | None = None,
    senders: Iterable[str] | None = None,
) -> dict[str, Interval]:
    """Path patching: what each earlier head brings back of the clean answer through what one head reads.

    receiver  the head that reads, L3.H5, for at="q"; for "k" and "v" a key/value head, L3.KV1
    senders   heads of earlier layers, default all of them

    The sender gives its clean output; other heads between the two are frozen as they were in the corrupted text,
    feed-forwards run. The query, key or value that the receiver makes of this takes the place of its own, and
    everything after runs freely (Wang et al. 2022, section 3.1 and appendix B; Goldowsky-Dill et al. 2023,
    arXiv 2304.05969).
    """
    require_next(model)
    if at not in READ:
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, READ)
    effects, ends = defaultdict(list), []
    with evaluating(model):
        for study in _studies(model, _pairs(model, clean, corrupted, target)):
            ends.append((study.clean, study.corrupted))
            chosen_heads(study.names(at), [receiver], at)  # raises for a receiver that is not there
            for name, effect in study.paths([(at, receiver)], senders)[at, receiver].items():
                effects[name].append(effect)
    return _shares(effects, ends)


def _pairs(model: nn.Module, clean: Ids, corrupted: Ids, target: Target | None) -> list[Pair]:
    # The arguments of `patch`, checked, pair by pair.
    # A copy is no tensor of torch.inference_mode, which a backward pass could not keep.
    good, bad = (torch.as_tensor(ids_of(model, ids)).clone() for ids in (clean, corrupted))
    if good.shape != bad.shape:
        raise HeadwiseError(
            f"clean is {tuple(good.shape)} and corrupted {tuple(bad.shape)}: pass as many tokens in both"
        )
    if good.ndim not in (1, 2) or good.numel() == 0:
        raise HeadwiseError(f"clean is {tuple(good.shape)}; pass ids (T,) or (N,T)")
    good, bad = (ids.reshape(-1, ids.shape[-1]) for ids in (good, bad))  # of one pair, too, (N,T)
    targets: list[Any] = [None] * len(good)
    if target is not None:
        ids = target.tolist() if isinstance(target, Tensor) else target
        rows = torch.as_tensor([token_of(model, x) if isinstance(x, str) else x for x in ids])
        if tuple(rows.shape) not in ((2,), (len(good), 2)):
            raise HeadwiseError(
                f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)"
            )
        size = vocabulary_of(model)  # None where the model does not say
        if size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
            raise HeadwiseError(
                f"target {rows.tolist()} is outside the vocabulary of {size} tokens"
            )
        targets = rows.expand(len(good), 2).tolist()
        for number, (answer, other) in enumerate(targets):
            if answer == other:
                pair = (
                    f"the target of pair {number}, counted from 0," if rows.ndim == 2 else "target"
                )
                raise HeadwiseError(
                    f"{pair} is token {answer} twice, so there is no difference to bring back"
                )
    return list(zip(good, bad, targets, strict=True))


def _positions(positions: Sequence[int] | str | None, T: int) -> Rows:
    if positions is None or positions == "each":
        return ALL
    if isinstance(positions, str) or not len(positions):  # `len`, as an array has no truth
        raise HeadwiseError(f"positions={positions!r} names no token; pass a list, or 'each'")
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return list(positions)


# Passes of one model


@dataclass(frozen=True)
class Reading:
    """A text (1,T) that a model has read, and what is kept of that."""

    ids: Tensor
    answer: Tensor  # (V,) logits of the token that is answered
    calls: dict[str, Call]  # of each attention, by the name of its site
    runs: Counter[str]  # of its attention function, which DiffLlama calls twice
    outputs: dict[nn.Module, Any]  # what each block gave, blocks in their order


class Passes:
    """The passes of a model that a study asks for: texts, and variants of them, answered at a position.

    Variants that begin at one block are rows of one batch. The model runs from its beginning, so that masks and
    positions are its own; but the blocks below give at once what they gave when the text was read.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], position: int = -1) -> None:
        self.model, self.layers, self.position = model, layers, position
        # Each once: a decoder's block that also reads an encoder holds two attentions, and so stands in two layers.
        self.blocks = list(dict.fromkeys(layer.block for layer in layers))
        self.sites = {layer.site.name: layer.site for layer in layers}
        self.starts = {layer.site.name: self.blocks.index(layer.block) for layer in layers}

    def read(self, ids: Tensor) -> Reading:
        """Read a text (T,)."""
        calls: dict[str, Call] = {}
        runs = Counter[str]()
        outputs: dict[nn.Module, Any] = {}

        def keep(site: Site, call: Call) -> None:
            if site.name in calls:
                raise HeadwiseError(
                    f"{site.name} of {type(self.model).__name__} runs several times in one pass, and which of its runs "
                    f"is to be patched is not known; watch it instead, with headwise.watch"
                )
            calls[site.name] = call

        def count(site: Site, call: Call) -> None:
            runs[site.name] += 1

        def record(block: nn.Module, args: Any, output: Any) -> None:
            outputs[block] = output

        kept, counted = (
            {site: partial(act, site) for site in self.sites.values()} for act in (keep, count)
        )
        recorded = hooked((block.register_forward_hook, record) for block in self.blocks)
        row = ids[None].to(device_of(self.model))
        with attach(counted, early=True), attach(kept), recorded:
            answer = answer_logits(self.model, row, self.position)[0]
        return Reading(row, answer, calls, runs, outputs)

    def asked(
        self,
        text: Reading,
        variants: Mapping[Key, Variant],
        ask: Callable[[Tensor], float],
        progress: Progress = no_progress,
        early: bool = False,
    ) -> dict[Key, float]:
        """What `ask` makes of the logits (V,) of each variant of a text.

        early  do the heads give it before the gates and norms of their site?
        """
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        is_crossed = any(call.cross for call in text.calls.values())
        groups = defaultdict(list)  # number of the first block that changes -> keys of variants
        for key, variant in variants.items():
            # 0 for no heads at all: in `carried` a random half of a few heads may be empty.
            groups[
                0 if is_crossed else min(map(self.starts.__getitem__, variant), default=0)
            ].append(key)
        # At least 1: each variant of a text that is larger runs alone.
        most = max(1, LARGEST // _hidden(next(iter(text.outputs.values()))).numel())
        answers: dict[Key, float] = {}
        for start, keys in groups.items():
            for first in range(0, len(keys), most):
                batch = keys[first : first + most]
                logits_nv = self._run(text, start, [variants[key] for key in batch], early)
                answers |= zip(batch, map(ask, logits_nv), strict=True)
                progress(len(answers), len(variants))
        return {key: answers[key] for key in variants}

    def _run(self, text: Reading, start: int, of_each: Sequence[Variant], early: bool) -> Tensor:
        """Logits (n,V) of variants, from a block on."""
        n = len(of_each)
        # Not all blocks have run: a text without a picture passes by those that read pictures.
        outputs = {
            block: text.outputs[block] for block in self.blocks[:start] if block in text.outputs
        }
        if outputs:  # the last of them is what block `start` reads
            block, output = outputs.popitem()
            states = _hidden(output).expand(n, *_hidden(output).shape[1:])
            outputs[block] = (states, *output[1:]) if isinstance(output, tuple) else states
        handlers = {}
        for name in set().union(*of_each):
            handlers[self.sites[name]] = partial(
                _side_by_side, [each.get(name) for each in of_each]
            )
        with ExitStack() as stack:
            is_inside = stack.enter_context(inside())
            for block, output in outputs.items():
                stack.enter_context(_replayed(block, is_inside, output))
            stack.enter_context(attach(handlers, early))
            return answer_logits(self.model, text.ids.expand(n, -1), self.position)


def _hidden(output: Any) -> Tensor:
    """The hidden states among what a block gives."""
    return output[0] if isinstance(output, tuple) else output


def _side_by_side(handlers: Sequence[Change | None], call: Call) -> Tensor:
    """What takes the place of `out` in a call whose rows are variants, each with its own handler or none."""
    out = call.out.clone()
    for n, handler in enumerate(handlers):
        if handler is not None:
            # q, k, v, out and the weights, where the model made them, have the batch as their first axis.
            parts = {
                name: x[n : n + 1] for name in PLACES if (x := getattr(call, name)) is not None
            }
            out[n : n + 1] = handler(call._replace(**parts))
    return out


# One pair of texts


class Study:
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference.

    target  the two tokens that are compared; of one, with None, the log-probability counts
    """

    def __init__(
        self, passes: Passes, clean: Reading, text: Reading, target: tuple[int, int | None]
    ) -> None:
        self.passes, self.clean_text, self.text, self.target = passes, clean, text, target
        if target[0] == target[1]:
            raise HeadwiseError(
                f"both texts are answered with token {target[0]}, so there is no difference to bring back; pass "
                f"target=(answer, other), or texts that the model answers differently"
            )
        # The difference that each text has.
        self.clean, self.corrupted = (
            float(self._difference(reading.answer)) for reading in (clean, text)
        )
        if self.clean == self.corrupted:
            raise HeadwiseError(
                "both texts give the answer the same logits: there is no difference to bring back"
            )

    def _difference(self, logits_v: Tensor) -> Tensor:
        """The logit of the answer minus that of the other; where there is none, the answer's log-probability."""
        answer, other = self.target
        if other is None:
            return logits_v.cpu().double().log_softmax(-1)[answer]  # some devices have no float64
        return logits_v[answer].cpu().double() - logits_v[other].cpu().double()

    def share(self, logits_v: Tensor) -> float:
        """How far an answer has come from the corrupted one to the clean one."""
        return (float(self._difference(logits_v)) - self.corrupted) / (self.clean - self.corrupted)

    def names(self, at: str) -> dict[str, Place]:
        """The place of every head by name; at k and v that of every key/value head, with the heads that read it."""
        places: dict[str, Place] = {}
        for site in self.passes.sites:
            call = self.text.calls.get(site)
            if call is None:
                # it did not run, as cross attention to images that a text alone does not have
                continue
            H, G = call.q.shape[1], call.k.shape[1]
            if at not in SHARED:
                places |= {head_name(site, h): (site, (h,)) for h in range(H)}
                continue
            index = resolve_kv_index(H, G, call.options.kv_index)
            for g in range(G):
                places[f"{site}.KV{g}"] = site, tuple(h for h in range(H) if index[h] == g)
        return places

    def effects(
        self,
        at: str,
        sets: Mapping[Key, Iterable[str]],
        rows: Rows = ALL,
        progress: Progress = no_progress,
    ) -> dict[Key, float]:
        """The effect of each of these sets of heads, patched together; see `variants`."""
        return self.asked(self.variants(at, sets, rows), progress, early=at != "out")

    def asked(
        self, variants: Mapping[Key, Variant], progress: Progress, early: bool = False
    ) -> dict[Key, float]:
        """How far the answer to each variant of the corrupted text has come from there to the clean one."""
        return self.passes.asked(self.text, variants, self.share, progress, early)

    def variants(
        self, at: str, sets: Mapping[Key, Iterable[str]], rows: Rows = ALL
    ) -> dict[Key, Variant]:
        """The corrupted text with each of these sets of heads, or key/value heads, as it was in the clean run.

        sets  any key -> names of the heads, whose effect will have that key
        """
        places = self.names(at)
        variants: dict[Key, Variant] = {}
        for key, names in sets.items():
            heads: dict[str, list[int]] = defaultdict(list)  # site -> numbers of its query heads
            for name in names:
                site, members = places[name]
                heads[site] += members
            for site in heads:
                self._require_part(site, at)
            variants[key] = {
                site: partial(self._patched, at, site, members, rows)
                for site, members in heads.items()
            }
        return variants

    def carried(self, contexts: int = 0) -> dict[str, float]:
        """What each head carries of the difference: the largest of what it brings, takes, and does in random contexts.

        Of two heads that are needed at once neither brings anything to the corrupted text alone, but each takes all
        from the clean one; of two of which either will do, each brings something, and neither takes anything. Where
        both are at work at once, a head matters only beside some of the others: `contexts` are random halves of all
        heads, which give their clean output, and each head joins or leaves them.
        """
        names = list(self.names("out"))
        # there heads take, and do not bring
        reverse = Study(self.passes, self.text, self.clean_text, self.target)
        tables = [self.effects("out", alone(names)), reverse.effects("out", alone(names))]
        # the same halves for each pair of texts, and in each call
        generator = torch.Generator().manual_seed(0)
        for _ in range(contexts):
            drawn = torch.rand(len(names), generator=generator) < 0.5
            half = {name for name, chosen in zip(names, drawn, strict=True) if chosen}
            # The half itself, by the name "", and for each head the half with it, or, where it is inside, without it.
            shares = self.effects("out", {"": half, **{name: half ^ {name} for name in names}})
            # Leaving is joining undone.
            tables.append(
                {name: (shares[name] - shares[""]) * (-1 if name in half else 1) for name in names}
            )
        # the largest, with its sign
        return {name: max((table[name] for table in tables), key=abs) for name in names}

    def _patched(self, at: str, site: str, heads: Sequence[int], rows: Rows, call: Call) -> Tensor:
        """`out` of a call of the corrupted text whose heads have this part of the clean run at these tokens."""
        clean = self.clean_text.calls[site]
        if at == "out":
            return _put(call.out, heads, clean.out[:, heads], rows)
        # the clean queries and keys; the options, among them the mask, stay those of this text
        if at == "weights":
            moved = call._replace(q=clean.q, k=clean.k, weights=clean.weights)
        else:
            part = getattr(call, at).clone()
            part[:, :, rows] = getattr(clean, at)[:, :, rows]
            moved = call._replace(**{at: part})
        # Other keys and values change what heads give at every token that looks there, not at these rows alone.
        return _put(
            call.out, heads, self._attended(site, moved, heads), ALL if at in SHARED else rows
        )

    def _require_part(self, site: str, at: str) -> None:
        """Raise HeadwiseError where it is not known what else a query, key, value or map would make the heads give."""
        call = self.text.calls[site]
        if call.weights is not None and at in ("q", "k"):
            raise HeadwiseError(
                f"at={at!r}: {type(call.layer).__name__} makes its weights itself, and what it makes them of is not "
                f"known; pass at='out', 'weights' or 'v'"
            )
        if self.text.runs[site] > 1 and at == "v":
            raise HeadwiseError(
                f"at='v': {type(call.layer).__name__} lays the maps of {site} over several values; pass another at="
            )

    def _attended(self, site: str, call: Call, heads: Sequence[int]) -> Tensor:
        """What these heads of a call of one text give, (1,heads,T,E)."""
        H = call.out.shape[1]
        # of one text: those of the call may be of all variants that run
        options = self.text.calls[site].options
        index = resolve_kv_index(H, call.k.shape[1], options.kv_index)
        read = [index[h] for h in heads]
        # a foreign module made them itself, of what is not known: they stay
        if call.weights is not None:
            return call.weights[:, heads].to(call.v.dtype) @ call.v[:, read]
        options = options._replace(
            mask=None if options.mask is None else options.mask.for_heads(heads, H),
            sink=None if options.sink is None else torch.as_tensor(options.sink)[heads],
            gate=None if options.gate is None else torch.as_tensor(options.gate)[heads],
            kv_index=None,
        )
        return attend(call.q[:, heads], call.k[:, read], call.v[:, read], options)

    def estimate(self, names: Iterable[str], rows: Rows) -> dict[str, float]:
        """What one backward pass says of the effect of each head's output: its change times the answer's slope."""

        def answer() -> Tensor:
            return self._difference(
                answer_logits(self.passes.model, self.text.ids, self.passes.position)[0]
            )

        slopes = {
            site.name: slope
            for site, _, slope in slopes_of(list(self.passes.sites.values()), answer)
        }
        effects = {}
        for name in names:
            site, h = place_of(name)
            clean, corrupted = self.clean_text.calls[site].out, self.text.calls[site].out
            moved = clean[0, h, rows] - corrupted[0, h, rows]
            # of the difference of logits, to first order
            gained = float((moved * slopes[site][0, h, rows]).sum())
            effects[name] = gained / (self.clean - self.corrupted)
        return effects

    def paths(
        self,
        receivers: Iterable[Receiver],
        senders: Iterable[str] | None = None,
        progress: Progress = no_progress,
    ) -> dict[Receiver, dict[str, float]]:
        """Of each receiver, such as ("q", "L3.H5"), the effect of each earlier head, a sender, through what it reads.

        First each sender gives its clean output, and what all receivers make of that is kept; then each receiver has
        it, from one sender after another.
        """
        order = list(self.passes.sites)  # from the first layer up
        heads = self.names("out")
        places = {(at, name): self.names(at)[name] for at, name in receivers}
        earlier = {}  # receiver -> the chosen heads of layers below it
        for receiver, (site, _) in places.items():
            below = {
                head: place
                for head, place in heads.items()
                if order.index(place[0]) < order.index(site)
            }
            earlier[receiver] = chosen_heads(below, senders, "out") if below else []
            if earlier[receiver]:
                self._require_part(site, receiver[0])
        every_sender = set().union(*earlier.values())
        arrived = self._sent([head for head in heads if head in every_sender], places, progress)
        variants: dict[tuple[Receiver, str], Variant] = {}
        for receiver, names in earlier.items():
            site, members = places[receiver]
            for sender in names:
                receive = partial(self._received, receiver, members, arrived[receiver, sender])
                variants[receiver, sender] = {site: receive}
        shares = self.asked(variants, progress, early=True)
        return {
            receiver: {sender: shares[receiver, sender] for sender in names}
            for receiver, names in earlier.items()
        }

    def _sent(
        self, senders: Sequence[str], places: Mapping[Receiver, Place], progress: Progress
    ) -> dict[tuple[Receiver, str], Tensor]:
        """The query, key or value (T,D) that each receiver makes where a sender above it gives its clean output.

        Heads above the sender are frozen, feed-forwards run.
        """
        arrived = {}

        def freeze(sender: str, site: str, call: Call) -> Tensor:
            for (at, name), place in places.items():
                if place[0] == site:
                    arrived[(at, name), sender] = getattr(call, at)[0, place_of(name)[1]].clone()
            return self.text.calls[site].out

        ran = [site for site in self.passes.sites if site in self.text.calls]
        variants: dict[str, Variant] = {}
        for sender, variant in self.variants("out", alone(senders)).items():
            above = ran[ran.index(place_of(sender)[0]) + 1 :]
            variants[sender] = {
                **variant,
                **{site: partial(freeze, sender, site) for site in above},
            }
        self.asked(variants, progress)
        return arrived

    def _received(
        self, receiver: Receiver, heads: Sequence[int], part: Tensor, call: Call
    ) -> Tensor:
        """`out` of a call in which the receiver has this query, key or value; `heads` are those that read it."""
        at, name = receiver
        site, number = place_of(name)
        changed = getattr(call, at).clone()
        changed[0, number] = part
        return _put(
            call.out, heads, self._attended(site, call._replace(**{at: changed}), heads), ALL
        )


def _put(out: Tensor, heads: Sequence[int], new: Tensor, rows: Rows) -> Tensor:
    """A copy of `out` (1,H,T,E) with what these heads give at these tokens, (1,heads,T,E)."""
    out = out.clone()
    for n, h in enumerate(heads):
        out[:, h, rows] = new[:, n, rows].to(out)
    return out


def place_of(name: str) -> tuple[str, int]:
    """The site of a head, or key/value head, and its number there: ("L3", 5) of L3.H5."""
    site, _, last = name.rpartition(".")
    return site, int(last.lstrip("HKV"))  # without the letters, "H" or "KV", before the number


def alone(names: Iterable[str]) -> dict[str, list[str]]:
    """Each head as a set of its own."""
    return {name: [name] for name in names}


class _Replay:
    """What stands in the place of a block's `forward` while some thread replays the block.

    In a pass that replays the block it computes nothing and gives the output that is kept for this pass. In all other
    passes, such as those of other threads, it computes. Threads that replay one block at the same time share one
    _Replay, each with an output of its own: were there one within another, the first to end would remove both.
    """

    def __init__(self, block: nn.Module) -> None:
        # `before` is a `forward` that somebody had set on this very block, not on its class: it is put back at the end.
        # `vars` has only what was set on the block itself; a method of its class is not there.
        self.block, self.forward, self.before = block, block.forward, vars(block).get("forward")
        # For each pass that replays the block: a function that says whether it is called in that pass, and the output.
        self.outputs: list[tuple[Callable[[], bool], Any]] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # a copy: another thread may add its own meanwhile
        for is_inside, output in [*self.outputs]:
            if is_inside():
                return output
        return self.forward(*args, **keywords)

    def __reduce__(self) -> Any:
        # A deep copy of the model, made meanwhile in another thread, gets one without outputs, so that it computes.
        return _Replay, (self.block,), {**vars(self), "outputs": []}


@contextmanager
def _replayed(block: nn.Module, is_inside: Callable[[], bool], output: Any) -> Iterator[None]:
    """Within this context a block of the model computes nothing where `is_inside` says so, and gives `output`."""
    with _lock:  # two threads that begin at once must not make a _Replay each
        replay = block.forward if isinstance(block.forward, _Replay) else _Replay(block)
        replay.outputs.append((is_inside, output))
        block.forward = replay
    try:
        yield
    finally:
        with _lock:
            replay.outputs = [each for each in replay.outputs if each[0] is not is_inside]
            if not replay.outputs:
                del block.forward  # the attribute of this very block: that of its class shows again
                if replay.before is not None:
                    block.forward = replay.before


_lock = Lock()  # of `_replayed`


def chosen_heads(places: Mapping[str, Place], heads: Iterable[str] | None, at: str) -> list[str]:
    """The named heads, or all, in the order of the model; `places` has all that there are at `at`.

    Raises HeadwiseError for a name that is not among them.
    """
    if isinstance(heads, str):
        raise HeadwiseError(f"heads={heads!r} must be a list of names, such as [{heads!r}]")
    names = list(places if heads is None else heads)
    if not names:
        raise HeadwiseError("heads=[] leaves no head to patch; name some, or leave it out")
    for name in names:
        if name not in places:
            if at in SHARED and ".KV" not in name:
                raise HeadwiseError(
                    f"{name}: keys and values belong to key/value heads, such as {next(iter(places))}"
                )
            raise unknown_head(name, list(places))
    return [name for name in places if name in names]
