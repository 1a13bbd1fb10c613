"""Multi-head latent attention (MLA): one vector a token, from which every head makes its keys and values.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. Of each token a cache keeps c = norm(W_DKV x), latent_dim wide, and k_R,
the part of the key that carries the position, rope_dim wide, one for all heads. Head h makes of it, by its rows of
`kv_up`, the content of its key W_UK c and its value W_UV c. There are two ways to attend, of one answer:

    expanded  keys (W_UK c, k_R) and values W_UV c are made for every head and token: ordinary attention
    absorbed  q . W_UK c = (W_UK^T q) . c: queries (W_UK^T q, q_R) read what is kept, as the one key/value head of MQA
              whose values are its latents; W_UV then turns what a head has gathered into its output

For T queries and S keys, expanding sends S tokens through `kv_up` and then compares narrow vectors; absorbing sends T
queries through it and then compares wide ones. So a prompt is usually expanded, a step of decoding absorbed.
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
    """Is the absorbed way taken? Where it has fewer multiplications, and no adapter stands for `kv_up`.

    An adapter, such as LoRA's, adds to what `kv_up` gives, and its weight alone would not be all of the function.
    """
    ways = products(layer.spec, T, S)
    return isinstance(layer.kv_up, nn.Linear) and ways["absorbed"] < ways["expanded"]


def expanded(layer: Projections, kept_b1sl: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (B,H,S,D) and values (B,H,S,E) of every head, out of what a cache keeps: latents, then rotary keys."""
    spec = layer.spec
    content, rotary = torch.split(kept_b1sl, [kept_b1sl.shape[-1] - spec.rope_dim, spec.rope_dim], -1)
    up_bsx = layer.kv_up(content).squeeze(1)  # x: what all heads make of a token, head after head
    up_bhsx = up_bsx.unflatten(-1, (spec.n_heads, spec.up_dim)).transpose(1, 2)
    k, v = split_up(spec, up_bhsx, -1)
    return torch.cat([k, rotary.expand(-1, spec.n_heads, -1, -1)], -1), v  # all heads have the same rotary key


def absorbed(layer: Projections, q_bhtd: Tensor, kept_b1sl: Tensor, options: Options) -> Tensor:
    """What the heads give, (B,H,T,E), without keys and values of their own.

    `kept_b1sl` is what `expanded` takes, here read by all heads as one key/value head.
    """
    spec = layer.spec
    # Its weight is all of `kv_up`, which never has a bias.
    up_k, up_v = split_up(spec, layer.kv_up.weight.view(spec.n_heads, spec.up_dim, -1), 1)
    content, rotary = torch.split(q_bhtd, [spec.content_dim, spec.rope_dim], -1)
    # l is a feature of the latent, n one of a key's content: q . W_UK c = (W_UK^T q) . c
    wide = torch.cat([torch.einsum("bhtn,hnl->bhtl", content, up_k), rotary], -1)
    # Said, as `attend` would take the usual scale for the width of `wide`.
    scale = 1 / math.sqrt(spec.head_dim) if options.scale is None else options.scale
    # As keys they are wider than as values, by the rotary part. A kernel wants both equal and would fill the values up
    # with zeros again, so they keep that part, and what is gathered of it is thrown away.
    # The layer's kv_index gives each head keys of its own; without one all heads read the one there is.
    gathered = attend(wide, kept_b1sl, kept_b1sl, options._replace(scale=scale, kv_index=None))
    return torch.einsum("bhtl,hel->bhte", gathered[..., : up_v.shape[-1]], up_v)


def split_up(spec: AttentionSpec, up: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Split one head's rows of `kv_up`, or what they gave, along `axis`: the content of its key, then its value."""
    k, v = torch.split(up, [spec.content_dim, spec.value_dim], axis)
    return k, v


def through(down: Tensor, norm: nn.Module, up: Tensor) -> Tensor:
    """`up` diag(gain) `down`: two matrices and the gain of the norm between them as one matrix.

    The norm's division by the size of each latent is not in it: that is a number for each token, and no matrix.
    """
    gain: Tensor | float = getattr(norm, "weight", 1.0)  # nn.Identity, where latents have no norm, has no gain
    return (up * gain) @ down[: up.shape[1]]  # the rows of `down` after these make the rotary key
