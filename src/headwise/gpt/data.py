"""What a model learns from and what it is tested on: a stream of tokens, or documents one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import read_text
from headwise.gpt import verbs
from headwise.gpt.ngram import NGramModel, best_order, ngram_losses
from headwise.gpt.tokens import Tokens

IGNORED = -100  # a target that does not count
HELD_OUT_SHARE = 0.1
EXAMPLE_TOKENS = 48
HELD_OUT_TOKENS = 100_000  # about so many are scored at most, evenly spread over the held-out part

Batch = tuple[Tensor, Tensor]  # inputs (B,T), targets (B,T)


class Stream:
    """One long text; a batch is a set of random pieces of it. The last tenth is held out."""

    def __init__(self, tokens: Tokens, text: str, context: int) -> None:
        ids = torch.tensor(tokens.encode(text))
        cut = int(len(ids) * (1 - HELD_OUT_SHARE))
        self.context, self.digest = context, sha256(text.encode()).hexdigest()
        self.train, self.held_out = ids[:cut], ids[cut:]
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if len(part) <= context:
                raise HeadwiseError(
                    f"the {name} part of the text has {len(part)} tokens, fewer than context {context} + 1; "
                    f"pass a longer text or a smaller --context"
                )

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        starts = torch.randint(len(self.train) - self.context, (size, 1), generator=generator)
        pieces = self.train[starts + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def held_out_batches(self, size: int, limit: int = HELD_OUT_TOKENS) -> Iterator[Batch]:
        """Pieces side by side, so that each token is scored at most once."""
        starts = torch.arange(0, len(self.held_out) - self.context, self.context)
        wanted = max(1, limit // self.context)
        if len(starts) > wanted:
            starts = starts[torch.arange(wanted) * (len(starts) - 1) // max(1, wanted - 1)]
        for some in torch.split(starts, size):
            pieces = self.held_out[some[:, None] + torch.arange(self.context + 1)]
            yield pieces[:, :-1], pieces[:, 1:]

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out ids in pieces of the context's length, about `limit` tokens of them."""
        return [inputs[0].tolist() for inputs, _ in self.held_out_batches(1, limit)]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram. It sees all text before a token; the model at most its context."""
        return best_order(ngram_losses(self.train.numpy(), self.held_out.numpy(), vocab_size))


def _as_it_stands(line: str) -> tuple[str, ...]:
    return (line,)


class Documents:
    """Lines between boundaries; a batch is a set of different whole lines, padded.

    In scored lines, only what follows the token `scored_after` counts, if there is one. `ways` gives the ways to write
    a training line, all of one length: each time that a line is drawn, so is one of them.
    """

    def __init__(
        self,
        tokens: Tokens,
        train: Sequence[str],
        held_out: Sequence[str],
        context: int,
        scored_after: str | None = None,
        ways: Callable[[str], Sequence[str]] = _as_it_stands,
    ) -> None:
        if tokens.boundary is None:
            raise HeadwiseError("documents need a tokenizer with a boundary token between them")
        if not train or not held_out:
            raise HeadwiseError(f"{len(train)} lines to train on and {len(held_out)} held out; pass 10 lines or more")
        self.boundary, self.context = tokens.boundary, context
        self.digest = sha256("\n".join((*train, "", *held_out)).encode()).hexdigest()
        self._train = [tokens.document(line)[: context + 1] for line in train]
        self._held_out = [tokens.document(line)[: context + 1] for line in held_out]
        self._scored_after = None if scored_after is None else tokens.encode(scored_after)[0]
        if self._scored_after is not None and any(self._scored_after not in ids[:-1] for ids in self._held_out):
            raise HeadwiseError(
                f"context {context} ends before the {scored_after!r} of a held-out line; pass a larger one"
            )
        written = [ways(line) for line in train]
        self._n_ways = max(map(len, written))
        texts = (text for each in written for text in islice(cycle(each), self._n_ways))
        self._padded = self._pad([tokens.document(text)[: context + 1] for text in texts])
        self._lengths = torch.tensor([len(ids) for ids in self._train])

    def batch(self, generator: torch.Generator, size: int) -> Batch:
        chosen = torch.randperm(len(self._train), generator=generator)[:size]
        longest = int(self._lengths[chosen].max())
        if self._n_ways > 1:
            chosen = chosen * self._n_ways + torch.randint(self._n_ways, chosen.shape, generator=generator)
        inputs, targets = self._padded
        return inputs[chosen, : longest - 1], targets[chosen, : longest - 1]

    def held_out_batches(self, size: int, limit: int = HELD_OUT_TOKENS) -> Iterator[Batch]:
        count, n_tokens = len(self._held_out), sum(map(len, self._held_out))
        count = count if n_tokens <= limit else max(1, limit * count // n_tokens)
        for start in range(0, count, size):
            lines = self._held_out[start : min(start + size, count)]
            inputs, targets = self._pad(lines)
            for row, ids in enumerate(lines):
                targets[row, : self._unscored(ids) - 1] = IGNORED
            yield inputs, targets

    def held_out_documents(self, limit: int) -> list[list[int]]:
        """Held-out lines as ids, with the boundary before and without the one after; about `limit` tokens of them."""
        ends = np.cumsum([len(ids) for ids in self._held_out])
        return [ids[:-1] for ids in self._held_out[: max(1, int(np.searchsorted(ends, limit)))]]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram on the scored tokens."""
        train, held_out = np.concatenate(self._train), np.concatenate(self._held_out)
        counted = np.concatenate([np.arange(len(ids)) >= self._unscored(ids) for ids in self._held_out])
        return best_order(ngram_losses(train, held_out, vocab_size, counted=counted, boundary=self.boundary))

    def ngram_model(self, vocab_size: int, order: int) -> NGramModel:
        return NGramModel(np.concatenate(self._train), vocab_size, order, boundary=self.boundary)

    def _unscored(self, ids: list[int]) -> int:
        """How many tokens do not count: the first boundary, or all up to the first `scored_after`."""
        return 1 if self._scored_after is None else ids.index(self._scored_after) + 1

    def _pad(self, lines: Sequence[list[int]]) -> Batch:
        longest = max(map(len, lines))
        inputs = torch.full((len(lines), longest - 1), self.boundary)
        targets = torch.full((len(lines), longest - 1), IGNORED)
        for row, ids in enumerate(lines):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            targets[row, : len(ids) - 1] = torch.tensor(ids[1:])
        return inputs, targets


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
    data = Documents(tokens, corpus.train_lines, corpus.held_out_lines, context, "=", ways)
    example = max(corpus.held_out_cells, key=lambda cell: cell.tense == "conditional").line  # `would` decides a tense
    return Corpus("the verb corpus", tokens, data, example, corpus.held_out_cells)


