"""Continue a text, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import check_seed


@dataclass(frozen=True)
class Source:
    """What the loop must know of a model, ours or another."""

    # Begin a text; then ids (1,T) that follow -> logits (V,) of what comes next.
    begin: Callable[[], Callable[[Tensor], Tensor]]
    context: int | None  # most tokens of a text; None where the model sets no bound
    vocab_size: int | None
    device: torch.device


def generate(
    model: GPT,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    cache: bool = True,
) -> Iterator[int]:
    """Continue ids by a GPT of ours; see `models.generate.generate`, which serves other models and texts too."""

    def begin() -> Callable[[Tensor], Tensor]:
        caches = model.new_caches()
        return lambda ids: model(ids, caches, last_only=True)[0, -1]

    source = Source(begin, model.config.context, model.config.vocab_size, model.lm_head.weight.device)
    return continued(source, prompt, n_tokens, temperature, top_k, seed, () if stop is None else (stop,), cache)


@torch.no_grad()
def continued(
    source: Source,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stops: Collection[int],
    cache: bool,
) -> Iterator[int]:
    """Yield up to `n_tokens` ids that follow the prompt, as they come; one of `stops` ends the text and is not yielded.

    When the text reaches the model's context, its older half is forgotten and the rest is read again from the start.
    """
    if not prompt:
        raise HeadwiseError("the prompt is empty, and this model has no token that begins a text; pass --prompt")
    wrong = [i for i in prompt if i < 0 or (source.vocab_size is not None and i >= source.vocab_size)]
    if wrong:
        raise HeadwiseError(f"token id {wrong[0]} lies outside the vocabulary of {source.vocab_size}")
    if n_tokens < 0:
        raise HeadwiseError(f"tokens={n_tokens} is negative")
    if not temperature >= 0:
        raise HeadwiseError(f"temperature={temperature} must be 0 or more; 0 takes the likeliest token")
    check_seed(seed)
    if top_k is not None and top_k < 1:
        raise HeadwiseError(f"top_k={top_k} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt) if source.context is None else list(prompt)[-source.context :]
    read, n_read = source.begin(), 0
    for _ in range(n_tokens):
        if source.context is not None and len(ids) > source.context:
            ids = ids[-max(1, source.context // 2) :]
            read, n_read = source.begin(), 0
        if not cache:
            read, n_read = source.begin(), 0
        logits = read(torch.tensor([ids[n_read:]], device=source.device))
        n_read = len(ids)
        token = _choose(logits, temperature, top_k, generator)
        if token in stops:
            return
        yield token
        ids.append(token)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise HeadwiseError("the model's logits are NaN or inf; its weights are damaged or its training diverged")
    if temperature == 0:
        return int(logits.argmax())
    likeliest = logits.double().cpu().topk(min(top_k or len(logits), len(logits)))
    weights = torch.softmax((likeliest.values - likeliest.values[0]) / temperature, -1)  # 0 at best: nothing overflows
    return int(likeliest.indices[torch.multinomial(weights, 1, generator=generator)])
