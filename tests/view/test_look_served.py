"""The page of a model that answers: its server, questions in turn, a real Chromium that touches it, `hw.look`."""

import base64
import http.client
import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
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
from headwise.view import look as package
from headwise.view.look import Served

pytestmark = pytest.mark.clock

TEXT = "Ann met Bob . the cat saw Ann"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_folder(tmp_path_factory.mktemp("look"), "next")


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    page = Served(Desk(open_folder(folder)))
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


def silent_head(page: Page) -> str:
    """The name of the one head that is switched off, as the page reads it out."""
    page.wait_for_selector(".tile.silent")
    assert page.locator(".tile.silent").count() == 1
    return re.findall(r"L\d\.H\d", page.locator(".tile.silent").evaluate("x => x.outerHTML"))[0]


@pytest.mark.slow
@pytest.mark.browser
def test_a_sentence_is_touched(page: Page, served: Served) -> None:
    assert page.locator(".tile").count() == 12 and page.locator("#eight .head").count() == 8
    first = page.locator("#next th[scope=row] bdi").first.inner_text()
    assert f"'{first}'" in plain(page.inner_text("#verdict"))
    page.locator("#eight .picture").first.click()
    page.wait_for_selector(".tile.silent")
    name = silent_head(page)
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
    assert silent_head(page) == "L1.H1" and faults(page) == []
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


ABOUT = {"model": "x", "family": "x", "heads": [], "predicts": "next", "mask": None}


@pytest.fixture
def echoing() -> Iterator[Served]:
    """A page whose answer is the question."""
    desk: Any = SimpleNamespace(about=lambda: ABOUT, readings={}, answer=lambda asked: {"asked": asked})
    page = Served(desk)
    yield page
    page.close()


def ask(
    echoing: Served, path: str = "/", method: str = "GET", content: bytes | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", echoing.server_port, timeout=300)
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer


def post_to(echoing: Served, path: str, content: bytes = b"{}", **headers: str) -> tuple[int, str]:
    return ask(echoing, path, "POST", content, **headers)[:2]


def raw(echoing: Served, data: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", echoing.server_port), timeout=300) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_a_page_that_asks_has_a_secret(echoing: Served) -> None:
    secret = echoing.base[1:]
    assert echoing.server_address[0] == "127.0.0.1"
    assert len(secret) >= 20 and echoing.address == f"http://127.0.0.1:{echoing.server_port}/{secret}/"
    status, content, answer = ask(echoing, f"/{secret}/")
    assert status == 200 and content == echoing.document == ask(echoing, f"/{secret}/?lang=es")[1]
    assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert post_to(echoing, f"/{secret}/ask", b'{"do": 1}') == (200, '{"asked": {"do": 1}}')
    for path in ("/", "/ask", f"/{secret}", f"/{secret[:-1]}/ask", f"/{secret[:-1]}%C3%A9/", "//ask", "/../x"):
        for status, text in (ask(echoing, path)[:2], post_to(echoing, path)):
            assert status == 404 and secret not in text and "<title" not in text, path
    # Else the name of another site, made to lead here, could read the page.
    for host in ("evil.example", f"evil.example:{echoing.server_port}", "127.0.0.1", "127.0.0.1:1", "", "[::1]:80"):
        for status, text in (ask(echoing, f"/{secret}/", Host=host)[:2], post_to(echoing, f"/{secret}/ask", Host=host)):
            assert status == 403 and secret not in text and "<title" not in text, host
    assert ask(echoing, f"/{secret}/", Host=f"localhost:{echoing.server_port}")[0] == 200
    assert post_to(echoing, f"/{secret}/ask", Origin=f"http://127.0.0.1:{echoing.server_port}")[0] == 200
    assert post_to(echoing, f"/{secret}/ask", Origin="http://evil.example")[0] == 403
    odd = f"GET /{secret[:-1]}\u00e9/ HTTP/1.0\r\nHost: 127.0.0.1:{echoing.server_port}\r\n\r\n"
    assert b"404" in raw(echoing, odd.encode())


def test_what_is_no_question_is_refused(echoing: Served, capfd: pytest.CaptureFixture[str]) -> None:
    refuses(
        lambda: Served(echoing.desk, echoing.server_port), rf"^port={echoing.server_port} of 127.0.0.1 cannot be had \("
    )
    place = f"{echoing.base}/ask"
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
        assert ask(echoing, place, method)[0] == 501, method
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 99_999):
        with pytest.raises(http.client.HTTPException):
            post_to(echoing, place, content)
    assert post_to(echoing, place, **{"Content-Length": str(package.LONGEST + 1)})[0] == 413
    assert post_to(echoing, place, **{"Content-Length": "-1"})[0] == 413
    assert "not finite" in post_to(echoing, place, b'{"do": NaN}')[1]  # which the answer repeats
    for data in (b"", b"\0" * 999, b"GET\r\n\r\n", b"x" * 70000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 99):
        assert echoing.base.encode() not in raw(echoing, data)
    time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_full_pipe_holds_nobody_up(echoing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never read, never ask to the end, or go away: others are answered."""
    monkeypatch.setattr(package._Handler, "timeout", 0.3)
    echoing.document = "x" * 20_000_000
    place = f"{echoing.base}/"
    request = f"GET {place} HTTP/1.0\r\nHost: 127.0.0.1:{echoing.server_port}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", echoing.server_port)) for _ in range(9)]
    for number, client in enumerate(clients):
        client.sendall(request if number % 3 else request[:9])
        if number % 3 == 2:
            client.close()
    status = 0
    while status != 200:
        with suppress(OSError, http.client.HTTPException):
            status = post_to(echoing, f"{echoing.base}/ask")[0]
    for client in clients:
        client.close()
