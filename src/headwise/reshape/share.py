"""Share key/value heads: a model of G key/value heads becomes one of fewer, which the query heads read in groups.

Heads of a group are put side by side with their query heads, which is exact; then one head is made of each group, its
heads neighbours in the order given. The methods of POOLS:

    mean          the mean of the group's W_K and of its W_V (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)
    aligned       the mean after an alignment that leaves the function as it is (`align`)
    aligned+norm  the same; the mean is shorter than what it stands for, so that each query head gets the norms of its
                  own keys back, plane by plane, in W_Q, and those of its values in W_O

A qk-norm lets the keys turn only as far as `align.key_rule` says and gives pooled keys their norm by itself.

A group is of neighbours, or of heads whose sharing is expected to cost least: the cost is the error that pooling the
group is expected to make in the layer's output. Scores that err by 1 or more in root mean square are taken to lose what
the head adds to the residual stream, smaller errors that fraction of it; values add an error of their own. All follows
from second moments, with the token that asks taken as independent of the one that answers. Grouping by relative
similarity was worse than chance where it was tried.

Axes: H query heads, G key/value heads, D their width, E value width, C model width, P planes of RoPE. X are the columns
of a root of the second moments (`align.moments`): sums over them stand for means over the text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.open import Folder
from headwise.models.weights import (
    AttentionWeights,
    cannot_carry,
    grouped,
    head_counts,
    layers_in_turn,
    with_layers,
)
from headwise.reshape.align import (
    activations,
    as_complex,
    fold,
    key_maps,
    key_rule,
    keys,
    mapped,
    mean_norm,
    moments,
    orthogonal_maps,
    queries,
    unrotated,
)
from headwise.reshape.asked import AskedToShare
from headwise.reshape.job import (
    Calibration,
    Change,
    Changed,
    Listener,
    Options,
    Reshaped,
    reshape,
)

Groups = tuple[tuple[int, ...], ...]
# what is multiplied, such as queries and keys, one of each for every query head
Pair = tuple[Tensor, Tensor]
# So many possible groups, at most, are priced one by one; of more, each is taken to cost what its pairs cost
# together. A round choice: to price one takes about 7 ms in a layer 256 wide, and 60 ms in one of 1,024 (one core).
EXACT = 200

# weights, root of the moments, number of groups
Pool = Callable[[AttentionWeights, Tensor, int], AttentionWeights]


def share(
    model: nn.Module | str | Path,
    n_kv_heads: int,
    *,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> Reshaped:
    """Let query heads share key/value heads: a smaller cache.

        child = hw.share("runs/book", n_kv_heads=2, groups="best", heal=200)
        child.model, child.damage.loss.after, child.healed.loss.after

    Architecture: Ainslie et al. 2023, arXiv 2305.13245.

    Args:
        model: a GPT, a model of transformers (Llama, Mistral, Qwen2, Qwen3), or the folder of one; it is left
            alone
        n_kv_heads: of the child, in each layer: a divisor of today's, and smaller
        method: how one head is made of several: mean, aligned or aligned+norm
        groups: adjacent: neighbours share; best: heads whose sharing should cost least (`best`)
        listener: hears what is being done, the first damage, and each evaluation of the healing
        **options: those that follow, which are also those of `prune`

    Keyword Args:
        text: to calibrate and heal on, and, its last tenth, to measure on: a file, a text, ids (N,), or documents
            of ids; default: what a run of headwise was trained on
        out: the folder to write, which a fresh process verifies; without it nothing is written
        tokens: of a document; default: the model's context, at most 1,024
        documents: at most so many of them are measured on, and as many calibrate; healing reads all
        heal: steps in which the child learns to answer as its parent; Ctrl-C ends them early, and the best weights
            so far are kept
        batch: documents of a step of healing
        lr: its learning rate
        hidden: weight of the hidden states beside the answers, see `HealRecipe`
        seed: of the healing
        force: replace `out`, if share or prune wrote it
        device: where a folder is opened; heads themselves are folded on the processor, in float64 (weights of half
            precision in float32)
        dtype: the number format that the child is written in, such as bf16; default: that of the parent

    Raises:
        HeadwiseError: for what cannot be done, and for a request that would change nothing.
    """
    return reshape(model, Sharing(n_kv_heads, method, groups), listener, **options)


@dataclass(frozen=True)
class Sharing(AskedToShare, Change):
    """What `share` does."""

    def check(self, model: nn.Module) -> None:
        if problem := cannot_carry(model, head_counts(model)[0], self.n_kv_heads):
            raise HeadwiseError(problem)

    @property
    def is_blind(self) -> bool:  # does it need no text to choose and pool heads?
        return self.groups == "adjacent" and self.method == "mean"

    def passes(self, model: nn.Module) -> int:
        return 0 if self.is_blind else 1

    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        model = source.model
        roots = () if self.is_blind else moments(model, calibration.statistics)
        return share_heads(model, self.n_kv_heads, self.method, self.groups, roots)


def share_heads(
    model: nn.Module,
    n_kv_heads: int,
    method: str = "aligned+norm",
    groups: str = "adjacent",
    roots: Iterable[Tensor] = (),
) -> Changed:
    """The model with n_kv_heads key/value heads in each layer; `model` itself is left alone.

    roots  for each layer, from `moments`; the mean of adjacent groups needs none
    """
    n_heads, before, _ = head_counts(model)
    pool, neighbours = POOLS[method], adjacent(before, n_kv_heads)
    chosen = []  # for each layer the key/value heads of the parent that share, in the new order
    # What alignment of the keys is exact, and who shares: a dict keeps each note once, in order.
    notes: dict[str, None] = {}

    # `with_layers` takes the layers one by one, as they come.
    def layers() -> Iterator[AttentionWeights]:
        all_roots = itertools.chain(roots, itertools.repeat(torch.empty(0)))
        for weights, root in zip(layers_in_turn(model), all_roots, strict=False):
            weights = weights.widened()
            shared = (
                neighbours
                if groups == "adjacent"
                else best(weights, root, n_kv_heads, pool)
            )
            chosen.append(shared)
            if method != "mean":
                notes[key_rule(weights).note] = None
            if shared != neighbours:
                # a pool takes neighbours
                weights = weights.permuted(list(itertools.chain(*shared)))
            yield pool(weights, root, n_kv_heads)

    child = with_layers(model, layers(), n_kv_heads=n_kv_heads)
    if set(chosen) != {neighbours}:  # in some layer others than neighbours share
        for layer, shared in enumerate(chosen):
            row = " | ".join(" ".join(map(str, group)) for group in shared)
            notes[f"layer {layer}, key/value heads that share: {row}"] = None
    heads = "head" if n_kv_heads == 1 else "heads"
    what = f"{n_kv_heads} key/value {heads} for {n_heads} query heads, {before} before"
    return Changed(child, what, {"shared": tuple(chosen)}, tuple(notes))


# Which heads share


def adjacent(
    n_heads: int, n_groups: int
) -> Groups:  # 4 heads, 2 groups: ((0, 1), (2, 3))
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

    # of as many groups may `cheapest` ask the price
    small = math.comb(weights.n_kv_heads, size) <= EXACT
    return cheapest(weights.n_kv_heads, n_groups, exact if small else by_pairs)


def cheapest(
    n_heads: int, n_groups: int, price: Callable[[tuple[int, ...]], float]
) -> Groups:
    """Groups of equal size with a small sum of prices; to find the smallest is NP-hard (balanced partition).

    Two heads of different groups are exchanged as long as that helps, once from neighbours and once from heads dealt
    out like cards; the better end wins.
    """
    # Head h in group h % n_groups.
    dealt = tuple(tuple(range(n, n_heads, n_groups)) for n in range(n_groups))
    ends = [_exchanged(start, price) for start in (adjacent(n_heads, n_groups), dealt)]
    cheaper = min(ends, key=lambda groups: sum(price(group) for group in groups))
    return tuple(sorted(cheaper))


def _exchanged(start: Groups, price: Callable[[tuple[int, ...]], float]) -> Groups:
    # Rounds over all pairs of heads in different groups, until a round exchanges none.
    groups = list(start)
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(groups)), 2):
            for i, j in itertools.product(groups[a], groups[b]):
                if i not in groups[a] or j not in groups[b]:
                    continue  # an earlier exchange of this round has moved one of them
                # Sorted, so that a group has one key in the cache of prices.
                first = tuple(sorted({*groups[a], j} - {i}))
                second = tuple(sorted({*groups[b], i} - {j}))
                before, after = (
                    price(groups[a]) + price(groups[b]),
                    price(first) + price(second),
                )
                # 1e-5 is more than rounding, also in float32; by rounding alone heads could be exchanged for
                # ever.
                if after < before * (1 - 1e-5):
                    groups[a], groups[b], improved = first, second, True
    return tuple(groups)


def pooling_error(
    weights: AttentionWeights, root: Tensor, group: Sequence[int], pool: Pool
) -> float:
    """The squared error that one key/value head made of this group is expected to make in the layer's output."""
    before = weights.permuted(group)  # the heads of this group alone
    after = pool(before, root, 1)
    added, error = output_errors(before, after, root)
    # The scores' error says what fraction of `added`, what a head adds, is lost: all of it from 1 on.
    return float((score_errors(before, after, root).clamp(max=1) * added + error).sum())


