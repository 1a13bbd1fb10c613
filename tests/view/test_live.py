"""The live page: what it answers, whom it refuses, and that nobody who asks can hold up the training."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import refuses
from invoking import Invoke

from headwise.gpt.film import read_film
from headwise.view import look as room
from headwise.view.look import Live

pytestmark = pytest.mark.clock

SMALL = ("--layers", 1, "--heads", 2, "--width", 8, "--context", 16, "--steps", 31)


@pytest.fixture
def live() -> Iterator[Live]:
    served = Live(0, "<!doctype html><title>x</title>")
    yield served
    served.close()


def ask(
    live: Live, path: str = "/", method: str = "GET", content: bytes | None = None, **headers: str
) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", live.server_port, timeout=300)
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer


def post(live: Live, path: str, content: bytes = b"{}", **headers: str) -> tuple[int, str]:
    return ask(live, path, "POST", content, **headers)[:2]


def raw(live: Live, data: bytes) -> bytes:
    """What comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", live.server_port), timeout=300) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer


def test_the_page_and_the_news(live: Live) -> None:
    assert live.server_address[0] == "127.0.0.1" and live.address == f"http://127.0.0.1:{live.server_port}/"
    live.tell("loss", {"step": 10, "loss": 1.5})
    live.tell("sample", {"step": 10, "text": "</script>\u2028\ud800"})
    status, content, answer = ask(live)
    assert status == 200 and content == live.document
    assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Access-Control-Allow-Origin"] is None
    status, content, answer = ask(live, "/news?after=1")
    assert status == 200 and answer.headers["Content-Type"].startswith("application/json")
    assert json.loads(content) == [{"sample": {"step": 10, "text": "</script>\u2028\ud800"}}]
    assert json.loads(ask(live, "/news?after=99")[1]) == []


