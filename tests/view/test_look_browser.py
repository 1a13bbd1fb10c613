"""The first screen of the report in a real Chromium: a sentence that one touches and types, and silenced heads."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_types import Browser, Page
from browsing import Opener, faults, opener, width_beyond
from report_browsing import drawn, open_head, picture, pixel, plain, press, ramp, readout, title
from surveys import survey_of_maps

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.watch import head_maps
from headwise.models.pack import pack_model
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

LINES = ["he would call = él llamaría", "I work = yo trabajo", "you will eat = tú comerás"]
TEXT = LINES[0]
AT = 5  # él


def small_model() -> tuple[GPT, Tokens]:
    """Two layers of three heads, with weights so large that every head matters."""
    torch.manual_seed(3)
    tokens = Tokens.words(LINES)
    shape = {"n_layers": 2, "n_heads": 3, "head_dim": 4, "d_model": 12, "d_ff": 20}
    model = GPT(GPTConfig(vocab_size=len(tokens), context=17, position="rope", **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    return model.eval(), tokens


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokens = small_model()
    ids = tokens.prompt(TEXT)
    maps = head_maps(model, ids, tokens.shown(ids), "small")
    path = tmp_path_factory.mktemp("look") / "report.html"
    write_report(path, survey_of_maps(maps), maps, model=pack_model(model, tokens))
    return path


@pytest.fixture(scope="module")
def shared(browser: Browser, report: Path) -> Iterator[Page]:
    with opener(browser) as opened:
        page = opened(report, inside=True)
        drawn(page)
        yield page


@pytest.fixture
def page(shared: Page) -> Page:
    """One page for many tests: each finds it as it opens."""
    shared.keyboard.press("Escape")
    shared.mouse.move(1, 1)  # where no word lies, however the page is scrolled
    shared.evaluate("view.changes.clear(); emit('changes'); view.at = -1; setOwn(opening, restingPlace)")
    return shared


def until(page: Page, condition: str) -> None:
    """Waits; the policy of the page lets no condition be compiled in it, so it is asked again and again."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    pytest.fail(f"never came true: {condition}")


def type_in(page: Page, sentence: str) -> None:
    page.fill("#own-text", sentence)
    until(page, f"typed.text === '{sentence}'")


def words(page: Page) -> list[str]:
    return page.locator("#sentence .word bdi").all_inner_texts()


def lit(page: Page) -> int:
    return int(page.locator("#grid .square").first.evaluate("e => e.style.getPropertyValue('--lit')"))


def saying(page: Page) -> str:
    return plain(page.inner_text("#saying"))


def chances(text: str, *silenced: str) -> dict[str, float]:
    """What the model in Python expects after a text."""
    model, tokens = small_model()
    ids = torch.tensor([tokens.prompt(text)])
    with torch.no_grad(), hw.ablate(model, list(silenced)):
        last = model(ids)[0, -1].softmax(-1)
    return dict(zip(tokens.shown(range(len(tokens))), last.tolist(), strict=True))


def percent(text: str) -> float:
    return float(text.split()[0].replace("\u2212", "-").replace("+", "")) / 100


def bars(page: Page) -> dict[str, list[float]]:
    """Each token of the table with its probabilities: as it is, and without the silenced heads."""
    rows: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('#next tr')].slice(1).map((r) => [...r.cells].map((c) => c.textContent))"
    )
    return {name: [percent(cell) for cell in cells] for name, *cells in rows}


def test_it_opens_with_a_sentence_and_looks_where_the_last_word_is_predicted(page: Page) -> None:
    assert words(page) == ["<|end|>", *TEXT.split()]
    box = page.locator("#sentence").bounding_box()
    assert box is not None and box["y"] < 300 and box["height"] > 40  # large, and seen at once
    assert lit(page) == AT and saying(page).startswith("At 'él', all heads together look most at ")
    chosen = page.locator("#next .chosen")
    assert chosen.locator("bdi").inner_text() == "llamaría"
    assert "él" in page.inner_text("#next-title")


