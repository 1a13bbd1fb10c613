"""The live page of a training: served on the loopback address, from threads that training never waits for.

`GET /` is the page and `GET /news?after=N` a JSON list of what happened since, from number N on; nothing can be changed
from outside. Requests must name the loopback address as their host, so that no other site's name can be made to lead
here (DNS rebinding). Who reads slowly, or not at all, is dropped after some seconds.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from headwise.errors import HeadwiseError
from headwise.markup import escaped
from headwise.view.film import SCRIPTS, STYLES, WORDS, film_section
from headwise.view.page.assemble import package_text, page, word

PATIENCE = 5.0  # seconds that a client may take to ask, and to read the answer
MOST = 16  # clients that are answered at a time


class Live(ThreadingHTTPServer):
    """A page and the news, from `start` to `close`; `tell` adds to the news and never waits."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, document: str) -> None:
        """`port` 0 takes a free one. Raises HeadwiseError where the port cannot be had."""
        self.document = document
        self.asked = -inf  # when somebody asked last
        self._news: list[str] = []
        self._room = threading.BoundedSemaphore(MOST)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise HeadwiseError(
                f"--port {port} of 127.0.0.1 cannot be had ({error.strerror}); pass another, or none for any free one"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def tell(self, kind: str, content: Any) -> None:
        """Add to the news: a header, frame, loss, sample or state."""
        self._news.append(json.dumps({kind: content}))

    def news(self, after: int) -> str:
        return f"[{','.join(self._news[after:])}]"

    def linger(self, seconds: float, at_most: float = inf) -> None:
        """Wait until nobody has asked for so many seconds, and no longer than `at_most`."""
        end = time.monotonic() + at_most
        while time.monotonic() < min(self.asked + seconds, end):
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
    """Answers one request; all but GET is refused by the class above."""

    server: Live
    timeout = PATIENCE
    server_version, sys_version = "headwise", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(403, "text/plain", f"ask for {self.server.address}")
            return
        self.server.asked = time.monotonic()
        try:
            address = urlsplit(self.path)
            after = int(parse_qs(address.query).get("after", ["0"])[0])
        except ValueError:
            address, after = None, -1
        if address is None or after < 0:
            self._answer(400, "text/plain", "after must be a whole number of at least 0")
        elif address.path == "/news":
            self._answer(200, "application/json", self.server.news(after))
        elif address.path == "/":
            self._answer(200, "text/html", self.server.document)
        else:
            self._answer(404, "text/plain", "there are / and /news")

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
    body = Template(package_text("live.html")).substitute(name=escaped(name), film=film_section())
    title = word("film.live_title", "title", name=name)
    return page(
        "live", body, title=title, styles=STYLES, scripts=(*SCRIPTS, "live.js"), words=WORDS, lang=lang, news=True
    )
