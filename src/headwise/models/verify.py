"""Is the cache of a model right, is its padding right, do its documents stay apart? Running it answers.

Each question is asked in several ways. A way runs a text that the model has read whole before, and compares what each
attention and the whole model gave for every token. What differs by more than the rounding of the model's own sums is
named with the attention and the token where the difference begins.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
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
from headwise.models.sites import sites_of

TOKENS = 24  # of a text where nothing asks for more
LONGEST_WINDOW = 512  # a longer window is crossed where `tokens` says so
SHORTER = 7  # tokens that the second text of a padded batch has fewer
ANSWER = 5  # tokens that a decoder beside an encoder reads
STEPS = 3  # tokens that are read one by one behind a padded text
# A way may differ by so many roundings of the model itself, or of its dtype: another shape of the batch reorders sums.
ALLOWED, FLOOR = 200.0, 256.0
WHOLE = (
    "logits"  # what the model itself gives, in the place of the name of an attention
)

# What each attention gave, (B,T,C) by its name in the order of the call; `WHOLE` last.
States = dict[str, Tensor]
Pairs = Iterator[tuple[States, States]]  # what must come, and what came
Way = Callable[["_Asked"], Pairs]


@dataclass(frozen=True)
class Answer:
    """What one way of asking gave."""

    question: str  # cache, padding or documents
    way: str  # such as "token by token"
    status: str  # equal, differs, or not asked
    # the largest: where they are equal over all attentions, else where the difference begins
    difference: float | None = None
    rounding: float | None = None  # what would have been allowed there
    layer: str | None = (
        None  # the first attention whose result differs, such as L3; or "logits"
    )
    position: int | None = None  # its first token that differs, counted from 0
    reason: str = ""  # why it was not asked


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
        lines = [f"{self.model}, a text of {self.tokens} tokens"]
        for answer in self.answers:
            lines.append(f"{answer.question:<10}{answer.way:<32}{_worded(answer)}")
        return "\n".join(lines)


def _worded(answer: Answer) -> str:
    if answer.status == "not asked":
        return f"not asked: {answer.reason}"
    amount = f"{answer.difference:.1g}, where rounding may make {answer.rounding:.1g}"
    if answer.status == "equal":
        return f"equal: the largest difference is {amount}"
    place = "logits differ" if answer.layer == WHOLE else f"{answer.layer} differs"
    return f"{place} from position {answer.position} on, by {amount}"


class _NotAskedError(Exception):
    """A way that this model does not offer, with the reason."""


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
    with torch.no_grad(), evaluating(model):
        asked = _Asked(model, tokens)
        answers = tuple(asked.answer(question, way, run) for question, way, run in WAYS)
    known = described(model)
    return Verified(
        type(model).__name__ if known is None else known.name, asked.tokens, answers
    )


class _Asked:
    """A model, two texts that it has read whole, and the rounding of what it gave."""

    def __init__(self, model: nn.Module, tokens: int | None) -> None:
        self.model: Any = model
        self.own = isinstance(model, GPT)
        self.takes = set(parameters_of(model))
        self.cache: Any = None  # what the latest call gave back
        config = getattr(model, "config", None)
        size = vocabulary_of(model)
        if size is None or size < 8:
            raise HeadwiseError(
                f"{type(model).__name__} does not say its vocab_size; verify needs a model of token ids"
            )
        window = getattr(config, "sliding_window", None) or 0
        usual = max(TOKENS, window + 8 if window <= LONGEST_WINDOW else 0)
        self.tokens = min(
            usual if tokens is None else tokens, context_of(model) or sys.maxsize
        )
        if self.tokens < 2:
            raise HeadwiseError(f"tokens={tokens} must be 2 or more")
        self.half = self.tokens // 2
        # Some models read places out of the ids: there padding must be the id that the config names.
        self.padding = getattr(config, "pad_token_id", None) or 0
        draw = torch.Generator().manual_seed(0)
        # ids from 3 on: the first ones are often special
        ids = torch.randint(3, size, (3, self.tokens), generator=draw).to(
            device_of(model)
        )
        self.ids, self.answered = ids[:2], ids[2:, :ANSWER]
        self.alone = [self.run(self.ids[:1]), self.run(self.ids[1:])]
        again = self.run(self.ids[:1].repeat(3, 1))
        self.allowed: dict[str, float] = {}
        for name, states in self.alone[0].items():
            rounding = ALLOWED * _distance(again[name][:1], states)
            floor = FLOOR * torch.finfo(states.dtype).eps * states.abs().max().item()
            self.allowed[name] = max(rounding, floor)
            if not math.isfinite(self.allowed[name]):
                raise HeadwiseError(
                    f"{name} of {type(model).__name__} gives NaN or inf by itself"
                )

    def run(self, ids: Tensor, **inputs: Any) -> States:
        """What each attention and the model give for ids (B,T), which may be a piece of a text."""
        states: States = {}

        def keep(module: nn.Module, arguments: Any, output: Any, name: str) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.ndim == 3 and len(first) == len(ids):
                states[name] = first.clone()

        hooks = []
        for site in self.sites:
            hooks.append(
                (site.module.register_forward_hook, partial(keep, name=site.name))
            )
        with hooked(hooks):
            if self.own:
                output = self.model(ids, inputs.get("cache"))
            else:
                output = self.model(**self.arguments(ids, inputs))
                self.cache = cache_in(output)
        for name in ("logits", "last_hidden_state"):
            output = getattr(output, name, output)
        states[WHOLE] = output[0] if isinstance(output, tuple) else output
        return states

    def arguments(self, ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `forward`, by the names that this model has for them."""
        passed: dict[str, Any] = {
            "input_ids" if "input_ids" in self.takes else "ids": ids
        }
        if "decoder_input_ids" in self.takes:
            passed["decoder_input_ids"] = self.answered.expand(len(ids), -1)
        if "use_cache" in self.takes:
            passed["use_cache"] = "cache" in inputs
        for name, value in inputs.items():
            passed[cache_name(self.model) if name == "cache" else name] = value
        return passed

    @cached_property
    def sites(self) -> list[Any]:
        try:
            return sites_of(self.model)
        except HeadwiseError:  # a model without attention has logits alone
            return []

    def need(self, *arguments: str) -> None:
        """Raise for a model that does not take them; of "next", for one that does not predict the next token."""
        for argument in arguments:
            if argument == "next" and predicts(self.model) != "next":
                raise _NotAskedError("it does not predict the next token of this text")
            if argument != "next" and argument not in self.takes:
                raise _NotAskedError(f"its forward takes no {argument}")

    def answer(self, question: str, way: str, run: Way) -> Answer:
        """The first attention and token of a way that differ, or the largest difference of all."""
        largest = (0.0, 0.0)
        try:
            for expected, got in run(self):
                for name, states in expected.items():
                    bound = self.allowed[name]
                    far = _distances(got.get(name, states), states)
                    if max(far) > bound:
                        place = next(
                            n for n, distance in enumerate(far) if distance > bound
                        )
                        return Answer(
                            question, way, "differs", max(far), bound, name, place
                        )
                    largest = max(largest, (max(far), bound))
        except _NotAskedError as error:
            return Answer(question, way, "not asked", reason=str(error))
        except Exception as error:  # the library lets through whatever its parts raise
            message = " ".join(f"{type(error).__name__}: {error}".split())
            return Answer(question, way, "not asked", reason=message[:200])
        return Answer(question, way, "equal", *largest)

    def cached(self, lengths: Sequence[int], static: bool = False) -> Pairs:
        """The first text read piece by piece, each behind the cache of those before."""
        self.need("next", *(() if self.own else ("use_cache", cache_name(self.model))))
        if static and self.own:
            raise _NotAskedError("a GPT of headwise has one kind of cache")
        cache = self.model.new_caches() if self.own else None
        if static:
            from headwise.models.hf import (
                static_cache,  # here: a model of ours needs no transformers
            )

            cache = static_cache(self.model, self.tokens + 1)
        pieces = []
        for piece in torch.split(self.ids[:1], list(lengths), 1):
            pieces.append(self.run(piece, cache=cache))
            if self.own:  # its caches grow in place
                continue
            cache = self.cache
            if cache is None:
                raise _NotAskedError("it gives no cache back")
            has_states = not all(
                hasattr(each, "keys") for each in getattr(cache, "layers", ())
            )
            if has_states and max(lengths[1:]) > 1:
                raise _NotAskedError("layers with a state go on by one token at a time")
        yield self.alone[0], _joined(pieces)

    def padded(self, left: bool, steps: int = 0) -> Pairs:
        """The first text beside a shorter one, padded; the last `steps` tokens read one by one."""
        self.need("attention_mask", *(("next",) if steps else ()))
        short, T = self.tokens - SHORTER, self.tokens
        if short <= steps:
            raise _NotAskedError(f"{T} tokens leave no shorter text beside it")
        if (
            steps and not self.sites
        ):  # a state has read the padding, and takes no mask any more
            raise _NotAskedError("it has no attention")
        real = slice(SHORTER, T) if left else slice(0, short)
        ids, mask = self.ids.clone(), torch.zeros_like(self.ids)
        ids[1] = self.padding
        ids[1, real], mask[0], mask[1, real] = self.ids[1, :short], 1, 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        counts = left and self.counts_from_zero()
        pieces: list[States] = []
        lengths = [T - steps, *[1] * steps]
        for piece, placed in zip(
            torch.split(ids, lengths, 1),
            torch.split(positions, lengths, 1),
            strict=True,
        ):
            end = T - steps + len(pieces)
            inputs: dict[str, Any] = {"attention_mask": mask[:, :end]}
            if counts:
                inputs["position_ids"] = placed
            if steps:
                inputs["cache"] = self.cache if pieces else None
            pieces.append(self.run(piece, **inputs))
        got = _joined(pieces)
        yield self.alone[0], _rows(got, 0)
        second = _rows(got, 1)
        for name, states in second.items():
            if (
                states.shape[1] == T
            ):  # what a decoder beside an encoder gives has no padding
                second[name] = states[:, real]
        yield self.run(self.ids[1:, :short]), second

    def counts_from_zero(self) -> bool:
        """Does it take positions that count the tokens of a text from 0? (RoBERTa counts from another number.)"""
        if "position_ids" not in self.takes:
            return False
        positions = torch.arange(self.tokens, device=self.ids.device)[None]
        got = self.run(self.ids[:1], position_ids=positions)
        return _distance(got[WHOLE], self.alone[0][WHOLE]) <= self.allowed[WHOLE]

    def side_by_side(self) -> Pairs:
        got = self.run(self.ids)
        for row, expected in enumerate(self.alone):
            yield expected, _rows(got, row)

    def packed(self) -> Pairs:
        """Both texts in one row, told apart by positions that begin again, as transformers packs texts."""
        self.need("position_ids")
        T = self.tokens
        positions = torch.arange(T, device=self.ids.device).repeat(2)[None]
        got = self.run(self.ids.reshape(1, -1), position_ids=positions)
        first, second = (
            {name: x[:, part] for name, x in got.items()}
            for part in (slice(T), slice(T, None))
        )
        if _distance(second[WHOLE], self.alone[1][WHOLE]) > self.allowed[WHOLE]:
            raise _NotAskedError(
                "texts packed by their positions see one another in it: pad them"
            )
        yield self.alone[0], first
        yield self.alone[1], second


