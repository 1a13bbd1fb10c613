"""Which key/value heads share: neighbours, or those whose sharing is expected to cost least.

The cost of a group is the error that pooling it, in the way that is asked for, is expected to make in the layer's
output. Scores that err by 1 or more in root mean square are taken to lose what the head adds to the residual stream,
smaller errors that share of it; values add an error of their own. All of it follows from second moments, with the token
that asks taken as independent of the token that answers. That heads look alike says less: a head that adds little may
be pooled with any other, and grouping by relative similarity was worse than chance where it was tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.models.weights import AttentionWeights
from headwise.reshape.moments import activations, keys, queries

Groups = tuple[tuple[int, ...], ...]
Pool = Callable[[AttentionWeights, Tensor, int], AttentionWeights]  # weights, root of the moments, number of groups
GROUPINGS = ("adjacent", "best")
EXACT = 200  # groups at most that are priced one by one; above, a group costs the sum of its pairs


def adjacent(n_heads: int, n_groups: int) -> Groups:
    """Neighbours share: heads 0 to r-1, then r to 2r-1, and so on."""
    size = n_heads // n_groups
    return tuple(tuple(range(n * size, (n + 1) * size)) for n in range(n_groups))


def best(weights: AttentionWeights, root: Tensor, n_groups: int, pool: Pool) -> Groups:
    """Groups of equal size whose pooling costs least, as far as exchanging heads finds them."""
    size = weights.n_kv_heads // n_groups

    @cache
    def exact(group: tuple[int, ...]) -> float:
        return pooling_error(weights, root, group, pool)

    def by_pairs(group: tuple[int, ...]) -> float:
        return sum(exact(pair) for pair in itertools.combinations(group, 2))

    small = math.comb(weights.n_kv_heads, size) <= EXACT
    return cheapest(weights.n_kv_heads, n_groups, exact if small or size == 2 else by_pairs)


def cheapest(n_heads: int, n_groups: int, price: Callable[[tuple[int, ...]], float]) -> Groups:
    """Groups of equal size with a small sum of prices; finding the smallest is a hard problem (balanced partition).

    Two heads of different groups are exchanged as long as that helps, once from neighbours and once from heads dealt
    out like cards; the better end wins.
    """
    dealt = tuple(tuple(range(n, n_heads, n_groups)) for n in range(n_groups))
    ends = [_exchanged(start, price) for start in (adjacent(n_heads, n_groups), dealt)]
    return tuple(sorted(min(ends, key=lambda groups: sum(map(price, groups)))))


def _exchanged(groups: Groups, price: Callable[[tuple[int, ...]], float]) -> Groups:
    now = list(groups)
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(now)), 2):
            for i, j in itertools.product(now[a], now[b]):
                if i in now[a] and j in now[b]:  # still there: an exchange may have moved them
                    first = tuple(sorted({*now[a], j} - {i}))
                    second = tuple(sorted({*now[b], i} - {j}))
                    before, after = price(now[a]) + price(now[b]), price(first) + price(second)
                    if after < before * (1 - 1e-9):  # more than rounding
                        now[a], now[b], improved = first, second, True
    return tuple(now)


def pooling_error(weights: AttentionWeights, root: Tensor, group: Sequence[int], pool: Pool) -> float:
    """The expected squared error of the layer's output when these key/value heads become one."""
    r = weights.group_size
    before = weights.selected([g * r + i for g in group for i in range(r)], group)
    after = pool(before, root, 1)
    added, error = _outputs(before, after, root)
    return float((_score_errors(before, after, root).clamp(max=1) * added + error).sum())


def _outputs(before: AttentionWeights, after: AttentionWeights, root: Tensor) -> tuple[Tensor, Tensor]:
    """(H,) each: E|W_O v|^2, and E|W_O v - W_O' v'|^2, of every query head."""
    ours, theirs = before.wo.permute(1, 0, 2), after.wo.permute(1, 0, 2)
    v, w = (_for_queries(activations(x.wv, x.bv, root), before.n_heads) for x in (before, after))

    def mean(left: Tensor, x: Tensor, right: Tensor, y: Tensor) -> Tensor:
        return ((left.mT @ right) * (x @ y.mT)).sum((1, 2))

    added = mean(ours, v, ours, v)
    return added, (added - 2 * mean(ours, v, theirs, w) + mean(theirs, w, theirs, w)).clamp(min=0)


def _score_errors(before: AttentionWeights, after: AttentionWeights, root: Tensor) -> Tensor:
    """(H,): E(q.k - q'.k')^2 / D of every query head.

    Over all distances a plane of RoPE turns its part of a key through all angles: planes do not mix, and the square of
    each is half of what it would be for one number.
    """
    sides = [(queries(x, root), _for_queries(keys(x, root), before.n_heads)) for x in (before, after)]

    def mean(one: int, other: int, features: Sequence[int]) -> Tensor:
        """E[(q.k)(q'.k')] over some features, all of which meet."""
        (q, k), (p, m) = ([x[:, list(features)] for x in sides[i]] for i in (one, other))
        return ((q @ p.mT) * (k @ m.mT)).sum((1, 2))

    def turned(one: int, other: int, a: list[int], b: list[int]) -> Tensor:
        (q, k), (p, m) = ([torch.complex(x[:, a], x[:, b]) for x in sides[i]] for i in (one, other))
        return ((q * p.conj()).sum(-1).conj() * (k * m.conj()).sum(-1)).real.sum(1) / 2

    error = torch.zeros(before.n_heads, dtype=root.dtype)
    if before.pairs:
        a, b = ([pair[i] for pair in before.pairs] for i in (0, 1))
        error += turned(0, 0, a, b) - 2 * turned(0, 1, a, b) + turned(1, 1, a, b)
    rest = sorted(set(range(before.wk.shape[1])) - {d for pair in before.pairs for d in pair})
    if rest:
        error += mean(0, 0, rest) - 2 * mean(0, 1, rest) + mean(1, 1, rest)
    return error.clamp(min=0) / before.wk.shape[1]


def _for_queries(heads: Tensor, n_heads: int) -> Tensor:
    """Key/value heads (G,...) as the query heads (H,...) read them."""
    return heads.repeat_interleave(n_heads // len(heads), 0)