def test_a_word_under_the_pointer_lights_its_row_and_a_click_pins_it(page: Page) -> None:
    word = page.locator("#sentence .word")
    word.nth(3).hover()
    assert lit(page) == 3 and "looking" in (word.nth(3).get_attribute("class") or "")
    assert page.evaluate("getComputedStyle(document.querySelector('.lit')).display") == "block"
    square, mark = (page.locator(f".head[data-number='0'] {part}").bounding_box() for part in (".square", ".lit"))
    assert square is not None and mark is not None
    assert mark["y"] - square["y"] == pytest.approx(square["height"] * 3 / 7, abs=2.5)
    shades = [word.nth(at).evaluate("e => getComputedStyle(e).backgroundColor") for at in range(7)]
    assert shades[4] == shades[6] == f"rgb({', '.join(map(str, ramp(page, 0)))})" and len(set(shades)) > 2
    word.nth(4).click()
    word.nth(1).hover()
    assert lit(page) == 4 and word.nth(4).get_attribute("aria-pressed") == "true"
    assert page.evaluate("location.hash") == "#/4"
    page.keyboard.press("Escape")
    assert lit(page) == -1 and page.is_hidden("#free") and page.evaluate("location.hash") == ""
    assert saying(page) == "Choose a word to see where the heads look from it."


def test_a_head_under_the_pointer_colours_the_sentence_with_its_own_look(page: Page) -> None:
    model, tokens = small_model()
    ids = tokens.prompt(TEXT)
    weights = next(m.weights for m in head_maps(model, ids, tokens.shown(ids), "").maps if m.name == "L1.H2")
    page.locator("#sentence .word").nth(AT).click()
    page.locator(".head[data-number='5'] .square").hover()
    best = int(weights[AT].argmax())
    name = tokens.shown(ids)[best]
    assert saying(page).startswith(f"At 'él', L1.H2 looks at '{name}' ({weights[AT, best]:.3f})")
    darkest = page.locator("#sentence .word").nth(best).evaluate("e => getComputedStyle(e).backgroundColor")
    assert darkest == f"rgb({', '.join(map(str, ramp(page, 3)))})"
    page.mouse.move(640, 60)
    assert saying(page).startswith("At 'él', all heads together")


def test_by_keyboard_alone(page: Page) -> None:
    page.focus("#sentence .word[tabindex='0']")
    press(page, "ArrowLeft", "ArrowLeft")
    here = lit(page)
    assert page.evaluate("document.activeElement.textContent") == words(page)[here]
    page.keyboard.press("Enter")
    assert page.evaluate("view.pinned") and page.evaluate("location.hash") == f"#/{here}"
    page.focus(".picture[tabindex='0']")
    press(page, "ArrowRight", "ArrowDown")
    assert "L1.H1 looks" in saying(page)
    page.keyboard.press("s")
    assert page.locator(".head.silent").get_attribute("data-number") == "4"
    page.keyboard.press("s")
    assert page.locator(".head.silent").count() == 0
    page.keyboard.press("Enter")  # what the picture's label says: silence
    assert page.locator(".head.silent").get_attribute("data-number") == "4" and page.is_hidden("dialog")
    page.keyboard.press("Enter")
    page.keyboard.press("e")
    assert title(page) == "L1.H1"
    page.keyboard.press("s")
    assert page.locator(".head.silent").get_attribute("data-number") == "4"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.closest('.head').dataset.number") == "4"


def test_an_own_sentence_is_what_python_computes(page: Page) -> None:
    type_in(page, "you will eat")
    assert words(page) == ["<|end|>", "you", "will", "eat"] and lit(page) == 3
    wanted = chances("you will eat")
    shown = bars(page)
    assert len(shown) >= 4
    assert all(wanted[name] == pytest.approx(values[0], rel=0.06, abs=6e-5) for name, values in shown.items())
    assert max(wanted, key=wanted.__getitem__) == next(iter(shown))
    assert page.locator(picture(0)).evaluate("e => e.width") == 4
    page.click("#likeliest")
    assert words(page)[-1] == max(wanted, key=wanted.__getitem__).replace("<|end|>", words(page)[-1])
    assert len(words(page)) == 5
    page.click("#sampled")
    assert len(words(page)) == 6
    type_in(page, "he dances = él")
    assert words(page)[2] == "dances" and "unknown" in (
        page.locator("#sentence .word").nth(2).get_attribute("class") or ""
    )
    assert "does not know 'dances', so it says nothing" in plain(page.inner_text("#own-trouble"))
    for place in ("#verdict", "#next-panel", "#offers"):  # no prediction from words that it lacks
        assert page.is_hidden(place), place
    assert page.is_disabled("#likeliest") and page.is_disabled("#sampled")
    type_in(page, "ella wuld dances")
    assert page.locator("#own-trouble button").all_inner_texts() == ["would"]  # no other is near
    page.locator("#own-trouble button").click()
    assert words(page)[1:] == ["ella", "would", "dances"] and page.input_value("#own-text") == "ella would dances"
    type_in(page, "he dances = él")
    page.fill("#own-text", "he " * 40)
    until(page, "document.getElementById('own-trouble').textContent.includes('reads 17 at most')")
    assert words(page)[2] == "dances"  # what was there stays
    type_in(page, "he " * 16)
    page.click("#likeliest")  # the older half makes room
    assert len(words(page)) in (8, 9) and page.inner_text("#own-trouble") == ""
    page.click("#again")
    assert words(page)[1:] == TEXT.split() and page.inner_text("#own-trouble") == ""
    page.click("#vocabulary summary")
    page.get_by_role("button", name="work", exact=True).click()
    assert words(page)[-1] == "work"


