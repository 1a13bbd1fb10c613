"""The report in a real Chromium: it runs from a file, alone, by mouse and by keys, on a phone and in the dark."""

import base64
from pathlib import Path

import numpy as np
import pytest
from browser_types import Browser, Page
from browsing import Opener, faults, width_beyond
from report_browsing import classes, drawn, open_head, picture, pixel, plain, press, ramp, readout, rgba, title
from surveys import SUMMARY, survey_of, survey_of_maps

from headwise.records import HeadMap, HeadMaps
from headwise.view.report import write_report

pytestmark = pytest.mark.browser

LENGTH, LAYERS, HEADS = 13, 2, 5
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</script><script>alert(3)</script>")
TOKENS = ("The", " he", " works", "\n", *HOSTILE, "-->", "&amp;", "עברית", "🙂", "\u2028", "end")


def hostile_maps() -> HeadMaps:
    """Every head gives its first column the most; what is left peaks at 0.25 in row 2, column 1 of the first head."""
    random = np.random.default_rng(3)
    maps = []
    for number in range(LAYERS * HEADS):
        rest = np.tril(random.uniform(0.0, 0.2, size=(LENGTH, LENGTH)) / LENGTH, 0)
        if number == 0:
            rest[2, 1] = 0.25
        rest[:, 0] = 0.0
        rest[:, 0] = 1.0 - rest.sum(axis=1)
        maps.append(HeadMap(number // HEADS, number % HEADS, rest.astype(np.float32)))
    return HeadMaps("<script>alert(6)</script>", TOKENS, tuple(maps))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, survey_of_maps(hostile_maps()), hostile_maps(), SUMMARY)
    return path


def test_the_policy_stops_a_script_that_got_in(browser: Browser, report: Path, tmp_path: Path) -> None:
    leaky = tmp_path / "leaky.html"
    leaky.write_text(report.read_text("utf-8").replace("</main>", "<script>window.leaked=1</script></main>"), "utf-8")
    page = browser.new_page()
    page.goto(leaky.as_uri())
    drawn(page)
    assert page.evaluate("window.leaked") is None
    page.close()


def test_pictures_and_the_pointer(open_report: Opener) -> None:
    page = open_report()
    assert page.title() == "<script>alert(6)</script>: attention heads"
    assert page.locator("#grid .head").count() == LAYERS * HEADS
    assert page.locator("#grid .head .title").all_inner_texts()[:6] == [
        "L0.H0", "L0.H1", "L0.H2", "L0.H3", "L0.H4", "L1.H0",
    ]  # fmt: skip
    assert pixel(page, 0, 0, 0) == ramp(page, 3)  # row 0 can look only at itself: weight 1
    assert pixel(page, 0, 0, 1) == ramp(page, 0)  # and not ahead
    assert pixel(page, 0, 2, 1) not in (ramp(page, 0), ramp(page, 3))
    tops = [page.locator(f".head[data-number='{n}']").bounding_box()["y"] for n in (0, 4, 5)]  # type: ignore[index]
    assert tops[0] == tops[1] < tops[2]  # a row of pictures is a layer
    page = open_report()
    open_head(page, "L0.H0")
    assert title(page) == "L0.H0"
    cell = page.evaluate("panes[0].cell")
    page.locator(".map").first.hover(position={"x": 1.5 * cell, "y": 2.5 * cell})
    assert readout(page) == "token 2 '␣works' looks at token 1 '␣he': 0.250"
    words = page.locator("#row-text .word")
    assert classes(page, 2) == {"looking"} and classes(page, 0) == {"marked"}
    first, second = (words.nth(n).evaluate("e => getComputedStyle(e).backgroundColor") for n in (0, 1))
    assert first != second
    assert plain(page.inner_text("#row-most")) == "At '␣works', L0.H0 looks at 'The' (0.750), '␣he' (0.250)."


def test_keys_open_move_and_close_and_focus_comes_back(open_report: Opener) -> None:
    page = open_report()
    page.focus(".head[data-number='0'] .picture")
    press(page, "ArrowDown", "ArrowRight", "Enter")
    assert title(page) == "L1.H1"
    page.keyboard.press("ArrowRight")
    assert title(page) == "L1.H2"
    press(page, "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert title(page) == "L0.H4"
    page.locator(".map").first.focus()
    before = (page.evaluate("view.row"), page.evaluate("view.column"))
    press(page, "ArrowUp", "ArrowRight")
    assert (page.evaluate("view.row"), page.evaluate("view.column")) == (before[0] - 1, before[1] + 1)
    assert title(page) == "L0.H4"  # inside the map the arrows belong to the cells
    assert readout(page).startswith(f"token {before[0] - 1} '")
    press(page, *(LENGTH + 2) * ["ArrowUp"])
    assert page.evaluate("view.row") == 0  # and stop at the edge
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    assert page.evaluate("document.activeElement.closest('.head').dataset.number") == "6"
    page.keyboard.press("Space")
    assert title(page) == "L1.H1"
    page.click("#next-head")
    assert title(page) == "L1.H2"
    page.click("#close")
    assert page.evaluate("document.activeElement.closest('.head').dataset.number") == "6"


def test_the_scale_is_the_pictures_own_or_one_for_all(open_report: Opener) -> None:
    page = open_report()
    page.check("main .hide-first")
    drawn(page)
    # Row 2, column 1 takes the last colour as the largest weight left; the first column has none.
    assert pixel(page, 0, 2, 1) == ramp(page, 3)
    assert pixel(page, 0, 0, 0) == pixel(page, 0, 0, LENGTH - 1) == ramp(page, 0)
    assert page.locator(".head .largest").first.inner_text() == "max 0.250"
    assert "its largest weight" in page.inner_text("#scale-note")
    page.check("main .fixed-scale")
    drawn(page)
    fixed = pixel(page, 0, 2, 1)
    assert fixed not in (ramp(page, 3), ramp(page, 0)) and "last colour is 1" in page.inner_text("#scale-note")
    assert page.locator(".head .largest").first.inner_text() == ""

    open_head(page, "L0.H0")
    assert page.is_checked("dialog .hide-first") and page.inner_text("#large .ramp-high") == "1"
    page.uncheck("dialog .fixed-scale")
    assert page.inner_text("#large .ramp-high") == "0.250"
    page.locator(".map").first.focus()
    press(page, *(LENGTH + 2) * ["ArrowLeft"])
    assert "looks at token 0 " in readout(page)
    assert "left-out" in classes(page, 0)
    page.uncheck("dialog .hide-first")
    page.keyboard.press("Escape")
    drawn(page)
    assert "Without the first token" not in page.inner_text("#scale-note")


def test_looks_of_the_page(open_report: Opener) -> None:
    page = open_report(color_scheme="light")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = pixel(page, 0, 0, 1)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"getComputedStyle(document.body).backgroundColor !== '{paper}'")
    drawn(page)
    dark = pixel(page, 0, 0, 1)
    assert sum(light) > 600 and sum(dark) < 200
    assert pixel(page, 0, 0, 0) == ramp(page, 3)
    page = open_report(reduced_motion="reduce")
    open_head(page, "L0.H0")
    assert page.locator("dialog").evaluate("e => e.getAnimations({subtree: true}).length") == 0
    assert page.locator("dialog").evaluate("e => getComputedStyle(e).animationName") == "none"
    page = open_report()
    for _ in range(80):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.tagName, s.outlineStyle, s.outlineWidth]; })()"
        )
        if style[0] == "BODY":
            break
        assert style[1] == "solid" and style[2] in ("3px", "4px"), style
    else:
        pytest.fail("Tab never left the page")


