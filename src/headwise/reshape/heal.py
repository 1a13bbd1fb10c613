"""Damage, what reshaping costs and wins; and healing: the child learns to answer as its parent does, on a text.

Damage is how far a child's answers are from its parent's, and how fast it gives them. The loss of a healing is
KL(parent || child) of the predictions, and with `hidden` also the error of the residual stream after each layer,
relative to its size.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cost import cache_bytes_per_token
from headwise.errors import HeadwiseError
from headwise.gpt.presets import warm_cosine
from headwise.gpt.train import (
    AdamW,
    DivergedError,
    Muon,
    interrupts,
    take_step,
)
from headwise.heads.blocks import measure as measure_call
from headwise.heads.documents import Document, listening
from headwise.models.ask import answers, config_fields, hidden_states, predicts, reader
from headwise.models.sites import Site
from headwise.models.weights import AttentionWeights, attentions, read_layers, write_layer
from headwise.records import Call
from headwise.reshape.arguments import HealRecipe
from headwise.reshape.text import batches

# for each layer (head of the parent, the same head of the child)
HeadPairs = Sequence[Sequence[tuple[int, int]]]
# documents whose entropies are taken, of the first batch: they show a trend, and more would take longer
WATCHED = 4
DECODE_CONTEXT = 2048  # tokens in the cache, at most, while speed is measured
# of each model, in turn; odd, so that the median is one of them. The bounds in `decode_speed` are for 9
RUNS = 9
# bytes of a device, taken as an example: how many texts fit into them beside the weights
MEMORY = 24 * 2**30
NEW_TOKENS, WARM_UP = 8, 2  # tokens a run, and how many of them are not timed: they grow the cache


@dataclass(frozen=True)
class Pair:
    """A number of the parent and that of its child."""

    before: float
    after: float


@dataclass(frozen=True)
class Speed(Pair):
    """Tokens a second: medians of `runs` runs of each model, in turn."""

    # between these the true median lies, with a probability of 0.96
    before_range: tuple[float, float]
    after_range: tuple[float, float]
    runs: int
    told_apart: bool  # do the two ranges not overlap?


@dataclass(frozen=True)
class Damage:
    """What a reshaped model has lost and won against its parent, on held-out text."""

    loss: Pair | None  # nats per token; None where the model predicts no next token
    # KL(parent || child), nats per token; None where the model ends in no distribution
    kl: float | None
    error: float | None  # of the last hidden states, relative; where there is no KL
    # nats, for each layer: the mean over the heads that both have, on the first documents
    entropy: tuple[Pair, ...]
    # a token of a text of `context`, all layers, in the model's own number format
    cache_bytes: Pair
    parameters: Pair
    # of one text being generated; None where none is, or nothing got smaller
    tokens_per_second: Speed | None
    decode_context: int  # tokens in the cache while that was measured
    context: int  # the longest text
    texts: Pair  # how many of that length have caches that fit beside the weights in 24 GiB


def divergence(parent: Tensor, child: Tensor) -> Tensor:
    """KL(parent || child) in nats, a mean over the distributions of logits (...,V) (Hinton et al. 2015, 1503.02531)."""
    log_p, log_q = (F.log_softmax(logits.flatten(0, -2).float(), -1) for logits in (parent, child))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def relative_error(parent: Tensor, child: Tensor) -> Tensor:
    # The mean square of the difference over that of the parent; 1e-30 keeps a parent of zeros from 0 / 0.
    return (child - parent).float().square().mean() / parent.float().square().mean().clamp(
        min=1e-30
    )


@torch.no_grad()
def compared(
    parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]
) -> tuple[float | None, float | None, float]:
    """The loss of the parent and of the child on batches (B,T), and how far apart they answer.

    Losses are in nats a token, None where no next token is predicted. The distance is the KL divergence in nats a
    token; of models without logits it is the relative error of their last hidden states. Call it in eval mode.
    """
    kind = predicts(parent)  # "next" token, "masked" ones, or None: answers are then hidden states
    distance_of = divergence if kind else relative_error
    distance, losses, n_tokens, n_predicted = 0.0, [0.0, 0.0], 0, 0
    for ids in batches:
        # each (B,T,V), or (B,T,C) of hidden states
        both = answers(parent, ids), answers(child, ids)
        distance += distance_of(*both).item() * ids.numel()
        n_tokens += ids.numel()
        if kind == "next":
            # nothing comes before the first token of a document, which is not predicted
            n = ids[:, 1:].numel()
            n_predicted += n
            for i, logits in enumerate(both):
                predicted, following = (
                    logits[:, :-1].flatten(0, 1).float(),
                    ids[:, 1:].flatten().to(logits.device),
                )
                losses[i] += F.cross_entropy(predicted, following).item() * n
    parent_loss, child_loss = (total / n_predicted if kind == "next" else None for total in losses)
    return parent_loss, child_loss, distance / n_tokens


def measure(
    parent: nn.Module,
    child: nn.Module,
    held_out: Sequence[Tensor],
    pairs: HeadPairs,
    context: int | None,
    say: Callable[[str], None] = lambda line: None,
    speed: Speed | None = None,
) -> Damage:
    """Compare two models in eval mode on batches (B,T).

    pairs    the heads whose entropies are compared
    context  the longest text, for which the cache is counted; it also bounds the text whose decoding is timed
    say      hears what is being done
    speed    of a child of the same shape, where it is known already
    """
    say("measuring loss, divergence and entropies")
    with entropies(parent) as old, entropies(child) as new:
        before, after, distance = compared(parent, child, held_out)
    kind = predicts(parent)
    tokens = context or DECODE_CONTEXT
    cache = Pair(cache_bytes(parent, tokens), cache_bytes(child, tokens))
    # room is left for the tokens that are decoded
    length = max(0, min(tokens, DECODE_CONTEXT) - NEW_TOKENS)
    sizes = Pair(n_parameters(parent), n_parameters(child))
    # else two timings differ by chance alone
    smaller = cache.after != cache.before or sizes.after != sizes.before
    if speed is None and smaller and kind == "next" and length > 0:
        say("measuring decoding speed")
        speed = decode_speed(parent, child, held_out[0][:1], length)
    entropy = []
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
    means = {}

    # Each document of a call has rows["entropy"] (H,T): the mean is over the tokens of the first few.
    def note(site: Site, call: Call, documents: Sequence[Document]) -> None:
        if site.name not in means:  # the first call of this attention
            first = [
                measure_call(call, b, document, top=False)
                for b, document in enumerate(documents[:WATCHED])
            ]
            means[site.name] = (
                torch.cat([measured.rows["entropy"] for measured in first], 1).mean(1).tolist()
            )

    with listening(model, note):
        yield means


def n_parameters(model: nn.Module) -> int:  # a weight that two modules share counts once
    return sum(p.numel() for p in model.parameters())


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
    # the number of repeats is rounded up
    prompt = text.repeat(1, -(-length // text.shape[1]))[:, :length]
    readers = reader(parent), reader(child)
    for read in readers:
        read(prompt)
    speeds: tuple[list[float], list[float]] = ([], [])
    for run in range(RUNS):
        for i in (0, 1) if run % 2 else (1, 0):  # neither is always the first
            # Which token is decoded makes no difference to the time: the first one of the text.
            speeds[i].append(_run_speed(readers[i].fork(), prompt[:, :1]))
    # Whatever the distribution, fewer than 2 of 9 values lie on one side of the true median with a probability of
    # 20 / 512: the second and the last but one are bounds that hold it with a probability of 0.96.
    (low, high), (least, most) = ((side[1], side[-2]) for side in map(sorted, speeds))
    before, after = map(statistics.median, speeds)
    return Speed(
        before, after, (low, high), (least, most), RUNS, told_apart=high < least or most < low
    )


def _run_speed(decode: Callable[[Tensor], Tensor], token: Tensor) -> float:
    # `decode` takes a token (1,1) and gives the logits (V,) of the next.
    ends = [time.perf_counter()]
    for _ in range(NEW_TOKENS):
        decode(token)[0].item()  # some logit: it can be read only when the device is done
        ends.append(time.perf_counter())
    return 1 / statistics.median([end - began for began, end in pairwise(ends)][WARM_UP:])


# Healing.

Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


@dataclass(frozen=True)
class HealPoint:
    """One evaluation while a child heals, on held-out text."""

    step: int
    tokens: int  # of the text, read so far
    # what is minimised, the mean since the evaluation before; None before the first step
    train_loss: float | None
    held_out_loss: float | None  # nats per token; None where the model predicts no next token
    # KL to the parent in nats per token, or the relative error of its hidden states
    distance: float


@dataclass(eq=False)  # without ==, which of tensors is no single truth
class Healing:
    """All that changes while a child heals; `run` trains it towards its parent.

    model       the child; at the end it has the weights of its best evaluation
    train       documents (T,), drawn without repetition as long as there are fresh ones
    held_out    batches (B,T) on which the child is evaluated and its best weights chosen
    report      hears of every evaluation, and of the number of steps asked for
    silent      heads that are zero, and are made so again after each step
    """

    parent: nn.Module
    model: nn.Module
    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    recipe: HealRecipe
    report: Callable[[HealPoint, int], None] = lambda point, steps: None
    silent: Gone = ()
    curve: list[HealPoint] = field(default_factory=list)  # from before the first step on
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best evaluation
    tokens: int = 0  # read so far
    total: float = 0.0  # of the loss, since the last evaluation ...
    count: int = 0  # ... over so many steps
    stopped: bool = False  # by Ctrl-C

    def __post_init__(self) -> None:
        self.parent.eval()
        self.model.eval().requires_grad_(False)  # dropout is off; the attentions alone learn
        for module in attentions(self.model):
            module.requires_grad_(True)
        # of the attentions
        self.weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizers = make_optimizers(self.weights.values(), self.recipe)
        # steps from one evaluation to the next
        self.every = math.ceil(self.recipe.steps / self.recipe.evaluations)

    def run(self) -> Healing:
        """Heal; Ctrl-C ends it early, with the best weights so far. Raises HeadwiseError when the loss is no number."""
        with interrupts() as interrupted:
            self.evaluate(0)  # before the first step the child may be at its best
            # Batches never end; the range does.
            for done, ids in zip(
                range(1, self.recipe.steps + 1), drawn(self.train, self.recipe), strict=False
            ):
                # So many evaluations since the best one were no better.
                if (
                    len([point for point in self.curve if point.step > self.best_step])
                    >= self.recipe.patience
                ):
                    break
                self.step(done - 1, ids)
                stopping = interrupted()
                if stopping or done % self.every == 0 or done == self.recipe.steps:
                    self.evaluate(done)
                if stopping:
                    self.stopped = True
                    break
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(self.best[name])
        return self

    @property
    def steps(self) -> int:  # made up to the last evaluation, with which a healing ends
        return self.curve[-1].step

    @property
    def best_step(self) -> int:
        return min(self.curve, key=lambda point: point.distance).step

    def step(self, step: int, ids: Tensor) -> None:
        # The states of a block, one (B,T,C) a layer, are there once the model in it has answered.
        with hidden_states(self.parent) as parent_states, torch.no_grad():
            wanted = answers(self.parent, ids)
        with hidden_states(self.model) as child_states:
            loss = (divergence if predicts(self.parent) else relative_error)(
                wanted, answers(self.model, ids)
            )
        if self.recipe.hidden:
            errors = [
                relative_error(a, b) for a, b in zip(parent_states, child_states, strict=True)
            ]
            loss = loss + self.recipe.hidden * torch.stack(errors).mean()
        warmup = max(1, round(self.recipe.warmup * self.recipe.steps))
        # a fraction of lr and of vector_lr
        rate = warm_cosine(step, self.recipe.steps, warmup, final=0.0)
        try:
            value = take_step(
                loss, self.weights.values(), self.optimizers, step, rate, self.recipe.clip
            )
        except DivergedError as error:
            raise HeadwiseError(f"healing diverged: {error}; lower lr=") from None
        silence(self.model, self.silent)
        self.tokens, self.total, self.count = (
            self.tokens + ids.numel(),
            self.total + value,
            self.count + 1,
        )

    def evaluate(self, step: int) -> None:
        """Add a point to the curve; its weights are kept where it is the best."""
        _, loss, distance = compared(self.parent, self.model, self.held_out)
        mean = self.total / self.count if self.count else None
        self.curve.append(HealPoint(step, self.tokens, mean, loss, distance))
        if self.best_step == step:
            self.best = {name: p.detach().clone() for name, p in self.weights.items()}
        self.total, self.count = 0.0, 0
        self.report(self.curve[-1], self.recipe.steps)


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    if not heads:
        return
    for layer, (weights, gone) in enumerate(zip(read_layers(model), heads, strict=True)):
        write_layer(model, layer, silenced(weights, gone))


def silenced(weights: AttentionWeights, heads: Sequence[int]) -> AttentionWeights:
    """A copy of a layer in which these heads are zero."""
    # Without its columns of W_O a head adds nothing; without its rows of W_Q it looks evenly, whatever it was. Keys and
    # values stay: other heads of the group read them.
    # (H,1), True for heads that go: over bq (H,D) and wo (C,H,E) as it is, over wq (H,D,C) with one more axis.
    gone = torch.tensor(
        [head in heads for head in range(weights.n_heads)], device=weights.wq.device
    )[:, None]
    return replace(
        weights,
        wq=weights.wq.masked_fill(gone[..., None], 0),
        bq=None if weights.bq is None else weights.bq.masked_fill(gone, 0),
        wo=weights.wo.masked_fill(gone, 0),
    )


def drawn(documents: Sequence[Tensor], recipe: HealRecipe) -> Iterator[Tensor]:
    """Batches of ids (B,T) without end: an order drawn anew for each pass over the text, from the seed alone.

    Documents are shuffled, put side by side by their length, and the batches that come of it are shuffled, too.
    """
    for number in itertools.count():
        # 1,000,003 is a prime beyond any number of passes: no two seeds share the order of a pass. Below 2^63 it is a
        # seed that torch takes.
        generator = torch.Generator().manual_seed((recipe.seed * 1_000_003 + number) % 2**63)
        shuffled = [
            documents[i] for i in torch.randperm(len(documents), generator=generator).tolist()
        ]
        in_turn = batches(shuffled, recipe.batch)
        for i in torch.randperm(len(in_turn), generator=generator).tolist():
            yield in_turn[i]


def make_optimizers(
    weights: Collection[nn.Parameter], recipe: HealRecipe
) -> list[torch.optim.Optimizer]:
    """Muon on matrices, AdamW on the rest; without decay, which pulls weights to 0 and so away from the parent's."""
    matrices, others = [p for p in weights if p.ndim == 2], [p for p in weights if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=recipe.lr, weight_decay=0.0)]
    if others:  # betas as in training (`Recipe`)
        optimizers.append(AdamW(others, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0))
    return optimizers