def _distances(some: Tensor, others: Tensor) -> list[float]:
    """The largest distance at each token of (1,T,C); infinite beside NaN."""
    distances: list[float] = (
        (some - others).abs().amax((0, 2)).nan_to_num(math.inf).tolist()
    )
    return distances


def _distance(some: Tensor, others: Tensor) -> float:
    return max(_distances(some, others))


def _rows(states: States, row: int) -> States:
    return {name: each[row : row + 1] for name, each in states.items()}


def _joined(pieces: Sequence[States]) -> States:
    """The states of a text of those of its pieces."""
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}


WAYS: tuple[tuple[str, str, Way], ...] = (
    ("cache", "token by token", lambda asked: asked.cached([1] * asked.tokens)),
    (
        "cache",
        "a prefix, then token by token",
        lambda asked: asked.cached(_prefix(asked)),
    ),
    ("cache", "in chunks", lambda asked: asked.cached(_chunks(asked))),
    ("cache", "static", lambda asked: asked.cached(_prefix(asked), static=True)),
    ("padding", "right", lambda asked: asked.padded(left=False)),
    ("padding", "left", lambda asked: asked.padded(left=True)),
    (
        "padding",
        "left, then token by token",
        lambda asked: asked.padded(left=True, steps=STEPS),
    ),
    ("documents", "side by side", _Asked.side_by_side),
    ("documents", "packed into one row", _Asked.packed),
)


def _prefix(asked: _Asked) -> list[int]:
    return [asked.half, *[1] * (asked.tokens - asked.half)]


def _chunks(asked: _Asked) -> list[int]:
    second = (asked.tokens - asked.half) // 2
    return [asked.half, second, asked.tokens - asked.half - second]
