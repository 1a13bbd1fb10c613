"""A film of the heads: where they look and what they are good for, at some of the steps while a GPT trains.

It is `film.jsonl` in the run folder, a JSON object a line. The first line is a header that tells what is filmed. Each
further line is a frame, which tells how the heads are at one step. Their fields:

    in the header                                             in a frame
    heads   names, in the order of all lists of heads         step    updates of the weights so far
    lines   the filmed texts, token by token                  maps    weights of the lines as bytes; see `packed`
    roles   name, score and threshold of each role            scores  name -> one for each head
    even    name -> score of attention spread evenly          roles   for each head those that it has at this step
    steps   of the whole run                                  alike   for each layer how alike its heads look
    documents  number of held-out texts that are scored

A score is a mean over the held-out texts; a survey of the same texts gives the same number. A head has a role in a
frame when its score reaches the threshold, is above that of even attention, and above what any head had in the first
frame, before training; of a relation, also above the head's own weight at the same distances from other tokens.
Alike is the fraction of their attention that two heads of a layer give to the same tokens, sum_j min(p_j, p'_j). It is
a mean over pairs of heads and over rows, those left out that see one token only; null where there is one head.

`train`, at the end, trains a small GPT from Python and films it.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, zip_longest
from math import inf, isqrt, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.corpus.documents import Relations, Text, verb_relations
from headwise.corpus.tokens import Ids
from headwise.corpus.training import Corpus
from headwise.errors import HeadwiseError
from headwise.files import StepLog, read_bytes, text_path
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.run import FILM, Settings, kept_text, load_run, run_training
from headwise.gpt.train import METRICS, require_finite
from headwise.heads.blocks import Dense
from headwise.heads.relation import PairCells, described
from headwise.heads.statistics import all_statistics, formula_of
from headwise.heads.survey import repeated_tokens
from headwise.heads.table import ROLES, Row, relation_role
from headwise.heads.tally import REACH, copying, vocabulary_product
from headwise.models.ask import evaluating, run_body
from headwise.models.hook import attach
from headwise.models.open import remember
from headwise.models.sites import Site, sites_of
from headwise.records import Call, from_json, head_name
from headwise.rungs.tensor import trace

# Round choices. Larger counts show more, and make the file larger and the training slower.
FRAMES = 60  # of a film at most
# The fewest steps between two frames, once the first ones (0, 1, 2, 4, 8, ...) are over; and the same of tiny models.
GAP, TINY_GAP = 32, 100
# A model is tiny if its width times the texts of a batch is below this: there a frame takes longer than a step.
TINY = 1000
SIZE = 900_000  # bytes of the file, about
LINES, LONGEST = 3, 32  # texts that are filmed at most, and the most tokens of one
TOKENS = 192  # of all documents together that are scored, about
PROBES = 2  # texts of random tokens that are repeated; they tell which heads find a copy, and what came after it
CONJUGATIONS = 15  # every 15th conjugation of the verb corpus is scored: their relations are known
DIGITS = 4  # behind the decimal point


Scores = dict[str, Tensor]  # name of the statistic or relation -> (N,), one for each head
Words = tuple[str, ...]  # a list of strings
# The fields of a line of the file, and the type of each as `from_json` checks it; there a tuple is a JSON list.
HEADER: Row = {
    "heads": Words,
    "lines": tuple[Words, ...],
    "roles": tuple[tuple[str, str, float], ...],  # name, score, threshold
    "even": dict[str, float],
    "steps": int,
    "documents": int,
}
FRAME: Row = {
    "step": int,
    "alike": tuple[float | None, ...],
    "roles": tuple[Words, ...],
    "maps": str,
    "scores": dict[str, tuple[float, ...]],
}
LOSS: Row = {"step": int, "loss": float}  # what is read of a row of the training's own log


# Statistics that are a mean over the rows, by their own formula.
READ = ("previous", "self", "first", "delimiter", "rare_top")


class Glance:
    """The texts that a frame is made of: lines whose maps are kept, documents that are scored, and the probes.

    The lines and the documents go through the model as one batch, the probes (random tokens, repeated) as another.
    Texts are padded at their ends: a causal model does not see what comes later. Scores are read off whole maps.
    """

    def __init__(self, lines: Sequence[Ids], text: Text, context: int) -> None:
        labelled = [] if text.relations is None else text.relations.documents
        more = [document.ids for document in labelled if document.ids not in text.documents]
        texts = [*lines, *text.documents, *more]  # the batch, in this order
        self.n_lines, self.longest = len(lines), max(map(len, lines))
        self.ids = _padded(texts)
        T = self.ids.shape[1]
        # What each row counts for in a mean. The first row of a line has one token to look at, so it tells nothing.
        # There is a second: a text without a document of two tokens is refused.
        self.line_rows = _rows(lines, self.longest, 1)
        # (B,T) For scores only the documents count. The lines before them and `more` behind get zeros.
        self.rows = F.pad(_rows(text.documents, T), (0, 0, len(lines), len(more)))
        # Name of a set of keys, "delimiter" or "rare" -> of each text a 1 for each key that is in it, else a 0.
        marks: dict[str, list[list[int]]] = defaultdict(list)
        for ids in texts:
            for name, mark in text.marks(torch.tensor(ids)).items():
                marks[name].append(mark.tolist())
        self.marks = {name: _padded(marked).float() for name, marked in marks.items()}
        # For "positional": of the rows that have a key at a fixed offset, how many look hardest there? Offsets go
        # from 0, the token itself, to REACH; one more column takes all that is farther. Row t has offsets 0 to t.
        n_rows = (self.rows > 0).sum(1, keepdim=True)  # (B,1)
        able = n_rows - torch.arange(REACH + 2)  # (B,offsets) rows that have a key there
        enough = (able > 0) & (2 * able >= n_rows)  # half of the rows, as in a survey: fewer say too little
        # The token itself and its neighbour have roles of their own; the last column counts what is beyond reach.
        enough[:, [0, 1, -1]] = False
        # The score of an offset is the fraction of these rows in each document, a mean over documents: so much does one
        # row that looks hardest there add to it.
        self.offsets = (1 / able.clamp(min=1) / len(text.documents)).where(enough, 0)
        # Of each document with relations its number in the batch, behind the lines, and the cells of its pairs.
        self.pair_cells = [(texts.index(document.ids, len(lines)), PairCells(document)) for document in labelled]
        repeated, first_known = repeated_tokens(text, context, seed=0)  # a run that goes on has the same
        probes = repeated[:PROBES]
        self.probes = _padded(probes)
        # The tokens come a second time from row `first_known` on: earlier rows have no copy to look at.
        self.probe_rows = _rows(probes, self.probes.shape[1], first_known)

    @torch.no_grad()
    def look(self, model: nn.Module, sites: Sequence[Site]) -> tuple[Tensor, Scores, Scores]:
        """What a frame needs of the model as it is now, in three parts.

        First the maps of the lines, (N,lines,T,T) for N heads in the order of the sites. Second each score of each
        head. Third the control of relations: each head's weight at the same distances from other tokens.
        """
        with evaluating(model):
            maps = _maps(model, sites, self.ids)
            scores = self._scores(maps, _maps(model, sites, self.probes))
        vocabulary = vocabulary_product(model)  # both embeddings multiplied; None where there are no two of one width
        copied = [copying(site, vocabulary) for site in sites]
        if None not in copied:  # None: the matrices of a layer do not fit each other
            scores["copying"] = torch.tensor(copied).flatten()  # from (layers,H) to (N,)
        lines = maps[:, : self.n_lines, : self.longest, : self.longest]
        return lines, scores, self._related(maps, elsewhere=True)

    def even(self) -> dict[str, float]:
        """The control: the scores of attention that is spread evenly."""
        maps = _even_maps(self.ids)
        scores = self._scores(maps, _even_maps(self.probes))
        # These two ask for the strongest key, and even attention has none. `even` names the statistic that tells how
        # often a key chosen at random would be it: the weight on rare keys, and the largest weight of a row.
        for name in ("rare_top", "positional"):
            scores[name] = self._mean(all_statistics()[name].even, Dense(maps, marks=self.marks))
        return {name: float(score) for name, score in scores.items()}

    def _scores(self, maps: Tensor, probes: Tensor) -> Scores:
        """All scores that are read off maps (N,B,T,T): of the texts, and of the probes with their own B and T."""
        dense = Dense(maps, marks=self.marks)
        scores = {name: self._mean(name, dense) for name in READ} | self._related(maps)
        if len(self.probes):  # none where the context, or the vocabulary, is too small for them
            of_probes = Dense(probes, ids=self.probes)
            # Each is another statistic, which `repeated` names, taken on repeated tokens.
            for name in ("duplicate", "induction"):
                scores[name] = (formula_of(all_statistics()[name].repeated)(of_probes) * self.probe_rows).sum((1, 2))
        N, B, T, _ = maps.shape
        # (N,B,T) How far behind each row its strongest key lies; beyond REACH all distances are one.
        behind = (torch.arange(T) - maps.argmax(-1)).clamp(max=REACH + 1)
        is_row = (self.rows > 0).float().expand(N, B, T)
        # (N,B,offsets) How many rows of a text look hardest at each offset.
        counts = torch.zeros(N, B, REACH + 2).scatter_add_(2, behind, is_row)
        # The mean over documents at each offset; the head's score is that of its best offset.
        scores["positional"] = (counts * self.offsets).sum(1).amax(1)
        return scores

    def _related(self, maps: Tensor, elsewhere: bool = False) -> Scores:
        """Of each relation the weight on the right tokens; or `elsewhere`, at the same distances from other tokens.

        The mean over the pairs of a document, then over documents.
        """
        means: dict[str, list[Tensor]] = defaultdict(list)
        for n, of_document in self.pair_cells:
            cells = of_document.elsewhere if elsewhere else of_document.right
            # (N,pairs) In float64, as `of` adds up in one type with its shares. NaN, which the means leave out, where
            # the document has no other tokens at these distances.
            sums = cells.of(maps[:, n].double()).masked_fill(cells.empty, nan)
            for name, pairs in of_document.by_relation.items():  # `pairs`: the columns of this relation
                means[name].append(sums[:, pairs].nanmean(-1))
        return {name: torch.stack(of_documents).nanmean(0) for name, of_documents in means.items()}

    def _mean(self, name: str, dense: Dense) -> Tensor:
        """The mean of a statistic over the rows of the documents, (N,)."""
        return (formula_of(name)(dense) * self.rows).sum((1, 2))

    def alike(self, maps: Tensor) -> float | None:
        """The fraction of their attention that two heads give to the same keys, a mean over all pairs of heads.

        The maps (H,lines,T,T) are those of a layer. None for a single head, which makes no pair.
        """
        first, second = torch.triu_indices(len(maps), len(maps), 1)  # heads 0 and 1, 0 and 2, ...: each pair once
        shared = torch.minimum(maps[first], maps[second]).sum(-1)  # (pairs,lines,T)
        return float((shared * self.line_rows).sum() / len(first)) if len(first) else None


class Film:
    """Writes the film of a run: called after each step with the model, it adds a frame where one is due.

    `tell` is handed each line of the file as it is written, and first those that an interrupted run has left.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        config: GPTConfig,
        recipe: Recipe,
        tell: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.path, self.tell = folder / FILM, tell
        self.log: StepLog | None = None  # opened at the first step that is shown, which tells where a run goes on
        tokens, layers, heads = corpus.tokens, range(config.n_layers), range(config.attention.n_heads)
        names = [head_name(layer, head) for layer in layers for head in heads]
        self.text = Text(corpus.data.held_out_documents(TOKENS), tokens.shown, tokens.specials, tokens.frame)
        self.text.relations = _relations(corpus, len(self.text.documents))
        followed = () if self.text.relations is None else described(self.text.relations)
        self.roles = (*map(relation_role, followed), *ROLES)
        # Bytes of a frame besides its maps, about. Each role has a score of each head. A score takes its digits and
        # four signs more, such as -0.1234 and a comma.
        numbers = len(names) * (DIGITS + 4) * len(self.roles)
        gap = TINY_GAP if config.d_model * recipe.batch < TINY else GAP
        # Numbers take half of the file at most, and maps the rest.
        self.due = frame_steps(recipe.steps, min(FRAMES, SIZE // (2 * numbers)), gap)
        # Weights of each head that a frame has room for: a weight is a byte, and base64 takes four bytes for three.
        cells = int((SIZE / len(self.due) - numbers) * 3 / 4 / len(names))
        example = tokens.prompt(corpus.example)
        # The example comes first. It may be one of the documents, too; there it is left out, to be filmed once.
        others = (list(ids) for ids in self.text.documents if ids[:LONGEST] != example[:LONGEST])
        self.lines = fitting([example, *others], cells)
        self.glance = Glance(self.lines, self.text, config.context)
        self.header: Row = {
            "heads": names,
            "lines": [list(tokens.shown(line)) for line in self.lines],
            "roles": [[role.name, role.score, role.threshold] for role in self.roles],
            "even": {name: round(score, DIGITS) for name, score in self.glance.even().items()},
            "steps": recipe.steps,
            "documents": len(self.text.documents),
        }

    def __call__(self, model: GPT, step: int) -> None:
        if self.log is None:
            self.log = StepLog(self.path, step, self.header)
            try:
                _check(self.log.rows, FRAME)
            except (KeyError, ValueError) as error:
                raise HeadwiseError(f"{self.path} is damaged ({error}); remove it to resume") from None
            for row in (self.header, *self.log.rows):
                self.tell(row)
        rows = self.log.rows  # grows with the log; of a run that goes on, it holds the frame of this step already
        if step in self.due and (not rows or rows[-1]["step"] < step):
            self.log.add(self._frame(model, step, rows[0]["scores"] if rows else {}))
            self.tell(rows[-1])

    def _frame(self, model: GPT, step: int, untrained: dict[str, list[float]]) -> Row:
        # `untrained` has the scores of the first frame; it is empty while that one is made.
        maps, tensors, elsewhere = self.glance.look(model, sites_of(model))
        require_finite(step, weights=float(maps.sum()))  # one NaN makes the sum NaN: a training that has diverged
        shares = map(self.glance.alike, maps.chunk(model.config.n_layers))  # of each layer the maps of its heads
        layers = [None if share is None else round(share, DIGITS) for share in shares]
        scores = {name: [round(score, DIGITS) for score in tensor.tolist()] for name, tensor in tensors.items()}
        earned: list[list[str]] = [[] for _ in maps]  # of each head
        for role in self.roles:
            # Two controls. The first frame has no untrained scores to be held against: its limit is out of reach.
            limit = max(self.header["even"].get(role.score, -inf), *untrained.get(role.score, [inf]))
            # Of a relation a third control, one for each head; other roles have none.
            at_distance = elsewhere.get(role.score, torch.full((len(maps),), -inf)).tolist()
            for n, score in enumerate(scores.get(role.score, ())):
                # NaN: no other token has a key at these distances. Then `max` gives `limit`, its first argument.
                if role.threshold <= score > max(limit, at_distance[n]):
                    earned[n].append(role.name)
        # Of each head and line the map without the padding.
        lengths = [len(line) for line in self.lines]
        cut = [weights[:n, :n] for of_head in maps.numpy() for weights, n in zip(of_head, lengths, strict=True)]
        return {"step": step, "alike": layers, "scores": scores, "roles": earned, "maps": packed(cut)}


def _maps(model: nn.Module, sites: Sequence[Site], ids: Tensor) -> Tensor:
    """The weights (N,B,T,T) of the N heads of all layers on ids (B,T)."""

    def keep(call: Call) -> None:
        maps.append(trace(call.q, call.k, call.v, call.options).weights.transpose(0, 1))  # (H,B,T,T)

    maps: list[Tensor] = []
    if not len(ids):  # there are no probes
        return torch.zeros(sum(site.n_heads for site in sites), 0, 0, 0)
    with attach(dict.fromkeys(sites, keep)):
        run_body(model, ids)
    return torch.cat(maps)


def _even_maps(ids: Tensor) -> Tensor:
    """The maps of one head that looks at all tokens so far alike, (1,B,T,T) on ids (B,T)."""
    B, T = ids.shape
    return F.normalize(torch.ones(1, B, T, T).tril(), p=1, dim=-1)  # p=1: each row is divided by its sum


def _padded(rows: Sequence[Ids]) -> Tensor:
    """Rows of numbers as one tensor, the shorter ones with zeros behind: [[5, 6], [7]] -> [[5, 6], [7, 0]]."""
    columns = list(zip_longest(*rows, fillvalue=0))  # all first numbers, all second ones, ...: [(5, 7), (6, 0)]
    return torch.tensor(columns, dtype=torch.long).reshape(len(columns), len(rows)).mT  # (0,0) without rows


def _rows(texts: Sequence[Ids], T: int, first: int = 0) -> Tensor:
    """What each row counts for in a mean over texts, (B,T); together 1.

    Each text counts alike, and in it alike each row from `first` on; padding counts 0.
    """
    row = torch.arange(T)
    lengths = torch.tensor([[len(text)] for text in texts]).reshape(-1, 1)  # (B,1), also for no text
    counts = ((row >= first) & (row < lengths)).float()
    return counts / counts.sum(1, keepdim=True) / max(1, len(texts))


def _relations(corpus: Corpus, n_cells: int) -> Relations | None:
    """The pairs of the first `n_cells` held-out cells of the verb corpus, and of some conjugations; else None.

    A cell is one line of that corpus, a person and tense of a verb in two languages.
    """
    if not corpus.cells:  # another text
        return None
    relations = verb_relations(corpus.tokens, (cell.line for cell in corpus.cells[:n_cells]))
    # Its documents are those cells in this order, and then all conjugations.
    chosen = [*relations.documents[:n_cells], *relations.documents[n_cells::CONJUGATIONS]]
    short = [document for document in chosen if len(document.ids) <= corpus.data.context]
    return replace(relations, documents=short) if any(document.pairs for document in short) else None


def frame_steps(steps: int, most: int, gap: int) -> frozenset[int]:
    """The steps that get a frame: 0, 1, 2, 4, 8, ..., then evenly `gap` or more apart, and the last.

    There are at most `most`, and always the first and the last.

    The first ones are dense, to show the beginning of the training: `frame_steps(10, 60, 4)` has 0, 1, 2, 4, 8, 10.
    """
    # `most` is 0 where a frame of thousands of heads fills the file.
    most = max(2, most)
    gap = max(gap, steps // most)
    while True:
        first = {0, *(2**n for n in range(gap.bit_length()))}  # powers of two up to the gap
        due = sorted(step for step in {*first, *range(gap, steps, gap), steps} if step <= steps)
        if len(due) <= most:
            return frozenset(due)
        if gap >= steps:  # `most` is so small that not even the powers of two fit
            # Every second, or third, ... of them, and the last: -(-a // b) rounds up.
            return frozenset({*due[:: -(-len(due) // (most - 1))], steps})
        # Wider by a sixteenth, a round choice: by more, and far fewer frames may be left than there may be; by less,
        # and the search takes more turns.
        gap += max(1, gap // 16)


def fitting(lines: Iterable[list[int]], cells: int) -> list[list[int]]:
    """The first lines, up to LINES, whose causal maps together have at most so many cells.

    A line is cut to LONGEST tokens. The very first is always there, cut to what fits, or to two tokens.
    """
    chosen: list[list[int]] = []
    for line in islice(lines, LINES):
        # n tokens have n (n + 1) / 2 cells. This is the largest n for which they fit, by the quadratic formula.
        longest = (isqrt(max(0, 8 * cells + 1)) - 1) // 2
        if chosen and len(line[:LONGEST]) > longest:
            break
        # One token alone would have nothing to look at. So a first line of two may take more than there was room for,
        # and `cells` falls below 0.
        chosen.append(line[: max(2, min(LONGEST, longest))])
        cells -= len(chosen[-1]) * (len(chosen[-1]) + 1) // 2
    return chosen


def packed(maps: Sequence[NDArray[np.float32]]) -> str:
    """Causal maps (T,T), each row up to the token itself, as base64 of bytes: 255 times each weight, rounded."""
    # `np.tri` chooses the lower triangle with the diagonal, row by row.
    cells = np.concatenate([weights[np.tri(len(weights), dtype=bool)] for weights in maps])
    return base64.b64encode(np.rint(255 * cells).astype(np.uint8).tobytes()).decode("ascii")


def read_film(run: str | Path) -> tuple[Row, list[Row], list[Row]] | None:
    """The header and the frames of a run folder, and the rows of its losses; None where it has no film.

    Raises HeadwiseError for one that is damaged.
    """
    path = place = Path(run) / FILM  # `place` is the file that is being read, for the message
    if not path.exists():
        return None
    try:
        header, *frames = _lines_of(path)
        _check([header], HEADER)
        _check(frames, FRAME)
        of_head = sum(len(line) * (len(line) + 1) // 2 for line in header["lines"])  # cells of the causal maps
        cells = len(header["heads"]) * of_head
        if any(len(base64.b64decode(frame["maps"], validate=True)) != cells for frame in frames):
            raise HeadwiseError(f"maps are not those of {cells} weights")
        place = path.with_name(METRICS)
        losses = _lines_of(place)
        _check(losses, LOSS)
        return header, frames, losses
    # HeadwiseError is a ValueError, too, and JSON that is nested thousands deep is a RecursionError.
    except (KeyError, ValueError, RecursionError) as error:
        raise HeadwiseError(f"{place} cannot be read ({error}); remove {FILM}: the run is whole without it") from None


def _lines_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in read_bytes(path).decode().splitlines()]


def _check(rows: Sequence[Row], kinds: Row) -> None:
    """Raise ValueError or KeyError where a row lacks one of these fields, or has it in another type."""
    for row in rows:
        for name, kind in kinds.items():
            # `from_json` raises where a value is not of its type; the inner call, where the row is no object at all.
            from_json(kind, from_json(dict[str, Any], row)[name], name)
    json.dumps(rows, allow_nan=False)  # only to raise a ValueError for NaN and infinities, which json.loads accepts


def unpacked(header: Row, frame: Row) -> dict[str, list[NDArray[Any]]]:
    """What `packed` packed: head -> for each line its map (T,T), to within 1/510, half of a step of 1/255."""
    cells = np.frombuffer(base64.b64decode(frame["maps"]), np.uint8).astype(np.float32) / 255
    maps: dict[str, list[NDArray[Any]]] = {name: [] for name in header["heads"]}
    for of_head in maps.values():
        for line in header["lines"]:
            allowed = np.tri(len(line), dtype=bool)
            count = int(allowed.sum())
            weights = np.zeros(allowed.shape, np.float32)
            weights[allowed] = cells[:count]
            cells = cells[count:]  # those of the next line, or of the next head
            of_head.append(weights)
    return maps


def train(
    text: str | Path | Sequence[str | Path] | None = None,
    preset: str = "verbs",
    out: str | Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    *,
    lines: bool | None = None,
    tokenizer: str | Path | None = None,
    **shape: int,
) -> GPT:
    """Train a small GPT and return it in eval mode, with its tokenizer known to `generate`, `survey` and the others.

    Args:
        text: the path of a UTF-8 text, of a folder of them, or several; "tale", a little book; a string with a line
            break is the text itself; None: the built-in verb corpus
        preset: verbs, microgpt, nanogpt, fast, book, llama or course
        out: a new folder for the run, as `headwise train --out` writes it; None keeps nothing on the disk
        steps: updates of the weights; None takes the preset's
        seed: of weights, batches and the held-out choice: the same seed gives the same weights on the same
            machine
        lines: each line is a document of its own; None takes the preset's way
        tokenizer: the path of a tokenizer.json; None: characters, or words for the verb corpus
        **shape: fields of `GPTConfig` that differ from the preset, such as n_heads=8

    Raises:
        HeadwiseError: for settings that do not fit, a text that is too short, and a folder that is not empty.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = temporary / "run" if out is None else Path(out)
        if isinstance(text, str) and "\n" in text:
            # `run_training` takes the folder as new still: its text may lie there before a run begins.
            text = stack.enter_context(kept_text(temporary if out is None else folder, text))
        paths = (text,) if isinstance(text, str | Path) else text or ()
        files = tuple(str(text_path(path).absolute()) for path in paths)
        texts = files if len(files) > 1 else next(iter(files), None)  # settings.json has a list, one path or null
        tokenizer_file = None if tokenizer is None else str(tokenizer)
        settings = Settings(preset, texts, tokenizer_file, lines, seed, steps, shape)
        film = None if out is None else Film  # a folder that is deleted at once needs no film
        run_training(folder, settings, lambda progress: None, resume=False, n_samples=0, film=film)
        model, tokens = load_run(folder)
    # So that `survey(model)` and others find its tokenizer; where nothing is kept, the path is of no use any more.
    remember(model, folder, tokens, "headwise")
    return model
