"""What the attention of each layer reads on a text, as second moments: all that aligning and choosing heads needs.

For inputs x with a 1 appended, S = E[x x'] gives E[(a.x)(b.x)] = a' S b over the text. With L L' = S, the rows of
[W | bias] L have the inner products of the activations, in C + 1 columns however long the text is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.ask import hooked, run_body
from headwise.models.weights import AttentionWeights, attentions, input_projection


@torch.no_grad()
def moments(model: nn.Module, batches: Iterable[Tensor]) -> list[Tensor]:
    """For each layer a symmetric root L (C+1,C+1) of E[x x'], float64, over ids (B,T) of equal length in each batch."""
    n_layers = len(attentions(model))
    sums: list[Tensor | float] = [0.0] * n_layers

    def add(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().flatten(0, -2).double()
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        sums[layer] = x.T @ x + sums[layer]

    with hooked(input_projection(model, n).register_forward_pre_hook(partial(add, n)) for n in range(n_layers)):
        for ids in batches:
            run_body(model, ids)
    roots = []
    for layer in range(n_layers):
        total, sums[layer] = sums[layer], 0.0  # freed here: roots are as large
        if not isinstance(total, Tensor):
            raise HeadwiseError("there is no calibration text to read; pass one with --text")
        values, vectors = torch.linalg.eigh(total / total[-1, -1])  # the last sum is of ones: it counts the tokens
        roots.append((vectors * values.clamp(min=0).sqrt()) @ vectors.T)  # what rounding made negative counts as 0
    return roots


def activations(w: Tensor, bias: Tensor | None, root: Tensor) -> Tensor:
    """Heads w (G,D,C) and their bias (G,D) as (G,D,C+1): inner products of rows are means over the text."""
    bias = w.new_zeros(w.shape[:2]) if bias is None else bias
    return torch.cat([w, bias[..., None]], 2) @ root


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
