"""What the tests of the report in a real Chromium share: the browser, and how to read a page.

Importing this skips the module that does, in one line, where there is no Chromium.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from a_browser import CHROMIUM, NAMES

if TYPE_CHECKING:
    from playwright.sync_api import Page

missing = "" if CHROMIUM else f"a browser ({', '.join(NAMES)})"
if find_spec("playwright") is None:
    missing = "the Python package playwright"
if missing:
    reason = f"{missing} is missing: none of the report's browser tests ran (tests/view/test_*browser.py)"
    pytest.skip(reason, allow_module_level=True)

Opener = Callable[..., "Page"]


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
    return page.locator(picture(number)).evaluate(read, [column, row])  # type: ignore[no-any-return]


def picture(number: int) -> str:
    return f".head[data-number='{number}'] canvas"


def ramp(page: Page, stop: int) -> list[int]:
    text = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--ramp-{stop}')").strip()
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]


def open_head(page: Page, name: str) -> None:
    page.get_by_role("button", name=f"{name}, enlarge").click()
    page.wait_for_selector("dialog[open]")


def classes(page: Page, token: int) -> set[str]:
    """How a word of the text is shown besides its colour."""
    return set((page.locator("#row-text .word").nth(token).get_attribute("class") or "").split()) - {"word"}


def title(page: Page) -> str:
    return page.inner_text("#large-title")


def readout(page: Page) -> str:
    """What the page says of the chosen cell, in plain quotes and without the marks that isolate a token's direction."""
    text = re.sub("[\u2068\u2069]", "", page.inner_text("#readout"))
    return text.replace("\u2018", "'").replace("\u2019", "'")


LUMINANCE = """
  const lum = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)); return 0.2126*r + 0.7152*g + 0.0722*b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/^rgba.*, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const poor = [];
  for (const e of document.querySelectorAll('h1, h2, h3, p, bdi, dt, dd, span, label, summary, output, pre, b, kbd')) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const [a, b] = [lum(getComputedStyle(e).color), lum(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.outerHTML.slice(0, 90));
  }
  return poor;
"""
