"""The verb corpus: the forms against a table written by hand, the split against what its docstring promises."""

import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import every

from headwise.corpus import verbs
from headwise.corpus.training import verb_corpus
from headwise.corpus.verbs import PERSONS, Cell, cells, conjugation_lines, corpus, sentences

FORMS = tomllib.loads(Path(__file__).with_name("verb_forms.toml").read_text(encoding="utf-8"))


CONJUGATIONS = set(conjugation_lines())


def rows(language: str) -> Iterator[tuple[str, str, list[str]]]:
    for verb, tense, forms in (line.split(maxsplit=2) for line in FORMS[language].strip().splitlines()):
        rule = "*" if "/" in forms else FORMS["rules"][language][tense]
        yield verb, tense, rule.replace("*", forms).split(" / ")


@every("verb, tense, forms", rows("english"))
def test_english_forms(verb: str, tense: str, forms: list[str]) -> None:
    i, you, he = forms
    expected = [f"I {i}", f"you {you}", f"he {he}", f"she {he}", f"we {you}", f"they {you}"]
    assert [Cell(verb, tense, person).english for person in PERSONS] == expected


@every("verb, tense, forms", rows("spanish"))
def test_spanish_forms(verb: str, tense: str, forms: list[str]) -> None:
    yo, tu, el, nosotros, ellos = forms
    expected = [f"yo {yo}", f"tú {tu}", f"él {el}", f"ella {el}", f"nosotros {nosotros}", f"ellos {ellos}"]
    assert [Cell(verb, tense, person).spanish for person in PERSONS] == expected
    assert f"usted {el} , ellas {ellos} , ustedes {ellos}" in CONJUGATIONS


def test_lines_and_words() -> None:
    assert Cell("work", "present", "he").line == "he works = él trabaja"
    assert Cell("work", "future", "he").line == "he will work = él trabajará"
    assert Cell("open", "perfect", "you").line == "you have opened = tú has abierto"
    assert Cell("sleep", "past", "they").line == "they slept = ellos durmieron"
    halves: dict[bool, set[str]] = {True: set(), False: set()}
    for line in conjugation_lines():
        halves[line.split()[0] in PERSONS] |= set(line.split()) - {","}
    assert halves[True] & halves[False] == {"he", "has", "come", "comes"}
    assert len(halves[True] | halves[False]) == len(vocabulary()) == 1171


def test_the_cells_stand_in_their_order() -> None:
    everything = cells()
    assert len(everything) == 40 * 7 * 6 == 1680
    assert len({cell.line for cell in everything}) == 1680
    assert [cell.line for cell in everything[:7]] == [
        "I work = yo trabajo", "you work = tú trabajas", "he works = él trabaja", "she works = ella trabaja",
        "we work = nosotros trabajamos", "they work = ellos trabajan", "I worked = yo trabajé",
    ]  # fmt: skip
    assert everything[-1].line == "they were following = ellos seguían"
    lines = conjugation_lines()
    assert len(lines) == len(set(lines)) == 1400
    # The figures of the claims' report and of the course preset are of these lines in this order.
    core = cells(core=True)
    assert len(core) == 20 * 6 * 3 == 360 and set(core) < set(cells())
    assert core[3].line == "I worked = yo trabajé" and core[-1].line == "he has written = él ha escrito"
    lines = conjugation_lines(core=True)
    assert len(lines) == 240 and set(lines) < set(conjugation_lines())
    assert lines[1] == "yo trabajo , tú trabajas , él trabaja"
    expected = ("you will work = tú trabajarás", "I have worked = yo he trabajado", "he talks = él habla")
    assert corpus(0, core=True).held_out_lines[:3] == expected
    assert len(vocabulary(True)) == 358


