"""The model that the experiments vary: the verb preset without qk-norm.

Its qk-norm has two gains of the width of a head in each layer, so that arms with heads of another width would differ in
parameters, and it divides out most of what another scale of the scores changes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.gpt.data import Corpus, text_corpus, verb_corpus
from headwise.gpt.presets import PRESETS
from headwise.lab.compare.experiment import Task

STEPS = 800  # 12 seconds on one thread
VERBS = PRESETS["verbs"]
SHAPE: dict[str, Any] = {**VERBS.shape, "qk_norm": False}


def verbs_or_text(text: Path | None, seed: int) -> Corpus:
    """The verb corpus, split by the seed; or a text as one stream of characters, its last tenth held out."""
    if text is None:
        return verb_corpus(seed, SHAPE["context"])
    return text_corpus(text, lines=False, context=SHAPE["context"], seed=seed)


# The strong weight decay of the preset is for the verb corpus, which is small enough to be learned by heart.
VERBS_OR_TEXT = Task(
    data="the verb corpus",
    corpus=verbs_or_text,
    recipe=replace(VERBS.recipe, steps=STEPS),
    text_recipe=replace(VERBS.recipe, steps=STEPS, weight_decay=0.1),
)
