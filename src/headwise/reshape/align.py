"""Alignment: change the basis of each key/value head so that heads resemble each other and the function stays the same.

    values          v -> M v,   W_O -> W_O M^-1    any invertible M
    keys            k -> M k,   q -> M^-T q        any invertible M, where nothing lies between them and the dot product
    keys, RoPE      a turn of each pair of features that RoPE turns together, for such turns commute
    keys, qk-norm   turns alone commute with the division by the norm, and with the gain only turns of features whose
                    gains are equal. A change of sign always does

Orthogonal M by Procrustes analysis, for a plane of RoPE in closed form (Jin et al. 2024, arXiv 2412.20677, section 3).
The target is the mean of the group, found in rounds (generalised Procrustes analysis, Gower 1975).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.models.weights import AttentionWeights

ROUNDS = 12  # of generalised Procrustes analysis; its sum of squares falls in each


@dataclass(frozen=True)
class KeyRule:
    """Which turns of a layer's keys leave its function as it is; every feature of a head is in one of these."""

    planes: tuple[tuple[int, ...], ...]  # pairs that may turn freely
    signs: tuple[tuple[int, ...], ...]  # features that may only change sign, all of a set together
    free: tuple[int, ...]  # features that may be mixed by any orthogonal matrix

    @property
    def description(self) -> str:
        parts = []
        if self.planes:
            parts.append(f"{len(self.planes)} RoPE planes by a turn each")
        if self.free:
            parts.append(f"{len(self.free)} features by one orthogonal matrix")
        if self.signs:
            parts.append(f"{len(self.signs)} sets of features by sign alone, for their qk-norm gains differ")
        return ", ".join(parts)


def key_rule(weights: AttentionWeights) -> KeyRule:
    turned = {feature for pair in weights.pairs for feature in pair}
    rest = tuple(d for d in range(weights.wk.shape[1]) if d not in turned)
    if weights.k_gain is None or weights.q_gain is None:
        return KeyRule(weights.pairs, (), rest)
    gains = torch.stack([weights.q_gain, weights.k_gain]).detach()

    def equal(features: tuple[int, ...]) -> bool:
        values = gains[:, list(features)]
        return bool((values == values[:, :1]).all())

    planes = tuple(pair for pair in weights.pairs if equal(pair))
    signs: tuple[tuple[int, ...], ...] = tuple(pair for pair in weights.pairs if not equal(pair))
    if rest and not equal(rest):
        return KeyRule(planes, (*signs, *((d,) for d in rest)), ())
    return KeyRule(planes, signs, rest)


def fold(
    weights: AttentionWeights,
    k_maps: Tensor,
    v_maps: Tensor,
    q_scale: Tensor | float = 1.0,
    o_scale: Tensor | float = 1.0,
) -> AttentionWeights:
    """The layer with k_maps (G,D,D), which keep to its `key_rule`, and invertible v_maps (G,E,E) folded in.

    q_scale (G,D,1) and o_scale (G,1,E) change the function: what queries, and W_O, are multiplied with besides.
    """
    r = weights.group_size
    q_maps = (torch.linalg.inv(k_maps).mT * q_scale).repeat_interleave(r, 0)
    o_maps = (torch.linalg.inv(v_maps) * o_scale).repeat_interleave(r, 0)
    turned = mapped(mapped(weights, "k", lambda rows: k_maps @ rows), "q", lambda rows: q_maps @ rows)
    wo = torch.einsum("che,hef->chf", weights.wo, o_maps)
    return dataclasses.replace(mapped(turned, "v", lambda rows: v_maps @ rows), wo=wo)


def mapped(weights: AttentionWeights, part: str, change: Callable[[Tensor], Tensor]) -> AttentionWeights:
    """The layer with its "q", "k" or "v" changed: a linear map of W (n,D,C), and of the bias as one more column."""
    w, bias = getattr(weights, f"w{part}"), getattr(weights, f"b{part}")
    changed: dict[str, Any] = {
        f"w{part}": change(w),
        f"b{part}": None if bias is None else change(bias[..., None])[..., 0],
    }
    return dataclasses.replace(weights, **changed)


def key_maps(heads: Tensor, rule: KeyRule) -> Tensor:
    """For key activations (n,D,X) of n heads the turns (n,D,D) that bring them closest to their mean, by the rule."""
    maps = torch.eye(heads.shape[1], dtype=heads.dtype).repeat(len(heads), 1, 1)
    if rule.planes:
        write_planes(maps, turns(as_complex(heads, rule.planes)), rule.planes)
    for features in rule.signs:
        signs = turns(heads[:, None, list(features)].flatten(2).to(torch.complex128)).real.round()
        maps[:, list(features), list(features)] = signs
    if rule.free:
        free = list(rule.free)
        maps[:, torch.tensor(free)[:, None], torch.tensor(free)] = orthogonal_maps(heads[:, free])
    return maps


def orthogonal_maps(heads: Tensor) -> Tensor:
    """Of activations (n,E,X) the orthogonal matrices (n,E,E) that bring them closest to the mean (Schönemann 1966)."""
    n, E = heads.shape[:2]
    rows = heads.flatten(0, 1)
    gram = (rows @ rows.T).view(n, E, n, E).transpose(1, 2)  # (n,n,E,E): the products of heads are all that counts
    products = gram[medoid(torch.linalg.svdvals(gram).sum(-1))]  # of the target and each head
    for _ in range(_rounds(n)):
        left, _, right = torch.linalg.svd(products)
        maps: Tensor = left @ right
        products = torch.einsum("jab,jibc->iac", maps, gram)
    return maps


def turns(heads: Tensor) -> Tensor:
    """For complex activations (n,P,X) the numbers (n,P) of modulus 1 that bring each plane closest to the mean."""
    by_plane = heads.transpose(0, 1)
    gram = (by_plane @ by_plane.mH).permute(1, 2, 0)  # (n,n,P)
    products = gram[medoid(gram.abs().sum(-1))]
    for _ in range(_rounds(len(heads))):
        units = torch.where(products.abs() > 0, products / products.abs(), torch.ones_like(products))
        products = (units[:, None] * gram).sum(0)
    return units


def _rounds(n: int) -> int:
    """One for two heads: the first is turned by nothing, the other onto it, and both lie as their mean does."""
    return ROUNDS if n > 2 else 1


def as_complex(heads: Tensor, planes: tuple[tuple[int, ...], ...]) -> Tensor:
    """(n,D,X) -> (n,P,X): the two features of a plane as one complex number."""
    first, second = _columns(planes)
    return torch.complex(heads[:, first], heads[:, second])


def write_planes(maps: Tensor, numbers: Tensor, planes: tuple[tuple[int, ...], ...]) -> None:
    """Write complex numbers (n,P) into maps (n,D,D) as what multiplies the planes by them."""
    first, second = _columns(planes)
    maps[:, first, first] = maps[:, second, second] = numbers.real
    maps[:, first, second], maps[:, second, first] = -numbers.imag, numbers.imag


def medoid(similarity: Tensor) -> int:
    return int(similarity.sum(1).argmax())


def _columns(planes: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    return [plane[0] for plane in planes], [plane[1] for plane in planes]
