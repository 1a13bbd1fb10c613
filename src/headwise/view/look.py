"""A model that one touches: its page, served on this machine while the model runs in this process; and in a notebook.

The page asks and this process answers, one question after another: `Served.work` is the loop, in the main thread of
`headwise look`, where Ctrl-C ends it at once. Of two texts that wait for the model only the later one is read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, Queue
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.markup import Markup, escaped
from headwise.table import Table
from headwise.view.live import Live
from headwise.view.page import json_block, package_text, page, word
from headwise.view.report import quantised
from headwise.words import LANGUAGES, sent

if TYPE_CHECKING:
    from headwise.heads.look import Desk

STYLES = ("report_look.css", "report_heads.css", "report_head.css", "report_roles.css", "look.css")
# The text that a page opens with, by what the model predicts.
EXAMPLES = {
    "next": "Professor Rosa Quandt met Tom. Then Tom thanked Professor Rosa",
    "masked": "The capital of France is {mask}.",
    None: "The weather is nice today.",
}
TICK = 0.2  # seconds after which a worker sees that it is to end


def look_html(about: Mapping[str, Any], example: str | None = None, lang: str = "en") -> str:
    """The page of a model; `about` is what its `Desk` says of it, `example` the text that it opens with."""
    example = example or EXAMPLES[about["predicts"]].format(mask=about["mask"])
    heads = about["heads"]
    layers = {(head["part"], head["layer"]) for head in heads}
    facts = {"family": about["family"], "heads": len(heads), "layers": len(layers)}
    body = Template(package_text("look.html")).substitute(
        heading=escaped(about["model"]), lede=word("look.lede", "p", 'class="lede"', **facts)
    )
    return page(
        "report",
        body,
        title=word("look.title", "title", name=about["model"]),
        script="look.js",
        styles=STYLES,
        data={"data": json_block({**about, "example": example, "roles": [], "tokens": []})},
        words=("look", "report", "role"),
        lang=lang,
        served="look",
    )


class Served(Live):
    """The page of a model on an address of this machine; `work` answers what it asks."""

    def __init__(self, desk: Desk, port: int = 0, example: str | None = None, lang: str = "en") -> None:
        self.desk = desk
        self._waiting: Queue[tuple[dict[str, Any], Future[dict[str, Any]]]] = Queue()
        self._latest: dict[str, int] = {}  # of each text that may stand side by side, the number of the latest question
        self._over = threading.Event()
        super().__init__(port, look_html(desk.about(), example, lang), self._ask_in_turn)

    def _ask_in_turn(self, asked: dict[str, Any]) -> dict[str, Any]:
        slot, turn = str(asked.get("slot")), asked.get("turn")
        if asked.get("do") == "read" and type(turn) is int:
            self._latest[slot] = max(turn, self._latest.get(slot, turn))
        answer: Future[dict[str, Any]] = Future()
        self._waiting.put((asked, answer))
        return answer.result()

    def work(self) -> None:
        """Answer question after question, until `close`."""
        while not self._over.is_set():
            try:
                asked, answer = self._waiting.get(timeout=TICK)
            except Empty:
                continue
            answer.set_result(self._answered(asked))

    def _answered(self, asked: dict[str, Any]) -> dict[str, Any]:
        turn = asked.get("turn")
        if type(turn) is int and turn < self._latest.get(str(asked.get("slot")), turn):
            return {"stale": True}
        try:
            return _why(self.desk, asked) if asked.get("do") == "why" else _packed(self.desk.answer(asked))
        except HeadwiseError as error:
            return {"refused": sent(error.args[0])}
        except Exception as error:  # the page says it; the next question may be one that can be answered
            return {"refused": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        self._over.set()
        super().close()


def _packed(answer: dict[str, Any]) -> dict[str, Any]:
    """With maps as rows, columns, and base64 of 16-bit numbers."""
    if "maps" not in answer:
        return answer
    maps: Mapping[int, NDArray[Any]] = answer["maps"]
    return {**answer, "maps": {n: (*weights.shape, quantised(weights)) for n, weights in maps.items()}}


def _why(desk: Desk, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The story of what the model says next: a sentence for each head that has a place in it, in both languages."""
    from headwise.heads.why import why

    reading, other = desk.readings.get("a"), desk.readings.get("b")
    if reading is None:
        raise HeadwiseError("there is no text yet")
    story = why(desk.folder.model, reading.text, None if other is None else other.text)
    lines = [[part.head, {lang: story.sentence(part, lang) for lang in LANGUAGES}] for part in story.told]
    return {"why": lines, "answer": story.answer, "other": story.other}


