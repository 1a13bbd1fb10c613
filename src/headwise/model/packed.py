"""Bare attention weights in the layouts of the field, made into a layer, with a certificate.

A certificate is a measurement: the original (or, for bare weights, the formula written out) and the layer answer the
same random input in eval mode, and the largest difference is handed back with the layer. `importers` does the same for
modules. Weights are copied, never kept; the caller's random state stays as it is; the copies may be trained, whether
the originals were frozen or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.masks import BroadcastGrid, Causal, Lengths, Mask
from headwise.model.layer import MultiHeadAttention
from headwise.spec import AttentionSpec, RoPE, require_size

CAUSAL = Causal()
N_TEXTS, N_TOKENS, N_KEYS = 3, 13, 11  # of a certificate; N_KEYS of a context
FORMULA = "the formula written out"

# Answers x (B,T,c), a context (B,S,c) or None, and what is added to the scores (B|1,H|1,T,S) or None, -inf = forbidden.
Original = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


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


class Parts(NamedTuple):
    """Weights as our layer has them, y = W x: q (h*d, in), k (g*d, context), v (g*e, context), o (out, h*e)."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


PLACES = {name: f"{name}_proj.weight" for name in "qkvo"}
PLACES |= {f"{name}_bias": f"{name}_proj.bias" for name in "qkvo"}
PLACES |= {f"{name}_norm": f"{name}_norm.weight" for name in "qk"}


