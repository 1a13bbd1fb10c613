"""Share key/value heads: a model of G key/value heads becomes one of fewer, which the query heads read in groups.

Heads of a group are put side by side with their query heads, which is exact. They are aligned, which leaves the
function as it is (`align`). Then their mean takes their place (Ainslie et al. 2023, arXiv 2305.13245, section 2.1). A
mean is shorter than what it stands for, so that each query head gets the norms of its own keys back, plane by plane, in
W_Q, and those of its values in W_O.

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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import FAMILIES, read_config
from headwise.models.open import Folder
from headwise.models.weights import (
    AttentionWeights,
    cannot_carry,
    grouped,
    head_counts,
    read_layers,
    with_layers,
)
from headwise.reshape.align import (
    activations,
    as_complex,
    closest,
    fold,
    key_maps,
    key_rule,
    mapped,
    mean_norm,
    moments,
    unrotated,
)
from headwise.reshape.job import (
    Calibration,
    Change,
    Changed,
    Listener,
    Options,
    Reshaped,
    reshape,
)
from headwise.table import plural
from headwise.words import unknown

Group = tuple[int, ...]  # key/value heads
Groups = tuple[Group, ...]
# So many possible groups, at most, are priced one by one; of more, each is taken to cost what its pairs cost
# together. A round choice: to price one takes about 7 ms in a layer 256 wide, and 60 ms in one of 1,024 (one core).
EXACT = 200

GROUPS = ("adjacent", "best")


def share(
    model: nn.Module | str | Path,
    n_kv_heads: int,
    *,
    groups: str = "adjacent",
    listener: Listener = lambda event: None,
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
        groups: adjacent: neighbours share; best: heads whose sharing should cost least (`best`)
        listener: hears what is being done (a line), the first damage (`Reshaped`), and each evaluation of the
            healing (`HealPoint`)
        **options: those that follow, which are also those of `prune`

    Keyword Args:
        text: to calibrate and heal on, and, its last tenth, to measure on: a file, a text, ids (N,), or documents
            of ids; default: what a run of headwise was trained on
        out: the folder to write, absent or empty, which is read back; without it nothing is written
        heal: steps in which the child learns to answer as its parent; Ctrl-C ends them early, and the best weights
            so far are kept
        device: where a folder is opened; heads themselves are folded on the processor, in float64 (weights of half
            precision in float32)
        dtype: the number format that the child is written in, such as bf16; default: that of the parent

    Raises:
        HeadwiseError: for what cannot be done.
    """
    return reshape(model, Sharing(n_kv_heads, groups), listener, **options)


@dataclass(frozen=True)
class Sharing(Change):
    """What `share` does."""

    n_kv_heads: int  # of the child, in each layer
    groups: str = GROUPS[0]

    def __post_init__(self) -> None:
        if self.groups not in GROUPS:
            raise unknown(f"groups={self.groups!r} is not known", self.groups, GROUPS)

    def check_family(self, folder: Path) -> None:
        # None: a model of pictures and text, whose language model is looked at when open
        family = FAMILIES.get(str(read_config(folder).get("model_type")))
        if family and not family.grouped:
            raise HeadwiseError(
                f"{family.name}'s config has no num_key_value_heads, so what shares its heads' keys and values "
                "cannot be written; share a Llama-type model, or remove heads with `headwise prune`"
            )

    def check_sizes(self, n_layers: int, n_heads: int, n_kv_heads: int) -> None:
        divisors = [n for n in range(1, n_kv_heads) if n_kv_heads % n == 0]
        if self.n_kv_heads in divisors:
            return
        remedy = ", the least there can be"
        if divisors:
            remedy = f"; sharing lowers their number to one of {', '.join(map(str, divisors))}"
        raise HeadwiseError(
            f"n_kv_heads={self.n_kv_heads}: the model has {n_kv_heads} key/value heads for its "
            f"{n_heads} query heads{remedy}"
        )

    def check(self, model: nn.Module) -> None:
        if problem := cannot_carry(model, head_counts(model)[0], self.n_kv_heads):
            raise HeadwiseError(problem)

    def apply(self, source: Folder, calibration: Calibration) -> Changed:
        roots = moments(source.model, calibration.statistics)
        return share_heads(source.model, self.n_kv_heads, roots, self.groups)


