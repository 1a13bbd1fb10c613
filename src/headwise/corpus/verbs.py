"""The built-in verb corpus: 40 verbs, 6 tenses, all persons, in English and Spanish.

Two kinds of line, both made of words separated by single spaces:

    he works = él trabaja                           a bilingual cell: 40 x 6 x 6 = 1,440 of them
    yo trabajo , tú trabajas , él trabaja           one verb in one tense, three persons of one language: 1,200 of them

For training the persons of a conjugation line stand in any order (`clause_orders`). `usted`, `ellas` and `ustedes`
stand in these alone, so that `you work =` has one answer.
The relations inside a line are known, so the heads that serve them can be looked for: which words decide a Spanish
pronoun (person), a Spanish form (translation, tense), and the next form of a conjugation line (earlier verb).
Four spellings are words of both languages, `he`, `has`, `come`, `comes`: only the rest of the line tells them apart.

The core, the first 20 verbs with I, you, he, is a small corpus inside it, for what trains many models or slow ones. Its
words are among those of the whole.

The words, and how each tense is made of them, stand in verbs.toml.
The past is the Spanish pretérito indefinido.
"""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

from headwise.words import Note, key_of

_DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("verbs.toml").read_text(encoding="utf-8")
)
NAME = Note.of("source.verb_corpus")
# Notes beside a loss of whole lines, or of their Spanish halves: how it differs from the held-out loss of a run.
WHOLE_LINES, HALF_LINES = Note.of("note.whole_lines"), Note.of("note.half_lines")
# Name of a relation -> what it is, in a line.
RELATIONS: dict[str, str] = {
    name: Note.of(key_of("job", name)) for name in _DATA["relations"]
}

# language -> pronoun -> which of a tense's forms it takes
_PRONOUNS: dict[str, dict[str, int]] = _DATA["pronouns"]
PERSONS = tuple(_PRONOUNS["english"])
TENSES = ("present", "past", "future", "conditional", "progressive", "perfect")

VERBS = tuple(_DATA["verbs"])
CORE_VERBS, CORE_PERSONS = 20, 3
# Cells, of the core as of the whole: of 6 tenses x 6 persons one each, of the core's 6 x 3 two each.
HELD_OUT = 36


@dataclass(frozen=True)
class Cell:
    """One verb in one tense and person: `Cell("work", "present", "he").line == "he works = él trabaja"`."""

    verb: str
    tense: str
    person: str

    @property
    def english(self) -> str:
        return _clause("english", self.person, self.tense, self.verb)

    @property
    def spanish(self) -> str:
        # the first six stand as the English ones do
        pronoun = list(_PRONOUNS["spanish"])[PERSONS.index(self.person)]
        return _clause("spanish", pronoun, self.tense, self.verb)

    @property
    def line(self) -> str:
        return f"{self.english} = {self.spanish}"


def _clause(language: str, pronoun: str, tense: str, verb: str) -> str:
    """Pronoun and form, such as "he will work": words of the verb fill in the pattern of the tense, "will {0}"."""
    forms = _DATA["tenses"][tense][language].split(" / ")
    form: str = forms[_PRONOUNS[language][pronoun]]
    return f"{pronoun} {form.format(*_DATA['verbs'][verb][language].split())}"


@dataclass(frozen=True)
class VerbCorpus:
    """Training lines, and the cells whose bilingual lines are kept out of them."""

    train_lines: tuple[str, ...]
    held_out_cells: tuple[Cell, ...]

    @property
    def held_out_lines(self) -> tuple[str, ...]:
        return tuple(cell.line for cell in self.held_out_cells)


def cells(core: bool = False) -> tuple[Cell, ...]:
    """All 1,440 cells, or with `core` its 360: verb by verb, in each verb tense by tense, in each tense I, you ..."""
    verbs, persons = (
        (VERBS[:CORE_VERBS], PERSONS[:CORE_PERSONS]) if core else (VERBS, PERSONS)
    )
    return tuple(
        Cell(verb, tense, person)
        for verb, tense, person in product(verbs, TENSES, persons)
    )


