"""The built-in verb corpus: 20 verbs, 6 tenses, 3 persons, in English and Spanish.

Two kinds of line, both made of words separated by single spaces:

    he works = él trabaja                           a bilingual cell: 20 x 6 x 3 = 360 of them
    yo trabajo , tú trabajas , él trabaja           one verb in one tense and one language: 20 x 6 x 2 = 240 of them

For training the persons of a conjugation line stand in any order (`clause_orders`).
The relations inside a line are known, so the heads that serve them can be looked for: the verb form follows the
pronoun (person), the earlier forms of the line (tense), its partner in the other language (translation).
Four spellings are words of both languages, `he`, `has`, `come`, `comes`: only the rest of the line tells them apart.

Regular forms are made by rule; the words, and what the rules get wrong, stand in verbs.toml.
The past is the Spanish pretérito indefinido.
"""

from __future__ import annotations

import random
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError

_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("verbs.toml").read_text(encoding="utf-8"))
WHOLE_LINES, HALF_LINES = str(_DATA["whole_lines"]), str(_DATA["half_lines"])
RELATIONS: dict[str, str] = _DATA["relations"]

PERSONS = ("I", "you", "he")
TENSES = ("present", "past", "future", "conditional", "progressive", "perfect")

_FORMS: dict[str, list[str]] = {verb: forms.split() for verb, forms in _DATA["verbs"].items()}
VERBS = tuple(_FORMS)


@dataclass(frozen=True)
class Cell:
    """One verb in one tense and person: `Cell("work", "present", "he").line == "he works = él trabaja"`."""

    verb: str
    tense: str
    person: str

    def __post_init__(self) -> None:
        for kind, known in (("verb", VERBS), ("tense", TENSES), ("person", PERSONS)):
            if (value := getattr(self, kind)) not in known:
                raise HeadwiseError(f"{kind} {value!r} is not in the corpus; choose one of: {', '.join(known)}")

    @property
    def english(self) -> str:
        return f"{self.person} {_english_form(self.verb, self.tense, self.person)}"

    @property
    def spanish(self) -> str:
        form = _spanish_forms(_FORMS[self.verb][0], self.tense)[PERSONS.index(self.person)]
        return f"{_SPANISH_PRONOUN[self.person]} {form}"

    @property
    def line(self) -> str:
        return f"{self.english} = {self.spanish}"


# --- English -----------------------------------------------------------------------------------------------------

_TO_BE = {"I": "am", "you": "are", "he": "is"}


def _english_form(verb: str, tense: str, person: str) -> str:
    stem = verb[:-1] + "i" if verb.endswith("y") and verb[-2] not in "aeiou" else verb  # study, but not say
    third = "has" if verb == "have" else stem + ("es" if stem[-1] in "io" else "s")
    past, participle = _FORMS[verb][1:] or [stem.removesuffix("e") + "ed"] * 2
    ing = (verb if verb.endswith("ee") else verb.removesuffix("e")) + "ing"  # seeing, but living
    return {
        "present": third if person == "he" else verb,
        "past": past,
        "future": f"will {verb}",
        "conditional": f"would {verb}",
        "progressive": f"{_TO_BE[person]} {ing}",
        "perfect": f"{'has' if person == 'he' else 'have'} {participle}",
    }[tense]


# --- Spanish -----------------------------------------------------------------------------------------------------

_SPANISH_PRONOUN = {"I": "yo", "you": "tú", "he": "él"}

# Endings for yo, tú, él: those of the simple present and past depend on the class of the infinitive.
_PRESENT = {"ar": "o as a", "er": "o es e", "ir": "o es e"}
_PAST = {"ar": "é aste ó", "er": "í iste ió", "ir": "í iste ió"}


def _spanish_forms(infinitive: str, tense: str) -> list[str]:
    """The forms for yo, tú, él, in this order."""
    odd = defaultdict(str, _DATA["irregular"].get(infinitive, {}))
    stem, ending = infinitive[:-2], infinitive[-2:]
    future_stem = odd["future_stem"] or infinitive
    gerund = odd["gerund"] or stem + ("ando" if ending == "ar" else "iendo")
    participle = odd["participle"] or stem + ("ado" if ending == "ar" else "ido")
    return {
        "present": odd["present"].split() or [stem + person for person in _PRESENT[ending].split()],
        "past": odd["past"].split() or [stem + person for person in _PAST[ending].split()],
        "future": [future_stem + person for person in ("é", "ás", "á")],
        "conditional": [future_stem + person for person in ("ía", "ías", "ía")],
        "progressive": [f"{estar} {gerund}" for estar in ("estoy", "estás", "está")],
        "perfect": [f"{haber} {participle}" for haber in ("he", "has", "ha")],
    }[tense]


