"""One key/value head out of several: the ways to pool the heads of a group, neighbours in the order given.

    mean          the mean of the group's W_K and of its W_V (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)
    aligned       the mean after an alignment that leaves the function as it is (`align`)
    aligned+norm  the same; the mean is shorter than what it stands for, so that each query head gets the norms of its
                  own keys back, plane by plane, in W_Q, and those of its values in W_O
    principal     not the mean but the features that the group's queries (plane by plane) and its W_O can best do with:
                  principal components of its keys and values; what each head had of them goes into W_Q and W_O

A qk-norm lets the keys turn only as far as `align.key_rule` says and gives pooled keys their norm by itself; there
`principal` takes the aligned mean of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.models.weights import AttentionWeights, grouped
from headwise.reshape.align import (
    activations,
    as_complex,
    fold,
    key_maps,
    key_rule,
    keys,
    mapped,
    mean_norm,
    orthogonal_maps,
    queries,
    write_planes,
)

Pool = Callable[[AttentionWeights, Tensor, int], AttentionWeights]  # weights, root of the moments, number of groups
RANK = 1e-12  # a component this much smaller than the first is rounding


def aligned(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    """The same function, the key/value heads of each group (neighbours) turned onto their mean."""
    k_maps, v_maps, *_ = _turns(weights, root, n_groups)
    return fold(weights, k_maps, v_maps)


def _turns(weights: AttentionWeights, root: Tensor, n_groups: int) -> tuple[Tensor, ...]:
    """The maps of `aligned`, and the activations that they lead to: keys (G,D,X) and values (G,E,X)."""
    rule, k, v = key_rule(weights), keys(weights, root), _values(weights, root)
    k_maps = torch.cat([key_maps(group, rule) for group in k.chunk(n_groups)])
    v_maps = torch.cat([orthogonal_maps(group) for group in v.chunk(n_groups)])
    return k_maps, v_maps, k_maps @ k, v_maps @ v


def _values(weights: AttentionWeights, root: Tensor) -> Tensor:
    return activations(weights.wv, weights.bv, root)


def _mean(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    return _pooled(weights, n_groups, torch.ones(weights.n_kv_heads, dtype=weights.wk.dtype))


def _pooled(weights: AttentionWeights, n_groups: int, k_weights: Tensor) -> AttentionWeights:
    """The mean over each group; keys count by k_weights (G,), whose mean is 1 in each group."""
    weights = mapped(weights, "k", lambda rows: grouped(rows * k_weights[:, None, None], n_groups).mean(1))
    return mapped(weights, "v", lambda rows: grouped(rows, n_groups).mean(1))


def _aligned_mean(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    return _mean_of_turned(aligned(weights, root, n_groups), root, n_groups)


def _mean_of_turned(turned: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    """A qk-norm makes the size of a key's rows meaningless: there each head counts alike."""
    if turned.k_gain is None:
        return _mean(turned, root, n_groups)
    inverse = grouped(1 / mean_norm(activations(turned.wk, turned.bk, root)), n_groups)
    return _pooled(turned, n_groups, (inverse / inverse.mean(1, keepdim=True)).flatten())


