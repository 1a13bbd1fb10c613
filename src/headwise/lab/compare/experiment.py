"""What an experiment is, and how one unit of it, an arm with a seed, becomes scores.

All arms with the same seed learn from the same batches and are scored on the same held-out tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headwise import __version__
from headwise.corpus.training import Corpus
from headwise.errors import HeadwiseError
from headwise.files import read_bytes
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.train import DivergedError, evaluate, fit, one_thread
from headwise.lab.compare.results import Metric
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.words import Note

LOSS = Metric("loss", Note.of("comparison.loss"), "nats", lower_is_better=True)

Measure = Callable[[GPT, Corpus], dict[str, float]]
Report = Callable[[str, int, int], None]  # is told what happened, how many tasks are done, how many there are


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the models of an experiment learn, and how."""

    data: str  # what the built-in data is called
    corpus: Callable[[Path | None, int], Corpus]  # of a text, or None for the built-in data; and a seed
    recipe: Recipe
    text_recipe: Recipe | None = None  # the recipe on a text; None: this task takes no text


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant of the model: fields of GPTConfig, and what they cannot say as a function that builds it."""

    name: str
    shape: Mapping[str, Any]  # fields of GPTConfig, without the vocabulary
    about: str = ""
    build: Callable[[GPTConfig], GPT] = GPT
    widened: bool = False  # take the feed-forward width that comes nearest to the parameters of the first arm
    trained: bool = True


def held_out_loss(model: GPT, corpus: Corpus) -> dict[str, float]:
    return {"loss": evaluate(model, corpus.data)}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, and the arms that answer it; the others are compared with the first."""

    name: str
    question: str
    task: Task
    arms: tuple[Arm, ...]
    metrics: tuple[Metric, ...] = (LOSS,)
    measure: Measure = held_out_loss
    notes: tuple[str, ...] = ()

    def recipe(self, steps: int | None, text: Path | None) -> Recipe:
        recipe = self.task.recipe if text is None else self.task.text_recipe
        if recipe is None:
            raise HeadwiseError(f"{self.name} runs on {self.task.data} alone; leave text= out")
        if steps is not None and steps < 1:
            raise HeadwiseError(f"steps={steps} must be at least 1")
        return recipe if steps is None else replace(recipe, steps=steps)

    def config(self, arm: Arm, vocab_size: int) -> GPTConfig:
        config = GPTConfig(vocab_size=vocab_size, **arm.shape)
        if not arm.widened:
            return config
        first = self.arms[0]
        wanted = count_parameters(GPTConfig(vocab_size=vocab_size, **first.shape), first.build)
        width = config.feed_forward_width
        have, more = (count_parameters(replace(config, d_ff=w), arm.build) for w in (width, width + 1))
        return replace(config, d_ff=width + round((wanted - have) / (more - have)))


@dataclass(frozen=True)
class Unit:
    """One arm of an experiment with one seed."""

    experiment: Experiment
    arm: Arm
    seed: int
    steps: int | None  # None takes the recipe's
    text: Path | None

    @property
    def label(self) -> Note:
        return Note.of("comparison.unit", experiment=self.experiment.name, arm=self.arm.name, seed=self.seed)

    @property
    def key(self) -> dict[str, Any]:
        arm, first = self.arm, self.experiment.arms[0]
        return {
            "model": _shape_of(arm) | {"trained": arm.trained},
            "parameters_of": _shape_of(first) if arm.widened else None,
            "data": _name_of(self.experiment.task.corpus),
            "text": None if self.text is None else hashlib.sha256(read_bytes(self.text)).hexdigest(),
            "recipe": asdict(self.experiment.recipe(self.steps, self.text)),
            "measure": _name_of(self.experiment.measure),
            "seed": self.seed,
            "versions": {"headwise": __version__, "torch": torch.__version__},
        }


def _shape_of(arm: Arm) -> dict[str, Any]:
    return {"shape": dict(arm.shape), "build": _name_of(arm.build)}


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


@dataclass(frozen=True)
class Scored:
    """What one unit gave."""

    parameters: int
    scores: dict[str, float]  # empty where training diverged
    failure: str | None
    cpu_seconds: float


def run_unit(unit: Unit) -> Scored:
    """Build, train and measure one model. The same unit gives the same scores in any process, beside any others."""
    experiment, arm, seed = unit.experiment, unit.arm, unit.seed
    began = time.process_time()
    # On one thread sums are always added up in the same order. torch's random state is left as it was.
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        corpus = _corpus(experiment.task.corpus, unit.text, seed)
        model = arm.build(experiment.config(arm, len(corpus.tokens)))
        try:
            if arm.trained:
                fit(model, experiment.recipe(unit.steps, unit.text), corpus.data, seed)
            scores, failure = experiment.measure(model.eval(), corpus), None
        except DivergedError as error:
            scores, failure = {}, f"diverged with seed {seed}: {error}"
    return Scored(model.n_parameters, scores, failure, time.process_time() - began)


# Kept for the next arm, which has the same seed where units run in order.
@lru_cache(maxsize=2)
def _corpus(make: Callable[[Path | None, int], Corpus], text: Path | None, seed: int) -> Corpus:
    return make(text, seed)


def count_parameters(config: GPTConfig, build: Callable[[GPTConfig], GPT] = GPT) -> int:
    with shapes_alone():
        return build(config).n_parameters


def with_attention(config: GPTConfig, **changes: Any) -> GPT:
    """A GPT whose attention specs have these fields changed; it begins with the weights that GPT draws for both."""
    model = GPT(config)
    for block in model.blocks:
        layer = MultiHeadAttention.from_spec(config.attention.replace(**changes))
        layer.load_state_dict(block.attention.state_dict(), strict=False)  # type: ignore[union-attr]
        block.attention = layer
    return model