class Look:
    """The heads of a model on a text or on inputs: in a notebook a picture, elsewhere the address of a page.

    names, maps, labels  the heads, their weights (T,S), and what stands at the T and at the S places
    """

    MOST_MAPS, MOST_ROWS = 8, 48  # that are drawn, and of each of them rows and columns

    def __init__(
        self, name: str, maps: Mapping[str, NDArray[np.float32]], labels: list[str], desk: Desk | None = None
    ) -> None:
        self.name, self.maps, self.labels, self._desk = name, maps, labels, desk
        self._served: Served | None = None

    @property
    def strongest(self) -> list[str]:
        """The heads whose hardest look, from any token at another than itself and the first, is hardest."""
        return sorted(self.maps, key=lambda name: -_hardest(self.maps[name]))

    @property
    def address(self) -> str:
        """Where the page with the model behind it is served, from the first question for it on."""
        if self._desk is None:
            raise HeadwiseError("a page needs a model that hw.open has read, and a text; this one was run on inputs")
        if self._served is None:
            self._served = Served(self._desk, example=self._desk.readings["a"].text)
            threading.Thread(target=self._served.work, daemon=True).start()
        return self._served.address

    def open(self) -> str:
        """Open the page in the browser, where there is one; its address, good for as long as this process."""
        import webbrowser

        webbrowser.open(self.address)
        return self.address

    def close(self) -> None:
        if self._served is not None:
            self._served.close()
            self._served = None

    def __repr__(self) -> str:
        names = ", ".join(self.strongest[:3])
        where = "" if self._desk is None else "; .open() shows it in a browser"
        return f"Look({self.name}: {len(self.maps)} heads, {len(self.labels)} tokens; {names} look hardest{where})"

    def _repr_html_(self) -> str:
        from headwise.heads.table import BLUE, token_map

        # A row a layer, a cell a head, the bluer the harder it looks.
        rows: dict[str, list[str | Markup]] = {}
        for name, weights in self.maps.items():
            strength = _hardest(weights)
            style = f"background:rgba({BLUE},{strength:.2f});width:1.1em;height:1.1em"
            cell = Markup(f'<div title="{escaped(name)} {strength:.3f}" style="{style}"></div>')
            layer = name.rpartition(".")[0]
            rows.setdefault(layer, [layer]).append(cell)
        columns = max(map(len, rows.values()))
        lines = [[*cells, *[""] * (columns - len(cells))] for cells in rows.values()]
        overview = Table(["", *(f"H{h}" for h in range(columns - 1))], lines).html()
        drawn = []
        for name in self.strongest[: self.MOST_MAPS]:
            weights = self.maps[name][: self.MOST_ROWS, : self.MOST_ROWS]
            n_rows, n_keys = weights.shape
            keys = self.labels
            if n_keys > len(keys):  # of another sequence, as in cross attention: their places stand for them
                keys = list(map(str, range(n_keys)))
            picture = token_map(weights, self.labels[:n_rows], keys[:n_keys])
            drawn.append(f'<div style="overflow-x:auto"><b>{escaped(name)}</b>{picture}</div>')
        grid = "display:grid;grid-template-columns:repeat(auto-fill,minmax(22em,1fr));gap:1em"
        return f'<div><b>{escaped(self.name)}</b>{overview}<div style="{grid}">{"".join(drawn)}</div></div>'


def _hardest(weights: NDArray[np.float32]) -> float:
    """The largest weight on another key than the first and the one of the query itself."""
    others = weights[:, 1:].copy()
    if weights.shape[0] == weights.shape[1]:  # queries and keys are one sequence
        np.fill_diagonal(others[1:], 0)  # each query's own key: the first column is gone, so from the second row on
    return float(others.max(initial=0.0))


def look(model: Any, *inputs: Any, **named: Any) -> Look:
    """The heads of a model on a text: in a notebook a picture of them, elsewhere a page with the model behind it.

        hw.look(hw.open("gemma"), "When Mary and John went to the store")     # in a notebook: drawn
        hw.look(model, "When Mary and John went to the store").open()         # in the browser; the model answers there
        hw.look(model, x, attention_mask=mask)                                # whatever the model is called with

    The hardest looks come first: the largest weight on another token than itself and the first.

    Args:
        model: what `hw.open` gave, its folder; or, with inputs, any model that `hw.watch` watches
        *inputs: a text; else what the model is called with, once, inside `hw.watch`
        **named: as well

    Raises:
        HeadwiseError: for a text that is longer than the model, or whose maps are too large.
    """
    from headwise.models.open import described, open_folder

    texts = [text for text in inputs if isinstance(text, str)]
    if not texts:
        return _on_inputs(model, inputs, named)
    from headwise.heads.look import Desk

    folder = open_folder(Path(model)) if isinstance(model, str | Path) else described(model)
    if folder is None:
        raise HeadwiseError("a text needs the tokenizer of a model that hw.open has read; pass ids to this one")
    if len(inputs) > 1 or named:
        raise HeadwiseError(f"a text comes alone, and {len(inputs) + len(named)} inputs were passed")
    desk = Desk(folder)
    asked = {"do": "read", "slot": "a", "text": texts[0], "changes": {}, "at": -1, "follow": -1}
    labels = []
    for text, _, line_ends, _ in desk.answer(asked)["words"]:
        labels.append(text or "\u23ce" * line_ends)  # a token may be line ends alone
    maps = {name: weights for name, weights in zip(desk.heads, desk.readings["a"].maps, strict=True) if weights.size}
    return Look(folder.name, maps, labels, desk)


def _on_inputs(model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Look:
    from headwise.heads.watch import watch

    with watch(model, maps=True) as seen:
        model(*inputs, **named)
    maps = {name: head.map for name, head in seen.items()}
    longest = max(len(weights) for weights in maps.values())
    head = next(iter(seen.values()))
    labels = [str(place) for place in range(longest)]
    if head.tokens is not None and len(head.tokens[0]) == longest:
        labels = list(head.tokens[0])
    return Look(type(model).__name__, maps, labels)
