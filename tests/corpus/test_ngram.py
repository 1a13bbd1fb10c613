"""The n-gram baseline against a direct transcription of its formula with dictionaries, and against facts by hand."""

import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from headwise.corpus.ngram import best_order, continuations, ngram_losses

V = 7
BOUNDARY = 3


def stream(size: int, seed: int) -> np.ndarray:
    """Tokens with some structure: skewed, and each drawn towards the one before. Token V - 1 never occurs."""
    rng = np.random.default_rng(seed)
    tokens = [0]
    for fresh in rng.choice(V - 1, size - 1, p=[0.35, 0.25, 0.15, 0.12, 0.08, 0.05]):
        tokens.append(int(tokens[-1] * 2 % (V - 1)) if rng.random() < 0.5 else int(fresh))
    return np.array(tokens)


class ByTheBook:
    """Interpolated Kneser-Ney, one gram at a time. Slow, and short enough to be checked by eye."""

    def __init__(self, train: list[int], order: int, boundary: int | None) -> None:
        self.order, self.boundary = order, boundary
        raw: dict[tuple[int, ...], int] = defaultdict(int)
        before: dict[tuple[int, ...], set[object]] = defaultdict(set)
        for i, token in enumerate(train):
            start = self.start(train[:i])
            if boundary is not None and token == boundary and (i == 0 or train[i - 1] == boundary):
                continue
            for first in range(start, i + 1):
                gram = tuple(train[first : i + 1])
                raw[gram] += 1
                before[gram].add(train[first - 1] if first > start else ("nothing before occurrence", i))
        self.count = {
            gram: raw[gram] if len(gram) == order else len(before[gram]) for gram in raw if len(gram) <= order
        }

    def start(self, past: list[int]) -> int:
        return max((j for j, token in enumerate(past) if token == self.boundary), default=0)

    def discount(self, k: int) -> float:
        n1, n2 = (sum(len(gram) == k and c == n for gram, c in self.count.items()) for n in (1, 2))
        return n1 / (n1 + 2 * n2) if n1 else 0.5

    def probability(self, past: list[int], token: int) -> float:
        context = past[self.start(past) :]
        return self.recurse(tuple(context[max(0, len(context) - self.order + 1) :]), token)

    def recurse(self, h: tuple[int, ...], token: int) -> float:
        lower = self.recurse(h[1:], token) if h else 1 / V
        after = {gram[-1]: c for gram, c in self.count.items() if gram[:-1] == h}
        if not after:
            return lower
        discount = self.discount(len(h) + 1)
        kept = max(after.get(token, 0) - discount, 0)
        return (kept + discount * len(after) * lower) / sum(after.values())


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("boundary", [None, BOUNDARY])
def test_losses_and_continuations_equal_the_transcription(order: int, boundary: int | None) -> None:
    train, held_out = stream(211, seed=1), stream(53, seed=2)
    held_out[29] = V - 1  # never seen in training
    book = ByTheBook(train.tolist(), order, boundary)
    for i, token in enumerate(held_out.tolist()):
        loss = ngram_losses(train, held_out, V, order, np.arange(53) == i, boundary)[order]
        assert math.isclose(math.exp(-loss), book.probability(held_out[:i].tolist(), token), rel_tol=1e-12)
    prompts = [[BOUNDARY, *held_out[i : i + 3].tolist()] for i in range(29)]
    book = ByTheBook(train.tolist(), order, BOUNDARY)
    for prompt, ids in zip(prompts, continuations(train, prompts, 5, V, order, BOUNDARY), strict=True):
        for token in [*ids, BOUNDARY][:5]:
            p = [book.probability(prompt, w) for w in range(V)]
            assert math.isclose(sum(p), 1, rel_tol=1e-12) and math.isclose(p[token], max(p), rel_tol=1e-12)
            prompt.append(token)


def test_orders_are_measured_together() -> None:
    train, held_out = stream(211, seed=3), stream(53, seed=4)
    together = ngram_losses(train, held_out, V, 5, boundary=BOUNDARY)
    assert list(together) == [1, 2, 3, 4, 5]
    for order, loss in together.items():
        assert ngram_losses(train, held_out, V, order, boundary=BOUNDARY)[order] == loss


def test_a_bigram_worked_by_hand() -> None:
    # Tokens 0 1 0 1 0 2 0 1, vocabulary 3. Level 2 counts: 01 three times, 10 twice, 02 and 20 once each.
    # D_2 = 2 / (2 + 2 * 1) = 1/2. Level 1 counts what comes before: 0 after {nothing, 1, 2}, 1 after {0}, 2 after {0}.
    # n1 = 2, n2 = 0, so D_1 = 1: P_1(0) = (3 - 1 + 3/3) / 5 = 3/5, P_1(1) = P_1(2) = (0 + 3/3) / 5 = 1/5.
    # After 0 (count 4, two types): P(1) = (3 - 1/2 + 1/2 * 2 * 1/5) / 4.
    train = [0, 1, 0, 1, 0, 2, 0, 1]
    first = [math.exp(-ngram_losses(train, [w], 3, 2)[2]) for w in range(3)]
    np.testing.assert_allclose(first, [3 / 5, 1 / 5, 1 / 5], rtol=1e-12)
    after_0 = [Fraction(3, 5) / 4, (Fraction(5, 2) + Fraction(1, 5)) / 4, (Fraction(1, 2) + Fraction(1, 5)) / 4]
    p = [math.exp(-ngram_losses(train, [0, w], 3, 2, [False, True])[2]) for w in range(3)]
    np.testing.assert_allclose(p, [float(x) for x in after_0], rtol=1e-12)


def test_counts_and_losses() -> None:
    train, held_out = stream(211, seed=7), stream(53, seed=8)
    mask = np.random.default_rng(9).random(53) < 0.3
    total = ngram_losses(train, held_out, V, 3)[3]
    part, rest = (ngram_losses(train, held_out, V, 3, counted=m)[3] for m in (mask, ~mask))
    assert math.isclose(total, (part * mask.sum() + rest * (~mask).sum()) / 53, rel_tol=1e-12)
    assert part != rest
    assert best_order({3: 1.5, 2: 1.5, 7: 1.75}) == (3, 1.5)
