"""Do heads specialise by role? Known relations of the verb corpus, before and after training.

A role is defined from the position that predicts. For each the head that plays it most is taken, among the untrained
heads as well. The control "even" is a head that spreads its look evenly over all that it may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwise.gpt import verbs
from headwise.gpt.data import Corpus
from headwise.gpt.gpt import GPT
from headwise.gpt.train import evaluate
from headwise.heads.effect import ablate
from headwise.heads.maps import head_maps
from headwise.lab.compare.experiment import Arm, Experiment
from headwise.lab.compare.experiments import SHAPE, VERBS_OR_TEXT
from headwise.lab.compare.results import Metric

LINES = 60  # conjugation lines scored, besides all held-out cells
ROLES = ("previous token", "same token", "person", "translation")


def places(line: str, words: Sequence[str]) -> dict[str, list[tuple[int, list[int]]]]:
    """For each role the positions that look among the tokens of a line, and those that each would look at.

    The last two are relations of the corpus: from "=" to the English pronoun, from the Spanish pronoun to the English
    verb.
    """
    start, related = len(words) - len(line.split()), verbs.related(line)
    same = [(i, [j for j in range(i) if words[j] == words[i]]) for i in range(len(words))]
    relations = {role: [(start + i, [start + j]) for i, j in related.get(role, ())] for role in ROLES[2:]}
    previous = [(i, [i - 1]) for i in range(1, len(words))]
    return {"previous token": previous, "same token": [place for place in same if place[1]], **relations}


def role_scores(model: GPT, corpus: Corpus) -> dict[str, float]:
    """For each role its mass in the best head, the mass of an even look, and the loss that this head is worth."""
    masses, even = _masses(model, corpus)
    whole = evaluate(model, corpus.data)
    scores: dict[str, float] = {}
    for role, mass_of_heads in masses.items():
        layer, head = divmod(int(mass_of_heads.argmax()), model.config.n_heads)
        with ablate(model, [f"L{layer}.H{head}"]):
            cost = evaluate(model, corpus.data) - whole
        scores |= {role: float(mass_of_heads.max()), f"even {role}": even[role], f"silenced {role}": cost}
    return scores


def _masses(model: GPT, corpus: Corpus) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Mean masses of each role in each head (layers * heads,), and in an even look."""
    lines = [*verbs.conjugation_lines()[:LINES], *(cell.line for cell in corpus.cells)]
    masses: dict[str, list[np.ndarray]] = {role: [] for role in ROLES}
    even: dict[str, list[float]] = {role: [] for role in ROLES}
    for line in lines:
        ids = corpus.tokens.prompt(line)
        words = corpus.tokens.shown(ids)
        weights = np.stack([head.weights for head in head_maps(model, ids, words, "").maps])
        for role, pairs in places(line, words).items():
            for looks, at in pairs:
                masses[role].append(weights[:, looks, at].sum(-1))
                even[role].append(len(at) / (looks + 1))
    return (
        {role: np.mean(rows, axis=0) for role, rows in masses.items()},
        {role: float(np.mean(rows)) for role, rows in even.items()},
    )


ROLES_OF_HEADS = Experiment(
    name="roles",
    question="Do heads take roles, and does it matter when one falls silent?",
    task=replace(VERBS_OR_TEXT, text_recipe=None),
    arms=(Arm(name="untrained", shape=SHAPE, trained=False), Arm(name="trained", shape=SHAPE)),
    metrics=(
        *(Metric(role, f"mass of the role {role} in its best head", "") for role in ROLES),
        *(Metric(f"silenced {role}", f"loss added by silencing the head of {role}", "nats") for role in ROLES),
    ),
    measure=role_scores,
    notes=("The head of a role is the one that gives it most: chosen anew for each seed, untrained or trained.",),
)
