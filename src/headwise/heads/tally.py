"""What every head does on many documents, gathered document by document: a running mean for each head and statistic."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from headwise.heads.documents import Document, Marker, listening
from headwise.heads.gleaning import Gleaning, Running
from headwise.heads.measure import Measured, measure, top_keys, uniform
from headwise.heads.spool import lengths
from headwise.heads.statistics import all_statistics
from headwise.heads.watch import Factors
from headwise.intervals import Interval
from headwise.models.ask import embeddings, evaluating, run_body
from headwise.models.sites import Site
from headwise.records import Call

REACH = 32  # offsets that are counted for "positional"
CONTROLS = 32  # documents that the controls are measured on: they vary little
PASSAGE, TOP = 128, 8  # tokens of the first document whose top keys are kept, and how many keys
BATCH = 4096  # tokens of documents that run together

Values = dict[str, Running]  # statistic -> its values, one a document, of all heads of a site


class Tally:
    """Means of each document, head by head, and what is kept of the first document.

    uniform_on  the first documents, on which the even control is measured
    keep        keep what was measured of the first document, and its top keys
    first_row   rows before this one do not count
    probe       the tally of random tokens that are repeated
    tokens      those whose share of the attention is wanted; None notes neither that nor examples
    by_document  keep the value of each document, which takes memory
    """

    def __init__(
        self,
        model: nn.Module,
        uniform_on: int,
        keep: bool = False,
        first_row: int = 0,
        probe: Tally | None = None,
        tokens: Sequence[int] | None = None,
        by_document: bool = False,
    ) -> None:
        self.tokens = tokens
        self.model, self.uniform_on, self.keep, self.first_row, self.probe = model, uniform_on, keep, first_row, probe
        self.sites: dict[str, Site] = {}
        self.scores: dict[str, Values] = defaultdict(lambda: defaultdict(partial(Running, by_document)))  # (H,) each
        self.uniform: dict[str, Values] = defaultdict(lambda: defaultdict(Running))  # (1,) each
        self.offsets: dict[str, Running] = defaultdict(Running)  # (H, 2 REACH + 1), shares of rows
        self.gleanings: dict[str, Gleaning] = {}
        self.first: dict[str, tuple[Measured, Tensor, Tensor]] = {}  # site -> what was measured, top keys, weights
        self.factors = Factors()
        self.notes: dict[str, None] = {}  # what calls say of their numbers, each once
        self._copied: dict[str, list[float] | None] = {}  # site -> copying score of each head

    def collect(
        self, documents: Sequence[Sequence[int]], marker: Marker | None, progress: Callable[[int, int], None]
    ) -> None:
        """Run the documents through the model, and tally what each head does."""
        total = sum(lengths(documents))
        done = number = 0

        def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
            for b, document in enumerate(described):
                self._take(number + b, site, call, b, document)

        with torch.no_grad(), listening(self.model, listener, marker), evaluating(self.model):
            for ids in batches(documents):
                run_body(self.model, ids)
                number += len(ids)
                done += ids.numel()
                progress(done, total)

    def _take(self, number: int, site: Site, call: Call, b: int, document: Document) -> None:
        """Document `number`, which is document b of a call."""
        self.sites.setdefault(site.name, site)
        if call.note:
            self.notes.setdefault(call.note)
        T = call.q.shape[2]
        if self.first_row:
            document = replace(document, real_rows=torch.arange(T) >= self.first_row)
        measured = measure(call, b, document, w_o=self.factors.of(site, call))
        _add(self.scores[site.name], measured)
        if document.start is not None:
            self.offsets[site.name].add(_shares(measured, document.start, call.k.shape[2]).numpy())
            if self.tokens is not None:
                gleaning = self.gleanings.setdefault(site.name, Gleaning(site.n_heads, self.tokens))
                gleaning.add(number, measured, document)
        if number < self.uniform_on:
            _add(self.uniform[site.name], measure(uniform(call), b, document))
        if number == 0 and self.keep:
            self.first[site.name] = (measured, *top_keys(call, b, range(min(PASSAGE, T)), TOP))

    def of_head(self, site: Site, h: int) -> dict[str, Interval]:
        """Every score of a head with its interval over documents."""
        values = self.scores[site.name] | ({} if self.probe is None else _repeated(self.probe.scores[site.name]))
        scores = {key: value.interval(h) for key, value in values.items()}
        if site.name in self.offsets:
            shares = self.offsets[site.name].mean[h].copy()
            shares[REACH - 1 : REACH + 2] = 0  # the token itself and its neighbours have roles of their own
            scores["positional"] = self.offsets[site.name].interval(h, int(shares.argmax()))
        if site.name not in self._copied:
            self._copied[site.name] = copying(site, self.model)
        copied = self._copied[site.name]
        if copied is not None:
            scores["copying"] = Interval(copied[h], copied[h], copied[h], 1)
        return {key: scores[key] for key in all_statistics() if key in scores}

    def columns(self, site: Site, h: int) -> dict[str, list[float]]:
        """Of each statistic the value of a head in each document, where they were kept."""
        kept = {key: running.kept for key, running in self.scores[site.name].items()}
        return {key: [float(values[h]) for values in arrays] for key, arrays in kept.items() if arrays}

    def even(self, site: Site) -> dict[str, float]:
        """The control: the same statistics of attention that is spread evenly."""
        values = self.uniform[site.name]
        values = values | {key: values[item.even] for key, item in all_statistics().items() if item.even in values}
        values |= {} if self.probe is None else _repeated(self.probe.uniform[site.name])
        return {key: float(value.mean[0]) for key, value in values.items()}


def _add(values: Values, measured: Measured) -> None:
    for key, rows in measured.rows.items():
        values[key].add(rows.double().mean(1).cpu().numpy())


def _shares(measured: Measured, start: int, n_keys: int) -> Tensor:
    """For each offset the share of the rows that have a key there and look hardest at it, (H, 2 REACH + 1).

    An offset that less than half of the rows have says too little, and counts as none.
    """
    offsets = torch.arange(-REACH, REACH + 1)
    at = measured.places.cpu() + start
    behind = at - measured.argmax.cpu()
    target = at[:, None] - offsets
    able = ((target >= 0) & (target < n_keys)).sum(0)
    near = (behind + REACH + 1).clamp(0, 2 * REACH + 2)
    counts = torch.stack([torch.bincount(row, minlength=2 * REACH + 3)[1:-1] for row in near]).double()
    return torch.where(2 * able >= len(at), counts / able.clamp(min=1), 0)


def _repeated(values: Mapping[str, Running]) -> dict[str, Running]:
    """The statistics that are others, measured on random tokens that are repeated."""
    return {key: values[item.repeated] for key, item in all_statistics().items() if item.repeated in values}


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
