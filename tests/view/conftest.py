"""A real Chromium for the tests of the report; modules that use it import `browsing`, which skips them without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browsing import Opener
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from a_browser import ARGUMENTS, CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_report(browser: Browser, report: Path) -> Iterator[Opener]:
    """Opens the report; after the test it must have asked for nothing else, raised no dialog and logged no error."""
    from browsing import drawn

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