def vocabulary(core: bool = False) -> set[str]:
    lines = [*(cell.line for cell in cells(core)), *conjugation_lines(core)]
    return {word for line in lines for word in line.split()} - {"=", ","}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_split_loses_and_repeats_nothing(seed: int) -> None:
    split = corpus(seed)
    assert split == corpus(seed) != corpus(seed + 1)
    assert len(split.held_out_cells) == len(set(split.held_out_cells)) == 36
    assert split.held_out_lines == tuple(cell.line for cell in split.held_out_cells)
    assert set(split.train_lines).isdisjoint(split.held_out_lines)
    kept = [cell for cell in cells() if cell not in split.held_out_cells]
    everything = [cell.line for cell in cells()] + list(conjugation_lines()) + sentences(kept)
    assert Counter(split.train_lines) + Counter(split.held_out_lines) == Counter(everything)


def test_every_held_out_word_and_half_line_was_seen() -> None:
    for seed in range(3):
        split = corpus(seed)
        seen = {word for line in split.train_lines for word in line.split()}
        assert {word for line in split.held_out_lines for word in line.split()} <= seen
        clauses = {clause for line in split.train_lines if "=" not in line for clause in line.split(" , ")}
        assert all({cell.english, cell.spanish} <= clauses for cell in split.held_out_cells)


@pytest.mark.parametrize("core", [False, True])
def test_the_default_split_is_spread_evenly(core: bool) -> None:
    for seed in range(7):
        chosen = corpus(seed, core=core).held_out_cells
        assert len(chosen) == 36
        of_verb = Counter(cell.verb for cell in chosen)
        assert set(of_verb.values()) == ({1, 2} if core else {1}) and len(of_verb) == (20 if core else 36)
        slots = Counter((cell.tense, cell.person) for cell in chosen)
        assert set(slots.values()) == ({2} if core else {1}) and len(slots) == (18 if core else 36)


def test_the_example_of_the_courses_is_always_for_training() -> None:
    assert "I work = yo trabajo" in corpus(6).train_lines  # without the rule this seed draws it


def test_sentences() -> None:
    lines = set(sentences(cells()))
    assert {
        "The girl talks . = La niña habla .",
        "La niña preguntará en la clase .",
        "he used to sing = él cantaba",
    } <= lines
    clauses = {cell.line for cell in cells()}
    nouns: dict[str, str] = {}  # Spanish -> English
    for line in lines:
        halves = line.rstrip(" .").split(" . = ")
        if len(halves) == 2:  # the same noun, with its article, and a cell of its verb
            english, spanish = (half.lower().split(maxsplit=2) for half in halves)
            assert nouns.setdefault(spanish[1], english[1]) == english[1]
            pronouns = ("he", "él") if spanish[0] == "el" else ("she", "ella")
            clause = f"{pronouns[0]} {english[2]} = {pronouns[1]} {spanish[2]}"
            assert english[2].startswith("used to ") or clause in clauses
    assert len(nouns) == len(set(nouns.values())) == 20
    assert max(len(line.split()) for line in lines) == max(len(line.split()) for line in conjugation_lines())


def test_what_a_reader_types_is_known() -> None:
    tokens = verb_corpus(0, 64).tokens
    for text in (
        "ella cantaba en la casa",
        "Ella CANTABA en la casa.",
        "I work, you work, he ___",
        "yo trabajo, tú trabajas, él …",
        "The girl used to sing.",
    ):
        assert tokens.unknown is None and len(tokens.prompt(text)) > 4
    assert tokens.shown(tokens.encode("I sing, he sings.")) == ("I", "sing", ",", "he", "sings", ".")


def test_what_a_word_tells() -> None:
    words = verbs.told()["words"]
    work, conditional, he = verbs.VERBS.index("work"), verbs.TENSES.index("conditional"), verbs.PERSONS.index("he")
    assert words["trabajaría"][:2] == [[work], [conditional]] and he in words["trabajaría"][2]
    assert words["trabaja"][0] == [work] and conditional not in words["trabaja"][1]
    assert words["él"] == [[], [], [he], [1]]  # what stands with every verb tells none
    assert words["would"][0] == [] == words["he"][3]
