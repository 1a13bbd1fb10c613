"""The model that the experiments vary, and those of them that are a declaration and little more.

It is the verb preset without qk-norm, whose gains would give arms with heads of another width other parameters, and
which divides out most of what another scale changes. A scale enters the scores, not the initial W_Q: there it would be
the same function on the first step only, for optimizers move every weight by about the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.gpt.data import Corpus, text_corpus, verb_corpus
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.lab.compare.experiment import Arm, Experiment, Task, with_attention
from headwise.sources import Sources

STEPS = 800  # 12 seconds on one thread
VERBS = PRESETS["verbs"]
SHAPE: dict[str, Any] = {**VERBS.shape, "qk_norm": False}


def verbs_or_text(text: Path | None, seed: int) -> Corpus:
    """The verb corpus, split by the seed; or a text as one stream of characters, its last tenth held out."""
    if text is None:
        return verb_corpus(seed, SHAPE["context"], any_order=False)  # the harder task, which leaves room to differ
    return text_corpus(Sources([text]), lines=False, context=SHAPE["context"], seed=seed)


# The strong weight decay of the preset is for the verb corpus, which is small enough to be learned by heart.
VERBS_OR_TEXT = Task(
    data="the verb corpus",
    corpus=verbs_or_text,
    recipe=replace(VERBS.recipe, steps=STEPS),
    text_recipe=replace(VERBS.recipe, steps=STEPS, weight_decay=0.1),
)


def heads_arm(count: int, shape: dict[str, Any]) -> Arm:
    name = f"{count} head{'s' * (count > 1)}"
    return Arm(name=name, about=f"of width {shape['d_model'] // count}", shape={**shape, "n_heads": count})


HEADS = Experiment(
    name="heads",
    question="Do several narrow heads learn more than one wide head with as many parameters?",
    task=VERBS_OR_TEXT,
    arms=tuple(heads_arm(count, SHAPE) for count in (1, 2, 4, 8, 16)),
)


def without_output(config: GPTConfig) -> GPT:
    return with_attention(config, out_proj=False)


OUTPUT_PROJECTION = Experiment(
    name="output-projection",
    question="Does the output projection W_O earn its parameters?",
    task=VERBS_OR_TEXT,
    arms=(
        Arm(name="with W_O", shape=SHAPE),
        Arm(
            name="without W_O", about="feed-forward widened by as much", shape=SHAPE, build=without_output, widened=True
        ),
    ),
)


def by_model_width(config: GPTConfig) -> GPT:
    return with_attention(config, scale=1 / math.sqrt(config.d_model))


def unscaled(config: GPTConfig) -> GPT:
    return with_attention(config, scale=1.0)


SCALE = Experiment(
    name="scale",
    question="Does it matter by what the scores are divided?",
    task=VERBS_OR_TEXT,
    arms=(
        Arm(name="1/sqrt(head_dim)", about="0.25", shape=SHAPE),
        Arm(name="1/sqrt(d_model)", about="0.125", shape=SHAPE, build=by_model_width),
        Arm(name="none", about="1", shape=SHAPE, build=unscaled),
    ),
)
