"""The verb corpus: the forms against a table written by hand, the split against what its docstring promises."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from collections import Counter

import pytest

from headwise.corpus.verbs import PERSONS, TENSES, VERBS, Cell, cells, clause_orders, conjugation_lines, corpus
from headwise.errors import HeadwiseError

# Written by hand, pronoun by pronoun: what a reader would look up. `/` separates I, you, he.
ENGLISH = """
work    present      work / work / works
study   present      study / study / studies
study   past         studied / studied / studied
study   progressive  am studying / are studying / is studying
live    past         lived / lived / lived
live    progressive  am living / are living / is living
dance   perfect      have danced / have danced / has danced
dance   present      dance / dance / dances
open    past         opened / opened / opened
listen  progressive  am listening / are listening / is listening
help    future       will help / will help / will help
call    conditional  would call / would call / would call
go      present      go / go / goes
go      past         went / went / went
go      progressive  am going / are going / is going
go      perfect      have gone / have gone / has gone
have    present      have / have / has
have    past         had / had / had
have    future       will have / will have / will have
have    progressive  am having / are having / is having
have    perfect      have had / have had / has had
see     present      see / see / sees
see     past         saw / saw / saw
see     progressive  am seeing / are seeing / is seeing
see     perfect      have seen / have seen / has seen
come    past         came / came / came
come    progressive  am coming / are coming / is coming
come    perfect      have come / have come / has come
say     present      say / say / says
say     past         said / said / said
say     progressive  am saying / are saying / is saying
say     perfect      have said / have said / has said
do      present      do / do / does
do      past         did / did / did
do      progressive  am doing / are doing / is doing
do      perfect      have done / have done / has done
eat     past         ate / ate / ate
eat     perfect      have eaten / have eaten / has eaten
write   past         wrote / wrote / wrote
write   progressive  am writing / are writing / is writing
write   perfect      have written / have written / has written
"""

SPANISH = """
work    present      trabajo / trabajas / trabaja
work    past         trabajé / trabajaste / trabajó
work    future       trabajaré / trabajarás / trabajará
work    conditional  trabajaría / trabajarías / trabajaría
work    progressive  estoy trabajando / estás trabajando / está trabajando
work    perfect      he trabajado / has trabajado / ha trabajado
study   past         estudié / estudiaste / estudió
help    progressive  estoy ayudando / estás ayudando / está ayudando
learn   present      aprendo / aprendes / aprende
learn   past         aprendí / aprendiste / aprendió
learn   future       aprenderé / aprenderás / aprenderá
learn   perfect      he aprendido / has aprendido / ha aprendido
live    present      vivo / vives / vive
live    past         viví / viviste / vivió
live    conditional  viviría / vivirías / viviría
live    progressive  estoy viviendo / estás viviendo / está viviendo
live    perfect      he vivido / has vivido / ha vivido
open    present      abro / abres / abre
open    perfect      he abierto / has abierto / ha abierto
go      present      voy / vas / va
go      past         fui / fuiste / fue
go      future       iré / irás / irá
go      conditional  iría / irías / iría
go      progressive  estoy yendo / estás yendo / está yendo
go      perfect      he ido / has ido / ha ido
have    present      tengo / tienes / tiene
have    past         tuve / tuviste / tuvo
have    future       tendré / tendrás / tendrá
have    conditional  tendría / tendrías / tendría
have    progressive  estoy teniendo / estás teniendo / está teniendo
have    perfect      he tenido / has tenido / ha tenido
see     present      veo / ves / ve
see     past         vi / viste / vio
see     future       veré / verás / verá
see     conditional  vería / verías / vería
see     progressive  estoy viendo / estás viendo / está viendo
see     perfect      he visto / has visto / ha visto
come    present      vengo / vienes / viene
come    past         vine / viniste / vino
come    future       vendré / vendrás / vendrá
come    conditional  vendría / vendrías / vendría
come    progressive  estoy viniendo / estás viniendo / está viniendo
come    perfect      he venido / has venido / ha venido
say     present      digo / dices / dice
say     past         dije / dijiste / dijo
say     future       diré / dirás / dirá
say     conditional  diría / dirías / diría
say     progressive  estoy diciendo / estás diciendo / está diciendo
say     perfect      he dicho / has dicho / ha dicho
do      present      hago / haces / hace
do      past         hice / hiciste / hizo
do      future       haré / harás / hará
do      conditional  haría / harías / haría
do      progressive  estoy haciendo / estás haciendo / está haciendo
do      perfect      he hecho / has hecho / ha hecho
eat     present      como / comes / come
eat     past         comí / comiste / comió
eat     progressive  estoy comiendo / estás comiendo / está comiendo
eat     perfect      he comido / has comido / ha comido
write   present      escribo / escribes / escribe
write   past         escribí / escribiste / escribió
write   progressive  estoy escribiendo / estás escribiendo / está escribiendo
write   perfect      he escrito / has escrito / ha escrito
"""


def rows(table: str) -> list[tuple[str, str, list[str]]]:
    split = [line.split(maxsplit=2) for line in table.strip().splitlines()]
    return [(verb, tense, forms.split(" / ")) for verb, tense, forms in split]


@pytest.mark.parametrize(("verb", "tense", "forms"), rows(ENGLISH))
def test_english_forms(verb: str, tense: str, forms: list[str]) -> None:
    expected = [f"{pronoun} {form}" for pronoun, form in zip(("I", "you", "he"), forms, strict=True)]
    assert [Cell(verb, tense, person).english for person in PERSONS] == expected


@pytest.mark.parametrize(("verb", "tense", "forms"), rows(SPANISH))
def test_spanish_forms(verb: str, tense: str, forms: list[str]) -> None:
    expected = [f"{pronoun} {form}" for pronoun, form in zip(("yo", "tú", "él"), forms, strict=True)]
    assert [Cell(verb, tense, person).spanish for person in PERSONS] == expected


def test_a_line_joins_the_two_languages() -> None:
    assert Cell("work", "present", "he").line == "he works = él trabaja"
    assert Cell("work", "future", "he").line == "he will work = él trabajará"
    assert Cell("open", "perfect", "you").line == "you have opened = tú has abierto"


def test_360_different_cells_in_their_order() -> None:
    everything = cells()
    assert len(everything) == 20 * 6 * 3 == 360
    assert len({cell.line for cell in everything}) == 360
    assert [cell.line for cell in everything[:4]] == [
        "I work = yo trabajo",
        "you work = tú trabajas",
        "he works = él trabaja",
        "I worked = yo trabajé",
    ]
    assert everything[-1].line == "he has written = él ha escrito"


def test_240_conjugation_lines_in_their_order() -> None:
    lines = conjugation_lines()
    assert len(lines) == len(set(lines)) == 240
    assert lines[:3] == (
        "I work , you work , he works",
        "yo trabajo , tú trabajas , él trabaja",
        "I worked , you worked , he worked",
    )
    assert lines[-1] == "yo he escrito , tú has escrito , él ha escrito"


def test_the_persons_of_a_line_stand_in_any_order() -> None:
    assert clause_orders("he works = él trabaja") == ("he works = él trabaja",)
    orders = clause_orders("I go , you go , he goes")
    assert len(orders) == len(set(orders)) == 6
    assert orders[0] == "I go , you go , he goes" and orders[-1] == "he goes , you go , I go"


def test_text_is_clean() -> None:
    for line in corpus(held_out=0).train_lines:
        assert line == " ".join(line.split())
        assert line == unicodedata.normalize("NFC", line)  # é is one character, never e and an accent


def test_exactly_four_words_belong_to_both_languages() -> None:
    english = {word for cell in cells() for word in cell.english.split()}
    spanish = {word for cell in cells() for word in cell.spanish.split()}
    assert english & spanish == {"he", "has", "come", "comes"}
    assert len(english | spanish) == 358  # with `=` and `,` a vocabulary of 360 words


@pytest.mark.parametrize("held_out", [0, 1, 19, 36, 97, 180])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_split_loses_and_repeats_nothing(seed: int, held_out: int) -> None:
    split = corpus(seed, held_out)
    assert len(split.held_out_cells) == len(set(split.held_out_cells)) == held_out
    assert split.held_out_lines == tuple(cell.line for cell in split.held_out_cells)
    assert set(split.train_lines).isdisjoint(split.held_out_lines)
    everything = [cell.line for cell in cells()] + list(conjugation_lines())
    assert Counter(split.train_lines) + Counter(split.held_out_lines) == Counter(everything)


@pytest.mark.parametrize("held_out", [36, 180])
def test_every_held_out_word_and_half_line_was_seen(held_out: int) -> None:
    for seed in range(11):
        split = corpus(seed, held_out)
        seen = {word for line in split.train_lines for word in line.split()}
        assert {word for line in split.held_out_lines for word in line.split()} <= seen
        clauses = {clause for line in split.train_lines if "=" not in line for clause in line.split(" , ")}
        assert all({cell.english, cell.spanish} <= clauses for cell in split.held_out_cells)


def test_the_default_split_is_spread_evenly() -> None:
    for seed in range(23):
        chosen = corpus(seed).held_out_cells
        assert len(chosen) == 36
        assert {Counter(cell.verb for cell in chosen)[verb] for verb in VERBS} == {1, 2}
        slots = Counter((cell.tense, cell.person) for cell in chosen)
        assert [slots[tense, person] for tense in TENSES for person in PERSONS] == [2] * 18


def test_half_held_out_still_leaves_every_verb_and_tense() -> None:
    for seed in range(11):
        chosen = corpus(seed, 180).held_out_cells
        assert max(Counter(cell.verb for cell in chosen).values()) == 9  # of 18
        assert max(Counter(cell.tense for cell in chosen).values()) < 60
        assert max(Counter((cell.tense, cell.person) for cell in chosen).values()) < 20


@pytest.mark.parametrize("held_out", [36, 180])
def test_the_example_of_the_courses_is_always_for_training(held_out: int) -> None:
    for seed in (0, 6, 12, 32, 36):  # without the rule these draw it
        assert "I work = yo trabajo" in corpus(seed, held_out).train_lines


def test_seeds_differ_and_a_seed_repeats() -> None:
    assert corpus(5) == corpus(5)
    assert len({frozenset(corpus(seed).held_out_cells) for seed in range(13)}) == 13


def test_the_first_held_out_lines_are_frozen() -> None:
    expected = ("you will work = tú trabajarás", "I have worked = yo he trabajado", "he talks = él habla")
    assert corpus(0).held_out_lines[:3] == expected


def test_the_order_does_not_depend_on_hashing() -> None:
    code = "from headwise.corpus.verbs import corpus; c = corpus(3); print(ascii((c.train_lines, c.held_out_lines)))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    here = corpus(3)
    assert printed == {ascii((here.train_lines, here.held_out_lines)) + "\n"}


@pytest.mark.parametrize("held_out", [-1, 181])
def test_too_many_held_out_is_refused(held_out: int) -> None:
    with pytest.raises(HeadwiseError, match=f"held_out={held_out} of 360 cells; choose 0 to 180"):
        corpus(0, held_out)


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(HeadwiseError, match=r"verb 'run' is not in the corpus; choose one of: work, talk, .*, write"):
        Cell("run", "present", "he")
    with pytest.raises(HeadwiseError, match="tense 'imperfect' is not in the corpus; choose one of: present, past"):
        Cell("work", "imperfect", "he")
    with pytest.raises(HeadwiseError, match="person 'she' is not in the corpus; choose one of: I, you, he"):
        Cell("work", "present", "she")
