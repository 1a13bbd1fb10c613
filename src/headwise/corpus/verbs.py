"""The built-in verb corpus: 40 verbs, 8 tenses, all persons, in English and Spanish.

Three kinds of line, made of words separated by single spaces:

    he works = él trabaja                           a bilingual cell: 40 x 8 x 6 = 1,920 of them
    yo trabajo , tú trabajas , él trabaja           one verb in one tense, three persons of one language: 1,400 of them
    The girl works . = La niña trabaja .            a sentence: with a noun, or with a phrase behind the verb

For training the persons of a conjugation line stand in any order (`clause_orders`). `usted`, `ellas` and `ustedes`
stand in these alone, so that `you work =` has one answer.
The relations inside a line are known, so the heads that serve them can be looked for: which words decide a Spanish
pronoun (person), a Spanish form (translation, tense), and the next form of a conjugation line (earlier verb).
Four spellings are words of both languages, `he`, `has`, `come`, `comes`: only the rest of the line tells them apart.

The core, the first 20 verbs with I, you, he in six tenses, is a small corpus inside it, for what trains many models or
slow ones. It has no sentences. Its words are among those of the whole.

The words, and how each tense is made of them, stand in verbs.toml, the sentences in data/sentences.txt, each behind the
cell that it is made of. The past is the Spanish pretérito indefinido, the imperfect (`was working`) and the habit
(`used to work`, in sentences alone) are both the imperfecto.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, product, starmap
from typing import Any

from headwise.files import packaged, read_text, read_toml
from headwise.words import Note, key_of

_DATA = read_toml("corpus/verbs.toml")
NAME = Note.of("source.verb_corpus")
# Notes beside a loss of whole lines, or of their Spanish halves: how it differs from the held-out loss of a run.
WHOLE_LINES = Note.of("note.whole_lines")
HALF_LINES = Note.of("note.half_lines")
# Name of a relation -> what it is, in a line.
RELATIONS: dict[str, str] = {
    name: Note.of(key_of("job", name)) for name in _DATA["relations"]
}

# language -> pronoun -> which of a tense's forms it takes
_PRONOUNS = _DATA["pronouns"]
PERSONS = tuple(_PRONOUNS["english"])
TENSES = tuple(_DATA["tenses"])
VERBS = tuple(_DATA["verbs"])
CORE_VERBS = 20
CORE_PERSONS = 3
CORE_TENSES = 6
# Words of a line, for a batch is as wide as its longest: those of `I have worked , you have worked , he has worked`.
LONGEST = 11
# Cells: of the 8 tenses x 6 persons at most one each, of the core's 6 x 3 two each.
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
    form = forms[_PRONOUNS[language][pronoun]]
    words = _DATA["verbs"][verb][language]
    stem, _, ending = words.partition("-")
    if ending:
        words = _DATA["endings"][ending].replace("-", stem)
    return f"{pronoun} {form.format(*words.split())}"


@dataclass(frozen=True)
class VerbCorpus:
    """Training lines, and the cells whose bilingual lines are kept out of them."""

    train_lines: tuple[str, ...]
    held_out_cells: tuple[Cell, ...]

    @property
    def held_out_lines(self) -> tuple[str, ...]:
        return tuple(cell.line for cell in self.held_out_cells)


def cells(core: bool = False) -> tuple[Cell, ...]:
    """All 1,680 cells, or with `core` its 360: verb by verb, in each verb tense by tense, in each tense I, you ..."""
    return tuple(starmap(Cell, product(*_tables(core))))


def _tables(core: bool) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Verbs, tenses and persons of the corpus, or of its core."""
    if core:
        return VERBS[:CORE_VERBS], TENSES[:CORE_TENSES], PERSONS[:CORE_PERSONS]
    return VERBS, TENSES, PERSONS


def conjugation_lines(core: bool = False) -> tuple[str, ...]:
    """All 1,400 one-language lines, or the 240 of the core, verb by verb and tense by tense, three persons in each:
    `I work , you work , he works`, `she works , we work , they work`, then the Spanish."""
    verbs, tenses, _ = _tables(core)
    lines = []
    for verb, tense in product(verbs, tenses):
        for language, pronouns in _PRONOUNS.items():
            clauses = [_clause(language, pronoun, tense, verb) for pronoun in pronouns]
            starts = range(0, CORE_PERSONS if core else len(clauses), 3)  # three a line
            lines += [" , ".join(clauses[start : start + 3]) for start in starts]
    return tuple(lines)


def sentences(kept: Iterable[Cell]) -> list[str]:
    """Sentences made of cells: with a noun in place of he or she, `The boy sings . = El niño canta .`; with a phrase,
    `Ella cantaba la canción .`, `I sing the song = yo canto la canción`; of no cell, `he used to sing = él cantaba`.
    """
    names = {"", *(f"{cell.verb} {cell.tense} {cell.person}" for cell in kept)}
    lines = read_text(packaged("data/sentences.txt")).splitlines()
    rows = (line.split("\t") for line in lines)
    return [sentence for cell, sentence in rows if cell in names]


def told() -> dict[str, Any]:
    """What each word of the cells tells, and a line of the corpus in Spanish, for a page that says what a head changes.

    `words` has for each word the numbers of the verbs, tenses, persons and languages of which it is a form: `trae`
    shares the verb of `traería`, and not its tense. A word that stands with all of them, such as `él` with every verb,
    tells nothing.
    """
    wholes = VERBS, TENSES, PERSONS, ("english", "spanish")
    told_by = defaultdict[str, list[set[int]]](lambda: [set(), set(), set(), set()])
    for cell, language in product(cells(), wholes[-1]):
        facts = cell.verb, cell.tense, cell.person, language
        for form in getattr(cell, language).split():
            for numbers, whole, fact in zip(told_by[form], wholes, facts, strict=True):
                numbers.add(whole.index(fact))
    words = {}
    for form, sets in told_by.items():
        pairs = zip(sets, wholes, strict=True)
        words[form] = [sorted(x) if len(x) < len(whole) else [] for x, whole in pairs]
    spanish = next(line for line in conjugation_lines() if line.startswith("yo "))
    return {"words": words, "spanish": spanish}


def clause_orders(line: str) -> tuple[str, ...]:
    """The line with what stands between its commas in every order: 6 of a conjugation line, 1 of a bilingual one."""
    return tuple(" , ".join(clauses) for clauses in permutations(line.split(" , ")))


def has_spanish(line: str) -> bool:
    """Is it a bilingual or a Spanish line?"""
    return "=" in line or line.split()[0] not in PERSONS


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
    # cells chosen so far; a slot is a tense with a person
    of_verb = Counter[str]()
    of_slot = Counter[tuple[str, str]]()
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
    kept = [cell for cell in everything if cell not in chosen]
    lines = [*(cell.line for cell in kept), *conjugation_lines(core)]
    if not core:
        lines += sentences(kept)
    held_out = tuple(cell for cell in everything if cell in chosen)
    return VerbCorpus(tuple(lines), held_out)
