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
from functools import partial

import torch
from torch import Tensor, nn

from headwise.backends.cache import KVCache
from headwise.backends.torch_ import Rotation, attend
from headwise.layer.projections import AttentionLayer, check_rolling, normed
from headwise.masks import Mask
from headwise.positions import RoPE
from headwise.records import Call
from headwise.spec import LatentSpec, Options


class MultiHeadLatentAttention(AttentionLayer):
    """Self attention whose cache holds one latent and one rotary key a token, for all heads.

        mla = hw.MultiHeadLatentAttention(768, 12, latent_dim=96, rope_dim=16, mask=hw.Causal())
        y = mla(x)                                              # (B, T, 768) -> (B, T, 768)
        y = mla(next_token, cache=cache)                        # with cache = hw.KVCache(), 112 numbers a token

    `LatentSpec` explains the arguments; `mla.spec` gives them back. Head h owns rows h*d to h*d + d of
    `q_proj.weight` (h*d, d_model or q_latent_dim), its last rope_dim ones are rotated; rows h*(n+e) to (h+1)*(n+e) of
    `kv_up.weight`, n = d - rope_dim for its keys and then e for its values; and e columns of `o_proj.weight`.
    `kv_down` (latent_dim + rope_dim, d_model) makes the latent and the rotary key, `q_down` the latent of queries.
    """

    spec: LatentSpec

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        latent_dim: int,
        rope_dim: int = 0,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        q_latent_dim: int | None = None,
        latent_norm: bool = True,
        q_bias: bool = False,
        kv_bias: bool = False,
        out_bias: bool = False,
        mask: Mask | None = None,
        rope: RoPE | None = None,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # The arguments by name, which are fields of the spec: spelled out above for who calls and for `help`.
        arguments = {**locals(), "qk_norm_eps": norm_eps}
        if rope_dim and rope is None:
            arguments["rope"] = RoPE()
        fields = LatentSpec.__dataclass_fields__.keys() & arguments.keys()
        spec = LatentSpec(**{name: arguments[name] for name in fields})
        super().__init__(
            spec,
            Rotation(spec.rope, rope_dim, last=True) if spec.rope else None,
        )
        self.sink = None
        linear = partial(nn.Linear, device=device, dtype=dtype)
        norm = (
            partial(nn.RMSNorm, eps=norm_eps, device=device, dtype=dtype)
            if latent_norm
            else nn.Identity
        )
        if spec.q_latent_dim is None:
            self.q_proj = linear(d_model, spec.q_dim, bias=q_bias)
        # as in DeepSeek's layers, what reads a latent has no bias: the matrix that makes it may have one
        else:
            self.q_down = linear(d_model, spec.q_latent_dim, bias=q_bias)
            self.q_latent_norm = norm(spec.q_latent_dim)
            self.q_proj = linear(spec.q_latent_dim, spec.q_dim, bias=False)
        self.kv_down = linear(d_model, spec.cache_values_per_token, bias=kv_bias)
        self.kv_latent_norm = norm(spec.latent_dim)
        self.kv_up = linear(spec.latent_dim, n_heads * spec.up_dim, bias=False)
        self.o_proj = linear(spec.joined_dim, spec.d_out, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Attend from x (B,T,d_model), or (T,d_model) of one document, to itself and what the cache holds.

        The arguments are those of `MultiHeadAttention.forward`, and so are the errors.
        """
        is_one_document = x.ndim == 2
        x = x[None] if x.ndim == 2 else x
        self.check_self(x, self.mask_with(mask), cache, positions)
        if cache and cache.window:
            check_rolling(cache.window, self.mask_with(mask))
        start = cache.length if cache else 0
        spec = self.spec
        read = (
            x
            if spec.q_latent_dim is None
            else normed(self.q_latent_norm, self.q_down(x))
        )
        q = self.ready(
            self.q_proj(read), spec.n_heads, spec.head_dim, None, start, positions
        )
        content, rotary = self.kv_down(x).split([spec.latent_dim, spec.rope_dim], -1)
        both = torch.cat([normed(self.kv_latent_norm, content), rotary], -1)
        # The rotation turns the last features: the rotary key. Values are 0 wide, for a cache takes pairs.
        kept = self.ready(both, 1, spec.cache_values_per_token, None, start, positions)
        if cache:
            kept, _ = cache.offer(kept, kept[..., :0])
        options = self.options(self.mask_with(mask, cache, x.shape[1]), gate)
        options = options._replace(kv_index=None)
        ways = products(spec, q.shape[2], kept.shape[2])
        # An adapter, such as LoRA's, adds to what `kv_up` gives, and its weight alone would not be all of the function.
        is_plain = isinstance(self.kv_up, nn.Linear)
        absorbs = is_plain and ways["absorbed"] < ways["expanded"]
        k, v = (kept, kept) if absorbs and not self.watchers else expanded(self, kept)
        out = absorbed(self, q, kept, options) if absorbs else attend(q, k, v, options)
        if cache:
            cache.take(self._number)
        # Watchers are shown keys and values of every head, whichever way is taken.
        result = self.answer(Call(self, q, k, v, options, out, False, start))
        return result[0] if is_one_document else result

    def watched(self) -> tuple[int, Tensor | None, Tensor | None]:
        """As `records.Watchable` has it; W_V is the product through the latent, but for the norm's division."""
        up = self.kv_up
        o_proj = self.o_proj
        if not isinstance(up, nn.Linear) or not isinstance(o_proj, nn.Linear):
            return self.spec.n_heads, getattr(o_proj, "weight", None), None
        spec = self.spec
        up_hxl = up.weight.detach().view(-1, spec.up_dim, spec.latent_dim)
        values = up_hxl[:, spec.content_dim :].flatten(0, 1)
        # nn.Identity, where latents have no norm, has no gain
        gain = getattr(self.kv_latent_norm, "weight", 1.0)
        # the rows of `kv_down` after these make the rotary key
        down = self.kv_down.weight.detach()[: spec.latent_dim]
        return spec.n_heads, o_proj.weight, (values * gain) @ down


def products(spec: LatentSpec, T: int, S: int) -> dict[str, int]:
    """Multiplications of each way for T queries and S keys of one document.

    Expanded, each of S tokens goes through `kv_up`, and a pair costs a product of the key's width and one of the
    value's. Absorbed, each of T queries goes through it, and a pair costs twice the width of what is kept, which is
    read once as a key and once as a value: see `absorbed`.
    """
    up = spec.expanding_weights
    pairs = spec.n_heads * T * S
    return {
        "expanded": S * up + pairs * (spec.head_dim + spec.value_dim),
        "absorbed": T * up + pairs * 2 * spec.cache_values_per_token,
    }


def expanded(
    layer: MultiHeadLatentAttention, kept_b1sl: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys (B,H,S,D) and values (B,H,S,E) of every head, out of what a cache keeps: latents, then rotary keys."""
    spec = layer.spec
    content, rotary = torch.split(kept_b1sl, [spec.latent_dim, spec.rope_dim], -1)
    up_bhsx = layer.split(layer.kv_up(content.squeeze(1)), spec.n_heads, spec.up_dim)
    k, v = torch.split(up_bhsx, [spec.content_dim, spec.value_dim], -1)
    # all heads have the same rotary key
    return torch.cat([k, rotary.expand(-1, k.shape[1], -1, -1)], -1), v


def absorbed(
    layer: MultiHeadLatentAttention, q_bhtd: Tensor, kept_b1sl: Tensor, options: Options
) -> Tensor:
    """What the heads give, (B,H,T,E), without keys and values of their own.

    `kept_b1sl` is what `expanded` takes, here read by all heads as one key/value head.
    """
    spec = layer.spec
    # Its weight is all of `kv_up`, which never has a bias.
    up_hxl = layer.kv_up.weight.view(spec.n_heads, spec.up_dim, spec.latent_dim)
    up_k, up_v = torch.split(up_hxl, [spec.content_dim, spec.value_dim], 1)
    content, rotary = torch.split(q_bhtd, [spec.content_dim, spec.rope_dim], -1)
    # l is a feature of the latent, n one of a key's content: q . W_UK c = (W_UK^T q) . c
    wide = torch.cat([torch.einsum("bhtn,hnl->bhtl", content, up_k), rotary], -1)
    # Said, as `attend` would take the usual scale for the width of `wide`.
    scale = 1 / math.sqrt(spec.head_dim) if options.scale is None else options.scale
    # As keys they are wider than as values, by the rotary part. A kernel wants both equal and would fill the values up
    # with zeros again, so they keep that part, and what is gathered of it is thrown away.
    gathered = attend(wide, kept_b1sl, kept_b1sl, options._replace(scale=scale))
    return torch.einsum("bhtl,hel->bhte", gathered[..., : spec.latent_dim], up_v)