def test_a_long_text_keeps_thin_lines(open_report: Opener, tmp_path: Path) -> None:
    length = 211
    weights = np.eye(length, k=-1, dtype=np.float32)  # each token looks at the one before
    weights[0, 0] = 1
    maps = HeadMaps(
        "long",
        tuple(f"t{i}" for i in range(length)),
        tuple(HeadMap(layer, head, weights) for layer in range(3) for head in range(13)),
    )
    write_report(tmp_path / "long.html", survey_of_maps(maps), maps)
    page = open_report(390, 300, path=tmp_path / "long.html")
    width = "e => e.width"  # 300 of a canvas on which nothing was drawn: what is far below is drawn when it is printed
    assert page.locator(picture(38)).evaluate(width) == 300
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator(picture(38)).evaluate(width) == 96
    page = open_report(path=tmp_path / "long.html")
    assert "A dot is the largest weight of its block" in page.inner_text("#scale-note")
    assert all(pixel(page, 38, at, at) == ramp(page, 3) for at in range(2, 96))
    open_head(page, "L2.H12")
    assert "looks at token 208 't208': 1.000" in readout(page)
    frame, map_box = (page.locator(part).first.bounding_box() for part in (".frame", ".map"))
    assert frame is not None and map_box is not None
    assert map_box["y"] + map_box["height"] <= frame["y"] + frame["height"] + 1  # scrolled to the chosen, last row


