"""Damage, what reshaping costs and wins; and healing: the child learns to answer as its parent does, on a text.

Damage is how far a child's answers are from its parent's, and how fast it gives them. The loss of a healing is
KL(parent || child) of the predictions, and with `hidden` also the error of the residual stream after each layer,
relative to its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.corpus import documents as corpus
from headwise.cost import price
from headwise.errors import HeadwiseError
from headwise.gpt.presets import warm_cosine
from headwise.gpt.train import AdamW, Muon, interrupts, take_step
from headwise.models.ask import answers, config_fields, hidden_states, predicts
from headwise.models.weights import attentions, cast, own_layers, read_layers

# For each layer the numbers of the heads that go.
Gone = tuple[tuple[int, ...], ...]
# tokens of a text, for which a cache is counted where the model sets no longest one
LENGTH = 2048


@dataclass(frozen=True)
class Pair:
    """A number of the parent and that of its child."""

    before: float
    after: float

    @property
    def counts(self) -> tuple[str, str, str]:
        """Before, after and factor, as text."""
        # no factor leads from 0
        factor = f"x {self.after / self.before:.2f}" if self.before else ""
        return f"{self.before:,.0f}", f"{self.after:,.0f}", factor


@dataclass(frozen=True)
class Damage:
    """What a reshaped model has lost and won against its parent, on held-out text."""

    loss: Pair | None  # nats per token; None where the model predicts no next token
    kl: float  # KL(parent || child), nats per token
    # a token of a text of `context`, all layers, in the number format in which the model is stored
    cache_bytes: Pair
    parameters: Pair
    context: int  # the longest text

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, before, after and change of each number, as text; what was not measured is no row."""
        rows = [
            ("KL to the parent, nats per token", "", f"{self.kl:.4f}", ""),
            ("cache, bytes per token", *self.cache_bytes.counts),
            ("parameters", *self.parameters.counts),
        ]
        if self.loss:
            before = self.loss.before
            after = self.loss.after
            figures = f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"
            rows.insert(0, ("loss, nats per token", *figures))
        return rows


def batches(
    documents: Sequence[Tensor], most: int | None = None, size: int | None = None
) -> list[Tensor]:
    """Documents of equal length side by side, (B,T), the longest first: `size` of them, or up to `most` tokens."""
    return list(corpus.batches(sorted(documents, key=len, reverse=True), most, size))


def divergence(parent: Tensor, child: Tensor) -> Tensor:
    """KL(parent || child) in nats, a mean over the distributions of logits (...,V) (Hinton et al. 2015, 1503.02531)."""
    log_p, log_q = (
        F.log_softmax(logits.flatten(0, -2).float(), -1) for logits in (parent, child)
    )
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


@torch.no_grad()
def compared(
    parent: nn.Module, child: nn.Module, batches: Sequence[Tensor]
) -> tuple[Pair | None, float]:
    """The losses of parent and child on batches (B,T), and KL(parent || child); all in nats a token, both in eval mode.

    Losses are None where no next token is predicted.
    """
    is_next = predicts(parent) == "next"
    distance = 0.0
    losses = [0.0, 0.0]
    n_tokens = 0
    n_predicted = 0
    for ids in batches:
        both = answers(parent, ids), answers(child, ids)  # (B,T,V) each
        distance += divergence(*both).item() * ids.numel()
        following = ids[:, 1:].flatten()
        n_tokens = n_tokens + ids.numel()
        n_predicted = n_predicted + len(following)
        for i, logits in enumerate(both if is_next else ()):
            predicted = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(predicted, following.to(logits.device))
            losses[i] += loss.item() * len(following)
    before, after = (loss / n_predicted for loss in losses)
    return Pair(before, after) if is_next else None, distance / n_tokens


