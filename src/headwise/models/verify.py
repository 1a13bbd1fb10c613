"""Is the cache of a model right, is its padding right, do its documents stay apart? Running it answers.

Each question is asked in several ways. A way runs a text that the model has read whole before, and compares what each
attention and the whole model gave for every token. What differs by more than the rounding of the model's own sums is
named with the attention and the token where the difference begins. That rounding is measured: the model reads the text
once more in a larger batch, and its projections take their sums in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT
from headwise.models.ask import (
    cache_in,
    cache_name,
    context_of,
    device_of,
    evaluating,
    parameters_of,
    predicts,
    vocabulary_of,
)
from headwise.models.hook import hooked
from headwise.models.open import described
from headwise.models.sites import as_rows, sites_of

TOKENS = 24  # of a text where nothing asks for more
LONGEST_WINDOW = 512  # a longer window is crossed where `tokens` says so
SHORTER = 7  # tokens that the second text of a padded batch has fewer
ANSWER = 5  # tokens that a decoder beside an encoder reads
STEPS = 3  # tokens that are read one by one behind a padded text
# A way may change a state by so many times what sums in another order change, or by so many roundings of its largest
# number. On 20 families it was 1.6 times at most.
ALLOWED, FLOOR = 8.0, 32.0
WHOLE = "logits"  # what the model gives, in the place of the name of an attention

# What each attention gave, (B,T,C) by its name in the order of the call; `WHOLE` last.
States = dict[str, Tensor]
# a text (1,T); in which row of the states it comes, at which places
Part = tuple[Tensor, int, slice]
ALL = slice(None)


@dataclass(frozen=True)
class Answer:
    """What one way of asking gave."""

    question: str  # cache, padding or documents
    way: str  # such as "token by token"
    status: str  # equal, differs, or not asked
    # the largest: where they are equal over all attentions, else where the difference begins
    difference: float | None = None
    rounding: float | None = None  # what would have been allowed there
    # the first attention whose result differs, such as L3; or "logits"
    layer: str | None = None
    position: int | None = None  # its first token that differs, counted from 0
    reason: str = ""  # why it was not asked

    def text(self) -> str:
        """A line."""
        told = self.reason or "the largest difference is"
        if self.status == "differs":
            told = f"{self.layer} from position {self.position} on, by"
        if self.difference is not None:
            told += (
                f" {self.difference:.1g}, where rounding may make {self.rounding:.1g}"
            )
        return f"{self.question:<10}{self.way:<32}{self.status}: {told}"


@dataclass(frozen=True)
class Verified:
    """The answers about one model."""

    model: str
    tokens: int
    answers: tuple[Answer, ...]

    @property
    def right(self) -> bool:
        """Did no way of asking differ?"""
        return all(answer.status != "differs" for answer in self.answers)

    def text(self) -> str:
        """A line for each way of asking."""
        lines = [answer.text() for answer in self.answers]
        return "\n".join([f"{self.model}, a text of {self.tokens} tokens", *lines])


def verify(model: nn.Module, tokens: int | None = None) -> Verified:
    """Ask a model whether its cache, its padding and its batches change what it says.

    Args:
        model: a GPT of ours, a model of transformers, or a module that takes ids (B,T)
        tokens: length of the text that is read. Default: 24, or a little beyond a sliding window of up to 512

    Returns:
        An `Answer` for each way: the text whole, token by token, in chunks and with a static cache; padded on the left
        and on the right; beside another text, and packed with it into one row.

    Raises:
        HeadwiseError: for a model that takes no token ids, and for a text that it cannot take.
    """
    known = described(model)
    with torch.no_grad(), evaluating(model):
        asked = _Asked(model, tokens)
        answers = tuple(asked.answers())
    name = type(model).__name__ if known is None else known.name
    return Verified(name, asked.T, answers)


class _Asked:
    """A model, two texts that it has read whole, and the rounding of what it gave."""

    def __init__(self, model: nn.Module, tokens: int | None) -> None:
        self.model: Any = model
        self.takes = parameters_of(model)
        # A GPT of ours has a cache for each layer, and these grow in place.
        self.own = isinstance(model, GPT)
        self.cache_name = "caches" if self.own else cache_name(model)
        self.sites: list[Any] = []
        with suppress(HeadwiseError):  # a model without attention has logits alone
            self.sites = sites_of(model)
        kind, size = type(model).__name__, vocabulary_of(model) or 0
        if size < 8:
            raise HeadwiseError(
                f"{kind} does not say its vocab_size; verify needs a model of token ids"
            )
        window = getattr(model.config, "sliding_window", None) or 0
        usual = window + 8 if window <= LONGEST_WINDOW else 0
        tokens = max(TOKENS, usual) if tokens is None else tokens
        self.T = min(tokens, context_of(model) or tokens)
        if self.T < 2:
            raise HeadwiseError(f"tokens={tokens} must be 2 or more")
        draw = torch.Generator().manual_seed(0)
        # ids from 3 on: the first ones are often special
        ids = torch.randint(3, size, (3, self.T), generator=draw).to(device_of(model))
        self.ids, self.answered = ids[:2], ids[2:, :ANSWER]
        linears = [part for part in model.modules() if _is_linear(part)]
        with hooked((part.register_forward_hook, _reordered) for part in linears):
            again = self.run(self.ids[:1].repeat(3, 1))
        self.allowed: dict[str, float] = {}
        for name, states in self.run(self.ids[:1]).items():
            floor = FLOOR * torch.finfo(states.dtype).eps * float(states.abs().max())
            rounding = ALLOWED * max(_distances(again[name][:1], states))
            self.allowed[name] = max(rounding, floor)
            if not math.isfinite(rounding + floor):
                raise HeadwiseError(f"{name} of {kind} gives NaN or inf by itself")

    def answers(self) -> Iterator[Answer]:
        """Of each way that is asked."""
        T, both, first, second = self.T, self.ids, self.ids[:1], self.ids[1:]
        half, short = T // 2, max(1, T - SHORTER)
        chunk, prefix = (T - half + 1) // 2, [half, *[1] * (T - half)]
        for way, lengths in {
            "token by token": [1] * T,
            "a prefix, then token by token": prefix,
            "in chunks": [half, chunk, T - half - chunk],
            "static": prefix,
        }.items():
            yield self.ask("cache", way, first, [(first, 0, ALL)], lengths)

        # Some models read places out of the ids: there padding must be the id that the config names.
        padding = getattr(self.model.config, "pad_token_id", None) or 0
        places: Any = {"position_ids": torch.arange(T, device=both.device)[None]}
        # Does it take positions that count the tokens of a text from 0? (RoBERTa counts from another number.)
        counted = self.ask("", "", first, [(first, 0, ALL)], [T], **places)
        unless = "" if self.sites else "it has no attention"  # but a state
        if STEPS >= T - SHORTER:
            unless = f"{T} tokens leave no shorter text beside it"
        for way, real, steps in (
            ("right", slice(short), 0),
            ("left", slice(T - short, T), 0),
            ("left, then token by token", slice(T - short, T), STEPS),
        ):
            ids, mask = both.clone(), torch.ones_like(both)
            ids[1], mask[1] = padding, 0
            ids[1, real], mask[1, real] = second[0, :short], 1
            by_token = {"attention_mask": mask}
            if real.start and counted.status == "equal":
                by_token["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
            parts = [(first, 0, ALL), (second[:, :short], 1, real)]
            if steps and unless:
                yield Answer("padding", way, "not asked", reason=unless)
                continue
            lengths = [T - steps, *[1] * steps]
            yield self.ask("padding", way, ids, parts, lengths, **by_token)

        parts = [(first, 0, ALL), (second, 1, ALL)]
        yield self.ask("documents", "side by side", both, parts, [T])
        places["position_ids"] = places["position_ids"].repeat(1, 2)
        parts = [(first, 0, slice(T)), (second, 0, slice(T, None))]
        row, way = both.reshape(1, -1), "packed into one row"
        answer = self.ask("documents", way, row, parts, [2 * T], **places)
        # As transformers packs texts; what keeps none of them apart does not offer it.
        if answer.layer == next(iter(self.allowed)):
            reason = "texts packed by their positions see one another in it: pad them"
            answer = Answer("documents", way, "not asked", reason=reason)
        yield answer

    def ask(
        self,
        question: str,
        way: str,
        ids: Tensor,
        parts: Sequence[Part],
        lengths: Sequence[int],
        **by_token: Tensor,
    ) -> Answer:
        """The first attention and token of a way that differ, or the largest difference of all.

        lengths   of the pieces in which it is read
        by_token  attention_mask and position_ids, (B,T)
        """
        answer = partial(Answer, question, way)
        try:
            got = self.read(ids, lengths, way == "static", by_token)
            expected = [self.run(text) for text, _, _ in parts]
        except Exception as error:  # the library lets through whatever its parts raise
            kind = f"{type(error).__name__}: "
            if isinstance(error, HeadwiseError):
                kind = ""
            return answer("not asked", reason=kind + " ".join(str(error).split())[:200])
        largest = (0.0, 0.0)
        for states, (_, row, places) in zip(expected, parts, strict=True):
            for name in [name for name in states if name in got]:
                ours = got[name][row : row + 1]
                # what a decoder beside an encoder gives has no padding
                ours = ours[:, places] if ours.shape[1] == ids.shape[1] else ours
                far, bound = _distances(ours, states[name]), self.allowed[name]
                if max(far) > bound:
                    place = [distance > bound for distance in far].index(True)
                    return answer("differs", max(far), bound, name, place)
                largest = max(largest, (max(far), bound))
        return answer("equal", *largest)

    def read(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        static: bool,
        by_token: dict[str, Tensor],
    ) -> States:
        """The states of ids (B,T) that are read in pieces, each behind the cache of those before."""
        needed, in_pieces = [*by_token], len(lengths) > 1
        if in_pieces:
            needed += [self.cache_name] if self.own else [self.cache_name, "use_cache"]
            if predicts(self.model) != "next":
                raise HeadwiseError("it does not predict the next token of this text")
        for name in needed:
            if name not in self.takes:
                raise HeadwiseError(f"its forward takes no {name}")
        cache = self.model.new_caches() if self.own else None
        if static and self.own:
            raise HeadwiseError("a GPT of headwise has one kind of cache")
        if static:
            # here: a model of ours needs no transformers
            from headwise.models.hf import static_cache

            cache = static_cache(self.model, self.T + 1)
        pieces: list[States] = []
        end = 0
        for n in lengths:
            start, end = end, end + n
            inputs: dict[str, Any] = {}
            for name, values in by_token.items():
                inputs[name] = values[:, start:end]
            if "attention_mask" in inputs:  # is one of the tokens in the cache, too
                inputs["attention_mask"] = by_token["attention_mask"][:, :end]
            if in_pieces:
                inputs[self.cache_name] = cache
            states, cache = self.run(ids[:, start:end], **inputs), self.cache
            pieces.append(states)
            if in_pieces and cache is None:
                raise HeadwiseError("it gives no cache back")
            has_state = not all(
                hasattr(x, "keys") for x in getattr(cache, "layers", ())
            )
            if has_state and max(lengths[1:], default=1) > 1:
                raise HeadwiseError("layers with a state go on by one token at a time")
        return {name: torch.cat([x[name] for x in pieces], 1) for name in pieces[0]}

    def run(self, ids: Tensor, **inputs: Any) -> States:
        """What each attention and the model give for ids (B,T), which may be a piece of a text."""
        states: States = {}

        def keep(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.ndim == 3 and len(first) == len(ids):
                states[name] = first.clone()

        # a model of one's own may call them otherwise, and takes them first
        named = [
            name for name in ("input_ids", "ids", *self.takes) if name in self.takes
        ]
        inputs[named[0]] = ids
        if "decoder_input_ids" in self.takes:
            inputs["decoder_input_ids"] = self.answered.expand(len(ids), -1)
        if "use_cache" in self.takes:
            inputs["use_cache"] = self.cache_name in inputs
        hooks = []
        for site in self.sites:
            hooks.append((site.module.register_forward_hook, partial(keep, site.name)))
        with hooked(hooks):
            output = self.model(**inputs)
        self.cache = inputs.get("caches", cache_in(output))
        for name in ("logits", "last_hidden_state"):
            output = getattr(output, name, output)
        states[WHOLE] = output[0] if isinstance(output, tuple) else output
        return states


def _is_linear(module: nn.Module) -> bool:
    # transformers' Conv1D goes by its name
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _reordered(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """What a projection gives whose sums are taken in another order."""
    rows, x = as_rows(module).flip(-1), args[0].flip(-1)
    return F.linear(x, rows, module.bias)


def _distances(some: Tensor, others: Tensor) -> list[float]:
    """The largest distance at each token of (1,T,C); infinite beside NaN."""
    far = (some - others).abs().amax((0, 2))
    distances: list[float] = far.nan_to_num(math.inf).tolist()
    return distances