def output_errors(
    before: AttentionWeights, after: AttentionWeights, root: Tensor
) -> tuple[Tensor, Tensor]:
    """(H,) each: E|W_O v|^2, and E|W_O v - W_O' v'|^2, of every query head."""
    # Each is a `Pair` for `_products`: (H,E,C) of W_O, and the values (H,E,X), repeated for the heads that read them.
    old, new = (
        (
            x.wo.permute(1, 2, 0),
            _for_queries(activations(x.wv, x.bv, root), before.n_heads),
        )
        for x in (before, after)
    )
    return _products(old, old), _squared_difference(_products, old, new)


def score_errors(
    before: AttentionWeights, after: AttentionWeights, root: Tensor
) -> Tensor:
    """(H,): E(q.k - q'.k')^2 / D of every query head: of scores, which are q.k / sqrt(D).

    Over all distances RoPE rotates its part of a key through all angles. In the mean over the angles nothing is left of
    products of two planes, and of each plane half of |q|^2 |k|^2.
    """
    old, new = [
        (queries(x, root), _for_queries(keys(x, root), before.n_heads))
        for x in (before, after)
    ]
    head_dim = before.wk.shape[1]
    error = torch.zeros(before.n_heads, dtype=root.dtype)
    if before.pairs:
        planes = [
            (as_complex(q, before.pairs), as_complex(k, before.pairs))
            for q, k in (old, new)
        ]
        error += _squared_difference(_rotated_products, *planes)
    rest = list(unrotated(before))
    if rest:
        error += _squared_difference(
            _products, *((q[:, rest], k[:, rest]) for q, k in (old, new))
        )
    return error / head_dim


