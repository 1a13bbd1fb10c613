"""The page of a model that one touches, served on the loopback address.

The page has a secret in its path, `/SECRET/`, and `POST /SECRET/ask` answers one question, JSON for JSON; without the
secret there is nothing. Requests must name the loopback address as their host, so that no other site's name can be made
to lead here (DNS rebinding). Who reads slowly, or not at all, is dropped after some seconds.

The model runs in this process, which answers one question after another. Of two texts that wait for the model only the
later one is read.
"""

from __future__ import annotations

import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.table import escaped
from headwise.view.page import frame, json_block, large_view, page, word
from headwise.view.report import quantised
from headwise.words import LANGUAGES, Facts, sent

if TYPE_CHECKING:
    from headwise.heads.look import Desk

# These two are round choices: they bound what a client can take of time and memory.
PATIENCE = 5.0  # seconds that a client may take to ask, and to read the answer
LONGEST = 2**20  # bytes of a question
# Headers of every answer. Nothing is kept, guessed, given to another site or shown inside one; what a page may load
# it says itself.
ALONE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: GET, and POST where the page asks; Python's own class refuses all other methods."""

    server: Served
    timeout = PATIENCE
    # in the header Server: no versions, which are nobody's business
    server_version = "headwise"
    sys_version = ""

    def do_GET(self) -> None:
        path = self._path()
        if path == "/":
            self._answer(200, self.server.document, "text/html")
        elif path is not None:
            self._answer(404, "there is /")

    def do_POST(self) -> None:
        path = self._path()
        origin = self.headers.get("Origin")
        if path is None:
            return
        size = self.headers.get("Content-Length", "")
        if path != "/ask":
            self._answer(404, "there is /ask")
        # A browser sends in Origin the site whose page asks; a program that is no browser sends none.
        elif (
            origin is not None
            and origin.removeprefix("http://") not in self.server.hosts
        ):
            self._answer(403, "another site may not ask")
        elif not (size.isascii() and size.isdigit() and int(size) <= LONGEST):
            # What is no ASCII number comes here, too: isdigit alone also takes signs such as ², on which int fails.
            self._answer(413, f"a question has a length of at most {LONGEST} bytes")
        else:
            # What is no JSON object ends the connection without an answer.
            question = json.loads(self.rfile.read(int(size)))
            try:
                answer = json.dumps(self.server.answered(question), allow_nan=False)
            except ValueError:
                # as of a model whose weights are not finite; browsers read no NaN
                answer = json.dumps(
                    {"refused": "the answer has a number that is not finite"}
                )
            self._answer(200, answer, "application/json")

    def _path(self) -> str | None:
        """The path below the secret; None, once refused, for another host or another secret."""
        base = self.server.base
        path = self.path
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(403, f"ask for http://127.0.0.1:{self.server.server_port}/")
            return None
        # Compared in the same time whatever it is, so that nobody finds the secret letter by letter by the clock.
        if not secrets.compare_digest(path[: len(base)].encode(), base.encode()):
            self._answer(
                404, "there is nothing here; open the whole address that was printed"
            )
            return None
        # "" where the last slash is missing: from there a page would ask beside the secret. Behind "?" stands the
        # language that its reader chose.
        return path[len(base) :].split("?")[0]

    def _answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in ALONE.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Nothing is logged: the terminal is the user's."""


# The text that a page opens with, by what the model predicts: the next token, the one at a mask, none. In the first a
# name comes again, which heads that look for repeated tokens find.
EXAMPLES = {
    "next": "Professor Rosa Quandt met Tom. Then Tom thanked Professor Rosa",
    "masked": "The capital of France is {mask}.",
    None: "The weather is nice today.",
}


def look_html(about: Facts, example: str | None = None, lang: str = "en") -> str:
    """The page of a model; `about` is what its `Desk` says of it, `example` the text that it opens with.

    A `Desk` is a model that answers questions about its heads on a text (heads/look.py).
    """
    example = example or EXAMPLES[about["predicts"]].format(mask=about["mask"])
    heads = about["heads"]
    layers = {(head["part"], head["layer"]) for head in heads}
    body = frame(
        "page/look.html",
        heading=escaped(about["model"]),
        family=escaped(about["family"]),
        extent=word("report.extent", heads=len(heads), layers=len(layers)),
        large=large_view(),
    )
    return page(
        "report",  # the frame: the look of the report
        body,
        title=("look.title", {"name": about["model"]}),
        script="look.js",
        styles=("page/heads.css", "page/look.css"),
        data={"data": json_block({**about, "example": example, "served": True})},
        words=("look", "report", "role"),
        lang=lang,
        served=True,
    )


