"""The film in a real Chromium: slider, keyboard and play move curve and pictures together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_types import Page
from browsing import Opener, faults, served_page, width_beyond
from report_browsing import rgba

from headwise.gpt.gpt import GPT
from headwise.gpt.run import FILM, Settings
from headwise.heads.film import Film, unpacked
from headwise.view.look import Live, live_html
from headwise.view.page import package_text, page
from headwise.view.report import FILM_BODY, FILM_STYLES, FILM_WORDS, film_data

pytestmark = pytest.mark.browser

STEPS = [0, 1, 2, 4, 8, 16, 25]
HOSTILE = "</script><img/src=x/onerror=alert(1)>"
Filmed = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Filmed:
    """Frames of models that were never trained, with roles that come, go and come to stay."""
    folder = tmp_path_factory.mktemp("film")
    corpus, config, recipe = Settings(
        steps=25, shape={"n_layers": 2, "d_model": 12, "n_heads": 3, "context": 16}
    ).resolve()
    take = Film(folder, corpus, config, recipe)
    for step in STEPS:
        torch.manual_seed(step)
        model = GPT(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        take(model, step)
    header, *frames = map(json.loads, (folder / FILM).read_text().splitlines())
    for place, frame in enumerate(frames):
        frame["roles"] = [["self"] if place in (1, 4, 5, 6) else []] + [["tense"] if place > 2 else []] * 5
    header["lines"][0][1] = HOSTILE
    losses = [{"step": step, "loss": 3 - step / 20, "tokens_per_second": 1.0} for step in (1, 10, 20, 25)]
    losses[-1]["held_out_loss"] = 2.25
    return header, frames, losses


def expect(actual: Any) -> Any:
    """Playwright's assertions, which wait; imported here, so that tests without a browser are skipped, not failed."""
    from playwright.sync_api import expect as expecting

    return expecting(actual)


@pytest.fixture
def path(film: Filmed, tmp_path: Path) -> Path:
    known = {"L0.H0": ["self"], "L0.H1": ["tense"]}
    body = f'<header><h1>x</h1></header><main id="main">{package_text(FILM_BODY)}</main>'
    assert '"step":802}]' in film_data((*film[:2], [{"step": n} for n in range(803)]), known).replace(" ", "")
    data = {"film-data": film_data(film, known)}
    html = page("x", body, title="x", styles=FILM_STYLES, script="film.js", data=data, words=FILM_WORDS)
    (tmp_path / "film.html").write_text(html)
    return tmp_path / "film.html"


def at(opened: Page) -> int:
    return int(opened.locator("#film-at").input_value())


def cell(opened: Page, head: int, row: int, column: int) -> list[int]:
    return rgba(opened.locator("#film-heads canvas").nth(head), row, column)