def _aligned_with_norms(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    k_maps, v_maps, k, v = _turns(weights, root, n_groups)
    rule = key_rule(weights)
    parts = [*rule.planes, rule.free] if rule.free else [*rule.planes]
    q_scale = 1.0 if weights.k_gain is not None else _shrinkage(k, n_groups, parts)[..., None]
    o_scale = _shrinkage(v, n_groups, [range(weights.wv.shape[1])])[:, None]
    return _mean_of_turned(fold(weights, k_maps, v_maps, q_scale, o_scale), root, n_groups)


def _shrinkage(heads: Tensor, n_groups: int, parts: Sequence[Sequence[int]]) -> Tensor:
    """(G,D): how many times the norm of heads (G,D,X) is that of the mean of their group, in each part of features."""
    before, means = heads.square().sum(-1), grouped(heads, n_groups).mean(1)
    after = means.square().sum(-1).repeat_interleave(len(heads) // n_groups, 0)
    factor = torch.ones_like(before)
    for part in map(list, parts):
        size, pooled_size = before[:, part].sum(1, keepdim=True), after[:, part].sum(1, keepdim=True)
        factor[:, part] = torch.where(pooled_size > 0, (size / pooled_size).sqrt(), torch.ones_like(size))
    return factor


def _principal(weights: AttentionWeights, root: Tensor, n_groups: int) -> AttentionWeights:
    r = weights.group_size
    readers = grouped(weights.wo.transpose(0, 1), weights.n_kv_heads).flatten(1, 2)
    v_in, v_out = _components_by_group(_values(weights, root), readers, n_groups)
    wo = torch.einsum("che,hef->chf", weights.wo, v_out.repeat_interleave(r, 0))
    if weights.k_gain is not None:
        pooled = _aligned_mean(weights, root, n_groups)
        weights = dataclasses.replace(weights, wq=pooled.wq, bq=pooled.bq, wk=pooled.wk, bk=pooled.bk)
    else:
        k_in, k_out = _key_components(weights, root, n_groups)
        q_maps = k_out.mT.repeat_interleave(r, 0)
        weights = mapped(weights, "q", lambda rows: q_maps @ rows)
        weights = mapped(weights, "k", lambda rows: grouped(k_in @ rows, n_groups).sum(1))
    return dataclasses.replace(mapped(weights, "v", lambda rows: grouped(v_in @ rows, n_groups).sum(1)), wo=wo)


def _key_components(weights: AttentionWeights, root: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """The maps of `_components`, (G,D,D) each, for keys that queries read; each RoPE plane as one complex number."""
    rule, heads = key_rule(weights), keys(weights, root)
    readers = grouped(queries(weights, root).mT, weights.n_kv_heads).flatten(1, 2)
    inward, outward = torch.zeros(2, *heads.shape[:2], heads.shape[1], dtype=heads.dtype)
    if rule.planes:
        numbers = as_complex(heads, rule.planes)[..., None, :]
        sizes = as_complex(readers.mT, rule.planes).norm(dim=-1)[..., None, None].to(numbers.dtype)
        plane_in, plane_out = _components_by_group(numbers, sizes, n_groups)
        write_planes(inward, plane_in[..., 0, 0], rule.planes)
        write_planes(outward, plane_out[..., 0, 0], rule.planes)
    if rule.free:
        free = list(rule.free)
        block = (slice(None), torch.tensor(free)[:, None], free)
        inward[block], outward[block] = _components_by_group(heads[:, free], readers[..., free], n_groups)
    return inward, outward


def _components_by_group(heads: Tensor, readers: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """`_components` of each group of heads (G,...,E,X) and their readers (G,...,F,E): two maps (G,...,E,E)."""
    pairs = zip(heads.chunk(n_groups), readers.chunk(n_groups), strict=True)
    inward, outward = zip(*(_components(*pair) for pair in pairs), strict=True)
    return torch.cat(inward), torch.cat(outward)


def _components(heads: Tensor, readers: Tensor) -> tuple[Tensor, Tensor]:
    """Of heads (n,...,E,X) the E features x which readers R_i (n,...,F,E) can best do with instead of their own head.

    Returns maps A and B (n,...,E,E): x is the sum of A_i head_i, and |R_i head_i - R_i B_i x|^2 summed is as small as E
    features allow: the first right singular vectors of all R_i head_i (Eckart & Young 1936), scaled to the heads' mean.
    """
    E = heads.shape[-2]
    factors = torch.linalg.qr(readers).R  # the same squares in at most E rows
    seen = (factors @ heads).movedim(0, -3)  # (...,n,F,X)
    left, sizes, right = torch.linalg.svd(seen.flatten(-3, -2), full_matrices=False)
    missing = max(0, E - sizes.shape[-1])
    left, right = F.pad(left, (0, missing))[..., :E], F.pad(right, (0, 0, 0, missing))[..., :E, :]
    sizes = F.pad(sizes, (0, missing))[..., :E]
    norm = mean_norm(heads.movedim(0, -3).flatten(-3, -2).abs())[..., None]
    inverse = torch.where(sizes > RANK * sizes[..., :1], norm / sizes, torch.zeros_like(sizes))
    back = left.reshape(*left.shape[:-2], *seen.shape[-3:-1], E).movedim(-3, 0).mH  # (n,...,E,F)
    return inverse[..., None] * (back @ factors), heads @ right.mH / norm[..., None]


POOLS: dict[str, Pool] = {
    "mean": _mean,
    "aligned": _aligned_mean,
    "aligned+norm": _aligned_with_norms,
    "principal": _principal,
}
BLIND = ("mean",)  # methods that need no text
ALIGNING = ("aligned", "aligned+norm", "principal")  # methods that may change a head's basis
