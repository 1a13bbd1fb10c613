"""The server of a page: what it answers, whom it refuses, and that nobody who asks can hold up the others."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from cases import refuses

from headwise.view import look as package
from headwise.view.look import Served

pytestmark = pytest.mark.clock

ABOUT = {"model": "x", "family": "x", "heads": [], "predicts": "next", "mask": None}


@pytest.fixture
def served() -> Iterator[Served]:
    """A page whose answer is the question."""
    desk: Any = SimpleNamespace(about=lambda: ABOUT, readings={}, answer=lambda asked: {"asked": asked})
    page = Served(desk)
    threading.Thread(target=page.work, daemon=True).start()
    yield page
    page.close()


def ask(
    served: Served, path: str = "/", method: str = "GET", content: bytes | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=300)
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer


def post(served: Served, path: str, content: bytes = b"{}", **headers: str) -> tuple[int, str]:
    return ask(served, path, "POST", content, **headers)[:2]


def raw(served: Served, data: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", served.server_port), timeout=300) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_a_page_that_asks_has_a_secret(served: Served) -> None:
    secret = served.base[1:]
    assert served.server_address[0] == "127.0.0.1"
    assert len(secret) >= 20 and served.address == f"http://127.0.0.1:{served.server_port}/{secret}/"
    status, content, answer = ask(served, f"/{secret}/")
    assert status == 200 and content == served.document == ask(served, f"/{secret}/?lang=es")[1]
    assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert post(served, f"/{secret}/ask", b'{"do": 1}') == (200, '{"asked": {"do": 1}}')
    for path in ("/", "/ask", f"/{secret}", f"/{secret[:-1]}/ask", f"/{secret[:-1]}%C3%A9/", "//ask", "/../x"):
        for status, text in (ask(served, path)[:2], post(served, path)):
            assert status == 404 and secret not in text and "<title" not in text, path
    # Else the name of another site, made to lead here, could read the page.
    for host in ("evil.example", f"evil.example:{served.server_port}", "127.0.0.1", "127.0.0.1:1", "", "[::1]:80"):
        for status, text in (ask(served, f"/{secret}/", Host=host)[:2], post(served, f"/{secret}/ask", Host=host)):
            assert status == 403 and secret not in text and "<title" not in text, host
    assert ask(served, f"/{secret}/", Host=f"localhost:{served.server_port}")[0] == 200
    assert post(served, f"/{secret}/ask", Origin=f"http://127.0.0.1:{served.server_port}")[0] == 200
    assert post(served, f"/{secret}/ask", Origin="http://evil.example")[0] == 403
    odd = f"GET /{secret[:-1]}\u00e9/ HTTP/1.0\r\nHost: 127.0.0.1:{served.server_port}\r\n\r\n"
    assert b"404" in raw(served, odd.encode())


def test_what_is_no_question_is_refused(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    refuses(
        lambda: Served(served.desk, served.server_port), rf"^port={served.server_port} of 127.0.0.1 cannot be had \("
    )
    place = f"{served.base}/ask"
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
        assert ask(served, place, method)[0] == 501, method
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 99_999):
        with pytest.raises(http.client.HTTPException):
            post(served, place, content)
    assert post(served, place, **{"Content-Length": str(package.LONGEST + 1)})[0] == 413
    assert post(served, place, **{"Content-Length": "-1"})[0] == 413
    assert "not finite" in post(served, place, b'{"do": NaN}')[1]  # which the answer repeats
    for data in (b"", b"\0" * 999, b"GET\r\n\r\n", b"x" * 70000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 99):
        assert served.base.encode() not in raw(served, data)
    time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_full_pipe_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never read, never ask to the end, or go away: others are answered."""
    monkeypatch.setattr(package._Handler, "timeout", 0.3)
    served.document = "x" * 20_000_000
    place = f"{served.base}/"
    request = f"GET {place} HTTP/1.0\r\nHost: 127.0.0.1:{served.server_port}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", served.server_port)) for _ in range(9)]
    for number, client in enumerate(clients):
        client.sendall(request if number % 3 else request[:9])
        if number % 3 == 2:
            client.close()
    status = 0
    while status != 200:
        with suppress(OSError, http.client.HTTPException):
            status = post(served, f"{served.base}/ask")[0]
    for client in clients:
        client.close()
