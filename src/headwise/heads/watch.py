"""`watch`: what every head did while a model ran, exactly, in memory that does not grow with T x S.

It gives a table, `Seen`, with a number for each statistic, head and row; a row is one query of the text. `head_maps`
keeps the whole map of each head on one short text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.corpus.documents import Text
from headwise.corpus.tokens import Ids
from headwise.errors import HeadwiseError, MissingError
from headwise.heads.blocks import Measured, as_numpy, factors_of, measure, row_weights
from headwise.heads.documents import (
    Document,
    listening,
    unpacked,
)
from headwise.heads.statistics import (
    Statistics,
    all_statistics,
    formulas,
    unknown_head,
    unknown_statistic,
)
from headwise.heads.table import Array, HeadRow, HeadTable, Numbers, Row
from headwise.models.ask import context_of, evaluating, run_body
from headwise.models.open import Folder, row_of
from headwise.models.sites import Site, missing, sites_of
from headwise.records import Call, HeadMap, HeadMaps, parse_head
from headwise.words import Note

# Round choices: larger ones take more memory, and make larger pages.
# of a head that are kept on request: 4 MiB, of all heads of a large model some GiB
MOST_WEIGHTS = 2**20
LONGEST = 400  # tokens of a text whose maps are drawn; every head keeps a T x T map
# numbers of all maps that are drawn beside a survey: they all stand in one page
CELLS = 2**20

Marks = Mapping[str, Sequence[int]]  # name -> ids


class Maps(Tensor):
    """Weights in the graph of a model's gradients, which NumPy and what draws read as they read an array."""

    def __array__(self, *args: Any, **keywords: Any) -> Array:
        return np.asarray(as_numpy(self), *args, **keywords)


class _SeenSite:
    """What the heads of one attention did: numbers row by row, and pictures of the last document."""

    def __init__(self, heads: Sequence[str]) -> None:
        self.heads = heads
        # statistic that every document has -> its rows (H,n), document by document until they are asked for
        self.parts: dict[str, list[Array]] = {}
        # rows of each; none of an attention that has not run
        self.documents: list[int] = []
        # (B,H,T,S), or some rows, of the last call that had such rows
        self.maps: Tensor | None = None
        # (S,) bool, which keys of its last document are of an image
        self.image: Tensor | None = None

    def add(self, measured: Measured) -> set[str]:
        """Add the numbers of a document, and give the names of statistics that it or an earlier one lacks."""
        if not self.documents:
            self.parts = {name: [] for name in measured.rows}
        # They are dropped: a mean would be over some documents, and not say so.
        only_sometimes = self.parts.keys() ^ measured.rows.keys()
        for name in only_sometimes:
            self.parts.pop(name, None)
        for name, parts in self.parts.items():
            parts.append(as_numpy(measured.rows[name]))
        self.documents.append(len(measured.places))
        self.received = as_numpy(measured.received)  # (H,S)
        # (H,b,b), b blocks of queries and of keys
        self.thumbnail = as_numpy(measured.thumbnail)
        return only_sometimes


class Rows(Statistics[Array]):
    """The numbers of one head row by row, `rows.entropy` or `rows["entropy"]`, (n,) float32 each."""

    def __init__(self, site: _SeenSite, head: int) -> None:
        self._site = site
        self._head = head

    def __getitem__(self, name: str) -> Array:
        if name not in self._site.parts:
            raise unknown_statistic(name, self._site.parts)
        parts = self._site.parts[name]  # (H,n) each
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts, 1)]
        return np.asarray(parts[0][self._head])

    def __iter__(self) -> Iterator[str]:
        return iter(self._site.parts)