def measure(
    parent: nn.Module,
    child: nn.Module,
    held_out: Sequence[Tensor],
    context: int | None,
    dtype: torch.dtype | None = None,
) -> Damage:
    """Compare two models in eval mode on batches (B,T).

    context  the longest text, for which the cache is counted
    dtype    in which the models are stored, which sizes their caches; None: in which they compute
    """
    loss, kl = compared(parent, child, held_out)
    both = (parent, child)
    tokens = context or LENGTH
    return Damage(
        loss=loss,
        kl=kl,
        cache_bytes=Pair(*(cache_bytes(model, tokens, dtype) for model in both)),
        # a weight that two modules share counts once
        parameters=Pair(*(sum(p.numel() for p in m.parameters()) for m in both)),
        context=tokens,
    )


def cache_bytes(
    model: nn.Module, tokens: int = 1, dtype: torch.dtype | None = None
) -> float:
    """Bytes of cache a token, of a text of that many; 0 where none is kept. dtype: None takes that of the weights."""
    dtype = dtype or next(model.parameters()).dtype
    name = str(dtype).removeprefix("torch.")
    config = model if own_layers(model) else config_fields(model)
    return price(config, context=tokens, dtype=name).cache.text_bytes / tokens


# Healing.


@dataclass(frozen=True, kw_only=True)
class HealRecipe:
    """How a child is healed: its attention learns, all else stays the parent's. The rates are peaks of one schedule.

    `lr` and `hidden` were tried on 8 key/value heads shared as 2: rates of 0.012 to 0.02 healed alike, 0.03 worse;
    `hidden` of 10 and of 100 worse than 30 (LOG.md, sharing heads 4:1). The other defaults are usual or round.
    """

    steps: int
    batch: int = 4  # documents a step
    lr: float = 0.015  # Muon, on matrices (Jordan et al. 2024)
    vector_lr: float = 1e-3  # AdamW, on biases and gains
    hidden: float = 30.0  # weight of the hidden states' error beside the divergence
    warmup: float = 0.05  # fraction of the steps
    evaluations: int = 10  # while it heals, beside the one before the first step
    patience: int = 5  # evaluations without a better one before it stops
    clip: float = 1.0  # largest norm of all gradients together
    seed: int = 0  # of the order of the documents

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise HeadwiseError(f"heal={self.steps} must be at least 1")


@dataclass(frozen=True)
class HealPoint:
    """One evaluation while a child heals, on held-out text."""

    step: int
    tokens: int  # of the text, read so far
    # nats per token; None where the model predicts no next token
    held_out_loss: float | None
    distance: float  # KL to the parent in nats per token


@dataclass(frozen=True)
class Healing:
    """How a healing went."""

    curve: tuple[HealPoint, ...]  # from before the first step on
    stopped: bool  # by Ctrl-C

    @property
    def best_step(self) -> int:
        return min(self.curve, key=lambda point: point.distance).step


def heal_child(
    parent: nn.Module,
    child: nn.Module,
    train: Sequence[Tensor],
    held_out: Sequence[Tensor],
    recipe: HealRecipe,
    report: Callable[[HealPoint], None] = lambda point: None,
    silent: Gone = (),
) -> Healing:
    """Train the child in place to answer as its parent; it ends with the weights of its best evaluation.

    It learns in float32, and goes back to the number format of its weights afterwards. Ctrl-C ends it early. Raises
    HeadwiseError when the loss is no number.

    Args:
        parent: it is left alone
        child: its attentions learn
        train: documents (T,), drawn without repetition as long as there are fresh ones
        held_out: batches (B,T) on which the child is evaluated and its best weights chosen
        recipe: steps, rates, seed
        report: hears of every evaluation
        silent: heads that are zero, and are made so again after each step
    """
    parent.eval()
    dtype = next(child.parameters()).dtype
    cast(child, torch.float32).eval().requires_grad_(False)  # dropout is off
    for module in attentions(child):
        module.requires_grad_(True)
    weights = {name: p for name, p in child.named_parameters() if p.requires_grad}
    optimizers = make_optimizers(weights.values(), recipe)
    every = math.ceil(recipe.steps / recipe.evaluations)
    warmup = max(1, round(recipe.warmup * recipe.steps))
    curve: list[HealPoint] = []
    kept: dict[str, Tensor] = {}
    best = tokens = 0  # the number of the best evaluation; tokens read so far
    stopping = False
    with interrupts() as interrupted:
        for done, ids in enumerate(drawn(train, recipe)):
            stopping |= done == recipe.steps
            # Before the first step, too: the child may then be at its best.
            if stopping or done % every == 0:
                pair, distance = compared(parent, child, held_out)
                held_out_loss = pair.after if pair else None
                curve.append(HealPoint(done, tokens, held_out_loss, distance))
                report(curve[-1])
                if distance < curve[best].distance or not kept:  # NaN is never the best
                    best = len(curve) - 1
                    kept = {name: p.detach().clone() for name, p in weights.items()}
                if stopping or len(curve) - 1 - best >= recipe.patience:
                    break
            loss = distillation_loss(parent, child, ids, recipe.hidden)
            rate = warm_cosine(done, recipe.steps, warmup, final=0.0)
            take_step(loss, weights.values(), optimizers, done, rate, recipe.clip)
            silence(child, silent)
            tokens += ids.numel()
            stopping = interrupted()
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(kept[name])
    cast(child.requires_grad_(False), dtype)
    return Healing(tuple(curve), stopping and curve[-1].step < recipe.steps)


