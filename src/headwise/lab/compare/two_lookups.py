"""A task that needs two keys at one place: of a row of facts, one number of one and another number of another.

    b25 d03 a40 c12 f33 e01 ca? 10

Each fact is one word: a name and two numbers. The question `ca?` asks for the first number of c and the second of a.
One head of any width mixes first and second numbers of both facts; two can fetch one number each. A head's weights may
depend on the numbers too, and a wide feed-forward, which knows the question, can sort out the mix: so it has one neuron
here, and more in the last arm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from headwise.gpt.data import HELD_OUT_TOKENS, IGNORED, Batch, Corpus, Documents
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import Recipe
from headwise.gpt.tokens import Tokens
from headwise.lab.compare.experiment import LOSS, Arm, Experiment, Task, held_out_loss
from headwise.lab.compare.experiments import heads_arm
from headwise.lab.compare.results import Metric

NAMES = "abcdef"
NUMBERS = 6
TRAIN_LINES, HELD_OUT_LINES = 16_000, 1_000
CONTEXT = len(NAMES) + 3  # facts, question, answer, and the boundary before them

ACCURACY = Metric("accuracy", "share of exact answers", "")
SHAPE = {"context": CONTEXT, "n_layers": 1, "d_model": 32, "d_ff": 1}


def lines(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        numbers = {name: (rng.randrange(NUMBERS), rng.randrange(NUMBERS)) for name in NAMES}
        facts = [f"{name}{numbers[name][0]}{numbers[name][1]}" for name in rng.sample(NAMES, len(NAMES))]
        first, second = rng.sample(NAMES, 2)
        yield " ".join([*facts, f"{first}{second}?", f"{numbers[first][0]}{numbers[second][1]}"])


class Answers(Documents):
    """Lines of which the answer alone is learned and scored: the facts and questions are random."""

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        return _answers_only(super().batch(generator, size))

    def held_out_batches(self, size: int, limit: int = HELD_OUT_TOKENS) -> Iterator[Batch]:
        yield from map(_answers_only, super().held_out_batches(size, limit))


def _answers_only(batch: Batch) -> Batch:
    inputs, targets = batch
    answers = torch.full_like(targets, IGNORED)  # all lines have one length; the last target is the boundary
    answers[:, -2] = targets[:, -2]
    return inputs, answers


def lookups(text: Path | None, seed: int) -> Corpus:
    drawn = list(lines(TRAIN_LINES + HELD_OUT_LINES, seed))
    train, held_out = drawn[:TRAIN_LINES], drawn[TRAIN_LINES:]
    tokens = Tokens.words(drawn)
    return Corpus("two lookups", tokens, Answers.of_lines(tokens, train, held_out, CONTEXT), held_out[0])


@torch.no_grad()
def answers_right(model: GPT, corpus: Corpus) -> dict[str, float]:
    right = count = 0
    for inputs, targets in corpus.data.held_out_batches(256):
        scored = targets != IGNORED
        right += int((model(inputs).argmax(-1)[scored] == targets[scored]).sum())
        count += int(scored.sum())
    return {"accuracy": right / count, **held_out_loss(model, corpus)}


TWO_LOOKUPS = Experiment(
    name="two-lookups",
    question="Can one head find two things at once?",
    task=Task(
        data="two lookups",
        corpus=lookups,
        recipe=Recipe(steps=500, batch=128, lr=1e-2, muon_lr=0.02, weight_decay=0.0, warmup=50),
    ),
    arms=(
        *(heads_arm(count, SHAPE) for count in (1, 2, 4)),
        Arm(name="1 head, more neurons", about="feed-forward of 32, not 1", shape={**SHAPE, "n_heads": 1, "d_ff": 32}),
    ),
    metrics=(ACCURACY, LOSS),
    measure=answers_right,
    notes=(
        f"Chance: {1 / NUMBERS**2:.3f} for the pair of numbers, {1 / NUMBERS:.3f} where one of the two is known; "
        f"a model that knows one and guesses the other has a loss of ln {NUMBERS} = {math.log(NUMBERS):.3f} nats.",
    ),
)
