"""One key/value head out of several: the ways to pool the heads of a group, neighbours in the order given.

    first         the first head of each group (Ainslie et al. 2023, arXiv 2305.13245, as a comparison)
    mean          the mean of the group's W_K and of its W_V (the same, section 2.1)
    medoid        the head of the group that is most like the others
    aligned       the mean after an alignment that leaves the function as it is (`align`)
    aligned+norm  the same; the mean is shorter than what it stands for, so that each query head gets the norms of its
                  own keys back, plane by plane, in W_Q, and those of its values in W_O
    principal     not the mean but the principal components of the group's keys, plane by plane, and of its values; what
                  each head had of them goes into W_Q and W_O

A qk-norm lets the keys turn only as far as `align.key_rule` says and gives pooled keys their norm by itself; there
`principal` takes the aligned mean of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.reshape.align import as_complex, fold, key_maps, key_rule, medoid, orthogonal_maps
from headwise.reshape.group import Pool
from headwise.reshape.moments import activations, keys, mean_norm
from headwise.reshape.weights import AttentionWeights, grouped


def aligned(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    """The same function, the key/value heads of each group (neighbours) turned onto their mean."""
    k_gdx, v_gex = keys(weights, root), activations(weights.wv, weights.bv, root)
    rule = key_rule(weights)
    k_maps = [key_maps(k, rule) for k in k_gdx.chunk(n_groups)]
    v_maps = [orthogonal_maps(v) for v in v_gex.chunk(n_groups)]
    return fold(weights, torch.cat(k_maps), torch.cat(v_maps))


def _picked(weights: AttentionWeights, kv_heads: Sequence[int]) -> AttentionWeights:
    """One key/value head for each group, as it is."""
    return weights.selected(range(weights.n_heads), kv_heads)


def _first(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    return _picked(weights, range(0, weights.n_kv_heads, weights.n_kv_heads // n_groups))


def _medoid(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    """Likeness is the sum of the cosines of keys and of values."""
    size = weights.n_kv_heads // n_groups
    both = keys(weights, root), activations(weights.wv, weights.bv, root)
    flat = [heads.flatten(1) / mean_norm(heads)[:, None] for heads in both]
    like = sum(heads @ heads.T / (heads.shape[1] // root.shape[0]) for heads in flat)
    assert isinstance(like, Tensor)
    places = [n * size + medoid(like[n * size :, n * size :][:size, :size]) for n in range(n_groups)]
    return _picked(weights, places)


def _mean(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    return _pooled(weights, n_groups, torch.ones(weights.n_kv_heads, dtype=root.dtype))


def _pooled(weights: AttentionWeights, n_groups: int, k_weights: Tensor) -> AttentionWeights:
    """The mean over each group; keys count by k_weights (G,), whose mean is 1 in each group."""
    return dataclasses.replace(
        weights,
        wk=grouped(weights.wk * k_weights[:, None, None], n_groups).mean(1),
        bk=None if weights.bk is None else grouped(weights.bk * k_weights[:, None], n_groups).mean(1),
        wv=grouped(weights.wv, n_groups).mean(1),
        bv=None if weights.bv is None else grouped(weights.bv, n_groups).mean(1),
    )


def _aligned_mean(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    turned = aligned(weights, root, n_groups)
    return _pooled(turned, n_groups, _key_weights(turned, root, n_groups))


def _key_weights(weights: AttentionWeights, root: Tensor, n_groups: int) -> Tensor:
    """A qk-norm makes the size of a key's rows meaningless: there each head counts alike whatever its size."""
    if weights.k_gain is None:
        return torch.ones(weights.n_kv_heads, dtype=root.dtype)
    inverse = 1 / mean_norm(activations(weights.wk, weights.bk, root))
    means = grouped(inverse, n_groups).mean(1)
    weight: Tensor = inverse / means.repeat_interleave(weights.n_kv_heads // n_groups)
    return weight


def _aligned_with_norms(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    turned = aligned(weights, root, n_groups)
    pooled = _pooled(turned, n_groups, _key_weights(turned, root, n_groups))
    all_values = (tuple(range(weights.wv.shape[1])),)
    before, after = (activations(x.wv, x.bv, root) for x in (turned, pooled))
    o_scale = _shrunk(before, after, all_values).repeat_interleave(weights.group_size, 0)
    pooled = dataclasses.replace(pooled, wo=pooled.wo * o_scale)
    if weights.k_gain is not None:
        return pooled
    rule = key_rule(weights)
    sets = (*rule.planes, rule.free) if rule.free else rule.planes
    before, after = (activations(x.wk, x.bk, root) for x in (turned, pooled))
    q_scale = _shrunk(before, after, sets).repeat_interleave(weights.group_size, 0)
    bq = None if pooled.bq is None else pooled.bq * q_scale
    return dataclasses.replace(pooled, wq=pooled.wq * q_scale[..., None], bq=bq)


def _shrunk(before: Tensor, after: Tensor, sets: Sequence[tuple[int, ...]]) -> Tensor:
    """(G,D): how many times the norm of heads (G,D,X) is that of their pool (n,D,X), in each set of features."""
    own, pool = before.square().sum(-1), after.square().sum(-1).repeat_interleave(len(before) // len(after), 0)
    factor = torch.ones_like(own)
    for features in map(list, sets):
        ours, theirs = own[:, features].sum(1, keepdim=True), pool[:, features].sum(1, keepdim=True)
        factor[:, features] = torch.where(theirs > 0, (ours / theirs).sqrt(), torch.ones_like(ours))
    return factor


def _principal(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    v_maps = torch.cat([_components(v) for v in activations(weights.wv, weights.bv, root).chunk(n_groups)])
    o_maps = v_maps.repeat_interleave(weights.group_size, 0)
    values = dataclasses.replace(
        weights,
        wv=_gathered(v_maps, weights.wv, n_groups),
        bv=None if weights.bv is None else _gathered(v_maps, weights.bv[..., None], n_groups)[..., 0],
        wo=torch.einsum("che,hef->chf", weights.wo, o_maps),
    )
    if weights.k_gain is not None:
        k = _aligned_mean(weights, root, n_groups)
        return dataclasses.replace(values, wq=k.wq, wk=k.wk, bq=k.bq, bk=k.bk)
    k_maps = torch.cat([_key_components(k, weights) for k in keys(weights, root).chunk(n_groups)])
    q_maps = k_maps.mT.repeat_interleave(weights.group_size, 0)
    return dataclasses.replace(
        values,
        wk=_gathered(k_maps, weights.wk, n_groups),
        bk=None if weights.bk is None else _gathered(k_maps, weights.bk[..., None], n_groups)[..., 0],
        wq=q_maps @ weights.wq,
        bq=None if weights.bq is None else (q_maps @ weights.bq[..., None])[..., 0],
    )


def _components(heads: Tensor) -> Tensor:
    """For activations (n,E,X) matrices B (n,E,E) such that B_i x is closest to head i, with x = mean of B_i' head i.

    x are the principal components of all n * E features, the root of n times smaller: n equal heads give themselves.
    """
    n, E, _ = heads.shape
    left = torch.linalg.svd(heads.flatten(0, 1), full_matrices=False)[0][:, :E] * n**0.5
    return F.pad(left, (0, E - left.shape[1])).view(n, E, E)


def _key_components(heads: Tensor, weights: AttentionWeights) -> Tensor:
    """The same for keys (n,D,X), each RoPE plane as one complex number, for matrices that commute with turns."""
    rule = key_rule(weights)
    maps = torch.zeros(len(heads), heads.shape[1], heads.shape[1], dtype=heads.dtype)
    if rule.planes:
        z_pnx = as_complex(heads, rule.planes).transpose(0, 1)
        units = torch.linalg.svd(z_pnx, full_matrices=False)[0][:, :, 0].T * len(heads) ** 0.5
        first, second = ([plane[i] for plane in rule.planes] for i in (0, 1))
        maps[:, first, first] = maps[:, second, second] = units.real
        maps[:, first, second], maps[:, second, first] = -units.imag, units.imag
    if rule.free:
        free = torch.tensor(rule.free)
        maps[:, free[:, None], free] = _components(heads[:, free])
    return maps


def _gathered(maps: Tensor, rows: Tensor, n_groups: int) -> Tensor:
    """The mean of B' rows over each group: maps (G,D,D), rows (G,D,C) -> (n,D,C)."""
    return grouped(maps.mT @ rows, n_groups).mean(1)


POOLS: dict[str, Pool] = {
    "first": _first,
    "mean": _mean,
    "medoid": _medoid,
    "aligned": _aligned_mean,
    "aligned+norm": _aligned_with_norms,
    "principal": _principal,
}
ALIGNING = ("aligned", "aligned+norm", "principal")  # methods that may change a head's basis
