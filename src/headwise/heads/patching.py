"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares of the difference between the two answers: 0
changes nothing, 1 restores the clean answer.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.effect import slopes_of
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
from headwise.models.hook import Handler, attach, hooked, inside
from headwise.models.open import ids_of, token_of
from headwise.models.sites import Layer, Site, layers_of
from headwise.records import Call, head_name
from headwise.rungs.tensor import attend
from headwise.spec import resolve_kv_index
from headwise.words import unknown

PLACES = ("q", "k", "v", "out", "weights")  # what of a head can be patched: `at` of `patch`, and fields of a `Call`

# As `patch` explains them.
Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Target = Sequence[int | str] | Sequence[Sequence[int]] | Tensor
ALL = slice(None)  # every token
# Numbers of the residual stream, T times C of each text, that run as one batch. More leave the processor's cache, and
# larger batches of long texts took longer.
LARGEST = 2**19
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1
READ = ("q", *SHARED)  # what a head makes of the residual stream

Pair = tuple[Tensor, Tensor, list[int] | None]  # a clean and a corrupted text (T,), and two targets or none
Place = tuple[str, tuple[int, ...]]  # the name of a site, and the query heads whose output changes there
Receiver = tuple[str, str]  # ("q", "L3.H5") or ("k", "L3.KV1"): what of a head, or key/value head, reads
Key = TypeVar("Key", bound=Hashable)
Rows = slice | list[int]  # the tokens at which something is changed
Beside = Callable[[], AbstractContextManager[Any]]  # what else listens to a pass
# Logits (V,) after the clean and the corrupted text -> the tokens that are compared: the answer, and another or none.
Choice = Callable[[Tensor, Tensor | None], tuple[int, int | None]]
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
    effects: dict[str, Interval]  # head, or key/value head, -> share of the difference; 1 is all of it
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval  # the same of the corrupted ones
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # (T,), where positions="each"
    by_pair: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # (N,) share of each pair's own difference

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
        raise HeadwiseError(f"fast=True estimates heads one at a time and at='out' alone, not at={at!r}, {together=}")
    is_narrowed = at != "out" or together or fast or heads is not None or positions is not None
    if contexts is not None and (is_narrowed or contexts < 0):
        raise HeadwiseError(f"contexts={contexts} tries all heads at all tokens, at='out': 0 or more, no others")
    if fast:
        require_slopes(model)
    pairs = _pairs(model, clean, corrupted, target)
    passes = Passes(model, layers_of(model))
    effects = defaultdict(list)  # head -> its effect in each pair of texts
    by_position = defaultdict(list)  # head -> its effect at each token of the first pair, then of the next
    ends = []  # of each pair the difference that its clean text has, and its corrupted one
    with evaluating(model):
        for number, pair in enumerate(pairs, 1):
            study = _study(passes, pair, number, len(pairs))
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
                progress(number, len(pairs))
    of_clean, of_corrupted = (interval_of(list(values)) for values in zip(*ends, strict=True))
    intervals = _shares(effects, ends)
    size = np.subtract(*np.transpose(ends))  # (pairs,)
    # (pairs,T): all texts have the same length.
    means = {name: size @ np.reshape(values, (len(pairs), -1)) / size.sum() for name, values in by_position.items()}
    by_pair = {name: np.array(values) for name, values in effects.items()}
    return Patching(at, intervals, of_clean, of_corrupted, means, by_pair)


def _study(passes: Passes, pair: Pair, number: int, count: int) -> Study:
    """The study of a pair, 1 to `count`, whose texts have been read; an error names the pair."""
    study = Study(passes, *pair)
    try:
        study.read()
    except HeadwiseError as error:
        if count == 1:
            raise
        raise HeadwiseError(f"pair {number - 1} of {count}, counted from 0: {error}") from None
    return study


