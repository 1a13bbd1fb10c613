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
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from math import inf, isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.files import StepLog, read_bytes
from headwise.gpt.data import Corpus
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.run import FILM
from headwise.gpt.train import METRICS, require_finite
from headwise.heads.glance import Glance
from headwise.heads.labels import Relations, verb_relations
from headwise.heads.profiles import ROLES, relation_role
from headwise.heads.relation import described
from headwise.heads.texts import Text
from headwise.models.sites import sites_of
from headwise.records import from_json, head_name

FRAMES = 60  # at most
GAPS = 32, 100  # steps between two frames at least once the first ones are over; and that of tiny models
TINY = 1000  # width of the model x texts of a batch: below, a frame takes longer than a step
SIZE = 900_000  # bytes of the file, about
LINES, LONGEST = 3, 32  # that are filmed, and the most tokens of one
TOKENS, PROBES = 192, 2  # tokens of the documents that are scored, about; texts of repeated tokens
CONJUGATIONS = 15  # one in so many of those in which relations are known
DIGITS = 4  # of a number


Row = dict[str, Any]
Words = tuple[str, ...]
HEADER: Row = {"heads": Words, "lines": tuple[Words, ...], "roles": tuple[tuple[str, str, float], ...]}
HEADER |= {"even": dict[str, float], "steps": int, "documents": int}
FRAME: Row = {"step": int, "alike": tuple[float | None, ...], "roles": tuple[Words, ...], "maps": str}
FRAME |= {"scores": dict[str, tuple[float, ...]]}
LOSS: Row = {"step": int, "loss": float}


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
        numbers = len(names) * (DIGITS + 4) * len(self.roles)  # bytes of a frame besides its maps
        gap = GAPS[config.d_model * recipe.batch < TINY]
        self.due = frame_steps(recipe.steps, min(FRAMES, SIZE // (2 * numbers)), gap)
        cells = int((SIZE / len(self.due) - numbers) * 3 / 4 / len(names))  # base64 takes four bytes for three
        example = tokens.prompt(corpus.example)
        others = (list(ids) for ids in self.text.documents if ids[:LONGEST] != example[:LONGEST])
        self.lines = fitting([example, *others], cells)
        self.glance = Glance(self.lines, self.text, config.context, PROBES)
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
        layers = [share and round(share, DIGITS) for share in shares]
        scores = {name: [round(score, DIGITS) for score in tensor.tolist()] for name, tensor in tensors.items()}
        earned: list[list[str]] = [[] for _ in maps]
        for role in self.roles:
            limit = max(self.header["even"].get(role.score, -inf), *untrained.get(role.score, [inf, inf]))
            at_distance = elsewhere[role.score].tolist() if role.score in elsewhere else [limit] * len(maps)
            for n, score in enumerate(scores.get(role.score, ())):
                if role.threshold <= score > max(limit, at_distance[n]):
                    earned[n].append(role.name)
        lengths = list(map(len, self.lines))
        cut = [weights[:n, :n] for of_head in maps.numpy() for weights, n in zip(of_head, lengths, strict=True)]
        return {"step": step, "alike": layers, "scores": scores, "roles": earned, "maps": packed(cut)}


def _relations(corpus: Corpus, n_cells: int) -> Relations | None:
    """What the verb corpus knows of the first held-out cells and of some conjugations; of another text nothing."""
    if not corpus.cells:
        return None
    known = verb_relations(corpus.tokens, (cell.line for cell in corpus.cells[:n_cells]))
    chosen = [*known.documents[:n_cells], *known.documents[n_cells::CONJUGATIONS]]
    short = [document for document in chosen if len(document.ids) <= corpus.data.context]
    return replace(known, documents=short) if any(document.pairs for document in short) else None


def frame_steps(steps: int, most: int, gap: int) -> frozenset[int]:
    """0, 1, 2, 4, 8, ..., then evenly, `gap` or more apart, at last the last: the steps of at most so many frames."""
    gap = max(gap, steps // most)
    while True:
        first = {0, *(2**n for n in range(gap.bit_length()))}
        due = sorted(step for step in {*first, *range(gap, steps, gap), steps} if step <= steps)
        if len(due) <= most:
            return frozenset(due)
        if gap >= steps:  # so few that not even the first ones fit
            return frozenset({*due[:: -(-len(due) // most)], steps})
        gap += max(1, gap // 16)


def fitting(lines: Iterable[list[int]], cells: int) -> list[list[int]]:
    """The first lines, as many as their maps have room for in so many cells; the very first is cut where it must be."""
    kept: list[list[int]] = []
    for line in islice(lines, LINES):
        longest = (isqrt(8 * cells + 1) - 1) // 2  # n tokens have n (n + 1) / 2 cells
        if kept and len(line[:LONGEST]) > longest:
            break
        kept.append(line[: max(2, min(LONGEST, longest))])
        cells -= len(kept[-1]) * (len(kept[-1]) + 1) // 2
    return kept


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
        header, *frames = _rows(path)
        _check([header], HEADER)
        _check(frames, FRAME)
        cells = len(header["heads"]) * sum(len(line) * (len(line) + 1) // 2 for line in header["lines"])
        if any(len(base64.b64decode(frame["maps"], validate=True)) != cells for frame in frames):
            raise HeadwiseError(f"maps are not those of {cells} weights")
        place = path.with_name(METRICS)
        losses = _rows(place)
        _check(losses, LOSS)
        return header, frames, losses
    except (KeyError, ValueError, RecursionError) as error:
        raise HeadwiseError(f"{place} cannot be read ({error}); remove {FILM}: the run is whole without it") from None


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in read_bytes(path).decode().splitlines()]


def _check(rows: Sequence[Row], kinds: Row) -> None:
    """Raise ValueError or KeyError where a row lacks one of these fields, or has it in another kind."""
    for row in rows:
        for name, kind in kinds.items():
            from_json(kind, from_json(dict[str, Any], row)[name], name)
    json.dumps(rows, allow_nan=False)


def unpacked(header: dict[str, Any], frame: dict[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """The maps of a frame of a film by head: for each line (T,T), to within 1/510."""
    cells = np.frombuffer(base64.b64decode(frame["maps"]), np.uint8).astype(np.float32) / 255
    maps: dict[str, list[NDArray[Any]]] = {name: [] for name in header["heads"]}
    for of_head in maps.values():
        for line in header["lines"]:
            allowed = np.tri(len(line), dtype=bool)
            weights, count = np.zeros(allowed.shape, np.float32), int(allowed.sum())
            weights[allowed], cells = cells[:count], cells[count:]
            of_head.append(weights)
    return maps
