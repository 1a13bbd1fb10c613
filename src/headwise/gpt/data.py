"""What a model learns from and what it is tested on: a stream of tokens, or documents one line each.

Both lie in a file of tokens that is mapped into memory, so that they may be as large as the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.gpt import verbs
from headwise.gpt.ngram import NGramModel, best_order, ngram_losses
from headwise.gpt.token_file import Ints, TokenFile, check_room, kept_tokens, made_tokens, temporary_tokens, write_tokens
from headwise.gpt.tokens import Tokens
from headwise.sources import Progress, Sources, no_progress

IGNORED = -100  # a target that does not count
HELD_OUT_SHARE = 0.1
EXAMPLE_TOKENS = 48
HELD_OUT_TOKENS = 100_000  # about so many are scored at most, evenly spread over the held-out part
ORDER = 6  # of the largest n-gram
NGRAM_TOKENS = 2**22  # that n-grams count at most: their tables take some hundred times the memory
LARGE = 2**24  # bytes of a text whose tokens are kept
BLOCK = 2**22  # characters of lines that are shuffled at a time
FORMAT = 1  # of what is kept: a change of how a text becomes ids counts on
MOST_SHUFFLED = 2**20  # lines; of more, a batch may hold one twice

Batch = tuple[Tensor, Tensor]  # inputs (B,T), targets (B,T)


class Stream:
    """One long text; a batch is a set of random pieces of it. The last tenth is held out."""

    def __init__(self, ids: TokenFile, context: int, digest: str = "") -> None:
        self._ids, self._cut = ids, int(ids.n_ids * (1 - HELD_OUT_SHARE))
        self.context, self.digest = context, digest
        for name, length in (("training", self._cut), ("held-out", ids.n_ids - self._cut)):
            if length <= context:
                raise HeadwiseError(
                    f"the {name} part of the text has {length} tokens, fewer than context {context} + 1; "
                    f"pass a longer text or a smaller --context"
                )

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        return self._pieces(torch.randint(self._cut - self.context, (size, 1), generator=generator))

    def held_out_batches(self, size: int, limit: int = HELD_OUT_TOKENS) -> Iterator[Batch]:
        """Pieces side by side, so that each token is scored at most once."""
        yield from map(self._pieces, torch.split(self._starts(limit), size))

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out ids in pieces of the context's length, about `limit` tokens of them."""
        return [inputs[0].tolist() for inputs, _ in self.held_out_batches(1, limit)]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram. It sees all text before a token; the model at most its context.

        Of a text of more than NGRAM_TOKENS it counts the last ones before the held-out part, and is scored on what the
        model is scored on.
        """
        train = self._ids.take(slice(max(0, self._cut - NGRAM_TOKENS), self._cut))
        places, counted = np.arange(self._cut, self._ids.n_ids), None
        if self._cut > NGRAM_TOKENS:
            offsets = np.arange(2 - ORDER, self.context + 1)  # before its first target a piece has what an n-gram sees
            places = self._starts(HELD_OUT_TOKENS).numpy() + offsets
            counted = np.broadcast_to(offsets > 0, places.shape).ravel()
        return best_order(ngram_losses(train, self._ids.take(places.ravel()), vocab_size, ORDER, counted))

    def _starts(self, limit: int) -> Tensor:
        """Where held-out pieces of about `limit` tokens begin, (N,1)."""
        starts = torch.arange(self._cut, self._ids.n_ids - self.context, self.context)
        wanted = max(1, limit // self.context)
        if len(starts) > wanted:
            starts = starts[torch.arange(wanted) * (len(starts) - 1) // max(1, wanted - 1)]
        return starts[:, None]

    def _pieces(self, starts: Tensor) -> Batch:
        pieces = torch.from_numpy(self._ids.take(starts.numpy() + np.arange(self.context + 1)))
        return pieces[:, :-1], pieces[:, 1:]


def _as_it_stands(line: str) -> tuple[str, ...]:
    return (line,)


class Documents:
    """Lines between boundaries; a batch is a set of different whole lines, padded.

    lines         their ids: first those to train on, then those held out
    n_train       the number of the former
    scored_after  in scored lines, only what follows this token counts, if there is one
    n_ways        lines to train on stand in groups of so many, of one length: when a group is drawn, one of them is
    n_blocks      parts of the text that were shuffled by themselves: where not all lines are taken, some are of each
    """

    def __init__(
        self,
        tokens: Tokens,
        lines: TokenFile,
        n_train: int,
        context: int,
        digest: str = "",
        scored_after: str | None = None,
        n_ways: int = 1,
        n_blocks: int = 1,
    ) -> None:
        self._train, self._held_out = range(0, n_train, n_ways), range(n_train, len(lines))
        if not self._train or not self._held_out:
            raise HeadwiseError(
                f"{n_train} lines to train on and {len(self._held_out)} held out; pass 10 lines or more"
            )
        self.boundary, self.context, self.digest = tokens.document("")[0], context, digest
        self._lines, self._n_ways, self._n_blocks = lines, n_ways, n_blocks
        self._scored_after = None if scored_after is None else tokens.encode(scored_after)[0]
        if scored_after is not None and any(self._scored_after not in ids[:-1] for ids in self._cut(self._held_out)):
            raise HeadwiseError(
                f"context {context} ends before the {scored_after!r} of a held-out line; pass a larger one"
            )

    @classmethod
    def of_lines(
        cls,
        tokens: Tokens,
        train: Sequence[str],
        held_out: Sequence[str],
        context: int,
        scored_after: str | None = None,
        ways: Callable[[str], Sequence[str]] = _as_it_stands,
    ) -> Documents:
        """Of lines in memory; `ways` gives the ways to write a line to train on, all of one length."""
        written = [ways(line) for line in train]
        n_ways = max(map(len, written), default=1)
        texts = chain((text for each in written for text in islice(cycle(each), n_ways)), held_out)
        lines = temporary_tokens(([tokens.document(text)] for text in texts), len(tokens))
        digest = sha256("\n".join((*train, "", *held_out)).encode()).hexdigest()
        return cls(tokens, lines, len(train) * n_ways, context, digest, scored_after, n_ways)

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        n = len(self._train)
        if n > MOST_SHUFFLED:
            chosen = torch.randint(n, (size,), generator=generator)
        else:
            chosen = torch.randperm(n, generator=generator)[:size]
        if self._n_ways > 1:
            chosen = chosen * self._n_ways + torch.randint(self._n_ways, chosen.shape, generator=generator)
        return self._padded(chosen.numpy())

    def held_out_batches(self, size: int, limit: int = HELD_OUT_TOKENS) -> Iterator[Batch]:
        numbers = self._some(self._held_out, limit)
        for start in range(0, len(numbers), size):
            inputs, targets = self._padded(numbers[start : start + size])
            for row, ids in enumerate(inputs.tolist()):
                targets[row, : self._unscored(ids) - 1] = IGNORED
            yield inputs, targets

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out lines as ids, with the boundary before and without the one after; about `limit` tokens of them."""
        numbers = self._spread(self._held_out, limit)
        ends = np.minimum(self._lines.spans(numbers)[1], self.context + 1).cumsum()
        return [ids[:-1] for ids in self._cut(numbers[: max(1, int(np.searchsorted(ends, limit)))])]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram on the scored tokens. Of a text in blocks it counts NGRAM_TOKENS."""
        whole = self._n_blocks == 1
        train = self._cut(self._train if whole else self._some(self._train, NGRAM_TOKENS))
        held_out = self._cut(self._held_out if whole else self._some(self._held_out, HELD_OUT_TOKENS))
        counted = np.concatenate([np.arange(len(ids)) >= self._unscored(ids) for ids in held_out])
        rows = np.concatenate(train), np.concatenate(held_out)
        return best_order(ngram_losses(*rows, vocab_size, ORDER, counted, self.boundary))

    def ngram_model(self, vocab_size: int, order: int) -> NGramModel:
        return NGramModel(np.concatenate(self._cut(self._train)), vocab_size, order, boundary=self.boundary)

    def _unscored(self, ids: list[int]) -> int:
        """How many tokens do not count: the first boundary, or all up to the first `scored_after`."""
        return 1 if self._scored_after is None else ids.index(self._scored_after) + 1

    def _spread(self, part: range, most: int) -> Ints:
        """The numbers of so many lines of a part, or of all: the first of every block, then the second of each."""
        in_block = len(part) // self._n_blocks
        turns = np.arange(min(most, in_block * self._n_blocks))
        return part.start + part.step * (turns % self._n_blocks * in_block + turns // self._n_blocks)

    def _some(self, part: range, limit: int) -> Ints:
        """The numbers of lines of a part, about `limit` tokens of them."""
        numbers = self._spread(part, limit)
        n_tokens = int(np.minimum(self._lines.spans(numbers)[1], self.context + 1).sum())
        return numbers if n_tokens <= limit else numbers[: max(1, limit * len(numbers) // n_tokens)]

    def _cut(self, numbers: Iterable[int]) -> list[list[int]]:
        return [self._lines[int(number)][: self.context + 1] for number in numbers]

    def _padded(self, numbers: Ints) -> Batch:
        starts, lengths = self._lines.spans(numbers)
        lengths = np.minimum(lengths, self.context + 1)[:, None]
        offsets = np.arange(lengths.max())
        inside = offsets < lengths
        ids = self._lines.take(starts[:, None] + offsets * inside)
        inputs = np.where(inside[:, 1:], ids[:, :-1], self.boundary)
        return torch.from_numpy(inputs), torch.from_numpy(np.where(inside[:, 1:], ids[:, 1:], IGNORED))


@dataclass(frozen=True)
class Corpus:
    """Data with the tokenizer made for it."""

    name: str
    tokens: Tokens
    data: Stream | Documents
    example: str  # a held-out piece to look at
    cells: tuple[verbs.Cell, ...] = ()  # held-out cells of the verb corpus


def verb_corpus(seed: int, context: int, any_order: bool = True) -> Corpus:
    """The built-in corpus, tokenised into words. What counts is the Spanish half, which the English half determines.

    With `any_order` the persons of a conjugation line come in a new order each time. In one fixed order no other form
    ever follows the third one, so a model learns to write it and hardly to read it (LOG.md has the figures).
    """
    corpus = verbs.corpus(seed)
    tokens = Tokens.words(corpus.train_lines)
    ways = verbs.clause_orders if any_order else _as_it_stands
    data = Documents.of_lines(tokens, corpus.train_lines, corpus.held_out_lines, context, "=", ways)
    example = max(corpus.held_out_cells, key=lambda cell: cell.tense == "conditional").line  # `would` decides a tense
    return Corpus("the verb corpus", tokens, data, example, corpus.held_out_cells)


def text_corpus(
    path: Path | Sequence[Path],
    lines: bool,
    context: int,
    seed: int,
    tokenizer: Path | None = None,
    hold_out: bool = True,
    field: str | None = None,
    progress: Progress = no_progress,
) -> Corpus:
    """Files or folders of text: a stream, or a document a line or record; characters, or a tokenizer file's tokens.

    The same text gives the same ids and the same parts, in whatever files it lies. Texts that follow one another in a
    stream have a line end between them.

    hold_out  of lines, is a tenth kept from training? Without it all of them are learned from, and looked at afterwards
    """
    text = Sources([path] if isinstance(path, Path) else path, field, progress)
    known = None if tokenizer is None else Tokens.from_file(tokenizer)
    stored = _stored(text, known, lines, seed if hold_out else None)
    tokens, facts = known or Tokens.characters(stored.facts["characters"], boundary=lines), stored.facts
    if lines:
        documents = Documents(tokens, stored, facts["train"], context, facts["digest"], n_blocks=facts["blocks"])
        return Corpus(text.name, tokens, documents, tokens.decode(stored[facts["train"]][1:-1][: context - 1]))
    stream = Stream(stored, context, facts["digest"])
    return Corpus(text.name, tokens, stream, tokens.decode(stream.held_out_documents(1)[0][:EXAMPLE_TOKENS]))


def _stored(text: Sources, known: Tokens | None, lines: bool, seed: int | None) -> TokenFile:
    """The ids of a text; of a large one those that are kept, if it was read before."""

    def make(file: BinaryIO, folder: Path) -> None:
        texts = text.lines() if lines else _joined(text)
        tokens = known or Tokens.characters("".join(set().union(*texts)), boundary=lines)
        facts: dict[str, Any] = {} if known else {"characters": "".join(c for c in tokens.vocabulary if len(c) == 1)}
        documents = _documents(text, tokens, seed, facts) if lines else [_stream(text, tokens, facts)]

        def look(size: int) -> None:
            share = text.position / text.size
            if lines:
                share = 1 - HELD_OUT_SHARE * (1 - share) if "train" in facts else share * (1 - HELD_OUT_SHARE)
            check_room(folder, size, share)

        write_tokens(file, documents, len(tokens), facts, look)

    if text.size < LARGE:
        return made_tokens(make)
    determined = [FORMAT, text.digest(), text.field, known and known.to_json(), lines, seed if lines else None]
    return kept_tokens(sha256(json.dumps(determined).encode()).hexdigest()[:32], make)


def _joined(text: Sources) -> Iterator[str]:
    """Documents in one text, with a line end between them."""
    name, last = "", "\n"
    for document, piece in text:
        if document != name and not last.endswith("\n"):
            yield "\n"
        if piece:
            yield piece
            last = piece
        name = document


def _stream(text: Sources, tokens: Tokens, facts: dict[str, Any]) -> Iterator[list[int]]:
    digest = sha256()
    for piece in _joined(text):
        digest.update(piece.encode())
        yield tokens.encode(piece)
    facts["digest"] = digest.hexdigest()


def _documents(text: Sources, tokens: Tokens, seed: int | None, facts: dict[str, Any]) -> Iterator[list[list[int]]]:
    """Lines to train on, then those held out. The digest is that of both, with an empty line between."""
    digest, between = sha256(), ""
    for held_out in (False, True):
        count = 0
        for count, line in enumerate(_part(text, seed, held_out, facts), 1):  # noqa: B007, the last one counts
            digest.update((between + line).encode())
            between = "\n"
            yield [tokens.document(line)]
        if not held_out:
            digest.update(b"\n")
            facts["train"] = count
    facts["digest"] = digest.hexdigest()


def _part(text: Sources, seed: int | None, held_out: bool, facts: dict[str, Any]) -> Iterator[str]:
    """The lines that are held out, or the others, in blocks that are shuffled each by itself; without a seed all."""
    generator, facts["blocks"] = torch.Generator(), 0
    generator.manual_seed(seed or 0)
    for block in _blocks(text.lines()):
        facts["blocks"] += 1
        if seed is None:
            yield from block
            continue
        order, cut = torch.randperm(len(block), generator=generator).tolist(), int(len(block) * (1 - HELD_OUT_SHARE))
        yield from (block[i] for i in (order[cut:] if held_out else order[:cut]))


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    block, size = [], 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= BLOCK and len(block) >= 10:  # a block of fewer has none to train on, or none to hold out
            yield block
            block, size = [], 0
    if block:
        yield block
