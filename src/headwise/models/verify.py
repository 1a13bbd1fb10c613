"""Is the cache of a model right, is its padding right, do its documents stay apart? Running it answers.

Each question is asked in several ways. A way runs a text that the model has read whole before, and compares what each
attention and the whole model gave for every token. What differs by more than the rounding of the model's own sums is
named with the attention and the token where the difference begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
ALLOWED, FLOOR = 50.0, 64.0
WHOLE = "logits"  # what the model itself gives, in the place of the name of an attention

# What each attention gave, (B,T,C) by its name in the order of the call; `WHOLE` last.
States = dict[str, Tensor]
Way = Callable[["_Asked"], Iterator[tuple[States, States]]]


@dataclass(frozen=True)
class Answer:
    """What one way of asking gave."""

    question: str  # cache, padding or documents
    way: str  # such as "token by token"
    status: str  # equal, differs, or not asked
    # the largest: where they are equal over all attentions, else where the difference begins
    difference: float | None = None
    rounding: float | None = None  # what would have been allowed there
    layer: str | None = None  # the first attention whose result differs, such as L3; or "logits"
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
        answers = tuple(asked.answer(question, name, way) for question, name, way in WAYS)
    known = described(model)
    return Verified(type(model).__name__ if known is None else known.name, asked.tokens, answers)


class _Asked:
    """A model, two texts that it has read whole, and the rounding of what it gave."""

    def __init__(self, model: nn.Module, tokens: int | None) -> None:
        self.model = model
        self.parameters = parameters_of(model)
        self.own = isinstance(model, GPT)
        self.tokens = _length(model, tokens)
        size = vocabulary_of(model)
        if size is None or size < 8:
            raise HeadwiseError(
                f"{type(model).__name__} does not say its vocab_size; verify needs a model of token ids"
            )
        draw = torch.Generator().manual_seed(0)
        # ids from 3 on: the first ones are often special
        self.answer_ids: Tensor | None = None  # what the decoder beside an encoder reads
        if "decoder_input_ids" in self.parameters:
            self.answer_ids = torch.randint(3, size, (1, ANSWER), generator=draw).to(
                device_of(model)
            )
        self.ids = torch.randint(3, size, (2, self.tokens), generator=draw).to(device_of(model))
        self.alone = [self.run(self.ids[:1]), self.run(self.ids[1:])]
        again = self.run(self.ids[:1].repeat(3, 1))
        self.allowed: dict[str, float] = {}
        for name, states in self.alone[0].items():
            if not states.isfinite().all():
                raise HeadwiseError(f"{name} of {type(model).__name__} gives NaN or inf by itself")
            rounding = (again[name][:1] - states).abs().max().item()
            floor = FLOOR * torch.finfo(states.dtype).eps * states.abs().max().item()
            self.allowed[name] = max(ALLOWED * rounding, floor)

    def run(self, ids: Tensor, **inputs: Any) -> States:
        """What each attention and the model give for ids (B,T), which may be a piece of a text."""
        states: States = {}

        def keeper(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, arguments: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, Tensor) and first.ndim == 3 and len(first) == len(ids):
                    states[name] = first.detach().clone()

            return keep

        hooks = [(site.module.register_forward_hook, keeper(site.name)) for site in self.sites()]
        with hooked(hooks):
            if self.own:
                output = self.model(ids, inputs.get("cache"))
            else:
                passed = {name: value for name, value in inputs.items() if name != "cache"}
                if "cache" in inputs:
                    passed |= {cache_name(self.model): inputs["cache"], "use_cache": True}
                elif "use_cache" in self.parameters:
                    passed["use_cache"] = False
                if self.answer_ids is not None:
                    passed["decoder_input_ids"] = self.answer_ids.expand(len(ids), -1)
                name = (
                    "input_ids" if "input_ids" in self.parameters else next(iter(self.parameters))
                )
                output = self.model(**{name: ids}, **passed)
                self.cache = cache_in(output)
        for name in ("logits", "last_hidden_state"):
            output = getattr(output, name, output)
        states[WHOLE] = output[0] if isinstance(output, tuple) else output
        return states

    def sites(self) -> list[Any]:
        try:
            return sites_of(self.model)
        except HeadwiseError:  # a model without attention has logits alone
            return []

    def need(self, argument: str) -> None:
        if self.own or argument not in self.parameters:
            raise _NotAskedError(f"its forward takes no {argument}")

    def counts_from_zero(self) -> bool:
        """Does it take positions that count the tokens of a text from 0? (RoBERTa counts from another number.)"""
        if "position_ids" not in self.parameters:
            return False
        positions = torch.arange(self.tokens, device=self.ids.device)[None]
        got = self.run(self.ids[:1], position_ids=positions)
        return all(
            (got[name] - states).abs().max().item() <= self.allowed[name]
            for name, states in self.alone[0].items()
        )

    def need_next(self) -> None:
        if predicts(self.model) != "next":
            raise _NotAskedError("it does not predict the next token of this text: no cache of it")

    def answer(self, question: str, way: str, pairs: Way) -> Answer:
        """The first attention and token of a way that differ, or the largest difference of all."""
        largest, allowed = 0.0, 0.0
        try:
            for expected, got in pairs(self):
                for name, states in expected.items():
                    if name not in got:
                        continue
                    bound = self.allowed[name]
                    difference = (got[name] - states).abs().flatten(2).amax((0, 2))
                    difference = difference.nan_to_num(float("inf"))
                    wrong = (difference > bound).nonzero()
                    most = difference.max().item()
                    if len(wrong):
                        position = int(wrong[0])
                        return Answer(question, way, "differs", most, bound, name, position)
                    if most >= largest:
                        largest, allowed = most, bound
        except _NotAskedError as error:
            return Answer(question, way, "not asked", reason=str(error))
        except Exception as error:  # the library lets through whatever its parts raise
            message = " ".join(f"{type(error).__name__}: {error}".split())
            return Answer(question, way, "not asked", reason=message[:200])
        return Answer(question, way, "equal", largest, allowed)

    def in_pieces(self, lengths: Sequence[int], cache: Any = None) -> States:
        """The first text read piece by piece, each behind the cache of those before."""
        self.need_next()
        if self.own:
            cache = cast(GPT, self.model).new_caches()
        elif not {"use_cache", cache_name(self.model)} <= set(self.parameters):
            raise _NotAskedError("its forward takes no cache")
        pieces: list[States] = []
        start = 0
        for length in lengths:
            pieces.append(self.run(self.ids[:1, start : start + length], cache=cache))
            start += length
            if self.own:  # its caches grow in place
                continue
            cache = self.cache
            if cache is None:
                raise _NotAskedError("it gives no cache back")
            has_states = not all(hasattr(each, "keys") for each in getattr(cache, "layers", ()))
            if has_states and max(lengths[1:]) > 1:
                raise _NotAskedError("layers with a state go on by one token at a time")
        return _joined(pieces)

    def padded(self, left: bool, steps: int) -> Iterator[tuple[States, States]]:
        """The first text beside a shorter one, padded; the last `steps` tokens read one by one."""
        self.need("attention_mask")
        if steps:
            self.need_next()
            if not self.sites():  # a state has read the padding, and takes no mask any more
                raise _NotAskedError("it has no attention")
        short, T = self.tokens - SHORTER, self.tokens
        if short <= steps:
            raise _NotAskedError(f"{T} tokens leave no shorter text beside it")
        ids = self.ids.clone()
        mask = torch.ones_like(ids)
        # Some models read places out of the ids: there padding must be the id that the config names.
        padding = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
        gap = slice(0, SHORTER) if left else slice(short, T)
        real = slice(SHORTER, T) if left else slice(0, short)
        ids[1, real] = self.ids[1, :short]
        ids[1, gap], mask[1, gap] = padding, 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        placed = left and self.counts_from_zero()
        cache: Any = None
        pieces: list[States] = []
        ends = [T - steps, *range(T - steps + 1, T + 1)] if steps else [T]
        start = 0
        for end in ends:
            inputs: dict[str, Any] = {"attention_mask": mask[:, :end]}
            if placed:
                inputs["position_ids"] = positions[:, start:end]
            if steps:
                inputs["cache"] = cache
            pieces.append(self.run(ids[:, start:end], **inputs))
            cache, start = self.cache, end
        got = _joined(pieces)
        yield self.alone[0], {name: states[:1] for name, states in got.items()}
        padded = {}
        for name, states in got.items():
            # what a decoder beside an encoder gives has no padding
            padded[name] = states[1:, real] if states.shape[1] == T else states[1:]
        # A causal text says the same of its first tokens; of another one the shorter text is read alone.
        if predicts(self.model) == "next":
            expected = {name: states[:, :short] for name, states in self.alone[1].items()}
        else:
            expected = self.run(self.ids[1:, :short])
        yield expected, padded


def _length(model: nn.Module, tokens: int | None) -> int:
    """Tokens of the text: as asked for, or a little beyond the window."""
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    if tokens is None:
        beyond = window + 8 if isinstance(window, int) and window <= LONGEST_WINDOW else 0
        tokens = max(TOKENS, beyond)
    most = context_of(model)
    if most is not None:
        tokens = min(tokens, most)
    if tokens < 2:
        raise HeadwiseError(f"tokens={tokens} must be 2 or more")
    return tokens


def _joined(pieces: Sequence[States]) -> States:
    """The states of a text of those of its pieces, where each piece has them."""
    names = [name for name in pieces[0] if all(name in piece for piece in pieces)]
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in names}


def _token_by_token(asked: _Asked) -> Iterator[tuple[States, States]]:
    yield asked.alone[0], asked.in_pieces([1] * asked.tokens)


def _after_a_prefix(asked: _Asked) -> Iterator[tuple[States, States]]:
    half = asked.tokens // 2
    yield asked.alone[0], asked.in_pieces([half] + [1] * (asked.tokens - half))


def _in_chunks(asked: _Asked) -> Iterator[tuple[States, States]]:
    first = asked.tokens // 2
    second = (asked.tokens - first) // 2
    yield asked.alone[0], asked.in_pieces([first, second, asked.tokens - first - second])


def _static(asked: _Asked) -> Iterator[tuple[States, States]]:
    if asked.own:
        raise _NotAskedError("a GPT of headwise has one kind of cache")
    from headwise.models.hf import static_cache  # here: a model of ours needs no transformers

    half = asked.tokens // 2
    cache = static_cache(asked.model, asked.tokens + 1)
    yield asked.alone[0], asked.in_pieces([half] + [1] * (asked.tokens - half), cache)


def _side_by_side(asked: _Asked) -> Iterator[tuple[States, States]]:
    got = asked.run(asked.ids)
    for row, expected in enumerate(asked.alone):
        yield expected, {name: states[row : row + 1] for name, states in got.items()}


def _packed(asked: _Asked) -> Iterator[tuple[States, States]]:
    """Both texts in one row, told apart by positions that begin again, as transformers packs texts."""
    asked.need("position_ids")
    T = asked.tokens
    positions = torch.arange(T, device=asked.ids.device).repeat(2)[None]
    got = asked.run(asked.ids.reshape(1, -1), position_ids=positions)
    second = {name: states[:, T:] for name, states in got.items()}
    for name, states in asked.alone[1].items():
        apart = (second[name] - states).abs().max().item() if name in second else 0.0
        if apart > asked.allowed[name]:
            raise _NotAskedError(
                f"it does not take texts packed by their positions: at {name} the second sees the first; pad them"
            )
    yield asked.alone[0], {name: states[:, :T] for name, states in got.items()}
    yield asked.alone[1], second


WAYS: tuple[tuple[str, str, Way], ...] = (
    ("cache", "token by token", _token_by_token),
    ("cache", "a prefix, then token by token", _after_a_prefix),
    ("cache", "in chunks", _in_chunks),
    ("cache", "static", _static),
    ("padding", "right", lambda asked: asked.padded(left=False, steps=0)),
    ("padding", "left", lambda asked: asked.padded(left=True, steps=0)),
    ("padding", "left, then token by token", lambda asked: asked.padded(left=True, steps=STEPS)),
    ("documents", "side by side", _side_by_side),
    ("documents", "packed into one row", _packed),
)
