"""Multi-head latent attention (MLA): one vector a token, from which every head makes its keys and values.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. Of each token a cache keeps c = norm(W_DKV x), latent_dim wide, and k_R,
the part of the key that carries the position, rope_dim wide, one for all heads. Head h makes of it, by its rows of
`kv_up`, the content of its key W_UK c and its value W_UV c. There are two ways to attend, of one answer:

    expanded  keys (W_UK c, k_R) and values W_UV c are made for every head and token: ordinary attention
    absorbed  q . W_UK c = (W_UK^T q) . c: queries (W_UK^T q, q_R) read what is kept, as the one key/value head of MQA
              whose values are its latents; W_UV then turns what a head has gathered into its output

Expanding costs S times the projection up and then narrow heads, absorbing T times it and then wide ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headwise.layer.projections import Projections
from headwise.rungs.tensor import attend
from headwise.spec import AttentionSpec, Options


def products(spec: AttentionSpec, T: int, S: int) -> dict[str, int]:
    """Multiplications of each way for T queries and S keys of one document.

    Expanded, each of S tokens goes through `kv_up`, and a pair costs a product of the key's width and one of the
    value's. Absorbed, each of T queries goes through it, and a pair costs twice the width of what is kept, which is
    read once as a key and once as a value: see `absorbed`.
    """
    up, pairs = spec.expanding_weights, spec.n_heads * T * S
    return {
        "expanded": S * up + pairs * (spec.head_dim + spec.value_dim),
        "absorbed": T * up + pairs * 2 * spec.cache_values_per_token,
    }


def absorbs(layer: Projections, T: int, S: int) -> bool:
    """Is the absorbed way taken? Where it has fewer multiplications, and no adapter stands for `kv_up`."""
    ways = products(layer.spec, T, S)
    return isinstance(layer.kv_up, nn.Linear) and ways["absorbed"] < ways["expanded"]


def expanded(layer: Projections, kept_b1sl: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (B,H,S,D) and values (B,H,S,E) of every head, out of what is kept."""
    spec = layer.spec
    content, rotary = torch.split(kept_b1sl, [kept_b1sl.shape[-1] - spec.rope_dim, spec.rope_dim], -1)
    up_bsx = layer.kv_up(content).squeeze(1)  # x: what all heads make of a token, head after head
    up_bhsx = up_bsx.unflatten(-1, (spec.n_heads, spec.up_dim)).transpose(1, 2)
    k, v = split_up(spec, up_bhsx, -1)
    return torch.cat([k, rotary.expand(-1, spec.n_heads, -1, -1)], -1), v


def absorbed(layer: Projections, q_bhtd: Tensor, kept_b1sl: Tensor, options: Options) -> Tensor:
    """What the heads give, (B,H,T,E), without keys and values of their own."""
    spec = layer.spec
    up_k, up_v = split_up(spec, layer.kv_up.weight.view(spec.n_heads, spec.up_dim, -1), 1)
    content, rotary = torch.split(q_bhtd, [spec.content_dim, spec.rope_dim], -1)
    # l is a feature of the latent, n one of a key's content: q . W_UK c = (W_UK^T q) . c
    wide = torch.cat([torch.einsum("bhtn,hnl->bhtl", content, up_k), rotary], -1)
    scale = 1 / math.sqrt(spec.head_dim) if options.scale is None else options.scale
    # As keys they are wider than as values, by the rotary part. A kernel wants both equal and would fill the values up
    # with zeros again, so they keep that part, and what is gathered of it is thrown away.
    gathered = attend(wide, kept_b1sl, kept_b1sl, options._replace(scale=scale, kv_index=None))
    return torch.einsum("bhtl,hel->bhte", gathered[..., : up_v.shape[-1]], up_v)


def split_up(spec: AttentionSpec, up: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """What makes contents of keys and what makes values, of the rows of `kv_up` for one head or what they gave."""
    k, v = torch.split(up, [spec.content_dim, spec.value_dim], axis)
    return k, v


def through(down: Tensor, norm: nn.Module, up: Tensor) -> Tensor:
    """`up` diag(gain) `down`: two matrices and the gain of the norm between them as one."""
    gain: Tensor | float = getattr(norm, "weight", 1.0)
    return (up * gain) @ down[: up.shape[1]]  # the rows of `down` after these make the rotary key