def _shares(effects: Mapping[str, Sequence[float]], ends: Sequence[tuple[float, float]]) -> dict[str, Interval]:
    """Of each head the share of the means, from its share in each pair; `ends` are both differences of each pair."""
    size = np.subtract(*np.transpose(ends))  # (pairs,) what there is to bring back
    if size.mean() == 0:
        raise HeadwiseError(f"over the {len(ends)} pairs clean and corrupted texts differ by 0 on average")
    intervals = {}
    for name, values in effects.items():
        share = float(size @ values / size.sum())
        # A ratio of two means, to first order: its mean is the share, and its spread that of the ratio.
        intervals[name] = interval_of((share + (np.array(values) - share) * size / size.mean()).tolist())
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
    passes = Passes(model, layers_of(model))
    effects, ends = defaultdict(list), []
    pairs = _pairs(model, clean, corrupted, target)
    with evaluating(model):
        for number, pair in enumerate(pairs, 1):
            study = _study(passes, pair, number, len(pairs))
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
            raise HeadwiseError(f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)")
        size = vocabulary_of(model)  # None where the model does not say
        if size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
            raise HeadwiseError(f"target {rows.tolist()} is outside the vocabulary of {size} tokens")
        targets = rows.expand(len(good), 2).tolist()
        for number, (answer, other) in enumerate(targets):
            if answer == other:
                pair = f"the target of pair {number}, counted from 0," if rows.ndim == 2 else "target"
                raise HeadwiseError(f"{pair} is token {answer} twice, so there is no difference to bring back")
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


@dataclass(eq=False)  # each is itself alone, as is a variant, so that it can be a key
class Reading:
    """A text (1,T) that a model reads, and what is kept of that; empty before."""

    ids: Tensor
    calls: dict[str, Call] = field(default_factory=dict)  # of each attention, by the name of its site
    runs: Counter[str] = field(default_factory=Counter)  # of its attention function, which DiffLlama calls twice
    outputs: dict[nn.Module, Any] = field(default_factory=dict)  # what each block gave, blocks in their order
    answer: Tensor = field(default_factory=partial(torch.empty, 0))  # (V,) logits of the token that is answered


@dataclass(frozen=True, eq=False)
class Variant:
    """A text in which something changes from one block on; what lies below is not computed again."""

    reading: Reading
    turns: range  # numbers of the blocks that it passes; one that ends before the last has no logits, and no answer
    handlers: Mapping[Site, Handler]  # what it changes of calls
    ask: Callable[[Tensor], float]  # logits (V,) of its answer -> the number that it was to be asked for
    early: Mapping[Site, Handler] = field(default_factory=dict)  # what it changes before gates and norms of the heads


