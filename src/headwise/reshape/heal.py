"""Healing: the child learns to answer as its parent does, on the user's text.

First each W_O may be fitted in closed form (`refit`). Then, by gradients, the loss is KL(parent || child) of the
predictions, and with `hidden` also the error of the residual stream after each layer, relative to its size. A step is a
pure function of the weights, the moments and (seed, step), as in training: what a stopped healing needs is one file,
which is replaced in one move, and a healing killed at any moment and resumed ends with the same bytes as one left
alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.presets import warm_cosine
from headwise.gpt.state import interrupts, restore_state, save_state
from headwise.gpt.train import DivergedError, Stopped, take_step
from headwise.models.ask import answers, hidden_states, predicts
from headwise.models.weights import attentions
from headwise.reshape.damage import compared, divergence, relative_error
from headwise.reshape.recipe import HealRecipe
from headwise.reshape.refit import refit
from headwise.reshape.report import HealPoint
from headwise.reshape.text import batches, spread
from headwise.reshape.workplace import STATE


@dataclass(frozen=True)
class Healed:
    """A healed child, in eval mode, with the weights of its best evaluation."""

    model: nn.Module
    curve: tuple[HealPoint, ...]  # from before the first step on
    steps: int  # made; fewer than asked for where it stopped early
    best_step: int


def heal(
    parent: nn.Module,
    child: nn.Module,
    train: Sequence[Tensor],
    held_out: Sequence[Tensor],
    recipe: HealRecipe,
    folder: Path | None = None,
    report: Callable[[HealPoint, int], None] = lambda point, steps: None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    save_seconds: float = 10.0,
) -> Healed:
    """Train `child` towards `parent` on documents, going on from the state in `folder` if there is one.

    train       documents (T,), drawn without repetition as long as there are fresh ones
    held_out    batches (B,T) on which the child is evaluated and its best weights chosen
    report      hears of every evaluation, and of the number of steps asked for
    after_step  called after each step, to put back what must not change, such as heads that are zero

    Dropout is off. Raises Stopped after Ctrl-C, with the state saved; HeadwiseError when the loss is no number.
    """
    work = Healing(parent.eval(), child.eval(), train, held_out, recipe, folder, after_step, save_seconds)
    start = work.restore()
    with interrupts() as interrupted:
        if not work.curve:
            report(work.evaluate(0), recipe.steps)
            if recipe.refit:
                work.refit()
                report(work.evaluate(0), recipe.steps)
            work.keep(0, interrupted())
        for step in range(start, recipe.steps):
            if work.stale():
                break
            work.step(step)
            done = step + 1
            if done % work.every == 0 or done == recipe.steps:
                report(work.evaluate(done), recipe.steps)
            work.keep(done, interrupted())
    work.save(work.curve[-1].step)
    return work.result()


@dataclass(eq=False)
class Healing:
    """All that changes while a child heals; the arguments are those of `heal`."""

    parent: nn.Module
    child: nn.Module
    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    recipe: HealRecipe
    folder: Path | None = None
    after_step: Callable[[nn.Module], None] = lambda model: None
    save_seconds: float = 10.0
    curve: list[HealPoint] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best evaluation
    order: list[Tensor] = field(default_factory=list)  # batches of this pass over the text
    passes: int = -1  # number of this pass
    tokens: int = 0  # read so far
    total: float = 0.0  # of the loss, since the last evaluation ...
    count: int = 0  # ... over so many steps

    def __post_init__(self) -> None:
        self.due = time.monotonic() + self.save_seconds
        learning = {id(p) for module in attentions(self.child) for p in module.parameters()}
        for parameter in self.child.parameters():
            parameter.requires_grad_(id(parameter) in learning)
        self.weights = {name: p for name, p in self.child.named_parameters() if p.requires_grad}
        self.optimizers = make_optimizers(self.weights.values(), self.recipe)
        self.every = max(1, -(-self.recipe.steps // self.recipe.evaluations))

    def refit(self) -> None:
        """Fit each W_O in closed form."""
        documents = spread(self.train, self.recipe.refit)
        refit(self.parent, self.child, batches(documents))
        self.after_step(self.child)
        self.tokens += sum(map(len, documents))

    def step(self, step: int) -> None:
        """One update of the child."""
        ids = self.batch(step)
        with hidden_states(self.parent) as parent_states, torch.no_grad():
            wanted = answers(self.parent, ids)
        with hidden_states(self.child) as child_states:
            loss = (divergence if predicts(self.parent) else relative_error)(wanted, answers(self.child, ids))
        if self.recipe.hidden:
            errors = [relative_error(a, b) for a, b in zip(parent_states, child_states, strict=True)]
            loss = loss + self.recipe.hidden * torch.stack(errors).mean()
        warmup = max(1, round(self.recipe.warmup * self.recipe.steps))
        rate = warm_cosine(step, self.recipe.steps, warmup, final=0.0)
        try:
            value = take_step(loss, self.weights.values(), self.optimizers, step, rate, self.recipe.clip)
        except DivergedError as error:
            raise HeadwiseError(f"healing diverged: {error}; lower --lr") from None
        with torch.no_grad():
            self.after_step(self.child)
        self.tokens, self.total, self.count = self.tokens + ids.numel(), self.total + value, self.count + 1

    def batch(self, step: int) -> Tensor:
        """The documents of a step, ids (B,T): an order drawn anew for each pass over the text, from the seed alone."""
        per_pass = len(self.order) or len(batches(self.train, self.recipe.batch))
        number, place = divmod(step, per_pass)
        if self.passes != number:
            generator = torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + number) % 2**63)
            shuffled = [self.train[i] for i in torch.randperm(len(self.train), generator=generator).tolist()]
            in_turn = batches(shuffled, self.recipe.batch)
            self.order = [in_turn[i] for i in torch.randperm(len(in_turn), generator=generator).tolist()]
            self.passes = number
        return self.order[place]

    def evaluate(self, step: int) -> HealPoint:
        """A point of the curve; its weights are kept where it is the best."""
        _, loss, distance = compared(self.parent, self.child, self.held_out)
        mean = self.total / self.count if self.count else None
        point = HealPoint(step, self.tokens, mean, loss, distance)
        if not self.curve or distance < min(p.distance for p in self.curve):
            self.best = {name: p.detach().clone() for name, p in self.weights.items()}
        self.curve.append(point)
        self.total, self.count = 0.0, 0
        return point

    def best_step(self) -> int:
        return min(self.curve, key=lambda point: point.distance).step

    def stale(self) -> bool:
        """Has it not become better for too long?"""
        return len([point for point in self.curve if point.step > self.best_step()]) >= self.recipe.patience

    def result(self) -> Healed:
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(self.best[name])
        return Healed(self.child.eval(), tuple(self.curve), self.curve[-1].step, self.best_step())

    def keep(self, step: int, stopping: bool) -> None:
        """Save the state where it is time to, or where the healing is to stop: then it does, by Stopped."""
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
        """Take up the state in the folder, if there is one; returns the steps that it has made."""
        if self.folder is None:
            return 0
        done, kept = restore_state(self.folder / STATE, self.weights, self.optimizers)
        if kept:
            rows = kept["curve"].tolist()
            self.curve = [
                HealPoint(int(step), int(tokens), _number(mean), _number(loss), distance)
                for step, tokens, mean, loss, distance in rows
            ]
            tokens, self.total, count = kept["sums"].tolist()
            self.tokens, self.count = int(tokens), int(count)
            self.best = {name.removeprefix("best."): x for name, x in kept.items() if name.startswith("best.")}
        return done


def _number(saved: float) -> float | None:
    """A tensor has no place for None: NaN stands for it."""
    return None if math.isnan(saved) else saved


def make_optimizers(weights: Iterable[nn.Parameter], recipe: HealRecipe) -> list[torch.optim.Optimizer]:
    """Muon on matrices, AdamW on the rest. Nothing decays."""
    chosen = list(weights)
    matrices, others = [p for p in chosen if p.ndim == 2], [p for p in chosen if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.0)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