class Served(ThreadingHTTPServer):
    """The page of a model on an address of this machine, which answers what the page asks, until `close`."""

    # Of Python's server: the threads that answer end with the process, and `close` waits for none of them.
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, desk: Desk, port: int = 0, example: str | None = None, lang: str = "en"
    ) -> None:
        """`port` 0 takes a free one. Raises HeadwiseError where the port cannot be had."""
        self.desk = desk
        self.document = look_html(desk.about(), example, lang)
        self.base = f"/{secrets.token_urlsafe(16)}"  # before every path
        self._turn = threading.Lock()  # the model answers one question at a time
        # the last reading of each text; two may stand side by side
        self._latest: dict[str, int] = {}
        self._over = threading.Event()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise HeadwiseError(
                f"port={port} of 127.0.0.1 cannot be had ({error.strerror}); pass another, or none for any free one"
            ) from None
        self.hosts = {
            f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")
        }
        # Every 0.1 seconds the server looks whether it is to end; `close` waits as long, at most.
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.base}/"

    def open(self) -> str:
        """Open the page in the browser, where there is one; gives its address, good for as long as this process."""
        import webbrowser

        webbrowser.open(self.address)
        return self.address

    def close(self) -> None:
        self._over.set()
        self.shutdown()  # `serve_forever` ends
        self.server_close()  # the port is free

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow: nothing is printed."""

    def answered(self, asked: Facts) -> Facts:
        """The answer to a question of the page, in a thread of the server."""
        # `slot` is the text, "a" or "b"; `turn` counts the page's questions. It begins with the clock when the page is
        # opened, so that one opened anew begins above the last.
        slot = str(asked.get("slot"))
        turn = asked.get("turn")
        # and no bool, which isinstance would take
        if asked.get("do") == "read" and type(turn) is int:
            # Without a lock: where two threads meet here, a text may be read in vain, and the page drops that answer.
            self._latest[slot] = max(turn, self._latest.get(slot, turn))
        with self._turn:
            return self._answered(asked)

    def work(self) -> None:
        """Wait until `close`, or Ctrl-C."""
        self._over.wait()

    def _answered(self, asked: Facts) -> Facts:
        turn = asked.get("turn")
        # A later text came while this question waited: its answer would not be shown.
        if type(turn) is int and turn < self._latest.get(str(asked.get("slot")), turn):
            return {"stale": True}
        try:
            if asked.get("do") == "why":
                return _why(self.desk)
            if asked.get("do") == "adds":
                return {"adds": _adds(self.desk, asked.get("follow", -1))}
            answer = self.desk.answer(asked)
            # as rows, columns, and base64 of 16-bit numbers
            for n, weights in answer.get("maps", {}).items():
                answer["maps"][n] = *weights.shape, quantised(weights)
            return answer
        except HeadwiseError as error:
            return {"refused": sent(error.args[0])}
        # the page says it; the next question may be one that can be answered
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}


def _why(desk: Desk) -> Facts:
    """The story of what the model says next: a sentence for each head that has a place in it, in both languages.

    Where two texts stand side by side, the second is the one with something changed, as in `headwise why --corrupt`.
    """
    from headwise.heads.why import why

    reading = desk.readings.get("a")
    other = desk.readings.get("b")
    if reading is None:
        raise HeadwiseError("there is no text yet")
    story = why(desk.folder.model, reading.text, None if other is None else other.text)
    lines = [
        [part.head, {lang: story.sentence(part, lang) for lang in LANGUAGES}]
        for part in story.told
    ]
    return {"why": lines, "answer": story.answer, "other": story.other}


def _adds(desk: Desk, follow: int) -> dict[str, float]:
    """What each head adds to the logit of the followed token by itself; nothing where that cannot be told."""
    from headwise.heads.attribute import attribute

    reading = desk.readings["a"]
    try:
        return attribute(desk.folder.model, reading.ids, follow, reading.at).heads
    except HeadwiseError:  # a model whose parts do not sum to its logits
        return {}


def look(model: Any, text: str) -> Served:
    """A page on which the heads of a model are touched, on a text; the model answers there while this process lives.

        page = hw.look(hw.open("gemma"), "When Mary and John went to the store")
        page.open()       # in the browser; page.address is where it is served, page.close() ends it

    Args:
        model: what `hw.open` gave, or its folder
        text: what the page opens with
    """
    from headwise.heads.look import Desk
    from headwise.models.open import described, open_folder

    folder = (
        open_folder(Path(model)) if isinstance(model, str | Path) else described(model)
    )
    if folder is None:
        raise HeadwiseError(
            "a text needs the tokenizer of a model that hw.open has read; hw.watch(model, maps=True) has the maps of "
            "any model"
        )
    return Served(Desk(folder), example=text)
