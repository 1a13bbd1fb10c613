"""The multi-head attention layer: four Linears around `attend`."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer import latent
from headwise.layer.head import Heads, permuted, without
from headwise.layer.projections import Projections
from headwise.masks import Bias, Mask, all_of, bare_mask_error
from headwise.positions import RelativeBias, RoPE
from headwise.records import Call
from headwise.rungs.cache import KVCache
from headwise.rungs.tensor import attend
from headwise.spec import AttentionSpec, Options

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

# What those type who come from torch.nn, transformers or a course, and what it is called here: in "built" of the
# arguments of the layer, in "called" of those of a call.
ELSEWHERE = tomllib.loads(resources.files("headwise.layer").joinpath("elsewhere.toml").read_text(encoding="utf-8"))


def _refuses_foreign(words: Mapping[str, str]) -> Callable[[MethodT], MethodT]:
    """A method that refuses these `words` of other libraries as keywords, and says what each is called here."""

    def around(method: MethodT) -> MethodT:
        @functools.wraps(method)
        def checked(*args: Any, **keywords: Any) -> Any:
            foreign = [name for name in keywords if name in words]
            if foreign:
                raise HeadwiseError("; ".join(f"{name}= is here {words[name]}" for name in foreign))
            return method(*args, **keywords)

        return cast(MethodT, checked)

    return around


class MultiHeadAttention(Projections):
    """Multi-head attention for self and cross attention, MHA, GQA, MQA and MLA, with or without a cache.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2. The arguments are the fields of `AttentionSpec`, which
    explains them; `layer.spec` gives them back with every size filled in. The projections are the Linear modules
    `q_proj` (h*d, d_in), `k_proj` (g*d, d_context), `v_proj` (g*e, d_values), `o_proj` (d_out, h*e); head 3 owns rows
    3*d to 4*d of `q_proj.weight` and columns 3*e to 4*e of `o_proj.weight`, and `layer.heads[3]` hands them out.
    With latent_dim, `kv_down` and `kv_up` stand in the place of `k_proj` and `v_proj`; see `headwise.layer.latent`.

        layer = MultiHeadAttention(768, 12, n_kv_heads=4, mask=Causal(), rope=RoPE())
        y = layer(x)                                            # (B, T, 768) -> (B, T, 768)
        mla = MultiHeadAttention(768, 12, latent_dim=96, rope_dim=16, mask=Causal())
        y = layer(x, context=memory, mask=Lengths(lengths))     # cross attention
        y = layer(q, k, v)                                      # MultiHead(Q, K, V) of the paper
        y = layer(next_token, cache=cache)                      # with cache = KVCache()
    """

    @_refuses_foreign(ELSEWHERE["built"])
    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        kv_index: Sequence[int] | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        latent_dim: int | None = None,
        rope_dim: int | None = None,
        q_latent_dim: int | None = None,
        latent_norm: bool = True,
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
        relative_bias: RelativeBias | None = None,
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
        super().__init__(**{name: arguments[name] for name in (*AttentionSpec.__dataclass_fields__, "device", "dtype")})

    @property
    def heads(self) -> Heads:
        """The heads, one by one: `layer.heads[3].wq` is head 3's own slice, to read and to write."""
        return Heads(self)

    # Functions of `layer.head` as methods: another layer with fewer heads, or with them in another order.
    without = without
    permuted = permuted

    @_refuses_foreign(ELSEWHERE["called"])
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
        sources = context, values  # as they were passed: a cache knows its context by the tensors themselves
        batch, context, values = self.batched(x, context, values)
        is_one_document, x = x.ndim == 2, batch  # the first asks of the x that was passed, before it is replaced
        of_call, mask = mask, self.mask_with(mask)
        self.check(x, context, values, mask, cache, positions)
        start = 0 if cache is None else cache.length  # position of the first new token in its text
        cross = context is not None or (cache is not None and cache.holds_context)
        if start and not cross:
            mask = self.mask_with(of_call, start, x.shape[1])
        q_source = x if self.spec.q_latent_dim is None else _normed(self.q_latent_norm, self.q_down(x))
        q = self._ready(self.q_proj(q_source), self.spec.n_heads, self.q_norm, start, positions)
        if cache is not None and cache.holds_context:
            k, v = cache.held(*sources)
        else:
            keys = x if context is None else context
            k, v = self._keys_and_values(keys, keys if values is None else values, start, positions)
            if cache is not None:
                k, v = cache.offer(k, v)
        if self.relative_bias is not None:
            mask = all_of((mask, Bias(self._bias_by_distance(q.shape[2], k.shape[2]))))

        options = self.options(mask, gate)
        out, k, v = self._attended(q, k, v, options)
        # Only now: a call that was refused leaves the cache as it was.
        if cache is not None:
            cache.take(self._number, *(sources if context is not None else ()))
        if self.watchers:
            for watcher in self.watchers:  # each may give the heads' outputs changed, or None
                changed = watcher(Call(self, q, k, v, options, out, cross, start))
                out = out if changed is None else changed
        joined = out.transpose(1, 2).flatten(2)
        result: Tensor = joined if self.o_proj is None else self.o_proj(joined)
        return result[0] if is_one_document else result

    def batched(
        self, x: Tensor, context: Tensor | None, values: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The inputs of a call as (B,T,width) each. Values that are the context become None, and both if they are x.

        Raises:
            HeadwiseError: for what is no tensor, and where some have the axis of documents and others not.
        """
        for name, tensor in (("x", x), ("context", context), ("values", values)):
            if isinstance(tensor, Mask):
                raise HeadwiseError(f"{name} is {tensor!r}; layer(q, k, v) takes tensors there, and a mask as mask=")
            if not isinstance(tensor, Tensor) and (tensor is not None or name == "x"):
                raise HeadwiseError(f"{name} is a {type(tensor).__name__}; the layer takes torch.as_tensor({name})")
            if tensor is not None and x.ndim == 2 and tensor.ndim != 2:
                raise HeadwiseError(
                    f"x has shape {tuple(x.shape)}, one document, and {name} {tuple(tensor.shape)}; pass both with the "
                    f"axis of documents, or both without"
                )
        # layer(x, m, m) is layer(x, m), and layer(x, x, x) is layer(x), as the paper writes self attention. But
        # layer(x, x) stays cross attention: a context alone asks for that.
        if values is not None and values is context:
            context, values = (None if context is x else context), None
        if x.ndim == 2:
            context, values = (None if tensor is None else tensor[None] for tensor in (context, values))
            x = x[None]
        return x, context, values

    def _keys_and_values(
        self, keys: Tensor, values: Tensor, start: int, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys (B,G,S,d) and values (B,G,S,e); or what is kept of both, (B,1,S,latent_dim + rope_dim), and nothing."""
        spec = self.spec
        if spec.latent_dim is None:
            k = self._ready(self.k_proj(keys), spec.n_kv_heads, self.k_norm, start, positions)
            return k, self._split(self.v_proj(values), spec.n_kv_heads)
        content, rotary = self.kv_down(keys).split([spec.latent_dim, spec.rope_dim], -1)
        both = torch.cat([_normed(self.kv_latent_norm, content), rotary], -1)
        kept = self._ready(both, 1, None, start, positions)  # the rotation turns the last features: the rotary key
        return kept, kept[..., :0]  # values of width 0, for a cache takes keys and values in pairs

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads give, (B,H,T,e); with the keys and values that watchers are shown."""
        if self.spec.latent_dim is None:
            return attend(q, k, v, options), k, v
        kept, absorbs = k, latent.absorbs(self, q.shape[2], k.shape[2])  # with a latent, k is what is kept of both
        if self.watchers or not absorbs:  # watchers are shown keys and values of every head, whichever way is taken
            k, v = latent.expanded(self, kept)
        heads = latent.absorbed(self, q, kept, options) if absorbs else attend(q, k, v, options)
        return heads, k, v

    def mask_with(self, mask: Mask | None, start: int = 0, n_queries: int = 0) -> Mask | None:
        """The layer's own mask joined with that of a call, whose `n_queries` follow `start` others of their text."""
        of_layer = self.spec.mask
        if of_layer is None or not start:
            return all_of((of_layer, mask))
        # A piece of a text has its rows of the whole text's mask: what stands at the end of the keys by itself.
        queries = slice(start, start + n_queries)
        parts = []
        for part in of_layer.parts():
            parts.append(part if part.aligned() else part.for_queries(queries, queries.stop))
        return all_of((*parts, mask))

    def options(self, mask: Mask | None, gate: Tensor | None) -> Options:
        """What the layer passes to `attend` besides q, k and v."""
        dropout = self.spec.dropout if self.training else 0.0
        return Options(mask, self.spec.scale, self.spec.softcap, self.sink, dropout, gate, self.spec.kv_index)

    def _ready(
        self, x_btc: Tensor, n_heads: int, norm: nn.Module | None, start: int, positions: Tensor | None
    ) -> Tensor:
        """Projected queries or keys as (B,h,T,d), normed and rotated; which comes first the RoPE says."""
        x_bhtd = self._split(x_btc, n_heads)
        rotation = self._rotation
        if rotation is not None and rotation.rope.before_norm:
            x_bhtd = rotation(x_bhtd, start, positions)
        if norm is not None:
            x_bhtd = _normed(norm, x_bhtd)
        if rotation is not None and not rotation.rope.before_norm:
            x_bhtd = rotation(x_bhtd, start, positions)
        return x_bhtd

    def _split(self, x_btc: Tensor, n_heads: int) -> Tensor:
        """(B,T,h*d) -> (B,h,T,d): head h is the h-th slice of the width."""
        B, T, width = x_btc.shape
        return x_btc.reshape(B, T, n_heads, width // n_heads).transpose(1, 2)

    def _bias_by_distance(self, T: int, S: int) -> Tensor:
        """The learned bias (1,H,T,S), by T5's rule (see `RelativeBias`); queries stand at the end of the keys.

        Near distances have a bucket each, farther ones share: with 8 on a side 0 to 3 have one each, the rest four.
        """
        rule = self.spec.relative_bias
        assert rule is not None and self.relative_bias is not None
        device = self.relative_bias.device
        distance = torch.arange(T, device=device)[:, None] + (S - T) - torch.arange(S, device=device)  # how far back
        # Of the side on which a key lies: how many buckets it has, and the number of its first.
        n, first = rule.n_buckets, torch.zeros_like(distance)
        if rule.two_sided:  # the second half of the buckets is for keys after the query
            n //= 2
            first = n * (distance < 0)
            distance = distance.abs()
        distance = distance.clamp(min=0)  # one-sided: a key after the query is as one at the query
        exact = n // 2  # so many distances have a bucket each; the others share n - exact on a logarithmic scale
        # How far a distance lies on that scale: 0 at `exact`, 1 at `max_distance`.
        reached = torch.log(distance.clamp(min=1) / exact) / math.log(rule.max_distance / exact)
        wide = (exact + (reached * (n - exact)).long()).clamp(max=n - 1)
        bucket = torch.where(distance < exact, distance, wide)
        return self.relative_bias[first + bucket].permute(2, 0, 1)[None]  # (T,S,H) -> (1,H,T,S)

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
        self._check_fit("x", x, "d_in")
        if mask is not None and not isinstance(mask, Mask):  # beside a mask of the layer `mask_with` has refused it
            raise bare_mask_error(mask)
        if positions is not None:
            self._check_positions(x, positions)
        if cache is not None:
            cache.check_layer(self._number)  # a layer has a number of its own, and so has its copy
            if cache.batch not in (None, x.shape[0]):
                raise HeadwiseError(
                    f"the cache holds {cache.batch} documents, x has {x.shape[0]}; use one cache for each batch"
                )
            if cache.window is not None and context is None:
                _check_rolling(cache.window, mask)
            # A context with a cache that rolls is refused below, whatever the mask.
            is_context = cache.holds_context or (context is not None and cache.window is None)
            if is_context and mask is not None:
                _check_places(mask)
        if context is not None:
            self._check_context(x, context, cache, values)
            if values is not None and self.spec.latent_dim is not None:
                raise HeadwiseError("values= with latent_dim=: keys and values come from one latent; drop values=")
        elif values is not None:
            raise HeadwiseError(
                "values= is passed without context=: each value belongs to a key; pass what the keys are made of as "
                "context="
            )
        elif cache is None or not cache.holds_context:  # self attention: x has to serve for keys and values, too
            spec = self.spec
            if spec.d_context != spec.d_in:
                what, remedy = f"keys of width d_context={spec.d_context}", "context="
            elif spec.d_values != spec.d_in:
                what, remedy = f"values of width d_values={spec.d_values}", "context= and values="
            else:
                return
            raise HeadwiseError(f"this layer reads {what} and x has {spec.d_in}; pass {remedy}")

    def _check_fit(self, name: str, x: Tensor, field: str) -> None:
        if x.ndim != 3:
            raise HeadwiseError(
                f"{name} has shape {tuple(x.shape)}, {x.ndim} axes; the layer takes (batch, tokens, width), or all of "
                f"one document as (tokens, width)"
            )
        width = getattr(self.spec, field)
        if x.shape[-1] != width:
            raise HeadwiseError(f"{name} has width {x.shape[-1]}; this layer has {field}={width}")
        # Of an adapter that stands for W_Q no dtype is known: then any x passes.
        weight = self.q_proj.weight if type(self.q_proj) is nn.Linear else x
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise HeadwiseError(
                f"{name} is {x.dtype} and the weights of this layer are {weight.dtype}; pass "
                f"{name}.to({weight.dtype}), or cast the layer"
            )

    def _check_positions(self, x: Tensor, positions: Tensor) -> None:
        if self._rotation is None:
            raise HeadwiseError("positions= is for RoPE, and this layer has none; build it with rope=RoPE()")
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
            raise HeadwiseError("positions= must be a tensor of whole numbers")
        if tuple(positions.shape) not in (tuple(x.shape[:2]), (x.shape[1],)):
            raise HeadwiseError(
                f"positions has shape {tuple(positions.shape)}; x has {x.shape[1]} tokens in {x.shape[0]} documents, "
                f"so it must be ({x.shape[1]},) or {tuple(x.shape[:2])}"
            )

    def _check_context(self, x: Tensor, context: Tensor, cache: KVCache | None, values: Tensor | None) -> None:
        spec = self.spec
        self._check_fit("context", context, "d_context")
        if values is not None:
            self._check_fit("values", values, "d_values")
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
            raise HeadwiseError(f"x has {x.shape[0]} documents, context has {context.shape[0]}; pass as many of each")
        if cache is not None and cache.length and not cache.holds_context:
            raise HeadwiseError(
                f"the cache holds {cache.length} tokens of self attention, and context= is passed; "
                f"use a new KVCache for it"
            )
        if self._rotation is not None:
            raise HeadwiseError("context= with rope=: queries and keys of two sequences share no positions; drop one")
        if cache is not None and cache.window is not None:
            raise HeadwiseError(f"context= with a cache of window={cache.window}: a context stays whole; drop window=")

    def extra_repr(self) -> str:
        return repr(self.spec)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """x normed in the precision of the gain, and given back in its own: under autocast that is lower."""
    normed: Tensor = norm(x.to(getattr(norm, "weight", x).dtype))  # nn.Identity, of latents without norm, has no gain
    return normed.to(x.dtype)


def _check_places(mask: Mask) -> None:
    """Cross attention in pieces: where their queries stand must not hang on how many there are."""
    for part in mask.parts():
        if part.aligned():
            raise HeadwiseError(
                f"{part!r} with a cache of a context: where its queries stand hangs on their number, and a piece "
                f"of them does not know how many came before; give it an offset= in each call, or leave the cache "
                f"out"
            )


def _check_rolling(window: int, mask: Mask | None) -> None:
    """A rolling cache has only the latest keys: the mask must want no others, and must not count from the first."""
    parts = () if mask is None else mask.parts()
    for part in parts:
        if part.counts_from_first():
            raise HeadwiseError(
                f"{part!r} with a cache of window={window}: it counts from the first key, which rolls away; "
                f"leave it out, or its offset, or use a growing cache"
            )
    lefts = []  # how far back each part with a bound lets a query look
    for part in parts:
        low, _ = part.band(1, 1) or (None, None)  # of one query that stands at its own key
        if low is not None:
            lefts.append(-low)
    if not lefts or min(lefts) > window:
        reach = f"Window(left={min(lefts)})" if lefts else "no Window"
        raise HeadwiseError(
            f"a cache of window={window} drops what is older, and this layer looks further back: it has {reach}; "
            f"give the layer Window(left, 0) with left <= {window}, or use a growing cache"
        )
