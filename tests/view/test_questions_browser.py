"""The three questions of a report on the verbs, in a real Chromium: each ends with an answer, whatever the heads do."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from browser_types import Browser, Page
from browsing import faults, opener, width_beyond
from cases import every
from report_browsing import drawn, plain
from surveys import SUMMARY, survey_of_maps

from headwise.corpus import verbs
from headwise.corpus.tokens import Tokens
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.watch import head_maps
from headwise.models.pack import pack_model
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

TEXT = "he would work = él trabajaría"
# `without` as it would be of another model: what it says without some heads, "" for all other sets of them.
PLANT = """(said) => { window.planted = said; without = (names) => {
  const word = planted[[...names].sort().join(' ')] ?? planted[''];
  return Float32Array.from(model.tokens.shown, (name) => (name === word ? 0.9 : 0.0001));
}; }"""


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    torch.manual_seed(5)
    tokens = Tokens.words(verbs.corpus().train_lines)
    shape = {"n_layers": 2, "n_heads": 3, "head_dim": 4, "d_model": 12, "d_ff": 20}
    model = GPT(GPTConfig(vocab_size=len(tokens), context=17, position="rope", **shape)).eval()
    ids = tokens.prompt(TEXT)
    maps = head_maps(model, ids, tokens.shown(ids), "small")
    summary = replace(SUMMARY, facts={"text": str(verbs.NAME)})
    path = tmp_path_factory.mktemp("questions") / "report.html"
    write_report(path, survey_of_maps(maps), maps, summary, pack_model(model, tokens), walk="walk.html")
    with opener(browser) as opened:
        page = opened(path, inside=True)
        drawn(page)
        yield page


def answered(page: Page, part: str, guess: int = 0) -> str:
    """Asks, guesses, and gives the answer: what is said of the guess, the finding, the proofs."""
    page.click(f"#quests [data-part={part}]")
    page.locator("#guesses button").nth(guess).click()
    page.wait_for_selector("#quest-answer .found")
    lines = page.locator("#quest-answer > p:not(.caption), .proofs li").all_inner_texts()
    return " ".join(plain(line) for line in lines)


HERE = "In this model and this sentence no head finds"
W, OTHER, PRESENT, BOTH = "trabajaría", "comería", "trabaja", "comió"
ALL = " ".join(f"L{n}.H{h}" for n in range(2) for h in range(3))
KINDS = {
    "alone": ({"": W, "L0.H1": OTHER, "L0.H2": PRESENT},
              "You are right. L0.H2 finds the tense, in this model and this sentence. "
              "Without L0.H2, the person and the verb stay and the tense changes: trabajaría → trabaja", 2),
    "wrong": ({"": W, "L0.H1": OTHER, "L0.H2": PRESENT},
              "Not quite. Look at what changed: L0.H2 finds the tense, in this model and this sentence. "
              "Without L0.H2, the person and the verb stay and the tense changes: trabajaría → trabaja "
              "Without L0.H1, the person and the tense stay and the verb changes: trabajaría → comería", 1),
    "several": ({"": W, "L0.H2": PRESENT, "L1.H0": PRESENT},
                "You are right. L0.H2 and L1.H0 are each needed for the tense: without any one of them it changes.", 3),
    "mixed": ({"": W, "L0.H1": BOTH}, "You are right. No head finds the tense alone: without L0.H1, the "
              "verb changes with it. Without L0.H1, the person stays and the verb and the tense change: "
              "trabajaría → comió", 6),
    "pair": ({"": W, "L0.H1 L1.H2": PRESENT}, f"It is one of them. {HERE} the tense alone: L0.H1 and L1.H2 share "
             "the work. Without either of them the tense stays; without both it changes. Without L0.H1 and L1.H2, the "
             "person and the verb stay and the tense changes", 1),
    "many": ({"": W, ALL: PRESENT}, f"You are right. {HERE} the tense alone: several share the work. 6 heads "
             "must be silent together before it changes: L0.H0, ", 6),
    "none": ({"": W}, "You are right. No head finds the tense: it stays without any head. The word where the model "
             "stands is enough. Without all heads together, the person, the verb and the "
             "tense stay: trabajaría → trabajaría", 6),
    "unlearnt": ({"": ","}, "The model says ,, which tells nothing of the tense: it has not learned this sentence.", 0),
}  # fmt: skip


@every("kind", KINDS)
def test_every_question_ends(page: Page, kind: str) -> None:
    said, answer, guess = KINDS[kind]
    page.evaluate(PLANT, said)
    assert answer in answered(page, "tense", guess)
    if kind == "alone":  # each card says what breaks, whatever its badges
        effects = {name: text for name, text in zip(
            page.locator("#grid .head .title").all_inner_texts(), page.locator("#grid .effect").all_inner_texts(),
            strict=True) if text}  # fmt: skip
        assert effects == {"L0.H1": "without it: the verb", "L0.H2": "without it: the tense"}
        page.click(".head[data-number='0'] .picture")  # and goes on saying it while heads are silenced
        assert page.locator("#grid .effect.strong").count() == 2
        page.click("#wake")
        # Each head alone, those first that break what is asked for: the rank is not that of the likeliest word's fall.
        page.locator("#quest-answer summary").click()
        assert page.locator(".trials tr").nth(1).inner_text().split()[:5] == ["L0.H2", "trabaja", "✓", "✓", "✗"]
        assert "? the word tells nothing of it" in page.inner_text(".trials + .caption")


def test_the_person_is_asked_for_where_the_pronoun_comes(page: Page) -> None:
    page.evaluate(PLANT, {"": "él", "L1.H0": "yo"})
    answer = answered(page, "person", 3)
    assert page.locator("#sentence .looking bdi").inner_text() == "="
    assert answer.startswith("You are right. L1.H0 finds the person") and "the person changes: él → yo" in answer
    page.click(".head[data-number='3'] .picture")
    assert page.inner_text("#quest-live") == "Without L1.H0, the person changes: él → yo"
    page.click("#wake")
    # A word of the other language, and a sign, show nothing of the person: two other heads find it together.
    page.evaluate(PLANT, {"": "él", "L1.H0": "I", "L0.H1 L0.H2": "tú"})
    answer = answered(page, "person", 6)
    assert answer.startswith(f"You are right. {HERE} the person alone: L0.H1 and L0.H2 share the work.")
    assert answer.endswith("Without L0.H1 and L0.H2, the person changes: él → tú")
    assert "stands before =, the same in Spanish after it" in page.inner_text("#quest-how")
    answer = answered(page, "person", 3)
    assert answer.startswith("Not quite.") and answer.endswith(
        "Without L1.H0, the language changes, which says nothing of the person: él → I")  # fmt: skip


def test_a_sign_is_no_person(page: Page) -> None:
    page.evaluate(PLANT, {"": "él", "L1.H0": "="})
    answer = answered(page, "person", 6)
    assert answer.startswith("You are right. No head finds the person alone: without some heads another kind of word")
    assert answer.endswith("Without L1.H0, another kind of word comes, which says nothing of the person: él → =")
    link = page.locator(".hint .to-walk")
    page.focus(".head[data-number='1'] .picture")  # to look through another head changes nothing
    assert "L1.H0" in link.inner_text() and "#L1.H0/4/" in (link.get_attribute("href") or "")
    assert page.locator(".invite:visible").count() == 0


def test_the_walk_opens_at_the_head_that_is_asked_for(page: Page) -> None:
    page.evaluate("() => { window.places = []; byWeight = (_, ids, at) => (places.push(at), [`L0.H${at % 3}`]); }")
    page.fill("#own-text", "he works")
    page.wait_for_function("() => typed.text === 'he works'")
    page.click("#quests [data-part=tense]")  # at `él`, the sixth token: before an answer the one that it hangs on most
    link = page.locator(".hint .to-walk")
    assert page.evaluate("places.at(-1)") == 5 and "#L0.H2/5/" in (link.get_attribute("href") or "")
    page.evaluate(PLANT, {"": W, "L1.H1": PRESENT})
    answered(page, "tense", 4)
    assert "#L1.H1/5/" in (link.get_attribute("href") or "")
    page.locator("#sentence .word").nth(1).click()
    assert "#L0.H1/1/" in (link.get_attribute("href") or "")
    page.get_by_role("button", name="back to “he works”").click()  # one's own sentence is not lost
    assert page.input_value("#own-text") == "he works" and page.locator("#quest-how").inner_text() == ""


def test_a_question_about_ones_own_sentence(page: Page) -> None:
    mine = page.get_by_role("button", name="ask it about mine")
    for text, place in {"yo trabajo , tú trabajas , él": "él", "zzz": ""}.items():
        page.fill("#own-text", text)
        page.wait_for_function("(text) => typed.text === text", arg=text)
        page.evaluate(PLANT, {"": "trabaja", "L0.H2": "trabajó"})
        page.click("#quests [data-part=tense]")
        assert mine.count() == bool(place)  # the model does not know each word of the second
    page.fill("#own-text", "yo trabajo , tú trabajas , él")
    page.wait_for_function("() => typed.ids.length === 8 && typed.pieces.at(-1).text === 'él'")
    page.click("#quests [data-part=tense]")
    mine.click()
    assert page.input_value("#own-text").endswith(", él") and mine.count() == 0
    assert plain(page.inner_text("#quest-how")).startswith("After 'él' the model says trabaja.")
    page.locator("#guesses button").nth(2).click()
    page.wait_for_selector("#quest-answer .found")
    assert page.locator(".proofs li").all_inner_texts() == [
        "Without L0.H2, the person and the verb stay and the tense changes: trabaja → trabajó"
    ]


def test_what_was_never_learned_is_said(page: Page) -> None:
    trouble = page.locator("#own-trouble")
    turned = {"él cantaba =": True, "he works = he": False, "he works = you": True, "yo canto": False}
    for text, is_turned in turned.items():
        page.fill("#own-text", text)
        page.wait_for_function("(text) => typed.text === text", arg=text)
        assert ("English before =" in trouble.inner_text()) is is_turned, text
    for text in ("the girl ...", "the girl …"):  # as the examples write it
        page.fill("#own-text", text)
        page.wait_for_function("() => typed.ids.length === 3")
    page.fill("#own-text", "he ____ now")  # as many lines as one likes
    page.wait_for_function("() => typed.ids.length === 2")
    assert "'now'" in plain(trouble.inner_text())
    for text, put in (("he works = el ___", "he works = él ___"), ("El niño", ""), ("yo canto , el", "yo canto , él")):
        page.fill("#own-text", text)
        page.wait_for_function("(text) => typed.text === text", arg=text)
        assert ("the subject" in trouble.inner_text()) is bool(put), text
        if put:  # a subject has the same letters, but for the accent
            trouble.get_by_role("button", name="él", exact=True).click()
            assert page.input_value("#own-text") == put
    page.evaluate("() => { goOn = () => ({ ...typed }); }")
    page.click("#again")
    page.click("#likeliest")
    assert trouble.inner_text().startswith("The next token is the end of the text")
    page.locator("#temperature").fill("2")
    assert "Temperature 2.0: chances come closer" in page.inner_text("#verdict")
    page.locator("#temperature").fill("1")
    assert "Temperature" not in page.inner_text("#verdict")


def test_what_the_model_does_not_know_has_no_maps(page: Page) -> None:
    assert page.inner_text("h1") == "verbs"  # whatever the folder is called
    page.fill("#own-text", "he would dragón?")
    page.wait_for_function("() => document.querySelectorAll('#sentence .unknown').length > 0")
    assert page.locator("#sentence .word").all_inner_texts()[-2:] == ["dragón", "?"]
    assert set(page.locator("#grid .largest").all_inner_texts()) == {"no map"} and page.inner_text("#saying") == ""
    assert "→" not in page.inner_text("#own-trouble")  # no word is near
    look = "(id) => Number(getComputedStyle(document.getElementById(id)).opacity)"
    assert [page.evaluate(look, id) < 0.6 for id in ("likeliest", "sampled", "again")] == [True, True, False]
    page.click("#again")
    page.wait_for_function("() => !document.querySelector('#sentence .unknown')")


def test_spanish_opens_in_spanish(page: Page) -> None:
    page.click("#again")
    page.click("#languages [lang=es]")
    assert page.input_value("#own-text") == verbs.told()["spanish"] and page.input_value("#own-text").startswith("yo ")
    page.evaluate(PLANT, {"": W, "L0.H2": PRESENT})
    answer = answered(page, "tense", 2)
    assert page.input_value("#own-text") == TEXT  # the sentence of the questions
    assert answer.endswith("2, la persona y el verbo se mantienen y el tiempo verbal cambia: trabajaría → trabaja")
    page.fill("#own-text", "he works")
    page.wait_for_selector("#sentence .word:nth-child(3):last-child")
    page.click("#languages [lang=en]")
    assert page.input_value("#own-text") == "he works"  # one's own sentence stays
    page.click("#again")
    assert page.input_value("#own-text") == TEXT


def test_on_a_phone_and_for_all(page: Page) -> None:
    page.evaluate(PLANT, {"": W, "L0.H2": PRESENT})
    answered(page, "verb", 0)
    page.locator("#quest-answer summary").click()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert width_beyond(page) == 0 and faults(page) == []
        # What a silenced head changes is read beside the pictures: on a phone below them.
        page.click(".head[data-number='2'] .picture")
        assert page.inner_text("#live-below" if width == 390 else "#quest-live").startswith("Without L0.H2, the person")
        assert page.is_visible("#live-below") is (width == 390) and not page.is_visible("#verdict-below")
        page.click("#wake")