def test_what_can_stand_next_is_offered_while_one_types(page: Page) -> None:
    offers = page.locator("#offers-list button")
    type_in(page, "he wou")
    assert offers.all_inner_texts()[0].startswith("would") and offers.count() == 1
    assert page.inner_text("#own-trouble") == "" and page.locator(".word.unknown").count() == 0
    assert lit(page) == 1  # what follows is asked of the last whole word
    offers.first.click()
    assert page.input_value("#own-text") == "he would" and page.evaluate("document.activeElement.id") == "own-text"
    wanted = chances("he would")
    del wanted["<|end|>"]
    likeliest = sorted(wanted, key=wanted.__getitem__, reverse=True)
    assert [offer.split()[0] for offer in offers.all_inner_texts()] == [w for w in likeliest if wanted[w] >= 0.001][:6]
    type_in(page, "he xyz")
    assert page.locator(".word.unknown bdi").all_inner_texts() == ["xyz"]


def test_a_slider_scales_a_head_and_the_prediction_follows(page: Page) -> None:
    open_head(page, "L0.H1")
    for key, factor in (("Home", -1.0), ("End", 2.0)):
        page.focus("#factor")
        page.keyboard.press(key)
        until(page, f"view.changes.get('L0.H1') === {factor}")
        model, tokens = small_model()
        with torch.no_grad(), hw.steer(model, {"L0.H1": factor}):
            last = model(torch.tensor([tokens.prompt("he would call = él")]))[0, -1].softmax(-1)
        wanted = dict(zip(tokens.shown(range(len(tokens))), last.tolist(), strict=True))
        assert all(wanted[name] == pytest.approx(cells[1], rel=0.06, abs=6e-5) for name, cells in bars(page).items())
        assert f"with L0.H1 \u00d7 {factor:g}".replace("-", "\u2212") in page.inner_text("#large-verdict")
    page.click("#large-silence")
    assert page.evaluate("[...view.changes]") == [["L0.H1", 0]] and page.input_value("#factor") == "0"
    page.click("#large-silence")
    assert page.evaluate("view.changes.size") == 0 and page.inner_text("#factor-shown") == "\u00d7 1"


def test_languages(report: Path, open_page: Opener) -> None:
    page = open_page(report, inside=True, locale="es-AR")
    assert page.locator("html").get_attribute("lang") == "es" and page.inner_text("#own label") == "Tu propia frase"
    page.click("#languages [lang=en]")
    page.locator("#sentence .word").nth(4).click()
    assert page.url.endswith("?lang=en#/4") and page.evaluate("firstLanguage()") == "en"


def test_a_silenced_head_is_the_ablated_model(page: Page) -> None:
    before = pixel(page, 3, AT, 1)
    page.click(".head[data-number='1'] .picture")
    page.get_by_role("button", name="Silence L0.H2").click()
    assert page.locator(".head.silent").count() == 2
    whole, less = chances("he would call = él"), chances("he would call = él", "L0.H1", "L0.H2")
    for name, (first, second, change) in bars(page).items():
        assert whole[name] == pytest.approx(first, rel=0.06, abs=6e-5)
        assert less[name] == pytest.approx(second, rel=0.06, abs=6e-5)
        assert less[name] - whole[name] == pytest.approx(change, rel=0.06, abs=6e-4)
    assert page.locator("#next th[scope='col']").nth(2).inner_text() == "as changed"
    likeliest = [max(table, key=table.__getitem__) for table in (whole, less)]
    verdict = plain(page.inner_text("#verdict"))
    assert verdict.startswith(f"The model {'still ' * (likeliest[0] == likeliest[1])}says '{likeliest[1]}'")
    assert ", without L0.H1, L0.H2. " in verdict
    assert pixel(page, 3, AT, 1) != before  # the layer above reads another stream
    page.click("#wake")
    assert page.locator(".head.silent").count() == 0 and pixel(page, 3, AT, 1) == before


