"""A page that is served on the loopback address, and the film of a training.

The page is that of a training, from threads that training never waits for, or that of a model which answers questions
(`view/look.py`).

`GET /` is the page and `GET /news?after=N` a JSON list of what happened since, from number N on; nothing can be changed
from outside. A page that asks has a secret in its path, `/SECRET/`, and `POST /SECRET/ask` answers one question, JSON
for JSON; without the secret there is nothing. Requests must name the loopback address as their host, so that no other
site's name can be made to lead here (DNS rebinding). Who reads slowly, or not at all, is dropped after some seconds.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headwise.errors import HeadwiseError
from headwise.markup import escaped
from headwise.view.page import json_block, package_text, page, word

FILM_BODY, FILM_STYLES, FILM_WORDS = "film.html", ("film.css",), ("film", "role")  # where a page shows a film
LOSSES = 400  # points of the curve in a page, about; evaluations on held-out text all stay

Film = tuple[dict[str, Any], Sequence[dict[str, Any]], Sequence[dict[str, Any]]]  # header, frames, rows of the losses


def film_data(film: Film, known: Mapping[str, Sequence[str]]) -> str:
    """The block of data for a report, by the name `film-data`. `known` are the roles that a survey awards each head."""
    header, frames, losses = film
    every = -(-len(losses) // LOSSES)
    kept = [row for n, row in enumerate(losses) if n % every == 0 or "held_out_loss" in row]
    seen = [{name: frame[name] for name in ("step", "alike", "roles", "maps")} for frame in frames]
    return json_block({"header": header, "frames": seen, "losses": kept, "known": dict(known)})


PATIENCE = 5.0  # seconds that a client may take to ask, and to read the answer
MOST = 16  # clients that are answered at a time
LONGEST = 2**20  # bytes of a question
Ask = Callable[[dict[str, Any]], dict[str, Any]]


class Live(ThreadingHTTPServer):
    """A page and the news, from its making to `close`; `tell` adds to the news and never waits.

    With `ask` it answers the page's questions, too, below a secret path.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, document: str, ask: Ask | None = None) -> None:
        """`port` 0 takes a free one. Raises HeadwiseError where the port cannot be had."""
        self.document, self.ask = document, ask
        self.base = "" if ask is None else f"/{secrets.token_urlsafe(16)}"  # before every path
        self.last_request = -inf  # when one came, by the monotonic clock
        self._news: list[str] = []
        self._room = threading.BoundedSemaphore(MOST)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise HeadwiseError(
                f"port={port} of 127.0.0.1 cannot be had ({error.strerror}); pass another, or none for any free one"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.base}/"

    def tell(self, kind: str, content: Any) -> None:
        """Add to the news: a header, frame, loss, sample or state."""
        self._news.append(json.dumps({kind: content}))

    def news(self, after: int) -> str:
        return f"[{','.join(self._news[after:])}]"

    def linger(self, seconds: float, at_most: float = inf) -> None:
        """Wait until nobody has asked for so many seconds, and no longer than `at_most`."""
        end = time.monotonic() + at_most
        while time.monotonic() < min(self.last_request + seconds, end):
            time.sleep(0.05)

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """One more thread, or none where too many clients are at it."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is no matter of the training's."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: GET, and POST where the page asks; the class above refuses all other methods."""

    server: Live
    timeout = PATIENCE
    server_version, sys_version = "headwise", ""

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        try:
            address = urlsplit(path)
            after = int(parse_qs(address.query).get("after", ["0"])[0])
            if after < 0:
                raise ValueError
        except ValueError:
            self._answer(400, "text/plain", "after must be a whole number of at least 0")
            return
        if address.path == "/news":
            self._answer(200, "application/json", self.server.news(after))
        elif address.path == "/":
            self._answer(200, "text/html", self.server.document)
        else:
            self._answer(404, "text/plain", "there are / and /news")

    def do_POST(self) -> None:
        if self.server.ask is None:
            self.send_error(501)
            return
        path, origin = self._path(), self.headers.get("Origin")
        if path is None:
            return
        size = self.headers.get("Content-Length", "")
        if path != "/ask":
            self._answer(404, "text/plain", "there is /ask")
        elif origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            self._answer(403, "text/plain", "another site may not ask")
        elif not (size.isascii() and size.isdigit() and int(size) <= LONGEST):
            self._answer(413, "text/plain", f"a question has a length of at most {LONGEST} bytes")
        else:
            self._ask(self.rfile.read(int(size)), self.server.ask)

    def _ask(self, content: bytes, ask: Ask) -> None:
        try:
            question = json.loads(content)
        except (ValueError, RecursionError):
            question = None
        if isinstance(question, dict):
            self._answer(200, "application/json", json.dumps(ask(question), allow_nan=False))
        else:
            self._answer(400, "text/plain", "a question is a JSON object")

    def _path(self) -> str | None:
        """The path below the secret; None, once refused, for another host or another secret."""
        base, path = self.server.base, self.path
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(403, "text/plain", f"ask for http://127.0.0.1:{self.server.server_port}/")
            return None
        if not secrets.compare_digest(path[: len(base)].encode(errors="replace"), base.encode()):
            self._answer(404, "text/plain", "there is nothing here; open the whole address that was printed")
            return None
        self.server.last_request = time.monotonic()
        return path[len(base) :] or "/"

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the page brings the rest itself
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """The terminal belongs to the training."""


def live_html(name: str, lang: str = "en") -> str:
    """The page of a training that goes on; it asks its own origin for news, and nobody else."""
    body = Template(package_text("live.html")).substitute(name=escaped(name), film=package_text(FILM_BODY))
    title = word("film.live_title", "title", name=name)
    options: dict[str, Any] = {"styles": FILM_STYLES, "words": FILM_WORDS, "lang": lang, "served": "live"}
    return page("live", body, title=title, script="live.js", **options)
