"""The verb corpus: the forms against a table written by hand, the split against what its docstring promises."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from collections import Counter

import pytest

from headwise.corpus.verbs import PERSONS, Cell, cells, clause_orders, conjugation_lines, corpus
from headwise.errors import HeadwiseError

# Written by hand, form by form: what a reader would look up. `/` separates I, you, he; she takes the form of he, we and
# they that of you.
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
buy     past         bought / bought / bought
buy     present      buy / buy / buys
sell    past         sold / sold / sold
drink   past         drank / drank / drank
drink   perfect      have drunk / have drunk / has drunk
run     past         ran / ran / ran
run     progressive  am running / are running / is running
run     perfect      have run / have run / has run
sing    past         sang / sang / sang
sing    perfect      have sung / have sung / has sung
look    past         looked / looked / looked
wait    progressive  am waiting / are waiting / is waiting
travel  past         traveled / traveled / traveled
travel  progressive  am traveling / are traveling / is traveling
ask     present      ask / ask / asks
pay     past         paid / paid / paid
pay     present      pay / pay / pays
play    present      play / play / plays
play    past         played / played / played
think   past         thought / thought / thought
find    past         found / found / found
sleep   past         slept / slept / slept
give    past         gave / gave / gave
give    progressive  am giving / are giving / is giving
give    perfect      have given / have given / has given
bring   past         brought / brought / brought
hear    past         heard / heard / heard
leave   past         left / left / left
leave   progressive  am leaving / are leaving / is leaving
drive   past         drove / drove / drove
drive   progressive  am driving / are driving / is driving
drive   perfect      have driven / have driven / has driven
follow  past         followed / followed / followed
"""

