"""The built-in verb corpus: 20 verbs, 6 tenses, 3 persons, in English and Spanish.

Two kinds of line, both made of words separated by single spaces:

    he works = él trabaja                           a bilingual cell: 20 x 6 x 3 = 360 of them
    yo trabajo , tú trabajas , él trabaja           one verb in one tense and one language: 20 x 6 x 2 = 240 of them

For training the persons of a conjugation line stand in any order (`clause_orders`).
The relations inside a line are known, so the heads that serve them can be looked for: the verb form follows the
pronoun (person), the earlier forms of the line (tense), its partner in the other language (translation).
Four spellings are words of both languages, `he`, `has`, `come`, `comes`: only the rest of the line tells them apart.

Regular forms are made by rule; what the rules get wrong stands in small tables.
The past is the Spanish pretérito indefinido.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import permutations, product

from headwise.errors import HeadwiseError

# What a reader must know who sees losses of whole lines beside that of a run.
WHOLE_LINES = (
    "Losses here count every token of these lines. The held-out loss of the run is that of the Spanish half alone, "
    "which the English half determines, and so lower."
)

HALF_LINES = (
    "Losses here count the Spanish half of these lines, which the English half determines. They are means of a line, "
    "then of all lines; the held-out loss of the run is the mean of all their tokens together."
)

PERSONS = ("I", "you", "he")
TENSES = ("present", "past", "future", "conditional", "progressive", "perfect")

# Each verb with its Spanish partner, then its past and participle where English has no rule for them.
_TABLE = """
work trabajar, talk hablar, walk caminar, study estudiar, live vivir, open abrir, cook cocinar, dance bailar,
call llamar, listen escuchar, learn aprender, help ayudar, go ir went gone, have tener had had, see ver saw seen,
come venir came come, say decir said said, do hacer did done, eat comer ate eaten, write escribir wrote written
"""
_FORMS = {verb: forms for verb, *forms in map(str.split, _TABLE.split(","))}
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


@dataclass(frozen=True)
class _Irregular:
    """What one Spanish verb does not do by rule; an empty field follows the rule."""

    present: str = ""
    past: str = ""
    future_stem: str = ""
    gerund: str = ""
    participle: str = ""


_SPANISH_IRREGULAR = {
    "abrir": _Irregular(participle="abierto"),
    "escribir": _Irregular(participle="escrito"),
    "ir": _Irregular("voy vas va", "fui fuiste fue", gerund="yendo"),
    "tener": _Irregular("tengo tienes tiene", "tuve tuviste tuvo", "tendr"),
    "ver": _Irregular("veo ves ve", "vi viste vio", participle="visto"),
    "venir": _Irregular("vengo vienes viene", "vine viniste vino", "vendr", gerund="viniendo"),
    "decir": _Irregular("digo dices dice", "dije dijiste dijo", "dir", "diciendo", "dicho"),
    "hacer": _Irregular("hago haces hace", "hice hiciste hizo", "har", participle="hecho"),
}


def _spanish_forms(infinitive: str, tense: str) -> list[str]:
    """The forms for yo, tú, él, in this order."""
    odd = _SPANISH_IRREGULAR.get(infinitive, _Irregular())
    stem, ending = infinitive[:-2], infinitive[-2:]
    future_stem = odd.future_stem or infinitive
    gerund = odd.gerund or stem + ("ando" if ending == "ar" else "iendo")
    participle = odd.participle or stem + ("ado" if ending == "ar" else "ido")
    return {
        "present": odd.present.split() or [stem + person for person in _PRESENT[ending].split()],
        "past": odd.past.split() or [stem + person for person in _PAST[ending].split()],
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


# What the words of a line have to do with each other. In a causal model the position that predicts does the looking.
RELATIONS = {
    "person": "at `=`, on the English pronoun: the Spanish pronoun comes next",
    "translation": "at the Spanish pronoun, on the English verb right before `=`: the Spanish verb comes next",
    "tense": "at the Spanish pronoun, on the English auxiliary (`will`, `would`, `am`, `has`): the tense comes next",
    "earlier verb": "in `I work , you work`, at a pronoun, on the verb before the comma: the same verb comes next",
}


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
