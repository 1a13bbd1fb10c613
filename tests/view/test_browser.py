"""The report in a real Chromium: it runs from a file, alone, by mouse and by keys, on a phone and in the dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headwise.records import CurvePoint, HeadMap, HeadMaps, RunSummary
from headwise.view.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
try:
    from playwright.sync_api import Browser, Page, sync_playwright
except ImportError:
    missing = "the Python package playwright"
else:
    missing = "" if CHROMIUM else f"a browser ({', '.join(NAMES)})"
if missing:
    reason = f"{missing} is missing: none of the report's browser tests ran (tests/view/test_browser.py)"
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.browser

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LENGTH, LAYERS, HEADS = 13, 2, 5
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</script><script>alert(3)</script>")
TOKENS = ("The", " he", " works", "\n", *HOSTILE, "-->", "&amp;", "עברית", "🙂", "\u2028", "end")
SUMMARY = RunSummary(
    facts={"preset": "small", "<img src=x onerror=alert(4)>": "3,214,592"},
    curve=tuple(CurvePoint(step, 2 + 3 / (1 + step), 2.2 + 3 / (1 + step)) for step in range(0, 110, 10)),
    held_out_loss=2.2,
    baseline_loss=2.6,
    baseline_name="5-gram",
    samples=("</pre><script>alert(5)</script>", "a " + "very" * 60 + " long word"),
)
Opener = Callable[..., Page]


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
    write_report(path, hostile_maps(), SUMMARY)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_report(browser: Browser, report: Path) -> Iterator[Opener]:
    """Opens the report; after the test it must have asked for nothing else, raised no dialog and logged no error."""
    contexts, requests, troubles = [], [], []

    def note_dialog(dialog: object) -> None:
        troubles.append(f"dialog {dialog}")
        dialog.dismiss()  # type: ignore[attr-defined]

    def opened(width: int = 1280, height: int = 900, path: Path = report, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", note_dialog)
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on("console", lambda message: troubles.append(f"console {message.text}"))
        page.goto(path.as_uri())
        drawn(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []
    assert all(re.match(r"data:|file:", url) for url in requests), requests
    assert len([url for url in requests if url.startswith("file:")]) == len(contexts)


def drawn(page: Page) -> None:
    heads = page.locator("#grid .head").count()
    page.wait_for_selector(f"main[data-drawn='{heads}']")
    assert heads > 0


def pixel(page: Page, number: int, row: int, column: int) -> list[int]:
    """The colour of one cell of a small picture, columns counted as drawn; read from a copy, to leave it as it is."""
    read = """(canvas, [x, y]) => {
      const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      copy.drawImage(canvas, -x, -y);
      return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }"""
    return page.locator(f".head[data-number='{number}'] canvas").evaluate(read, [column, row])  # type: ignore[no-any-return]


def ramp(page: Page, stop: int) -> list[int]:
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--ramp-{stop}')").strip()
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]


def open_head(page: Page, name: str) -> None:
    page.get_by_role("button", name=f"{name}, enlarge").click()
    page.wait_for_selector("dialog[open]")


def title(page: Page) -> str:
    return page.inner_text("#large-title")


def readout(page: Page) -> str:
    """What the page says of the chosen cell, in plain quotes and without the marks that isolate a token's direction."""
    text = re.sub("[\u2068\u2069]", "", page.inner_text("#readout"))
    return text.replace("\u2018", "'").replace("\u2019", "'")


def test_hostile_text_is_shown_as_text(open_report: Opener) -> None:
    page = open_report()
    assert page.inner_text("h1") == "<script>alert(6)</script>"
    assert page.title() == "<script>alert(6)</script>: attention heads"
    shown = page.locator(".source .tokens bdi").all_inner_texts()
    assert shown[4:7] == [HOSTILE[0], HOSTILE[1].replace(" ", "␣"), HOSTILE[2]]
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    open_head(page, "L0.H1")
    assert page.locator("#row-text bdi").all_inner_texts() == shown
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0


def test_the_policy_stops_a_script_that_got_in(browser: Browser, report: Path, tmp_path: Path) -> None:
    leaky = tmp_path / "leaky.html"
    leaky.write_text(report.read_text("utf-8").replace("</main>", "<script>window.leaked=1</script></main>"), "utf-8")
    page = browser.new_page()
    page.goto(leaky.as_uri())
    drawn(page)
    assert page.evaluate("window.leaked") is None
    page.close()


