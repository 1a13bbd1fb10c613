"""What every head does on many documents, gathered document by document: one mean a head and statistic of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headwise.heads.documents import Document, listening
from headwise.heads.measure import Measured, measure, top_keys, uniform
from headwise.heads.statistics import all_statistics
from headwise.heads.texts import Text
from headwise.heads.watch import Factors
from headwise.intervals import Interval, interval_of
from headwise.models.ask import embeddings, evaluating, run_body
from headwise.models.sites import Site
from headwise.records import Call

REACH = 32  # offsets that are counted for "positional"
CONTROLS = 32  # documents that the controls are measured on: they vary little
PASSAGE, TOP = 128, 8  # tokens of the first document whose top keys are kept, and how many keys
BATCH = 4096  # tokens of documents that run together


class Tally:
    """Means of each document, head by head, and what is kept of the first document."""

    def __init__(self, text: Text | None, uniform_on: int = CONTROLS, keep: bool = True) -> None:
        self.text, self.uniform_on, self.keep = text, uniform_on, keep
        self.sites: list[Site] = []
        self.scores: dict[str, dict[str, list[float]]] = {}  # head -> statistic -> one value a document
        self.uniform: dict[str, dict[str, list[float]]] = {}  # site -> statistic -> one value a document
        self.offsets: dict[str, list[Tensor]] = {}  # site -> (H, 2 REACH + 1) a document, shares of rows
        self.first: dict[str, tuple[Measured, Tensor, Tensor]] = {}  # site -> what was measured, top keys, weights
        self.factors = Factors()
        self.weights: dict[str, list[float]] = {}  # site -> copying score of each head
        self.probe_from: int | None = None  # rows before this one do not count
        if text is not None:
            self.probe = Tally(None, uniform_on, keep=False)

    def take(self, number: int, site: Site, call: Call, b: int, document: Document) -> None:
        """Document `number`, which is document b of a call."""
        if all(site.name != known.name for known in self.sites):
            self.sites.append(site)
        if self.probe_from is not None:
            document = replace(document, real_rows=torch.arange(call.q.shape[2]) >= self.probe_from)
        measured = measure(call, b, document, w_o=self.factors.of(site))
        self._add(site, measured, document)
        if number < self.uniform_on:
            even = measure(uniform(call), b, document)
            rows = self.uniform.setdefault(site.name, {})
            for key, values in even.rows.items():
                rows.setdefault(key, []).append(float(values.double().mean()))
        if number == 0 and self.keep:
            n = min(PASSAGE, call.q.shape[2])
            self.first[site.name] = (measured, *top_keys(call, b, range(n), TOP))

    def _add(self, site: Site, measured: Measured, document: Document) -> None:
        means = {key: values.double().mean(1) for key, values in measured.rows.items()}
        for key, values in means.items():
            for h, value in enumerate(values.tolist()):
                self.scores.setdefault(site.head(h), {}).setdefault(key, []).append(value)
        if document.start is not None:
            behind = measured.places + document.start - measured.argmax
            counts = (behind.cpu()[..., None] == torch.arange(-REACH, REACH + 1)).double().mean(1)
            self.offsets.setdefault(site.name, []).append(counts)

    def read_weights(self, model: nn.Module) -> None:
        """The scores that need no text."""
        for site in self.sites:
            values = copying(site, model)
            if values is not None:
                self.weights[site.name] = values

    def of_head(self, site: Site, h: int) -> dict[str, Interval]:
        """Every score of a head with its interval over documents."""
        scores = {key: interval_of(values) for key, values in self.scores[site.head(h)].items()}
        if site.name in self.offsets:
            shares = torch.stack([counts[h] for counts in self.offsets[site.name]])
            shares[:, REACH - 1 : REACH + 2] = 0  # the token itself and its neighbours have roles of their own
            scores["positional"] = interval_of(shares[:, int(shares.mean(0).argmax())].tolist())
        probed = self.probe.scores.get(site.head(h), {})
        table = all_statistics()
        scores |= {key: interval_of(probed[item.repeated]) for key, item in table.items() if item.repeated in probed}
        if site.name in self.weights:
            value = self.weights[site.name][h]
            scores["copying"] = Interval(value, value, value, 1)
        return {key: scores[key] for key in table if key in scores}

    def even(self, site: Site) -> dict[str, float]:
        """The control: the same statistics of attention that is spread evenly."""
        means = {key: float(np.mean(values)) for key, values in self.uniform.get(site.name, {}).items()}
        table = all_statistics()
        means |= {key: means[item.even] for key, item in table.items() if item.even in means}
        probed = self.probe.uniform.get(site.name, {})
        means |= {key: float(np.mean(probed[item.repeated])) for key, item in table.items() if item.repeated in probed}
        return {key: means[key] for key in table if key in means}


def collect(
    model: nn.Module, documents: Sequence[Sequence[int]], tally: Tally, progress: Callable[[int, int], None]
) -> None:
    """Run the documents through the model, and tally what each head does."""
    total = sum(map(len, documents))
    done = number = 0
    marker = None if tally.text is None else tally.text.marks

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        for b, document in enumerate(described):
            tally.take(number + b, site, call, b, document)

    with torch.no_grad(), listening(model, listener, marker), evaluating(model):
        for ids in batches(documents):
            run_body(model, ids)
            number += len(ids)
            done += ids.numel()
            progress(done, total)


def batches(documents: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Neighbours of equal length as (B,T) ids, up to BATCH tokens together."""
    for length, group in itertools.groupby(documents, key=len):
        together = max(1, BATCH // length)
        while chunk := list(itertools.islice(group, together)):
            yield torch.tensor([list(document) for document in chunk])


@torch.no_grad()
def copying(site: Site, model: nn.Module) -> list[float] | None:
    """For each head the sum of the eigenvalues of W_U W_O W_V W_E over the sum of their moduli, -1 to 1.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section on copying: 1 raises the logit of
    every token that the head looks at. The V x V product has the non-zero eigenvalues of the E x E one computed here.
    Norms between the matrices are left out. None where the model has no such matrices of one width.
    """
    pair = embeddings(model)
    if pair is None or site.w_o is None or site.w_v is None or site.cross:
        return None
    embed, unembed = pair
    C = embed.shape[1]
    H = site.n_heads
    if unembed.shape != embed.shape or site.w_o.shape[0] != C or site.w_v.shape[1] != C or site.w_o.shape[1] % H:
        return None
    E = site.w_o.shape[1] // H
    G = site.w_v.shape[0] // E
    if site.w_v.shape[0] % E or H % G:
        return None
    w_v = site.w_v.double().reshape(G, E, C).repeat_interleave(H // G, 0)
    w_o = site.w_o.double().reshape(C, H, E).transpose(0, 1)
    through = w_v @ (embed.double().T @ unembed.double()) @ w_o  # (H,E,E)
    values = torch.linalg.eigvals(through)
    ratio = values.sum(-1).real / values.abs().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    scores: list[float] = ratio.tolist()
    return scores
