"""What reshaping costs and wins, measured on held-out text and on the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headwise.cost import cache_bytes_per_token
from headwise.heads.watch import watch
from headwise.models.ask import config_fields, decoder, predicts
from headwise.reshape.distance import compared
from headwise.reshape.report import Damage, Pair

HeadPairs = Sequence[Sequence[tuple[int, int]]]  # for each layer (head of the parent, the same head of the child)
WATCHED = 4  # documents whose entropies are taken
DECODE_CONTEXT = 2048  # tokens in the cache, at most, while speed is measured
NEW_TOKENS, REPEATS = 12, 3  # tokens a run, and runs of each model, in turn


def measure(
    parent: nn.Module,
    child: nn.Module,
    held_out: Sequence[Tensor],
    pairs: HeadPairs,
    context: int | None,
    say: Callable[[str], None] = lambda line: None,
) -> Damage:
    """Compare two models in eval mode on batches (B,T); `context` bounds the text whose decoding is timed."""
    say("measuring loss and divergence")
    before, after, far = compared(parent, child, held_out)
    kind = predicts(parent)
    say("measuring entropies and decoding speed")
    length = min(context or DECODE_CONTEXT, DECODE_CONTEXT) - NEW_TOKENS
    speed = decode_speeds([parent, child], held_out[0][:1], length) if kind == "next" and length > 0 else None
    return Damage(
        loss=None if before is None or after is None else Pair(before, after),
        kl=far if kind else None,
        error=None if kind else far,
        entropy=entropies(parent, child, held_out[0][:WATCHED], pairs),
        cache_bytes=Pair(cache_bytes(parent), cache_bytes(child)),
        parameters=Pair(*(sum(p.numel() for p in model.parameters()) for model in (parent, child))),
        tokens_per_second=None if speed is None else Pair(*speed),
        decode_context=max(length, 0),
    )


def entropies(parent: nn.Module, child: nn.Module, ids: Tensor, pairs: HeadPairs) -> tuple[Pair, ...]:
    """For each layer the mean entropy in nats of the heads that both models have, on ids (B,T)."""
    seen = []
    for model in (parent, child):
        with torch.no_grad(), watch(model) as found:
            model(ids)
        seen.append(found)
    rows = []
    for layer, heads in enumerate(pairs):
        sides = ([seen[i][f"L{layer}.H{pair[i]}"].entropy for pair in heads] for i in (0, 1))
        rows.append(Pair(*(statistics.fmean(side) for side in sides)))
    return tuple(rows)


def cache_bytes(model: nn.Module) -> int:
    """Bytes that one more token adds to the cache, in the number format of the weights; 0 where none is kept."""
    return cache_bytes_per_token(config_fields(model), str(next(model.parameters()).dtype).removeprefix("torch."))


@torch.no_grad()
def decode_speeds(models: Sequence[nn.Module], text: Tensor, length: int) -> list[float]:
    """Tokens a second of each model, one text, `length` tokens in the cache: medians of runs in turn.

    `text` (1,T) is repeated to that length; what the tokens are does not matter for speed.
    """
    prompt = text.repeat(1, -(-length // text.shape[1]))[:, :length]
    steps: list[list[float]] = [[] for _ in models]
    for _ in range(REPEATS):
        for model, times in zip(models, steps, strict=True):
            decode = decoder(model, prompt)
            for n in range(NEW_TOKENS):
                began = time.perf_counter()
                decode(prompt[:, n % length : n % length + 1])
                if n > 1:  # the first ones grow the cache and warm up
                    times.append(time.perf_counter() - began)
    return [1 / statistics.median(times) for times in steps]
