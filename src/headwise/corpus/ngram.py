"""The n-gram baseline: interpolated Kneser-Ney, the counting model that a small transformer has to beat.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# ids of tokens, of contexts and of grams; -1 is the unknown
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


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
    tokens = np.asarray(held_out, np.int64)
    chosen = ~_opens(tokens, boundary) if counted is None else np.asarray(counted)
    climb = NGramModel(train, vocab_size, order, boundary).climb(
        _windows(tokens, order, boundary, chosen)
    )
    return {level: float(-np.log(p).mean()) for level, p in enumerate(climb, start=1)}


def best_order(losses: Mapping[int, float]) -> tuple[int, float]:
    """The order with the lowest loss ON the held-out tokens themselves (of equal ones the first), and that loss.

    This choice is in the baseline's favour: it has looked at the tokens it is judged on, and a model that is compared
    with it has no such advantage. A model that wins has therefore beaten every order.
    """
    return min(losses.items(), key=lambda item: item[1])


class NGramModel:
    """Interpolated Kneser-Ney of one order, ready to be asked."""

    def __init__(
        self,
        train: npt.ArrayLike,
        vocab_size: int,
        order: int,
        boundary: int | None = None,
    ) -> None:
        tokens = np.asarray(train, np.int64)
        events = ~_opens(tokens, boundary)  # the tokens that something predicts
        self.vocab_size, self.order, self.boundary = vocab_size, order, boundary
        self._levels = _count(_windows(tokens, order, boundary, events), vocab_size)

    def probabilities(self, context: Sequence[int] | Ints) -> Floats:
        """P(w | context) for every w, shape (vocab_size,); only as much context is read as the order allows."""
        # a place for the token to come, whatever it is
        stream = np.append(np.asarray(context, np.int64), 0)
        last = np.arange(stream.size) == stream.size - 1
        asked = _windows(stream, self.order, self.boundary, last)
        # One row per token w, all with the same context.
        back = [np.repeat(column, self.vocab_size) for column in asked.back[1:]]
        rows = _Windows(
            [np.arange(self.vocab_size), *back], np.repeat(asked.reach, self.vocab_size)
        )
        *_, p = self.climb(rows)  # the last is that of the model's own order
        return p

    def generate(
        self, prompt: Sequence[int], n_tokens: int, stop: int | None = None
    ) -> list[int]:
        """The most probable next token, again and again: up to `n_tokens` ids, without `stop`, at which it ends.

        Of equally probable tokens the lowest id is taken.
        """
        ids = list(prompt)
        for _ in range(n_tokens):
            token = int(self.probabilities(ids).argmax())
            if token == stop:
                break
            ids.append(token)
        return ids[len(prompt) :]

    def climb(self, rows: _Windows) -> Iterator[Floats]:
        """For orders 1, 2, ... up to the model's own: the probability that a model of that order gives each row.

        The model of an order counts occurrences at its own level and continuations below, so each level has both.
        """
        lower = np.full(rows.reach.size, 1 / self.vocab_size)  # P_0
        # ids of the contexts of k tokens; the empty one is 0
        context = np.zeros(rows.reach.size, np.int64)
        for k, level in enumerate(self._levels):
            if k:  # one token more to the left of a context that is known
                context = _find(
                    level.context_keys,
                    _join(rows.back[k], context, self._levels[k - 1].context_keys.size),
                )
            context[rows.reach < k] = -1
            gram = _find(level.gram_keys, _join(context, rows.back[0], self.vocab_size))
            # the model whose own order is k + 1 ends here
            yield level.raw.interpolate(gram, context, lower)
            lower = level.continuation.interpolate(gram, context, lower)


@dataclass(frozen=True)
class _Windows:
    """One row per token asked about: back[0] is that token, back[k] the one k places before it if `reach` >= k.

    `reach` is how many tokens of its document stand before it, at most order - 1. Beyond it back[k] is any token.
    """

    back: list[Ints]
    reach: Ints


@dataclass(frozen=True)
class _Counts:
    """One kind of count at one level: of occurrences, or of continuations."""

    of_gram: Ints  # c(h w)
    of_context: Ints  # c(h)
    types: Ints  # of each context
    discount: float  # D

    @classmethod
    def tally(cls, of_gram: Ints, context_of_gram: Ints) -> _Counts:
        n1, n2 = int((of_gram == 1).sum()), int((of_gram == 2).sum())
        # With no gram of count 1 the estimate is 0 and an unseen token gets no probability at all. Half a count is a
        # round choice: more of it gives more to what was not seen.
        discount = n1 / (n1 + 2 * n2) if n1 else 0.5
        of_context = np.bincount(context_of_gram, weights=of_gram).astype(np.int64)
        types = np.bincount(context_of_gram)
        # One more entry at the end answers for the id -1, the unknown. Its 1 is there to be divided by.
        return cls(
            np.append(of_gram, 0),
            np.append(of_context, 1),
            np.append(types, 0),
            discount,
        )

    def interpolate(self, gram: Ints, context: Ints, lower: Floats) -> Floats:
        """P_k of each row from P_{k-1}, `lower`; where the context is unknown that answers alone."""
        kept = np.maximum(self.of_gram[gram] - self.discount, 0)
        here = (kept + self.discount * self.types[context] * lower) / self.of_context[
            context
        ]
        return np.where(context >= 0, here, lower)


@dataclass(frozen=True)
class _Level:
    """The grams of one length. The tables hold sorted keys made by `_join`; a key's place in its table is its id."""

    context_keys: Ints  # of (first token, id of the remaining context one level below)
    gram_keys: Ints  # of (id of the context, last token)
    raw: _Counts
    continuation: _Counts