def share_heads(
    model: nn.Module, n_kv_heads: int, roots: Iterable[Tensor], groups: str = "adjacent"
) -> Changed:
    """The model with n_kv_heads key/value heads in each layer; `model` itself is left alone.

    roots  for each layer, from `moments`
    """
    n_heads, before, _ = head_counts(model)
    neighbours = adjacent(before, n_kv_heads)
    chosen = []  # for each layer the key/value heads of the parent that share, in the new order

    # `with_layers` takes the layers one by one, as they come.
    def layers() -> Iterator[AttentionWeights]:
        for weights, root in zip(read_layers(model), roots, strict=True):
            weights = weights.widened()
            shared = neighbours
            if groups == "best":
                shared = best(weights, root, n_kv_heads)
            chosen.append(shared)
            # what pools takes neighbours
            weights = weights.permuted(list(itertools.chain(*shared)))
            yield pooled(weights, root, n_kv_heads)

    child = with_layers(model, layers(), n_kv_heads=n_kv_heads)
    heads = plural(n_kv_heads, "key/value head")
    what = f"{heads} for {n_heads} query heads, {before} before"
    return Changed(child, what, {"shared": tuple(chosen)})


# Which heads share


def adjacent(
    n_heads: int, n_groups: int
) -> Groups:  # 4 heads, 2 groups: ((0, 1), (2, 3))
    size = n_heads // n_groups
    return tuple(tuple(range(n * size, (n + 1) * size)) for n in range(n_groups))


def best(weights: AttentionWeights, root: Tensor, n_groups: int) -> Groups:
    """Groups of equal size whose pooling costs least, as far as exchanging heads finds them."""
    size = weights.n_kv_heads // n_groups

    @cache
    def exact(group: Group) -> float:
        return pooling_error(weights, root, group)

    def by_pairs(group: Group) -> float:
        return sum(exact(pair) for pair in itertools.combinations(group, 2))

    # of as many groups may `cheapest` ask the price
    small = math.comb(weights.n_kv_heads, size) <= EXACT
    return cheapest(weights.n_kv_heads, n_groups, exact if small else by_pairs)


def cheapest(n_heads: int, n_groups: int, price: Callable[[Group], float]) -> Groups:
    """Groups of equal size with a small sum of prices; to find the smallest is NP-hard (balanced partition).

    Two heads of different groups are exchanged as long as that helps, once from neighbours and once from heads dealt
    out like cards; the better end wins.
    """

    def cost(*groups: Iterable[int]) -> float:
        return sum(price(tuple(sorted(group))) for group in groups)

    def exchanged(start: Iterable[Iterable[int]]) -> list[frozenset[int]]:
        # rounds over all pairs of heads in different groups, until a round exchanges none
        groups = [*map(frozenset, start)]
        improved = True
        while improved:
            improved = False
            for a, b in itertools.combinations(range(n_groups), 2):
                for i, j in itertools.product(sorted(groups[a]), sorted(groups[b])):
                    if i not in groups[a] or j not in groups[b]:
                        continue  # an earlier exchange has moved one of them
                    first = groups[a] ^ {i, j}
                    second = groups[b] ^ {i, j}
                    # 1e-5 is more than rounding, also in float32; by rounding alone heads could be exchanged for ever.
                    if cost(first, second) < cost(groups[a], groups[b]) * (1 - 1e-5):
                        groups[a] = first
                        groups[b] = second
                        improved = True
        return groups

    # Head h in group h % n_groups.
    dealt = [range(n, n_heads, n_groups) for n in range(n_groups)]
    ends = [exchanged(start) for start in (adjacent(n_heads, n_groups), dealt)]
    cheaper = min(ends, key=lambda groups: cost(*groups))
    return tuple(sorted(tuple(sorted(group)) for group in cheaper))


