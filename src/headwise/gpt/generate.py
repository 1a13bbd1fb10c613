"""Continue texts, one token at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.gpt.decode import Decoder, Texts, why_not
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import check_seed
from headwise.words import refusal

WORTH = 16  # tokens from which on the decode form, which takes about as long as that many steps, is made
MOST = 2**31  # bytes of weights of which a second copy is made unasked


@dataclass(frozen=True)
class Source:
    """What the loop must know of a model, ours or another."""

    begin: Callable[[], Callable[[Tensor], Tensor]]  # a text; then ids (1,T) that follow -> logits (V,) of the next one
    context: int | None  # most tokens of a text; None where the model sets no bound
    vocab_size: int | None
    decoder: Decoder | None = None  # its decode form


class Apart:
    """Texts side by side that a model reads one by one; `Texts` is the same for a decode form."""

    def __init__(self, source: Source, n_texts: int) -> None:
        self.readers = [source.begin() for _ in range(n_texts)]
        self.logits = [torch.empty(0)] * n_texts

    def __call__(self, ids: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Read what follows in each text, nothing in one that has ended; logits (B,1,V) of what comes next."""
        for n, new in enumerate(ids):
            if new:
                self.logits[n] = self.readers[n](torch.tensor([new]))
        return torch.stack(self.logits)[:, None]


def generate(
    model: GPT, prompt: Sequence[int], n_tokens: int, *, stop: int | None = None, cache: bool = True, **options: Any
) -> Iterator[int]:
    """Continue ids by a GPT of ours; see `models.generate.generate`, which serves other models and texts too."""

    def begin() -> Callable[[Tensor], Tensor]:
        caches, device = model.new_caches(), model.lm_head.weight.device
        return lambda ids: model(ids.to(device), caches, last_only=True)[0, -1]

    worth = cache and n_tokens >= WORTH and why_not(model) is None
    source = Source(begin, model.config.context, model.config.vocab_size, Decoder(model) if worth else None)
    stops = () if stop is None else (stop,)
    return only(continued(source, [prompt], n_tokens, stops=stops, cache=cache, **options))


def only(steps: Iterator[list[int | None]]) -> Iterator[int]:
    """The ids of a single text."""
    return (token for step in steps for token in step if token is not None)


def continued(
    source: Source,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
    cache: bool = True,
    lookup: int = 0,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next id of each text, None once it has ended: by `n_tokens`, or by one of `stops`.

    Text n draws with the seed `seed + n`, as it would alone. A text that reaches the model's context forgets its older
    half, and the rest is read again from the start.
    """
    _check(source, prompts, n_tokens=n_tokens, temperature=temperature, top_k=top_k, seed=seed, lookup=lookup)
    decoder = source.decoder if cache else None
    if lookup and (decoder is None or len(prompts) > 1):
        raise HeadwiseError(f"lookup={lookup} is for one text, and needs the cache; leave it out")
    generators = [torch.Generator().manual_seed(seed + n) for n in range(len(prompts))]
    limit = source.context or sys.maxsize

    @torch.no_grad()
    def steps() -> Iterator[list[int | None]]:
        texts = [list(prompt)[-limit:] for prompt in prompts]
        ended, written = [False] * len(texts), 0
        reading: Texts | Apart | None = None
        while written < n_tokens and not all(ended):
            form = None if decoder is None or decoder.disturbed() else decoder
            if any(len(text) > limit for text in texts) or (isinstance(reading, Texts) and reading.length >= limit):
                reading = None
                for n, text in enumerate(texts):
                    if ended[n]:
                        texts[n] = text[-1:]  # nobody reads it on; something has to stand in its row
                    elif len(text) > limit:
                        texts[n] = text[-max(1, limit // 2) :]
            # Read what is new; all of it at first, and where somebody begins to watch, who is to see the model itself.
            # That is the latest token: what was guessed and accepted is in the cache.
            unread = [[] if end else text[-1:] for text, end in zip(texts, ended, strict=True)]
            if reading is None or not cache or (form is None and isinstance(reading, Texts)):
                room = min(limit, max(map(len, texts)) + n_tokens - written)
                reading = Apart(source, len(texts)) if form is None else Texts(form, room)
                unread = texts
            # Behind the guess the model writes one token of its own, which must have its place, too.
            room_for_guess = min(lookup, n_tokens - written - 1, limit - len(texts[0]))
            guess = looked_up(texts[0], room_for_guess) if isinstance(reading, Texts) else []
            logits = reading([[*ids, *guess] for ids in unread], 1 + len(guess))
            # Write a token, and what was guessed as long as it is what the model writes.
            for place in range(1 + len(guess)):
                step: list[int | None] = [None] * len(texts)
                for n, text in enumerate(texts):
                    if not ended[n]:
                        token = _choose(logits[n, place], generators[n], temperature, top_k)
                        text.append(token)
                        ended[n] = token in stops
                        step[n] = None if ended[n] else token
                written += 1
                if not all(ended):
                    yield step
                if place < len(guess) and step != [guess[place]]:
                    break
            if isinstance(reading, Texts):  # the guesses after the last one that was right are taken back
                reading.length -= len(guess) - place

    return steps()


def _check(source: Source, prompts: Sequence[Sequence[int]], *, seed: int, **numbers: Any) -> None:
    if not prompts or not all(prompts):
        raise HeadwiseError("the prompt is empty, and this model has no token that begins a text; pass prompt=")
    wrong = [i for ids in prompts for i in ids if i < 0 or (source.vocab_size is not None and i >= source.vocab_size)]
    if wrong:
        raise HeadwiseError(f"token id {wrong[0]} lies outside the vocabulary of {source.vocab_size}")
    if numbers["n_tokens"] < 0:
        raise HeadwiseError(f"n_tokens={numbers['n_tokens']} is negative")
    if not numbers["temperature"] >= 0:
        raise refusal("temperature", temperature=numbers["temperature"])
    check_seed(seed)
    for name, least in (("top_k", 1), ("lookup", 0)):
        if numbers[name] is not None and numbers[name] < least:
            raise HeadwiseError(f"{name}={numbers[name]} must be at least {least}")


def looked_up(ids: Sequence[int], n: int) -> list[int]:
    """The n ids that came after the latest place where the text has had its last two before (Saxena 2023)."""
    for end in range(len(ids) - 1, 1, -1) if n > 0 else ():
        if ids[end - 1] == ids[-1] and ids[end - 2] == ids[-2]:
            return list(ids[end : end + n])
    return []


def _choose(logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None) -> int:
    if not math.isfinite(logits.sum()):
        raise HeadwiseError("the model's logits are NaN or inf; its weights are damaged or its training diverged")
    if temperature == 0:
        return int(logits.argmax())
    ids, rows = None, logits.cpu().double()
    if top_k is not None and top_k < len(rows):
        rows, ids = rows.topk(top_k)
    bounds = ((rows - rows.max()) / temperature).exp().cumsum(0)  # 1 at best: nothing overflows
    point = torch.rand((), generator=generator, dtype=torch.float64) * bounds[-1]
    place = min(int(torch.searchsorted(bounds, point, right=True)), len(rows) - 1)
    return place if ids is None else int(ids[place])