def _count(rows: _Windows, vocab_size: int) -> list[_Level]:
    """The tables of every level, the shortest grams first."""
    levels: list[_Level] = []
    # level 1 has one context, the empty one
    context = np.zeros(rows.reach.size, np.int64)
    context_keys = np.zeros(1, np.int64)
    for k, token_k in enumerate(rows.back):  # level k + 1: a token and the k before it
        seen = rows.reach >= k  # the rows with k tokens before the last
        if k:
            keys = _join(token_k, context, levels[-1].context_keys.size)
            context_keys = np.unique(keys[seen])
            context = np.where(seen, _find(context_keys, keys), -1)
        gram_keys, gram = np.unique(
            _join(context, rows.back[0], vocab_size)[seen], return_inverse=True
        )
        raw = np.bincount(gram, minlength=gram_keys.size)
        # with a token before the gram; never so at the last level
        further = rows.reach[seen] > k
        continuation = np.bincount(gram[~further], minlength=gram_keys.size)
        if further.any():
            before = rows.back[k + 1][seen][further]
            distinct = np.unique(_join(before, gram[further], gram_keys.size))
            # `%` and `//` undo `_join`: they give the low and the high one of the two ids.
            continuation += np.bincount(
                distinct % gram_keys.size, minlength=gram_keys.size
            )
        context_of_gram = gram_keys // vocab_size
        counts = (
            _Counts.tally(of_gram, context_of_gram) for of_gram in (raw, continuation)
        )
        levels.append(_Level(context_keys, gram_keys, *counts))
    return levels


def _join(high: Ints, low: Ints, low_size: int) -> Ints:
    """One key for a pair of ids, of which the second is below `low_size`; unknown (-1) if either is."""
    return np.where((high >= 0) & (low >= 0), high * low_size + low, -1)


def _find(keys: Ints, wanted: Ints) -> Ints:
    """The place of each wanted key in the sorted table, -1 where it is not there."""
    # keys.size for what is above all; -1 is put there to be compared with
    place = np.searchsorted(keys, wanted)
    is_there = (wanted >= 0) & (np.append(keys, -1)[place] == wanted)
    return np.where(is_there, place, -1)


def _windows(tokens: Ints, order: int, boundary: int | None, chosen: Bools) -> _Windows:
    """The chosen tokens with up to `order` - 1 tokens before each, none from before its document."""
    # The place of the latest boundary up to each token; 0 where there is none. No token equals None.
    latest = np.maximum.accumulate(
        np.where(tokens == boundary, np.arange(tokens.size), 0)
    )
    # a token's own place does not count: the end of a document still sees it
    start = np.append(0, latest[:-1])
    at = np.flatnonzero(chosen)
    # max(.., 0): what lies before the first token is never asked for, by `reach`, and any token fills its place.
    return _Windows(
        [tokens[np.maximum(at - k, 0)] for k in range(order)],
        np.minimum(at - start[at], order - 1),
    )


def _opens(tokens: Ints, boundary: int | None) -> Bools:
    """Which tokens are boundaries that open a document without ending one."""
    at = tokens == boundary  # nowhere, where that is None
    # and the token before is one, too, or there is none
    opens: Bools = at & np.append(True, at)[:-1]
    return opens