class Passes:
    """The passes of a model that a study asks for: texts, and variants of them, at a masked position or at the end.

    Variants go up the model side by side, a block at a time, and each joins the others where it leaves the text:

        block          0     1     2     3     logits
        the text       ---------------------->         what each block gave is kept
        variant a            ---------------->
        variant b                  ---------->

    For a step the model runs from its beginning, so that masks and positions are its own; but blocks below give at once
    what they gave before, and behind the block whose turn it is the pass ends. Texts run as a whole, and so do variants
    where the blocks of a decoder read an encoder besides.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], position: int = -1) -> None:
        self.model, self.layers, self.position = model, layers, position
        # Each once: a decoder's block that also reads an encoder holds two attentions, and so stands in two layers.
        self.blocks = list(dict.fromkeys(layer.block for layer in layers))
        self.layer_of = {layer.site.name: layer for layer in layers}

    def read(self, reading: Reading, beside: Beside = nullcontext) -> None:
        """Read a text, and keep of it what `Reading` says; `beside` is what else listens."""

        def keep(site: Site, call: Call) -> None:
            if site.name in reading.calls:
                raise HeadwiseError(
                    f"{site.name} of {type(self.model).__name__} runs several times in one pass, and which of its runs "
                    f"is to be patched is not known; watch it instead, with headwise.watch"
                )
            reading.calls[site.name] = call

        def count(site: Site, call: Call) -> None:
            reading.runs[site.name] += 1

        def record(block: nn.Module, args: Any, gave: Any) -> None:
            reading.outputs[block] = gave

        kept, counted = ({layer.site: partial(act, layer.site) for layer in self.layers} for act in (keep, count))
        recorded = hooked((block.register_forward_hook, record) for block in self.blocks)
        with attach(counted, early=True), attach(kept), recorded, beside():
            reading.answer = answer_logits(self.model, reading.ids, self.position)[0]

    def variant(
        self,
        reading: Reading,
        heads: Mapping[str, Sequence[int]],
        given: Callable[[str, Call], Tensor],
        ask: Callable[[Tensor], float],
        rows: Rows = ALL,
        early: bool = False,
    ) -> Variant:
        """A text in which some heads give something else.

        heads  of sites by their names, the numbers of these heads
        given  what these heads of a site give then in its call, (1,heads,T,E)
        rows   at which tokens
        early  do they give it before the gates and norms of the site?
        """

        def change(name: str, call: Call) -> Tensor:
            out, new = call.out.clone(), given(name, call).to(call.out)
            for n, h in enumerate(heads[name]):
                out[:, h, rows] = new[:, n, rows]
            return out

        # 0 for no heads at all: in `carried` a random half of a few heads may be empty.
        first = min((self.blocks.index(self.layer_of[name].block) for name in heads), default=0)
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        if any(call.cross for call in reading.calls.values()):
            first = 0
        handlers = {self.layer_of[name].site: partial(change, name) for name in heads}
        turns = range(first, len(self.blocks))
        return Variant(reading, turns, {}, ask, early=handlers) if early else Variant(reading, turns, handlers, ask)

    def asked(
        self,
        variants: Mapping[Key, Variant],
        progress: Progress = no_progress,
    ) -> dict[Key, float]:
        """What each variant was to be asked, of those that reach the logits."""
        answers: dict[Variant, float] = {}
        groups, depth = self._joined(variants.values()), len(self.blocks)
        for number, group in enumerate(groups):
            states: dict[Variant, Tensor] = {}  # what the last block that it has passed gave
            # One by one until the last variant has joined, then all blocks that are left at once.
            n_single = max(each.turns.start for each in group)
            singles = [range(n, n + 1) for n in range(n_single)]
            for turns in [*singles, range(n_single, depth)]:
                passing = [each for each in group if not set(turns).isdisjoint(each.turns)]
                if passing:
                    self._advance(passing, turns, states, answers)
                progress(number * depth + turns.stop, len(groups) * depth)
        return {key: answers[each] for key, each in variants.items() if each in answers}

    def _joined(self, variants: Iterable[Variant]) -> list[list[Variant]]:
        """Neighbours that run as one batch: few large products take less time than many small ones."""
        joined: list[list[Variant]] = []
        for each in variants:
            if not joined or not self._fits(joined[-1], each):
                joined.append([])
            joined[-1].append(each)
        return joined

    def _fits(self, before: Sequence[Variant], each: Variant) -> bool:
        """May a variant run together with those? Variants that end early run among their like."""
        first, reading = before[0], each.reading
        if first.reading is not reading or first.turns.stop != each.turns.stop:
            return False
        most = LARGEST // _hidden(next(iter(reading.outputs.values()))).numel()  # what the first block gave of the text
        return len(before) < most  # `most` is 0 for a text larger than that: each of its variants runs alone

    def _advance(
        self,
        joined: Sequence[Variant],
        turns: range,
        states: dict[Variant, Tensor],
        answers: dict[Variant, float],
    ) -> None:
        """Take variants through some blocks as one batch, and where these are the last ones ask them."""
        reading = joined[0].reading  # of all of them, by `_fits`
        # Variants that run as one batch end at the same block, maybe before the last of `turns`.
        passed = self.blocks[turns.start : min(turns.stop, joined[0].turns.stop)]
        is_end = passed[-1] is self.blocks[-1]
        # Not all blocks have run: a text without a picture passes by those that read pictures.
        outputs = {block: reading.outputs[block] for block in self.blocks[: turns.start] if block in reading.outputs}
        # Each block below gives its old output, whatever it reads. So only the output of the nearest one goes on, and
        # that becomes the states of these variants.
        if outputs:
            nearest, gave = list(outputs.items())[-1]
            unchanged = _hidden(gave)  # what is still the state of those that begin here
            state = torch.cat([states.get(each, unchanged) for each in joined])
            outputs[nearest] = (state, *gave[1:]) if isinstance(gave, tuple) else state
        sites = [layer.site for layer in self.layers if layer.block in passed]
        early, handlers = _in_turns(joined, sites, early=True), _in_turns(joined, sites, early=False)
        stopped = []  # the states behind the last block that is passed

        def halt(block: nn.Module, args: Any, gave: Any) -> None:
            stopped.append(_hidden(gave))
            raise _StopError

        with ExitStack() as stack:
            is_inside = stack.enter_context(inside())
            for block, output in outputs.items():
                stack.enter_context(_replayed(block, is_inside, output))
            stack.enter_context(attach(early, early=True))
            stack.enter_context(attach(handlers))
            if not is_end:
                stack.enter_context(hooked([(passed[-1].register_forward_hook, halt)]))
            stack.enter_context(suppress(_StopError))  # innermost: the blocks around it end without an error
            logits_nv = answer_logits(self.model, reading.ids.expand(len(joined), -1), self.position)
        if is_end:
            for each, logits_v in zip(joined, logits_nv, strict=True):
                answers[each] = each.ask(logits_v)
        elif stopped:  # empty behind a block that does not run: the states are still those of the one before
            states |= zip(joined, torch.split(stopped[0], 1), strict=True)  # (1,T,C) each


def _hidden(output: Any) -> Tensor:
    """The hidden states among what a block gives."""
    return output[0] if isinstance(output, tuple) else output


def _in_turns(joined: Sequence[Variant], sites: Sequence[Site], early: bool) -> dict[Site, Handler]:
    """The handlers of several variants that run as one batch, one for each site that any of them changes."""
    of_each = [each.early if early else each.handlers for each in joined]
    return {site: partial(_in_turn, of_each, site) for site in sites if any(site in handlers for handlers in of_each)}


def _in_turn(of_each: Sequence[Mapping[Site, Handler]], site: Site, call: Call) -> Tensor | None:
    """What takes the place of `out` in a call of several variants, each of which changes, or keeps, its own part."""
    out = None
    for n, handlers in enumerate(of_each):
        if site in handlers:
            # q, k, v, out and the weights, where the model made them, have the batch as their first axis.
            parts = {name: x[n : n + 1] for name in PLACES if (x := getattr(call, name)) is not None}
            changed = handlers[site](call._replace(**parts))
            if changed is not None:
                out = call.out.clone() if out is None else out
                out[n : n + 1] = changed
    return out


# One pair of texts


class Study:
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference.

    target  the two tokens that are compared, or what chooses them by the logits (V,) that both texts are answered with;
            None: what the model likes best after each
    """

    def __init__(self, passes: Passes, clean: Tensor, corrupted: Tensor, target: Sequence[int] | Choice | None) -> None:
        self.passes, self.layers, self.wanted = passes, passes.layers, target  # `read` makes `target` of `wanted`
        device = device_of(passes.model)
        self.clean_text, self.text = (Reading(ids[None].to(device)) for ids in (clean, corrupted))
        self.target: tuple[int, int | None] = (0, None)  # a place-holder until both texts are read
        self.clean, self.corrupted = 0.0, 0.0  # the difference that each text has

    def read(self, beside: Beside = nullcontext) -> None:
        """Read both texts, note which two tokens are compared, and their difference after each text.

        beside  what else listens to the clean text
        """
        self.passes.read(self.clean_text, beside)
        self.passes.read(self.text)
        good, bad = self.clean_text.answer, self.text.answer
        if callable(self.wanted):
            self.target = self.wanted(good, bad)
        else:
            first, second = self.wanted or (int(good.argmax()), int(bad.argmax()))
            self.target = first, second  # unpacked, since a list says nothing of its length to the type checker
        if self.target[0] == self.target[1]:
            raise HeadwiseError(
                f"both texts are answered with token {self.target[0]}, so there is no difference to bring back; pass "
                f"target=(answer, other), or texts that the model answers differently"
            )
        self.clean, self.corrupted = (float(self._difference(x)) for x in (good, bad))
        if self.clean == self.corrupted:
            raise HeadwiseError("both texts give the answer the same logits: there is no difference to bring back")

    def _difference(self, logits_v: Tensor) -> Tensor:
        """The logit of the answer minus that of the other; where there is none, the answer's log-probability."""
        answer, other = self.target
        if other is None:
            return logits_v.cpu().double().log_softmax(-1)[answer]  # some devices have no float64
        return logits_v[answer].cpu().double() - logits_v[other].cpu().double()

    def _share(self, logits_v: Tensor) -> float:
        """How far an answer has come from the corrupted one to the clean one."""
        return (float(self._difference(logits_v)) - self.corrupted) / (self.clean - self.corrupted)

    def names(self, at: str) -> dict[str, Place]:
        """The place of every head by name; at k and v that of every key/value head, with the heads that read it."""
        places: dict[str, Place] = {}
        for layer in self.layers:
            site, call = layer.site, self.text.calls.get(layer.site.name)
            if call is None:
                continue  # it did not run, as cross attention to images that a text alone does not have
            H = call.q.shape[1]
            if at not in SHARED:
                places |= {head_name(site.name, h): (site.name, (h,)) for h in range(H)}
                continue
            index = resolve_kv_index(H, call.k.shape[1], call.options.kv_index)
            for g in range(call.k.shape[1]):
                readers = tuple(h for h in range(H) if index[h] == g)
                places[f"{site.name}.KV{g}"] = site.name, readers
        return places

    def effects(
        self,
        at: str,
        sets: Mapping[Key, Iterable[str]],
        rows: Rows = ALL,
        progress: Progress = no_progress,
    ) -> dict[Key, float]:
        """The effect of each of these sets of heads, patched together; see `variants`."""
        return self.passes.asked(self.variants(at, sets, rows), progress)

    def variants(self, at: str, sets: Mapping[Key, Iterable[str]], rows: Rows = ALL) -> dict[Key, Variant]:
        """The corrupted text with each of these sets of heads, or key/value heads, as it was in the clean run.

        sets  any key -> names of the heads, whose effect will have that key
        """
        places = self.names(at)
        heads_of: dict[Key, dict[str, list[int]]] = {}  # key of a set -> site -> numbers of its query heads
        for key, names in sets.items():
            heads_of[key] = defaultdict(list)
            for name in names:
                site, members = places[name]
                heads_of[key][site] += members
        if at != "out":
            for site in set().union(*heads_of.values()):
                self._require_part(site, at)
        # Other keys and values change what heads give at every token that looks there, not at these rows alone.
        changed_rows = ALL if at in SHARED else rows
        variants = {}
        for key, heads in heads_of.items():
            given = partial(self._given, heads, at, rows)
            variants[key] = self.passes.variant(self.text, heads, given, self._share, changed_rows, early=at != "out")
        return variants

    def carried(self, contexts: int = 0) -> dict[str, float]:
        """What each head carries of the difference: the largest of what it brings, takes, and does in random contexts.

        Of two heads that are needed at once neither brings anything to the corrupted text alone, but each takes all
        from the clean one; of two of which either will do, each brings something, and neither takes anything. Where
        both are at work at once, a head matters only beside some of the others: `contexts` are random halves of all
        heads, which give their clean output, and each head joins or leaves them.
        """
        names = list(self.names("out"))
        reverse = copy.copy(self)  # the same pair with its texts exchanged: there heads take, and do not bring
        reverse.clean_text, reverse.text = self.text, self.clean_text
        reverse.clean, reverse.corrupted = self.corrupted, self.clean
        tables = [self.effects("out", alone(names)), reverse.effects("out", alone(names))]
        generator = torch.Generator().manual_seed(0)  # the same halves for each pair of texts, and in each call
        for _ in range(contexts):
            drawn = torch.rand(len(names), generator=generator) < 0.5
            half = {name for name, chosen in zip(names, drawn, strict=True) if chosen}
            # The half itself, by the name "", and for each head the half with it, or, where it is inside, without it.
            shares = self.effects("out", {"": half, **{name: half ^ {name} for name in names}})
            # Leaving is joining undone.
            tables.append({name: (shares[name] - shares[""]) * (-1 if name in half else 1) for name in names})
        return {name: max((table[name] for table in tables), key=abs) for name in names}  # the largest, with its sign

    def _given(self, heads: Mapping[str, Sequence[int]], at: str, rows: Rows, site: str, call: Call) -> Tensor:
        """What these heads of a site give, (1,heads,T,E), with this part of the clean run."""
        clean, members = self.clean_text.calls[site], heads[site]
        if at == "out":
            return clean.out[:, members]
        if at == "weights":  # the clean queries and keys; the options, among them the mask, stay those of this text
            return self._attended(site, call._replace(q=clean.q, k=clean.k, weights=clean.weights), members)
        if at == "q":  # of all tokens: what a head gives at one hangs on its query alone, and the variant takes `rows`
            return self._attended(site, call._replace(q=clean.q), members)
        changed = getattr(call, at).clone()
        changed[:, :, rows] = getattr(clean, at)[:, :, rows]
        return self._attended(site, call._replace(**{at: changed}), members)

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
        options = self.text.calls[site].options  # of one text: those of the call may be of all variants that run
        index = resolve_kv_index(H, call.k.shape[1], options.kv_index)
        read = [index[h] for h in heads]
        if call.weights is not None:  # a foreign module made them itself, of what is not known: they stay
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
            return self._difference(answer_logits(self.passes.model, self.text.ids, self.passes.position)[0])

        slopes = {site.name: slope for site, _, slope in slopes_of([layer.site for layer in self.layers], answer)}
        effects = {}
        for name in names:
            site, h = place_of(name)
            clean, corrupted = self.clean_text.calls[site].out, self.text.calls[site].out
            moved = clean[0, h, rows] - corrupted[0, h, rows]
            gained = float((moved * slopes[site][0, h, rows]).sum())  # of the difference of logits, to first order
            effects[name] = gained / (self.clean - self.corrupted)
        return effects

    def paths(
        self, receivers: Iterable[Receiver], senders: Iterable[str] | None = None, progress: Progress = no_progress
    ) -> dict[Receiver, dict[str, float]]:
        """Of each receiver, such as ("q", "L3.H5"), the effect of each earlier head, a sender, through what it reads.

        First each sender gives its clean output, and what all receivers make of that is kept; then each receiver has
        it, from one sender after another.
        """
        order = [layer.site.name for layer in self.layers]  # from the first layer up
        heads = self.names("out")
        places = {(at, name): self.names(at)[name] for at, name in receivers}
        earlier = {}  # receiver -> the chosen heads of layers below it
        for receiver, (site, _) in places.items():
            below = {head: place for head, place in heads.items() if order.index(place[0]) < order.index(site)}
            earlier[receiver] = chosen_heads(below, senders, "out") if below else []
            if earlier[receiver]:
                self._require_part(site, receiver[0])
        arrived: dict[tuple[Receiver, str], Tensor] = {}  # for a receiver and a sender the receiver's q, k or v, (T,D)
        every_sender = set().union(*earlier.values())
        # Senders in the order of the model. They stand before those that receive: where both go up in one group, what a
        # sender leaves in `arrived` is there when a receiver's layer runs.
        variants = self._sent(filter(every_sender.__contains__, heads), places, arrived)  # they end without an answer
        for receiver, from_senders in earlier.items():
            for sender in from_senders:
                variants[receiver, sender] = self._received(receiver, places[receiver], sender, arrived)
        shares = self.passes.asked(variants, progress)
        return {receiver: {sender: shares[receiver, sender] for sender in of} for receiver, of in earlier.items()}

    def _sent(
        self, senders: Iterable[str], receivers: Mapping[Receiver, Place], arrived: dict[tuple[Receiver, str], Tensor]
    ) -> dict[Any, Variant]:
        """Variants in which a sender gives its clean output, up to the last layer with a receiver.

        The queries, keys or values (T,D) that receivers make then are put to `arrived`. Heads above the sender are
        frozen, feed-forwards run.
        """

        def freeze(site: str, call: Call) -> Tensor:
            return self.text.calls[site].out

        def keep(sender: str, site: str, call: Call) -> None:
            for (at, name), place in receivers.items():
                if place[0] == site:
                    arrived[(at, name), sender] = getattr(call, at)[0, place_of(name)[1]].clone()

        order = [layer.site.name for layer in self.layers]
        last = max(order.index(site) for site, _ in receivers.values())  # the highest layer with a receiver
        stop = self.passes.blocks.index(self.layers[last].block) + 1
        variants = {}
        for sender, variant in self.variants("out", alone(senders)).items():
            above = self.layers[order.index(place_of(sender)[0]) + 1 : last + 1]
            ran = [layer.site for layer in above if layer.site.name in self.text.calls]
            frozen = {site: partial(freeze, site.name) for site in ran}
            kept = {site: partial(keep, sender, site.name) for site in ran}
            turns = range(variant.turns.start, stop)
            variants[sender] = replace(variant, turns=turns, handlers={**variant.handlers, **frozen}, early=kept)
        return variants

    def _received(
        self, receiver: Receiver, place: Place, sender: str, arrived: Mapping[tuple[Receiver, str], Tensor]
    ) -> Variant:
        """The variant in which a receiver has what has arrived there from a sender."""
        at, name = receiver
        site, members = place

        def given(site: str, call: Call) -> Tensor:
            changed = getattr(call, at).clone()
            changed[0, place_of(name)[1]] = arrived[receiver, sender]
            return self._attended(site, call._replace(**{at: changed}), members)

        return self.passes.variant(self.text, {site: members}, given, self._share, early=True)


def place_of(name: str) -> tuple[str, int]:
    """The site of a head, or key/value head, and its number there: ("L3", 5) of L3.H5."""
    site, _, last = name.rpartition(".")
    return site, int(last.lstrip("HKV"))  # without the letters, "H" or "KV", before the number


def alone(names: Iterable[str]) -> dict[str, list[str]]:
    """Each head as a set of its own."""
    return {name: [name] for name in names}


class _StopError(Exception):
    """What was wanted of a forward pass is there; no need to go on."""


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
        for is_inside, output in [*self.outputs]:  # a copy: another thread may add its own meanwhile
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
                raise HeadwiseError(f"{name}: keys and values belong to key/value heads, such as {next(iter(places))}")
            raise unknown_head(name, list(places))
    return [name for name in places if name in names]