def conjugation_lines(core: bool = False) -> tuple[str, ...]:
    """All 1,200 one-language lines, or the 240 of the core, verb by verb and tense by tense, three persons in each:
    `I work , you work , he works`, `she works , we work , they work`, then the Spanish."""
    lines = []
    for verb, tense in product(VERBS[:CORE_VERBS] if core else VERBS, TENSES):
        for language, pronouns in _PRONOUNS.items():
            clauses = [_clause(language, pronoun, tense, verb) for pronoun in pronouns]
            starts = range(0, CORE_PERSONS if core else len(clauses), 3)  # three a line
            lines += [" , ".join(clauses[start : start + 3]) for start in starts]
    return tuple(lines)


def clause_orders(line: str) -> tuple[str, ...]:
    """The line with what stands between its commas in every order: 6 of a conjugation line, 1 of a bilingual one."""
    return tuple(" , ".join(clauses) for clauses in permutations(line.split(" , ")))


def related(line: str) -> dict[str, list[tuple[int, int]]]:
    """Pairs (the word that looks, the word that decides) of a line of the corpus for each of `RELATIONS` it has.

    Words are counted from 0. In a causal model the word before the decided one looks, for it predicts it:
    `he will work = él trabajará` has person (3, 0), translation (4, 2) and tense (4, 1).
    """
    words = line.split()
    commas = [i for i, word in enumerate(words) if word == ","]
    # `yo trabajo , tú trabajas`: from `tú`, after the comma, to `trabajo`, before it.
    pairs = {"earlier verb": [(comma + 1, comma - 1) for comma in commas]}
    if "=" in words:
        equals = words.index("=")
        pairs |= {"person": [(equals, 0)], "translation": [(equals + 1, equals - 1)]}
        # `he will work =`: the word between tells the tense; of `he works =` the verb itself does.
        pairs |= {"tense": [(equals + 1, 1)]} if equals > 2 else {}
    # in their order, without empty ones
    return {name: pairs[name] for name in RELATIONS if pairs.get(name)}


def corpus(seed: int = 0, core: bool = False) -> VerbCorpus:
    """Split the corpus, or its core: HELD_OUT bilingual lines are kept back, all other lines are for training.

    The held-out set tests composition. Every word of a held-out line has been seen, and so has each half of it, in the
    conjugation lines; what has never been seen is that these two halves belong together. To finish `he works =` a
    model must read the person from `he`, the verb and the tense from `works`, and find a Spanish form that it has met
    only among other Spanish forms. Copying a remembered line cannot do it.

    The choice is drawn with `random.Random(seed)` and spread evenly over verbs, tenses and persons: each cell is of a
    verb that was drawn least so far, and among these of such a tense and person. `I work = yo trabajo`, the example
    of the courses, is always for training. Cells and lines stand in a fixed order; shuffle the lines before training.
    """
    everything = cells(core)
    # in random order, so that ties fall at random
    left = random.Random(seed).sample(everything, len(everything))
    left.remove(Cell("work", "present", "I"))
    of_verb: Counter[str] = Counter()  # cells chosen so far
    of_slot: Counter[tuple[str, str]] = Counter()  # a slot is a tense with a person
    chosen = set()
    for _ in range(HELD_OUT):
        cell = min(
            left,
            key=lambda cell: (of_verb[cell.verb], of_slot[cell.tense, cell.person]),
        )
        left.remove(cell)
        chosen.add(cell)
        of_verb[cell.verb] += 1
        of_slot[cell.tense, cell.person] += 1
    kept = tuple(cell.line for cell in everything if cell not in chosen)
    return VerbCorpus(
        kept + conjugation_lines(core),
        tuple(cell for cell in everything if cell in chosen),
    )
