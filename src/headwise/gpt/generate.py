"""Continue a text, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import check_seed


@torch.no_grad()
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
    """Yield up to `n_tokens` ids that continue `prompt`, as they come; `stop` ends the text and is not yielded.

    temperature  0 takes the likeliest token; 1 samples from the model as it is
    top_k        sample among the k likeliest only
    cache        False computes every step anew: slower, the same text

    When the text reaches the model's context, its older half is forgotten and the rest is read again from the start.
    """
    _check(model, prompt, n_tokens, temperature, top_k, seed)
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    ids = list(prompt)[-context:]
    caches = model.new_caches()
    for _ in range(n_tokens):
        if len(ids) > context:
            ids = ids[-max(1, context // 2) :]
            caches = model.new_caches()
        if not cache:
            caches = model.new_caches()
        fresh = torch.tensor([ids[caches[0].length :]], device=model.lm_head.weight.device)
        logits = model(fresh, caches, last_only=True)[0, -1]
        token = _choose(logits, temperature, top_k, generator)
        if token == stop:
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


def _check(model: GPT, prompt: Sequence[int], n_tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    if not prompt:
        raise HeadwiseError("the prompt is empty, and this model has no token that begins a text; pass --prompt")
    wrong = [i for i in prompt if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise HeadwiseError(f"token id {wrong[0]} lies outside the vocabulary of {model.config.vocab_size}")
    if n_tokens < 0:
        raise HeadwiseError(f"tokens={n_tokens} is negative")
    if not temperature >= 0:
        raise HeadwiseError(f"temperature={temperature} must be 0 or more; 0 takes the likeliest token")
    check_seed(seed)
    if top_k is not None and top_k < 1:
        raise HeadwiseError(f"top_k={top_k} must be at least 1")
