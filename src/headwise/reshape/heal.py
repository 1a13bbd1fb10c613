"""Healing: the child learns to answer as its parent does, on the user's text.

The loss is KL(parent || child) of the predictions, and with `hidden` also the error of the residual stream after each
layer, relative to its size. A step is a pure function of the weights, the moments and (seed, step): a healing killed at
any moment and resumed ends with the same bytes as one left alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.presets import warm_cosine
from headwise.gpt.train import (
    DivergedError,
    Stopped,
    interrupts,
    restore_state,
    save_state,
    take_step,
    without_compiler,
)
from headwise.models.ask import answers, hidden_states, predicts
from headwise.models.weights import AttentionWeights, attentions, read_layers, write_layer
from headwise.reshape.arguments import HealRecipe
from headwise.reshape.damage import compared, divergence, relative_error
from headwise.reshape.text import batches
from headwise.reshape.workplace import STATE

Gone = tuple[tuple[int, ...], ...]  # for each layer the numbers of the query heads that go


@dataclass(frozen=True)
class HealPoint:
    """One evaluation while a child heals, on held-out text."""

    step: int
    tokens: int  # of the text, read so far
    train_loss: float | None  # what is minimised, the mean since the evaluation before; None before the first step
    held_out_loss: float | None  # nats per token; None where the model predicts no next token
    distance: float  # KL to the parent in nats per token, or the relative error of its hidden states


@dataclass(eq=False)
class Healing:
    """All that changes while a child heals; `run` trains it towards its parent.

    model       the child; at the end it has the weights of its best evaluation
    train       documents (T,), drawn without repetition as long as there are fresh ones
    held_out    batches (B,T) on which the child is evaluated and its best weights chosen
    folder      of the state, which is gone on from if there is one
    report      hears of every evaluation, and of the number of steps asked for
    silent      heads that are zero, and are made so again after each step
    """

    parent: nn.Module
    model: nn.Module
    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    recipe: HealRecipe
    folder: Path | None = None
    report: Callable[[HealPoint, int], None] = lambda point, steps: None
    silent: Gone = ()
    save_seconds: float = 10.0
    curve: list[HealPoint] = field(default_factory=list)  # from before the first step on
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best evaluation
    order: list[Tensor] = field(default_factory=list)  # batches of this pass over the text
    passes: int = -1  # number of this pass
    tokens: int = 0  # read so far
    total: float = 0.0  # of the loss, since the last evaluation ...
    count: int = 0  # ... over so many steps

    def __post_init__(self) -> None:
        self.parent.eval()
        self.model.eval()  # dropout is off
        self.due = time.monotonic() + self.save_seconds
        learning = {id(p) for module in attentions(self.model) for p in module.parameters()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in learning)
        self.weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizers = make_optimizers(self.weights.values(), self.recipe)
        self.every = max(1, -(-self.recipe.steps // self.recipe.evaluations))

    def run(self) -> Healing:
        """Heal. Raises Stopped after Ctrl-C, with the state saved; HeadwiseError when the loss is no number."""
        start = self.restore()
        with interrupts() as interrupted:
            if not self.curve:
                self.evaluate(0)
                self.keep(0, interrupted())
            for step in range(start, self.recipe.steps):
                if len([point for point in self.curve if point.step > self.best_step]) >= self.recipe.patience:
                    break
                self.step(step)
                done = step + 1
                if done % self.every == 0 or done == self.recipe.steps:
                    self.evaluate(done)
                self.keep(done, interrupted())
        self.save(self.steps)
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(self.best[name])
        return self

    @property
    def steps(self) -> int:
        return self.curve[-1].step

    @property
    def best_step(self) -> int:
        return min(self.curve, key=lambda point: point.distance).step

    def step(self, step: int) -> None:
        ids = self.batch(step)
        with hidden_states(self.parent) as parent_states, torch.no_grad():
            wanted = answers(self.parent, ids)
        with hidden_states(self.model) as child_states:
            loss = (divergence if predicts(self.parent) else relative_error)(wanted, answers(self.model, ids))
        if self.recipe.hidden:
            errors = [relative_error(a, b) for a, b in zip(parent_states, child_states, strict=True)]
            loss = loss + self.recipe.hidden * torch.stack(errors).mean()
        warmup = max(1, round(self.recipe.warmup * self.recipe.steps))
        rate = warm_cosine(step, self.recipe.steps, warmup, final=0.0)
        try:
            value = take_step(loss, self.weights.values(), self.optimizers, step, rate, self.recipe.clip)
        except DivergedError as error:
            raise HeadwiseError(f"healing diverged: {error}; lower lr=") from None
        silence(self.model, self.silent)
        self.tokens, self.total, self.count = self.tokens + ids.numel(), self.total + value, self.count + 1

    def batch(self, step: int) -> Tensor:
        """The documents of a step, ids (B,T): an order drawn anew for each pass over the text, from the seed alone."""
        per_pass = len(self.order) or len(batches(self.train, self.recipe.batch))
        number, place = divmod(step, per_pass)
        if self.passes != number:
            # A prime beyond any number of passes: no two seeds share the order of a pass.
            generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + number) % 2**63)
            shuffled = [self.train[i] for i in torch.randperm(len(self.train), generator=generator).tolist()]
            in_turn = batches(shuffled, self.recipe.batch)
            self.order = [in_turn[i] for i in torch.randperm(len(in_turn), generator=generator).tolist()]
            self.passes = number
        return self.order[place]

    def evaluate(self, step: int) -> None:
        """Add a point to the curve; its weights are kept where it is the best."""
        _, loss, distance = compared(self.parent, self.model, self.held_out)
        mean = self.total / self.count if self.count else None
        if not self.curve or distance < min(point.distance for point in self.curve):
            self.best = {name: p.detach().clone() for name, p in self.weights.items()}
        self.curve.append(HealPoint(step, self.tokens, mean, loss, distance))
        self.total, self.count = 0.0, 0
        self.report(self.curve[-1], self.recipe.steps)

    def keep(self, step: int, stopping: bool) -> None:
        """Save the state where it is time to, or where the healing is to stop, by Stopped."""
        if stopping or time.monotonic() > self.due:
            began = time.monotonic()
            self.save(step)
            ended = time.monotonic()
            self.due = ended + max(self.save_seconds, 9 * (ended - began))  # a tenth of the time at most
        if stopping:
            raise Stopped(step)

    def save(self, step: int) -> None:
        if self.folder is None:
            return
        rows = [[math.nan if x is None else x for x in vars(point).values()] for point in self.curve]
        kept = {f"best.{name}": tensor for name, tensor in self.best.items()}
        kept["curve"] = torch.tensor(rows, dtype=torch.float64)
        kept["sums"] = torch.tensor([self.tokens, self.total, self.count], dtype=torch.float64)
        save_state(self.folder / STATE, self.weights, self.optimizers, step, kept)

    def restore(self) -> int:
        """Take up the state in the folder; returns the steps that it has made."""
        if self.folder is None:
            return 0
        done, kept = restore_state(self.folder / STATE, self.weights, self.optimizers)
        if kept:
            for step, tokens, *numbers, distance in kept["curve"].tolist():
                mean, loss = (None if math.isnan(x) else x for x in numbers)  # a tensor has no place for None
                self.curve.append(HealPoint(int(step), int(tokens), mean, loss, distance))
            tokens, self.total, count = kept["sums"].tolist()
            self.tokens, self.count = int(tokens), int(count)
            self.best = {name.removeprefix("best."): x for name, x in kept.items() if name.startswith("best.")}
        return done


@torch.no_grad()
def silence(model: nn.Module, heads: Gone) -> None:
    """Make heads zero in place: their rows of W_Q, with the bias, and their columns of W_O."""
    if not heads:
        return
    for layer, (weights, gone) in enumerate(zip(read_layers(model), heads, strict=True)):
        write_layer(model, layer, silenced(weights, gone))


def silenced(weights: AttentionWeights, heads: Sequence[int]) -> AttentionWeights:
    """A copy of a layer in which these heads are zero."""
    wq, bq, wo = (None if x is None else x.detach().clone() for x in (weights.wq, weights.bq, weights.wo))
    assert wq is not None and wo is not None
    for rows in (wq, bq, wo.transpose(0, 1)):
        if rows is not None and heads:
            rows[list(heads)] = 0
    return replace(weights, wq=wq, bq=bq, wo=wo)


def make_optimizers(weights: Collection[nn.Parameter], recipe: HealRecipe) -> list[torch.optim.Optimizer]:
    """Muon on matrices, AdamW on the rest, without decay."""
    matrices, others = [p for p in weights if p.ndim == 2], [p for p in weights if p.ndim != 2]
    muon, adamw = without_compiler(torch.optim.Muon), without_compiler(torch.optim.AdamW)
    optimizers: list[torch.optim.Optimizer] = [muon(matrices, lr=recipe.lr, weight_decay=0.0)]
    if others:
        optimizers.append(adamw(others, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