# `/` separates yo, tú, él, nosotros, ellos; ella and usted take the form of él, ellas and ustedes that of ellos.
SPANISH = """
work    present      trabajo / trabajas / trabaja / trabajamos / trabajan
work    past         trabajé / trabajaste / trabajó / trabajamos / trabajaron
work    future       trabajaré / trabajarás / trabajará / trabajaremos / trabajarán
work    conditional  trabajaría / trabajarías / trabajaría / trabajaríamos / trabajarían
work    progressive  estoy trabajando / estás trabajando / está trabajando / estamos trabajando / están trabajando
work    perfect      he trabajado / has trabajado / ha trabajado / hemos trabajado / han trabajado
study   past         estudié / estudiaste / estudió / estudiamos / estudiaron
help    progressive  estoy ayudando / estás ayudando / está ayudando / estamos ayudando / están ayudando
learn   present      aprendo / aprendes / aprende / aprendemos / aprenden
learn   past         aprendí / aprendiste / aprendió / aprendimos / aprendieron
learn   future       aprenderé / aprenderás / aprenderá / aprenderemos / aprenderán
learn   perfect      he aprendido / has aprendido / ha aprendido / hemos aprendido / han aprendido
live    present      vivo / vives / vive / vivimos / viven
live    past         viví / viviste / vivió / vivimos / vivieron
live    conditional  viviría / vivirías / viviría / viviríamos / vivirían
live    progressive  estoy viviendo / estás viviendo / está viviendo / estamos viviendo / están viviendo
live    perfect      he vivido / has vivido / ha vivido / hemos vivido / han vivido
open    present      abro / abres / abre / abrimos / abren
open    perfect      he abierto / has abierto / ha abierto / hemos abierto / han abierto
go      present      voy / vas / va / vamos / van
go      past         fui / fuiste / fue / fuimos / fueron
go      future       iré / irás / irá / iremos / irán
go      conditional  iría / irías / iría / iríamos / irían
go      progressive  estoy yendo / estás yendo / está yendo / estamos yendo / están yendo
go      perfect      he ido / has ido / ha ido / hemos ido / han ido
have    present      tengo / tienes / tiene / tenemos / tienen
have    past         tuve / tuviste / tuvo / tuvimos / tuvieron
have    future       tendré / tendrás / tendrá / tendremos / tendrán
have    conditional  tendría / tendrías / tendría / tendríamos / tendrían
have    progressive  estoy teniendo / estás teniendo / está teniendo / estamos teniendo / están teniendo
have    perfect      he tenido / has tenido / ha tenido / hemos tenido / han tenido
see     present      veo / ves / ve / vemos / ven
see     past         vi / viste / vio / vimos / vieron
see     future       veré / verás / verá / veremos / verán
see     conditional  vería / verías / vería / veríamos / verían
see     progressive  estoy viendo / estás viendo / está viendo / estamos viendo / están viendo
see     perfect      he visto / has visto / ha visto / hemos visto / han visto
come    present      vengo / vienes / viene / venimos / vienen
come    past         vine / viniste / vino / vinimos / vinieron
come    future       vendré / vendrás / vendrá / vendremos / vendrán
come    conditional  vendría / vendrías / vendría / vendríamos / vendrían
come    progressive  estoy viniendo / estás viniendo / está viniendo / estamos viniendo / están viniendo
come    perfect      he venido / has venido / ha venido / hemos venido / han venido
say     present      digo / dices / dice / decimos / dicen
say     past         dije / dijiste / dijo / dijimos / dijeron
say     future       diré / dirás / dirá / diremos / dirán
say     conditional  diría / dirías / diría / diríamos / dirían
say     progressive  estoy diciendo / estás diciendo / está diciendo / estamos diciendo / están diciendo
say     perfect      he dicho / has dicho / ha dicho / hemos dicho / han dicho
do      present      hago / haces / hace / hacemos / hacen
do      past         hice / hiciste / hizo / hicimos / hicieron
do      future       haré / harás / hará / haremos / harán
do      conditional  haría / harías / haría / haríamos / harían
do      progressive  estoy haciendo / estás haciendo / está haciendo / estamos haciendo / están haciendo
do      perfect      he hecho / has hecho / ha hecho / hemos hecho / han hecho
eat     present      como / comes / come / comemos / comen
eat     past         comí / comiste / comió / comimos / comieron
eat     progressive  estoy comiendo / estás comiendo / está comiendo / estamos comiendo / están comiendo
eat     perfect      he comido / has comido / ha comido / hemos comido / han comido
write   present      escribo / escribes / escribe / escribimos / escriben
write   past         escribí / escribiste / escribió / escribimos / escribieron
write   progressive  estoy escribiendo / estás escribiendo / está escribiendo / estamos escribiendo / están escribiendo
write   perfect      he escrito / has escrito / ha escrito / hemos escrito / han escrito
buy     future       compraré / comprarás / comprará / compraremos / comprarán
sell    present      vendo / vendes / vende / vendemos / venden
drink   past         bebí / bebiste / bebió / bebimos / bebieron
run     conditional  correría / correrías / correría / correríamos / correrían
sing    perfect      he cantado / has cantado / ha cantado / hemos cantado / han cantado
look    past         miré / miraste / miró / miramos / miraron
wait    present      espero / esperas / espera / esperamos / esperan
travel  past         viajé / viajaste / viajó / viajamos / viajaron
ask     present      pregunto / preguntas / pregunta / preguntamos / preguntan
pay     present      pago / pagas / paga / pagamos / pagan
pay     past         pagué / pagaste / pagó / pagamos / pagaron
play    present      juego / juegas / juega / jugamos / juegan
play    past         jugué / jugaste / jugó / jugamos / jugaron
play    conditional  jugaría / jugarías / jugaría / jugaríamos / jugarían
think   present      pienso / piensas / piensa / pensamos / piensan
think   past         pensé / pensaste / pensó / pensamos / pensaron
think   future       pensaré / pensarás / pensará / pensaremos / pensarán
find    present      encuentro / encuentras / encuentra / encontramos / encuentran
find    past         encontré / encontraste / encontró / encontramos / encontraron
sleep   present      duermo / duermes / duerme / dormimos / duermen
sleep   past         dormí / dormiste / durmió / dormimos / durmieron
sleep   future       dormiré / dormirás / dormirá / dormiremos / dormirán
sleep   progressive  estoy durmiendo / estás durmiendo / está durmiendo / estamos durmiendo / están durmiendo
give    present      doy / das / da / damos / dan
give    past         di / diste / dio / dimos / dieron
give    progressive  estoy dando / estás dando / está dando / estamos dando / están dando
bring   present      traigo / traes / trae / traemos / traen
bring   past         traje / trajiste / trajo / trajimos / trajeron
bring   future       traeré / traerás / traerá / traeremos / traerán
bring   progressive  estoy trayendo / estás trayendo / está trayendo / estamos trayendo / están trayendo
bring   perfect      he traído / has traído / ha traído / hemos traído / han traído
hear    present      oigo / oyes / oye / oímos / oyen
hear    past         oí / oíste / oyó / oímos / oyeron
hear    future       oiré / oirás / oirá / oiremos / oirán
hear    conditional  oiría / oirías / oiría / oiríamos / oirían
hear    progressive  estoy oyendo / estás oyendo / está oyendo / estamos oyendo / están oyendo
hear    perfect      he oído / has oído / ha oído / hemos oído / han oído
leave   present      salgo / sales / sale / salimos / salen
leave   past         salí / saliste / salió / salimos / salieron
leave   future       saldré / saldrás / saldrá / saldremos / saldrán
leave   conditional  saldría / saldrías / saldría / saldríamos / saldrían
drive   present      conduzco / conduces / conduce / conducimos / conducen
drive   past         conduje / condujiste / condujo / condujimos / condujeron
drive   perfect      he conducido / has conducido / ha conducido / hemos conducido / han conducido
follow  present      sigo / sigues / sigue / seguimos / siguen
follow  past         seguí / seguiste / siguió / seguimos / siguieron
follow  progressive  estoy siguiendo / estás siguiendo / está siguiendo / estamos siguiendo / están siguiendo
"""


