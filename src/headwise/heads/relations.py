"""Heads that follow a given relation, such as "object": how much of their weight goes from verbs to their objects?

A relation is a set of pairs that somebody has marked in documents: tokens that look, and those that they should look
at, the right keys. In a causal model those that look stand at the position that predicts. Of each pair and head three
numbers are measured: the mass, the weight on the right keys; the accuracy, how often the strongest key is right; and
the mass elsewhere, the weight at the same distances from other tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headwise.corpus.documents import Labelled, Relations
from headwise.errors import HeadwiseError
from headwise.heads.blocks import row_weights, uniform
from headwise.heads.documents import Document, Progress, run_documents
from headwise.heads.statistics import all_statistics
from headwise.heads.table import ROLES, Followed, Relation
from headwise.intervals import interval_of
from headwise.models.sites import Site
from headwise.records import Call

# Tokens of a document that tell what a head does at the same distances elsewhere: of T tokens every (T // 64)th, which
# is 64 to 127 of them, or all where there are fewer. A round choice: more take longer.
OTHERS = 64

Shown = Callable[[Sequence[int]], Sequence[str]]  # ids as text, one by one
Scores = dict[str, dict[str, Followed]]  # relation -> head -> how well it follows


@torch.no_grad()
def follow(
    model: nn.Module, relations: Relations, shown: Shown, progress: Progress
) -> Scores:
    """How well every head of self attention follows each relation; relation -> head -> `Followed`.

    `shown` gives ids as text, for the examples; `progress` is called with the tokens read, and all.

    Clark et al. 2019 (arXiv 1906.04341), section 4: of a token in several pieces, the weights to the pieces are added
    up, and those from them averaged. A head that looks at one fixed distance follows many relations by accident, so the
    weight at the same distances from other tokens of the document stands beside.
    """
    # those of one length run together
    documents = sorted(relations.documents, key=lambda document: len(document.ids))
    of_pairs = [PairCells(document) for document in documents]
    # Where the first document as given stands among the sorted ones: examples are taken from it.
    first = documents.index(relations.documents[0])
    # Site -> of each document (H+1, 3, pairs), as `PairCells.measure` gives them, in the order of `documents`.
    numbers_of = defaultdict(list)

    def take(number: int, site: Site, call: Call, b: int, document: Document) -> None:
        # A relation is of tokens of one text. Of a layer of ours the call alone tells whether it looked at another.
        if not (site.cross or call.cross):
            numbers_of[site].append(of_pairs[number].measure(call, b))

    texts = [document.ids for document in documents]
    run_documents(model, texts, take, None, progress)
    scores: Scores = {name: {} for name in relations.meanings}
    for name, by_head in scores.items():
        for site, numbers in numbers_of.items():
            of_heads = _followed(name, of_pairs, numbers, shown, first)
            by_head.update(zip(site.heads, of_heads, strict=True))
    return scores


def described(relations: Relations) -> tuple[Relation, ...]:
    """Each relation with its size.

    Raises HeadwiseError for a relation whose name is that of something else in a table of heads.
    """
    result = []
    # A relation becomes a column of the table, and a role: these names are taken there.
    reserved = {*all_statistics(), *(role.name for role in ROLES)}
    reserved |= {"name", "importance", "ablation"}
    for name, meaning in relations.meanings.items():
        if name in reserved:
            raise HeadwiseError(
                f"the relation {name!r} has the name of a statistic or a role; choose another"
            )
        known = [document.pairs.get(name) for document in relations.documents]
        sizes = [len(pairs) for pairs in known if pairs is not None]
        facts = name, meaning, relations.source, sum(sizes), len(sizes)
        result.append(Relation(*facts))
    return tuple(result)


class PairCells:
    """Which cells of a document's map count for which pair.

    `right` has the cells of the pairs, `elsewhere` those at the same distances from other tokens. Both are (4, cells):
    the number of the pair, the place among `rows`, the key, and what the weight there is multiplied with.
    """

    def __init__(self, document: Labelled) -> None:
        self.ids = document.ids
        T = len(document.ids)
        # relation, rows that look, right keys
        self.pairs = []
        # relation -> all rows that look in one of its pairs
        looking = {}
        for name, pairs in document.pairs.items():
            self.pairs += [(name, *pair) for pair in pairs]
            looking[name] = {row for queries, _ in pairs for row in queries}
        # evenly spread over the document
        others = set(range(0, T, max(1, T // OTHERS)))
        self.rows = sorted(others.union(*looking.values()))
        place = {row: n for n, row in enumerate(self.rows)}
        right = []
        elsewhere = []
        self.without = []  # pairs for which no other token has a key at these distances
        for n, (name, queries, keys) in enumerate(self.pairs):
            # A row that looks 3 back is moved to each of the others, with its keys, unless one falls off the document.
            # Rows that look in the same relation are no control of it.
            moved = []
            for query in queries:
                for row in sorted(others - looking[name]):
                    there = [row - query + key for key in keys]
                    if min(there) >= 0 and max(there) < T:
                        moved.append((row, there))
            if not moved:
                self.without.append(n)
            # The sums of several rows, as of a word in pieces, are averaged: each counts 1 / rows.
            for row in queries:
                right += [(n, place[row], key, 1 / len(queries)) for key in keys]
            for row, there in moved:
                elsewhere += [(n, place[row], key, 1 / len(moved)) for key in there]
        # float64 holds such whole numbers exactly
        self.right, self.elsewhere = (
            torch.tensor(cells, dtype=torch.float64).reshape(-1, 4).T
            for cells in (right, elsewhere)
        )

    def measure(self, call: Call, b: int) -> Tensor:
        """Mass, accuracy and mass elsewhere of each pair, of each head and last of even attention, (H+1, 3, pairs)."""
        by_head, even = (row_weights(x, b, self.rows) for x in (call, uniform(call)))
        weights = torch.cat([by_head.cpu().double(), even.cpu().double()])
        # (H+1,rows,S): 1 at the strongest key of each row, 0 elsewhere
        hits = torch.zeros_like(weights)
        hits.scatter_(-1, weights.argmax(-1, keepdim=True), 1)
        numbers = torch.zeros(len(weights), 3, len(self.pairs), dtype=torch.float64)
        kinds = (self.right, weights), (self.right, hits), (self.elsewhere, weights)
        for of_kind, (cells, values) in zip(numbers.unbind(1), kinds, strict=True):
            pair, row, key = cells[:3].long()
            of_kind.index_add_(1, pair, values[:, row, key] * cells[3])
        numbers[:, 2, self.without] = math.nan
        return numbers


def _followed(
    name: str,
    of_pairs: Sequence[PairCells],
    numbers: Sequence[Tensor],
    shown: Shown,
    first: int,
) -> list[Followed]:
    """For each head of a site how it follows the relation `name`, from the (H+1, 3, pairs) of each document.

    The example is the best pair of document `first`, which a reader has before them, unless the head does worse there
    than on average; then it is the best of all.
    """
    pairs = []  # of each pair its document and its number there
    of_documents = []  # of each document with the relation its means over pairs, (H+1, 3)
    for n, cells in enumerate(of_pairs):
        places = [i for i, (of, *_) in enumerate(cells.pairs) if of == name]
        pairs += [(n, i) for i in places]
        if places:
            # A pair without such a distance elsewhere has NaN, which does not count. A document of such pairs alone
            # has NaN too, and `interval_of` leaves it out.
            of_documents.append(numbers[n][..., places].nanmean(-1))
    # (H+1, pairs): 0 is the mass
    masses = torch.stack([numbers[n][:, 0, i] for n, i in pairs], -1)
    # (H+1, 3, documents); the last row is even attention's
    means = torch.stack(of_documents, -1)
    even = float(means[-1, 0].mean())
    opening = [place for place, (n, _) in enumerate(pairs) if n == first]
    result = []
    for of_head, masses_of_head in zip(means[:-1], masses[:-1], strict=True):
        mass, accuracy, elsewhere = (
            interval_of(values).of_fraction() for values in of_head.tolist()
        )
        weights = masses_of_head.tolist()
        best = max(opening, key=weights.__getitem__, default=0)
        if not opening or weights[best] < mass.mean:
            best = weights.index(max(weights))
        n, i = pairs[best]
        ids = of_pairs[n].ids
        _, queries, keys = of_pairs[n].pairs[i]
        looks, looked_at = (
            "".join(shown([ids[place] for place in places])).strip()
            for places in (queries, keys)
        )
        example = looks, looked_at, weights[best]
        # NaN: a survey puts the mass of the untrained model there, where it measures one.
        result.append(Followed(mass, accuracy, even, elsewhere.mean, math.nan, example))
    return result
