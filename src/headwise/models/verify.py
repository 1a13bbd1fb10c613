"""Is the cache of a model right, is its padding right, do its documents stay apart? Running it answers.

Each way of asking runs texts that the model has read alone and whole, and compares what each layer and the model gave
for every token. What differs by more than the rounding of the model's own sums is named with the layer and the token
where the difference begins. That rounding is measured: the model reads a text once more, and what its
projections read, and the scores by which it chooses, are an ulp more or less. A layer that this alone makes another one
has no right answer, and cannot be asked: so it is where scores tie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.errors import HeadwiseError
from headwise.models import ask
from headwise.models.hook import hooked
from headwise.models.open import folder_of

TOKENS = 24  # of a text where nothing asks for more
LONGEST_WINDOW = 512  # a longer window is crossed where `tokens` says so
SHORTER = 7  # tokens that the second text of a padded batch has fewer
# A way may change a state by so many times what an ulp changes, or by so many roundings of its largest number. Of 1,356
# answers that were equal on 161 families, the largest took 0.75 of that.
ALLOWED = 8.0
FLOOR = 32.0
# the path of a layer that lies in no other
LAYER = re.compile(r"((?![0-9]+[.])[^.]+[.])*[0-9]+")
EMBEDDING, WHOLE = "embedding", "logits"  # before the first layer; behind the last one
MASK = "attention_mask"
POSITIONS = "position_ids"

# What each layer gave, (B,T,C) by its path in the order of the call.
States = dict[str, Tensor]
# a text (T,); the row of the batch where it stands, and its first place there
Part = tuple[Tensor, int, int]
# how far a state may be from another, and is it sure but for rounding?
Bounds = dict[str, tuple[float, bool]]


@dataclass(frozen=True)
class Answer:
    """What one way of asking gave."""

    question: str  # cache, padding or documents
    way: str  # such as "token by token"
    status: str  # equal, differs, or not asked
    # the largest: where they are equal over all layers, else where the difference begins
    difference: float | None = None
    rounding: float | None = None  # what would have been allowed there
    # the first layer whose result differs, such as model.layers.3; "embedding" before all, or "logits"
    layer: str | None = None
    position: int | None = None  # its first token that differs, counted from 0
    reason: str = ""  # why it was not asked

    def text(self) -> str:
        """A line."""
        told = self.reason
        if self.layer is not None:
            told = f"from {self.layer} and position {self.position} on: "
        if self.difference is not None:
            told += (
                f"{self.difference:.1g}, where rounding may make {self.rounding:.1g}"
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
    size = ask.vocabulary_of(model) or 0
    kind = type(model).__name__
    if size < 8:
        raise HeadwiseError(
            f"{kind} does not say its vocab_size; verify needs a model of token ids"
        )
    if ask.has_encoder(model):
        raise HeadwiseError(
            f"{kind} reads one text and writes another; verify needs a model of one text"
        )
    window = getattr(getattr(model, "config", 0), "sliding_window", 0) or 0
    T = tokens or max(TOKENS, window + 8 if window <= LONGEST_WINDOW else 0)
    T = min(T, ask.context_of(model) or T)
    if T < 2:
        raise HeadwiseError(f"tokens={tokens} must be 2 or more")
    draw = torch.Generator().manual_seed(0)
    # ids from 3 on: the first ones are often special
    texts = torch.randint(3, size, (2, T), generator=draw).to(ask.device_of(model))
    with torch.no_grad(), ask.evaluating(model):
        answers = tuple(_answers(model, *texts))
    return Verified(folder_of(model).name, T, answers)


def _answers(model: Any, first: Tensor, second: Tensor) -> Iterator[Answer]:
    """Of each way that is asked about two texts (T,)."""
    alone = [(first, 0, 0)]
    T = len(first)
    bounds: Bounds = {}
    # twice, for what a batch shares, such as angles, is no state of a text
    twice = [*alone, (first, 1, 0)]
    with _Rounded():
        again = _read(model, twice)
    for name, states in _read(model, twice).items():
        eps = torch.finfo(states.dtype).eps
        largest = float(states.abs().max())
        rounding = float((again[name] - states).abs().max())
        half = eps**0.5 * largest  # of the digits
        bound = max(FLOOR * eps * largest, ALLOWED * min(rounding, half))
        bounds[name] = bound, rounding <= half
    if not bounds:
        raise HeadwiseError(f"{type(model).__name__} gives no state of each token")

    def answer(question: str, way: str, parts: list[Part], *how: Any) -> Answer:
        try:
            told = _compared(model, _read(model, parts, *how), parts, bounds, way)
            return Answer(question, way, *told)
        except Exception as error:  # the library lets through whatever its parts raise
            kind = type(error).__name__ + ": "
            reason = kind.removeprefix("HeadwiseError: ") + " ".join(str(error).split())
            return Answer(question, way, "not asked", reason=reason[:200])

    cut = min(SHORTER, T - 1)
    told = [MASK]
    prefix = [T // 2, *[1] * (T - T // 2)]
    steps = [T - 3, 1, 1, 1]
    right, left = ([*alone, (second[cut:], 1, start)] for start in (0, cut))
    # Does it take positions that count the tokens of a text from 0? (RoBERTa counts from another number.)
    if answer("", "", alone, [POSITIONS]).status == "equal":
        told.append(POSITIONS)
    yield answer("cache", "token by token", alone, [], 1)
    yield answer("cache", "a prefix, then token by token", alone, [], prefix)
    yield answer("cache", "in chunks", alone, [], T // 3 + 1)
    yield answer("cache", "static", alone, [], prefix, True)
    yield answer("padding", "right", right, [MASK])
    yield answer("padding", "left", left, told)
    yield answer("padding", "left, then token by token", left, told, steps)
    yield answer("documents", "side by side", [*alone, (second, 1, 0)])
    packed = [*alone, (second, 0, T)]
    yield answer("documents", "packed into one row", packed, [POSITIONS])


def _compared(
    model: Any, together: States, parts: list[Part], bounds: Bounds, way: str
) -> tuple[Any, ...]:
    """Status, difference and rounding, and where texts begin to differ from the same texts alone."""
    largest = (0.0, 0.0)
    for text, row, start in parts:
        for name, states in _read(model, [(text, 0, 0)]).items():
            if name not in bounds:
                continue
            ours = together[name][row, None, start : start + len(text)]
            far = (ours - states).abs().amax((0, 2)).nan_to_num(math.inf)
            bound, is_sure = bounds[name]
            most = float(far.max()), bound
            largest = max(largest, most)
            if most[0] <= bound:
                continue
            if not is_sure:
                raise HeadwiseError(f"{name} hangs on rounding, as where scores tie")
            # As transformers packs texts; what keeps none of them apart does not offer it.
            if way.startswith("packed") and name in [*bounds][:2]:
                raise HeadwiseError("it lets packed texts see one another: pad them")
            takes = ask.parameters_of(model)
            if way.startswith("left") and name == EMBEDDING and POSITIONS not in takes:
                raise HeadwiseError("it counts the padding as positions: pad right")
            return "differs", *most, name, int((far > bound).int().argmax())
    return "equal", *largest


def _read(
    model: Any,
    parts: list[Part],
    inputs: Sequence[str] = (),
    lengths: Any = None,
    static: bool = False,
) -> States:
    """What each layer and the model give for texts side by side, read at once or in pieces with a cache.

    inputs   arguments beside the ids, a number for each token: MASK, POSITIONS
    lengths  of the pieces
    static   has the cache a fixed number of places?
    """
    taken = ask.parameters_of(model)
    cached = ask.cache_name(model)
    if lengths:
        inputs = [*inputs, cached]
    for name in inputs:
        if name not in taken:
            raise HeadwiseError(f"its forward takes no {name}")
    text, row, start = parts[-1]
    width = max(len(parts[0][0]), start + len(text))
    mask = text.new_zeros(row + 1, width)
    # Some models read places out of the ids: there padding must be the id that the config names.
    ids = mask + (getattr(getattr(model, "config", 0), "pad_token_id", 0) or 0)
    positions = mask.clone()
    for text, row, start in parts:
        place = row, slice(start, start + len(text))
        ids[place] = text
        mask[place] = 1
        positions[place] = torch.arange(len(text))
    cache = ask.Reader(model).cache
    states = []
    end = 0
    if static:
        # here: a model of ours needs no transformers
        from headwise.models.hf import static_cache

        cache = static_cache(model, width + 1)
    if lengths and ask.predicts(model) != "next":
        raise HeadwiseError("it does not predict the next token of this text")
    fixed = {"use_cache": bool(lengths)} if "use_cache" in taken else {}
    for piece in torch.split(ids, lengths or width, 1):
        start = end
        end = end + piece.shape[1]
        # the mask is one of the tokens in the cache, too
        told = {MASK: mask[:, :end], POSITIONS: positions[:, start:end], cached: cache}
        with _kept(model, piece) as of_piece:
            output = model(piece, **fixed, **{name: told[name] for name in inputs})
        states.append(of_piece)
        cache = ask.cache_in(output) or cache
        if lengths and cache is None:
            raise HeadwiseError("it gives no cache back")
        layers = getattr(cache, "layers", ())
        if layers and not any(hasattr(layer, "keys") for layer in layers):
            inputs = [cached]  # a state holds no padding
    return {name: torch.cat([x[name] for x in states], 1) for name in states[0]}


@contextmanager
def _kept(model: nn.Module, ids: Tensor) -> Iterator[States]:
    """Inside this block the outputs of layers and model, (B,T,C) each, are kept."""
    states: States = {}

    def keep(name: str, x: Any) -> None:
        for field in ("logits", "last_hidden_state"):
            x = getattr(x, field, x)
        x = x[0] if isinstance(x, tuple) else x
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == ids.shape:
            states[name] = x.flatten(2).clone()

    def hook(path: str, module: Any, args: Any, named: Any, output: Any) -> None:
        if not states:
            keep(EMBEDDING, [*args, *named.values(), None][0])
        keep(path or WHOLE, output)

    hooks = []
    for path, module in model.named_modules():
        if not path or LAYER.fullmatch(path):
            hooks.append((module.register_forward_hook, partial(hook, path)))
    with hooked(hooks, with_kwargs=True):
        yield states


class _Rounded(TorchFunctionMode):
    """Inside this block what projections and choices read is an ulp more or less, so that ties are broken."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        if function in (F.linear, torch.topk, Tensor.topk):
            x = args[0]
            away = torch.arange(x.shape[-1], device=x.device) % 2 - 0.5
            args = torch.nextafter(x, x + away.to(x)), *args[1:]
        return function(*args, **named or {})
