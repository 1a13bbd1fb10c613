"""What is kept of a corpus while it passes, in memory that does not grow with it: running means and their spread,
histograms of distance, the tokens that are looked at most, and the best examples of each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.heads.documents import Document
from headwise.heads.measure import Measured
from headwise.heads.profiles import DISTANCES, Example
from headwise.heads.texts import Text
from headwise.intervals import Interval, interval_from

EXAMPLES, ATTENDED = 5, 10  # of each head: examples, and tokens that it looks at most
TOKENS = 8192  # the most frequent tokens, for which is noted how much attention they receive

Floats = NDArray[np.float64]


class Running:
    """Mean and spread of arrays that come one after another, cell by cell, NaNs left out (Welford 1962)."""

    def __init__(self, keep: bool = False) -> None:
        self.n: NDArray[np.int64] = np.zeros((), np.int64)
        self.mean: Floats = np.zeros(())
        self.squares: Floats = np.zeros(())  # around the mean
        self.kept: list[Floats] | None = [] if keep else None  # the arrays themselves

    def add(self, values: Floats) -> None:
        known = ~np.isnan(values)
        self.n = self.n + known
        before = np.where(known, values - self.mean, 0.0)
        self.mean = self.mean + before / np.maximum(self.n, 1)
        self.squares = self.squares + before * np.where(known, values - self.mean, 0.0)
        if self.kept is not None:
            self.kept.append(values)

    def interval(self, *cell: int) -> Interval:
        return interval_from(int(self.n[cell]), float(self.mean[cell]), float(self.squares[cell]))


class Gleaning:
    """Of the H heads of a site: where they look hardest, which tokens they look at, and their best examples.

    An example is the row of a document with the largest weight on another token than the first and itself.
    """

    def __init__(self, n_heads: int, tokens: Sequence[int]) -> None:
        self.distances = np.zeros((n_heads, len(DISTANCES)), np.int64)  # rows by how far back their largest weight is
        self.attended = torch.zeros(n_heads, len(tokens), dtype=torch.float64)
        self.total = torch.zeros(n_heads, dtype=torch.float64)
        self.tokens = torch.tensor(sorted(tokens))
        self.weights = np.full((n_heads, EXAMPLES), -1.0)
        self.places = np.zeros((n_heads, EXAMPLES, 3), np.int64)  # document, row, key

    def add(self, number: int, measured: Measured, document: Document) -> None:
        """Document `number` of the corpus."""
        rows = (measured.places + (document.start or 0)).cpu()
        argmax = measured.argmax.cpu()
        if not len(rows):
            return
        behind = (rows - argmax).abs().clamp(max=DISTANCES[-1])
        bins = torch.where(behind > 0, behind.double().log2().floor().long() + 1, 0)
        for counts, of_head in zip(self.distances, bins, strict=True):
            counts += torch.bincount(of_head, minlength=len(DISTANCES)).numpy()
        if document.k_ids is not None:
            self._receive(measured.received.cpu().double(), document.k_ids.cpu())
        weights = measured.rows["confidence"].cpu().double().masked_fill((argmax == 0) | (argmax == rows), -1)
        best, at = (values.numpy() for values in weights.max(1))
        for h in np.flatnonzero(best > self.weights[:, -1]):
            place = int(np.searchsorted(-self.weights[h], -best[h], side="right"))
            row = int(rows[at[h]])
            self.weights[h] = np.insert(self.weights[h], place, best[h])[:EXAMPLES]
            example = (number, row, int(argmax[h, at[h]]))
            self.places[h] = np.insert(self.places[h], place, example, axis=0)[:EXAMPLES]

    def _receive(self, received: torch.Tensor, ids: torch.Tensor) -> None:
        place = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)
        known = self.tokens[place] == ids
        self.attended.index_add_(1, place[known], received[:, known])
        self.total += received.sum(1)

    def fields(self, h: int, text: Text) -> dict[str, Any]:
        """`HeadProfile.distances`, `attended` and `examples` of a head."""
        shares = self.attended[h] / self.total[h].clamp(min=torch.finfo(torch.float64).tiny)
        values, places = shares.topk(min(ATTENDED, len(shares)))
        examples = []
        for weight, (number, row, key) in zip(self.weights[h].tolist(), self.places[h].tolist(), strict=True):
            if weight >= 0:
                looks, at = text.shown([text.documents[number][place] for place in (row, key)])
                examples.append(Example(number, row, key, looks, at, weight))
        attended = zip(text.shown(self.tokens[places].tolist()), values.tolist(), strict=True)
        return {
            "distances": tuple(self.distances[h].tolist()),
            "attended": tuple(attended),
            "examples": tuple(examples),
        }