class SeenHead(HeadRow[float]):
    """What one head did: `head.entropy` and so on are means over the rows, `head.rows` has them one by one."""

    def __init__(self, name: str, site: _SeenSite, head: int) -> None:
        self.name = name
        self.rows = Rows(site, head)
        self._site = site
        self._head = head

    def __getitem__(self, name: str) -> float:
        """The mean of a statistic, or of a set of keys named in `marks`.

        A row in which the head may attend nothing has NaN for a score, and is left out. `score_peak` is a maximum.
        """
        if name == "score_peak":
            return float(np.fmax.reduce(self.rows["score_max"], initial=-math.inf))
        rows = self.rows[name]
        rows = rows[~np.isnan(rows)]
        return float(rows.mean(dtype=np.float64)) if len(rows) else math.nan

    @property
    def means(self) -> Numbers:
        """Statistic -> its mean over the rows; and the largest score of all."""
        means = {}
        for name in self.rows:
            means[name] = self[name]
            if name == "score_max":
                means["score_peak"] = self["score_peak"]
        return means

    @property
    def n_rows(self) -> int:
        return sum(self.documents)

    @property
    def documents(self) -> Sequence[int]:
        """Rows of each document, in the order in which they ran."""
        return self._site.documents

    @property
    def received(self) -> Array:
        """The sum of the weights that each key received from all queries, (S,); of the last call's last document."""
        return self._picture(self._site.received)

    @property
    def thumbnail(self) -> Array:
        """Exact means of the weights over blocks of queries x keys, 32 x 32 or fewer, of the last call's last document.

        A text of up to 32 tokens has a block for each weight.
        """
        return self._picture(self._site.thumbnail)

    def _picture(self, of_heads: Array) -> Array:
        if not of_heads.size and self.n_rows:
            raise MissingError(f"watch(only=...) keeps no pictures of {self.name}")
        return np.asarray(of_heads[self._head])

    @property
    def map(self) -> Any:
        """The weights (T,S) of the last call, or some of their rows, as `watch(maps=...)` asks; (B,T,S) of B texts.

        A float32 array; where gradients were recorded, a tensor of the graph, which NumPy reads as any array.
        Documents that are packed in one row have one map.
        """
        if self._site.maps is None:
            raise MissingError(
                f"the map of {self.name} was not kept; ask for it with watch(model, maps=True), or for rows that the "
                f"text has"
            )
        maps = self._site.maps[:, self._head]
        maps = maps if len(maps) > 1 else maps[0]
        return maps if maps.requires_grad else as_numpy(maps)

    @property
    def image_map(self) -> Any:
        """The columns of the last text's `map` that are of an image; all in a tower that reads nothing but images."""
        of_text = self.map if self.map.ndim == 2 else self.map[-1]
        image = self._site.image
        return of_text if image is None else of_text[:, image.cpu().numpy()]

    def __repr__(self) -> str:
        numbers = [f"{name}={self[name]:.4g}" for name in [*self.rows][:3]]
        return f"{self.name}({', '.join(numbers)}, rows={self.n_rows})"


class Seen(HeadTable[SeenHead]):
    """Every head that ran, by name: `seen["L3.H5"]`.

    It holds the rows, four bytes for each row, head and statistic, and little else.
    """

    def __init__(self, sites: Sequence[Site], notes: Sequence[str]) -> None:
        # How many heads some have is known only once they have run: then `add` puts their names here.
        self._sites = {site.name: _SeenSite(site.heads) for site in sites}
        # what has no map, and what a number does not say, in lines
        self.notes = list(notes)

    def add(self, site: Site, measured: Measured) -> None:
        """The numbers of one document of a call."""
        of_site = self._sites[site.name]
        of_site.heads = site.heads
        left_out = of_site.add(measured)
        if left_out:
            self.note(Note.of("note.left_out", names=", ".join(sorted(left_out))))

    def note(self, line: str) -> None:
        """Add a line to `notes`, once."""
        if line and line not in self.notes:
            self.notes.append(line)

    def add_maps(self, site: Site, weights: Tensor, document: Document) -> None:
        """The whole maps (B,H,T,S) of a call, or some rows of them; `document` is the last one."""
        of_site = self._sites[site.name]
        of_site.maps = weights.as_subclass(Maps)
        of_site.image = document.marks.get("image")

    def __getitem__(self, name: str) -> SeenHead:
        known: list[str] = []
        for site in self._sites.values():
            if name in site.heads and site.documents:
                return SeenHead(name, site, site.heads.index(name))
            known += site.heads
        if name in known:
            raise MissingError(
                f"{name} did not run inside the block; run the model, or the part of it that has {name}"
            )
        raise unknown_head(name, known)

    def __iter__(self) -> Iterator[str]:
        for site in self._sites.values():
            if site.documents:
                yield from site.heads

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def records(self) -> list[Row]:
        return [
            {"name": name, "rows": head.n_rows, **head.means}
            for name, head in self.items()
        ]

    def __repr__(self) -> str:
        return f"Seen({len(self)} heads)"


