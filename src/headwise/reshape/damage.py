"""What reshaping costs and wins: how far a child's answers are from its parent's, and how fast it gives them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cost import cache_bytes_per_token
from headwise.heads.blocks import measure as measure_call
from headwise.heads.documents import Document, listening
from headwise.models.ask import answers, config_fields, each, predicts, reader
from headwise.models.sites import Site
from headwise.models.stream import stream_of
from headwise.records import Call
from headwise.words import Note

HeadPairs = Sequence[Sequence[tuple[int, int]]]  # for each layer (head of the parent, the same head of the child)
WATCHED = 4  # documents whose entropies are taken
DECODE_CONTEXT = 2048  # tokens in the cache, at most, while speed is measured
RUNS = 9  # of each model, in turn; odd, so that the median is one of them
MEMORY = 24 * 2**30  # bytes of a device, in which is counted how many texts fit
NEW_TOKENS, WARM_UP = 8, 2  # tokens a run, and how many of them are not timed: they grow the cache


@dataclass(frozen=True)
class Pair:
    """A number of the parent and that of its child."""

    before: float
    after: float


@dataclass(frozen=True)
class Speed(Pair):
    """Tokens a second: medians of `runs` runs of each model, in turn."""

    before_range: tuple[float, float]  # between these the true median lies, with a probability of 0.96
    after_range: tuple[float, float]
    runs: int
    told_apart: bool  # do the two ranges not overlap?


@dataclass(frozen=True)
class Damage:
    """What a reshaped model has lost and won against its parent, on held-out text."""

    loss: Pair | None  # nats per token; None where the model predicts no next token
    kl: float | None  # KL(parent || child), nats per token; None where the model ends in no distribution
    error: float | None  # of the last hidden states, relative; where there is no KL
    entropy: tuple[Pair, ...]  # nats, for each layer: the mean over the heads that both have
    cache_bytes: Pair  # a token of a text of `context`, all layers, in the model's own number format
    parameters: Pair
    tokens_per_second: Speed | None  # of one text being generated; None where none is, or nothing got smaller
    decode_context: int  # tokens in the cache while that was measured
    context: int = 0  # the longest text
    texts: Pair | None = None  # of that length, whose caches fit beside the weights in 24 GiB


def divergence(parent: Tensor, child: Tensor) -> Tensor:
    """KL(parent || child) in nats, a mean over the distributions of logits (...,V) (Hinton et al. 2015, 1503.02531)."""
    log_p, log_q = (F.log_softmax(logits.flatten(0, -2).float(), -1) for logits in (parent, child))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def relative_error(parent: Tensor, child: Tensor) -> Tensor:
    return (child - parent).float().square().mean() / parent.float().square().mean().clamp(min=1e-30)


@torch.no_grad()
def compared(
    parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]
) -> tuple[float | None, float | None, float]:
    """Losses of both models on batches (B,T), which are taken as they are, and how far apart they answer.

    Losses in nats a token, None where no next token is predicted; the divergence a token, or the relative error.
    Call it in eval mode.
    """
    kind = predicts(parent)
    distance_of = divergence if kind else relative_error
    distance, losses, n_tokens, n_predicted = 0.0, [0.0, 0.0], 0, 0
    for ids, *both in zip(batches, each(parent, batches, answers), each(child, batches, answers), strict=True):
        distance += distance_of(*both).item() * ids.numel()
        n_tokens += ids.numel()
        if kind == "next":
            n = ids[:, 1:].numel()
            n_predicted += n
            for i, logits in enumerate(both):
                predicted, following = logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().to(logits.device)
                losses[i] += F.cross_entropy(predicted, following).item() * n
    parent_loss, child_loss = (total / n_predicted if kind == "next" else None for total in losses)
    return parent_loss, child_loss, distance / n_tokens


def measure(
    parent: nn.Module,
    child: nn.Module,
    held_out: Sequence[Tensor],
    pairs: HeadPairs,
    context: int | None,
    say: Callable[[Note], None] = lambda line: None,
    speed: Speed | None = None,
) -> Damage:
    """Compare two models in eval mode on batches (B,T).

    context  bounds the text whose decoding is timed
    speed    of a child of the same shape, where it is known already
    """
    say(Note.of("reshaped.measures"))
    with entropies(parent) as old, entropies(child) as new:
        before, after, distance = compared(parent, child, held_out)
    kind = predicts(parent)
    tokens = context or DECODE_CONTEXT
    cache = Pair(*(cache_bytes(model, tokens) for model in (parent, child)))
    length = max(0, min(DECODE_CONTEXT if context is None else context, DECODE_CONTEXT) - NEW_TOKENS)
    sizes = Pair(*(sum(p.numel() for p in model.parameters()) for model in (parent, child)))
    smaller = cache.after != cache.before or sizes.after != sizes.before  # else two timings differ by chance alone
    if speed is None and smaller and kind == "next" and length > 0 and stream_of(parent) is None:
        say(Note.of("reshaped.times"))
        speed = decode_speed(parent, child, held_out[0][:1], length)
    entropy: list[Pair] = []
    for layer, heads in enumerate(pairs):
        of_parent = statistics.fmean(old[f"L{layer}"][was] for was, _ in heads)
        of_child = statistics.fmean(new[f"L{layer}"][now] for _, now in heads)
        entropy.append(Pair(of_parent, of_child))
    return Damage(
        loss=None if before is None or after is None else Pair(before, after),
        kl=distance if kind else None,
        error=None if kind else distance,
        entropy=tuple(entropy),
        cache_bytes=cache,
        parameters=sizes,
        tokens_per_second=speed,
        decode_context=length,
        context=tokens,
        texts=Pair(texts_in(parent, cache.before * tokens), texts_in(child, cache.after * tokens)),
    )


@contextmanager
def entropies(model: nn.Module) -> Iterator[dict[str, list[float]]]:
    """Inside this block: of each attention, "L0", the mean entropy of each head on the first documents it reads."""
    means: dict[str, list[float]] = {}

    def note(site: Site, call: Call, documents: Sequence[Document]) -> None:
        if site.name not in means:
            first = [measure_call(call, b, document, top=False) for b, document in enumerate(documents[:WATCHED])]
            means[site.name] = torch.cat([measured.rows["entropy"] for measured in first], 1).mean(1).tolist()

    with listening(model, note):
        yield means


def cache_bytes(model: nn.Module, tokens: int = 1) -> float:
    """Bytes of cache a token, of a text of that many, in the format of the weights; 0 where none is kept."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return cache_bytes_per_token(config_fields(model), dtype, tokens)