def pooling_error(
    weights: AttentionWeights, root: Tensor, group: Sequence[int]
) -> float:
    """The squared error that one key/value head made of this group is expected to make in the layer's output."""
    before = weights.permuted(group)  # the heads of this group alone
    layers = before, pooled(before, root, 1)

    def each(part: str) -> Tensor:
        """(H,2,D,X): what each query head has, or reads, before and after."""
        both = []
        for layer in layers:
            heads = activations(layer, part, root)
            both.append(heads.repeat_interleave(before.n_heads // len(heads), 0))
        return torch.stack(both, 1)

    q, k, v = map(each, "qkv")
    wo = torch.stack([layer.wo.permute(1, 2, 0) for layer in layers], 1)  # (H,2,E,C)
    # what one factor has with a minus is subtracted in a sum of products
    q[:, 1] *= -1
    wo[:, 1] *= -1
    added = _mean_square(wo[:, 0], v[:, 0])
    error = _mean_square(wo.flatten(1, 2), v.flatten(1, 2))
    # Of scores, which are q.k / sqrt(D). Over all distances RoPE rotates its part of a key through all angles. In the
    # mean over the angles nothing is left of products of two planes, and of each plane half of |q|^2 |k|^2.
    rest = list(unrotated(before))
    score_error = _mean_square(q[:, :, rest].flatten(1, 2), k[:, :, rest].flatten(1, 2))
    if before.pairs:
        planes = [as_complex(x, before.pairs).transpose(1, 2) for x in (q, k)]
        score_error += _mean_square(*planes) / 2
    # The scores' error says what fraction of `added`, what a head adds, is lost: all of it from 1 on.
    lost = (score_error / q.shape[2]).clamp(max=1)
    return float((lost * added + error).sum())


def _mean_square(first: Tensor, second: Tensor) -> Tensor:
    """(H,): E|x.y|^2 of independent (H,...,F,X) and (H,...,F,Y), whose F features meet, summed over what is between."""
    # the sum over features i and j of E[x_i x_j'] E[y_i y_j']
    return ((first @ first.mH).conj() * (second @ second.mH)).real.flatten(1).sum(1)


# How one head is made of several


def aligned(
    weights: AttentionWeights, root: Tensor, n_groups: int
) -> tuple[AttentionWeights, Tensor, Tensor]:
    """The same function, with the key/value heads of each group (neighbours) aligned to their mean.

    And the activations (G,D,X) of its keys and (G,E,X) of its values.
    """
    rule = key_rule(weights)
    k, v = (activations(weights, part, root) for part in "kv")
    k_maps = torch.cat([key_maps(group, rule) for group in k.chunk(n_groups)])
    v_maps = torch.cat([closest(x[:, None])[:, 0] for x in v.chunk(n_groups)])
    return fold(weights, k_maps, v_maps), k_maps @ k, v_maps @ v


def pooled(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    """One key/value head made of each group: the mean of the aligned heads, with the norms that it lacks."""
    rule = key_rule(weights)
    heads, k, v = aligned(weights, root, n_groups)
    r = heads.group_size
    counts: Tensor | float = 1.0  # how much each head counts in the mean of the keys
    if heads.k_gain is None:
        lost = _shrinkage(k, n_groups, [*rule.planes, rule.free])
        scale = lost.repeat_interleave(r, 0)[..., None]  # (H,D,1): rows of W_Q
        heads = mapped(heads, q=scale.mul)
    else:
        # A qk-norm gives the mean its norm. It divides the size of each head's keys out, so that size must not weigh:
        # each head counts by 1 / norm, scaled to a mean of 1.
        keys = activations(replace(heads, k_gain=None), "k", root)
        inverse = grouped(1 / mean_norm(keys), n_groups)
        counts = (inverse / inverse.mean(1, keepdim=True)).flatten(0, 1)
    # (H,E): columns of W_O
    scale = _shrinkage(v, n_groups, [range(v.shape[1])]).repeat_interleave(r, 0)
    heads = replace(heads, wo=heads.wo * scale)
    return mapped(
        heads,
        k=lambda rows: grouped(rows * counts, n_groups).mean(1),
        v=lambda rows: grouped(rows, n_groups).mean(1),
    )


def _shrinkage(heads: Tensor, n_groups: int, parts: Iterable[Sequence[int]]) -> Tensor:
    """(G,D): the norm of heads (G,D,X) over that of their group's mean, one factor for all features of a part.

    1 where the mean is 0: nothing brings it back.
    """
    sizes = grouped(heads.square().sum(-1), n_groups)
    means = grouped(heads, n_groups).mean(1, keepdim=True).square().sum(-1)
    factor = torch.ones_like(sizes)
    for part in map(list, parts):  # lists: a tuple would index one axis after the other
        ratio = sizes[..., part].sum(-1) / means[..., part].sum(-1)
        factor[..., part] = torch.where(ratio.isfinite(), ratio.sqrt(), 1.0)[..., None]
    return factor.flatten(0, 1)
