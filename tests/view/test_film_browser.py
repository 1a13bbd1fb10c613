"""The film in a real Chromium: the slider moves the pictures, in a report."""

from pathlib import Path
from typing import Any

import pytest
import torch
from browser_types import Page
from browsing import Opener, faults, width_beyond
from report_browsing import rgba
from surveys import survey_of

from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings, film_of, read_film
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

STEPS = [0, 1, 2, 4]
HOSTILE = "</script><img/src=x/onerror=alert(1)>"


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Frames of models that were never trained."""
    folder = tmp_path_factory.mktemp("film")
    shape = {"n_layers": 2, "d_model": 12, "n_heads": 3, "context": 16}
    corpus, config, recipe = Settings(steps=25, shape=shape).resolve()
    film = film_of(folder, corpus, config, recipe, lambda film, frame: None)
    film.about["tokens"][1] = HOSTILE
    for step in STEPS:
        torch.manual_seed(step)
        model = GPT(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        film.see(model, step)
    read = read_film(folder)
    assert read is not None
    return read


@pytest.fixture
def path(film: dict[str, Any], tmp_path: Path) -> Path:
    write_report(tmp_path / "film.html", survey_of(1, 2), film=film)
    return tmp_path / "film.html"


def at(opened: Page) -> int:
    return int(opened.locator("#film-at").input_value())


def test_the_slider_moves_the_pictures(open_page: Opener, path: Path, film: dict[str, Any]) -> None:
    opened = open_page(path)
    slider, now, first = (
        opened.locator("#film-at"),
        opened.locator("#film-now"),
        opened.locator("#film-heads canvas").first,
    )
    assert at(opened) == 3 and now.inner_text() == "step 4 of 25"
    slider.focus()
    seen = []
    for key, index in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("End", 3)):
        opened.keyboard.press(key)
        assert at(opened) == index and now.inner_text() == f"step {STEPS[index]} of 25"
        assert slider.get_attribute("aria-valuetext") == f"step {STEPS[index]} of 25"
        assert rgba(first, 0, 1)[3] == 0  # what a token may not see is empty
        seen.append(rgba(first, 3, 1))
        assert seen[-1][3] == 255
    assert len({tuple(colour) for colour in seen}) > 1
    assert opened.locator("#film-heads figcaption").all_inner_texts() == film["heads"]
    opened.locator("#languages button[lang=es]").click()
    assert now.inner_text() == "paso 4 de 25"


def test_it_reads_well_everywhere(open_page: Opener, path: Path) -> None:
    for size, scheme in (((1280, 900), "light"), ((390, 844), "dark")):
        opened = open_page(path, *size, color_scheme=scheme)
        assert faults(opened) == [] and width_beyond(opened) == 0
        assert opened.locator("img").count() == 0 and HOSTILE in opened.locator("#film-line").inner_text()
        opened.locator("#film-heads canvas").first.hover()
        assert "L0.H0: " in opened.locator("#film-said").inner_text()