def test_each_head_in_turn_is_ranked_by_what_its_silence_takes(page: Page) -> None:
    page.click("#each")
    page.wait_for_selector("#ranking li >> nth=5")
    names = page.locator("#ranking .token").all_inner_texts()
    wanted = {f"L{i // 3}.H{i % 3}": chances("he would call = él", f"L{i // 3}.H{i % 3}")["llamaría"] for i in range(6)}
    assert sorted(names) == sorted(wanted)
    assert all(wanted[a] <= wanted[b] + 6e-5 for a, b in pairwise(names))  # as near as the page shows them
    parts = [percent(text) for text in page.locator("#ranking .part").all_inner_texts()]
    assert parts == pytest.approx([wanted[name] for name in names], rel=0.06, abs=6e-5)
    page.locator("#ranking .token").first.click()
    assert page.evaluate("[...view.changes]") == [[names[0], 0]]
    assert page.evaluate("document.activeElement.textContent") == names[0]
    page.locator(".word").nth(2).click()  # and so does another word; the way back finds it again
    assert page.is_hidden("#ranking") and page.locator(".effect:not(:empty)").count() == 0
    page.locator(".word").nth(AT).click()
    assert page.is_visible("#ranking") and page.locator(".effect:not(:empty)").count() > 0
    page.locator("#next .token").nth(1).click()  # another token is followed: the ranking no longer holds
    assert page.is_hidden("#ranking")


def test_the_question_leaves_time_to_think_before_its_answer(page: Page) -> None:
    """Of a model of no verbs: on which head hangs the word?"""
    type_in(page, "I work")
    page.click("#quests button")
    assert words(page)[1:] == TEXT.split() and page.evaluate("view.pinned") and lit(page) == AT
    before = max(chances("he would call = él"), key=chances("he would call = él").__getitem__)
    assert f"the model says {before}." in page.inner_text("#quest-how")
    page.click(".head[data-number='2'] .picture")
    less = chances("he would call = él", "L0.H2")
    after = max(less, key=less.__getitem__)
    assert page.inner_text("#quest-live").endswith(f"{before} → {after}")
    page.click("#languages [lang=es]")
    assert page.locator("#guesses button").last.inner_text() == "ninguna sola"
    page.click("#languages [lang=en]")
    page.locator("#guesses button").last.click()
    page.wait_for_selector("#quest-answer .found")
    changed = {name for name in (f"L{i // 3}.H{i % 3}" for i in range(6)) if best_without(name) != before}
    rows = page.evaluate("[...document.querySelectorAll('.trials tr')].slice(1).map((r) => r.textContent)")
    assert len(rows) == 6 and {row[:5] for row in rows if "✗" in row} == changed
    assert page.is_hidden("#guesses") and page.locator(".effect.strong").count() == len(changed)
    type_in(page, "I work")  # another sentence ends the question
    assert page.inner_text("#quest-how") == "" and page.locator(".effect:not(:empty)").count() == 0


def best_without(name: str) -> str:
    less = chances("he would call = él", name)
    return max(less, key=less.__getitem__)


def test_a_place_to_fill_and_the_temperature(page: Page) -> None:
    type_in(page, "you will ___ yo")
    assert words(page)[1:] == ["you", "will"] and "'yo' stands behind" in plain(page.inner_text("#own-trouble"))
    wanted = chances("you will")
    best = max(wanted, key=lambda name: wanted[name] * (name != "<|end|>"))
    page.locator("#offers-list button").first.click()
    assert page.input_value("#own-text") == f"you will {best} yo" and words(page)[1:] == ["you", "will", best, "yo"]
    type_in(page, "he would call = él")
    page.locator("#temperature").evaluate("e => { e.value = 2; e.dispatchEvent(new Event('input')); }")
    model, tokens = small_model()
    last = (model(torch.tensor([tokens.prompt("he would call = él")]))[0, -1] / 2).softmax(-1).tolist()
    warm = dict(zip(tokens.shown(range(len(tokens))), last, strict=True))
    assert all(warm[name] == pytest.approx(cells[0], rel=0.06, abs=6e-5) for name, cells in bars(page).items())
    page.locator("#temperature").evaluate("e => { e.value = 1; e.dispatchEvent(new Event('input')); }")


def test_what_each_head_adds_by_itself(page: Page) -> None:
    model, tokens = small_model()
    parts = hw.attribute(model, torch.tensor([tokens.prompt("he would call = él")]), tokens.encode("llamaría")[0]).heads
    page.click("#each")
    page.wait_for_selector("#ranking li >> nth=5")
    page.check("#by-adds")
    names = page.locator("#ranking .token").all_inner_texts()
    assert names == sorted(parts, key=lambda name: -parts[name])
    texts = page.locator("#ranking .then").all_inner_texts()
    shown = [float(text.split()[1].replace("\u2212", "-")) for text in texts]
    assert shown == pytest.approx([parts[name] for name in names], abs=0.006)
    page.uncheck("#by-adds")


