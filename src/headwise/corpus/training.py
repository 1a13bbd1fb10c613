"""What a model learns from and what it is tested on: a stream of tokens, or documents one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.corpus import verbs
from headwise.corpus.ngram import best_order, likeliest, ngram_losses
from headwise.corpus.sources import Sources, pieces
from headwise.corpus.tokens import Ids, Tokens
from headwise.errors import HeadwiseError

# a target that does not count, as `cross_entropy` of torch has it by default
IGNORED = -100
HELD_OUT_SHARE = 0.1  # the fraction of the text that is held out
EXAMPLE_TOKENS = (
    48  # of a stream so many held-out ones are shown as an example; a round choice
)
HELD_OUT_TOKENS = (
    100_000  # about so many are scored at most, evenly spread over the held-out part
)
# That n-grams count at most, and are scored on: a million tokens take about 2 s, and tables of 150 MB.
NGRAM_TOKENS, NGRAM_SCORED = 2**22, 2**19

Batch = tuple[Tensor, Tensor]  # inputs (B,T), targets (B,T): what follows each input


class Stream:
    """One long text; a batch is a set of random pieces of it. The last tenth is held out."""

    def __init__(self, ids: Ids, context: int) -> None:
        # where the held-out part begins
        self._ids, self._cut = torch.tensor(ids), int(len(ids) * (1 - HELD_OUT_SHARE))
        self.context = context
        for name, length in (
            ("training", self._cut),
            ("held-out", len(ids) - self._cut),
        ):
            if length <= context:
                raise HeadwiseError(
                    f"the {name} part of the text has {length} tokens, fewer than context {context} + 1; pass "
                    "a longer text or a smaller context="
                )

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        # The last start possible is cut - context - 1: a piece has one token more than its inputs.
        return self._pieces(
            torch.randint(self._cut - self.context, (size, 1), generator=generator)
        )

    def held_out_batches(
        self, size: int, limit: int = HELD_OUT_TOKENS
    ) -> Iterator[Batch]:
        """Pieces end to end, so that no token is scored twice: about `limit` tokens, `size` pieces a batch."""
        starts = torch.arange(self._cut, len(self._ids) - self.context, self.context)
        wanted = max(1, limit // self.context)
        if len(starts) > wanted:  # evenly spread, from the first to the last
            starts = starts[
                torch.arange(wanted) * (len(starts) - 1) // max(1, wanted - 1)
            ]
        yield from map(self._pieces, torch.split(starts[:, None], size))

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out ids in pieces of the context's length, about `limit` tokens of them."""
        return [inputs[0].tolist() for inputs, _ in self.held_out_batches(1, limit)]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram. It sees all text before a token; the model at most its context."""
        train, held_out = self._ids[: self._cut], self._ids[self._cut :]
        train, held_out = train[-NGRAM_TOKENS:], held_out[:NGRAM_SCORED]
        return best_order(ngram_losses(train, held_out, vocab_size))

    def _pieces(self, starts: Tensor) -> Batch:  # of starts (B,1)
        pieces = self._ids[starts + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]


class Documents:
    """Lines between boundaries; a batch is a set of different lines, each cut after context + 1 tokens, padded.

    train, held_out  lines to learn from, and to be tested on
    scored_after     a mark, such as "=": of a held-out line only what follows the first of it counts; of a line to
                     learn from the mark counts, too: what stands before cannot be told, and is noise. None counts all
    ways             gives the ways to write a line to learn from; a draw takes one of them
    twice            is a line to learn from drawn twice as often as others?
    """

    def __init__(
        self,
        tokens: Tokens,
        train: Sequence[str],
        held_out: Sequence[str],
        context: int,
        scored_after: str | None = None,
        ways: Callable[[str], Sequence[str]] = lambda line: (line,),
        twice: Callable[[str], bool] = lambda line: False,
    ) -> None:
        if not train or not held_out:
            raise HeadwiseError(
                f"{len(train)} lines to train on and {len(held_out)} held out; pass 10 lines or more"
            )

        def ids(line: str) -> list[int]:
            return tokens.document(line)[: context + 1]

        # An empty document is two boundaries; a tokenizer without one is refused there.
        self.boundary, mark = tokens.document("")[0], scored_after
        self._train = [list(map(ids, ways(line))) for line in train]
        self._held_out = list(map(ids, held_out))
        self._n_ways = max(map(len, self._train))
        drawn_again = [n for n, line in enumerate(train) if twice(line)]
        self._drawn = [*range(len(train)), *drawn_again]
        self._mark = None if mark is None else tokens.encode(mark)[0]
        # [:-1]: a token has to follow the mark, for there to be one that counts.
        if mark is not None and any(
            self._mark not in line[:-1] for line in self._held_out
        ):
            raise HeadwiseError(
                f"context {context} ends before the {mark!r} of a held-out line; pass a larger one"
            )

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        # different ones; all where size is more
        chosen = torch.randperm(len(self._drawn), generator=generator)[:size]
        ways = torch.zeros_like(chosen)
        if self._n_ways > 1:
            ways = torch.randint(self._n_ways, chosen.shape, generator=generator)
        lines = [self._train[self._drawn[n]] for n in chosen.tolist()]
        # A line with fewer ways repeats them.
        return self._padded(
            [
                line[way % len(line)]
                for line, way in zip(lines, ways.tolist(), strict=True)
            ],
            with_mark=True,
        )

    def held_out_batches(
        self, size: int, limit: int = HELD_OUT_TOKENS
    ) -> Iterator[Batch]:
        scored = _some(self._held_out, limit)
        for start in range(0, len(scored), size):
            yield self._padded(scored[start : start + size])

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out lines as ids, with the boundary before and without the one after; about `limit` tokens of them."""
        return [ids[:-1] for ids in _some(self._held_out, limit)]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram on the scored tokens. It knows one way to write each line, the first."""
        train = _some([ways[0] for ways in self._train], NGRAM_TOKENS)
        held_out = _some(self._held_out, NGRAM_SCORED)
        rows = np.concatenate(train), np.concatenate(held_out)
        counted = self._counted(held_out)
        return best_order(
            ngram_losses(*rows, vocab_size, counted=counted, boundary=self.boundary)
        )

    def ngram_right(self, vocab_size: int, order: int) -> int:
        """Of how many held-out lines the n-gram takes every scored token for the likeliest."""
        first = np.concatenate([ways[0] for ways in self._train])
        text = np.concatenate(self._held_out)
        at = np.flatnonzero(self._counted(self._held_out))
        guessed = likeliest(first, text, at, vocab_size, order, self.boundary)
        line_of = np.repeat(range(len(self._held_out)), list(map(len, self._held_out)))
        return len(self._held_out) - len({*line_of[at[guessed != text[at]]]})

    def _counted(self, lines: Sequence[list[int]]) -> Any:
        """For each token of lines, one after another, whether it is scored."""
        scored = [np.arange(len(ids)) >= self._unscored(ids) for ids in lines]
        return np.concatenate(scored)

    def _unscored(self, ids: list[int]) -> int:
        """How many tokens do not count: the first boundary, or all up to the first mark."""
        return ids.index(self._mark) + 1 if self._mark in ids else 1

    def _padded(self, lines: Sequence[list[int]], with_mark: bool = False) -> Batch:
        widest, inputs, targets = max(map(len, lines)), [], []
        for ids in lines:
            more = widest - len(ids)
            # the first token of a line is no target
            start = max(1, self._unscored(ids) - with_mark)
            inputs.append(ids[:-1] + [self.boundary] * more)
            targets.append([IGNORED] * (start - 1) + ids[start:] + [IGNORED] * more)
        return torch.tensor(inputs), torch.tensor(targets)


def _some(lines: list[list[int]], limit: int) -> list[list[int]]:
    """About `limit` tokens of lines: the first, which were drawn as any other."""
    return lines[: max(1, limit * len(lines) // sum(map(len, lines)))]


@dataclass(frozen=True)
class Corpus:
    """Data with the tokenizer made for it."""

    name: str
    tokens: Tokens
    data: Stream | Documents
    example: str  # a held-out text to look at: a line, or the first tokens of the held-out part
    cells: tuple[verbs.Cell, ...] = ()  # held-out cells of the verb corpus


# a run reads it to train, and again to look at what was held out; the latest two stay in memory
@lru_cache(2)
def verb_corpus(seed: int, context: int, core: bool = False) -> Corpus:
    """The built-in corpus, or with `core` a small part of it, tokenised into words; `seed` draws the held-out lines.

    Of these only the Spanish half counts, which the English half determines.

    The persons of a conjugation line come in a new order each time. In one fixed order no other form ever follows the
    third one, so a model learns to write it and hardly to read it (LOG.md has the figures). English conjugations are
    drawn half as often as the rest: held-out cells need the Spanish forms.
    """
    corpus = verbs.corpus(seed, core=core)
    tokens = Tokens.words(corpus.train_lines)
    data = Documents(
        tokens,
        corpus.train_lines,
        corpus.held_out_lines,
        context,
        "=",
        verbs.clause_orders,
        verbs.has_spanish,
    )
    # In a conditional `would` decides a tense that neither pronoun nor verb tells: heads have most to show there. Of
    # those one with "he", as in the pages that explain a line; of equals `max` takes the first.
    example = max(
        corpus.held_out_cells,
        key=lambda cell: (cell.tense == "conditional", cell.person == "he"),
    )
    return Corpus(verbs.NAME, tokens, data, example.line, corpus.held_out_cells)


def text_corpus(
    text: Sources, lines: bool, context: int, seed: int, tokenizer: str | None = None
) -> Corpus:
    """Files of text: a stream, or a document a line; characters, or a tokenizer file's tokens.

    Of lines a tenth is drawn and held out, of a stream the last tenth.

    lines  is each line a document? Without it the text is one stream
    seed   draws which lines are held out; a stream does not ask
    """
    whole = text.text()
    if tokenizer is None:
        tokens = Tokens.characters(whole, boundary=lines)
    else:
        tokens = Tokens.from_file(tokenizer)
    if not lines:
        stream = Stream(
            [i for piece in pieces(whole) for i in tokens.encode(piece)], context
        )
        example = tokens.decode(stream.held_out_documents(1)[0][:EXAMPLE_TOKENS])
        return Corpus(text.name, tokens, stream, example)
    documents = [line.strip() for line in whole.splitlines() if line.strip()]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(documents), generator=generator).tolist()
    cut = int(len(documents) * (1 - HELD_OUT_SHARE))
    documents = [documents[n] for n in drawn]
    held_out = documents[cut:]
    data = Documents(tokens, documents[:cut], held_out, context)
    # Without its boundaries, and as much as fits into the context behind one.
    return Corpus(
        text.name,
        tokens,
        data,
        tokens.decode(tokens.encode(held_out[0])[: context - 1]),
    )
