"""The page of a model that answers: questions in turn, and a real Chromium that touches it; `hw.look` in Python."""

import base64
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser_types import Browser, Page
from browsing import faults, served_page, width_beyond
from cases import refuses
from report_browsing import plain, press
from word_models import word_folder

import headwise as hw
from headwise.heads.look import Desk
from headwise.models.open import open_folder
from headwise.view.look import Served

pytestmark = pytest.mark.clock

TEXT = "Ann met Bob . the cat saw Ann"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_folder(tmp_path_factory.mktemp("look"), "next")


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    page = Served(Desk(open_folder(folder)))
    threading.Thread(target=page.work, daemon=True).start()
    yield page
    page.close()


def post(served: Served, **asked: Any) -> dict[str, Any]:
    asked = {"slot": "a", "text": TEXT, "changes": {}, "at": -1, "follow": -1} | asked
    with urllib.request.urlopen(f"{served.address}ask", json.dumps(asked).encode(), timeout=300) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def test_questions_are_answered_in_turn_and_the_latest_text_alone_is_read(served: Served) -> None:
    post(served, do="read", turn=3)
    assert post(served, do="read", turn=4)["words"][1][0] == "Ann"
    served._latest["a"] = 9
    assert post(served, do="read", turn=5) == {"stale": True}
    rows, columns, packed = post(served, do="maps", heads=[1])["maps"]["1"]
    weights = np.frombuffer(base64.b64decode(packed), "<u2").reshape(rows, columns) / 65535
    np.testing.assert_allclose(weights, served.desk.readings["a"].maps[1], atol=1e-5)
    assert post(served, do="read", text="")["refused"] == ["look.empty", {}]
    assert post(served, do="rm")["refused"] == "this is no question of the page's"
    served.desk.answer = lambda asked: 1 / 0  # type: ignore[assignment,method-assign]
    assert post(served, do="read", turn=10) == {"refused": "ZeroDivisionError: division by zero"}


def test_in_python(folder: Path) -> None:
    shown = hw.look(hw.open(folder), TEXT)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", shown.address)
    with urllib.request.urlopen(shown.address, timeout=300) as answer:
        assert TEXT in answer.read().decode()  # which the page opens with
    assert post(shown, do="read")["words"][1][0] == "Ann"
    shown.close()
    refuses(lambda: hw.look(torch.nn.Linear(3, 5), TEXT), r"needs the tokenizer of a model that hw\.open has read")


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with opened_at(browser, served) as page:
        yield page


@contextmanager
def opened_at(browser: Browser, served: Served) -> Iterator[Page]:
    with served_page(browser, served.address) as (opened, _):
        opened.fill("#own-text", TEXT)
        settled(opened, "Ann met Bob")
        yield opened


def settled(page: Page, text: str) -> None:
    """Waits until the page shows the text, and every head that looks hardest is drawn."""
    page.wait_for_function(
        "([text]) => document.querySelector('#sentence').innerText.replace(/\\s+/g, ' ').includes(text)"
        " && !document.querySelector('main.asking') && document.querySelector('#eight .square:not(.unlit)')",
        arg=[text],
    )


@pytest.mark.slow
@pytest.mark.browser
def test_a_sentence_is_touched(page: Page, served: Served) -> None:
    assert page.locator(".tile").count() == 12 and page.locator("#eight .head").count() == 8
    first = page.locator("#next th[scope=row] bdi").first.inner_text()
    assert f"'{first}'" in plain(page.inner_text("#verdict"))
    page.locator("#eight .picture").first.click()
    page.wait_for_selector(".tile.silent")
    name = next(iter(served.desk.readings["a"].changes))
    assert name in page.inner_text("#verdict") and page.locator("#next tr").nth(1).locator("td").count() == 3
    page.click("#wake")
    page.wait_for_function("() => !document.querySelector('.tile.silent')")
    page.click("#each")
    page.wait_for_selector("#ranking li")
    assert page.locator("#ranking li").count() == 12
    page.locator("#ranking .token").first.click()
    page.wait_for_selector(".tile.silent")
    page.click("#why")
    page.wait_for_selector("#story li")
    page.locator(".word", has_text="met").click()
    page.wait_for_function("() => document.querySelector('#next-title').textContent.includes('met')")
    page.keyboard.press("Escape")
    page.wait_for_function("() => !document.querySelector('#next-title').textContent.includes('met')")
    page.click("#compare")
    page.fill("#second", TEXT.replace("Bob", "dog"))
    page.wait_for_function("() => document.querySelector('#next tr').children.length === 6")
    page.fill("#own-text", "Ann " * 40)
    page.wait_for_function("() => document.querySelector('#trouble').textContent.includes('41 tokens')")
    page.locator("#languages button[lang=es]").click()
    assert page.inner_text("#trouble") == "La frase tiene 41 tokens, y el modelo lee como máximo 23."


@pytest.mark.slow
@pytest.mark.browser
def test_without_a_mouse_on_a_phone_and_in_the_dark(page: Page, served: Served) -> None:
    page.locator(".tile").first.focus()
    press(page, "ArrowDown", "ArrowRight", "Enter")
    assert page.inner_text("#large-title") == "L1.H1"
    page.keyboard.press("s")
    page.wait_for_function("() => document.querySelector('#large-verdict').textContent.includes('L1.H1')")
    assert served.desk.readings["a"].changes == {"L1.H1": 0} and faults(page) == []
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#large-title") == "L1.H2"
    page.keyboard.press("Escape")
    page.locator("#sentence .word[tabindex='0']").focus()
    page.keyboard.press("ArrowLeft")
    assert "'saw'" in plain(page.inner_text("#eight-title"))
    for width, scheme in ((390, "light"), (390, "dark"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_timeout(200)
        assert width_beyond(page) == 0 and faults(page) == [], (width, scheme)


@pytest.mark.slow
@pytest.mark.browser
def test_a_word_is_hidden_and_filled_in(browser: Browser, tmp_path: Path) -> None:
    served = Served(Desk(open_folder(word_folder(tmp_path, "masked"))))
    threading.Thread(target=served.work, daemon=True).start()
    with opened_at(browser, served) as page:
        assert "[MASK]" in page.inner_text("#verdict") and page.locator("#next tr").count() == 0
        page.locator(".word", has_text="cat").click()
        page.click("#hide-word")
        page.wait_for_selector("#next tr")
        assert page.input_value("#own-text") == TEXT.replace("cat", "[MASK]")
        page.click("#why")
        page.wait_for_selector("#story li")
        page.click("#compare")
        page.fill("#second", TEXT.replace("cat", "[MASK]").replace("Bob", "dog"))
        page.wait_for_function("() => document.querySelector('#next tr').children.length === 4")
        page.locator("#languages button[lang=es]").click()
        assert page.inner_text("#next-title") == "¿Qué llena la palabra oculta?"
    served.close()
