"""Narrow layers: some of them see, and keep in their cache, only the latest tokens of a text.

A layer in which a head finds needles keeps all (`heads.windows`). Of the others, those get a window whose loss with the
window in place stays within the tolerance, or those that cost least where a fraction of the cache is asked for; the
length of the window is tried, too. A plain window drops the first token, on which many heads rest (Xiao et al. 2023,
arXiv 2309.17453): what that alone costs is measured, and either such a layer is kept full, or it learns to do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from headwise.corpus.documents import text_of
from headwise.errors import HeadwiseError
from headwise.heads.windows import SMALLEST, windows
from headwise.masks import Mask, Streaming, Window
from headwise.models.ask import context_of, evaluating, next_token_losses, require_next
from headwise.models.hook import attach
from headwise.models.sites import sites_of
from headwise.models.stream import stream_of
from headwise.models.weights import angles_by_kind, cannot_narrow, head_counts, reads_as_stock, windows_of, with_windows
from headwise.plan import KVReach
from headwise.records import Call
from headwise.reshape.arguments import Options, check_narrowing
from headwise.reshape.heal import n_parameters
from headwise.reshape.job import Change, Changed, Job, Listener, Reshaped
from headwise.reshape.text import Calibration, batches, spread
from headwise.rungs.tensor import attend
from headwise.table import amount
from headwise.words import Note, refusal

TOLERANCE = 0.01  # nats a token, where nothing else is asked for; a round choice
# Tokens, at most, that one choice is measured on: every layer and length takes a pass over them. A round choice.
LOOK = 16_384


def narrow(
    model: nn.Module | str | Path,
    *,
    tolerance: float | None = None,
    cache: float | None = None,
    window: int | None = None,
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> Reshaped:
    """Give layers a window: they see the latest tokens alone, and keep no others in the cache.

        child = hw.narrow("runs/book", tolerance=0.01, out="runs/book-narrow")
        child.won       # "cache 128 -> 24 KiB a token at 32,768 tokens, ..."

    The other arguments are those of `share`, and so are the errors. With `heal`, layers are chosen as if they could
    keep the first token beside their window; they then learn to do without it.

    Args:
        model: a GPT, a model of transformers with `layer_types` in its config, a Llama or Mistral (written as the
            Qwen2 of the same function), or the folder of one; it is left alone
        tolerance: the loss that may come with it, in nats a token, before any healing; default: 0.01
        cache: or the share of the cache's bytes that stays, at the model's longest text
        window: tokens that such a layer sees, the current one counted; default: the power of two that serves best
    """
    return Job(model, Narrowing(tolerance, cache, window), options, listener or Listener()).run()


@dataclass(frozen=True)
class Narrowing(Change):
    """The arguments of `narrow` that say how much goes: a tolerance or a fraction of the cache, never both."""

    tolerance: float | None
    cache: float | None
    window: int | None

    def __post_init__(self) -> None:
        check_narrowing(self.tolerance, self.cache, self.window)
        if self.tolerance is self.cache is None:  # neither is given; object.__setattr__: the dataclass is frozen
            object.__setattr__(self, "tolerance", TOLERANCE)

    def check(self, model: nn.Module) -> None:
        if (stream := stream_of(model)) is not None:
            raise HeadwiseError(f"narrow measures with the whole model in memory, which takes {amount(stream.size)}")
        require_next(model)
        if problem := cannot_narrow(model):
            raise HeadwiseError(problem)
        context = context_of(model)
        if self.window is not None and context is not None and self.window >= context:
            raise refusal("window_wide", window=self.window, context=context)
        there = {window for window in windows_of(model) if window is not None}
        if angles_by_kind(model):  # only layers that have a window can be changed: they can get a shorter one
            if not there:
                raise HeadwiseError("no layer has a window, and one that gets it would get other angles of RoPE, too")
            if self.window is not None and self.window >= max(there):
                raise HeadwiseError(f"window={self.window} is no smaller than today's, of {max(there)} tokens")
            return
        if None not in windows_of(model):
            raise HeadwiseError(f"every layer has a window already, of {max(there)} tokens")
        if there and self.window not in (None, *there):
            raise HeadwiseError(
                f"window={self.window}: some layers have one of {max(there)} tokens already, and a config has one "
                f"length for all; leave window= out"
            )

    def tokens_run(self, model: nn.Module, calibration: Calibration) -> int:
        layers = 1 if angles_by_kind(model) else 2 * len(windows_of(model))  # each alone, and beside those chosen
        lengths = 1 if self.window is not None else 5  # as many powers of two fit documents of 512 to 1,023 tokens
        # 2: the loss as it is, and the look at how far heads see.
        return (2 + layers * lengths) * sum(map(len, spread(calibration.train, LOOK, calibration.most)))

    def apply(self, job: Job) -> Changed:
        return _Search(self, job).changed()


@contextmanager
def seeing(model: nn.Module, masks: Mapping[str, Mask]) -> Iterator[None]:
    """Inside this block the attentions of these names ("L3") see what their mask allows and no more.

    Each call is computed again with the mask, and that replaces its output.
    """

    def again(mask: Mask, call: Call) -> Tensor:
        both = mask if call.options.mask is None else call.options.mask & mask
        return attend(call.q, call.k, call.v, call.options._replace(mask=both))

    with attach({site: partial(again, masks[site.name]) for site in sites_of(model) if site.name in masks}):
        yield


class Choice(NamedTuple):
    """Layers with a window, its length, what they cost in nats a token, and the fraction of the cache that is left."""

    layers: tuple[int, ...]
    window: int
    cost: float
    fraction: float


class _Search:
    """The layers of a model that can do with a window, by the loss with the windows in place."""

    def __init__(self, asked: Narrowing, job: Job) -> None:
        self.asked, self.model, self.say = asked, job.source.model, job.listener.say
        # The text to calibrate on: what is held out measures the result.
        documents = spread(job.calibration.train, LOOK, job.calibration.most)
        self.batches = batches(documents)
        self.now = windows_of(self.model)  # of each layer, None where it keeps all
        self.longest = job.source.context or job.calibration.length  # tokens of the longest text
        self._cost = cache(self._measured)  # the same layers, window and sinks are asked for several times
        self.base = self._loss({})
        # To a window belong other angles of RoPE (Gemma 3): no layer can get one or lose it.
        self.tied = angles_by_kind(self.model)
        # First tokens that stay visible while layers are chosen: 1 before a healing, which teaches to do without it.
        # 0 where windows get shorter: those of today drop the first token of a long text already.
        self.sinks = int(job.recipe is not None and not self.tied)
        self.heads: tuple[KVReach, ...] = ()
        # `open`: layers that may get a window, or a shorter one. `steps`: those that can only get it together.
        if self.tied:  # layers with a window get a shorter one, all together: a config has one length
            self.open = [n for n, w in enumerate(self.now) if w is not None]
            self.steps = [tuple(self.open)]
            return
        self.say(Note.of("reshaped.looks"))
        self.heads = windows(self.model, text_of(job.source, [document.tolist() for document in documents])).heads
        retrieving = {head.layer for head in self.heads if head.retrieves}
        self.open = [n for n, w in enumerate(self.now) if w is None and n not in retrieving]
        self.steps = [(n,) for n in self.open]

    def changed(self) -> Changed:
        tried = self._lengths()
        choices = [choice for choice in map(self._choice, tried) if choice is not None]
        if not choices:
            raise HeadwiseError(self._refusal(tried))
        # Where a fraction of the cache was asked for, all choices reach it: the cheapest is best. Within a tolerance
        # the one that leaves the smallest cache is. The second name decides among equals.
        order = ("cost", "fraction") if self.asked.tolerance is None else ("fraction", "cost")
        best = min(choices, key=attrgetter(*order))
        child = with_windows(self.model, [best.window if n in best.layers else w for n, w in enumerate(self.now)])
        names = [f"L{n}" for n in best.layers]
        what = Note.of("reshaped.narrowed", window=best.window, count=len(names), all=len(self.now), layers=names)
        # Of each layer that could be narrowed by itself, what its window costs without the first token and with it.
        first_token = {}
        for n in () if self.tied else self.open:
            dropped, kept = (self._cost((n,), best.window, sinks) for sinks in (0, 1))
            first_token[f"L{n}"] = {"dropped": dropped, "kept": kept}
        details = {
            "windows": windows_of(child),
            "cost": best.cost,
            "share": best.fraction,
            "first_token": first_token,
            "needles": {head.name: head.needle.mean for head in self.heads},
        }
        origins = [list(range(head_counts(self.model)[0]))] * len(self.now)  # every head stays where it was
        return Changed(child, what, details, origins, tuple(self._notes(child, best, first_token)))

    def _lengths(self) -> list[int]:
        """The lengths of a window that are tried: the one asked for, or powers of two up to half a document."""
        today = [window for window in self.now if window is not None]
        if today and not self.tied:  # a config has one length for all, and `check` refuses any other
            return today[:1]
        half = max(ids.shape[1] for ids in self.batches) // 2
        # SMALLEST, twice that, ... up to half; half itself where documents are shorter than that.
        lengths = [SMALLEST << k for k in range(half.bit_length()) if SMALLEST << k <= half] or [max(1, half)]
        if self.asked.window is not None:
            lengths = [self.asked.window]
        if self.tied:
            lengths = [length for length in lengths if length < today[0]]
        if not lengths:
            raise HeadwiseError(f"no window shorter than today's, of {today[0]} tokens, fits these documents")
        return lengths

    def _choice(self, window: int) -> Choice | None:
        """The layers to narrow to this window; None where none can be, or too few."""
        self.say(Note.of("reshaped.tries", window=window))
        alone = {layers: self._cost(layers, window, self.sinks) for layers in self.steps}
        tolerance, most = self.asked.tolerance, self.asked.cache
        chosen: tuple[int, ...] = ()
        for layers in sorted(alone, key=alone.__getitem__):  # those that need the rest of the text least come first
            if most is not None:
                is_wanted = self._fraction(chosen, window) > most  # not enough is saved yet
            else:
                assert tolerance is not None  # without a fraction of the cache there is a tolerance, see Narrowing
                # Costs of layers do not add up: each addition is measured with the layers chosen so far.
                is_wanted = alone[layers] <= tolerance and self._cost(chosen + layers, window, self.sinks) <= tolerance
            if is_wanted:
                chosen += layers
        fraction = self._fraction(chosen, window)
        if not chosen or (most is not None and fraction > most):
            return None
        # Whatever the layers were chosen by, the child drops the first token: 0 sinks.
        return Choice(tuple(sorted(chosen)), window, self._cost(chosen, window, 0), fraction)

    def _fraction(self, layers: Sequence[int], window: int) -> float:
        """The fraction of the cache that is left at the longest text with a window in these layers."""
        rows = [min(self.longest, w or self.longest) for w in self.now]  # tokens that each layer keeps today
        left = [min(n, window) if layer in layers else n for layer, n in enumerate(rows)]
        return sum(left) / sum(rows)

    def _measured(self, layers: tuple[int, ...], window: int, sinks: int) -> float:
        """Loss with the windows in place less the loss without, nats a token; `sinks` first tokens are kept, too."""
        mask = Streaming(sinks, window) if sinks else Window(window - 1, 0)  # `window` counts the current token, too
        return self._loss({f"L{n}": mask for n in layers}) - self.base

    @torch.no_grad()
    def _loss(self, masks: Mapping[str, Mask]) -> float:
        total, count = 0.0, 0
        with seeing(self.model, masks), evaluating(self.model):
            for ids in self.batches:
                predicted = ids.shape[1] - 1  # tokens of each document; losses are means over them
                total += float(next_token_losses(self.model, ids).sum()) * predicted
                count += len(ids) * predicted
        return total / count

    def _notes(self, child: nn.Module, best: Choice, first: Mapping[str, Mapping[str, float]]) -> Iterator[Note]:
        if type(child) is not type(self.model):  # a Llama or Mistral, written as a Qwen2, which has more biases
            more = n_parameters(child) - n_parameters(self.model)
            name = type(child).__name__.partition("For")[0]  # "Qwen2" of Qwen2ForCausalLM
            yield Note.of("reshaped.written_as", family=name, biases=more)
        yield Note.of("reshaped.windows_cost", cost=f"{best.cost:+.4f}", share=f"{best.fraction:.2f}")
        for head in self.heads:
            if head.retrieves and self.now[head.layer] is None:
                weight = f"{head.needle.mean:.2f}"
                yield Note.of("reshaped.needles", layer=head.layer, head=head.name, weight=weight)
        for name, cost in first.items():
            numbers = Note.of("reshaped.window_costs", cost=f"{cost['dropped']:+.4f}", kept=f"{cost['kept']:+.4f}")
            key = "learns_without" if self.sinks else "does_without"
            if int(name.removeprefix("L")) not in best.layers:
                key = "keeps_all"
            yield Note.of(f"reshaped.{key}", layer=name, cost=numbers)
        if reads_as_stock(self.model) and not reads_as_stock(child):
            yield Note.of("reshaped.own_runtime")

    def _refusal(self, tried: Sequence[int]) -> str:
        # Why no length among `tried`, the shortest first, can be chosen, and what could be asked for instead.
        lengths = f"{tried[0]}" if len(tried) == 1 else f"{tried[0]} to {tried[-1]}"
        # Where angles are tied, the layers that keep all do so for their angles, not for needles: they are not named.
        keeping = [f"L{n}" for n, window in enumerate(self.now) if window is None and n not in self.open]
        rest = f"; {', '.join(keeping)} keep all, for heads there find needles" if keeping and not self.tied else ""
        if not self.open:
            return f"no layer may get a window{rest}; share, or prune, makes a cache smaller without one"
        if self.asked.cache is not None:
            least = self._fraction(self.open, tried[0])
            return f"windows of {lengths} tokens leave {least:.2f} of the cache at least{rest}; pass a larger cache="
        costs = [(self._cost(layers, size, self.sinks), layers, size) for layers in self.steps for size in tried]
        cost, layers, size = min(costs)
        if self.tied:
            return (
                f"a window of {size} instead costs {cost:+.4f} nats, the least that was tried; pass a larger tolerance="
            )
        learn = "" if self.sinks else ", or heal=STEPS to learn without the first token"
        return (
            f"no layer does with a window of {lengths} tokens for {self.asked.tolerance} nats{rest}; the cheapest is "
            f"L{layers[0]} with {size}, {cost:+.4f}: pass a larger tolerance={learn}"
        )
