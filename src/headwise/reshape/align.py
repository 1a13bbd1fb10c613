"""What attentions read on a text, and alignment: another basis for each key/value head, in which heads resemble others.

What is read is kept as second moments. For inputs x with a 1 appended, S = E[x x'] gives E[(a.x)(b.x)] = a' S b over
the text. With L L' = S, the rows of [W | bias] L have the inner products of the activations, in C + 1 columns however
long the text is. A prime transposes; C is the width of the model, D that of keys, E that of values, X = C + 1.

An alignment leaves the function as it is:

    values          v -> M v,   W_O -> W_O M^-1    any invertible M
    keys            k -> M k,   q -> M^-T q        any invertible M, where nothing lies between them and the dot product
    keys, RoPE      a rotation of each pair of features that RoPE rotates together, for such rotations commute
    keys, qk-norm   only orthogonal M commute with the division by the norm; with the gain, only those that mix features
                    of equal gains. A change of sign always does

Orthogonal M are called turns here, to tell them from what RoPE does.

Orthogonal M by Procrustes analysis, for a plane of RoPE in closed form (Jin et al. 2024, arXiv 2412.20677, section 3).
The target is the mean of the group, found in rounds (generalised Procrustes analysis, Gower 1975): heads are turned
towards it, and it becomes the mean of the turned heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.gpt.train import one_thread
from headwise.models.ask import run_body
from headwise.models.hook import hooked
from headwise.models.weights import AttentionWeights, sites

Features = tuple[int, ...]  # of a head, by their numbers
# of generalised Procrustes analysis; its sum of squares falls in each, by less than 0.1 % in a 13th
ROUNDS = 12


# What attentions read on a text


@torch.no_grad()
def moments(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each layer the root L (X,X) of E[x x'], over ids (B,T) of equal length in each batch.

    x is what the layer's attention reads of a token, (C,), with a 1 appended.
    """
    sums: dict[int, Any] = defaultdict(float)

    def add(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)  # (B,T,C) -> (B*T,C)
        # Inputs in half precision have 8 (bfloat16) or 11 (float16) significant bits: float32, on the device, sums
        # their products as well as they are known. Others are summed in float64 on the processor.
        x = x.float() if x.dtype.itemsize <= 2 else x.cpu().double()
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        sums[layer] += (x.T @ x).cpu().double()

    hooks = []
    for layer, site in enumerate(sites(model)):
        projection = site.matrices["q"].module  # it gets what the attention reads
        hooks.append((projection.register_forward_pre_hook, partial(add, layer)))
    with hooked(hooks):
        for ids in batches:
            run_body(model, ids)
    count = sum(ids.numel() for ids in batches)
    for layer in sorted(sums):
        # The symmetric root: unlike Cholesky's it exists where inputs lie in fewer dimensions than X.
        values, vectors = torch.linalg.eigh(sums.pop(layer) / count)
        # what rounding made negative counts as 0
        yield (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def activations(weights: AttentionWeights, part: str, root: Tensor) -> Tensor:
    """Heads "q", "k" (both before RoPE) or "v" of a layer as (n,D,X): inner products of rows are means over the text.

    A qk-norm divides by the norm of each vector: here, of the mean one. Computed in the format of `root` (X,X).
    """
    w = getattr(weights, f"w{part}")
    bias = getattr(weights, f"b{part}")
    bias = w.new_zeros(w.shape[:2]) if bias is None else bias
    heads = (torch.cat([w, bias[..., None]], 2).to(root) @ root).to(w)
    gain = getattr(weights, f"{part}_gain", None)
    return heads if gain is None else heads / mean_norm(heads) * gain[:, None]


def mean_norm(heads: Tensor) -> Tensor:
    """(n,1,1): the root mean square of the D features of activations (n,D,X), over the text; 1 where it is 0."""
    size = heads.square().sum(-1, keepdim=True).mean(1, keepdim=True).sqrt()
    return torch.where(size > 0, size, 1.0)


# Alignment


@dataclass(frozen=True)
class KeyRule:
    """Which turns of a layer's keys leave its function as it is; every feature of a head is in one of these."""

    planes: tuple[Features, ...]  # pairs that may turn freely
    # features that may only change sign, all of a set together
    signs: tuple[Features, ...]
    free: Features  # features that may be mixed by any orthogonal matrix


def key_rule(weights: AttentionWeights) -> KeyRule:
    """The rule of a layer, by its RoPE and its qk-norm, as the table at the top of this file has it."""
    gains = [x for x in (weights.q_gain, weights.k_gain) if x is not None]

    def alike(features: Features) -> bool:
        """Does no gain tell these features apart, so that they may be mixed?"""
        return all(len(set(gain[list(features)].tolist())) < 2 for gain in gains)

    signs: list[Features] = [pair for pair in weights.pairs if not alike(pair)]
    rest = unrotated(weights)
    if not alike(rest):  # then none of them is mixed: each may change sign by itself
        signs += [(d,) for d in rest]
        rest = ()
    return KeyRule(tuple(filter(alike, weights.pairs)), tuple(signs), rest)


def unrotated(weights: AttentionWeights) -> Features:
    """The features of keys that RoPE leaves as they are."""
    rotated = {feature for pair in weights.pairs for feature in pair}
    return tuple(d for d in range(weights.wk.shape[1]) if d not in rotated)


def fold(weights: AttentionWeights, k_maps: Tensor, v_maps: Tensor) -> AttentionWeights:
    """The layer with k_maps (G,D,D), which keep to its `key_rule`, and invertible v_maps (G,E,E) folded in."""
    # q.k = (M^-T q).(M k) and W_O v = (W_O M^-1)(M v): what reads a head, r query heads, gets the inverse.
    r = weights.group_size
    q_maps = torch.linalg.inv(k_maps).mT.repeat_interleave(r, 0)
    o_maps = torch.linalg.inv(v_maps).repeat_interleave(r, 0)
    folded = mapped(weights, q=q_maps.matmul, k=k_maps.matmul, v=v_maps.matmul)
    return replace(folded, wo=torch.einsum("che,hef->chf", weights.wo, o_maps))


def mapped(
    weights: AttentionWeights, **parts: Callable[[Tensor], Tensor]
) -> AttentionWeights:
    """The layer with its q, k or v changed, each by a linear map of W (n,D,C), and of the bias as (n,D,1)."""
    changed: dict[str, Any] = {}
    for part, change in parts.items():
        changed[f"w{part}"] = change(getattr(weights, f"w{part}"))
        bias = getattr(weights, f"b{part}")
        if bias is not None:
            changed[f"b{part}"] = change(bias[..., None])[..., 0]
    return replace(weights, **changed)


def key_maps(heads: Tensor, rule: KeyRule) -> Tensor:
    """For key activations (n,D,X) of n heads the turns (n,D,D) that bring them closest to their mean, by the rule."""
    # Each part of the rule fills its own rows and columns.
    maps = torch.eye(heads.shape[1], dtype=heads.dtype).repeat(len(heads), 1, 1)
    if rule.planes:
        # a + ib is the block [[a, -b], [b, a]] on the two features of its plane
        first, second = torch.tensor(rule.planes).T
        numbers = closest(as_complex(heads, rule.planes)[:, :, None])[..., 0, 0]
        maps[:, first, first] = maps[:, second, second] = numbers.real
        maps[:, second, first] = numbers.imag
        maps[:, first, second] = -numbers.imag
    # A set changes sign as a whole: its features lie behind one another. Real numbers of modulus 1 are signs.
    for features in map(list, rule.signs):
        signs = closest(heads[:, None, None, features].flatten(3))
        maps[:, features, features] = signs[:, 0, 0]
    if rule.free:
        free = torch.tensor(rule.free)
        maps[:, free[:, None], free] = closest(heads[:, None, free])[:, 0]
    return maps


def closest(heads: Tensor) -> Tensor:
    """The orthogonal matrices (n,P,F,F) that bring n heads closest to their mean (Schönemann 1966).

    heads  activations (n,P,F,X), whose F features are mixed in each of P places; of a complex one a turn comes of it
    """
    n, P, F = heads.shape[:3]
    rows = heads.transpose(0, 1).flatten(1, 2)
    # (n,n,P,F,F): head_i head_j' for all pairs. The rounds below need nothing else of the heads.
    gram = (rows @ rows.mH).view(P, n, F, n, F).permute(1, 3, 0, 2, 4)
    # two wait for each other more than they work in matrices as small as these
    with one_thread():
        # Singular values sum up to how alike two heads are, aligned. At first the target is the head that resembles
        # the others most, then the sum of the aligned heads, which points where their mean does.
        likeness = torch.linalg.svdvals(gram).sum((1, 2, 3))
        products = gram[likeness.argmax()]  # target times head_i'
        # Two need one round: the target is one of them, and turning the other onto it is optimal.
        for _ in range(ROUNDS if n > 2 else 1):
            left, _, right = torch.linalg.svd(products)
            maps = left @ right  # the orthogonal matrices closest to these products
            # (sum of maps_j head_j) head_i', for each head i
            products = torch.einsum("jpab,jipbc->ipac", maps, gram)
    return maps


def as_complex(heads: Tensor, planes: tuple[Features, ...]) -> Tensor:
    """(...,D,X) -> (...,P,X): the two features of a plane as one complex number."""
    return torch.complex(*heads[..., torch.tensor(planes), :].unbind(-2))
