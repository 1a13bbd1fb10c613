"""Which key/value heads share: neighbours, or those whose sharing is expected to cost least.

The cost of a group is the error that pooling it is expected to make in the layer's output. Scores that err by 1 or more
in root mean square are taken to lose what the head adds to the residual stream, smaller errors that share of it; values
add an error of their own. All follows from second moments, with the token that asks taken as independent of the one
that answers. Grouping by relative similarity was worse than chance where it was tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.models.weights import AttentionWeights
from headwise.reshape.align import as_complex
from headwise.reshape.moments import activations, keys, queries

Groups = tuple[tuple[int, ...], ...]
Pool = Callable[[AttentionWeights, Tensor, int], AttentionWeights]  # weights, root of the moments, number of groups
Pair = tuple[Tensor, Tensor]  # what is multiplied, such as queries and keys, one of each for every query head
GROUPS = ("adjacent", "best")
EXACT = 200  # groups at most that are priced one by one; above, a group costs the sum of its pairs


def adjacent(n_heads: int, n_groups: int) -> Groups:
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
    """Groups of equal size with a small sum of prices; the smallest is a hard problem (balanced partition).

    Two heads of different groups are exchanged as long as that helps, once from neighbours and once from heads dealt
    out like cards; the better end wins.
    """
    dealt = tuple(tuple(range(n, n_heads, n_groups)) for n in range(n_groups))
    ends = [_exchanged(start, price) for start in (adjacent(n_heads, n_groups), dealt)]
    cheaper = min(ends, key=lambda groups: sum(price(group) for group in groups))
    return tuple(sorted(cheaper))


def _exchanged(start: Groups, price: Callable[[tuple[int, ...]], float]) -> Groups:
    groups = list(start)
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(groups[a], groups[b]):
                if i not in groups[a] or j not in groups[b]:
                    continue  # an earlier exchange of this round has moved one of them
                first = tuple(sorted({*groups[a], j} - {i}))
                second = tuple(sorted({*groups[b], i} - {j}))
                before, after = price(groups[a]) + price(groups[b]), price(first) + price(second)
                if after < before * (1 - 1e-9):  # more than rounding
                    groups[a], groups[b], improved = first, second, True
    return tuple(groups)


def pooling_error(weights: AttentionWeights, root: Tensor, group: Sequence[int], pool: Pool) -> float:
    before = weights.permuted(group)
    after = pool(before, root, 1)
    added, error = output_errors(before, after, root)
    return float((score_errors(before, after, root).clamp(max=1) * added + error).sum())


def output_errors(before: AttentionWeights, after: AttentionWeights, root: Tensor) -> tuple[Tensor, Tensor]:
    """(H,) each: E|W_O v|^2, and E|W_O v - W_O' v'|^2, of every query head."""
    old, new = (
        (x.wo.permute(1, 0, 2), _for_queries(activations(x.wv, x.bv, root), before.n_heads)) for x in (before, after)
    )
    return _output_products(old, old), _squared_difference(_output_products, old, new)


def _output_products(first: Pair, second: Pair) -> Tensor:
    """(H,): E[(W v).(W' v')] of output matrices W (H,C,E) and values v (H,E,X)."""
    (w, v), (w_other, v_other) = first, second
    return ((w.mT @ w_other) * (v @ v_other.mT)).sum((1, 2))


def score_errors(before: AttentionWeights, after: AttentionWeights, root: Tensor) -> Tensor:
    """(H,): E(q.k - q'.k')^2 / D of every query head.

    Over all distances RoPE turns its part of a key through all angles: planes do not mix, and each counts half.
    """
    old, new = [(queries(x, root), _for_queries(keys(x, root), before.n_heads)) for x in (before, after)]
    head_dim = before.wk.shape[1]
    error = torch.zeros(before.n_heads, dtype=root.dtype)
    if before.pairs:
        planes = [(as_complex(q, before.pairs), as_complex(k, before.pairs)) for q, k in (old, new)]
        error += _squared_difference(_turned_products, *planes)
    turned = {feature for pair in before.pairs for feature in pair}
    rest = [feature for feature in range(head_dim) if feature not in turned]
    if rest:
        error += _squared_difference(_score_products, *((q[:, rest], k[:, rest]) for q, k in (old, new)))
    return error / head_dim


def _score_products(first: Pair, second: Pair) -> Tensor:
    """(H,): E[(q.k)(q'.k')] of queries and keys (H,D,X), all of whose features meet."""
    (q, k), (q_other, k_other) = first, second
    return ((q @ q_other.mT) * (k @ k_other.mT)).sum((1, 2))


def _turned_products(first: Pair, second: Pair) -> Tensor:
    """(H,): the same, of complex queries and keys (H,P,X), where every plane is turned through all angles."""
    (q, k), (q_other, k_other) = first, second
    queries_meet, keys_meet = (q * q_other.conj()).sum(-1), (k * k_other.conj()).sum(-1)
    return (queries_meet.conj() * keys_meet).real.sum(1) / 2


def _squared_difference(products: Callable[[Pair, Pair], Tensor], old: Pair, new: Pair) -> Tensor:
    """E|x - y|^2 = E x.x - 2 E x.y + E y.y, from such means; what rounding made negative is 0."""
    return (products(old, old) - 2 * products(old, new) + products(new, new)).clamp(min=0)


def _for_queries(heads: Tensor, n_heads: int) -> Tensor:
    return heads.repeat_interleave(n_heads // len(heads), 0)