def text_corpus(
    path: Path, lines: bool, context: int, seed: int, tokenizer: Path | None = None, hold_out: bool = True
) -> Corpus:
    """A text file: a stream, or a document a line; characters, or the tokens of a tokenizer file.

    hold_out  of lines, is a tenth kept from training? Without it all of them are learned from, and looked at afterwards
    """
    text = read_text(path)
    documents = [line.strip() for line in text.splitlines() if line.strip()] if lines else []
    if tokenizer:
        tokens = Tokens.from_file(tokenizer)
    else:
        tokens = Tokens.characters("".join(documents) if lines else text, boundary=lines)
    if not lines:
        stream = Stream(tokens, text, context)
        example = tokens.decode(stream.held_out[: min(context, EXAMPLE_TOKENS)].tolist())
        return Corpus(path.name, tokens, stream, example)
    if not hold_out:
        return Corpus(path.name, tokens, Documents(tokens, documents, documents, context), documents[0])
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = int(len(documents) * (1 - HELD_OUT_SHARE))
    train, held_out = [documents[i] for i in order[:cut]], [documents[i] for i in order[cut:]]
    example = tokens.decode(tokens.encode(held_out[0])[: context - 1])
    return Corpus(path.name, tokens, Documents(tokens, train, held_out, context), example)
