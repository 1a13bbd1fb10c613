"""What a model learns from and what it is tested on: a stream of tokens, or documents one line each.

It is held against an n-gram, interpolated Kneser-Ney, the counting model that a small transformer has to beat.
With h the context, h' the context without its first token, and k the level (length of context + 1):

    P_k(w | h) = ( max(c_k(h w) - D_k, 0) + D_k * types_k(h) * P_{k-1}(w | h') ) / c_k(h)       P_0 = 1 / vocabulary

    c_k(h w)     at the model's own order: how often w came after h. Below it, the continuation count: how many
                 different tokens came before `h w`; an occurrence with nothing before it counts as one more
    c_k(h)       the sum of c_k(h w) over w; types_k(h) is the number of different w that came after h
    D_k          n1 / (n1 + 2 n2), where n1 and n2 are the numbers of grams whose count c_k is 1 and 2

A context never seen hands its question to the next shorter one. The probabilities of all w sum to 1.

Sources: R. Kneser and H. Ney, "Improved backing-off for m-gram language modeling", 1995; S. F. Chen and J. Goodman,
"An empirical study of smoothing techniques for language modeling", 1999 (the interpolated form, the estimate of D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwise.corpus import verbs
from headwise.corpus.tokens import Ids, Tokens
from headwise.errors import HeadwiseError
from headwise.files import Sources, pieces

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
NGRAM_TOKENS = 2**22
NGRAM_SCORED = 2**19

Lines = list[list[int]]  # ids of documents
Batch = tuple[Tensor, Tensor]  # inputs (B,T), targets (B,T): what follows each input


class Stream:
    """One long text; a batch is a set of random pieces of it. The last tenth is held out."""

    def __init__(self, ids: Ids, context: int) -> None:
        # where the held-out part begins
        self._ids = torch.tensor(ids)
        self._cut = int(len(ids) * (1 - HELD_OUT_SHARE))
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

    def held_out_documents(self, limit: int) -> Lines:
        """Held-out ids in pieces of the context's length, about `limit` tokens of them."""
        return [inputs[0].tolist() for inputs, _ in self.held_out_batches(1, limit)]

    def ngram(self, vocab_size: int) -> tuple[int, float]:
        """Order and loss of the best n-gram. It sees all text before a token; the model at most its context."""
        train = self._ids[: self._cut]
        held_out = self._ids[self._cut :]
        train = train[-NGRAM_TOKENS:]
        held_out = held_out[:NGRAM_SCORED]
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
        self.boundary = tokens.document("")[0]
        mark = scored_after
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

    def held_out_documents(self, limit: int) -> Lines:
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

    def _counted(self, lines: Lines) -> Any:
        """For each token of lines, one after another, whether it is scored."""
        scored = [np.arange(len(ids)) >= self._unscored(ids) for ids in lines]
        return np.concatenate(scored)

    def _unscored(self, ids: list[int]) -> int:
        """How many tokens do not count: the first boundary, or all up to the first mark."""
        return ids.index(self._mark) + 1 if self._mark in ids else 1

    def _padded(self, lines: Lines, with_mark: bool = False) -> Batch:
        widest = max(map(len, lines))
        inputs = []
        targets = []
        for ids in lines:
            more = widest - len(ids)
            # the first token of a line is no target
            start = max(1, self._unscored(ids) - with_mark)
            inputs.append(ids[:-1] + [self.boundary] * more)
            targets.append([IGNORED] * (start - 1) + ids[start:] + [IGNORED] * more)
        return torch.tensor(inputs), torch.tensor(targets)


def _some(lines: Lines, limit: int) -> Lines:
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


# The n-gram baseline.


# ids of tokens, of contexts and of grams
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def ngram_losses(
    train: npt.ArrayLike,
    held_out: npt.ArrayLike,
    vocab_size: int,
    order: int = 6,
    counted: npt.ArrayLike | None = None,
    boundary: int | None = None,
) -> dict[int, float]:
    """For each order up to `order`, the mean cross-entropy in nats over the held-out tokens that are `counted` (all).

    `boundary` is the token that begins and ends documents. A context reaches back to the latest boundary before
    the token, that boundary included, and no further. A boundary at the very start, or right after another one,
    opens a document: nothing predicts it, so it is not learned from, and by default it is not counted.

    The default order is a round choice: of the orders up to 6 it is the best for a million characters of plays, and
    more take more time and memory.
    """
    at = None if counted is None else np.flatnonzero(counted)
    asked = _rows(held_out, order, boundary, at)
    climb = _climb(_rows(train, order, boundary), asked, vocab_size)
    return {level: float(-np.log(p).mean()) for level, p in enumerate(climb, start=1)}