def test_nobody_else_reads_or_changes(live: Live, capfd: pytest.CaptureFixture[str]) -> None:
    # Else the name of another site, made to lead here, could read the page.
    for host in ("evil.example", f"evil.example:{live.server_port}", "127.0.0.1", "127.0.0.1:1", "", "[::1]:80"):
        status, content, _ = ask(live, Host=host)
        assert status == 403 and "<title>" not in content, host
    assert ask(live, "/news?after=0", Host=f"localhost:{live.server_port}")[0] == 200
    assert b"403" in raw(live, b"GET / HTTP/1.0\r\n\r\n").splitlines()[0]
    before = live.document, live.news(0)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT"):
        assert ask(live, "/news", method)[0] == 501, method
    for path in (
        "/run.json",
        "/../../etc/passwd",
        "/news/",
        "/%2e%2e/x",
        "/news?after=-1",
        f"/news?after={'9' * 9999}",
    ):
        assert ask(live, path)[0] == 404, path
    assert (live.document, live.news(0)) == before
    for data in (b"", b"\0" * 999, b"GET\r\n\r\n", b"x" * 70000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 99):
        assert b"<title>x" not in raw(live, data)
    assert ask(live)[0] == 200
    time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_full_pipe_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never read, never ask to the end, or go away: others are answered, and telling takes no time."""
    monkeypatch.setattr(room._Handler, "timeout", 0.3)
    live = Live(0, "x" * 20_000_000)
    request = f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{live.server_port}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", live.server_port)) for _ in range(9)]
    for number, client in enumerate(clients):
        client.sendall(request if number % 3 else request[:9])
        if number % 3 == 2:
            client.close()
    for number in range(1000):  # in this thread: were it held up, nobody would come to drop the clients
        live.tell("loss", number)
    status = 0
    while status != 200:
        with suppress(OSError, http.client.HTTPException):  # no room until the slow ones are dropped
            status = ask(live, "/news?after=999")[0]
    live.close()
    for client in clients:
        client.close()


def test_ports_and_questions(live: Live, asking: Live) -> None:
    refuses(lambda: Live(live.server_port, ""), rf"^port={live.server_port} of 127.0.0.1 cannot be had \(.*\); pass")
    live.linger(1e6)  # nobody ever asked
    ask(live)
    began = time.monotonic()
    live.linger(0.3)
    assert time.monotonic() - began > 0.2
    live.linger(1e6, at_most=0.1)
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 99_999):
        assert post(asking, f"{asking.base}/ask", content)[0] == 400, content[:9]
    assert post(asking, f"{asking.base}/ask", **{"Content-Length": str(room.LONGEST + 1)})[0] == 413
    assert post(asking, f"{asking.base}/ask", **{"Content-Length": "-1"})[0] == 413
    assert "not finite" in post(asking, f"{asking.base}/ask", b'{"do": NaN}')[1]  # which the answer repeats
    assert post(asking, f"{asking.base}/rm")[0] == 404


@pytest.mark.slow
def test_training_is_the_same_with_watchers(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One watches as a page does, one never reads; the run has the same bytes as one that nobody watches."""
    from headwise.cli import train as command

    monkeypatch.setattr(command, "LINGER", 0.1)
    pages: list[Live] = []
    news: list[dict[str, Any]] = []
    clients: list[socket.socket] = []

    def watch(served: Live) -> None:
        pages.append(served)
        clients.append(socket.create_connection(("127.0.0.1", served.server_port)))
        clients[0].sendall(f"GET /news?after=0 HTTP/1.0\r\nHost: 127.0.0.1:{served.server_port}\r\n\r\n".encode())

        def poll() -> None:
            while not any("state" in item for item in news):
                news.extend(json.loads(ask(served, f"/news?after={len(news)}")[1]))
                time.sleep(0.05)
            reports.append(ask(served)[1])

        threading.Thread(target=poll, daemon=True).start()

    first: list[str] = []
    reports: list[str] = []
    make = Live.__init__

    def made(served: Live, *settings: Any) -> None:
        make(served, *settings)
        first.append(served.document)
        watch(served)

    monkeypatch.setattr(Live, "__init__", made)
    watched = invoke("train", *SMALL, "--out", tmp_path / "watched", "--live", "--lang", "es")
    alone = invoke("train", *SMALL, "--out", tmp_path / "alone")
    assert watched.code == alone.code == 0, watched.err + alone.err
    assert pages[0].address in watched.err and '<html lang="es"' in first[0]
    assert watched.out.count("\n") == alone.out.count("\n")
    for name in ("model.safetensors", "film.json", "config.json"):
        assert (tmp_path / "watched" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    kinds = [kind for item in news for kind in item]
    assert kinds[0] == "header" and kinds[-1] == "state" and {"frame", "loss", "sample"} <= set(kinds)
    frames = [item["frame"] for item in news if "frame" in item]
    assert frames == read_film(tmp_path / "watched")["frames"] and len(frames) > 9  # type: ignore[index]
    assert reports == [(tmp_path / "watched" / "report.html").read_text()]
    with pytest.raises(OSError):
        ask(pages[0])  # it is gone with the command
    clients[0].close()


@pytest.fixture
def asking() -> Iterator[Live]:
    """A page that asks; the answer is the question."""
    served = Live(0, "<!doctype html><title>x</title>", lambda asked: {"asked": asked})
    yield served
    served.close()


def test_a_page_that_asks_has_a_secret(asking: Live) -> None:
    secret = asking.base[1:]
    assert len(secret) >= 20 and asking.address == f"http://127.0.0.1:{asking.server_port}/{secret}/"
    assert ask(asking, f"/{secret}/")[:2] == (200, asking.document)
    assert post(asking, f"/{secret}/ask", b'{"do": 1}') == (200, '{"asked": {"do": 1}}')
    for path in ("/", "/ask", "/news", f"/{secret}", f"/{secret[:-1]}/ask", f"/{secret[:-1]}%C3%A9/", "//ask"):
        for status, text in (ask(asking, path)[:2], post(asking, path)):
            assert status == 404 and secret not in text and "<title>" not in text, path
    for host in ("evil.example", "127.0.0.1"):
        for status, text in (ask(asking, f"/{secret}/", Host=host)[:2], post(asking, f"/{secret}/ask", Host=host)):
            assert status == 403 and secret not in text
    assert b"404" in raw(
        asking, f"GET /{secret[:-1]}\u00e9/ HTTP/1.0\r\nHost: 127.0.0.1:{asking.server_port}\r\n\r\n".encode()
    )
    assert post(asking, f"/{secret}/ask", Origin=f"http://127.0.0.1:{asking.server_port}")[0] == 200
    assert post(asking, f"/{secret}/ask", Origin="http://evil.example")[0] == 403