CONJUGATIONS = set(conjugation_lines())


def rows(table: str) -> list[tuple[str, str, list[str]]]:
    split = [line.split(maxsplit=2) for line in table.strip().splitlines()]
    return [(verb, tense, forms.split(" / ")) for verb, tense, forms in split]


@pytest.mark.parametrize(("verb", "tense", "forms"), rows(ENGLISH))
def test_english_forms(verb: str, tense: str, forms: list[str]) -> None:
    i, you, he = forms
    expected = [f"I {i}", f"you {you}", f"he {he}", f"she {he}", f"we {you}", f"they {you}"]
    assert [Cell(verb, tense, person).english for person in PERSONS] == expected


@pytest.mark.parametrize(("verb", "tense", "forms"), rows(SPANISH))
def test_spanish_forms(verb: str, tense: str, forms: list[str]) -> None:
    yo, tu, el, nosotros, ellos = forms
    expected = [f"yo {yo}", f"tú {tu}", f"él {el}", f"ella {el}", f"nosotros {nosotros}", f"ellos {ellos}"]
    assert [Cell(verb, tense, person).spanish for person in PERSONS] == expected
    assert f"usted {el} , ellas {ellos} , ustedes {ellos}" in CONJUGATIONS


def test_a_line_joins_the_two_languages() -> None:
    assert Cell("work", "present", "he").line == "he works = él trabaja"
    assert Cell("work", "future", "he").line == "he will work = él trabajará"
    assert Cell("open", "perfect", "you").line == "you have opened = tú has abierto"
    assert Cell("sleep", "past", "they").line == "they slept = ellos durmieron"


def test_1440_different_cells_in_their_order() -> None:
    everything = cells()
    assert len(everything) == 40 * 6 * 6 == 1440
    assert len({cell.line for cell in everything}) == 1440
    assert [cell.line for cell in everything[:7]] == [
        "I work = yo trabajo",
        "you work = tú trabajas",
        "he works = él trabaja",
        "she works = ella trabaja",
        "we work = nosotros trabajamos",
        "they work = ellos trabajan",
        "I worked = yo trabajé",
    ]
    assert everything[-1].line == "they have followed = ellos han seguido"


