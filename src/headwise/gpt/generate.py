"""Continue a text, one token at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import check_seed

# Begins a text, and returns what reads on in it with a cache: ids (1,T) that follow -> logits (V,) of the next one.
Begin = Callable[[], Callable[[Tensor], Tensor]]


def generate(
    model: GPT, prompt: Sequence[int], n_tokens: int, **options: Any
) -> Iterator[int]:
    """Continue ids by a GPT of ours, as `continued` does it; see also `models.open.generate`."""

    def begin() -> Callable[[Tensor], Tensor]:
        caches, device = model.new_caches(), model.lm_head.weight.device
        return lambda ids: model(ids.to(device), caches, last_only=True)[0, -1]

    options |= {
        "context": model.config.context,
        "vocab_size": model.config.vocab_size,
    }
    return continued(begin, prompt, n_tokens, **options)


def continued(
    begin: Begin,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stops: Collection[int] = (),
    context: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the ids that continue a text, until `n_tokens` are written or one of `stops` ends it.

    A text that reaches the model's context forgets its older half, and the rest is read again from the start.

    temperature   0 takes the likeliest id
    top_k         draw among so many of the likeliest; None among all
    context       most tokens of a text; None where the model sets no bound
    vocab_size    None where the model does not say it: then no id is too large
    """
    if not prompt:
        raise HeadwiseError(
            "the prompt is empty, and this model has no token that begins a text; pass prompt="
        )
    for i in prompt:
        if i < 0 or i >= (vocab_size or sys.maxsize):
            raise HeadwiseError(
                f"token id {i} lies outside the vocabulary of {vocab_size}"
            )
    if n_tokens < 0:
        raise HeadwiseError(f"{n_tokens=} is negative")
    if not temperature >= 0:
        raise HeadwiseError(
            f"temperature={temperature} must be 0 or more; 0 takes the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise HeadwiseError(f"{top_k=} must be at least 1")
    check_seed(seed)
    limit, generator = context or sys.maxsize, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def tokens() -> Iterator[int]:
        text = list(prompt)[-limit:]
        read, unread = begin(), text
        for _ in range(n_tokens):
            if len(text) > limit:
                text = text[-max(1, limit // 2) :]
                read, unread = begin(), text
            token = _choose(read(torch.tensor([unread])), generator, temperature, top_k)
            if token in stops:
                return
            yield token
            text.append(token)
            unread = [token]

    return tokens()


def _choose(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None
) -> int:
    # The next token by its logits (V,), drawn with the probabilities softmax(logits / temperature).
    # One that is not finite makes the sum so. In float32: in float16 that of a large vocabulary would overflow.
    if not math.isfinite(logits.sum(dtype=torch.float32)):
        raise HeadwiseError(
            "the model's logits are NaN or inf; its weights are damaged or its training diverged"
        )
    if temperature == 0:
        return int(logits.argmax())
    rows = logits.cpu().double()
    ids = torch.arange(len(rows))
    if top_k is not None and top_k < len(rows):
        rows, ids = rows.topk(top_k)
    # Token i has the stretch from bounds[i - 1] to bounds[i], as long as it is likely; the largest term is exp(0), so
    # that none overflows.
    bounds = ((rows - rows.max()) / temperature).exp().cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * bounds[-1]
    # rounding may reach the last bound
    place = min(int(torch.searchsorted(bounds, point, right=True)), len(rows) - 1)
    return int(ids[place])