# --- The corpus --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerbCorpus:
    """Training lines, and the cells whose bilingual lines are kept out of them."""

    train_lines: tuple[str, ...]
    held_out_cells: tuple[Cell, ...]

    @property
    def held_out_lines(self) -> tuple[str, ...]:
        return tuple(cell.line for cell in self.held_out_cells)


def cells() -> tuple[Cell, ...]:
    """All 360 cells: verb by verb, in each verb tense by tense, in each tense I, you, he."""
    return tuple(Cell(verb, tense, person) for verb, tense, person in product(VERBS, TENSES, PERSONS))


def conjugation_lines() -> tuple[str, ...]:
    """All 240 one-language lines, verb by verb and tense by tense: `I work , you work , he works`, then the Spanish."""
    rows = [[Cell(verb, tense, person) for person in PERSONS] for verb, tense in product(VERBS, TENSES)]
    clauses = (half for row in rows for half in ([cell.english for cell in row], [cell.spanish for cell in row]))
    return tuple(" , ".join(half) for half in clauses)


def clause_orders(line: str) -> tuple[str, ...]:
    """The line with what stands between its commas in every order; a bilingual line has one."""
    return tuple(" , ".join(clauses) for clauses in permutations(line.split(" , ")))


def related(line: str) -> dict[str, list[tuple[int, int]]]:
    """Pairs (the word that looks, the word that decides) of a line of the corpus for each of `RELATIONS`, from 0."""
    words = line.split()
    commas = [i for i, word in enumerate(words) if word == ","]
    pairs = {"earlier verb": [(comma + 1, comma - 1) for comma in commas]}
    if "=" in words:
        equals = words.index("=")
        pairs |= {"person": [(equals, 0)], "translation": [(equals + 1, equals - 1)]}
        pairs |= {"tense": [(equals + 1, 1)]} if equals > 2 else {}
    return {name: pairs[name] for name in RELATIONS if pairs.get(name)}


def corpus(seed: int = 0, held_out: int = 36) -> VerbCorpus:
    """Split the corpus: `held_out` bilingual lines are kept back, all other lines are for training.

    The held-out set tests composition. Every word of a held-out line has been seen, and so has each half of it, in the
    conjugation lines; what has never been seen is that these two halves belong together. To finish `he works =` a
    model must read the person from `he`, the verb and the tense from `works`, and find a Spanish form that it has met
    only among other Spanish forms. Copying a remembered line cannot do it.

    The choice is drawn with `random.Random(seed)` and spread evenly over verbs, tenses and persons. At most half of the
    cells may be held out. `I work = yo trabajo`, the example of the courses, is always for training. Cells and lines
    stand in a fixed order; shuffle the lines before training.
    """
    everything = cells()
    if not 0 <= held_out <= len(everything) // 2:
        raise HeadwiseError(f"held_out={held_out} of {len(everything)} cells; choose 0 to {len(everything) // 2}")
    chosen = _spread(everything, held_out, random.Random(seed))
    kept = tuple(cell.line for cell in everything if cell not in chosen)
    return VerbCorpus(kept + conjugation_lines(), tuple(cell for cell in everything if cell in chosen))


def _spread(everything: tuple[Cell, ...], count: int, rng: random.Random) -> set[Cell]:
    """Draw cells, each from the verb, then the tense and person, drawn from least so far."""
    left = rng.sample(everything, len(everything))  # in random order, so that ties fall at random
    left.remove(Cell("work", "present", "I"))
    of_verb: Counter[str] = Counter()
    of_slot: Counter[tuple[str, str]] = Counter()
    chosen: set[Cell] = set()
    for _ in range(count):
        cell = min(left, key=lambda cell: (of_verb[cell.verb], of_slot[cell.tense, cell.person]))
        left.remove(cell)
        chosen.add(cell)
        of_verb[cell.verb] += 1
        of_slot[cell.tense, cell.person] += 1
    return chosen