@contextmanager
def watch(
    model: nn.Module,
    text: str | Tensor | Sequence[int] | None = None,
    *,
    marks: Marks | None = None,
    maps: bool | Sequence[int] = False,
    only: Sequence[str] = (),
) -> Iterator[Seen]:
    """Note what every head does while a model runs inside this block.

        with hw.watch(model) as seen:
            model(ids)
        seen["L3.H5"].entropy          # mean over all real rows, in nats
        seen["L3.H5"].rows.entropy     # (n,) one number a row

        with hw.watch(model, "The keys to the cabinet") as seen:
            print(seen.text())

    The model computes its output as it does outside. `seen.notes` lists what has no map. Heads are named `L3.H5`; in
    encoder-decoder models `encoder.L3.H5`, `cross.L3.H5`. Calls in other threads are not counted. A compiled model
    that is not ours runs without its compiler. Statistics: `headwise.heads.statistics`. Rows are counted over all
    calls and documents; padding is left out.

    Args:
        model: a GPT of ours, a model of transformers, or any module whose attention calls
            `scaled_dot_product_attention` or `nn.MultiheadAttention`, or multiplies a softmax over keys with values
        text: which the model reads before the block begins: a text, of a model that `open` opened, or ids (T,)
        marks: named sets of token ids whose mass is noted, such as {"delimiter": [11, 13]}:
            seen["L3.H5"]["delimiter"]
        maps: also keep each head's map (T,S), `.map`, of the last call, or the rows listed, of the last call that has
            one of them; (B,T,S) of a batch; up to 2^20 weights a head and document; attached where gradients are on
        only: statistics that are noted, such as ["score_max"]; default all. Of score_max, score_peak, lse, sink, gate,
            confidence and norm nothing else is computed, and no pictures are kept: a training loop can afford them

    Raises:
        HeadwiseError: with the names of what is no such model, where our reading of a call does not give the output
            of the model, and at the end of a block in which no head was reached.
    """
    marks = marks or {}
    _check(marks, only)
    # a peak is the largest of the rows
    wanted = {"score_max" if name == "score_peak" else name for name in only}
    needs_w_o = not only or "norm" in only
    sites = sites_of(model)
    seen = Seen(sites, missing(model, sites))

    def note(site: Site, call: Call, documents: Sequence[Document]) -> None:
        # "", which `seen` drops, where the call's numbers need no word
        seen.note(call.note)
        T, S = call.n_queries, call.n_keys
        listed = range(T) if maps is True else maps or ()
        # of those that are listed the rows that the text has; -1 is the last one
        kept = [row % T for row in listed if -T <= row < T]
        if len(kept) * S > MOST_WEIGHTS and documents:
            raise HeadwiseError(
                f"maps= keeps up to {MOST_WEIGHTS:,} weights a head, and here {len(kept):,} tokens look at {S:,}, "
                f"{len(kept) * S:,} weights; watch a shorter text, list some rows (maps=[-1]), or leave maps out: the "
                f"statistics are exact at any length"
            )
        for b, document in enumerate(documents):
            for part, place, of_part in unpacked(call, b, document):
                w_o = factors_of(site, part) if needs_w_o else None
                measured = measure(part, place, of_part, w_o, wanted, reach=False)
                seen.add(site, measured)
        if kept and documents:
            weights = [row_weights(call, b, kept) for b in range(len(documents))]
            seen.add_maps(site, torch.stack(weights), documents[-1])

    marks = {name: list(x) for name, x in marks.items()}  # read for each document

    def mark(ids: Tensor) -> Mapping[str, Tensor]:
        # which keys are of the named sets of token ids
        sets = {name: ids.new_tensor(x) for name, x in marks.items()}
        return {name: torch.isin(ids, x) for name, x in sets.items()}

    with listening(model, note, mark, sites):
        if text is not None:  # else the caller runs the model, in whatever mode it is
            with torch.no_grad(), evaluating(model):
                run_body(model, row_of(model, text))
        yield seen


def _check(marks: Marks, only: Sequence[str]) -> None:
    table = all_statistics()
    known = [name for name in formulas(marks) if name != "reach"]
    known.append("score_peak")
    for name in only:
        if name not in known:
            raise unknown_statistic(name, known)
    for name in marks:
        # A set of keys is shown as a statistic of its name, and two statistics are of such a set.
        if name in table and name not in ("delimiter", "rare"):
            raise HeadwiseError(
                f"marks={name!r} is how a statistic is called; choose another name for the set of keys"
            )


def head_maps(model: nn.Module, ids: Ids, tokens: Sequence[str], name: str) -> HeadMaps:
    """Run a model that reads ids (T,) and keep the weights (T,T) of each head.

    `tokens` are the ids as text, one by one, and `name` is what a reader calls the model.
    Models of a single stack only: the maps are named by layer and head. Raises HeadwiseError for an empty text, one
    that exceeds the context of a model of ours, or one of over 400 tokens.
    """
    # a model without a context reads texts of any length
    longest = context_of(model) or LONGEST
    why = "the model's context"
    if longest >= LONGEST:
        longest = LONGEST
        why = "the most that whole maps are drawn for"
    require_text(ids, longest, why)
    maps = []
    with watch(model, list(ids), maps=True, only=["confidence"]) as seen:
        for head in seen.values():
            part, layer, number = parse_head(head.name)
            if part:
                raise HeadwiseError(
                    f"{name} has several stacks ({head.name}), and maps are drawn for one; use watch"
                )
            maps.append(HeadMap(layer, number, head.map))
    return HeadMaps(name, tuple(tokens), tuple(maps))


def require_text(ids: Ids, longest: int, why: str) -> None:
    """Raise HeadwiseError for a text without tokens, or with more than the longest."""
    if not ids:
        raise HeadwiseError("the text has no tokens; pass one with text=")
    if len(ids) > longest:
        raise HeadwiseError(
            f"the text has {len(ids)} tokens, and {why} is {longest}; pass a shorter one"
        )


def example_maps(folder: Folder, text: Text) -> HeadMaps | None:
    """The maps of a text's example, or of its only document; None where they are too many, or of several stacks."""
    ids = text.example
    if ids is None and len(text.documents) == 1:
        ids = text.documents[0]
    heads = [head for site in sites_of(folder.model) for head in site.heads]
    if ids is None or len(ids) > LONGEST or len(ids) ** 2 * len(heads) > CELLS:
        return None
    if any(parse_head(head)[0] for head in heads):
        return None
    return head_maps(folder.model, ids, text.shown(ids), folder.name)
