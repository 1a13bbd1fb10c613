"""A film of the heads: where they look and what they are good for, at some of the steps while a GPT trains.

It is `film.jsonl` in the run folder, a JSON object a line. The first tells what is filmed, each further one is a frame:

    heads   names, in the order of all lists of heads         step    updates of the weights so far
    lines   the filmed texts, token by token                  maps    weights of the lines as bytes; see `packed`
    roles   name, score and threshold of each role            scores  name -> one for each head
    even    name -> score of attention spread evenly          roles   for each head those that it has at this step
    steps   of the whole run                                  alike   for each layer how alike its heads look

A score is a mean over `documents` held-out texts, the one that a survey of these gives. A head has a role in a frame
when its score reaches the threshold, is above that of even attention, and above what any head had in the first frame;
of a relation, also above the head's own weight at the same distances from other tokens.
Alike is the share of their attention that two heads of a layer give to the same tokens, sum_j min(p_j, p'_j), the mean
over pairs of heads and over the rows of the lines that see more than one token; null where a layer has one head.

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

FRAMES = 60  # at most
GAP, TINY_GAP = 32, 100  # steps between two frames at least, once the first ones are over; those of tiny models
TINY = 1000  # width of the model x texts of a batch: below, a frame takes longer than a step
SIZE = 900_000  # bytes of the file, about
LINES, LONGEST = 3, 32  # that are filmed, and the most tokens of one
TOKENS, PROBES = 192, 2  # tokens of the documents that are scored, about; texts of repeated tokens
CONJUGATIONS = 15  # one in so many of those in which relations are known
DIGITS = 4  # of a number


Scores = dict[str, Tensor]  # name -> (N,), one for each head
Words = tuple[str, ...]
# The fields of a line of the file, and what each must be.
HEADER: Row = {
    "heads": Words,
    "lines": tuple[Words, ...],
    "roles": tuple[tuple[str, str, float], ...],
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
LOSS: Row = {"step": int, "loss": float}


READ = ("previous", "self", "first", "delimiter")  # statistics that a survey takes of the documents, too


class Glance:
    """Lines to look at, and documents to score, beside PROBES texts of random tokens that are repeated.

    All go through the model at once, padded at their ends, which a causal model does not see, and are read off whole
    maps. On the same texts the scores are those of a survey.
    """

    def __init__(self, lines: Sequence[Ids], text: Text, context: int) -> None:
        labelled = [] if text.relations is None else text.relations.documents
        more = [document.ids for document in labelled if document.ids not in text.documents]
        texts = [*lines, *text.documents, *more]
        self.n_lines, self.longest = len(lines), max(map(len, lines))
        self.ids = _padded(texts)
        T = self.ids.shape[1]
        self.line_rows = _rows(lines, self.longest, 1)
        # Of lines, and of documents that only have relations, no row counts.
        self.rows = F.pad(_rows(text.documents, T), (0, 0, len(lines), len(more)))
        marks: dict[str, list[list[int]]] = defaultdict(list)  # name -> for each text which of its keys have it
        for ids in texts:
            for name, mark in text.marks(torch.tensor(ids)).items():
                marks[name].append(mark.tolist())
        self.marks = {name: _padded(marked).float() for name, marked in marks.items()}
        n_rows = (self.rows > 0).sum(1, keepdim=True)  # (B,1)
        able = n_rows - torch.arange(REACH + 2)  # rows that have a key at each offset
        enough = (able > 0) & (2 * able >= n_rows)  # as in a survey: half of the rows
        # The token itself and its neighbour have roles of their own; the last column counts what is beyond reach.
        enough[:, [0, 1, -1]] = False
        # What a row that looks hardest at an offset counts for: a share of its document's rows, then of the documents.
        self.offsets = (1 / able.clamp(min=1) / len(text.documents)).where(enough, 0)
        self.pair_cells = [(texts.index(document.ids, len(lines)), PairCells(document)) for document in labelled]
        repeated, first_known = repeated_tokens(text, context, seed=0)
        probes = repeated[:PROBES]
        self.probes = _padded(probes)
        self.probe_rows = _rows(probes, self.probes.shape[1], first_known)

    @torch.no_grad()
    def look(self, model: nn.Module, sites: Sequence[Site]) -> tuple[Tensor, Scores, Scores]:
        """The maps of the lines, (N,lines,T,T) for N heads in the order of the sites, and each score of each head.

        Third, of each relation the weight of each head at the same distances from other tokens, as `follow` has it.
        """
        with evaluating(model):
            maps = _maps(model, sites, self.ids)
            scores = self._scores(maps, _maps(model, sites, self.probes))
        vocabulary = vocabulary_product(model)
        copied = [copying(site, vocabulary) for site in sites]
        if None not in copied:
            scores["copying"] = torch.tensor(copied).flatten()
        lines = maps[:, : self.n_lines, : self.longest, : self.longest]
        return lines, scores, self._related(maps, elsewhere=True)

    def even(self) -> dict[str, float]:
        """The control: the scores of attention that is spread evenly."""
        maps = _even_maps(self.ids)
        scores = self._scores(maps, _even_maps(self.probes))
        for name in ("rare_top", "positional"):
            scores[name] = self._mean(all_statistics()[name].even, Dense(maps, marks=self.marks))
        return {name: float(score) for name, score in scores.items()}

    def _scores(self, maps: Tensor, probes: Tensor) -> Scores:
        """What the maps (N,B,T,T) of the texts and of the repeated tokens decide."""
        dense = Dense(maps, marks=self.marks)
        scores = {name: self._mean(name, dense) for name in READ} | self._related(maps)
        if len(self.probes):
            of_probes = Dense(probes, ids=self.probes)
            for name in ("duplicate", "prefix"):
                scores[name] = (formula_of(all_statistics()[name].repeated)(of_probes) * self.probe_rows).sum((1, 2))
        N, B, T, _ = maps.shape
        behind = (torch.arange(T) - maps.argmax(-1)).clamp(max=REACH + 1)
        is_row = (self.rows > 0).float().expand(N, B, T)
        counts = torch.zeros(N, B, REACH + 2).scatter_add_(2, behind, is_row)
        scores["positional"] = (counts * self.offsets).sum(1).amax(1)
        scores["rare_top"] = self._mean("rare_top", dense)
        return scores

    def _related(self, maps: Tensor, elsewhere: bool = False) -> Scores:
        """Of each relation the weight on the right tokens, or elsewhere: the mean over pairs, then over documents."""
        means: dict[str, list[Tensor]] = defaultdict(list)
        for n, of_document in self.pair_cells:
            cells = of_document.elsewhere if elsewhere else of_document.right
            sums = cells.of(maps[:, n].double()).masked_fill(cells.empty, nan)
            for name, pairs in of_document.of.items():
                means[name].append(sums[:, pairs].nanmean(-1))
        return {name: torch.stack(of_documents).nanmean(0) for name, of_documents in means.items()}

    def _mean(self, name: str, dense: Dense) -> Tensor:
        """The mean of a statistic over the rows of the documents, (N,)."""
        return (formula_of(name)(dense) * self.rows).sum((1, 2))

    def alike(self, maps: Tensor) -> float | None:
        """The share of their attention that two heads give to the same keys: the mean over pairs of maps (H,lines,T,T).

        None for a single head. The first row, where every head looks at the only token there is, does not count.
        """
        first, second = torch.triu_indices(len(maps), len(maps), 1)
        shared = torch.minimum(maps[first], maps[second]).sum(-1)
        return float((shared * self.line_rows).sum() / len(first)) if len(first) else None


class Film:
    """Takes a frame of the model it is shown where one is due. `tell` hears of each line of the file."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        config: GPTConfig,
        recipe: Recipe,
        tell: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.path, self.tell = folder / FILM, tell
        self.log: StepLog | None = None
        tokens, layers, heads = corpus.tokens, range(config.n_layers), range(config.attention.n_heads)
        names = [head_name(layer, head) for layer in layers for head in heads]
        self.text = Text(corpus.data.held_out_documents(TOKENS), tokens.shown, tokens.specials, tokens.frame)
        self.text.relations = _relations(corpus, len(self.text.documents))
        followed = () if self.text.relations is None else described(self.text.relations)
        self.roles = (*map(relation_role, followed), *ROLES)
        # Bytes of a frame besides its maps: a number has its digits, a sign, "0.", and a comma.
        numbers = len(names) * (DIGITS + 4) * len(self.roles)
        gap = TINY_GAP if config.d_model * recipe.batch < TINY else GAP
        # Numbers take half of the file at most, and maps the rest.
        self.due = frame_steps(recipe.steps, min(FRAMES, SIZE // (2 * numbers)), gap)
        cells = int((SIZE / len(self.due) - numbers) * 3 / 4 / len(names))  # base64 takes four bytes for three
        example = tokens.prompt(corpus.example)
        # The example comes first, and is filmed once.
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
        rows = self.log.rows
        if step in self.due and (not rows or rows[-1]["step"] < step):
            self.log.add(self._frame(model, step, rows[0]["scores"] if rows else {}))
            self.tell(rows[-1])

    def _frame(self, model: GPT, step: int, untrained: dict[str, list[float]]) -> Row:
        maps, tensors, elsewhere = self.glance.look(model, sites_of(model))
        require_finite(step, weights=float(maps.sum()))
        shares = map(self.glance.alike, maps.chunk(model.config.n_layers))
        layers = [None if share is None else round(share, DIGITS) for share in shares]
        scores = {name: [round(score, DIGITS) for score in tensor.tolist()] for name, tensor in tensors.items()}
        earned: list[list[str]] = [[] for _ in maps]
        for role in self.roles:
            # The first frame, which has nothing to hold its scores against, has no roles.
            limit = max(self.header["even"].get(role.score, -inf), *untrained.get(role.score, [inf]))
            at_distance = elsewhere.get(role.score, torch.full((len(maps),), -inf)).tolist()
            for n, score in enumerate(scores.get(role.score, ())):
                if role.threshold <= score > max(limit, at_distance[n]):  # nan, of no distance, is no limit
                    earned[n].append(role.name)
        lengths = [len(line) for line in self.lines]
        cut = [weights[:n, :n] for of_head in maps.numpy() for weights, n in zip(of_head, lengths, strict=True)]
        return {"step": step, "alike": layers, "scores": scores, "roles": earned, "maps": packed(cut)}


def _maps(model: nn.Module, sites: Sequence[Site], ids: Tensor) -> Tensor:
    """The weights (N,B,T,T) of all heads on ids (B,T)."""

    def keep(call: Call) -> None:
        maps.append(trace(call.q, call.k, call.v, call.options).weights)

    maps: list[Tensor] = []
    if not len(ids):
        return torch.zeros(sum(site.n_heads for site in sites), 0, 0, 0)
    with attach(dict.fromkeys(sites, keep)):
        run_body(model, ids)
    return torch.cat(maps, 1).transpose(0, 1).contiguous()


def _even_maps(ids: Tensor) -> Tensor:
    """Of one head that looks at all tokens so far alike, (1,B,T,T) on ids (B,T)."""
    B, T = ids.shape
    return F.normalize(torch.ones(1, B, T, T).tril(), p=1, dim=-1)


def _padded(rows: Sequence[Ids]) -> Tensor:
    """Rows of numbers as one tensor, zeros behind."""
    columns = list(zip_longest(*rows, fillvalue=0))  # all first numbers, all second ones, ...
    return torch.tensor(columns, dtype=torch.long).reshape(len(columns), len(rows)).mT


def _rows(texts: Sequence[Ids], T: int, first: int = 0) -> Tensor:
    """What each row counts for, (B,T): each text alike, and in it alike each row from `first` on."""
    row = torch.arange(T)
    lengths = torch.tensor([[len(text)] for text in texts]).reshape(-1, 1)
    counts = ((row >= first) & (row < lengths)).float()
    return counts / counts.sum(1, keepdim=True) / max(1, len(texts))


def _relations(corpus: Corpus, n_cells: int) -> Relations | None:
    """What the verb corpus knows of the first held-out cells and of some conjugations; of another text nothing."""
    if not corpus.cells:
        return None
    relations = verb_relations(corpus.tokens, (cell.line for cell in corpus.cells[:n_cells]))
    chosen = [*relations.documents[:n_cells], *relations.documents[n_cells::CONJUGATIONS]]
    short = [document for document in chosen if len(document.ids) <= corpus.data.context]
    return replace(relations, documents=short) if any(document.pairs for document in short) else None


def frame_steps(steps: int, most: int, gap: int) -> frozenset[int]:
    """0, 1, 2, 4, 8, ..., then evenly, `gap` or more apart, at last the last: the steps of at most so many frames."""
    most = max(1, most)  # where a frame of thousands of heads leaves room for none
    gap = max(gap, steps // most)
    while True:
        first = {0, *(2**n for n in range(gap.bit_length()))}  # powers of two up to the gap
        due = sorted(step for step in {*first, *range(gap, steps, gap), steps} if step <= steps)
        if len(due) <= most:
            return frozenset(due)
        if gap >= steps:  # so few that not even the first ones fit
            return frozenset({*due[:: -(-len(due) // most)], steps})  # every second, or third, ... of them
        gap += max(1, gap // 16)  # wider by a sixteenth: soon few enough, and not far fewer than there may be


def fitting(lines: Iterable[list[int]], cells: int) -> list[list[int]]:
    """The first lines, as many as their maps have room for in so many cells; the very first is cut where it must be."""
    chosen: list[list[int]] = []
    for line in islice(lines, LINES):
        longest = (isqrt(max(0, 8 * cells + 1)) - 1) // 2  # n tokens have n (n + 1) / 2 cells
        if chosen and len(line[:LONGEST]) > longest:
            break
        chosen.append(line[: max(2, min(LONGEST, longest))])
        cells -= len(chosen[-1]) * (len(chosen[-1]) + 1) // 2
    return chosen


def packed(maps: Sequence[NDArray[np.float32]]) -> str:
    """Causal maps (T,T), each row up to the token itself, as base64 of bytes: 255 times each weight, rounded."""
    cells = np.concatenate([weights[np.tri(len(weights), dtype=bool)] for weights in maps])
    return base64.b64encode(np.rint(255 * cells).astype(np.uint8).tobytes()).decode("ascii")


def read_film(run: str | Path) -> tuple[Row, list[Row], list[Row]] | None:
    """The header and the frames of a run folder, and the rows of its losses; None where it has no film.

    Raises HeadwiseError for one that is damaged.
    """
    path = place = Path(run) / FILM
    if not path.exists():
        return None
    try:
        header, *frames = _lines_of(path)
        _check([header], HEADER)
        _check(frames, FRAME)
        of_head = sum(len(line) * (len(line) + 1) // 2 for line in header["lines"])
        cells = len(header["heads"]) * of_head
        if any(len(base64.b64decode(frame["maps"], validate=True)) != cells for frame in frames):
            raise HeadwiseError(f"maps are not those of {cells} weights")
        place = path.with_name(METRICS)
        losses = _lines_of(place)
        _check(losses, LOSS)
        return header, frames, losses
    except (KeyError, ValueError, RecursionError) as error:
        raise HeadwiseError(f"{place} cannot be read ({error}); remove {FILM}: the run is whole without it") from None


def _lines_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in read_bytes(path).decode().splitlines()]


def _check(rows: Sequence[Row], kinds: Row) -> None:
    """Raise ValueError or KeyError where a row lacks one of these fields, or has it in another kind."""
    for row in rows:
        for name, kind in kinds.items():
            from_json(kind, from_json(dict[str, Any], row)[name], name)
    json.dumps(rows, allow_nan=False)  # a ValueError for what is not finite


def unpacked(header: Row, frame: Row) -> dict[str, list[NDArray[Any]]]:
    """The maps of a frame of a film by head: for each line (T,T), to within 1/510."""
    cells = np.frombuffer(base64.b64decode(frame["maps"]), np.uint8).astype(np.float32) / 255
    maps: dict[str, list[NDArray[Any]]] = {name: [] for name in header["heads"]}
    for of_head in maps.values():
        for line in header["lines"]:
            allowed = np.tri(len(line), dtype=bool)
            count = int(allowed.sum())
            weights = np.zeros(allowed.shape, np.float32)
            weights[allowed] = cells[:count]
            cells = cells[count:]
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
    field: str | None = None,
    **shape: int,
) -> GPT:
    """Train a small GPT and return it in eval mode, with its tokenizer known to `generate`, `survey` and the others.

    Args:
        text: the path of a UTF-8 text of any size, of .jsonl or .parquet, each perhaps packed (.gz, .zst), of a
            folder of them, or several; "tale", a little book; a string with a line break is the text itself;
            None: the built-in verb corpus
        preset: verbs, microgpt, nanogpt, fast, book, llama or course
        out: a new folder for the run, as `headwise train --out` writes it; None keeps nothing on the disk
        steps: updates of the weights; None takes the preset's
        seed: of weights, batches and the held-out choice: the same seed gives the same weights on the same
            machine
        lines: each line is a document of its own; None takes the preset's way
        tokenizer: the path of a tokenizer.json; None: characters, or words for the verb corpus
        field: of the records of .jsonl and .parquet the one that holds the text; None: text
        **shape: fields of `GPTConfig` that differ from the preset, such as n_heads=8

    Raises:
        HeadwiseError: for settings that do not fit, a text that is too short, and a folder that is not empty.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = temporary / "run" if out is None else Path(out)
        if isinstance(text, str) and "\n" in text:
            text = stack.enter_context(kept_text(temporary if out is None else folder, text))
        paths = (text,) if isinstance(text, str | Path) else text or ()
        files = tuple(str(text_path(path).absolute()) for path in paths)
        texts = files if len(files) > 1 else next(iter(files), None)  # settings.json has several, one or none
        tokenizer_file = None if tokenizer is None else str(tokenizer)
        settings = Settings(preset, texts, tokenizer_file, lines, seed, steps, shape, field)
        film = None if out is None else Film
        run_training(folder, settings, lambda progress: None, resume=False, n_samples=0, film=film)
        model, tokens = load_run(folder)
    remember(model, folder, tokens, "headwise")
    return model
