"""A real Chromium for all tests of pages: one for a session, and what every page must keep to.

The fixtures stand in conftest.py: `browser` is the browser; `open_page` opens a page and, when the test is over, sees
to it that the page asked for nothing else, raised no dialog and logged no error.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

Opener = Callable[..., "Page"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ARGUMENTS = [  # without a window, and without calls of its own
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def why_not() -> str:
    """What is missing for a browser; nothing where all is there."""
    if find_spec("playwright") is None:
        return "the Python package playwright"
    return "" if CHROMIUM else f"a browser ({', '.join(NAMES)})"


@contextmanager
def started() -> Iterator[Browser]:
    if why_not():
        pytest.skip(f"{why_not()} is missing: no page was opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opener(browser: Browser) -> Iterator[Opener]:
    """Opens files: `opened(path, width, height, color_scheme="dark", ...)`.

    With `inside` a test reaches the names of the page's script, which as a module keeps them to itself. A window is
    taken again by later tests, which costs half of a new one; a test that sets the clock takes a `fresh` one, and so do
    those that ask for more than colours and stillness.
    """
    windows: list[Page] = []
    contexts: list[BrowserContext] = []
    n_opened = 0
    requests: list[str] = []
    troubles: list[str] = []

    def note_dialog(dialog: Any) -> None:
        troubles.append(f"dialog {dialog}")
        dialog.dismiss()

    listeners: dict[Any, Callable[[Any], None]] = {
        "request": lambda request: requests.append(request.url),
        "dialog": note_dialog,
        "pageerror": lambda error: troubles.append(f"error {error}"),
        "console": lambda message: troubles.append(f"console {message.text}"),
    }

    def opened(
        path: Path, width: int = 1280, height: int = 900, inside: bool = False, fresh: bool = False, **options: Any
    ) -> Page:
        nonlocal n_opened
        if fresh or not options.keys() <= MEDIA.keys():
            contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
            page = contexts[-1].new_page()
            page.set_default_timeout(10_000)
        else:
            page = _window(browser)
            windows.append(page)
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(**MEDIA | options)
        for event, listener in listeners.items():
            page.on(event, listener)
        n_opened += 1
        page.goto((within_reach(path) if inside else path).as_uri())
        return page

    try:
        yield opened
    finally:
        for context in contexts:
            context.close()
        for page in windows:
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
            page.mouse.move(0, 0)
            page.goto("about:blank")
            IDLE[browser].append(page)
    assert troubles == []
    assert all(re.match(r"data:|file:", url) for url in requests), requests
    assert len([url for url in requests if url.startswith("file:")]) == n_opened


@contextmanager
def served_page(browser: Browser, address: str) -> Iterator[tuple[Page, list[str]]]:
    """A window on a page that a process of ours serves, and its troubles: errors, and requests that go elsewhere."""
    troubles: list[str] = []

    def note_request(request: Any) -> None:
        if not request.url.startswith((address, "data:")):
            troubles.append(f"request {request.url}")

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: troubles.append(f"error {error}"))
    page.on("console", lambda message: troubles.append(f"console {message.text}"))
    page.on("request", note_request)
    page.goto(address)
    yield page, troubles
    context.close()
    assert troubles == []


# What a window can be told while it is open, and how a new one is.
MEDIA: dict[str, Any] = {"color_scheme": "light", "reduced_motion": "no-preference"}
IDLE: dict[Browser, list[Page]] = defaultdict(list)


def _window(browser: Browser) -> Page:
    if IDLE[browser]:
        return IDLE[browser].pop()
    page = browser.new_context().new_page()
    page.set_default_timeout(10_000)
    return page


def within_reach(path: Path) -> Path:
    """A copy of a page whose script is the same text as a classic script: its names are everybody's."""
    copy = path.with_name(f"inside-{path.name}")
    html = path.read_text(encoding="utf-8")
    assert html.count('<script type="module">') == 1
    copy.write_text(html.replace('<script type="module">', "<script>"), encoding="utf-8")
    return copy


def faults(page: Page) -> list[str]:
    """What axe-core finds to be a serious or critical fault of accessibility in a page that has come to rest."""
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate(AT_REST)
    violations = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:120]}"
        for rule in violations
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def width_beyond(page: Page) -> int:
    """Pixels by which a page is wider than its window; 0 where it does not scroll sideways."""
    beyond = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    return max(0, int(beyond))


# A dialog that fades in is pale for a moment, and that moment is long on a busy machine.
AT_REST = """() => Promise.all(
  document.getAnimations()
    .filter((motion) => Number.isFinite(motion.effect.getComputedTiming().endTime))
    .map((motion) => motion.finished.catch(() => null)))"""