def best_order(losses: Mapping[int, float]) -> tuple[int, float]:
    """The order with the lowest loss ON the held-out tokens themselves (of equal ones the first), and that loss.

    This choice is in the baseline's favour: it has looked at the tokens it is judged on, and a model that is compared
    with it has no such advantage. A model that wins has therefore beaten every order.
    """
    return min(losses.items(), key=lambda item: item[1])


def likeliest(
    train: npt.ArrayLike,
    text: npt.ArrayLike,
    at: Ints,
    vocab_size: int,
    order: int,
    boundary: int,
) -> Ints:
    """The most probable token at each of these places of a text, by what stands before it; of equals the lowest id."""
    asked = _rows(text, order, boundary, np.repeat(at, vocab_size))
    asked.back[0] = np.tile(np.arange(vocab_size), len(at))
    # the last is that of the model's own order
    *_, p = _climb(_rows(train, order, boundary), asked, vocab_size)
    return p.reshape(-1, vocab_size).argmax(1)


class _Rows(NamedTuple):
    """A row for each token asked about: back[0] is that token, back[k] the one k places before it if `reach` >= k."""

    back: Ints  # (order, rows)
    reach: Ints  # (rows,): how many tokens of its document stand before it, at most order - 1


def _rows(
    text: npt.ArrayLike,
    order: int,
    boundary: int | None,
    at: Ints | None = None,
) -> _Rows:
    """The tokens at these places of a text; by default all that something predicts."""
    tokens = np.asarray(text, np.int64)
    ends = tokens == boundary  # nowhere, where that is None
    if at is None:
        # A boundary opens a document where the token before is one, too, or there is none.
        at = np.flatnonzero(~(ends & np.append(True, ends)[:-1]))
    # The place of the latest boundary up to each token; 0 where there is none.
    latest = np.maximum.accumulate(np.where(ends, np.arange(tokens.size), 0))
    # a token's own place does not count: the end of a document still sees it
    start = np.append(0, latest)[at]
    # max(.., 0): what lies before the first token is never asked for, by `reach`, and any token fills its place.
    back = tokens[np.maximum(at - np.arange(order)[:, None], 0)]
    return _Rows(back, np.minimum(at - start, order - 1))


def _climb(train: _Rows, asked: _Rows, vocab_size: int) -> Iterator[Floats]:
    """For orders 1, 2, ...: the probability that a model of that order gives each row that is asked about.

    Contexts and grams of both texts are numbered together, and counted in `train` alone. The model of an order counts
    occurrences at its own level and continuations below, so each level has both.
    """
    n = train.reach.size
    order = len(train.back)
    word = np.append(train.back[0], asked.back[0])
    reach = np.append(train.reach, asked.reach)
    lower = np.full(asked.reach.size, 1 / vocab_size)  # P_0
    context = np.zeros_like(word)  # the empty one
    for k in range(order):  # level k + 1: a token and the k before it
        if k:  # one token more to the left
            context = _numbered(np.append(train.back[k], asked.back[k]), context)
            # the others share one that is not counted
            context[reach < k] = context.max() + 1
        gram = _numbered(context, word)
        counted = gram[:n]
        gram_asked = gram[n:]
        n_grams = gram.max() + 1
        context_of = np.empty(n_grams, np.int64)
        context_of[gram] = context
        # the model whose own order is k + 1 ends here
        count = np.bincount(counted[train.reach >= k], minlength=n_grams)
        yield _interpolated(count, context_of, gram_asked, lower)
        if k + 1 < order:
            # with a token before the gram
            further = train.reach > k
            pairs = train.back[k + 1][further] * n_grams + counted[further]
            count = np.bincount(np.unique(pairs) % n_grams, minlength=n_grams)
            count += np.bincount(counted[train.reach == k], minlength=n_grams)
            lower = _interpolated(count, context_of, gram_asked, lower)


def _interpolated(count: Ints, context_of: Ints, gram: Ints, lower: Floats) -> Floats:
    """P_k of each gram from P_{k-1}, `lower`; where its context was never counted that answers alone.

    count, context_of  of each gram
    """
    n1, n2 = ((count == times).sum() for times in (1, 2))
    # With no gram of count 1 the estimate is 0 and an unseen token gets no probability at all. Half a count is a
    # round choice: more of it gives more to what was not seen.
    discount = n1 / (n1 + 2 * n2) if n1 else 0.5
    context = context_of[gram]
    total = np.bincount(context_of, count)[context]
    types = np.bincount(context_of, count > 0)[context]
    kept = np.maximum(count[gram] - discount, 0)
    here = (kept + discount * types * lower) / np.maximum(total, 1)
    return np.where(total > 0, here, lower)


def _numbered(high: Ints, low: Ints) -> Ints:
    """For each pair of ids the number of the pair, from 0: one for equal pairs."""
    _, numbers = np.unique(high * (low.max() + 1) + low, return_inverse=True)
    return numbers
