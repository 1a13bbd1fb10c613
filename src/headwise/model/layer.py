"""The multi-head attention layer: four Linears around `attend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.masks import Mask, bare_mask_error
from headwise.rungs.cache import KVCache
from headwise.rungs.rope import Rotation
from headwise.rungs.tensor import attend
from headwise.spec import AttentionSpec, Options, RoPE


class Call(NamedTuple):
    """What the attention inside a layer was given and gave; handed to watchers."""

    layer: MultiHeadAttention
    q: Tensor  # (B,H,T,D), normed and turned
    k: Tensor  # (B,G,S,D), with what a cache held
    v: Tensor  # (B,G,S,E)
    options: Options  # as given to the rung; `trace(q, k, v, options)` gives every step
    out: Tensor  # (B,H,T,E), before the heads are joined


class MultiHeadAttention(nn.Module):
    """Multi-head attention for self and cross attention, MHA, GQA and MQA, with or without a cache.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2. The arguments are the fields of `AttentionSpec`, which
    explains them; `layer.spec` gives them back with every size filled in. The projections are the Linear modules
    `q_proj` (h*d, d_in), `k_proj` (g*d, d_context), `v_proj` (g*e, d_context), `o_proj` (d_out, h*e); head 3 owns rows
    3*d to 4*d of `q_proj.weight` and columns 3*e to 4*e of `o_proj.weight`.

        layer = MultiHeadAttention(768, 12, n_kv_heads=4, mask=Causal(), rope=RoPE())
        y = layer(x)                                            # (B, T, 768) -> (B, T, 768)
        y = layer(x, context=memory, mask=Lengths(lengths))     # cross attention
        y = layer(next_token, cache=cache)                      # with cache = KVCache()
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        d_in: int | None = None,
        d_context: int | None = None,
        d_out: int | None = None,
        q_bias: bool = False,
        kv_bias: bool = False,
        out_bias: bool = False,
        out_proj: bool = True,
        mask: Mask | None = None,
        rope: RoPE | None = None,
        qk_norm: bool = False,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.spec = spec = AttentionSpec(**given)
        self.q_proj = nn.Linear(spec.d_in, spec.q_dim, bias=q_bias)
        self.k_proj = nn.Linear(spec.d_context, spec.k_dim, bias=kv_bias)
        self.v_proj = nn.Linear(spec.d_context, spec.v_dim, bias=kv_bias)
        self.o_proj = nn.Linear(spec.joined_dim, spec.d_out, bias=out_bias) if out_proj else None
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=1e-6) if qk_norm else None
        self.sink = nn.Parameter(torch.zeros(n_heads)) if sink else None
        self._rotation = Rotation(rope, spec.head_dim) if rope else None
        self.watchers: list[Callable[[Call], None]] = []

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> MultiHeadAttention:
        """The layer that a spec describes."""
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Attend from x (B,T,d_in) to itself, or to `context` (B,S,d_context). Returns (B,T,d_out).

        mask       joined with the layer's own mask by &; S counts what the cache holds
        cache      keys and values of earlier tokens; x is what comes after them
        positions  (T,) or (B,T) whole numbers for RoPE; default: counted on from the cache
        gate       (H,) multiplies each head's output; gate 0 silences a head
        """
        self._check(x, context, mask, cache, positions)
        source = x if context is None else context
        q = self._split(self.q_proj(x), self.spec.n_heads)
        k = self._split(self.k_proj(source), self.spec.n_kv_heads)
        v = self._split(self.v_proj(source), self.spec.n_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self._rotation is not None:
            start = 0 if cache is None else cache.length
            q, k = self._rotation(q, start, positions), self._rotation(k, start, positions)
        if cache is not None:
            k, v = cache.append(k, v)

        own = self.spec.mask
        both = own & mask if own is not None and mask is not None else own if mask is None else mask
        dropout = self.spec.dropout if self.training else 0.0
        options = Options(both, None, self.spec.softcap, self.sink, dropout, gate)
        out = attend(q, k, v, options)
        for watcher in self.watchers:
            watcher(Call(self, q, k, v, options, out))
        joined = out.transpose(1, 2).flatten(2)
        result: Tensor = joined if self.o_proj is None else self.o_proj(joined)
        return result

    def _split(self, x_btc: Tensor, n_heads: int) -> Tensor:
        """(B,T,h*d) -> (B,h,T,d): head h is the h-th slice of the width."""
        B, T, width = x_btc.shape
        return x_btc.reshape(B, T, n_heads, width // n_heads).transpose(1, 2)

    def _check(
        self, x: Tensor, context: Tensor | None, mask: object, cache: KVCache | None, positions: Tensor | None
    ) -> None:
        _require_width("x", x, self.spec.d_in, "d_in")
        if mask is not None and not isinstance(mask, Mask):
            raise bare_mask_error(mask)
        if positions is not None and self._rotation is None:
            raise HeadwiseError("positions= is for RoPE, and this layer has none; build it with rope=RoPE()")
        if context is None:
            if self.spec.d_context != self.spec.d_in:
                raise HeadwiseError(
                    f"this layer reads keys of width d_context={self.spec.d_context} and x has {self.spec.d_in}; "
                    f"pass context="
                )
            return
        _require_width("context", context, self.spec.d_context, "d_context")
        if self._rotation is not None:
            raise HeadwiseError("context= with rope=: queries and keys of two sequences share no positions; drop one")
        if cache is not None:
            raise HeadwiseError("cache= with context=: a KVCache grows with x; leave it out of cross attention")

    def extra_repr(self) -> str:
        sizes = f"n_heads={self.spec.n_heads}, n_kv_heads={self.spec.n_kv_heads}, head_dim={self.spec.head_dim}"
        return sizes if self.spec.mask is None else f"{sizes}, mask={self.spec.mask!r}"


def _require_width(name: str, x: Tensor, width: int, field: str) -> None:
    if x.ndim != 3:
        raise HeadwiseError(f"{name} has shape {tuple(x.shape)}, {x.ndim} axes; the layer takes (batch, tokens, width)")
    if x.shape[-1] != width:
        raise HeadwiseError(f"{name} has width {x.shape[-1]}; this layer has {field}={width}")
