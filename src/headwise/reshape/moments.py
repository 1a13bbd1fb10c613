"""What the attention of each layer reads on a text, as second moments: all that aligning and choosing heads needs.

For inputs x with a 1 appended, S = E[x x'] gives E[(a.x)(b.x)] = a' S b over the text. With L L' = S, the rows of
[W | bias] L have the inner products of the activations, in C + 1 columns however long the text is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.ask import hooked, run_body
from headwise.models.stream import sweep
from headwise.models.weights import AttentionWeights, attentions, input_projection


@torch.no_grad()
def moments(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each layer a root L (C+1,X), X at most C+1, of E[x x'], over ids (B,T) of equal length in each batch.

    They come one by one, and of a streamed model one is held at a time.
    """
    n_layers, n_tokens = len(attentions(model)), sum(ids.numel() for ids in batches)
    sums: dict[int, list[Tensor]] = {}  # of a short text the inputs themselves: they are a root

    def add(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().flatten(0, -2)
        x = x.cpu().double() if x.dtype.itemsize > 2 else x.float()  # the numbers of half precision have 8 or 11 bits
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        if n_tokens <= x.shape[1]:
            sums.setdefault(layer, []).append(x.cpu())
        else:
            sums[layer] = [(x.T @ x).cpu().double() + sums.get(layer, [0.0])[0]]

    if not n_tokens:
        raise HeadwiseError("there is no calibration text to read; pass one with --text")
    for turn in sweep(model, batches):
        with hooked(input_projection(model, n).register_forward_pre_hook(partial(add, n)) for n in range(n_layers)):
            for _, ids in turn:
                run_body(model, ids)
        for layer in sorted(sums):
            yield _root(torch.cat(sums.pop(layer)), n_tokens)


def _root(x: Tensor, n_tokens: int) -> Tensor:
    """Of inputs (N,C+1), or of the sum of their squares (C+1,C+1)."""
    if n_tokens <= x.shape[1]:
        return x.T / math.sqrt(n_tokens)
    values, vectors = torch.linalg.eigh(x / n_tokens)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T  # what rounding made negative counts as 0
    return root


def activations(w: Tensor, bias: Tensor | None, root: Tensor) -> Tensor:
    """Heads w (G,D,C) and their bias (G,D) as (G,D,C+1): inner products of rows are means over the text."""
    bias = w.new_zeros(w.shape[:2]) if bias is None else bias
    return (torch.cat([w, bias[..., None]], 2).to(root) @ root).to(w)


def keys(weights: AttentionWeights, root: Tensor) -> Tensor:
    """Key activations (G,D,C+1), before RoPE. A qk-norm divides by the norm of each vector: here, of the mean one."""
    return _normed(activations(weights.wk, weights.bk, root), weights.k_gain)


def queries(weights: AttentionWeights, root: Tensor) -> Tensor:
    return _normed(activations(weights.wq, weights.bq, root), weights.q_gain)


def _normed(heads: Tensor, gain: Tensor | None) -> Tensor:
    return heads if gain is None else heads / mean_norm(heads)[:, None, None] * gain[:, None]


def mean_norm(heads: Tensor) -> Tensor:
    """(n,): the root mean square of the D features of activations (n,D,X); 1 where it is 0."""
    size = heads.square().sum(-1).mean(-1).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))
