"""The guided walk in a real Chromium: eight steps with the trace's numbers, by mouse, by keys, in two languages."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_types import Browser, Page
from browsing import Opener, faults, opener, width_beyond
from cases import every
from small_models import shaken
from surveys import survey_of_maps

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.steps import head_steps
from headwise.heads.watch import head_maps
from headwise.models.pack import pack_model
from headwise.view.page import walk_html
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

HOSTILE = ("<script>alert(1)</script>", '"><img/src=x>', "{count}", "*b*", "k_j", "עברית")
WORDS = ("she", "writes", "he", "ran", "a", "letter", *HOSTILE)
TEXT = "she ran a letter he writes"
STEPS = 8


def model_of(preset: str, **changes: Any) -> GPT:
    torch.manual_seed(11)
    sizes = {"n_heads": 3, "d_model": 18, "d_ff": 22, "n_layers": 2, "context": 23}
    config = GPTConfig(vocab_size=len(WORDS) + 1, **{**PRESETS[preset].shape, **sizes, **changes})
    return shaken(GPT(config), size=0.2)


MODELS = {
    "learned positions": lambda: model_of("nanogpt", bias=True),
    "rotation and qk-norm": lambda: model_of("verbs", n_heads=4, n_kv_heads=2, d_model=24),
    "one layer": lambda: model_of("microgpt", n_layers=1, d_model=12),
}
tokens = Tokens.words([" ".join(WORDS)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk")


@pytest.fixture(scope="module")
def walk(browser: Browser, folder: Path) -> Iterator[Page]:
    """One page that several tests walk through, from its beginning each."""
    path = written(folder, "learned positions")
    with opener(browser) as opened:
        yield opened(path, reduced_motion="reduce")


def written(
    folder: Path, model: str, layer: int = 0, head: int = 1, at: int = 4, text: str = TEXT, **more: Any
) -> Path:
    path = folder / "walk.html"
    document = walk_html(pack_model(MODELS[model](), tokens), text, layer, head, at, **{"name": "toy", **more})
    path.write_text(document, encoding="utf-8")
    return path


def go(page: Page, step: int) -> None:
    page.locator(f"#steps [data-step='{step}']").click()


def numbers(page: Page, cell: str, count: int) -> list[float]:
    """The numbers of the cells `cell:0`, `cell:1` and so on."""
    read = "([cell, n]) => Array.from({length: n}, (_, i) => document.querySelector(`[data-cell='${cell}:${i}']`)"
    texts = page.evaluate(read + ".dataset.number)", [cell, count])
    return [float(text.replace("\u2212", "-")) for text in texts]


@every("name, layer", [("learned positions", 0), ("rotation and qk-norm", 1), ("one layer", 0)])
def test_the_numbers_are_those_of_the_trace(open_page: Opener, folder: Path, name: str, layer: int) -> None:
    model, head, at = MODELS[name](), 2, 4
    ids = tokens.prompt(TEXT)
    steps = head_steps(model, ids, tokens.shown(ids), layer, head, at, name)
    page = open_page(written(folder, name, layer, head, at), reduced_motion="reduce")

    def same(cell: str, expected: Any) -> None:
        assert numbers(page, cell, len(expected)) == pytest.approx(list(expected), abs=1.01e-4), cell

    same("x", steps.x)
    go(page, 1)
    same("q", steps.query)
    for key in steps.keys:
        same(f"k{key.position}", key.key)
    go(page, 2)
    for key in steps.keys:
        same(f"qk{key.position}", [a * b for a, b in zip(steps.query, key.key, strict=True)])
    go(page, 4)
    top = max(key.logit for key in steps.keys)
    for key in steps.keys:
        shifted = key.logit - top
        same(f"s{key.position}", (key.score, shifted, math.exp(shifted), key.weight))
    go(page, 5)
    same("out", steps.out)
    go(page, 6)
    for number, added in enumerate(steps.added):
        same(f"h{number}", added)
    same("new", steps.x_new)
    go(page, 7)
    silenced = f"L{layer}.H{head}"
    with torch.no_grad():
        whole = model(torch.tensor([ids]))[0, at].softmax(-1)
        with hw.ablate(model, [silenced]):
            without = model(torch.tensor([ids]))[0, at].softmax(-1)
    for token in whole.topk(3).indices.tolist():
        same(f"p{token}", (float(whole[token]), float(without[token]), float(whole[token] - without[token])))


def test_pointing_at_a_number_shows_the_two_it_came_from(walk: Page) -> None:
    go(walk, 2)
    walk.locator("[data-cell='qk3:1']").hover()
    marked = walk.locator(".from").evaluate_all("all => all.map(e => e.dataset.cell)")
    assert sorted(marked) == ["k3:1", "q:1"]
    result, a, b = (
        float(n.replace("\u2212", "-")) for n in re.findall(r"\u2212?\d+\.\d+", walk.inner_text("#readout"))
    )
    assert result == pytest.approx(a * b, abs=2e-4)
    go(walk, 3)
    walk.locator("[data-cell='k2:1']").hover()
    assert walk.locator(".from").evaluate_all("all => all.map(e => e.dataset.cell)") == ["k2:0"]


def test_forth_and_back_by_keys_and_by_buttons(walk: Page) -> None:
    go(walk, 0)
    walk.locator("h1").click()
    titles = []
    for _ in range(STEPS):
        titles.append(walk.inner_text("#stage-title"))
        walk.keyboard.press("ArrowRight")
    assert [title[:2] for title in titles] == [f"{n}." for n in range(1, STEPS + 1)] and len(set(titles)) == STEPS
    assert walk.locator("#next").is_disabled()
    walk.locator("#back").click()
    assert walk.inner_text("#stage-title") == titles[-2]
    walk.focus("#next")
    for _ in range(3):  # held down, it stays at the end
        walk.keyboard.press("Enter")
    assert walk.inner_text("#stage-title") == titles[-1]
    walk.locator("#steps [data-step='2']").click()
    walk.locator("[data-cell='q:0']").focus()
    walk.keyboard.press("ArrowRight")  # within a table the arrows belong to its numbers
    walk.keyboard.press("ArrowDown")
    assert walk.evaluate("document.activeElement.dataset.cell") == "k0:1"
    assert walk.inner_text("#stage-title") == titles[2]


def test_it_plays_and_stops_at_the_end(browser: Browser, folder: Path) -> None:
    path = written(folder, "one layer")
    with opener(browser) as opened:
        page = opened(path, reduced_motion="reduce", fresh=True)
        page.clock.install()
        page.keyboard.press("p")
        assert page.inner_text("#play") == "Pause"
        page.clock.run_for(6500)
        assert page.inner_text("#stage-title").startswith("2.")
        page.clock.run_for(60_000)
        assert page.inner_text("#stage-title").startswith("8.") and page.inner_text("#play") == "Play"


def test_text_token_and_head_change_in_the_page(walk: Page) -> None:
    go(walk, 4)
    walk.fill("#text", "he xyzzy ran")
    assert walk.locator(".token").count() == 4
    assert walk.locator(".token.unknown bdi").all_inner_texts() == ["xyzzy"]
    assert "“xyzzy”" in walk.inner_text("#tokens-note")  # of such a text nothing is shown
    assert walk.locator("#stage:visible, #steps:visible, #tokens-note button").count() == 0
    walk.fill("#text", "he Writess ran")
    walk.click("#tokens-note button")
    assert walk.input_value("#text") == "he writes ran" and walk.locator("#stage:visible").count() == 1
    assert walk.locator(".token[aria-pressed=true] bdi").inner_text() == "ran"
    before = walk.locator("[data-cell='s0:3']").inner_text()
    walk.select_option("#head", "L1.H2")
    assert walk.locator("[data-cell='s0:3']").inner_text() != before
    walk.locator(".token").nth(1).click()
    assert walk.locator("tr.arriving").count() == 2  # it may look at itself and at what begins the text
    go(walk, 6)
    walk.locator(".slice").nth(0).click()
    assert walk.input_value("#head") == "L1.H0"
    assert walk.locator(".slice code").all_inner_texts() == ["out[0:6]", "out[6:12]", "out[12:18]"]
    walk.fill("#text", "she " * 30)
    assert walk.locator(".token").count() == 23 and "8" in walk.inner_text("#tokens-note")
    walk.fill("#text", "")
    assert walk.locator(".token").count() == 1
    walk.fill("#text", TEXT)
    walk.select_option("#head", "L0.H1")


def test_hostile_tokens_and_names_stay_text(open_page: Opener, folder: Path) -> None:
    name = "</script><img src=x onerror=alert(2)> {name} *b*"
    page = open_page(
        written(folder, "learned positions", text=" ".join(HOSTILE), at=6, name=name), reduced_motion="reduce"
    )
    for step in range(STEPS):
        go(page, step)
        assert page.locator("img, bdi b, .telling img").count() == 0
        assert page.locator("script[type=module]").count() == 1 and page.locator("script:not([type])").count() == 0
    assert page.locator(".token bdi").all_inner_texts()[1:] == list(HOSTILE)
    assert name in page.title() and name in page.inner_text(".lede")
    go(page, 0)
    assert page.locator(".telling").first.inner_text().count("עברית") == 1


@every(
    "options",
    [
        {"width": 1280, "lang": "en", "checked": range(STEPS)},
        {"width": 390, "lang": "es", "checked": [6]},
        {"width": 390, "lang": "en", "color_scheme": "dark", "numbers": True, "checked": [1, 4, 6, 7]},
    ],
)
def test_every_step_is_readable_everywhere(browser: Browser, folder: Path, options: dict[str, Any]) -> None:
    more = dict(options)
    path = written(folder, "rotation and qk-norm", lang=more.pop("lang"))
    show, checked = more.pop("numbers", False), more.pop("checked")
    with opener(browser) as opened:
        page = opened(path, reduced_motion="reduce", **more)
        page.locator("#numbers").set_checked(show)
        for step in range(STEPS):
            go(page, step)
            if step in checked:
                assert faults(page) == [], step
            assert width_beyond(page) == 0, step


def test_the_switch_of_language_turns_the_whole_walk(walk: Page) -> None:
    english = [walk_text(walk, step) for step in range(STEPS)]
    walk.locator("#languages [lang=es]").click()
    spanish = [walk_text(walk, step) for step in range(STEPS)]
    for before, after in zip(english, spanish, strict=True):
        assert not {"the", "of", "head", "keys", "weight", "sum", "with"} & set(re.findall(r"[a-z]+", after.lower()))
        assert re.findall(r"\d\.\d+", before) == re.findall(r"\d\.\d+", after)
    walk.locator("#languages [lang=en]").click()
    assert walk_text(walk, 0) == english[0]


def walk_text(page: Page, step: int) -> str:
    go(page, step)
    return page.inner_text("#walk").replace(TEXT, "")


def test_a_model_that_does_not_run_in_a_page_is_refused() -> None:
    with pytest.raises(hw.HeadwiseError, match="of 5,000,000 parameters, a page takes 4,000,000"):
        walk_html({"reason": "size", "parameters": 5_000_000, "most": 4_000_000}, "x", 0, 0, 0)


def test_the_report_leads_to_the_walk_and_back(browser: Browser, tmp_path: Path) -> None:
    model, ids = MODELS["learned positions"](), tokens.prompt(TEXT)
    maps, packed = head_maps(model, ids, tokens.shown(ids), "toy"), pack_model(model, tokens)
    document = walk_html(packed, TEXT, 0, 0, 3, report="report.html")
    (tmp_path / "walk.html").write_text(document, encoding="utf-8")
    write_report(tmp_path / "report.html", survey_of_maps(maps), maps, model=packed, walk="walk.html")
    page = browser.new_page(reduced_motion="reduce")
    page.goto((tmp_path / "report.html").as_uri() + "?lang=es#L1.H2/2/he%20ran")
    page.locator("#large .to-walk").click()
    page.wait_for_selector("#stage-title:not(:empty)")
    assert page.input_value("#head") == "L1.H2" and page.input_value("#text") == "he ran"
    assert page.locator(".token[aria-pressed=true]").get_attribute("data-at") == "2"
    assert page.locator("html").get_attribute("lang") == "es"
    page.select_option("#head", "L0.H1")
    page.click("#to-report")
    page.wait_for_selector("dialog[open]")
    assert page.inner_text("#large-title") == "L0.H1" and page.input_value("#own-text") == "he ran"
    page.goto((tmp_path / "walk.html").as_uri() + "#L9.H9/1/he")  # a head that is not there
    assert page.locator("#tokens .token").count() == 2
    # It opens at the head without which the likeliest next word loses most.
    last = torch.tensor([tokens.prompt("he")])
    best = int(model(last)[0, 1].argmax())
    left = {}
    for name in (head.name for head in maps.maps):
        with hw.ablate(model, [name]):
            left[name] = model(last)[0, 1].softmax(-1)[best].item()
    assert page.input_value("#head") == min(left, key=left.__getitem__)
    page.close()