def _products(first: Pair, second: Pair) -> Tensor:
    """(H,): E[(q.k)(q'.k')] of queries and keys (H,D,X), all of whose features meet.

    And E[(W v).(W' v')] of transposed output matrices (H,E,C) and values (H,E,X).
    """
    # Queries and keys are taken as independent: the sum over features i and j of E[q_i q'_j] E[k_i k'_j].
    (q, k), (q_other, k_other) = first, second
    return ((q @ q_other.mT) * (k @ k_other.mT)).sum((1, 2))


def _rotated_products(first: Pair, second: Pair) -> Tensor:
    """(H,): the same, of complex queries and keys (H,P,X), where every plane is rotated through all angles."""
    # A score of one plane is Re(conj(q) k z) with |z| = 1. The product of two such scores is, in the mean over z,
    # Re(conj(q) q' k conj(k')) / 2.
    (q, k), (q_other, k_other) = first, second
    queries_meet, keys_meet = (q * q_other.conj()).sum(-1), (k * k_other.conj()).sum(-1)
    return (queries_meet.conj() * keys_meet).real.sum(1) / 2


def _squared_difference(
    products: Callable[[Pair, Pair], Tensor], old: Pair, new: Pair
) -> Tensor:
    """E|x - y|^2 = E x.x - 2 E x.y + E y.y, from such means; what rounding made negative is 0."""
    return (products(old, old) - 2 * products(old, new) + products(new, new)).clamp(
        min=0
    )