def test_1200_conjugation_lines_in_their_order() -> None:
    lines = conjugation_lines()
    assert len(lines) == len(set(lines)) == 1200
    assert lines[:6] == (
        "I work , you work , he works",
        "she works , we work , they work",
        "yo trabajo , tú trabajas , él trabaja",
        "ella trabaja , nosotros trabajamos , ellos trabajan",
        "usted trabaja , ellas trabajan , ustedes trabajan",
        "I worked , you worked , he worked",
    )
    assert lines[-1] == "usted ha seguido , ellas han seguido , ustedes han seguido"


def test_the_core_is_20_verbs_with_i_you_he() -> None:
    """The figures of `compare`, of the course preset and of the Mini-GPT are of these lines in this order."""
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
    return {word for line in corpus(0, 0, core).train_lines for word in line.split()} - {"=", ","}


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
    halves: dict[bool, set[str]] = {True: set(), False: set()}
    for line in conjugation_lines():
        halves[line.split()[0] in PERSONS] |= set(line.split()) - {","}
    assert halves[True] & halves[False] == {"he", "has", "come", "comes"}
    assert len(halves[True] | halves[False]) == len(vocabulary()) == 1009  # with `=`, `,` and the boundary, 1,012


@pytest.mark.parametrize("held_out", [0, 1, 19, 36, 97, 720])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_split_loses_and_repeats_nothing(seed: int, held_out: int) -> None:
    split = corpus(seed, held_out)
    assert len(split.held_out_cells) == len(set(split.held_out_cells)) == held_out
    assert split.held_out_lines == tuple(cell.line for cell in split.held_out_cells)
    assert set(split.train_lines).isdisjoint(split.held_out_lines)
    everything = [cell.line for cell in cells()] + list(conjugation_lines())
    assert Counter(split.train_lines) + Counter(split.held_out_lines) == Counter(everything)


@pytest.mark.parametrize("held_out", [36, 720])
def test_every_held_out_word_and_half_line_was_seen(held_out: int) -> None:
    for seed in range(3):
        split = corpus(seed, held_out)
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


def test_half_held_out_still_leaves_every_verb_and_tense() -> None:
    for seed in range(3):
        chosen = corpus(seed, 720).held_out_cells
        assert max(Counter(cell.verb for cell in chosen).values()) == 18  # of 36
        assert max(Counter(cell.tense for cell in chosen).values()) < 240
        assert max(Counter((cell.tense, cell.person) for cell in chosen).values()) < 40


@pytest.mark.parametrize("held_out", [36, 720])
def test_the_example_of_the_courses_is_always_for_training(held_out: int) -> None:
    for seed in (6, 14):  # without the rule these draw it
        assert "I work = yo trabajo" in corpus(seed, held_out).train_lines


def test_seeds_differ_and_a_seed_repeats() -> None:
    assert corpus(5) == corpus(5)
    assert len({frozenset(corpus(seed).held_out_cells) for seed in range(13)}) == 13


def test_the_first_held_out_lines_are_frozen() -> None:
    expected = ("he works = él trabaja", "I would talk = yo hablaría", "we walked = nosotros caminamos")
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


@pytest.mark.parametrize("held_out", [-1, 721])
def test_too_many_held_out_is_refused(held_out: int) -> None:
    with pytest.raises(HeadwiseError, match=f"held_out={held_out} of 1440 cells; choose 0 to 720"):
        corpus(0, held_out)


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(HeadwiseError, match=r"verb 'fly' is not in the corpus; choose one of: work, talk, .*, follow"):
        Cell("fly", "present", "he")
    with pytest.raises(HeadwiseError, match="tense 'imperfect' is not in the corpus; choose one of: present, past"):
        Cell("work", "imperfect", "he")
    with pytest.raises(
        HeadwiseError, match="person 'it' is not in the corpus; choose one of: I, you, he, she, we, they"
    ):
        Cell("work", "present", "it")