def test_small_pictures_show_the_weights(open_report: Opener) -> None:
    page = open_report()
    assert page.locator("#grid .head").count() == LAYERS * HEADS
    assert page.locator("#grid .head span:first-of-type").all_inner_texts()[:6] == [
        "L0.H0", "L0.H1", "L0.H2", "L0.H3", "L0.H4", "L1.H0",
    ]  # fmt: skip
    assert pixel(page, 0, 0, 0) == ramp(page, 3)  # row 0 can look only at itself: weight 1
    assert pixel(page, 0, 0, 1) == ramp(page, 0)  # and not ahead
    assert pixel(page, 0, 2, 1) not in (ramp(page, 0), ramp(page, 3))
    tops = [page.locator(f".head[data-number='{n}']").bounding_box()["y"] for n in (0, 4, 5)]  # type: ignore[index]
    assert tops[0] == tops[1] < tops[2]  # a row of pictures is a layer


def test_a_click_enlarges_and_the_pointer_reads_a_cell(open_report: Opener) -> None:
    page = open_report()
    open_head(page, "L0.H0")
    assert title(page) == "L0.H0"
    cell = page.evaluate("view.cell")
    page.hover("#map", position={"x": 1.5 * cell, "y": 2.5 * cell})
    assert readout(page) == "token 2 '␣works' looks at token 1 '␣he': 0.250"
    words = page.locator("#row-text bdi")
    assert words.nth(2).get_attribute("class") == "looking"
    first, second = (words.nth(n).evaluate("e => getComputedStyle(e).backgroundColor") for n in (0, 1))
    assert first != second
    assert "Most to" in page.inner_text("#row-most") and "0.250" in page.inner_text("#row-most")