def texts_in(model: nn.Module, cache: float) -> float:
    """Texts whose cache of that many bytes each fits beside the weights in MEMORY; 0 where nothing is left."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, MEMORY - weights) // cache if cache else 0.0


@torch.no_grad()
def decode_speed(parent: nn.Module, child: nn.Module, text: Tensor, length: int) -> Speed:
    """Tokens a second of two models with `length` tokens in the cache, from `text` (1,T) repeated to that length.

    Each model reads it once; every run begins with a copy of that cache, and gives the median of its tokens.
    """
    prompt = text.repeat(1, -(-length // text.shape[1]))[:, :length]
    readers = [reader(model) for model in (parent, child)]
    for read in readers:
        read(prompt)
    speeds: tuple[list[float], list[float]] = ([], [])
    for run in range(RUNS):
        for i in (0, 1) if run % 2 else (1, 0):  # neither is always the first
            speeds[i].append(_run_speed(readers[i].fork(), prompt))
    # Whatever the distribution, fewer than 2 of 9 values lie on one side of the true median with a probability of
    # 20 / 512: the second and the last but one are bounds that hold it with a probability of 0.96.
    (low, high), (least, most) = ((side[1], side[-2]) for side in map(sorted, speeds))
    before, after = map(statistics.median, speeds)
    return Speed(before, after, (low, high), (least, most), RUNS, told_apart=high < least or most < low)


def _run_speed(decode: Callable[[Tensor], Tensor], prompt: Tensor) -> float:
    seconds = []
    for n in range(NEW_TOKENS):
        token = prompt[:, n % prompt.shape[1]][:, None]
        began = time.perf_counter()
        decode(token)[0].item()  # the number is there when the device is done
        seconds.append(time.perf_counter() - began)
    return 1 / statistics.median(seconds[WARM_UP:])
