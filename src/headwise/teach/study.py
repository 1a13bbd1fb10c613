"""What training hides: the verb model trained with each bug and without, on the experiments of `lab`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.corpus.training import Corpus
from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.train import evaluate, fit, one_thread
from headwise.intervals import Interval, interval_of
from headwise.lab.compare import compare, silent
from headwise.lab.experiments import LOSS, SHAPE, VERBS_OR_TEXT, Arm, Experiment, Report, verbs_or_text
from headwise.lab.results import Comparison, Metric
from headwise.teach.bugs import Bug, bug_named, changes_of, speaker
from headwise.teach.form import Masks, Stages, Weights, compute

# Updates of each model, half of the recipe's: all of them would double the 20 minutes that all bugs take one core.
# And the least seeds from which anything is said.
STEPS, SEEDS = 400, 3
LINE = "he will write = él escribirá"
FUTURE = Metric("future", "share of the weight on later tokens", "", lower_is_better=True)
ROWS = Metric("rows", "distance of a row's sum from 1", "", lower_is_better=True)
EVEN = Metric("even", "entropy of the weights, as a share of an even look", "")


class SwitchedAttention(nn.Module):
    """The attention of a block, computed by `form.compute` with the weights of the layer and changed settings.

    The weights have no biases, and causal is the only mask, as the preset of the verbs has it.
    """

    def __init__(self, layer: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.settings = layer, settings

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        """(B,T,C) -> (B,T,C)"""
        out: Tensor = self.stages(x).out
        return out

    def stages(self, x: Tensor) -> Stages:
        spec = self.layer.spec
        matrices = {role: getattr(self.layer, f"{role}_proj").weight.T for role in "qkvo"}
        weights = Weights(spec.n_heads, spec.n_kv_heads, matrices)
        return compute(weights, (x, x, x), Masks(causal=True), self.settings, torch)


@dataclass(frozen=True)
class Switched:
    """Builds a GPT whose attention has a bug; None is the correct form on the same arithmetic."""

    bug: str | None

    def __call__(self, config: GPTConfig) -> GPT:
        model = GPT(config)
        # Features i and i + d/2 make a pair ("half"), first for the turn, then for the table of angles: see `rotate`.
        right = {"rope": ("half", "half", config.rope_theta)}
        # A row that sees nothing would be NaN and end the training at once: it looks evenly, as with a fill of -1e9.
        # Without a softmax a forbidden score is the weight itself, so 0 forbids.
        fill = {"fill": 0.0 if self.bug == "norm-missing" else -1e9}
        # The first way of writing the bug, which is the usual one.
        change = {**fill, **next(changes_of(bug_named(self.bug), right))} if self.bug else {}
        for block in model.blocks:
            block.attention = SwitchedAttention(block.attention, {**right, **change})
        return model

    def __getattr__(self, name: str) -> Any:
        # A function or a class has this name by itself, an object of this class has not; `lab.experiments` reads it
        # of what builds an arm, so it holds the bug.
        if name == "__qualname__":  # by which a unit on the disk is known
            return f"Switched({self.bug!r})"
        raise AttributeError(name)


def _is_grouped(bug: str) -> bool:
    return "groups" in bug_named(bug).needs


def experiment(bugs: Sequence[str]) -> Experiment:
    """The verb model without a bug, and with each; the bugs of groups have a grouped model to compare with."""
    arms = [Arm(name="correct", shape=SHAPE, build=Switched(None))]
    grouped = {**SHAPE, "n_kv_heads": SHAPE["n_heads"] // 2}
    if any(map(_is_grouped, bugs)):
        arms.append(Arm(name="correct, grouped", shape=grouped, build=Switched(None)))
    arms += [Arm(name=bug, shape=grouped if _is_grouped(bug) else SHAPE, build=Switched(bug)) for bug in bugs]
    return Experiment(
        name="bugs",
        question="Which bugs does training hide?",
        task=replace(VERBS_OR_TEXT, text_recipe=None),
        arms=tuple(arms),
        metrics=(LOSS, FUTURE, ROWS, EVEN),
        measure=measured,
    )


@torch.no_grad()
def measured(model: GPT, corpus: Corpus) -> dict[str, float]:
    """The held-out loss, and three figures of the maps on one line of verbs, means over heads and rows."""
    loss, weights = evaluate(model, corpus.data), np.stack(maps(model, corpus)[0])
    T = weights.shape[-1]
    if weights.shape[-2] != T:  # a guard: every bug that is trained today has maps (T,T)
        return {"loss": loss}
    past = np.tril(np.ones((T, T), bool))
    # A bug may make weights negative, or sum to anything. Shares are positive and sum to 1, but in a row of zeros.
    size = np.abs(weights)
    shares = size / np.maximum(size.sum(-1, keepdims=True), 1e-9)
    entropy = -(shares * np.log(np.maximum(shares, 1e-12))).sum(-1) / np.log(T)  # 1 for an even look at all T keys
    return {
        "loss": loss,
        "future": float((shares * ~past).sum(-1).mean()),
        "rows": float(np.abs(weights.sum(-1) - 1).mean()),
        "even": float(entropy.mean()),
    }


@torch.no_grad()
def maps(model: GPT, corpus: Corpus) -> tuple[list[Any], list[str]]:
    """The weights of every head on a line of verbs, (T,T) each, and the words of the line."""
    ids = corpus.tokens.prompt(LINE)
    x: Any = model.token_embedding(torch.tensor([ids]))
    heads = []
    for module in model.blocks:
        block: Any = module
        heads.extend(block.attention.stages(block.attention_norm(x)).weights[0].double().numpy())
        x = block(x, None)  # without a cache
    return heads, list(corpus.tokens.shown(ids))


def trained_maps(bug: str, steps: int, seed: int = 0) -> tuple[list[Any], list[Any], list[str]]:
    """The maps of the correct model and of the one with that bug, both trained alike, and the tokens of their text."""
    unit = experiment([bug])
    drawn = []
    for arm in unit.arms[-2:]:  # the correct one that it is compared with, which may be grouped, and that of the bug
        with one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            corpus = verbs_or_text(None, seed)
            model = arm.build(unit.config(arm, len(corpus.tokens)))
            fit(model, unit.as_asked(steps, None).task.recipe, corpus.data, seed)  # None: no text but the verbs
            of_heads, tokens = maps(model.eval(), corpus)
            drawn.append(of_heads)
    right, wrong = drawn
    return right, wrong, tokens


@dataclass(frozen=True)
class Shown:
    """One bug beside the correct model. None stands where the bug is not trained, or training fails.

    loss, correct  held-out losses in nats a token, with the bug and without; their difference is taken seed by seed
    """

    bug: str
    loss: Interval | None  # None where it cannot be trained here
    correct: Interval | None
    difference: Interval | None
    betrayed: bool | None  # by the loss
    sentence: str


def study(
    bugs: Sequence[str],
    out: Path,
    seeds: int = SEEDS,
    steps: int = STEPS,
    workers: int = 1,
    report: Report = silent,
    lang: str = "en",
) -> tuple[Comparison | None, tuple[Shown, ...]]:
    """Train with each bug and without; what is finished in the folder `out` is not trained again.

    seeds, steps  of each arm: SEEDS seeds or more, else HeadwiseError; updates of the weights
    workers       processes side by side

    Returns the comparison, None where no bug of these can be trained; and what is said of each.
    """
    if seeds < SEEDS:
        raise HeadwiseError(f"seeds={seeds} is too few to tell a bug from chance; pass {SEEDS} or more")
    trained = [bug for bug in bugs if not bug_named(bug).untrained]
    # None: the verbs, no other text. One experiment is asked for, and one comparison comes back.
    comparison = compare([experiment(trained)], out, seeds, steps, None, workers, report)[0] if trained else None
    return comparison, tuple(shown(bug_named(bug), comparison, lang) for bug in bugs)


def shown(bug: Bug, comparison: Comparison | None, lang: str = "en") -> Shown:
    """The verdict on one bug, in words.

    The rule: the loss betrays a bug if training fails, or if every seed's loss is more than twice or less than half
    that of the correct model with the same seed. Whatever is less, nobody sees without the correct curve beside it.
    """
    say = speaker(lang)
    if bug.untrained or comparison is None:
        return Shown(bug.id, None, None, None, None, say("untrained", why=say(f"lacks_{bug.untrained}")))
    arm = comparison.arm(bug.id)
    right = comparison.arm("correct, grouped" if _is_grouped(bug.id) else "correct").scores
    if arm.failure is not None:
        return Shown(bug.id, None, right["loss"].mean, None, True, say("fails", failure=arm.failure))
    pairs = list(zip(arm.scores["loss"].values, right["loss"].values, strict=True))
    betrayed = all(a > 2 * b for a, b in pairs) or all(a < b / 2 for a, b in pairs)
    difference = interval_of([a - b for a, b in pairs])
    # Of each metric the mean over seeds: the middle of the interval in which it lies.
    wrong_means, right_means = ({name: s.mean.mean for name, s in x.items()} for x in (arm.scores, right))
    differing = []
    # The least difference of which something is said: 2 % of a row's weight, a tenth of an even look. Round choices.
    for metric, least in ((FUTURE, 0.02), (ROWS, 0.02), (EVEN, 0.1)):
        if metric.name in wrong_means:  # else there were no maps (T,T)
            a, b = wrong_means[metric.name], right_means[metric.name]
            if abs(a - b) > least:
                differing.append(say("against", what=say(f"of_{metric.name}"), wrong=a, right=b))
    losses = {"wrong": wrong_means["loss"], "right": right_means["loss"], "seeds": len(pairs)}
    key = "betrayed" if betrayed else "hidden"
    text = say(key, difference=difference.mean, width=difference.half_width, **losses)
    if differing:
        text += say("maps_too" if betrayed else "maps_show", maps=", ".join(differing))
    elif not betrayed:
        text += say("maps_sound")
    return Shown(bug.id, arm.scores["loss"].mean, right["loss"].mean, difference, betrayed, text)