def test_keys_open_move_and_close_and_focus_comes_back(open_report: Opener) -> None:
    page = open_report()
    page.focus(".head[data-number='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert title(page) == "L1.H1"
    page.keyboard.press("ArrowRight")
    assert title(page) == "L1.H2"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert title(page) == "L0.H4"
    page.focus("#map")
    before = (page.evaluate("view.row"), page.evaluate("view.column"))
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert (page.evaluate("view.row"), page.evaluate("view.column")) == (before[0] - 1, before[1] + 1)
    assert title(page) == "L0.H4"  # inside the map the arrows belong to the cells
    assert readout(page).startswith(f"token {before[0] - 1} '")
    for _ in range(LENGTH + 2):
        page.keyboard.press("ArrowUp")
    assert page.evaluate("view.row") == 0  # and stop at the edge
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")
    assert page.evaluate("document.activeElement.dataset.number") == "6"
    page.keyboard.press("Space")
    assert title(page) == "L1.H1"
    page.click("#next")
    assert title(page) == "L1.H2"
    page.click("#close")
    assert page.evaluate("document.activeElement.dataset.number") == "6"


def test_focus_can_be_seen(open_report: Opener) -> None:
    page = open_report()
    for _ in range(40):
        page.keyboard.press("Tab")
        style = page.evaluate(
            "(() => { const e = document.activeElement, s = getComputedStyle(e);"
            " return [e.tagName, s.outlineStyle, s.outlineWidth]; })()"
        )
        if style[0] == "BODY":
            break
        assert style[1:] == ["solid", "3px"], style
    else:
        pytest.fail("Tab never left the page")


def test_the_switch_takes_the_first_column_away_and_rescales(open_report: Opener) -> None:
    page = open_report()
    size = ".head[data-number='0'] canvas"
    assert page.locator(size).evaluate("e => [e.width, e.height]") == [LENGTH, LENGTH]
    before = pixel(page, 0, 2, 1)
    page.check("main .hide-first")
    drawn(page)
    assert page.locator(size).evaluate("e => [e.width, e.height]") == [LENGTH - 1, LENGTH]
    # Row 2, column 1 is now drawn in column 0, and as the largest weight left it takes the last colour.
    assert pixel(page, 0, 2, 0) == ramp(page, 3) != before
    assert pixel(page, 0, 0, 0) == pixel(page, 0, 0, LENGTH - 2) == ramp(page, 0)
    assert page.locator(".head .largest").first.inner_text() == "max 0.250"
    assert "largest weight that is left" in page.inner_text("#scale-note")

    open_head(page, "L0.H0")
    assert page.is_checked("dialog .hide-first")
    assert page.inner_text("#large-end").startswith("0.250")
    assert page.evaluate("document.getElementById('map').clientWidth / view.cell") == LENGTH - 1
    page.focus("#map")
    for _ in range(LENGTH + 2):
        page.keyboard.press("ArrowLeft")
    assert "looks at token 1 " in readout(page)
    assert page.locator("#row-text bdi").first.get_attribute("class") == "left-out"
    page.uncheck("dialog .hide-first")
    page.keyboard.press("Escape")
    drawn(page)
    assert pixel(page, 0, 2, 1) == before and page.inner_text("#scale-note") == ""


def test_a_phone_has_no_sideways_scroll_and_no_tiny_targets(open_report: Opener) -> None:
    page = open_report(360, 740, has_touch=True, is_mobile=True)
    page.click("text=The curve in numbers")
    overflow = "document.scrollingElement.scrollWidth - window.innerWidth"
    assert page.evaluate(overflow) <= 0
    assert page.evaluate("window.innerWidth") == 360
    page.get_by_role("button", name="L0.H0, enlarge").tap()
    assert page.evaluate(overflow) <= 0
    assert page.evaluate("document.getElementById('large').scrollWidth") <= 360
    cell = page.evaluate("view.cell")
    page.locator("#map").tap(position={"x": 1.5 * cell, "y": 2.5 * cell})
    assert readout(page).endswith("0.250")
    for name in ("#previous", "#next", "#close"):
        box = page.locator(name).bounding_box()
        assert box is not None and min(box["width"], box["height"]) >= 40


LUMINANCE = """
  const lum = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const poor = [];
  for (const e of document.querySelectorAll('h1, h2, h3, p, bdi, dt, dd, span, label, summary, output, pre, b, kbd')) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const [a, b] = [lum(getComputedStyle(e).color), lum(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.outerHTML.slice(0, 90));
  }
  return poor;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("hide", [False, True])
def test_text_is_readable_in_light_and_dark(open_report: Opener, scheme: str, hide: bool) -> None:
    page = open_report(color_scheme=scheme)
    open_head(page, "L0.H0")
    page.set_checked("dialog .hide-first", hide)
    page.evaluate("choose(2, 1)")
    drawn(page)
    assert page.evaluate(f"(() => {{ {LUMINANCE} }})()") == []


def test_the_dark_page_is_dark_and_follows_a_change(open_report: Opener) -> None:
    page = open_report(color_scheme="light")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = pixel(page, 0, 0, 1)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"getComputedStyle(document.body).backgroundColor !== '{paper}'")
    drawn(page)
    dark = pixel(page, 0, 0, 1)
    assert sum(light) > 600 and sum(dark) < 200
    assert pixel(page, 0, 0, 0) == ramp(page, 3)


def test_motion_stops_where_it_is_not_wanted(open_report: Opener) -> None:
    page = open_report(reduced_motion="reduce")
    open_head(page, "L0.H0")
    assert page.locator("dialog").evaluate("e => e.getAnimations({subtree: true}).length") == 0
    assert page.locator("dialog").evaluate("e => getComputedStyle(e).animationName") == "none"


def test_a_long_text_keeps_thin_lines_and_stays_quick(open_report: Opener, tmp_path: Path) -> None:
    length = 211
    weights = np.eye(length, k=-1, dtype=np.float32)  # each token looks at the one before
    weights[0, 0] = 1
    maps = tuple(HeadMap(layer, head, weights) for layer in range(3) for head in range(13))
    write_report(tmp_path / "long.html", HeadMaps("long", tuple(f"t{i}" for i in range(length)), maps))
    page = open_report(path=tmp_path / "long.html")
    side = page.locator(".head canvas").first.evaluate("e => e.width")
    assert side < length and f"{page.evaluate('view.block')} \u00d7 " in page.inner_text("#scale-note")
    assert all(pixel(page, 38, at, at) == ramp(page, 3) for at in range(side - 1))
    open_head(page, "L2.H12")
    assert "looks at token 209 't209': 1.000" in readout(page)
    frame, map_box = page.locator("#frame").bounding_box(), page.locator("#map").bounding_box()
    assert frame is not None and map_box is not None
    assert map_box["y"] + map_box["height"] <= frame["y"] + frame["height"] + 1  # scrolled to the chosen, last row
    took = page.evaluate("(() => { const t = performance.now(); choose(100, 50); return performance.now() - t; })()")
    assert took < 500


def test_one_token_is_enough(open_report: Opener, tmp_path: Path) -> None:
    one = HeadMaps("one", ("a",), (HeadMap(0, 0, np.ones((1, 1), dtype=np.float32)),))
    write_report(tmp_path / "one.html", one)
    page = open_report(path=tmp_path / "one.html")
    open_head(page, "L0.H0")
    assert readout(page) == "token 0 'a' looks at token 0 'a': 1.000"
    assert page.is_disabled("dialog .hide-first")


def test_without_scripts_the_page_says_why_there_are_no_pictures(browser: Browser, report: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("noscript p, .notice").first.inner_text().startswith("The pictures are drawn by a script")
    assert not page.locator("#heads").is_visible()
    context.close()
