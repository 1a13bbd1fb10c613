"""A corpus shared out among processes, and what each has tallied of it kept in a file.

Whole batches are shared, so that a document runs beside the same neighbours as in one process, to the same bits.
In a folder each process keeps one file, of what it tallied since it began and which documents those were; no file is
written by two. So whatever is killed, every document counts once, and another number of processes may go on.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import Kept
from headwise.gpt.checkpoint import read_metadata, read_tensors, write_tensors
from headwise.gpt.ranks import Ranks
from headwise.heads.documents import Marker, run_documents, side_by_side
from headwise.heads.tally import Tally
from headwise.models.stream import turns

SAVE_SECONDS = 10.0
Documents = Sequence[Sequence[int]]


class Part(Sequence[Sequence[int]]):
    """Neighbouring documents, read when they are asked for."""

    def __init__(self, documents: Documents, numbers: range) -> None:
        self.documents, self.numbers = documents, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        return self.documents[self.numbers[number]]


def shares(documents: Documents, done: Sequence[range], world: int) -> list[list[range]]:
    """The documents that are not done, for each process, as ranges of whole batches and alike in tokens."""
    todo: list[tuple[int, int, int]] = []  # of each batch its first document, the one behind its last, its tokens
    for gap in _gaps(len(documents), done):
        start = gap.start
        for ids in side_by_side(Part(documents, gap)):
            todo.append((start, start + len(ids), ids.numel()))
            start += len(ids)
    parts: list[list[range]] = [[] for _ in range(world)]
    ends = list(accumulate(n_tokens for *_, n_tokens in todo))
    for (first, last, n_tokens), end in zip(todo, ends, strict=True):
        part = parts[(end - n_tokens) * world // ends[-1]]  # that of the process in whose tokens the batch begins
        if part and part[-1].stop == first:
            first = part.pop().start
        part.append(range(first, last))
    return parts


def _gaps(count: int, done: Sequence[range]) -> Iterator[range]:
    """What lies between ranges of `count` numbers."""
    start = 0
    for numbers in sorted(done, key=lambda numbers: numbers.start):
        if start < numbers.start:
            yield range(start, numbers.start)
        start = max(start, numbers.stop)
    if start < count:
        yield range(start, count)


class Tallies:
    """What each process has tallied, in the folder of a survey that can be killed; None keeps nothing."""

    def __init__(self, folder: Path | None, tally: Tally, documents: Documents, ranks: Ranks) -> None:
        self.ranks, self.due, self.key = ranks, time.monotonic() + SAVE_SECONDS, ""
        self.path: Path | None = None
        self.earlier: list[Path] = []
        self.kept: AbstractContextManager[object] = nullcontext()
        if folder is None:
            return
        if ranks.rank == 0:
            busy = f"another survey is at work in {folder}; pass another keep="
            self.kept = Kept(folder, ["tally-*.safetensors"], busy=busy)
        # The first numbers of each matrix tell a model from another one; a digest of all would take its time.
        weights = [(name, each.shape, each.flatten()[:9].tolist()) for name, each in tally.model.named_parameters()]
        drawn = tally.rows and (tally.rows, tally.seed)  # the seed draws the rows, and nothing else
        digest = hashlib.sha256(str((weights, drawn)).encode())
        for document in documents:
            digest.update(array("q", document).tobytes() + b"|")
        self.key = digest.hexdigest()
        self.earlier = ranks.agree(lambda: sorted(folder.glob("tally-*.safetensors")))
        # A file is tally-ATTEMPT-RANK: what goes on writes beside those of the processes that were killed.
        attempt = max((int(path.stem.split("-")[1]) for path in self.earlier), default=0) + 1
        self.path = folder / f"tally-{attempt}-{ranks.rank}.safetensors"

    def read(self, tally: Tally) -> list[range]:
        """Add to a tally this rank's part of what is kept; returns the documents of all that is."""
        numbers: list[range] = []
        for path in self.earlier[self.ranks.rank :: self.ranks.world]:
            state = read_tensors(path)
            fields = read_metadata(path)
            if fields.keys() != {"key", "documents", "notes"}:
                raise HeadwiseError(f"{path} is damaged: it is no tally of headwise; remove it, and it is read again")
            if fields["key"] != self.key:
                raise HeadwiseError(f"{path} is of another model or text; go on with those, or pass another keep=")
            tally.join(state)
            tally.notes |= json.loads(fields["notes"])
            numbers += [range(*ends) for ends in json.loads(fields["documents"])]
        return [each for of_process in self.ranks.gathered(numbers) for each in of_process]

    def write(self, tally: Tally, numbers: Sequence[range], now: bool = False) -> None:
        """Keep what is tallied of these documents, every ten seconds or now."""
        if self.path is not None and (now or time.monotonic() > self.due):
            ends = json.dumps([[each.start, each.stop] for each in numbers if each])
            fields = {"key": self.key, "documents": ends, "notes": json.dumps(tally.notes)}
            write_tensors(self.path, tally.state(), fields)
            self.due = time.monotonic() + SAVE_SECONDS


def read_corpus(
    blank: Callable[[], Tally],
    documents: Documents,
    marker: Marker,
    progress: Callable[[int, int], None],
    ranks: Ranks,
    folder: Path | None,
) -> Tally:
    """Tally documents, each in one of the processes, and hand the tally of all of them to all."""
    tally, before = blank(), blank()
    kept = Tallies(folder, tally, documents, ranks)
    with kept.kept:
        done, tallied = kept.read(before), list[range]()
        times = turns(tally.model)  # that a token passes: once, and of a streamed model through each layer
        count, total = ranks.counter(), sum(map(len, documents)) * times
        count(0 if ranks.rank else sum(len(documents[n]) for numbers in done for n in numbers) * times)
        for numbers in shares(documents, done, ranks.world)[ranks.rank]:
            part = Part(documents, numbers)
            ends, last = list(accumulate(map(len, part))), 0

            def passed(n_tokens: int, in_all: int, numbers: range = numbers, ends: list[int] = ends) -> None:
                nonlocal last
                progress(count(n_tokens - last), total)
                last = n_tokens
                if in_all == ends[-1]:  # a streamed model counts its tokens once a layer: nothing of it is kept
                    kept.write(tally, [*tallied, numbers[: bisect_right(ends, n_tokens)]])

            def take(n: int, *seen: Any, first: int = numbers.start) -> None:
                tally.take(first + n, *seen)

            run_documents(tally.model, part, take, marker, passed)
            tallied.append(numbers)
        kept.write(tally, tallied, now=True)
    tally.join(before.state())

    def join(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        joined = blank()
        joined.join(state)
        joined.join(other)
        return joined.state()

    merged = blank()
    state = tally.state()
    merged.join(ranks.merged(state, join))
    merged.notes = {note: None for notes in ranks.gathered({**before.notes, **tally.notes}) for note in notes}
    return merged


def gather_heads(tally: Tally, ranks: Ranks) -> Tally:
    """A tally of all heads, on all, where each process holds some of them: numbers travel, and no weights."""
    states = ranks.gathered(tally.state())
    state = dict(states[0])
    for name in state:
        if not name.startswith("uniform "):  # even attention is one head's in each process
            state[name] = torch.cat([each[name] for each in states])
    gathered = replace(tally, probe=None if tally.probe is None else gather_heads(tally.probe, ranks))
    gathered.join(state)
    for name, site in gathered.sites.items():
        n_heads = site.n_heads * site.parts
        gathered.sites[name] = replace(site, n_heads=n_heads, part=0, parts=1, weights=lambda name: None)
    gathered.notes = tally.notes
    return gathered
