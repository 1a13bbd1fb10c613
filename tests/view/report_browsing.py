"""What the tests of the report in a real Chromium share: how to read its page."""

import re

from browser_types import Locator, Page


def drawn(page: Page) -> None:
    """Waits until the pictures in sight are drawn: the browser tells of them behind the next frame."""
    page.wait_for_selector("#grid .head")
    page.evaluate(FRAMES)


FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def pixel(page: Page, number: int, row: int, column: int) -> list[int]:
    """The colour of one cell of a small picture, columns counted as drawn."""
    page.locator(picture(number)).scroll_into_view_if_needed()
    drawn(page)
    return rgba(page.locator(picture(number)), row, column)[:3]


def rgba(canvas: Locator, row: int, column: int) -> list[int]:
    """Colour and opacity of one dot, read from a copy, to leave the canvas as it is."""
    read = """(canvas, [x, y]) => {
      const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      copy.drawImage(canvas, -x, -y);
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    return canvas.evaluate(read, [column, row])  # type: ignore[no-any-return]


def picture(number: int) -> str:
    return f".head[data-number='{number}'] canvas"


def ramp(page: Page, stop: int) -> list[int]:
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--ramp-{stop}')").strip()
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]


def open_head(page: Page, name: str) -> None:
    page.locator(f".name[aria-label='{name}, enlarge']").click()
    page.wait_for_selector("dialog[open]")


def classes(page: Page, token: int) -> set[str]:
    """How a word of the text is shown besides its colour."""
    return set((page.locator("#row-text .word").nth(token).get_attribute("class") or "").split()) - {"word"}


def title(page: Page) -> str:
    return page.inner_text("#large-title")


def readout(page: Page) -> str:
    """What the page says of the chosen cell, in plain quotes and without the marks that isolate a token's direction."""
    return plain(page.inner_text("#readout"))


def plain(text: str) -> str:
    """A text in plain quotes and without the marks that isolate a token's direction."""
    return re.sub("[\u2068\u2069]", "", text).replace("\u2018", "'").replace("\u2019", "'")
