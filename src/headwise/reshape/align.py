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

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.train import one_thread
from headwise.models.ask import run_body
from headwise.models.hook import hooked
from headwise.models.weights import AttentionWeights, attentions, input_projection
from headwise.table import plural

# of generalised Procrustes analysis; its sum of squares falls in each, by less than 0.1 % in a 13th
ROUNDS = 12


# What attentions read on a text


@torch.no_grad()
def moments(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each layer the root L (X,X) of E[x x'], over ids (B,T) of equal length in each batch.

    x is what the layer's attention reads of a token, (C,), with a 1 appended. Raises HeadwiseError without a text.
    """
    sums: dict[int, Tensor] = {}

    def add(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().flatten(0, -2)  # (B,T,C) -> (B*T,C)
        # Inputs in half precision have 8 (bfloat16) or 11 (float16) significant bits: float32, on the device, sums
        # their products as well as they are known. Others are summed in float64 on the processor.
        x = x.float() if x.dtype.itemsize <= 2 else x.cpu().double()
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        product = (x.T @ x).cpu().double()
        sums[layer] = sums[layer] + product if layer in sums else product

    count = sum(ids.numel() for ids in batches)
    if count == 0:
        raise HeadwiseError("there is no calibration text to read; pass one as text=")
    hooks = []
    for layer in range(len(attentions(model))):
        projection = input_projection(model, layer)
        hooks.append((projection.register_forward_pre_hook, partial(add, layer)))
    with hooked(hooks):
        for ids in batches:
            run_body(model, ids)
    for layer in sorted(sums):
        # The symmetric root: unlike Cholesky's it exists where inputs lie in fewer dimensions than X.
        values, vectors = torch.linalg.eigh(sums.pop(layer) / count)
        # what rounding made negative counts as 0
        yield (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def activations(w: Tensor, bias: Tensor | None, root: Tensor) -> Tensor:
    """Heads w (G,D,C), bias (G,D) and `root` (C+1,X) give (G,D,X): inner products of rows are means over the text.

    Computed in the format of the root, and returned in that of w.
    """
    bias = w.new_zeros(w.shape[:2]) if bias is None else bias
    return (torch.cat([w, bias[..., None]], 2).to(root) @ root).to(w)


def keys(weights: AttentionWeights, root: Tensor) -> Tensor:
    """Key activations (G,D,X), before RoPE. A qk-norm divides by the norm of each vector: here, of the mean one."""
    heads = activations(weights.wk, weights.bk, root)
    return heads if weights.k_gain is None else _normed(heads, weights.k_gain)


def queries(weights: AttentionWeights, root: Tensor) -> Tensor:
    heads = activations(weights.wq, weights.bq, root)
    return heads if weights.q_gain is None else _normed(heads, weights.q_gain)


def _normed(heads: Tensor, gain: Tensor) -> Tensor:
    return heads / mean_norm(heads)[:, None, None] * gain[:, None]


def mean_norm(heads: Tensor) -> Tensor:
    """(n,): the root mean square of the D features of activations (n,D,X), over the text; 1 where it is 0."""
    size = heads.square().sum(-1).mean(-1).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))


# Alignment


@dataclass(frozen=True)
class KeyRule:
    """Which turns of a layer's keys leave its function as it is; every feature of a head is in one of these."""

    planes: tuple[tuple[int, ...], ...]  # pairs that may turn freely
    # features that may only change sign, all of a set together
    signs: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]  # features that may be mixed by any orthogonal matrix

    @property
    def note(self) -> str:
        """How keys of this rule are aligned."""
        parts = []
        if self.planes:
            parts.append(f"{plural(len(self.planes), 'RoPE plane')} by a turn each")
        if self.free:
            features = plural(len(self.free), "feature")
            parts.append(f"{features} by one orthogonal matrix")
        if self.signs:
            sets = plural(len(self.signs), "set")
            how = "of features by sign alone, for their qk-norm gains differ"
            parts.append(f"{sets} {how}")
        return f"keys were aligned by what is exact here: {', '.join(parts)}"


def key_rule(weights: AttentionWeights) -> KeyRule:
    """The rule of a layer, by its RoPE and its qk-norm, as the table at the top of this file has it."""
    q_gain, k_gain = weights.q_gain, weights.k_gain

    def alike(features: tuple[int, ...]) -> bool:
        """Does no gain tell these features apart, so that they may be mixed?"""
        if q_gain is None or k_gain is None:
            return True
        gains = torch.stack([q_gain, k_gain]).detach()[:, list(features)]
        return bool((gains == gains[:, :1]).all())

    signs: list[tuple[int, ...]] = [pair for pair in weights.pairs if not alike(pair)]
    rest = unrotated(weights)
    if not alike(rest):  # then none of them is mixed: each may change sign by itself
        signs += [(d,) for d in rest]
        rest = ()
    return KeyRule(tuple(filter(alike, weights.pairs)), tuple(signs), rest)


def unrotated(weights: AttentionWeights) -> tuple[int, ...]:
    """The features of keys that RoPE leaves as they are."""
    rotated = {feature for pair in weights.pairs for feature in pair}
    return tuple(d for d in range(weights.wk.shape[1]) if d not in rotated)


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
    # q.k = (M^-T q).(M k) and W_O v = (W_O M^-1)(M v): what reads a head, r query heads, gets the inverse.
    r = weights.group_size
    q_maps = (torch.linalg.inv(k_maps).mT * q_scale).repeat_interleave(r, 0)
    o_maps = (torch.linalg.inv(v_maps) * o_scale).repeat_interleave(r, 0)
    aligned = mapped(
        mapped(weights, "k", lambda rows: k_maps @ rows),
        "q",
        lambda rows: q_maps @ rows,
    )
    wo = torch.einsum("che,hef->chf", weights.wo, o_maps)
    return dataclasses.replace(mapped(aligned, "v", lambda rows: v_maps @ rows), wo=wo)


def mapped(
    weights: AttentionWeights, part: str, change: Callable[[Tensor], Tensor]
) -> AttentionWeights:
    """The layer with its "q", "k" or "v" changed: `change` is a linear map of W (n,D,C), and of the bias as (n,D,1)."""
    w, bias = getattr(weights, f"w{part}"), getattr(weights, f"b{part}")
    changed: dict[str, Any] = {
        f"w{part}": change(w),
        f"b{part}": None if bias is None else change(bias[..., None])[..., 0],
    }
    return dataclasses.replace(weights, **changed)


def key_maps(heads: Tensor, rule: KeyRule) -> Tensor:
    """For key activations (n,D,X) of n heads the turns (n,D,D) that bring them closest to their mean, by the rule."""
    # Each part of the rule fills its own rows and columns.
    maps = torch.eye(heads.shape[1], dtype=heads.dtype).repeat(len(heads), 1, 1)
    if rule.planes:
        write_planes(maps, turns(as_complex(heads, rule.planes)), rule.planes)
    # A set changes sign as a whole: its features lie behind one another. Real numbers of modulus 1 are signs.
    for features in rule.signs:
        signs = turns(heads[:, None, list(features)].flatten(2))
        maps[:, list(features), list(features)] = signs
    if rule.free:
        free = list(rule.free)
        # A column of numbers and a list together index the rows `free` and in each of them the columns `free`.
        maps[:, torch.tensor(free)[:, None], free] = orthogonal_maps(heads[:, free])
    return maps


def orthogonal_maps(heads: Tensor) -> Tensor:
    """Of activations (n,E,X) the orthogonal matrices (n,E,E) that bring them closest to the mean (Schönemann 1966)."""
    n, E = heads.shape[:2]
    rows = heads.flatten(0, 1)
    # (n,n,E,E): head_i head_j' for all pairs. The rounds below need nothing else of the heads.
    gram = (rows @ rows.T).view(n, E, n, E).transpose(1, 2)
    # two wait for each other more than they work in matrices as small as these
    with one_thread():
        # (n,E,E): target times head_i'. Its singular values sum up to how alike the two are, aligned. At first the
        # target is one head, then the sum of the aligned heads, which points where their mean does.
        products = gram[medoid(torch.linalg.svdvals(gram).sum(-1))]
        for _ in range(_rounds(n)):
            left, _, right = torch.linalg.svd(products)
            maps = left @ right  # the orthogonal matrices closest to these products
            # (sum of maps_j head_j) head_i', for each head i
            products = torch.einsum("jab,jibc->iac", maps, gram)
    return maps


def turns(heads: Tensor) -> Tensor:
    """For activations (n,P,X), of planes complex, the numbers (n,P) of modulus 1 that bring them closest to the mean.

    As `orthogonal_maps`, with numbers in place of matrices; a plane of zeros is left as it is.
    """
    by_plane = heads.transpose(0, 1)
    gram = (by_plane @ by_plane.mH).permute(1, 2, 0)  # (n,n,P)
    products = gram[medoid(gram.abs().sum(-1))]
    for _ in range(_rounds(len(heads))):
        units = torch.where(
            products.abs() > 0, products / products.abs(), torch.ones_like(products)
        )
        # (sum of units_j head_j) conj(head_i), plane by plane
        products = (units[:, None] * gram).sum(0)
    return units


def _rounds(n: int) -> int:
    """Rounds for n heads. Two need only one: the target is one of them, and turning the other onto it is optimal."""
    return ROUNDS if n > 2 else 1


def as_complex(heads: Tensor, planes: tuple[tuple[int, ...], ...]) -> Tensor:
    """(n,D,X) -> (n,P,X): the two features of a plane as one complex number."""
    # indexed: (n,P,2,X)
    return torch.complex(*heads[:, torch.tensor(planes)].unbind(2))


def write_planes(
    maps: Tensor, numbers: Tensor, planes: tuple[tuple[int, ...], ...]
) -> None:
    """Write complex numbers (n,P) into maps (n,D,D) as what multiplies the planes by them.

    Of a + ib that is the block [[a, -b], [b, a]] on the two features of its plane.
    """
    first, second = torch.tensor(planes).T
    maps[:, first, first] = maps[:, second, second] = numbers.real
    maps[:, first, second], maps[:, second, first] = -numbers.imag, numbers.imag


def medoid(similarity: Tensor) -> int:
    """The head that resembles the others most, by similarities (n,n): the first target."""
    return int(similarity.sum(1).argmax())