def test_one_token_and_no_scripts(open_report: Opener, tmp_path: Path, browser: Browser, report: Path) -> None:
    single = HeadMaps("one", ("a",), (HeadMap(0, 0, np.ones((1, 1), dtype=np.float32)),))
    write_report(tmp_path / "one.html", survey_of_maps(single), single)
    page = open_report(path=tmp_path / "one.html")
    open_head(page, "L0.H0")
    assert readout(page) == "token 0 'a' looks at token 0 'a': 1.000"
    page.check("dialog .hide-first")
    assert readout(page) == "token 0 'a' looks at token 0 'a': 1.000"
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("noscript p, .notice").first.inner_text().startswith("Scripts are switched off")
    assert not page.locator("#look").is_visible()
    context.close()


STEPS = [0, 1, 2, 4]
IMAGE = "</script><img/src=x/onerror=alert(1)>"
LINE = ["I", IMAGE, "=", "yo", "trabajo"]
NAMES = [f"L{layer}.H{head}" for layer in range(2) for head in range(3)]


@pytest.fixture
def film(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    maps = [random.integers(1, 256, size=(len(NAMES), len(LINE), len(LINE)), dtype=np.uint8) for _ in STEPS]
    frames = [
        {"step": step, "maps": base64.b64encode(levels.tobytes()).decode()}
        for step, levels in zip(STEPS, maps, strict=True)
    ]
    frames_of = {"heads": NAMES, "tokens": LINE, "steps": 25, "frames": frames}
    write_report(tmp_path / "film.html", survey_of(1, 2), film=frames_of)
    return tmp_path / "film.html"


def at(opened: Page) -> int:
    return int(opened.locator("#film-at").input_value())


def test_the_slider_moves_the_pictures(open_page: Opener, film: Path) -> None:
    opened = open_page(film)
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
    assert opened.locator("#film-heads figcaption").all_inner_texts() == NAMES
    opened.locator("#languages button[lang=es]").click()
    assert now.inner_text() == "paso 4 de 25"


def test_it_reads_well_everywhere(open_page: Opener, film: Path) -> None:
    for size, scheme in (((1280, 900), "light"), ((390, 844), "dark")):
        opened = open_page(film, *size, color_scheme=scheme)
        assert faults(opened) == [] and width_beyond(opened) == 0
        assert opened.locator("img").count() == 0 and IMAGE in opened.locator("#film-line").inner_text()
        opened.locator("#film-heads canvas").first.hover()
        assert "L0.H0: " in opened.locator("#film-said").inner_text()
