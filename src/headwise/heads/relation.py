"""Heads that follow a given relation, and heads that fetch: scores that need more than a text.

A relation is a set of pairs of positions, (query, key): a verb and its pronoun, a word and what it depends on, two
mentions of one thing. In a causal model the query is the position that predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.heads.documents import Document, listening
from headwise.heads.measure import row_weights
from headwise.intervals import Interval, interval_of
from headwise.models.ask import evaluating, logits, run_body
from headwise.models.sites import Site
from headwise.records import Call

MARGIN = 0.1  # of accuracy above the best fixed offset, Voita et al. 2019 (arXiv 1905.09418), section 5.2
RETRIEVAL = 0.1  # of the copied tokens, Wu et al. 2024 (arXiv 2404.15574), section 2

Pair = tuple[int, int]


@dataclass(frozen=True)
class Relation:
    """How well one head follows a relation."""

    mass: Interval  # weight on the right key, mean over pairs; the interval is over documents
    accuracy: float  # share of pairs whose key has the largest weight of the row
    offset: int  # the fixed distance, query - key, that is right most often
    offset_accuracy: float  # and how often it is
    earned: bool  # accuracy above that of the offset by 0.1 or more


@torch.no_grad()
def relation(
    model: nn.Module, documents: Sequence[Sequence[int]], pairs: Sequence[Sequence[Pair]]
) -> dict[str, Relation]:
    """Score every head of self attention on pairs (query, key) of positions, a list for each document of ids.

    Clark et al. 2019 (arXiv 1906.04341), section 4, and Voita et al. 2019, section 5.2: a head must beat the best
    fixed offset. Raises HeadwiseError when pairs and documents do not fit.
    """
    _check_pairs(documents, pairs)
    offsets = Counter(query - key for of_document in pairs for query, key in of_document)
    offset, hits = offsets.most_common(1)[0]
    total = offsets.total()
    masses: dict[str, list[float]] = {}
    right: Counter[str] = Counter()

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        if site.cross or call.cross:
            return
        rows = [query for query, _ in wanted]
        weights = row_weights(call, 0, rows)
        keys = torch.tensor([key for _, key in wanted])
        at_key = weights[:, torch.arange(len(rows)), keys]
        hit = weights.argmax(-1) == keys
        for h in range(weights.shape[0]):
            masses.setdefault(site.head(h), []).append(float(at_key[h].mean()))
            right[site.head(h)] += int(hit[h].sum())

    with listening(model, listener), evaluating(model):
        for ids, wanted in zip(documents, pairs, strict=True):
            if wanted:
                run_body(model, torch.tensor([list(ids)]))
    share = hits / total
    return {
        name: Relation(interval_of(values), right[name] / total, offset, share, right[name] / total >= share + MARGIN)
        for name, values in masses.items()
    }


def _check_pairs(documents: Sequence[Sequence[int]], pairs: Sequence[Sequence[Pair]]) -> None:
    if len(documents) != len(pairs):
        raise HeadwiseError(f"{len(pairs)} lists of pairs for {len(documents)} documents; pass one for each")
    if not any(pairs):
        raise HeadwiseError("there is no pair; a relation is a list of (query, key) positions for each document")
    for n, (ids, of_document) in enumerate(zip(documents, pairs, strict=True)):
        for query, key in of_document:
            if not (0 <= query < len(ids) and 0 <= key < len(ids)):
                raise HeadwiseError(f"document {n} has {len(ids)} tokens, and a pair names ({query}, {key})")


@torch.no_grad()
def retrieval(model: nn.Module, ids: Sequence[int], needle: tuple[int, int], steps: int) -> dict[str, float]:
    """Share of the needle's tokens that each head fetches while the model writes `steps` tokens greedily after `ids`.

    Wu et al. 2024 (arXiv 2404.15574), section 2: a step counts when the head's largest weight lies inside the needle,
    at a token equal to the one being written. A retrieval head scores 0.1 or more. `needle` is (first, last + 1).
    """
    first, last = needle
    if not 0 <= first < last <= len(ids):
        raise HeadwiseError(f"needle={needle} does not lie in a text of {len(ids)} tokens; pass (first, last + 1)")
    if steps < 1:
        raise HeadwiseError(f"steps={steps} must be at least 1")
    fetched: dict[str, set[int]] = {}
    tops: dict[str, int] = {}

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        if not (site.cross or call.cross):
            best = row_weights(call, 0, [call.q.shape[2] - 1])[:, 0].argmax(-1).tolist()
            tops.update({site.head(h): key for h, key in enumerate(best)})

    text = list(ids)
    with listening(model, listener), evaluating(model):
        for _ in range(steps):
            written = int(logits(model, torch.tensor([text]), last=True)[0, -1].argmax())
            for name, key in tops.items():
                places = fetched.setdefault(name, set())
                if first <= key < last and text[key] == written:
                    places.add(key)
            text.append(written)
    return {name: len(places) / (last - first) for name, places in fetched.items()}
