"""The weights of an attention as a layer has them, and the layer that copies of them make.

As a layer has them: y = W x, in a dict by the names of the layer's parameters, such as "q_proj.weight" (h*d, in) and
"q_proj.bias"; what the attention does not have is not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import Family
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.spec import USUAL, AttentionSpec, require_size

Linear = tuple[Tensor, Tensor | None]  # a matrix (out, in) and its bias


def named(**linears: Linear) -> dict[str, Tensor]:
    """The projections of a layer as its state dict has them: named(q_proj=(w, None)) -> {"q_proj.weight": w}."""
    weights = {}
    for name, (weight, bias) in linears.items():
        weights[f"{name}.weight"] = weight
        if bias is not None:
            weights[f"{name}.bias"] = bias
    return weights


def parts_of(family: Family, core: nn.Module, w_o: nn.Module | None) -> dict[str, Tensor]:
    """The weights of a family's attention as a layer has them: views of the module's own, but for gains with an offset.

    `core` is the module that has W_Q, W_K and W_V; `w_o` is the module of W_O, or None to do without.
    """

    def projection(path: str) -> Linear:
        return linear_weights(family.read(core, path), f"{type(core).__name__}.{family.within_core(path)}")

    def split(*counts: int) -> list[Linear]:
        """The parts of a packed projection, each with the rows of so many heads: (4, 2, 2) -> q, k, v.

        So GPT-2 and Phi-3 pack them: all of q first, and not q, k and v of one head after another, as in GPT-NeoX.
        """
        weight, bias = projection(family.k)  # all parts name the same module
        if weight.shape[0] % sum(counts):
            raise HeadwiseError(f"{family.k} has {weight.shape[0]} rows, no multiple of {sum(counts)} heads")
        per_head = weight.shape[0] // sum(counts)
        rows = [per_head * count for count in counts]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        return list(zip(torch.split(weight, rows), biases, strict=True))

    n_heads = family.read(core, family.n_heads)
    n_kv_heads = family.read(core, family.n_kv_heads) or n_heads  # a family that has no such number has no groups
    # A model of such a family may make its queries of x all the same: DeepSeek-V3 where `q_lora_rank` is null.
    has_q_latent = family.read(core, family.q_down) is not None
    if family.cross_q is not None and family.is_cross(core):
        q, (k, v) = projection(family.cross_q), split(n_kv_heads, n_kv_heads)
    elif family.packed:  # its q, k and v name one module
        q, k, v = split(n_heads, n_kv_heads, n_kv_heads)
    else:
        queries = family.q_up if has_q_latent and family.q_up else family.q
        q, k, v = (projection(path) for path in (queries, family.k, family.v))
    weights = named(q_proj=q)
    if family.kv_down is None:
        weights |= named(k_proj=k, v_proj=v)
        head_dim = len(q[0]) // n_heads
        norms = {"q_norm": head_dim, "k_norm": head_dim}  # how many features each norms: those of one head
    else:  # the norms are those of the latents, as wide as what q_up and kv_up read
        weights |= named(kv_up=k, kv_down=projection(family.kv_down))
        norms = {"q_latent_norm": q[0].shape[1], "kv_latent_norm": k[0].shape[1]}
    if has_q_latent and family.q_down is not None:  # the first implies the second, which a type checker cannot see
        weights |= named(q_down=projection(family.q_down))
    if w_o is not None:
        weights |= named(o_proj=linear_weights(w_o, f"{family.whole}.{family.o}"))
    # Queries first in both; a latent of queries that a model has not has no norm, either.
    for (name, width), path in zip(norms.items(), (family.q_norm, family.k_norm), strict=True):
        norm = family.read(core, path)
        if norm is None:
            continue
        if tuple(norm.weight.shape) != (width,):
            raise HeadwiseError(
                f"{path} norms {len(norm.weight)} features at once, and a headwise layer each head's {width} apart; it "
                f"can be neither imported nor reshaped"
            )
        gain: Tensor = norm.weight
        # Without an offset nothing is added, not even 0: a sum is a copy, and to write there misses the module.
        weights[f"{name}.weight"] = gain + family.norm_offset if family.norm_offset else gain
    return weights


def parameters_of(family: Family) -> set[str]:
    """Names of the parameters, seen from the core, that a layer would get; any other one would be lost."""
    linears = [family.q, family.k, family.v, family.o, family.cross_q, family.kv_down, family.q_down, family.q_up]
    norms = [family.q_norm, family.k_norm]  # a layer has their gains, and no biases
    names = {f"{family.within_core(path)}.weight" for path in (*linears, *norms) if path}
    return names | {f"{family.within_core(path)}.bias" for path in linears if path}


def build(
    weights: dict[str, Tensor], n_heads: int, n_kv_heads: int | None = None, *, training: bool = True, **options: Any
) -> MultiHeadAttention:
    """The layer with copies of these weights. Raises HeadwiseError when they do not fit together.

    weights   by the names of the layer's parameters; its widths are read off their shapes
    training  is the layer to be in training mode?
    options   the fields of AttentionSpec that weights do not say: mask, rope, scale, dropout, ...
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    require_size("n_heads", n_heads)
    require_size("n_kv_heads", n_kv_heads)
    _check_alike(weights)
    if "kv_down.weight" in weights:  # n_kv_heads says nothing: of a latent every head makes its own keys and values
        fields = _latent_fields(weights, n_heads)
    else:
        fields = _fields(weights, n_heads, n_kv_heads)
        for name in ("k_proj", "v_proj"):  # a layer has both biases or neither: the missing one becomes zeros
            if fields["kv_bias"] and f"{name}.bias" not in weights:
                matrix = weights[f"{name}.weight"]
                weights = weights | {f"{name}.bias": matrix.new_zeros(len(matrix))}
    out, value_dim = weights.get("o_proj.weight"), fields["value_dim"]
    if out is not None and out.shape[1] != n_heads * value_dim:
        raise HeadwiseError(
            f"o reads width {out.shape[1]}; {n_heads} heads of value width {value_dim} join to {n_heads * value_dim}"
        )
    spec = AttentionSpec(
        n_heads=n_heads,
        d_out=USUAL if out is None else len(out),  # without W_O the spec knows it: the width of the joined heads
        out_bias="o_proj.bias" in weights,
        out_proj=out is not None,
        **fields,
        **options,
    )
    with torch.inference_mode(False):  # parameters that are made in inference mode could never be trained
        with shapes_alone():  # else first weights would be drawn, and the caller's random numbers change
            layer = MultiHeadAttention.from_spec(spec)
        copies = {}
        # A plain clone of a transposed matrix, as of GPT-2, would stay transposed, and safetensors writes none such.
        for name, tensor in weights.items():
            copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        layer.load_state_dict(copies, assign=True)  # assigned: a parameter without numbers cannot be written to
    return layer.train(training)