def distillation_loss(
    parent: nn.Module, child: nn.Module, ids: Tensor, hidden: float
) -> Tensor:
    """How far the child is from its parent on ids (B,T); `hidden` weighs the states after each layer."""
    # The states of a block, one (B,T,C) a layer, are there once the model in it has answered.
    with hidden_states(parent) as parent_states, torch.no_grad():
        wanted = answers(parent, ids)
    with hidden_states(child) as child_states:
        loss = divergence(wanted, answers(child, ids))
    if not hidden:
        return loss
    errors = []  # mean squares of the difference over those of the parent
    for x, y in zip(parent_states, child_states, strict=True):
        # 1e-30 keeps a parent of zeros from 0 / 0
        size = x.float().square().mean().clamp(min=1e-30)
        errors.append((y - x).float().square().mean() / size)
    return loss + hidden * torch.stack(errors).mean()


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    # Without its columns of W_O a head adds nothing; without its rows of W_Q it looks evenly, whatever it was. Keys and
    # values stay: other heads of the group read them.
    for weights, gone in zip(read_layers(model), map(list, heads), strict=False):
        weights.wq[gone] = 0
        weights.wo[:, gone] = 0
        if weights.bq is not None:
            weights.bq[gone] = 0


def drawn(documents: Sequence[Tensor], recipe: HealRecipe) -> Iterator[Tensor]:
    """Batches of ids (B,T) without end: an order drawn anew for each pass over the text, from the seed alone.

    Documents are shuffled, put side by side by their length, and the batches that come of it are shuffled, too.
    """
    for number in itertools.count():
        # 1,000,003 is a prime beyond any number of passes: no two seeds share the order of a pass. Below 2^63 it is a
        # seed that torch takes.
        generator = torch.Generator().manual_seed(
            (recipe.seed * 1_000_003 + number) % 2**63
        )
        order = torch.randperm(len(documents), generator=generator)
        in_turn = batches([documents[i] for i in order], size=recipe.batch)
        for i in torch.randperm(len(in_turn), generator=generator):
            yield in_turn[i]


def make_optimizers(
    weights: Collection[nn.Parameter], recipe: HealRecipe
) -> list[torch.optim.Optimizer]:
    """Muon on matrices, AdamW on the rest; without decay, which pulls weights to 0 and so away from the parent's."""
    matrices = [p for p in weights if p.ndim == 2]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=recipe.lr, weight_decay=0.0)
    ]
    if others := [p for p in weights if p.ndim != 2]:
        # betas as in training (`Recipe`)
        betas = (0.9, 0.95)
        optimizers.append(AdamW(others, recipe.vector_lr, betas, weight_decay=0.0))
    return optimizers
