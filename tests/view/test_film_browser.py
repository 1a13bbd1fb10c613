"""The film in a real Chromium: the slider moves the pictures, in a report."""

import base64
from pathlib import Path

import numpy as np
import pytest
from browser_types import Page
from browsing import Opener, faults, width_beyond
from report_browsing import rgba
from surveys import survey_of

from headwise.view.report import write_report

pytestmark = pytest.mark.browser

STEPS = [0, 1, 2, 4]
HOSTILE = "</script><img/src=x/onerror=alert(1)>"
TOKENS = ["I", HOSTILE, "=", "yo", "trabajo"]
HEADS = [f"L{layer}.H{head}" for layer in range(2) for head in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    maps = [random.integers(1, 256, size=(len(HEADS), len(TOKENS), len(TOKENS)), dtype=np.uint8) for _ in STEPS]
    frames = [
        {"step": step, "maps": base64.b64encode(levels.tobytes()).decode()}
        for step, levels in zip(STEPS, maps, strict=True)
    ]
    film = {"heads": HEADS, "tokens": TOKENS, "steps": 25, "frames": frames}
    write_report(tmp_path / "film.html", survey_of(1, 2), film=film)
    return tmp_path / "film.html"


def at(opened: Page) -> int:
    return int(opened.locator("#film-at").input_value())


def test_the_slider_moves_the_pictures(open_page: Opener, path: Path) -> None:
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
    assert opened.locator("#film-heads figcaption").all_inner_texts() == HEADS
    opened.locator("#languages button[lang=es]").click()
    assert now.inner_text() == "paso 4 de 25"


def test_it_reads_well_everywhere(open_page: Opener, path: Path) -> None:
    for size, scheme in (((1280, 900), "light"), ((390, 844), "dark")):
        opened = open_page(path, *size, color_scheme=scheme)
        assert faults(opened) == [] and width_beyond(opened) == 0
        assert opened.locator("img").count() == 0 and HOSTILE in opened.locator("#film-line").inner_text()
        opened.locator("#film-heads canvas").first.hover()
        assert "L0.H0: " in opened.locator("#film-said").inner_text()