def _check_alike(weights: dict[str, Tensor]) -> None:
    """Raise HeadwiseError for what no layer can have: numbers that are no floats, or of several formats and places."""
    like = weights["q_proj.weight"]
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # floats of one byte: float8
            raise HeadwiseError(f"{name} is {tensor.dtype}: quantised weights have no layer; dequantise them first")
        if tensor.is_meta:
            raise HeadwiseError(f"{name} is on the meta device and holds no numbers; load the weights first")
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise HeadwiseError(
                f"q_proj.weight is {like.dtype} on {like.device}, {name} is {tensor.dtype} on {tensor.device}; "
                f"bring them to one dtype and device"
            )


def _fields(weights: dict[str, Tensor], n_heads: int, n_kv_heads: int) -> dict[str, Any]:
    """What the matrices say of a layer's spec. Raises HeadwiseError where they do not agree on the widths of heads."""
    q, k, v = (weights[f"{name}_proj.weight"] for name in "qkv")
    head_dim = _head_width("q", q, "n_heads", n_heads)
    key_dim = _head_width("k", k, "n_kv_heads", n_kv_heads)
    value_dim = _head_width("v", v, "n_kv_heads", n_kv_heads)
    if key_dim != head_dim:
        raise HeadwiseError(
            f"n_heads={n_heads} makes queries of width {head_dim} of {len(q)} rows, n_kv_heads={n_kv_heads} keys of "
            f"width {key_dim} of {len(k)} rows; they must be equal: check the numbers of heads"
        )
    return {
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "d_model": q.shape[1],
        "d_context": k.shape[1],
        "d_values": v.shape[1],
        "q_bias": "q_proj.bias" in weights,
        "kv_bias": "k_proj.bias" in weights or "v_proj.bias" in weights,
        "qk_norm": "q_norm.weight" in weights,
    }


def _head_width(name: str, matrix: Tensor, field: str, heads: int) -> int:
    """How many rows of a matrix a head has. Raises HeadwiseError where not all have as many."""
    if len(matrix) % heads:
        raise HeadwiseError(f"{name} has {len(matrix)} rows; {field}={heads} does not divide them")
    return len(matrix) // heads


def _latent_fields(weights: dict[str, Tensor], n_heads: int) -> dict[str, Any]:
    """What the matrices say of the spec of a layer with a latent, whose rows of `kv_up` lie head after head."""
    up, down, q = (weights[f"{name}.weight"] for name in ("kv_up", "kv_down", "q_proj"))
    reads_x = "q_down" if "q_down.weight" in weights else "q_proj"  # the first matrix on the way to the queries
    latent_dim, head_dim = up.shape[1], _head_width("q", q, "n_heads", n_heads)
    rope_dim = len(down) - latent_dim  # `kv_down` makes the latent and, behind it, the rotary key
    return {
        "head_dim": head_dim,
        # For each head `kv_up` makes that part of its key which is not rotated, and its value.
        "value_dim": _head_width("kv_up", up, "n_heads", n_heads) - (head_dim - rope_dim),
        "rope_dim": rope_dim,
        "latent_dim": latent_dim,
        "latent_norm": "kv_latent_norm.weight" in weights,
        "q_latent_dim": q.shape[1] if reads_x == "q_down" else None,
        "d_model": weights[f"{reads_x}.weight"].shape[1],
        "d_context": down.shape[1],
        "q_bias": f"{reads_x}.bias" in weights,
        "kv_bias": "kv_down.bias" in weights,
    }


def check_parameters(module: nn.Module, known: set[str]) -> None:
    """Refuse a module with parameters that the layer would not get."""
    unknown = sorted(name for name, _ in module.named_parameters() if name not in known)
    if unknown:
        raise HeadwiseError(
            f"{type(module).__name__} has parameters that would be lost: {', '.join(unknown)}; merge adapters into the "
            f"weights first"
        )


def linear_weights(linear: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a Linear, or an error that says what stands there instead."""
    # transformers' Conv1D goes by its name, as nothing here imports transformers.
    if not (isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"):
        raise HeadwiseError(f"{name} is {type(linear).__name__}, not nn.Linear; dequantise or unfuse it")
    return as_rows(linear), linear.bias


def as_rows(module: nn.Module) -> Tensor:
    """The weight of a projection as y = W x, (out, in); GPT-2's Conv1D holds y = x W."""
    weight: Any = module.weight
    matrix: Tensor = weight.T if type(module).__name__ == "Conv1D" else weight
    return matrix
