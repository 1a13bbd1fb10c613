"""Activation patching: what a head carries of the difference between two texts, and through which path.

A model reads a corrupted text; one part of it is given what it had while reading the clean text; how much of the clean
answer comes back is the effect of that part (Meng et al. 2022, arXiv 2202.05262; Wang et al. 2022, arXiv 2211.00593;
Heimersheim & Nanda 2024, arXiv 2404.15255). Effects are shares: 0 changes nothing, 1 restores the clean answer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

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
from headwise.models.stream import loaded, portions, stream_of
from headwise.records import Call, head_name
from headwise.rungs.tensor import attend
from headwise.spec import resolve_kv_index
from headwise.words import unknown

PLACES = ("q", "k", "v", "out", "weights")

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Target = Sequence[int | str] | Sequence[Sequence[int]] | Tensor
LARGEST = 2**19  # numbers of the residual stream that run as one batch: more leave the processor's cache
SHARED = ("k", "v")  # places that belong to key/value heads, L3.KV1

Place = tuple[str, tuple[int, ...]]  # the name of a site, and the query heads whose output changes there
Receiver = tuple[str, str]  # what reads, q, k or v, and the head, or key/value head, whose it is
Heads = tuple[str, ...]  # a place of heads, "out" or "q", and their names
Source = Callable[[slice], Tensor]  # for some of the variants what heads give: (1,H,T,E) for all alike, or (n,H,T,E)
Rows = Sequence[Sequence[int]] | None  # of each variant tokens
Key = TypeVar("Key", bound=Hashable)
Choice = Callable[[Tensor, Tensor], tuple[int, int | None]]  # logits (V,) of both texts -> the answer and the other
Progress = Callable[[int, int], None]  # steps done, and of all


def no_progress(done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Patching:
    """What each head brings back of the clean answer; the mean over pairs of texts, with its interval."""

    at: str  # q, k, v, out or weights
    effects: dict[str, Interval]  # head, or key/value head, -> share of the difference; 1 is all of it
    clean: Interval  # the difference of logits, answer minus other, of the clean texts
    corrupted: Interval
    by_position: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # (T,), where positions="each"

    def strongest(self, n: int = 5) -> list[str]:
        """The heads with the largest effects, the largest first."""
        return sorted(self.effects, key=lambda name: -abs(self.effects[name].mean))[:n]

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {self.effects[name].mean:+.2f}" for name in self.strongest(3))
        return f"Patching(at {self.at!r}, {self.clean.n} pairs: {parts}, ...)"


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
    effects: dict[str, list[float]] = defaultdict(list)  # of each head what every pair of texts gave
    by_position: dict[str, list[float]] = defaultdict(list)  # of each head pair after pair, token after token
    ends = []  # of each pair the difference that its clean text has, and its corrupted one
    with evaluating(model):
        for number, pair in enumerate(pairs, 1):
            study = Study(passes, pair.clean, pair.corrupted)
            study.read(pair.target)
            names = chosen_heads(study.names(at), heads, at)
            ends.append((study.clean, study.corrupted))
            if positions == "each":
                for t in range(len(pair.clean)):
                    for name, effect in study.effects(at, names, [t]).items():
                        by_position[name].append(effect)
            rows = _positions(positions, len(pair.clean))
            if contexts is not None:
                table = study.carried(contexts)
            elif fast:
                table = study.estimate(names, rows)
            elif together:
                table = {"together": study.together(at, names, rows)}
            else:
                table = study.effects(at, names, rows)
            for name, effect in table.items():
                effects[name].append(effect)
            if progress is not None:
                progress(number, len(pairs))
    of_clean, of_corrupted = (interval_of(list(values)) for values in zip(*ends, strict=True))
    intervals = {name: interval_of(values) for name, values in effects.items()}
    means = {name: np.reshape(values, (len(pairs), -1)).mean(0) for name, values in by_position.items()}
    return Patching(at, intervals, of_clean, of_corrupted, means)


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
    if at not in ("q", *SHARED):
        raise unknown(f"at={at!r} is nothing that a head reads from another", at, ("q", *SHARED))
    passes = Passes(model, layers_of(model))
    effects: dict[str, list[float]] = defaultdict(list)
    with evaluating(model):
        for pair in _pairs(model, clean, corrupted, target):
            study = Study(passes, pair.clean, pair.corrupted)
            study.read(pair.target)
            chosen_heads(study.names(at), [receiver], at)
            for name, effect in study.paths([(at, receiver)], senders)[at, receiver].items():
                effects[name].append(effect)
    return {name: interval_of(values) for name, values in effects.items()}


class _Pair(NamedTuple):
    """Two texts (T,), and their two targets; None: what the model likes best after each."""

    clean: Tensor
    corrupted: Tensor
    target: list[int] | None


def _pairs(model: nn.Module, clean: Ids, corrupted: Ids, target: Target | None) -> list[_Pair]:
    # A copy is no tensor of torch.inference_mode, which a backward pass could not keep.
    good, bad = (torch.as_tensor(ids_of(model, ids)).clone() for ids in (clean, corrupted))
    if good.shape != bad.shape:
        raise HeadwiseError(
            f"clean is {tuple(good.shape)} and corrupted {tuple(bad.shape)}: pass as many tokens in both"
        )
    if good.ndim not in (1, 2) or good.numel() == 0:
        raise HeadwiseError(f"clean is {tuple(good.shape)}; pass ids (T,) or (N,T)")
    good, bad = (ids.reshape(-1, ids.shape[-1]) for ids in (good, bad))  # of one pair, too, (N,T)
    targets: list[list[int] | None] = [None] * len(good)
    if target is not None:
        ids = target.tolist() if isinstance(target, Tensor) else target
        rows = torch.as_tensor([token_of(model, x) if isinstance(x, str) else x for x in ids])
        if tuple(rows.shape) not in ((2,), (len(good), 2)):
            raise HeadwiseError(f"target is {tuple(rows.shape)}; pass two token ids, or ({len(good)}, 2)")
        size = vocabulary_of(model)
        if size and not 0 <= int(rows.min()) <= int(rows.max()) < size:
            raise HeadwiseError(f"target {rows.tolist()} is outside the vocabulary of {size} tokens")
        targets = rows.expand(len(good), 2).tolist()
    return [_Pair(*pair) for pair in zip(good, bad, targets, strict=True)]


def _positions(positions: Sequence[int] | str | None, T: int) -> list[int] | None:
    if positions is None or positions == "each":
        return None
    if isinstance(positions, str) or not len(positions):
        raise HeadwiseError(f"positions={positions!r} names no token; pass a list, or 'each'")
    for position in positions:
        if not -T <= position < T:
            raise HeadwiseError(f"position {position} is not among the {T} tokens")
    return [position % T for position in positions]


# Passes of one model


@dataclass(eq=False)
class Reading:
    """A text (1,T) that a model reads, and what is kept of that."""

    ids: Tensor
    calls: dict[str, Call] = field(default_factory=dict)  # of each attention, by the name of its site
    outputs: dict[nn.Module, Any] = field(default_factory=dict)  # of each block
    answer: Tensor = field(default_factory=partial(torch.empty, 0))  # (V,) logits of the token that is answered


@dataclass(frozen=True, eq=False)
class Variants:
    """A batch of variants of a text, which all leave it in one layer; what lies below is not computed again."""

    reading: Reading
    start: Layer | None  # None: the text itself, from the first layer on
    n: int
    handlers: Mapping[Site, Handler]  # what they change, or keep, of calls with n texts
    ask: Callable[[Tensor], list[float]]  # of the logits (n,V) of their answers
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext  # what else listens while they pass
    last: Layer | None = None  # behind it nobody asks for them any more


class Passes:
    """The passes of a model that a study asks for: a text, and variants of it, at a masked position or at the end.

    Variants go up the model side by side, a block at a time, and each joins the others where it leaves the text:

        block          0     1     2     3     logits
        the text       ---------------------->         what each block gave is kept
        variant a            ---------------->
        variant b                  ---------->

    For a step the model runs from its beginning, so that masks and positions are its own; but blocks below give at once
    what they gave before, and behind the block whose turn it is the pass ends. The texts of a streamed model go up in
    the same way: each block is read once for all, and has seen the text before a variant of it comes. Other texts run
    as a whole, and so do variants where the blocks of a decoder read an encoder besides.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], position: int = -1) -> None:
        self.model, self.layers, self.position, self.stream = model, layers, position, stream_of(model)
        blocks = [layer.block for layer in layers] if self.stream is None else self.stream.blocks
        self.blocks = list(dict.fromkeys(blocks))
        self.layer_of = {layer.site.name: layer for layer in layers}

    def text(self, reading: Reading, beside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Variants:
        """The pass of a text itself, which fills its `reading`."""

        def keep(site: Site, call: Call) -> None:
            if site.name in reading.calls:
                raise HeadwiseError(
                    f"{site.name} of {type(self.model).__name__} runs several times in one pass, and which of its runs "
                    f"is to be patched is not known; watch it instead, with headwise.watch"
                )
            reading.calls[site.name] = call

        def record(block: nn.Module, args: Any, gave: Any) -> None:
            reading.outputs[block] = gave

        @contextmanager
        def listening() -> Iterator[None]:
            with hooked((block.register_forward_hook, record) for block in self.blocks), beside():
                yield

        def answered(logits_nv: Tensor) -> list[float]:
            reading.answer = logits_nv[0]
            return []  # a text itself has no share of a difference

        handlers = {layer.site: partial(keep, layer.site) for layer in self.layers}
        return Variants(reading, None, 1, handlers, answered, listening)

    def parts(self, reading: Reading, count: int) -> list[slice]:
        """So many variants of a text as batches that run at once."""
        size = max(1, self._most(reading))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def giving(
        self,
        reading: Reading,
        site: str,
        heads: Sequence[Sequence[int]],
        source: Source,
        ask: Callable[[Tensor], list[float]],
        rows: Rows = None,
    ) -> list[Variants]:
        """Variants of a text, in each of which some heads of a site give something else.

        heads   of each variant, which heads
        source  what they give then; it is asked when the variants pass: the text may not have been read before
        rows    of each variant, at which tokens; None: at all
        """
        layer = self.layer_of[site]
        batches = []
        for part in self.parts(reading, len(heads)):

            def change(call: Call, part: slice = part) -> Tensor:  # a default: the loop goes on before the call comes
                return _replaced(call.out, heads[part], source(part), None if rows is None else rows[part])

            batches.append(Variants(reading, layer, len(heads[part]), {layer.site: change}, ask))
        return batches

    def _most(self, reading: Reading) -> int:
        """How many variants of a text run together at most; where a single one is more than that, 0."""
        if self.stream is not None:
            return self.stream.at_once // reading.ids.numel()
        first_block, *_ = reading.outputs.values()
        return LARGEST // _hidden(first_block).numel()

    def asked(
        self,
        batches: Sequence[Variants],
        progress: Progress = no_progress,
        beside: Callable[[int], None] = lambda layer: None,
    ) -> Iterator[list[float]]:
        """What each batch was to be asked. `beside` is called with each layer's number, while it has its weights."""
        groups, depth = self._groups(batches), len(self.blocks)
        for number, group in enumerate(groups):
            states: dict[Variants, Tensor] = {}
            # Once all have joined, a model in memory goes through the rest at once, in `_finish`; a streamed one, which
            # has not read the weights of the rest, goes on block by block.
            steps = depth if self.stream is not None else max(self._turns(each).start for each in group)
            for n in range(depth):
                with loaded(self.model, n):
                    passing = [each for each in group if n < steps and n in self._turns(each)]
                    for joined in self._joined(passing):
                        self._advance(joined, range(n, n + 1), states)
                    if number == 0:
                        beside(n)
                progress(number * depth + n + 1, len(groups) * depth)
            for joined in self._joined(group):
                yield from self._finish(joined, steps, states)

    def measured(
        self,
        groups: Mapping[Key, Sequence[Variants]],
        progress: Progress = no_progress,
        beside: Callable[[int], None] = lambda layer: None,
    ) -> dict[Key, list[float]]:
        """What the batches of each group were to be asked, one after another."""
        answers = self.asked(_flat(groups), progress, beside)
        return _grouped(groups, answers)

    def _groups(self, batches: Sequence[Variants]) -> Sequence[Sequence[Variants]]:
        """Batches that go up together: as many as run at once; of a streamed model all whose states fit into memory."""
        if self.stream is None:
            return self._joined(batches)
        sizes = [range(each.n * each.reading.ids.numel()) for each in batches]
        return [batches[start : start + len(part)] for start, part in portions(self.model, sizes)]

    def _joined(self, batches: Iterable[Variants]) -> list[list[Variants]]:
        """Neighbours that run together: few large products take less time than many small ones."""
        joined: list[list[Variants]] = []
        for each in batches:
            if not joined or not self._fits(joined[-1], each):
                joined.append([])
            joined[-1].append(each)
        return joined

    def _fits(self, before: Sequence[Variants], each: Variants) -> bool:
        """May a batch run together with those? A text runs alone, and variants that end early among their like."""
        if None in (before[0].start, each.start) or before[0].reading is not each.reading:
            return False
        if (before[0].last is None) is not (each.last is None):
            return False
        return sum(other.n for other in before) + each.n <= self._most(each.reading)

    def _turns(self, each: Variants) -> range:
        """The numbers of the blocks through which a batch goes up."""
        first, last = 0, len(self.blocks) - 1
        # Only the states of the block below are handed on, and a block that reads an encoder takes more than these.
        reads_encoder = any(call.cross for call in each.reading.calls.values())
        if each.start is not None and not reads_encoder:
            first = self.blocks.index(each.start.block)
        if each.last is not None:
            last = self.blocks.index(each.last.block)
        return range(first, last + 1)

    def _advance(self, joined: Sequence[Variants], turns: range, states: dict[Variants, Tensor]) -> None:
        """Take batches through some blocks, as one batch."""
        outputs = []

        def halt(block: nn.Module, args: Any, gave: Any) -> None:
            outputs.append(gave)
            raise _StopError

        with self._running(joined, turns, states) as ids:
            stops = hooked([(self.blocks[turns[-1]].register_forward_hook, halt)])
            with stops, suppress(_StopError):
                answer_logits(self.model, ids, self.position)
        state = _hidden(outputs[0])
        if self.stream is not None:
            state = state.cpu()  # the memory of the machine is larger than that of a device
        states |= zip(joined, torch.split(state, [each.n for each in joined]), strict=True)

    def _finish(self, joined: Sequence[Variants], start: int, states: dict[Variants, Tensor]) -> Iterator[list[float]]:
        """Take batches through the blocks from `start` on, and ask what they were to be asked."""
        depth = len(self.blocks)
        if joined[0].last is not None:
            rest = range(start, self._turns(joined[0]).stop)
            if rest:
                self._advance(joined, rest, states)
            yield from ([] for _ in joined)
            return
        with self._running(joined, range(start, depth), states) as ids:
            logits_nv = answer_logits(self.model, ids, self.position)
        rows = torch.split(logits_nv, [each.n for each in joined])
        for each, of_each in zip(joined, rows, strict=True):
            yield each.ask(of_each)

    @contextmanager
    def _running(self, joined: Sequence[Variants], turns: range, states: Mapping[Variants, Tensor]) -> Iterator[Tensor]:
        """The ids to run so that batches pass these blocks, with what they change there; those below are replayed."""
        reading = joined[0].reading
        blocks = [self.blocks[n] for n in turns]
        # Not all blocks have run: a text without a picture passes by those that read pictures.
        below = [block for block in self.blocks[: turns.start] if block in reading.outputs]
        handlers = {}
        for layer in self.layers:
            if layer.block in blocks and any(layer.site in each.handlers for each in joined):
                handlers[layer.site] = partial(_in_turn, joined, layer.site)
        with ExitStack() as stack:
            is_inside = stack.enter_context(inside())
            outputs = {block: reading.outputs[block] for block in below}
            if below:  # what the nearest block gives goes on, so that it gives the states of these batches
                given_before = outputs[below[-1]]
                state = _states_of(joined, _hidden(given_before), states)
                is_tuple = isinstance(given_before, tuple)
                outputs[below[-1]] = (state, *given_before[1:]) if is_tuple else state
            for block, output in outputs.items():
                stack.enter_context(_replayed(block, is_inside, output))
            stack.enter_context(attach(handlers))
            stack.enter_context(joined[0].beside())
            yield reading.ids.expand(sum(each.n for each in joined), -1)


def _flat(groups: Mapping[Key, Sequence[Variants]]) -> list[Variants]:
    """The batches of all groups."""
    return [each for group in groups.values() for each in group]


def _grouped(groups: Mapping[Key, Sequence[Variants]], answers: Iterator[list[float]]) -> dict[Key, list[float]]:
    """Answers that come batch by batch, group by group."""
    values: dict[Key, list[float]] = {key: [] for key in groups}
    for key, group in groups.items():
        for _ in group:
            values[key] += next(answers)
    return values


def _hidden(output: Any) -> Tensor:
    """The hidden states among what a block gives."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state


def _states_of(joined: Sequence[Variants], unchanged: Tensor, states: Mapping[Variants, Tensor]) -> Tensor:
    """What batches are where they go on, (n,T,C): those that begin here are still what a block gave of the text."""
    rows = []
    for each in joined:
        if each in states:
            rows.append(states[each].to(unchanged))
        else:
            rows.append(unchanged.expand(each.n, -1, -1))
    return torch.cat(rows)


def _in_turn(joined: Sequence[Variants], site: Site, call: Call) -> Tensor | None:
    """What takes the place of `out` in a call of several batches, each of which changes, or keeps, its own part."""
    outs = []
    is_changed, start = False, 0
    for each in joined:
        rows = slice(start, start + each.n)
        start = rows.stop
        out: Tensor | None = None
        if site in each.handlers:
            # q, k, v, out and the weights, where the model made them, have the batch as their first axis.
            parts = {name: x[rows] for name in PLACES if (x := getattr(call, name)) is not None}
            out = each.handlers[site](call._replace(**parts))
        is_changed |= out is not None
        outs.append(call.out[rows] if out is None else out)
    return torch.cat(outs) if is_changed else None


# One pair of texts


class Study:
    """One pair of texts in a model, and variants of the corrupted one. Effects are shares of the difference."""

    def __init__(self, passes: Passes, clean: Tensor, corrupted: Tensor) -> None:
        self.passes, self.layers = passes, passes.layers
        device = device_of(passes.model)
        self.clean_text, self.text = (Reading(ids[None].to(device)) for ids in (clean, corrupted))
        self.target: tuple[int, int | None] = (0, None)
        self.clean, self.corrupted = 0.0, 0.0

    def read(
        self,
        target: Sequence[int] | Choice | None,
        beside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        effects: bool = False,
        progress: Progress = no_progress,
    ) -> dict[str, float]:
        """Read both texts, and, where `effects` are asked for, what each head brings; of a streamed model in one read.

        target  two tokens, or what makes them of the logits (V,) that both texts are answered with
        beside  what else listens to the clean text
        """
        texts = [self.passes.text(self.clean_text, beside), self.passes.text(self.text)]
        streamed = self.passes.stream is not None
        groups = self.variants("out") if effects and streamed else {}
        answers = self.passes.asked([*texts, *_flat(groups)], progress)
        next(answers), next(answers)  # of the two texts, which fills their readings
        self._aim(target)  # what variants are asked for needs it
        if effects and not streamed:  # the calls of the texts tell how many heads there are
            return self.effects("out", list(self.names("out")), None, progress=progress)
        return self.by_head(_grouped(groups, answers))

    def _aim(self, target: Sequence[int] | Choice | None) -> None:
        """Note which two tokens are compared, and their difference after each text."""
        good, bad = self.clean_text.answer, self.text.answer
        if callable(target):
            self.target = target(good, bad)
        else:
            first, second = target or (int(good.argmax()), int(bad.argmax()))
            self.target = first, second
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
            return logits_v.cpu().double().log_softmax(-1)[..., answer]  # some devices have no float64
        return logits_v[..., answer].cpu().double() - logits_v[..., other].cpu().double()

    def _shares(self, logits_nv: Tensor) -> list[float]:
        """How far answers have come from the corrupted one to the clean one."""
        differences = self._difference(logits_nv).tolist()
        return [(difference - self.corrupted) / (self.clean - self.corrupted) for difference in differences]

    def names(self, at: str) -> dict[str, Place]:
        """Every head, or key/value head, of the model by name."""
        places: dict[str, Place] = {}
        for layer in self.layers:
            site, call = layer.site, self.text.calls.get(layer.site.name)
            H = site.n_heads if call is None else call.q.shape[1]
            if at not in SHARED or call is None:
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
        names: Sequence[str],
        positions: Sequence[int] | None,
        progress: Progress = no_progress,
    ) -> dict[str, float]:
        """The effect of each of these heads alone."""
        return self.by_head(self.passes.measured(self.variants(at, names, positions), progress))

    @staticmethod
    def by_head(values: Mapping[Heads, Sequence[float]]) -> dict[str, float]:
        """What was measured of `variants`, head by head."""
        by_head: dict[str, float] = {}
        for (_, *names), of_variants in values.items():
            by_head |= zip(names, of_variants, strict=True)
        return by_head

    def variants(
        self, at: str, names: Iterable[str] | None = None, positions: Sequence[int] | None = None
    ) -> dict[Heads, list[Variants]]:
        """Of each layer the variants in which one head after another has what it had in the clean run."""
        places = self.names(at)
        wanted = set(places if names is None else names)
        groups = {}
        for layer in self.layers:
            in_layer = {}
            for name, (site, members) in places.items():
                if name in wanted and site == layer.site.name:
                    in_layer[name] = members
            if in_layer:
                source, rows = self._source(layer.site, at, positions)
                rows_of_each = None if rows is None else [rows] * len(in_layer)
                groups[at, *in_layer] = self._giving(layer.site.name, [*in_layer.values()], source, rows_of_each)
        return groups

    def at_each(self, name: str, positions: Sequence[int]) -> list[Variants]:
        """Variants in which what a head gives is clean at one of these positions after another."""
        site, h = place_of(name)
        clean = self.clean_text.calls[site].out
        return self._giving(site, [[h]] * len(positions), always(clean), [[t] for t in positions])

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
        tables = [self.effects("out", names, None), reverse.effects("out", names, None)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(contexts):
            drawn = torch.rand(len(names), generator=generator) < 0.5
            tables.append(self._joining({name for name, chosen in zip(names, drawn, strict=True) if chosen}))
        return {name: max((table[name] for table in tables), key=abs) for name in names}

    def _joining(self, half: set[str]) -> dict[str, float]:
        """What each head does beside these, which give their clean output: by joining them, or by leaving them."""
        names = list(self.names("out"))
        joined = torch.tensor([name in half for name in names])
        # (1+heads, heads) First the half itself; then for each head the half with it, or without it where it is in it.
        clean = torch.cat([joined[None], joined ^ torch.eye(len(names), dtype=torch.bool)])

        def change(site: Site, rows: Tensor, call: Call) -> Tensor:
            is_clean = rows[:, [names.index(head) for head in site.heads]].to(call.out.device)
            return torch.where(is_clean[:, :, None, None], self.clean_text.calls[site.name].out, call.out)

        batches = []
        for part in self.passes.parts(self.text, len(clean)):
            rows = clean[part]
            handlers = {x.site: partial(change, x.site, rows) for x in self.layers}
            batches.append(Variants(self.text, self.layers[0], len(rows), handlers, self._shares))
        shares = self.passes.measured({"half": batches})["half"]
        moved = {name: share - shares[0] for name, share in zip(names, shares[1:], strict=True)}
        return {name: -more if name in half else more for name, more in moved.items()}  # leaving is joining undone

    def _source(self, site: Site, at: str, positions: Sequence[int] | None) -> tuple[Source, Sequence[int] | None]:
        """What the heads of a site give, (1,H,T,E), with this part of the clean run; and the rows that take it, or all.

        What they give in the clean run is looked up when a variant passes: the text may not have been read yet.
        """
        if at == "out":
            return lambda part: self.clean_text.calls[site.name].out, positions
        call, clean = self.text.calls[site.name], self.clean_text.calls[site.name]
        _require_scores(call, at)
        plain = _attend(call, call.v)
        # The tolerances are what half precision leaves between two orders of summing; a gate or a norm changes more.
        if not torch.allclose(plain, call.out, rtol=1e-2, atol=1e-3 * float(plain.abs().max())):
            raise HeadwiseError(
                f"at={at!r}: {site.name} gates or norms what its heads give before W_O, so other queries, keys or "
                f"values do not say what W_O reads; pass at='out'"
            )
        if at == "weights":
            out = _attend(clean._replace(options=call.options), call.v)
        elif at == "q":
            out = _attend(call._replace(q=clean.q), call.v)
        else:
            chosen = slice(None) if positions is None else list(positions)
            changed = getattr(call, at).clone()
            changed[:, :, chosen] = getattr(clean, at)[:, :, chosen]
            out = _attend(call._replace(k=changed), call.v) if at == "k" else _attend(call, changed)
        return always(out), None if at in SHARED else positions

    def _giving(self, site: str, heads: Sequence[Sequence[int]], source: Source, rows: Rows = None) -> list[Variants]:
        """Variants of the corrupted text, which are asked for their share of the difference."""
        return self.passes.giving(self.text, site, heads, source, self._shares, rows)

    def together(self, at: str, names: Sequence[str], positions: Sequence[int] | None) -> float:
        """The effect of all these heads at once."""
        places = self.names(at)
        chosen: dict[str, list[int]] = {}
        for name in names:
            chosen.setdefault(places[name][0], []).extend(places[name][1])

        def change(site: Site, call: Call) -> Tensor:
            source, rows = self._source(site, at, positions)
            return _replaced(call.out, [chosen[site.name]], source(slice(0, 1)), None if rows is None else [rows])

        layers = [layer for layer in self.layers if layer.site.name in chosen]
        handlers = {layer.site: partial(change, layer.site) for layer in layers}
        variant = Variants(self.text, layers[0], 1, handlers, self._shares)
        return self.passes.measured({"together": [variant]})["together"][0]

    def estimate(self, names: Sequence[str], positions: Sequence[int] | None) -> dict[str, float]:
        """What one backward pass says of the effect of each head's output."""
        sites = [layer.site for layer in self.layers]

        def answer() -> Tensor:
            return self._difference(answer_logits(self.passes.model, self.text.ids, self.passes.position))

        slopes = {site.name: slope for site, _, slope in slopes_of(sites, answer)}
        rows = slice(None) if positions is None else list(positions)
        effects = {}
        for name, (site, (h,)) in self.names("out").items():
            if name in names:
                clean, corrupted = self.clean_text.calls[site].out, self.text.calls[site].out
                moved = clean[0, h, rows] - corrupted[0, h, rows]
                gained = float((moved * slopes[site][0, h, rows]).sum())  # to first order
                effects[name] = gained / (self.clean - self.corrupted)
        return effects

    def paths(
        self, receivers: Sequence[Receiver], senders: Iterable[str] | None = None, progress: Progress = no_progress
    ) -> dict[Receiver, dict[str, float]]:
        """Of each receiver, such as ("q", "L3.H5"), the effect of each earlier head through what it reads.

        The variants that take what a head gives to the layers above it serve all receivers.
        """
        order = [layer.site.name for layer in self.layers]
        places = {(at, name): self.names(at)[name] for at, name in receivers}
        earlier = {}
        for (at, name), (site, _) in places.items():
            below = set(order[: order.index(site)])
            heads_below = {head: place for head, place in self.names("out").items() if place[0] in below}
            chosen = set(chosen_heads(heads_below, senders, "out")) if heads_below else set()
            earlier[at, name] = [head for head in heads_below if head in chosen]
            if chosen:
                _require_scores(self.text.calls[site], at)
        arrived: dict[Receiver, list[Tensor]] = {receiver: [] for receiver in earlier}
        sites = {receiver: site for receiver, (site, _) in places.items() if earlier[receiver]}
        every_sender = set().union(*earlier.values())
        sent = "", ""  # the key of the variants that serve all receivers; it is no receiver's
        groups = {sent: self._sent(every_sender, sites, arrived)}  # before the others, which read what has arrived
        for receiver, heads in earlier.items():
            groups[receiver] = self._received(receiver, places[receiver], len(heads), arrived[receiver])
        values = self.passes.measured(groups, progress)
        return {receiver: dict(zip(heads, values[receiver], strict=True)) for receiver, heads in earlier.items()}

    def _sent(
        self, senders: set[str], sites: Mapping[Receiver, str], arrived: Mapping[Receiver, list[Tensor]]
    ) -> list[Variants]:
        """Variants in which a sender gives its clean output, up to the last site of a receiver.

        The queries, keys or values (n,T,D) that a receiver makes then are put to `arrived`. Heads above the sender are
        frozen, feed-forwards run.
        """
        order = [layer.site.name for layer in self.layers]
        last = max((order.index(site) for site in sites.values()), default=0)
        batches = []

        def freeze(site: Site, call: Call) -> Tensor:
            for at, name in (receiver for receiver, place in sites.items() if place == site.name):
                arrived[at, name].append(getattr(call, at)[:, place_of(name)[1]].clone())
            return self.text.calls[site.name].out.expand_as(call.out)

        for number, layer in enumerate(self.layers[:last]):
            site = layer.site.name
            heads = []
            for name, (place, members) in self.names("out").items():
                if place == site and name in senders:
                    heads.append(members)
            if not heads:
                continue
            clean = self.clean_text.calls[site].out
            above = self.layers[number + 1 : last + 1]
            frozen = {frozen_layer.site: partial(freeze, frozen_layer.site) for frozen_layer in above}
            # Nobody asks them for an answer: what they bring is put to `arrived` on the way.
            for each in self.passes.giving(self.text, site, heads, always(clean), lambda answers: []):
                batches.append(replace(each, handlers={**each.handlers, **frozen}, last=self.layers[last]))
        return batches

    def _received(self, receiver: Receiver, place: Place, count: int, arrived: Sequence[Tensor]) -> list[Variants]:
        """Variants in which the receiver has what has arrived there from one sender after another."""
        at, name = receiver
        site, members = place
        call = self.text.calls[site]

        def source(part: slice) -> Tensor:
            outs = []
            for each in torch.cat([*arrived])[part]:
                changed = getattr(call, at).clone()
                changed[0, place_of(name)[1]] = each
                made = call._replace(**{at: changed})
                outs.append(_attend(made, made.v))
            return torch.cat(outs)

        return self._giving(site, [members] * count, source)


def always(out: Tensor) -> Source:
    """What heads give, (1,H,T,E), in all variants alike."""
    return lambda part: out


def place_of(name: str) -> tuple[str, int]:
    """The site of a head, or key/value head, and its number there: ("L3", 5) of L3.H5."""
    site, _, last = name.rpartition(".")
    return site, int(last.lstrip("HKV"))


def _attend(call: Call, v: Tensor) -> Tensor:
    """What a call would give of other values."""
    if call.weights is None:
        return attend(call.q, call.k, v, call.options)
    n_readers = call.weights.shape[1] // v.shape[1]  # query heads of a key/value head
    return call.weights.to(v.dtype) @ v.repeat_interleave(n_readers, 1)


def _require_scores(call: Call, at: str) -> None:
    if call.weights is not None and at in ("q", "k"):
        raise HeadwiseError(
            f"at={at!r}: {type(call.layer).__name__} makes its weights itself, and what it makes them of is not known; "
            f"pass at='out', 'weights' or 'v'"
        )


def _replaced(out: Tensor, heads: Sequence[Sequence[int]], source: Tensor, rows: Rows) -> Tensor:
    """Outputs (n,H,T,E) in which heads[i] of variant i give source[0], or source[i], at rows[i]; None: at all."""
    out = out.clone()
    for i, members in enumerate(heads):
        places = slice(None) if rows is None else list(rows[i])
        for h in members:
            out[i, h, places] = source[i % len(source), h, places].to(out)
    return out


class _StopError(Exception):
    """What was wanted of a forward pass is there; no need to go on."""


class _Replay:
    """The `forward` of a layer that computes nothing where it is replayed: one for all threads that do so at a time."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.forward, self.before = block, block.forward, vars(block).get("forward")
        self.outputs: list[tuple[Callable[[], bool], Any]] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        for is_inside, output in [*self.outputs]:
            if is_inside():
                return output
        return self.forward(*args, **keywords)

    def __reduce__(self) -> Any:
        return _Replay, (self.block,)  # a copy of the model, made meanwhile in another thread, computes


@contextmanager
def _replayed(block: nn.Module, is_inside: Callable[[], bool], output: Any) -> Iterator[None]:
    """Inside this block of code, where `is_inside` says so, a layer computes nothing and gives what it gave before."""
    with _lock:
        replay = block.forward if isinstance(block.forward, _Replay) else _Replay(block)
        replay.outputs.append((is_inside, output))
        block.forward = replay
    try:
        yield
    finally:
        with _lock:
            replay.outputs = [each for each in replay.outputs if each[0] is not is_inside]
            if not replay.outputs:
                del block.forward
                if replay.before is not None:
                    block.forward = replay.before


_lock = Lock()


def chosen_heads(places: dict[str, Place], heads: Iterable[str] | None, at: str) -> list[str]:
    if isinstance(heads, str):
        raise HeadwiseError(f"heads={heads!r} must be a list of names, such as [{heads!r}]")
    names = list(places) if heads is None else list(heads)
    for name in names:
        if name not in places:
            if at in SHARED and ".KV" not in name:
                raise HeadwiseError(f"{name}: keys and values belong to key/value heads, such as {next(iter(places))}")
            raise unknown_head(name, list(places))
    return names
