"""A certificate: the original and the imported layer answer the same random input, and the difference is measured.

The run is in eval mode; the caller's random state stays as it is. For bare weights the original is the formula,
written out here in plain steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import BroadcastGrid, Causal, Lengths, Mask
from headwise.positions import RoPE
from headwise.rungs.tensor import as_tensor

CAUSAL = Causal()

N_TEXTS, N_TOKENS, N_KEYS = 3, 13, 11  # of a certificate; N_KEYS of a context

# Answers x (B,T,c), what keys are made of (B,S,c) and what values are made of (B,S,c), both x in self attention, and
# what is added to the scores (B|1,H|1,T,S) or None, -inf = forbidden.
Original = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Imported:
    """A layer made of someone else's weights, and how far it is from the original.

    layer       a MultiHeadAttention with copies of the weights, in their dtype, on their device
    difference  largest absolute difference between the two on random input, in that dtype
    path        the importer and the layout it found
    compared    what was run against what, on which inputs and masks
    """

    layer: MultiHeadAttention
    difference: float
    path: str
    compared: str

    def __repr__(self) -> str:
        spec, what = self.layer.spec, self.compared.partition(" against ")[0]
        return f"Imported({self.path}: {spec!r}, within {self.difference:.2g} of {what})"


def certified(
    layer: MultiHeadAttention,
    original: Original,
    path: str,
    what: str,
    ways: Sequence[str] | None = None,
    n_tokens: int = N_TOKENS,
    padding: bool = True,
) -> Imported:
    """Run both on random input in eval mode, and hand the layer back with their largest difference.

    `ways` are "self" and "cross", by default what the layer can do; `padding` says whether the original takes a mask
    per call. In float32 and wider a difference beyond rounding is an error; in half precision rounding alone may be
    large, so there the figure speaks for itself.
    """
    spec, like, mode = layer.spec, layer.q_proj.weight, layer.training
    if ways is None:
        ways = ("self", "cross") if spec.mask is None and spec.rope is None else ("self",)
        ways = ways if spec.d_context == spec.d_values == spec.d_in else ("cross",)
    generator = torch.Generator("cpu").manual_seed(0)
    layer.eval()
    with torch.no_grad(), torch.device(like.device), torch.autocast(like.device.type, enabled=False):
        runs = {way: list(_runs(layer, original, way, n_tokens, padding, generator)) for way in ways}
    layer.train(mode)
    measured = torch.stack([torch.stack(numbers) for way in ways for _, *numbers in runs[way]])
    difference, size = measured.amax(0).tolist()  # which keeps NaN
    if like.dtype.itemsize >= 4 and not difference <= 1e-3 * size:
        raise HeadwiseError(
            f"{path}: the layer differs from {what} by {difference:.3g} where outputs reach {size:.3g}, beyond "
            f"rounding; its forward is not what its weights and name say, so it is not imported"
        )
    mask = "" if spec.mask is None else f", mask {spec.mask!r}"
    answered = [f"{way} attention ({', '.join(name for name, *_ in runs[way])})" for way in ways]
    compared = (
        f"{what} against the layer{mask}: {', '.join(answered)}; {N_TEXTS} texts of {n_tokens} tokens, "
        f"{str(like.dtype).removeprefix('torch.')} on {like.device.type}, eval"
    )
    return Imported(layer, difference, path, compared)


def _runs(
    layer: MultiHeadAttention, original: Original, way: str, n_tokens: int, padding: bool, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Both on one random input under each mask that the original can be given: its name, largest difference, output."""
    spec, like = layer.spec, layer.q_proj.weight
    n_keys = n_tokens if way == "self" else N_KEYS
    x, memory, others = (
        torch.randn(N_TEXTS, length, width, generator=generator, device="cpu").to(like)
        for length, width in ((n_tokens, spec.d_in), (n_keys, spec.d_context), (n_keys, spec.d_values))
    )
    context = None if way == "self" else memory
    values = None if context is None or spec.d_values == spec.d_context else others
    keys = x if context is None else context
    masks: list[Mask | None] = [None]
    masks += [CAUSAL] * (way == "self" and spec.mask is None and padding) + [
        Lengths([n_keys, n_keys // 2 + 1, 1])
    ] * padding
    for mask in masks:
        added = _added(layer.mask_with(mask), spec.n_heads, n_tokens, n_keys, like)
        expected = original(x, keys, keys if values is None else values, added)
        ours = layer(x, context=context, values=values, mask=mask)
        if added is not None:  # a row that may attend nothing is 0 here, and elsewhere anything
            rows = (added > -math.inf).any(-1).all(1)[..., None]
            expected, ours = torch.where(rows, expected, 0), torch.where(rows, ours, 0)
        name = "no further mask" if mask is None else repr(mask)
        yield name, (ours - expected).abs().max(), expected.abs().max()


def _added(mask: Mask | None, n_heads: int, n_queries: int, n_keys: int, like: Tensor) -> Tensor | None:
    """A mask as numbers (B,H|1,T,S) to add to the scores, -inf = forbidden, in float32 or wider."""
    if mask is None:
        return None
    arange = partial(torch.arange, device=like.device)
    grid = BroadcastGrid((N_TEXTS, n_heads, n_queries, n_keys), partial(as_tensor, device=like.device), arange)
    mask.check(grid)
    allowed, bias = mask.allowed(grid), mask.bias(grid)
    dtype = torch.promote_types(like.dtype, torch.float32)
    zeros = torch.zeros(N_TEXTS, 1, n_queries, n_keys, dtype=dtype, device=like.device)
    numbers = zeros if bias is None else zeros + bias.to(dtype)
    return numbers if allowed is None else numbers.masked_fill(~allowed, -math.inf)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def split_heads(y_btc: Tensor, n_heads: int) -> Tensor:
    """(B,T,c) or what was split out of it, as (B,T,n,c/n)."""
    return y_btc.reshape(*y_btc.shape[:2], n_heads, -1)


def attended(
    q_bthd: Tensor, k_bsgd: Tensor, v_bsge: Tensor, added: Tensor | None, rope: RoPE | None, scale: float | None
) -> Tensor:
    """softmax(q k^T * scale) v, K and V repeated for every head, (B,T,H*E). A row that sees nothing is NaN."""
    if rope is not None:
        q_bthd, k_bsgd = _turned(q_bthd, rope), _turned(k_bsgd, rope)
    repeat = q_bthd.shape[2] // k_bsgd.shape[2]
    k, v = (y.repeat_interleave(repeat, 2) for y in (k_bsgd, v_bsge))
    scores = torch.einsum("bthd,bshd->bhts", q_bthd, k) * (q_bthd.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores if added is None else scores + added, -1)
    return torch.einsum("bhts,bshe->bthe", weights, v).flatten(2)


def _turned(x_bthd: Tensor, rope: RoPE) -> Tensor:
    """RoPE by complex numbers: pair m of the token at position p is multiplied by factor * exp(i * p * frequency_m)."""
    frequencies, factor = rope.frequencies(x_bthd.shape[-1])
    turning, rest = x_bthd[..., : 2 * len(frequencies)].double(), x_bthd[..., 2 * len(frequencies) :]
    position = torch.arange(x_bthd.shape[1], device=x_bthd.device)[:, None, None]
    angle = position * torch.tensor(frequencies, dtype=torch.float64, device=x_bthd.device)
    turn = torch.polar(torch.full_like(angle, factor), angle)
    if rope.interleaved:
        real, imaginary = turning[..., 0::2], turning[..., 1::2]
    else:
        real, imaginary = turning.chunk(2, -1)
    turned = torch.complex(real, imaginary) * turn
    back = torch.stack([turned.real, turned.imag], -1 if rope.interleaved else -2).flatten(-2)
    return torch.cat([back.to(x_bthd.dtype), rest], -1)
