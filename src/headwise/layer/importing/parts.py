"""A layer built of someone else's matrices. They are copied, never kept, and may be trained, even if frozen before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.spec import AttentionSpec, require_size


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


def build(
    parts: Parts, n_heads: int, n_kv_heads: int | None = None, *, training: bool = True, **options: Any
) -> MultiHeadAttention:
    """The layer with copies of these weights. Raises HeadwiseError when they do not fit together.

    options  the fields of AttentionSpec that weights do not say: mask, rope, scale, dropout, ...
    """
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
        d_values=parts.v.shape[1],
        d_out=n_heads * value_dim if parts.o is None else parts.o.shape[0],
        q_bias=parts.q_bias is not None,
        kv_bias=kv_bias,
        out_bias=parts.o_bias is not None,
        out_proj=parts.o is not None,
        qk_norm=parts.q_norm is not None,
        **options,
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


def check_parameters(module: nn.Module, known: set[str]) -> None:
    """Refuse a module with parameters that the layer would not get."""
    unknown = sorted(name for name, _ in module.named_parameters() if name not in known)
    if unknown:
        raise HeadwiseError(
            f"{type(module).__name__} has parameters that would be lost: {', '.join(unknown)}; merge adapters into the "
            f"weights first, or use from_separate"
        )


def _check_parts(parts: Parts) -> None:
    for name in "qkvo":
        weight, bias = getattr(parts, name), getattr(parts, f"{name}_bias")
        if weight is None:
            continue
        check_matrix(name, weight)
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise HeadwiseError(f"{name}_bias has shape {tuple(bias.shape)}; {name} has {weight.shape[0]} rows")
    for name, tensor in parts._asdict().items():
        if tensor is not None and (tensor.dtype, tensor.device) != (parts.q.dtype, parts.q.device):
            raise HeadwiseError(
                f"q is {parts.q.dtype} on {parts.q.device}, {name} is {tensor.dtype} on {tensor.device}; "
                f"bring them to one dtype and device"
            )