def from_packed(
    weight: Tensor,
    n_heads: int,
    n_kv_heads: int | None = None,
    bias: Tensor | None = None,
    out_weight: Tensor | None = None,
    out_bias: Tensor | None = None,
    layout: str = "qkv",
    *,
    mask: Mask | None = None,
    rope: RoPE | None = None,
    dropout: float = 0.0,
) -> Imported:
    """A layer from one matrix that holds queries, keys and values; certified against the formula written out.

    weight      ((h + 2g) * d, d_in), y = W x; bias ((h + 2g) * d,) or None. The head width d follows from the rows
    out_weight  (d_out, h*d) or None for no output projection; out_bias (d_out,) or None
    layout      "qkv"        all queries, then all keys, then all values: MPT, ModernBERT, Phi-3, ChatGLM; with one
                             key/value head Falcon-7B and StarCoder
                "per_head"   for each head its query, key and value: GPT-NeoX, BLOOM, Falcon-RW
                "per_group"  for each key/value head the queries that read it, then the key, then the value:
                             Falcon-40B, InternLM2
    mask, rope, dropout    as in MultiHeadAttention; weights do not say them. `mask` must fit any batch and length

    Raises HeadwiseError when sizes do not fit, or when the weights are no floats (quantised) or of several dtypes.
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    width = _packed_width(weight, bias, n_heads, kv_heads, layout)
    q, k, v = _unpacked(weight, layout, n_heads, kv_heads, width)
    bq, bk, bv = (None,) * 3 if bias is None else _unpacked(bias, layout, n_heads, kv_heads, width)
    parts = Parts(q, k, v, out_weight, bq, bk, bv, out_bias)
    layer = build(parts, n_heads, kv_heads, mask=mask, rope=rope, dropout=dropout)

    def formula(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        """Split the way those models do it: the activations, not the weights."""
        mine = _project(x, weight, bias)
        theirs = mine if context is None else _project(context, weight, bias)
        if layout == "qkv":
            q, (k, v) = mine[..., : n_heads * width], theirs[..., n_heads * width :].chunk(2, -1)
        else:
            q = _heads(mine, kv_heads)[..., : -2 * width]
            k, v = _heads(theirs, kv_heads)[..., -2 * width :].chunk(2, -1)
        joined = _attended(_heads(q, n_heads), _heads(k, kv_heads), _heads(v, kv_heads), added, rope)
        return joined if out_weight is None else _project(joined, out_weight, out_bias)

    return certified(layer, formula, f'from_packed, layout "{layout}"', FORMULA)


def from_conv1d(
    c_attn_weight: Tensor,
    c_attn_bias: Tensor | None,
    c_proj_weight: Tensor,
    c_proj_bias: Tensor | None,
    n_heads: int,
    *,
    mask: Mask | None = CAUSAL,
    dropout: float = 0.0,
) -> Imported:
    """A layer from GPT-2's tensors, whose matrices are transposed, y = x W; certified against the formula written out.

    c_attn_weight (d_in, 3*h*d), the queries' columns first; c_attn_bias (3*h*d,) or None; c_proj_weight (h*d, d_out);
    c_proj_bias (d_out,) or None. Radford et al. 2019; the mask is GPT-2's unless another is passed.
    Raises HeadwiseError as `from_packed` does.
    """
    check_matrix("c_attn_weight", c_attn_weight)
    check_matrix("c_proj_weight", c_proj_weight)
    columns = c_attn_weight.shape[1]
    require_size("n_heads", n_heads)
    if columns % (3 * n_heads):
        raise HeadwiseError(f"c_attn_weight has {columns} columns; n_heads={n_heads} needs a multiple of {3 * n_heads}")
    rows, out_rows = c_attn_weight.t(), c_proj_weight.t()
    done = from_packed(rows, n_heads, None, c_attn_bias, out_rows, c_proj_bias, mask=mask, dropout=dropout)
    return replace(done, path="from_conv1d")


def from_separate(
    q: Tensor | nn.Linear,
    k: Tensor | nn.Linear,
    v: Tensor | nn.Linear,
    o: Tensor | nn.Linear | None,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    o_bias: Tensor | None = None,
    mask: Mask | None = None,
    rope: RoPE | None = None,
    dropout: float = 0.0,
) -> Imported:
    """A layer from four nn.Linear, or four matrices and their biases; certified against the formula written out.

    q (h*d, d_in), k (g*d, d_context), v (g*e, d_context), o (d_out, h*e) or None, y = W x. Where only one of k and v
    has a bias (Whisper), the other gets zeros. mask, rope, dropout as in MultiHeadAttention; `mask` must fit any batch
    and length.

    Raises HeadwiseError when sizes do not fit, or when the weights are no floats (quantised) or of several dtypes.
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    (wq, bq), (wk, bk), (wv, bv) = (
        _linear(name, part, bias) for name, part, bias in (("q", q, q_bias), ("k", k, k_bias), ("v", v, v_bias))
    )
    wo, bo = (None, o_bias) if o is None else _linear("o", o, o_bias)
    layer = build(Parts(wq, wk, wv, wo, bq, bk, bv, bo), n_heads, kv_heads, mask=mask, rope=rope, dropout=dropout)

    def formula(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        source = x if context is None else context
        q, k, v = _project(x, wq, bq), _project(source, wk, bk), _project(source, wv, bv)
        joined = _attended(_heads(q, n_heads), _heads(k, kv_heads), _heads(v, kv_heads), added, rope)
        return joined if wo is None else _project(joined, wo, bo)

    return certified(layer, formula, "from_separate", FORMULA)


KERAS_ROLES = ("query", "key", "value", "attention_output")


def from_keras(
    weights: Mapping[str, np.ndarray] | Sequence[np.ndarray], *, mask: Mask | None = None, dropout: float = 0.0
) -> Imported:
    """A layer from the weights of Keras' MultiHeadAttention or GroupedQueryAttention, as NumPy arrays.

    A sequence in the order of `get_weights()`: query kernel (d_in, h, d) and bias (h, d), key kernel (d_context, g, d)
    and bias, value kernel (d_context, g, e) and bias, output kernel (h, e, d_out) and bias (d_out,); with
    use_bias=False the four kernels only. Or a mapping by variable path, such as "query/kernel" or
    "attention/attention_output/bias:0". Keras takes causality (use_causal_mask) per call and dropout from its config:
    pass mask= and dropout=. Keras itself is not run: the certificate is against its documented computation in NumPy.

    Raises HeadwiseError for another number of weights (use_gate), kernels that do not have three axes, key and value
    widths that differ, sizes that do not fit.
    """
    arrays = _keras_arrays(weights)
    kernels = [arrays[role, "kernel"] for role in KERAS_ROLES]
    for role, kernel in zip(KERAS_ROLES, kernels, strict=True):
        if kernel.ndim != 3:
            raise HeadwiseError(f"Keras {role} kernel has shape {kernel.shape}; 3 axes are needed, one of them heads")
    tensors = {name: _from_numpy(" ".join(name), array) for name, array in arrays.items()}
    q, k, v = (tensors[role, "kernel"].flatten(1).t() for role in KERAS_ROLES[:3])
    o = tensors["attention_output", "kernel"].flatten(0, 1).t()
    flat = {role: array.flatten() for (role, kind), array in tensors.items() if kind == "bias"}
    bq, bk, bv, bo = (flat.get(role) for role in KERAS_ROLES)
    n_heads, n_kv_heads = kernels[0].shape[1], kernels[1].shape[1]
    layer = build(Parts(q, k, v, o, bq, bk, bv, bo), n_heads, n_kv_heads, mask=mask, dropout=dropout)

    def documented(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        source = x if context is None else context
        return torch.from_numpy(
            _keras_call(arrays, x.numpy(), source.numpy(), None if added is None else added.numpy())
        )

    what = "Keras' documented computation, transcribed in NumPy (Keras was not run)"
    return certified(layer, documented, f"from_keras, {len(arrays)} arrays", what)


# The way from weights to a layer


def build(
    parts: Parts,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    mask: Mask | None = None,
    rope: RoPE | None = None,
    dropout: float = 0.0,
    training: bool = True,
) -> MultiHeadAttention:
    """The layer with copies of these weights. Raises HeadwiseError when they do not fit together."""
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    require_size("n_heads", n_heads)
    require_size("n_kv_heads", kv_heads)
    _check_parts(parts)
    head_dim, value_dim = _head_widths(parts, n_heads, kv_heads)
    kv_bias = parts.k_bias is not None or parts.v_bias is not None
    spec = AttentionSpec(
        d_model=parts.q.shape[1],
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        d_context=parts.k.shape[1],
        d_out=n_heads * value_dim if parts.o is None else parts.o.shape[0],
        q_bias=parts.q_bias is not None,
        kv_bias=kv_bias,
        out_bias=parts.o_bias is not None,
        out_proj=parts.o is not None,
        mask=mask,
        rope=rope,
        qk_norm=parts.q_norm is not None,
        dropout=dropout,
    )
    if kv_bias:
        parts = parts._replace(k_bias=_or_zeros(parts.k_bias, parts.k), v_bias=_or_zeros(parts.v_bias, parts.v))
    return _filled(spec, parts).train(training)


def _filled(spec: AttentionSpec, parts: Parts) -> MultiHeadAttention:
    """A layer whose parameters are clones. On the meta device first: initial values would be drawn from the RNG."""
    with torch.inference_mode(False):
        with torch.device("meta"):
            layer = MultiHeadAttention.from_spec(spec)
        layer.load_state_dict(
            {
                PLACES[name]: tensor.detach().clone(memory_format=torch.contiguous_format)
                for name, tensor in parts._asdict().items()
                if tensor is not None
            },
            assign=True,
        )
    return layer


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    return weight.new_zeros(weight.shape[0]) if bias is None else bias


def _head_widths(parts: Parts, n_heads: int, kv_heads: int) -> tuple[int, int]:
    """Head width and value width, on which all four matrices must agree."""
    head_dim, key_dim = _width("q", parts.q, n_heads, "n_heads"), _width("k", parts.k, kv_heads, "n_kv_heads")
    if key_dim != head_dim:
        raise HeadwiseError(
            f"n_heads={n_heads} makes queries of width {head_dim} of {parts.q.shape[0]} rows, n_kv_heads={kv_heads} "
            f"keys of width {key_dim} of {parts.k.shape[0]} rows; they must be equal: check the numbers of heads"
        )
    value_dim = _width("v", parts.v, kv_heads, "n_kv_heads")
    if parts.o is not None and parts.o.shape[1] != n_heads * value_dim:
        raise HeadwiseError(
            f"o reads width {parts.o.shape[1]}; {n_heads} heads of value width {value_dim} join to "
            f"{n_heads * value_dim}"
        )
    return head_dim, value_dim


def _width(name: str, weight: Tensor, heads: int, field: str) -> int:
    if weight.shape[0] % heads:
        raise HeadwiseError(f"{name} has {weight.shape[0]} rows; {field}={heads} does not divide them")
    return weight.shape[0] // heads


def check_matrix(name: str, weight: Any) -> None:
    """A floating matrix that holds numbers, or an error that says what it is."""
    if not isinstance(weight, Tensor):
        raise HeadwiseError(f"{name} is {type(weight).__name__}; pass a torch.Tensor")
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise HeadwiseError(f"{name} is {weight.dtype}: quantised weights have no layer; dequantise them first")
    if weight.is_meta:
        raise HeadwiseError(f"{name} is on the meta device and holds no numbers; load the weights first")
    if weight.ndim != 2:
        raise HeadwiseError(f"{name} has shape {tuple(weight.shape)}, {weight.ndim} axes; a matrix has 2")


def _check_parts(parts: Parts) -> None:
    for name in "qkvo":
        weight, bias = getattr(parts, name), getattr(parts, f"{name}_bias")
        if weight is None:
            continue
        check_matrix(name, weight)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise HeadwiseError(f"{name}_bias has shape {tuple(bias.shape)}; {name} has {weight.shape[0]} rows")
    if parts.k.shape[1] != parts.v.shape[1]:
        raise HeadwiseError(
            f"k reads width {parts.k.shape[1]}, v reads {parts.v.shape[1]}: a headwise layer reads both from one "
            f"context, of width d_context; project one of them to the other's width before"
        )
    for name, tensor in parts._asdict().items():
        if tensor is not None and (tensor.dtype, tensor.device) != (parts.q.dtype, parts.q.device):
            raise HeadwiseError(
                f"q is {parts.q.dtype} on {parts.q.device}, {name} is {tensor.dtype} on {tensor.device}; "
                f"bring them to one dtype and device"
            )


def _linear(name: str, part: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a Linear, or of a matrix with its bias beside it."""
    if isinstance(part, Tensor):
        return part, bias
    if not isinstance(part, nn.Linear):
        raise HeadwiseError(f"{name} is {type(part).__name__}; pass an nn.Linear, or its weight as (out, in)")
    if bias is not None and part.bias is not None:
        raise HeadwiseError(f"{name} is a Linear with a bias of its own, and {name}_bias= is given too; pass one")
    return part.weight, part.bias if bias is None else bias


def _packed_width(weight: Tensor, bias: Tensor | None, n_heads: int, kv_heads: int, layout: str) -> int:
    """The width of a head, out of the number of rows."""
    if layout not in ("qkv", "per_head", "per_group"):
        raise HeadwiseError(f"layout={layout!r} is not known; one of qkv, per_head, per_group")
    require_size("n_heads", n_heads)
    require_size("n_kv_heads", kv_heads)
    check_matrix("weight", weight)
    if layout == "per_head" and kv_heads != n_heads:
        raise HeadwiseError(
            f'layout "per_head" gives each of {n_heads} heads its own key and value, and n_kv_heads={kv_heads}; '
            f'pass layout="per_group" or "qkv"'
        )
    if n_heads % kv_heads:
        raise HeadwiseError(f"n_kv_heads={kv_heads} does not divide n_heads={n_heads}")
    rows, heads = weight.shape[0], n_heads + 2 * kv_heads
    if rows % heads:
        raise HeadwiseError(
            f"weight has {rows} rows; n_heads={n_heads} and n_kv_heads={kv_heads} need a multiple of "
            f"{n_heads} + 2 * {kv_heads} = {heads}"
        )
    if bias is not None and tuple(bias.shape) != (rows,):
        raise HeadwiseError(f"bias has shape {tuple(bias.shape)}; weight has {rows} rows")
    return rows // heads


def _unpacked(rows: Tensor, layout: str, n_heads: int, kv_heads: int, width: int) -> list[Tensor]:
    """The rows of queries, keys and values, each in the order of the heads."""
    if layout == "qkv":
        n, m = n_heads * width, kv_heads * width
        return [rows[:n], rows[n : n + m], rows[n + m :]]
    blocks = rows.reshape(kv_heads, -1, *rows.shape[1:])  # "per_head" has groups of one
    return [
        block.flatten(0, 1) for block in (blocks[:, : -2 * width], blocks[:, -2 * width : -width], blocks[:, -width:])
    ]


# The certificate


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
    per call. In float32 and wider a difference beyond rounding is
    an error; in half precision rounding alone may be large, so there the figure speaks for itself.
    """
    spec, like, mode = layer.spec, layer.q_proj.weight, layer.training
    if ways is None:
        both = ("self", "cross") if spec.mask is None and spec.rope is None else ("self",)
        ways = both if spec.d_context == spec.d_in else ("cross",)
    generator = torch.Generator("cpu").manual_seed(0)
    layer.eval()
    with torch.no_grad(), torch.device(like.device), torch.autocast(like.device.type, enabled=False):
        runs = [run for way in ways for run in _runs(layer, original, way, n_tokens, padding, generator)]
    layer.train(mode)
    difference = float(torch.stack([run.gap for run in runs]).max())  # max in torch keeps NaN
    size = float(torch.stack([run.size for run in runs]).max())
    if like.dtype.itemsize >= 4 and not difference <= 1e-3 * size:
        raise HeadwiseError(
            f"{path}: the layer differs from {what} by {difference:.3g} where outputs reach {size:.3g}, beyond "
            f"rounding; its forward is not what its weights and name say, so it is not imported"
        )
    own = "" if spec.mask is None else f", mask {spec.mask!r}"
    said = [f"{way} attention ({', '.join(run.mask for run in runs if run.way == way)})" for way in ways]
    compared = (
        f"{what} against the layer{own}: {', '.join(said)}; {N_TEXTS} texts of {n_tokens} tokens, "
        f"{str(like.dtype).removeprefix('torch.')} on {like.device.type}, eval"
    )
    return Imported(layer, difference, path, compared)


class _Run(NamedTuple):
    way: str
    mask: str
    gap: Tensor  # largest difference
    size: Tensor  # largest output


def _runs(
    layer: MultiHeadAttention, original: Original, way: str, n_tokens: int, padding: bool, generator: torch.Generator
) -> Iterator[_Run]:
    """Both on one random input under each mask that the original can be given."""
    spec, like = layer.spec, layer.q_proj.weight
    n_keys = n_tokens if way == "self" else N_KEYS
    x, memory = (
        torch.randn(N_TEXTS, length, width, generator=generator, device="cpu").to(like)
        for length, width in ((n_tokens, spec.d_in), (n_keys, spec.d_context))
    )
    context = None if way == "self" else memory
    causal = (CAUSAL,) if way == "self" and spec.mask is None else ()
    lengths = (Lengths([n_keys, n_keys // 2 + 1, 1]),) if padding else ()
    masks: tuple[Mask | None, ...] = (None, *causal, *lengths)
    for mask in masks:
        whole = spec.mask if mask is None else mask if spec.mask is None else spec.mask & mask
        added = _added(whole, spec.n_heads, n_tokens, n_keys, like)
        expected, ours = original(x, context, added), layer(x, context=context, mask=mask)
        if added is not None:  # a row that may attend nothing is 0 here, and elsewhere anything
            rows = (added > -math.inf).any(-1).all(1)[..., None]
            expected, ours = torch.where(rows, expected, 0), torch.where(rows, ours, 0)
        name = "no further mask" if mask is None else repr(mask)
        yield _Run(way, name, (ours - expected).abs().max(), expected.abs().max())


def _added(mask: Mask | None, n_heads: int, n_queries: int, n_keys: int, like: Tensor) -> Tensor | None:
    """A mask as numbers (B,H|1,T,S) to add to the scores, -inf = forbidden, in float32 or wider."""
    if mask is None:
        return None
    grid = BroadcastGrid(
        (N_TEXTS, n_heads, n_queries, n_keys),
        array=lambda values: (values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))).to(
            like.device
        ),
        arange=lambda n: torch.arange(n, device=like.device),
    )
    mask.check(grid)
    allowed, bias = mask.allowed(grid), mask.bias(grid)
    dtype = torch.promote_types(like.dtype, torch.float32)
    numbers = torch.zeros(N_TEXTS, 1, n_queries, n_keys, dtype=dtype, device=like.device)
    numbers = numbers if bias is None else numbers + bias.to(dtype)
    return numbers if allowed is None else numbers.masked_fill(~allowed, -math.inf)


# Formulas to measure against. They share no line with the rungs.


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _heads(y_btc: Tensor, n_heads: int) -> Tensor:
    """(B,T,c) or what was split out of it, as (B,T,n,c/n)."""
    return y_btc.reshape(*y_btc.shape[:2], n_heads, -1)


def _attended(q_bthd: Tensor, k_bsgd: Tensor, v_bsge: Tensor, added: Tensor | None, rope: RoPE | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, K and V repeated for every head, (B,T,H*E). A row that sees nothing is NaN."""
    if rope is not None:
        q_bthd, k_bsgd = _turned(q_bthd, rope), _turned(k_bsgd, rope)
    repeat = q_bthd.shape[2] // k_bsgd.shape[2]
    k, v = (y.repeat_interleave(repeat, 2) for y in (k_bsgd, v_bsge))
    scores = torch.einsum("bthd,bshd->bhts", q_bthd, k) / math.sqrt(q_bthd.shape[-1])
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
        one, other = turning[..., 0::2], turning[..., 1::2]
    else:
        one, other = turning.chunk(2, -1)
    turned = torch.complex(one, other) * turn
    back = torch.stack([turned.real, turned.imag], -1 if rope.interleaved else -2).flatten(-2)
    return torch.cat([back.to(x_bthd.dtype), rest], -1)


def _keras_call(
    arrays: Mapping[tuple[str, str], np.ndarray], x: np.ndarray, source: np.ndarray, added: np.ndarray | None
) -> np.ndarray:
    """Keras' own order: three EinsumDense, the query divided by sqrt(key_dim), softmax, EinsumDense."""

    def dense(role: str, equation: str, value: np.ndarray) -> np.ndarray:
        wide = np.promote_types(arrays[role, "kernel"].dtype, np.float32)
        out = np.einsum(equation, value.astype(wide), arrays[role, "kernel"].astype(wide))
        return np.asarray(out + arrays[role, "bias"] if (role, "bias") in arrays else out)

    query = dense("query", "btc,chd->bthd", x)
    key, value = dense("key", "bsc,chd->bshd", source), dense("value", "bsc,che->bshe", source)
    key, value = (np.repeat(y, query.shape[2] // y.shape[2], axis=2) for y in (key, value))
    scores = np.einsum("bshd,bthd->bhts", key, query / math.sqrt(query.shape[-1]))
    scores = scores if added is None else scores + added.clip(min=-1e9)  # as Keras, no -inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("bhts,bshe->bthe", powers / powers.sum(-1, keepdims=True), value)
    return dense("attention_output", "bthe,heo->bto", heads.astype(query.dtype))


def _keras_arrays(weights: Mapping[str, Any] | Sequence[Any]) -> dict[tuple[str, str], np.ndarray]:
    """The arrays by role and kind, such as ("query", "kernel")."""
    if isinstance(weights, Mapping):
        named = {tuple(path.removesuffix(":0").split("/")[-2:]): np.asarray(array) for path, array in weights.items()}
        wanted = {(role, kind) for role in KERAS_ROLES for kind in ("kernel", "bias")}
        unknown = sorted("/".join(name) for name in set(named) - wanted)
        missing = [f"{role}/kernel" for role in KERAS_ROLES if (role, "kernel") not in named]
        if unknown or missing or len(named) != len(weights):
            raise HeadwiseError(
                f"Keras weights: {len(weights)} paths, unknown {unknown}, missing {missing}; one layer has "
                f"{', '.join(KERAS_ROLES)}, each with a kernel and perhaps a bias"
            )
        return {(role, kind): named[role, kind] for role, kind in wanted if (role, kind) in named}
    kinds = {4: ("kernel",), 8: ("kernel", "bias")}.get(len(weights))
    if kinds is None:
        raise HeadwiseError(
            f"Keras MultiHeadAttention has 8 weights, or 4 with use_bias=False, and these are {len(weights)}; "
            f"pass get_weights() of one attention layer"
        )
    names = [(role, kind) for role in KERAS_ROLES for kind in kinds]
    return dict(zip(names, map(np.asarray, weights), strict=True))


def _from_numpy(name: str, array: np.ndarray) -> Tensor:
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise HeadwiseError(f"Keras {name} is {array.dtype}; pass float16, float32 or float64")
    return torch.from_numpy(np.array(array))