def test_slider_and_keyboard_move_curve_and_pictures_together(open_page: Opener, path: Path, film: Filmed) -> None:
    opened = open_page(path, reduced_motion="reduce")
    header, frames, _ = film
    slider, now, line = opened.locator("#film-at"), opened.locator("#film-now"), opened.locator("#film-curves .now")
    assert at(opened) == 6 and "step 25 of 25 · training loss 1.750 · two heads share" in now.inner_text()
    slider.focus()
    places = []
    for key, index in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", 6), ("ArrowLeft", 5)):
        opened.keyboard.press(key)
        assert at(opened) == index and now.inner_text().startswith(f"step {STEPS[index]} of 25")
        assert f"step {STEPS[index]} of 25" in (slider.get_attribute("aria-valuetext") or "")
        places.append(float(line.get_attribute("x1") or 0))
        maps = unpacked(header, frames[index])
        for head, name in enumerate(header["heads"]):
            levels = maps[name][0]
            dark, light = levels[2:, :2].argmax(), levels[2:, :2].argmin()
            pixels = [cell(opened, head, 2 + int(place) // 2, int(place) % 2) for place in (dark, light)]
            assert sum(pixels[0][:3]) <= sum(pixels[1][:3]) and pixels[0][3] == 255
            assert cell(opened, head, 0, 1)[3] == 0  # what a token may not see is empty
    assert places[0] < places[1] < places[2] < places[4] < places[3]
    assert opened.locator("#film-play").inner_text() == "Play"  # and nothing has played by itself
    box = slider.bounding_box()
    assert (
        box is not None
        and opened.evaluate("document.getElementById('film-curves').getBoundingClientRect().left") < box["x"]
    )


def test_roles_are_marked_where_they_are_earned_for_good(open_page: Opener, path: Path) -> None:
    opened = open_page(path)
    buttons = opened.locator("#film-earned button")
    assert buttons.all_inner_texts() == ["step 4: L0.H1, tense", "step 8: L0.H0, self"]  # the survey knows no others
    assert opened.locator("#film-curves .earned").count() == 2
    buttons.first.focus()
    opened.keyboard.press("Enter")
    assert at(opened) == 3 and buttons.first.get_attribute("aria-pressed") == "true"
    assert opened.evaluate("document.activeElement.textContent") == "step 4: L0.H1, tense"
    assert opened.locator("#film-heads .role").all_inner_texts() == ["tense"]
    opened.locator("#languages button[lang=es]").click()
    assert buttons.first.inner_text().startswith("paso 4: L0.H1, ")
    assert opened.locator("#film-now").inner_text().startswith("paso 4 de 25 · pérdida de entrenamiento")


def test_films_at_the_end_and_none(open_page: Opener, path: Path, tmp_path: Path) -> None:
    opened = open_page(path)
    play = opened.locator("#film-play")
    play.focus()
    opened.keyboard.press("Enter")
    assert at(opened) < 6 and play.inner_text() == "Pause"
    expect(opened.locator("#film-at")).to_have_value("6")
    expect(play).to_have_text("Play")
    play.click()
    opened.locator("#film-at").focus()
    opened.keyboard.press("End")  # who takes the slider stops the film
    assert play.inner_text() == "Play" and at(opened) == 6
    body = f'<header><h1>x</h1></header><main id="main">{package_text(FILM_BODY)}</main>'
    (tmp_path / "x.html").write_text(page("x", body, title="x", styles=FILM_STYLES, script="film.js", words=FILM_WORDS))
    assert not open_page(tmp_path / "x.html").locator("#film").is_visible()


def test_it_reads_well_everywhere(open_page: Opener, path: Path) -> None:
    for size, scheme in (((1280, 900), "light"), ((390, 844), "dark")):
        opened = open_page(path, *size, color_scheme=scheme)
        assert faults(opened) == [] and width_beyond(opened) == 0
        assert opened.locator("img").count() == 0 and HOSTILE in opened.locator("#film-lines").inner_text()
        opened.locator("#film-lines input").nth(1).check()
        opened.locator("#film-heads canvas").first.hover()
        assert "L0.H0: " in opened.locator("#film-said").inner_text()


def test_a_live_page_follows_and_becomes_the_report(browser: Any, film: Filmed) -> None:
    header, frames, losses = film
    live = Live(0, live_html("run <b>"))
    with served_page(browser, live.address) as (opened, troubles):
        assert opened.locator("h1").inner_text() == "run <b>" and not opened.locator("#film").is_visible()
        live.tell("header", header)
        live.tell("frame", frames[0])
        live.tell("loss", losses[0])
        opened.wait_for_selector("#film:visible")
        live.tell("sample", {"step": 1, "text": HOSTILE})
        for frame in frames[1:3]:
            live.tell("frame", frame)
        expect(opened.locator("#film-at")).to_have_value("2")  # it goes along
        assert opened.locator("#live-samples pre").inner_text() == HOSTILE
        assert opened.locator("#live-state").inner_text() == "Step 1 of 25, training loss 2.950."
        assert faults(opened) == []
        opened.locator("#film-at").focus()
        opened.keyboard.press("Home")
        live.tell("frame", frames[3])
        expect(opened.locator("#film-at")).to_have_attribute("max", "3")
        assert at(opened) == 0  # but not where the reader has gone back
        policy = opened.locator("meta[http-equiv]").get_attribute("content") or ""
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
        blocked = opened.evaluate("fetch('http://localhost:9/').then(() => 'asked', () => 'refused')")
        assert blocked == "refused" and any("Content Security Policy" in text for text in troubles)
        troubles.clear()
        live.document = "<!doctype html><html lang=en><title>the report</title><link rel=icon href='data:,'>"
        live.tell("state", "finished")
        expect(opened).to_have_title("the report")
    live.close()
    assert json.loads(live.news(1))[0] == {"frame": frames[0]}
