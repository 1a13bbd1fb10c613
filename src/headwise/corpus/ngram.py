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

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    n, order = train.reach.size, len(train.back)
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
        counted, gram_asked = gram[:n], gram[n:]
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
