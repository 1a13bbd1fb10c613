"""What every head does on many documents, gathered while they pass, in memory that does not grow with the corpus.

Running means and their spread, and the best examples.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.corpus.tokens import Ids
from headwise.gpt.train import one_thread
from headwise.heads.blocks import Factors, Measured, measure, top_keys, uniform
from headwise.heads.documents import Document, Marker, run_documents
from headwise.heads.statistics import all_statistics
from headwise.intervals import Interval, interval_from
from headwise.models.ask import embeddings
from headwise.models.sites import Site, loaded, sites_of
from headwise.records import Call, parse_head

# Round choices: a larger one takes more time, or more room in the page that shows it.
# "positional" counts the offsets -REACH to REACH between a query and the key that it looks hardest at
REACH = 32
CONTROLS = 32  # documents that the controls are measured on: they vary little
PASSAGE, TOP = 128, 8  # tokens of the first document whose top keys are kept, and how many keys
EXAMPLES = 5  # of each head

# Of `vocabulary_product`. A model as large as GPT-2 small stays below the first, and all its tokens count.
PRODUCTS, ROWS = 2**38, 4096  # multiplications at most; tokens that are widened at a time

Means = dict[str, NDArray[np.float64]]  # of a document: statistic -> its mean over the rows, (H,)


class Running:
    """Mean and spread of arrays that come one after another, cell by cell, NaNs left out (Welford 1962)."""

    def __init__(self) -> None:
        # Of each cell: how many values, their mean, the sum of their squared distances from it. Until the first `add`
        # it is one 0, which broadcasts to any shape.
        self.n = self.mean = self.squares = np.zeros(())

    def add(self, values: NDArray[np.float64]) -> None:
        is_number = ~np.isnan(values)
        self.n = self.n + is_number
        off_old_mean = np.where(is_number, values - self.mean, 0.0)
        self.mean = self.mean + off_old_mean / np.maximum(self.n, 1)
        off_new_mean = np.where(is_number, values - self.mean, 0.0)
        self.squares = self.squares + off_old_mean * off_new_mean

    def join(self, other: Running) -> None:
        """Add what another one has seen (Chan, Golub & LeVeque 1979, formula 2.1)."""
        total = self.n + other.n
        apart = other.mean - self.mean
        fraction = other.n / np.maximum(total, 1)  # what of all is the other's
        self.squares = self.squares + other.squares + apart**2 * self.n * fraction
        self.mean = self.mean + apart * fraction
        self.n = total

    def interval(self, *cell: int) -> Interval:
        # `cell` is its index on each axis.
        return interval_from(int(self.n[cell]), float(self.mean[cell]), float(self.squares[cell]))


class Tally:
    """What is summed up of the documents of a corpus, head by head, and what is kept of the first one.

    model        that reads them
    uniform_on   number of documents, the first ones, on which the even control is measured
    second_half  of random tokens that are repeated: the row from which on each has a copy before it
    with_examples  keep examples, and pictures of the first document
    vocabulary   `vocabulary_product` of the model
    """

    def __init__(
        self,
        model: nn.Module,
        uniform_on: int,
        second_half: int,
        with_examples: bool = False,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.model, self.uniform_on, self.second_half = model, uniform_on, second_half
        self.with_examples, self.vocabulary = with_examples, vocabulary
        self.sites: dict[str, Site] = {}
        # (kind, site) -> statistic -> its values so far. Kinds: "scores" (H,), "uniform" (1,) of even attention, and
        # "offsets" (H, 2 REACH + 1): its only statistic "all" is what `_offset_fractions` gives.
        self.running: dict[tuple[str, str], dict[str, Running]] = defaultdict(
            partial(defaultdict, Running)
        )
        # Head -> -weight, document, row and key of its best examples: so they sort.
        self.examples: dict[str, list[tuple[float, int, int, int]]] = defaultdict(list)
        # site -> pictures of the first document, (H,...)
        self.first: dict[str, dict[str, Tensor]] = {}
        # what calls say of their numbers, each once: a set that keeps its order
        self.notes: dict[str, None] = {}
        self.factors = Factors()
        self.evens: dict[object, Means] = {}  # what `_even` has measured

    def take(self, number: int, site: Site, call: Call, b: int, document: Document) -> None:
        """Tally document `number`, which is document b of a call."""
        self.sites.setdefault(site.name, site)
        if call.note:
            self.notes.setdefault(call.note)
        measured = measure(call, b, document, w_o=self.factors.of(site, call))
        self._add("scores", site, _means(measured))
        if document.start is not None:
            self._add(
                "offsets",
                site,
                {"all": _offset_fractions(measured, document.start, call.n_keys).numpy()},
            )
            if self.with_examples and len(measured.places):
                self._add_examples(number, site, measured, document.start)
        if number < self.uniform_on:
            self._add("uniform", site, self._even(number, site, call, b, document))
        if number == 0 and self.with_examples:
            keys, weights = top_keys(call, b, range(min(PASSAGE, call.n_queries)), TOP)
            # "received" is cut to as many keys as `keys` has queries.
            received = measured.received[:, : keys.shape[1]] / max(1, len(measured.places))
            pictures = {
                "thumbnail": measured.thumbnail,
                "first_key": measured.first_key,
                "received": received,
            }
            pictures["top_weights"] = weights
            self.first[site.name] = {
                name: picture.float().cpu() for name, picture in pictures.items()
            }
            self.first[site.name]["top_keys"] = keys.cpu()

    def take_repeated(
        self, number: int, site: Site, call: Call, b: int, document: Document
    ) -> None:
        """Tally a text of random tokens that are repeated, where only the repetition can be used.

        What is measured here goes by another name, since texts have it, too: "after_same" is "induction" of a survey.
        """
        document = replace(document, real_rows=torch.arange(call.n_queries) >= self.second_half)
        kinds = {"scores": _means(measure(call, b, document, top=False))}
        if number < self.uniform_on:
            kinds["uniform"] = self._even(f"repeated {number}", site, call, b, document)
        names = {item.repeated: key for key, item in all_statistics().items() if item.repeated}
        for kind, means in kinds.items():
            self._add(
                kind, site, {names[name]: values for name, values in means.items() if name in names}
            )

    def _add_examples(self, number: int, site: Site, measured: Measured, start: int) -> None:
        """Of each head the row with the largest weight on another token than the first and itself."""
        rows, argmax = (measured.places + start).cpu(), measured.argmax.cpu()
        is_trivial = (argmax == 0) | (argmax == rows)  # there most heads rest
        weights, at = measured.rows["confidence"].cpu().double().masked_fill(is_trivial, -1).max(1)
        keys = argmax.gather(1, at[:, None])[:, 0]
        for head, weight, row, key in zip(
            site.heads, weights.tolist(), rows[at].tolist(), keys.tolist(), strict=True
        ):
            if weight >= 0:
                self.examples[head] = sorted([*self.examples[head], (-weight, number, row, key)])[
                    :EXAMPLES
                ]

    def _even(self, text: int | str, site: Site, call: Call, b: int, document: Document) -> Means:
        """The statistics of even attention on a document, (1,) each.

        They hang on the mask and the document alone. So they are measured once for all layers whose masks are the same
        band, which is the least and the largest distance from query to key, None without such a bound.
        """
        T, S = call.n_queries, call.n_keys
        # A mask that is no band answers None.
        band = (None, None) if call.options.mask is None else call.options.mask.band(T, S)
        key: object = text, parse_head(site.head(0))[0], T, S, band, document.start
        # what another layer may attend is not known to be the same
        if band is None or call.weights is not None:
            key = object()  # equal to no other key
        if key not in self.evens:
            self.evens[key] = _means(measure(uniform(call), b, document))
        return self.evens[key]

    def _add(self, kind: str, site: Site, means: Means) -> None:
        for key, values in means.items():
            self.running[kind, site.name][key].add(values)

    def joined(self, parts: Sequence[Any]) -> Tally:
        """A tally of what several have seen, of each `running`, `examples`, `first` and `notes`."""
        merged = Tally(
            self.model, self.uniform_on, self.second_half, self.with_examples, self.vocabulary
        )
        for running, examples, first, notes in parts:
            for place, by_name in running.items():
                for key, values in by_name.items():
                    merged.running[place][key].join(values)
            for head, more in examples.items():
                merged.examples[head] = sorted([*merged.examples[head], *more])[:EXAMPLES]
            merged.first |= first
            merged.notes |= notes
        names = {site for _, site in merged.running}
        merged.sites = {site.name: site for site in sites_of(self.model) if site.name in names}
        return merged

    def scores(self, site: Site) -> list[dict[str, Interval]]:
        """Of each head every score with its interval over documents."""
        of_heads = []
        copied = copying(site, self.vocabulary)
        for h in range(site.n_heads):
            scores = {
                key: running.interval(h)
                for key, running in self.running["scores", site.name].items()
            }
            # none in cross attention, else those of "all"
            for offsets in self.running["offsets", site.name].values():
                fractions = offsets.mean[h].copy()
                # offsets -1, 0 and 1 have statistics of their own
                fractions[REACH - 1 : REACH + 2] = 0
                scores["positional"] = offsets.interval(h, int(fractions.argmax()))
            if copied is not None:  # it comes of the weights alone: one number, without an interval
                scores["copying"] = Interval(copied[h], copied[h], copied[h], 1)
            of_heads.append({key: scores[key] for key in all_statistics() if key in scores})
        return of_heads

    def even(self, site: Site) -> dict[str, float]:
        """The control: the same statistics of attention that is spread evenly."""
        values = {
            key: float(running.mean[0])
            for key, running in self.running["uniform", site.name].items()
        }
        return values | {
            key: values[item.even] for key, item in all_statistics().items() if item.even in values
        }


def _means(measured: Measured) -> Means:
    return {key: rows.cpu().double().mean(1).numpy() for key, rows in measured.rows.items()}


def _offset_fractions(measured: Measured, start: int, n_keys: int) -> Tensor:
    """For each offset the fraction, of the rows that have a key there, that look hardest at it: (H, 2 REACH + 1).

    An offset that less than half of the rows have says too little, and counts as none. Column REACH + 3 is offset 3:
    the key three tokens before the query.
    """
    at = measured.places.cpu() + start  # (n,) the key at which each query stands
    key = at[:, None] - torch.arange(-REACH, REACH + 1)  # (n,offsets) the one at each offset
    able = ((key >= 0) & (key < n_keys)).sum(0)  # rows that have it
    # (H,n) the offset at which each row looks, from 1 on; the first and the last bin have what lies beyond reach.
    bins = (at - measured.argmax.cpu() + REACH + 1).clamp(0, 2 * REACH + 2)
    counts = torch.zeros(len(bins), 2 * REACH + 3, dtype=torch.float64)
    counts.scatter_add_(1, bins, counts.new_ones(bins.shape))
    within = counts[:, 1:-1]
    return torch.where(2 * able >= len(at), within / able.clamp(min=1), 0)


@torch.no_grad()
def vocabulary_product(model: nn.Module) -> Tensor | None:
    """W_E' W_U (C,C), the sum over tokens of embedding times unembedding, in float32 or wider; `copying` needs it.

    Of at most PRODUCTS / C^2 tokens, spread evenly over the vocabulary. None where the model has no two such matrices
    of one shape (V,C).
    """
    pair = embeddings(model)
    if pair is None or pair[0].shape != pair[1].shape:
        return None
    V, C = pair[0].shape
    step = math.ceil(V * C * C / PRODUCTS)  # every step-th token
    embed, unembed = (weights[::step] for weights in pair)
    wide = torch.promote_types(embed.dtype, torch.float32)
    total = torch.zeros(C, C, dtype=wide, device=embed.device)
    # no wide copy of the whole
    for rows in zip(torch.split(embed, ROWS), torch.split(unembed, ROWS), strict=True):
        first, second = (part.to(wide) for part in rows)
        total.addmm_(first.T, second)
    return total


@torch.no_grad()
def copying(site: Site, vocabulary: Tensor | None) -> list[float] | None:
    """For each head the sum of the eigenvalues of W_U W_O W_V W_E over the sum of their moduli, -1 to 1.

    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section on copying: 1 raises the logit of
    every token that the head looks at. The product is V x V. With its first factors moved to the end, W_V W_E W_U W_O,
    it is E x E and has the same non-zero eigenvalues; W_E W_U is `vocabulary`, of `vocabulary_product`. Norms between
    the matrices are left out. None where the widths do not fit.
    """
    with loaded(*filter(None, [site.module, site.projection])):
        H, w_o, w_v = site.n_heads, site.w_o, site.w_v
    if (
        vocabulary is None
        or w_o is None
        or w_v is None
        or site.cross
        or site.name.startswith("encoder.")
    ):
        return None  # an encoder beside a decoder writes no logits
    C = len(vocabulary)
    if w_o.shape[0] != C or w_v.shape[1] != C or w_o.shape[1] % H:  # (C,H*E) and (G*E,C)
        return None
    E = w_o.shape[1] // H
    G = w_v.shape[0] // E
    if w_v.shape[0] % E or H % G:
        return None
    # (H,E,C)
    read = (w_v.to(vocabulary) @ vocabulary).reshape(G, E, C).repeat_interleave(H // G, 0)
    through = read @ w_o.to(vocabulary).reshape(C, H, E).transpose(0, 1)  # (H,E,E)
    # in matrices as small as these threads wait for each other: two take ten times as long
    with one_thread():
        values = torch.linalg.eigvals(through)
    # a silent head, whose eigenvalues are all 0, gets 0 / tiny
    tiny = torch.finfo(values.real.dtype).tiny
    ratios: list[float] = (values.sum(-1).real / values.abs().sum(-1).clamp(min=tiny)).tolist()
    return ratios


def join_ranks() -> None:
    """Join the processes that torchrun has started; each takes the GPU of its number on this host, if there is one."""
    import torch.distributed as dist  # here: it is a third of the time that torch takes to import

    dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def read(
    tally: Tally,
    documents: Sequence[Ids],
    marks: Marker | None,
    progress: Callable[[int, int], None],
    distributed: bool = False,
) -> Tally:
    """Tally the documents, a part of them in each rank of torch.distributed; all ranks get the tally of all."""
    if not distributed:
        run_documents(tally.model, documents, tally.take, marks, progress)
        return tally
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    begin, end = (len(documents) * part // world for part in (rank, rank + 1))
    run_documents(tally.model, documents[begin:end], tally.take, marks, progress, begin)
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, (tally.running, tally.examples, tally.first, tally.notes))
    return tally.joined(parts)
