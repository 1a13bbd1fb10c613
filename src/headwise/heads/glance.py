"""Where heads look and how they score for their roles, on a few short texts and fast: for while a GPT trains.

A survey takes its time for each document. Here all texts go through the model at once, padded at their ends, which a
causal model does not see; and a score is a sum over the cells of their maps, each times what it counts for. On the same
texts the scores are those of a survey.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.heads.relation import Plan
from headwise.heads.survey import repeated_tokens
from headwise.heads.tally import REACH, copying, vocabulary_product
from headwise.heads.texts import Text
from headwise.models.ask import evaluating, run_body
from headwise.models.sites import Site, attach
from headwise.records import Call
from headwise.rungs.tensor import trace

Scores = dict[str, Tensor]  # name -> (N,), one for each head


class Glance:
    """Lines to look at, and documents to score, beside `probes` texts of random tokens that are repeated."""

    def __init__(self, lines: Sequence[Sequence[int]], text: Text, context: int, probes: int) -> None:
        labelled = [] if text.relations is None else text.relations.documents
        more = [document.ids for document in labelled if document.ids not in text.documents]
        documents = [*text.documents, *more]
        self.n_lines, self.longest = len(lines), max(map(len, lines))
        self.ids = _padded([*lines, *documents])
        T = self.ids.shape[1]
        self.line_rows = _rows(lines, self.longest, 1)
        self.rows = F.pad(_rows(text.documents, T), (0, 0, 0, len(more)))
        able = (self.rows > 0).sum(1, keepdim=True) - torch.arange(REACH + 2)  # rows that have a key at each offset
        share = (1 / able.clamp(min=1) / len(text.documents)).where(2 * able >= (self.rows > 0).sum(1, keepdim=True), 0)
        share[:, [0, 1, -1]] = 0  # the token itself and its neighbour have roles of their own; what is beyond reach
        self.offsets = share.where(able > 0, 0)
        marks = [text.marks(torch.tensor(ids)) for ids in documents]
        self.rare = _padded([mark["rare"].tolist() for mark in marks], T).float()
        cells = {
            "previous": torch.ones(T - 1).diag(-1),
            "self": torch.eye(T),
            "first": torch.eye(T)[:1],
            "delimiter": _padded([mark["delimiter"].tolist() for mark in marks], T).float()[:, None],
            "rare": self.rare[:, None],
        }
        self.tables = {name: (counts * self.rows[..., None]).flatten() for name, counts in cells.items()}
        related = [(documents.index(document.ids), Plan(document)) for document in labelled]
        self.elsewhere = _related(related, (len(documents), T, T), "elsewhere")
        self.tables |= _related(related, (len(documents), T, T), "right")
        repeated, known = repeated_tokens(text, context, seed=0)
        self.probes = _padded(repeated[:probes])
        same = (self.probes[:, :, None] == self.probes[:, None]).float().tril(-1)  # earlier copies of the token
        cells = {"duplicate": same, "prefix": same.roll(1, 2)} if repeated else {}
        rows = _rows(repeated[:probes], self.probes.shape[1], known)[..., None]
        self.probe_tables = {name: (counts * rows).flatten() for name, counts in cells.items()}

    @torch.no_grad()
    def look(self, model: nn.Module, sites: Sequence[Site]) -> tuple[Tensor, Scores, Scores]:
        """The maps of the lines, (N,lines,T,T) for N heads in the order of the sites, and each score of each head.

        Third, of each relation the weight of each head at the same distances from other tokens, as `follow` has it.
        """
        with evaluating(model):
            maps, probes = (_maps(model, sites, ids) for ids in (self.ids, self.probes))
        scores = self._scores(maps[:, self.n_lines :], probes)
        del scores["rare"]
        vocabulary = vocabulary_product(model)
        copied = [copying(site, vocabulary) for site in sites]
        if None not in copied:
            scores["copying"] = torch.tensor(copied).flatten()
        elsewhere = {name: maps[:, self.n_lines :].flatten(1) @ table for name, table in self.elsewhere.items()}
        return maps[:, : self.n_lines, : self.longest, : self.longest], scores, elsewhere

    def even(self) -> dict[str, float]:
        """The control: the scores of attention that is spread evenly."""
        shapes = ((1, *ids.shape, ids.shape[1]) for ids in (self.ids[self.n_lines :], self.probes))
        maps, probes = (F.normalize(torch.ones(shape).tril(), p=1, dim=-1) for shape in shapes)
        scores = self._scores(maps, probes)
        scores["rare_top"] = scores.pop("rare")
        scores["positional"] = (maps.amax(-1) * self.rows).sum()
        return {name: float(score) for name, score in scores.items()}

    def _scores(self, maps: Tensor, probes: Tensor) -> Scores:
        """What maps (N,B,T,T) of the documents and of the repeated tokens decide."""
        scores = {name: maps.flatten(1) @ table for name, table in self.tables.items()}
        scores |= {name: probes.flatten(1) @ table for name, table in self.probe_tables.items()}
        N, B, T, _ = maps.shape
        hardest = maps.argmax(-1)
        behind = (torch.arange(T) - hardest).clamp(max=REACH + 1)
        counts = torch.zeros(N, B, REACH + 2).scatter_add_(2, behind, (self.rows > 0).float().expand(N, B, T))
        scores["positional"] = (counts * self.offsets).sum(1).amax(1)
        scores["rare_top"] = (self.rare.expand(N, B, T).gather(2, hardest) * self.rows).sum((1, 2))
        return scores

    def alike(self, maps: Tensor) -> float | None:
        """The share of their attention that two heads give to the same keys: the mean over pairs of maps (H,lines,T,T).

        None for a single head. The first row, where every head looks at the only token there is, does not count.
        """
        first, second = torch.triu_indices(len(maps), len(maps), 1)
        shared = torch.minimum(maps[first], maps[second]).sum(-1)
        return float((shared * self.line_rows).sum() / len(first)) if len(first) else None


def _maps(model: nn.Module, sites: Sequence[Site], ids: Tensor) -> Tensor:
    """The weights (N,B,T,T) of all heads on ids (B,T)."""

    def keep(call: Call) -> None:
        kept.append(trace(call.q, call.k, call.v, call.options).weights)

    kept: list[Tensor] = []
    if not len(ids):
        return torch.zeros(sum(site.n_heads for site in sites), 0, 0, 0)
    with attach(dict.fromkeys(sites, keep), model):
        run_body(model, ids)
    return torch.cat(kept, 1).transpose(0, 1).contiguous()


def _related(plans: Sequence[tuple[int, Plan]], shape: tuple[int, int, int], kind: str) -> dict[str, Tensor]:
    """For each relation what each cell (B,T,T) counts for, flat: the mean over pairs, then over documents."""
    tables: dict[str, Tensor] = {}
    for n, plan in plans:
        sums = getattr(plan, kind)
        for name in dict.fromkeys(name for name, _, _ in plan.pairs):
            of_name = torch.tensor([pair[0] == name for pair in plan.pairs]) & ~sums.empty
            if of_name.any():
                cells, chosen = torch.zeros(shape[1:], dtype=torch.float64), of_name[sums.number]
                share = sums.share[chosen] / of_name.sum()
                cells.index_put_((sums.row[chosen], sums.key[chosen]), share, accumulate=True)
                tables.setdefault(name, torch.zeros(shape))[n] += cells.float()
    return {name: (table / table.any(2).any(1).sum()).flatten() for name, table in tables.items()}


def _padded(rows: Sequence[Sequence[int]], length: int | None = None) -> Tensor:
    """Rows of numbers as one tensor, zeros behind."""
    length = max(map(len, rows), default=0) if length is None else length
    padded = [[*row, *[0] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(len(rows), length)


def _rows(texts: Sequence[Sequence[int]], T: int, first: int = 0) -> Tensor:
    """What each row counts for, (B,T): each text alike, and in it alike each row from `first` on."""
    counts = _padded([[0] * first + [1] * (len(text) - first) for text in texts], T).float()
    return counts / counts.sum(1, keepdim=True) / max(1, len(texts))