def test_the_whole_model_has_its_sizes_and_opens(page: Page) -> None:
    sizes = page.locator("#whole .part-size").all_inner_texts()
    layer = ["3 heads, each 7 \u00d7 7 weights over 4 numbers a token", "12 → 20 → 12"]
    vocabulary = len(small_model()[1])
    assert sizes[:-1] == [f"7 of {vocabulary} words", "7 \u00d7 12", *layer, *layer, "7 \u00d7 12",
                          f"{vocabulary} numbers, one a word"]  # fmt: skip
    wanted = chances("he would call = él")
    assert page.inner_text(".part-next bdi") == max(wanted, key=wanted.__getitem__)
    page.locator("#whole summary").nth(1).click()
    type_in(page, "you will eat")
    assert page.locator("#whole details").nth(1).get_attribute("open") is not None  # it stays open
    assert page.locator("#whole .embedding canvas").evaluate("e => [e.width, e.height]") == [12, 4]
    page.click("#whole .part-head >> nth=4")
    assert title(page) == "L1.H1"
    page.keyboard.press("Escape")


def test_an_address_opens_a_head_a_token_and_a_sentence(page: Page, report: Path, open_page: Opener) -> None:
    page.locator("#sentence .word").nth(4).click()
    open_head(page, "L0.H2")
    assert page.evaluate("location.hash") == "#L0.H2/4"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#L1.H0/4"
    page.go_back()
    page.wait_for_selector("dialog:not([open])", state="attached")
    until(page, "location.hash === '#/4'")
    open_head(page, "L0.H2")
    page.keyboard.press("Escape")
    until(page, "location.hash === '#/4'")
    sent = open_page(report, inside=True)
    for address, name, at, text in (
        ("#L0.H1/3", "L0.H1", 3, TEXT),
        ("#L1.H2/2/you%20will%20eat", "L1.H2", 2, "you will eat"),
        ("#/1/I%20work", "", 1, "I work"),
        ("#%/9/%E0", "", 1, "I work"),  # an address that nobody made
    ):
        sent.evaluate("(hash) => { location.hash = hash; }", address)
        until(sent, f"(view.open < 0 ? '' : heads[view.open].name) === '{name}' && typed.text === '{text}'")
        assert [sent.evaluate("view.at"), sent.evaluate("typed.text")] == [at, text], address


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "reduced_motion": "reduce"}])
def test_no_serious_fault_of_accessibility(report: Path, open_page: Opener, options: dict[str, Any]) -> None:
    page = open_page(report, inside=True, **options)
    drawn(page)
    page.click(".head[data-number='0'] .picture")
    page.click("#each")
    page.wait_for_selector("#ranking li >> nth=5")
    for details in page.locator("details").all():
        details.evaluate("e => { e.open = true; }")
    assert faults(page) == []
    open_head(page, "L1.H1")
    assert faults(page) == []


def test_on_a_phone_sentence_and_prediction_come_first_and_all_is_touched(report: Path, open_page: Opener) -> None:
    page = open_page(report, 390, 844, inside=True, has_touch=True, is_mobile=True)
    drawn(page)
    assert width_beyond(page) == 0
    parts = ("#sentence", "#verdict", "#quest", "#own-text", ".picture", ".hint", "#heads .tools", "#next-panel")
    tops = [page.locator(part).first.bounding_box() for part in parts]
    places = [box["y"] for box in tops if box is not None]
    assert places == sorted(places) and places[0] < 844 / 4 and places[3] < 844 and page.is_hidden(".hint .by-keys")
    lefts = {round(box["x"]) for box in (e.bounding_box() for e in page.locator("#grid .head").all()) if box}
    assert len(lefts) == 2  # the grid wraps
    page.locator("#sentence .word").nth(2).tap()
    assert lit(page) == 2 and page.evaluate("view.pinned")
    page.locator(".head[data-number='0'] .picture").tap()
    assert page.locator(".head.silent").count() == 1 and page.is_visible("#verdict-below")
    page.locator(".head[data-number='4'] .name").tap()
    assert title(page) == "L1.H1" and width_beyond(page) == 0
    assert page.evaluate("document.getElementById('large').scrollWidth") <= 390
    cell = page.evaluate("panes[0].cell")
    page.locator(".map").first.tap(position={"x": 1.5 * cell, "y": 2.5 * cell})
    assert readout(page).startswith("token 2 'would' looks at token 1 'he': ")
    for name in ("#previous", "#next-head", "#close"):
        box = page.locator(name).bounding_box()
        assert box is not None and min(box["width"], box["height"]) >= 40
