"""What was seen of the heads while a model ran: means, and numbers row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import MissingError
from headwise.heads.blocks import THUMBNAIL
from headwise.heads.documents import Document
from headwise.heads.frame import frame, seen_rows
from headwise.heads.measure import Measured
from headwise.heads.notebook import head_card, heads_table, token_map
from headwise.heads.statistics import Statistics, unknown_head, unknown_statistic
from headwise.intervals import Interval, interval_of
from headwise.models.sites import Site

if TYPE_CHECKING:
    from pandas import DataFrame

Array = NDArray[np.float32]
Shown = Callable[[Sequence[int]], Sequence[str]]  # ids as a reader should see them, one by one


class _Growing:
    """Numbers (H,N) that grow with N. Room is doubled where it ends, so that each is copied twice at most on average.

    One large array does not break up the heap, as many small ones do; pages of it that are not written take no memory.
    """

    def __init__(self, heads: int) -> None:
        self._room = np.empty((heads, 0), np.float32)
        self.n = 0

    def add(self, values: Array) -> None:
        end = self.n + values.shape[1]
        if end > self._room.shape[1]:
            before = self.values
            self._room = np.empty((len(values), max(2 * self.n, end)), np.float32)
            self._room[:, : self.n] = before
        self._room[:, self.n : end] = values
        self.n = end

    @property
    def values(self) -> Array:
        return self._room[:, : self.n]


class _SeenSite:
    """What the heads of one attention did: their rows so far, and the pictures of the last document."""

    def __init__(self) -> None:
        self.growing: dict[str, _Growing] = {}  # the statistics that every document has
        self._means: dict[str, NDArray[np.float64]] = {}  # statistic -> (H,)
        self.documents: list[int] = []  # rows of each
        self.maps: Array | None = None  # (H,T,S) of the last document, or some rows of it
        self.out_sum: NDArray[np.float64] = np.zeros(())  # (H,E)

    def add(self, measured: Measured, document: Document) -> None:
        if not self.documents:
            self.growing = {name: _Growing(len(values)) for name, values in measured.rows.items()}
        self.growing = {name: rows for name, rows in self.growing.items() if name in measured.rows}
        for name, rows in self.growing.items():
            rows.add(as_numpy(measured.rows[name]))
        self._means = {}
        self.documents.append(len(measured.places))
        self.out_sum = self.out_sum + as_numpy(measured.mean_out).astype(np.float64) * len(measured.places)
        self.received: list[Array] = list(as_numpy(measured.received))  # (S,) of each head
        self.thumbnail: list[Array] = list(as_numpy(measured.thumbnail))  # (b,b) of each head
        self.image = (document.marks or {}).get("image")  # (S,) bool, which keys are of an image
        ids = _real(document.q_ids, document.real_rows), _real(document.k_ids, document.real_keys)
        self.ids = ids if all(map(len, ids)) else None  # of the queries and the keys, where the text is short

    @property
    def n_rows(self) -> int:
        return sum(self.documents)

    def rows(self, name: str) -> Array:
        """One statistic of all heads, (H,N)."""
        if name not in self.growing:
            raise unknown_statistic(name, self.growing)
        return self.growing[name].values

    def means(self, name: str) -> NDArray[np.float64]:
        """The mean over the rows of each head, (H,)."""
        if name not in self._means:
            rows = self.rows(name)
            self._means[name] = rows.mean(1, dtype=np.float64) if self.n_rows else np.full(len(rows), np.nan)
        return self._means[name]


class Rows(Statistics[Array]):
    """The numbers of one head row by row, `rows.entropy` or `rows["entropy"]`, (n,) float32 each."""

    def __init__(self, site: _SeenSite, head: int) -> None:
        self._site, self._head = site, head

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._site.rows(name)[self._head])

    def __iter__(self) -> Iterator[str]:
        return iter(self._site.growing)

    def __len__(self) -> int:
        return len(self._site.growing)


class SeenHead(Statistics[float]):
    """What one head did: `head.entropy` and so on are means over the rows, `head.rows` has them one by one."""

    def __init__(self, name: str, site: _SeenSite, head: int, shown: Shown | None) -> None:
        self.name = name
        self.rows = Rows(site, head)
        self._site, self._head, self._shown = site, head, shown

    def __getitem__(self, name: str) -> float:
        """The mean of a statistic, of a set of keys named in `marks`, or of a distance such as `offset_2`."""
        return float(self._site.means(name)[self._head])

    @property
    def means(self) -> dict[str, float]:
        return {name: self[name] for name in self.rows}

    def interval(self, name: str) -> Interval:
        """The mean of a statistic, and between which bounds that of all rows lies where some were drawn."""
        return interval_of(self.rows[name].tolist())

    @property
    def n_rows(self) -> int:
        return self._site.n_rows

    @property
    def documents(self) -> Sequence[int]:
        """Rows of each document, in the order in which they ran."""
        return self._site.documents

    @property
    def received(self) -> Array:
        """What each key received from all queries together, (S,); of the last call's last document."""
        return self._site.received[self._head]

    @property
    def thumbnail(self) -> Array:
        """Exact means of the weights over blocks of queries x keys; of the last call's last document."""
        return self._site.thumbnail[self._head]

    @property
    def map(self) -> Array:
        """The weights (T,S) of the last call's last document, or of some of its rows, as `watch(maps=...)` asks."""
        if self._site.maps is None:
            raise MissingError(f"the map of {self.name} was not kept; ask for it with watch(model, maps=True)")
        return np.asarray(self._site.maps[self._head])

    @property
    def image_map(self) -> Array:
        """The columns of `map` that are of an image; in a tower that reads nothing else, all of them."""
        return self.map if self._site.image is None else self.map[:, self._site.image.cpu().numpy()]

    @property
    def mean_out(self) -> Array:
        """Mean of the head's output over all rows, (E,)."""
        return np.asarray(self._site.out_sum[self._head] / max(1, self._site.n_rows), np.float32)

    @property
    def tokens(self) -> tuple[Sequence[str], Sequence[str]] | None:
        """The tokens that look and those that are looked at in `thumbnail`, where each has a line of its own there."""
        if self._site.ids is None:
            return None
        rows, keys = self._site.ids
        return self._words(rows), self._words(keys)

    def _words(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Tokens as a reader should see them; a place that an image or a sound fills is a dot."""
        words = iter(self._shown([i for i in ids if i >= 0]) if self._shown else [str(i) for i in ids if i >= 0])
        return tuple(next(words) if i >= 0 else "\u00b7" for i in ids)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={self[name]:.4g}" for name in ("entropy", "confidence", "first"))
        return f"{self.name}({numbers}, rows={self._site.n_rows})"

    def _repr_html_(self) -> str:
        return head_card(self, drawn="" if self.tokens is None else token_map(self.thumbnail, *self.tokens))


class Seen(Mapping[str, SeenHead]):
    """Every head that ran, by name: `seen["L3.H5"]`.

    It holds the rows, four bytes for each row, head and statistic, with room for as many again, and little else.
    """

    def __init__(self, heads: Sequence[str], shown: Shown | None = None, notes: Sequence[str] = ()) -> None:
        self._known, self._shown = list(heads), shown
        self.notes: list[str] = list(notes)  # what has no map, and what a number does not say, in lines
        self._sites: dict[str, _SeenSite] = {}
        self._places: dict[str, tuple[_SeenSite, int]] = {}  # of the heads that ran
        self.top: dict[str, dict[int, list[tuple[int, float]]]] = {}  # head -> row -> (key, weight), largest first

    def add(self, site: Site, measured: Measured, document: Document) -> None:
        """The numbers of one document of a call."""
        if site.name not in self._sites:
            seen = self._sites[site.name] = _SeenSite()
            self._places |= {name: (seen, h) for h, name in enumerate(site.heads)}
        self._sites[site.name].add(measured, document)

    def note(self, line: str) -> None:
        """Add a line to `notes`, once."""
        if line and line not in self.notes:
            self.notes.append(line)

    def add_maps(self, site: Site, weights: Tensor) -> None:
        """The whole maps (H,T,S) of one document."""
        self._sites[site.name].maps = as_numpy(weights)

    def add_top(self, site: Site, rows: Sequence[int], keys: Tensor, weights: Tensor) -> None:
        """The keys (H,n,k) with the largest weights of n rows."""
        for name, head_keys, head_weights in zip(site.heads, keys.tolist(), weights.tolist(), strict=True):
            pairs = (list(zip(*row, strict=True)) for row in zip(head_keys, head_weights, strict=True))
            self.top[name] = dict(zip(rows, pairs, strict=True))

    def __getitem__(self, name: str) -> SeenHead:
        if name in self._places:
            return SeenHead(name, *self._places[name], self._shown)
        if name in self._known:
            raise MissingError(f"{name} did not run inside the block; run the model, or the part of it that has {name}")
        raise unknown_head(name, self._known)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._known if name in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def to_frame(self, by: str = "head") -> DataFrame:
        """A pandas DataFrame with a row a head, or with by="document" a row a head and document: means of its rows."""
        return frame(seen_rows(self, by))

    def __repr__(self) -> str:
        rows = max((site.n_rows for site in self._sites.values()), default=0)
        return f"Seen({len(self)} of {len(self._known)} heads, {rows} rows each)"

    def _repr_html_(self) -> str:
        heads = list(self.values())
        return heads_table(heads, dict.fromkeys(name for head in heads for name in head.rows), {})


def _real(ids: Tensor | None, real: Tensor | None) -> list[int]:
    """The ids that are no padding, where each has a line of its own in a thumbnail; else none."""
    if ids is None:
        return []
    kept = ids.cpu() if real is None else ids.cpu()[real.cpu()]
    return [] if len(kept) > THUMBNAIL else kept.tolist()


def as_numpy(values: Tensor) -> Array:
    return values.detach().float().cpu().numpy()