# (G,...) -> (H,...): what each query head reads
def _for_queries(heads: Tensor, n_heads: int) -> Tensor:
    return heads.repeat_interleave(n_heads // len(heads), 0)


# How one head is made of several


def aligned(
    weights: AttentionWeights, root: Tensor, n_groups: int, with_norms: bool = False
) -> AttentionWeights:
    """The same function, with the key/value heads of each group (neighbours) aligned to their mean.

    with_norms  another function: what reads a head also gets the norm that the mean of its group will lack
    """
    rule, k, v = (
        key_rule(weights),
        keys(weights, root),
        activations(weights.wv, weights.bv, root),
    )
    k_maps = torch.cat([key_maps(group, rule) for group in k.chunk(n_groups)])
    v_maps = torch.cat([orthogonal_maps(group) for group in v.chunk(n_groups)])
    if not with_norms:
        return fold(weights, k_maps, v_maps)
    q_scale: Tensor | float = 1.0
    # With a qk-norm the mean gets its norm from that, and needs no scale. Without one the key rule has no `signs`.
    if weights.k_gain is None:
        # (G,D,1): rows of W_Q
        q_scale = _shrinkage(k_maps @ k, n_groups, [*rule.planes, rule.free])[..., None]
    # (G,1,E): columns of W_O
    o_scale = _shrinkage(v_maps @ v, n_groups, [range(weights.wv.shape[1])])[:, None]
    return fold(weights, k_maps, v_maps, q_scale, o_scale)


def _mean(
    weights: AttentionWeights,
    root: Tensor,
    n_groups: int,
    k_weights: Tensor | float = 1.0,
) -> AttentionWeights:
    """The mean over each group; keys count by k_weights (G,1,1), whose mean is 1 in each group."""
    # It is a Pool, and needs no `root`.
    weights = mapped(
        weights, "k", lambda rows: grouped(rows * k_weights, n_groups).mean(1)
    )
    return mapped(weights, "v", lambda rows: grouped(rows, n_groups).mean(1))


def _aligned_mean(
    weights: AttentionWeights, root: Tensor, n_groups: int, with_norms: bool = False
) -> AttentionWeights:
    heads = aligned(weights, root, n_groups, with_norms)
    if heads.k_gain is None:
        return _mean(heads, root, n_groups)
    # A qk-norm divides the size of each head's keys out, so that size must not weigh in the mean: each head counts by
    # 1 / norm, scaled to a mean of 1.
    inverse = grouped(1 / mean_norm(activations(heads.wk, heads.bk, root)), n_groups)
    return _mean(
        heads, root, n_groups, (inverse / inverse.mean(1, keepdim=True)).view(-1, 1, 1)
    )


def _shrinkage(heads: Tensor, n_groups: int, parts: Sequence[Sequence[int]]) -> Tensor:
    """(G,D): the norm of heads (G,D,X) over that of their group's mean, one factor for all features of a part.

    1 where the mean is 0: nothing brings it back.
    """
    before, means = heads.square().sum(-1), grouped(heads, n_groups).mean(1)
    after = means.square().sum(-1).repeat_interleave(len(heads) // n_groups, 0)
    factor = torch.ones_like(before)
    for part in map(list, parts):  # lists: a tuple would index one axis after the other
        size, pooled_size = (
            before[:, part].sum(1, keepdim=True),
            after[:, part].sum(1, keepdim=True),
        )
        factor[:, part] = torch.where(
            pooled_size > 0, (size / pooled_size).sqrt(), torch.ones_like(size)
        )
    return factor


POOLS: dict[str, Pool] = {
    "mean": _mean,
    "aligned": _aligned_mean,
    "aligned+norm": partial(_aligned_mean, with_norms=True),
}
