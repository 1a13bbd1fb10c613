"""The multi-head attention layer: four Linears around `attend`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.backends.cache import KVCache
from headwise.backends.torch_ import Rotation, attend
from headwise.errors import HeadwiseError, refuses_foreign
from headwise.layer.head import Heads, without
from headwise.layer.projections import ELSEWHERE, AttentionLayer, check_rolling
from headwise.masks import Mask
from headwise.positions import RoPE
from headwise.records import Call
from headwise.spec import AttentionSpec


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention for self and cross attention, MHA, GQA and MQA, with or without a cache.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2. The arguments are the fields of `AttentionSpec`, which
    explains them; `layer.spec` gives them back with every size filled in. The projections are the Linear modules
    `q_proj` (h*d, d_in), `k_proj` (g*d, d_context), `v_proj` (g*e, d_values), `o_proj` (d_out, h*e); head 3 owns rows
    3*d to 4*d of `q_proj.weight` and columns 3*e to 4*e of `o_proj.weight`, and `layer.heads[3]` hands them out.

        layer = MultiHeadAttention(768, 12, n_kv_heads=4, mask=Causal(), rope=RoPE())
        y = layer(x)                                            # (B, T, 768) -> (B, T, 768)
        y = layer(x, context=memory, mask=Lengths(lengths))     # cross attention
        y = layer(q, k, v)                                      # MultiHead(Q, K, V) of the paper
        y = layer(next_token, cache=cache)                      # with cache = KVCache()
    """

    @refuses_foreign(ELSEWHERE["built"])
    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        kv_index: Sequence[int] | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        d_in: int | None = None,
        d_context: int | None = None,
        d_values: int | None = None,
        d_out: int | None = None,
        q_bias: bool = False,
        kv_bias: bool = False,
        out_bias: bool = False,
        out_proj: bool = True,
        mask: Mask | None = None,
        rope: RoPE | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # The arguments by name, which are the fields of the spec: spelled out above for who calls and for `help`.
        arguments = locals()
        spec = AttentionSpec(
            **{name: arguments[name] for name in AttentionSpec.__dataclass_fields__}
        )
        super().__init__(spec, Rotation(rope, spec.head_dim) if rope else None)
        linear = functools.partial(nn.Linear, device=device, dtype=dtype)
        norm = functools.partial(
            nn.RMSNorm, spec.head_dim, eps=spec.qk_norm_eps, device=device, dtype=dtype
        )
        self.q_proj = linear(spec.d_in, spec.q_dim, bias=spec.q_bias)
        self.k_proj = linear(spec.d_context, spec.k_dim, bias=spec.kv_bias)
        self.v_proj = linear(spec.d_values, spec.v_dim, bias=spec.kv_bias)
        self.o_proj = (
            linear(spec.joined_dim, spec.d_out, bias=spec.out_bias)
            if spec.out_proj
            else None
        )
        self.q_norm = norm() if spec.qk_norm else None
        self.k_norm = norm() if spec.qk_norm else None
        self.sink = (
            nn.Parameter(torch.zeros(spec.n_heads, device=device, dtype=dtype))
            if spec.sink
            else None
        )

    @property
    def heads(self) -> Heads:
        """The heads, one by one: `layer.heads[3].wq` is head 3's own slice, to read and to write."""
        return Heads(self)

    # a function of `layer.head` as a method: another layer with fewer heads
    without = without

    @refuses_foreign(ELSEWHERE["called"])
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Attend from x to itself, or to a context.

        One document may go without its axis: (T,d_in), and then (S,d_context) and (S,d_values), give (T,d_out).

        Args:
            x: (B,T,d_in)
            context: (B,S,d_context), which keys are made of; default x. That makes it cross attention, without RoPE,
                also of x to itself
            values: (B,S,d_values), from which values are made in the place of `context`, whose keys they belong to:
                layer(q, k, v) is MultiHead(Q, K, V), and layer(x, x, x) is layer(x)
            mask: joined with the layer's own mask by &; S counts what the cache holds
            cache: keys and values of earlier tokens, x being what comes after them; or of the context, computed by
                the first call and used by the later ones, which may leave `context` and `values` out
            positions: (T,) or (B,T) whole numbers for RoPE; default: counted on from the cache
            gate: (H,) multiplies each head's output; gate 0 silences a head

        Returns:
            (B,T,d_out).

        Raises:
            HeadwiseError: with both numbers where shapes, dtypes, a mask or a cache do not fit the layer.
        """
        return self.attended(
            x, context, values, mask=mask, cache=cache, positions=positions, gate=gate
        )[0]

    def attended(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Call]:
        """What `forward` gives, and the call of the attention inside."""
        # as they were passed: a cache knows its context by the tensors themselves
        sources = context, context if values is None else values
        is_one_document = x.ndim == 2
        x, context, values, mask, cross = self.prepared(
            x, context, values, mask, cache, positions
        )
        # position of the first new token in its text
        start = cache.length if cache else 0
        spec = self.spec
        n_kv_heads = spec.n_kv_heads
        q = self.ready(
            self.q_proj(x), spec.n_heads, spec.head_dim, self.q_norm, start, positions
        )
        if cache and cache.holds_context:
            k, v = cache.held(sources)
        else:
            keys = x if context is None else context
            k_bsc = self.k_proj(keys)
            v_bsc = self.v_proj(keys if values is None else values)
            k = self.ready(
                k_bsc, n_kv_heads, spec.head_dim, self.k_norm, start, positions
            )
            v = self.split(v_bsc, n_kv_heads, spec.value_dim)
            if cache:
                k, v = cache.offer(k, v)
        options = self.options(mask, gate)
        out = attend(q, k, v, options)
        # Only now: a call that was refused leaves the cache as it was.
        if cache:
            made_of = (None, None) if context is None else sources
            cache.take(self._number, made_of)
        call = Call(self, q, k, v, options, out, cross, start)
        result = self.answer(call)
        return result[0] if is_one_document else result, call

    def prepared(
        self,
        x: Tensor,
        context: Tensor | None,
        values: Tensor | None,
        mask: Mask | None,
        cache: KVCache | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Mask | None, bool]:
        """The checked inputs of a call as (B,T,width), the mask of layer and call; is it cross attention?

        Values that are the context become None, and both if they are x.
        """
        for name, tensor in (("x", x), ("context", context), ("values", values)):
            if not isinstance(tensor, Tensor) and (tensor is not None or name == "x"):
                raise HeadwiseError(
                    f"{name} is a {type(tensor).__name__}; the layer takes torch.as_tensor({name}), and a mask as mask="
                )
        # layer(x, m, m) is layer(x, m), and layer(x, x, x) is layer(x), as the paper writes self attention. But
        # layer(x, x) stays cross attention: a context alone asks for that.
        if values is not None and values is context:
            context = None if context is x else context
            values = None
        if x.ndim == 2:
            x = x[None]
            context = None if context is None else context[None]
            values = None if values is None else values[None]
        whole = self.mask_with(mask)
        self.check(x, context, values, whole, cache, positions)
        cross = context is not None or bool(cache and cache.holds_context)
        if not cross:
            whole = self.mask_with(mask, cache, x.shape[1])
        return x, context, values, whole, cross

    def check(
        self,
        x: Tensor,
        context: Tensor | None,
        values: Tensor | None,
        mask: Mask | None,
        cache: KVCache | None,
        positions: Tensor | None,
    ) -> None:
        """Raise HeadwiseError when a call does not fit the layer; `mask` is that of layer and call together."""
        self.check_self(x, mask, cache, positions)
        if context is not None:
            self._check_context(x, context, cache, values)
        elif values is not None:
            raise HeadwiseError(
                "values= is passed without context=: each value belongs to a key; pass what the keys are made of as "
                "context="
            )
        # self attention: x has to serve for keys and values, too
        elif not (cache and cache.holds_context):
            spec = self.spec
            if not spec.d_in == spec.d_context == spec.d_values:
                raise HeadwiseError(
                    f"this layer reads keys of width d_context={spec.d_context} and values of width d_values="
                    f"{spec.d_values}, and x has {spec.d_in}; pass context=, and values= where they differ"
                )
            if cache and cache.window:
                check_rolling(cache.window, mask)
            return
        # in pieces: where their queries stand must not hang on how many there are
        for part in mask.parts() if mask and cache else ():
            if part.aligned():
                raise HeadwiseError(
                    f"{part!r} with a cache of a context: where its queries stand hangs on their number, and a "
                    f"piece of them does not know how many came before; give it an offset= in each call, or leave "
                    f"the cache out"
                )

    def _check_context(
        self, x: Tensor, context: Tensor, cache: KVCache | None, values: Tensor | None
    ) -> None:
        spec = self.spec
        self.check_fit("context", context, "d_context")
        if values is not None:
            self.check_fit("values", values, "d_values")
            if values.shape[:2] != context.shape[:2]:
                raise HeadwiseError(
                    f"values has {values.shape[0]} documents of {values.shape[1]} tokens, context has "
                    f"{context.shape[0]} of {context.shape[1]}; each key needs its value"
                )
        elif spec.d_values != spec.d_context:
            raise HeadwiseError(
                f"this layer reads values of width d_values={spec.d_values} and context has {spec.d_context}; pass "
                f"values="
            )
        if x.shape[0] != context.shape[0]:
            raise HeadwiseError(
                f"x has {x.shape[0]} documents, context has {context.shape[0]}; pass as many of each"
            )
        if cache and cache.length and not cache.holds_context:
            raise HeadwiseError(
                f"the cache holds {cache.length} tokens of self attention, and context= is passed; "
                f"use a new KVCache for it"
            )
        if self._rotation:
            raise HeadwiseError(
                "context= with rope=: queries and keys of two sequences share no positions; drop one"
            )
        if cache and cache.window:
            raise HeadwiseError(
                f"context= with a cache of window={cache.window}: a context stays whole; drop window="
            )
