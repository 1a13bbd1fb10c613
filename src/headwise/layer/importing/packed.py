"""Bare attention weights in the layouts of the field, made into a layer by copying them, with a `certificate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.certificate import CAUSAL, Imported, attended, certified, project, split_heads
from headwise.layer.importing.parts import Parts, build, check_matrix
from headwise.masks import Mask
from headwise.positions import RoPE
from headwise.spec import require_size

Module = Callable[[Tensor], Tensor]


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
    scale: float | None = None,
    dropout: float = 0.0,
    module: Module | None = None,
) -> Imported:
    """A layer from one matrix that holds queries, keys and values; certified against the formula written out.

    weight      ((h + 2g) * d, d_in), y = W x; bias ((h + 2g) * d,) or None. The head width d follows from the rows
    out_weight  (d_out, h*d) or None for no output projection; out_bias (d_out,) or None
    layout      "qkv"        all queries, then all keys, then all values: MPT, ModernBERT, Phi-3, ChatGLM; with one
                             key/value head Falcon-7B and StarCoder
                "per_head"   for each head its query, key and value: GPT-NeoX, BLOOM, Falcon-RW
                "per_group"  for each key/value head the queries that read it, then the key, then the value:
                             Falcon-40B, InternLM2
    mask, rope, scale, dropout    as in MultiHeadAttention; weights do not say them. `mask` must fit any batch
    module      where the weights come from, a function of x (B,T,d_in): then it is run for the certificate. The formula
                alone cannot know what else the module does

    Raises HeadwiseError when sizes do not fit, or when the weights are no floats (quantised) or of several dtypes.
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    width = _packed_width(weight, bias, n_heads, kv_heads, layout)
    groups = 1 if layout == "qkv" else kv_heads  # "per_head" has groups of one head
    rows = [n * width // groups for n in (n_heads, kv_heads, kv_heads)]  # of each group's queries, keys and values

    def unpacked(packed: Tensor) -> list[Tensor]:
        blocks = packed.reshape(groups, sum(rows), *packed.shape[1:])
        return [block.flatten(0, 1) for block in torch.split(blocks, rows, 1)]

    q, k, v = zip(unpacked(weight), (None,) * 3 if bias is None else unpacked(bias), strict=True)

    def projected(x: Tensor, keys: Tensor, values: Tensor) -> Iterable[Tensor]:
        """Split the way those models do it: the activations, not the weights."""
        of_x, of_keys = (split_heads(project(y, weight, bias), groups) for y in (x, keys))
        return of_x[..., : rows[0]], *of_keys[..., rows[0] :].chunk(2, -1)

    parts, path = Parts(q, k, v, (out_weight, out_bias)), f'from_packed, layout "{layout}"'
    options: dict[str, Any] = {"mask": mask, "rope": rope, "scale": scale, "dropout": dropout}
    return _from_bare(parts, n_heads, kv_heads, path, projected, module, **options)


def from_conv1d(
    c_attn_weight: Tensor,
    c_attn_bias: Tensor | None,
    c_proj_weight: Tensor,
    c_proj_bias: Tensor | None,
    n_heads: int,
    *,
    mask: Mask | None = CAUSAL,
    scale: float | None = None,
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
    done = from_packed(rows, n_heads, None, c_attn_bias, out_rows, c_proj_bias, mask=mask, scale=scale, dropout=dropout)
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
    scale: float | None = None,
    dropout: float = 0.0,
    module: Module | None = None,
) -> Imported:
    """A layer from four nn.Linear, or four matrices and their biases; certified against the formula written out.

    q (h*d, d_in), k (g*d, d_context), v (g*e, d_values), o (d_out, h*e) or None, y = W x. Where only one of k and v
    has a bias (Whisper), the other gets zeros. mask, rope, scale, dropout as in MultiHeadAttention; `mask` must fit
    any batch and length. With `module`, a function of x (B,T,d_in), the certificate runs where the weights come from.

    Raises HeadwiseError when sizes do not fit, or when the weights are no floats (quantised) or of several dtypes.
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    pairs = _linear("q", q, q_bias), _linear("k", k, k_bias), _linear("v", v, v_bias)
    w_o = (None, o_bias) if o is None else _linear("o", o, o_bias)

    def projected(*inputs: Tensor) -> Iterable[Tensor]:
        return (project(y, *pair) for y, pair in zip(inputs, pairs, strict=True))

    parts, options = Parts(*pairs, w_o), {"mask": mask, "rope": rope, "scale": scale, "dropout": dropout}
    return _from_bare(parts, n_heads, kv_heads, "from_separate", projected, module, **options)


def _from_bare(
    parts: Parts,
    n_heads: int,
    kv_heads: int,
    path: str,
    projected: Callable[[Tensor, Tensor, Tensor], Iterable[Tensor]],
    module: Module | None,
    **options: Any,
) -> Imported:
    """The layer, held against its module or the formula; `projected` makes queries, keys and values of its inputs."""
    layer = build(parts, n_heads, kv_heads, **options)
    if module is not None:
        twin = copy.deepcopy(module)
        twin = twin.eval() if isinstance(twin, nn.Module) else twin

        def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
            return twin(x)  # which takes no mask: its own must be the layer's

        return certified(layer, original, path, type(module).__name__, ("self",), padding=False)

    def formula(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        counts = (n_heads, kv_heads, kv_heads)
        q, k, v = (split_heads(y, n) for y, n in zip(projected(x, keys, values), counts, strict=True))
        joined = attended(q, k, v, added, options["rope"], options["scale"])
        weight, bias = parts.o
        return joined if weight is None else project(joined, weight, bias)

    return certified(layer, formula, path, "the formula written out")


KERAS_ROLES = ("query", "key", "value", "attention_output")


def from_keras(
    weights: Mapping[str, np.ndarray] | Sequence[np.ndarray], *, mask: Mask | None = None, dropout: float = 0.0
) -> Imported:
    """A layer from the weights of Keras' MultiHeadAttention or GroupedQueryAttention, as NumPy arrays.

    A sequence in the order of `get_weights()`: query kernel (d_in, h, d) and bias (h, d), key kernel (d_context, g, d)
    and bias, value kernel (d_values, g, e) and bias, output kernel (h, e, d_out) and bias (d_out,); with
    use_bias=False the four kernels only. Or a mapping by variable path, such as "query/kernel" or
    "attention/attention_output/bias:0". Keras takes causality (use_causal_mask) per call and dropout from its config:
    pass mask= and dropout=. Keras itself is not run: the certificate is against its documented computation.

    Raises HeadwiseError for another number of weights (use_gate), kernels that do not have three axes, sizes that do
    not fit.
    """
    arrays = _keras_arrays(weights)
    q, k, v, o = (_keras_linear(role, arrays[role, "kernel"], arrays.get((role, "bias"))) for role in KERAS_ROLES)
    n_heads, n_kv_heads = (arrays[role, "kernel"].shape[1] for role in ("query", "key"))
    layer = build(Parts(q, k, v, o), n_heads, n_kv_heads, mask=mask, dropout=dropout)

    def dense(role: str, equation: str, x: Tensor) -> Tensor:
        kernel, bias = (arrays.get((role, kind)) for kind in ("kernel", "bias"))
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.einsum(equation, x.to(wide), torch.tensor(kernel).to(wide))
        return out if bias is None else out + torch.tensor(bias)

    def documented(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        """Three EinsumDense, attention, EinsumDense, on the kernels as they are."""
        q, k, v = (dense(role, "btc,chd->bthd", y) for role, y in zip(KERAS_ROLES[:3], (x, keys, values), strict=True))
        heads = attended(q, k, v, added, None, None)
        return dense("attention_output", "bthe,heo->bto", split_heads(heads, n_heads))

    what = "Keras' documented computation, transcribed (Keras was not run)"
    return certified(layer, documented, f"from_keras, {len(arrays)} arrays", what)


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


def _keras_arrays(weights: Mapping[str, Any] | Sequence[Any]) -> dict[tuple[str, str], np.ndarray]:
    """The arrays by role and kind, such as ("query", "kernel")."""
    if isinstance(weights, Mapping):
        named = {"/".join(path.removesuffix(":0").split("/")[-2:]): np.asarray(x) for path, x in weights.items()}
        wanted = {f"{role}/{kind}": (role, kind) for role in KERAS_ROLES for kind in ("kernel", "bias")}
        unknown = sorted(set(named) - set(wanted))
        missing = [f"{role}/kernel" for role in KERAS_ROLES if f"{role}/kernel" not in named]
        if unknown or missing or len(named) != len(weights):
            raise HeadwiseError(
                f"Keras weights: {len(weights)} paths, unknown {unknown}, missing {missing}; one layer has "
                f"{', '.join(KERAS_ROLES)}, each with a kernel and perhaps a bias"
            )
        return {wanted[name]: array for name, array in named.items()}
    kinds = {4: ("kernel",), 8: ("kernel", "bias")}.get(len(weights))
    if kinds is None:
        raise HeadwiseError(
            f"Keras MultiHeadAttention has 8 weights, or 4 with use_bias=False, and these are {len(weights)}; "
            f"pass get_weights() of one attention layer"
        )
    names = [(role, kind) for role in KERAS_ROLES for kind in kinds]
    return dict(zip(names, map(np.asarray, weights), strict=True))


def _keras_linear(role: str, kernel: np.ndarray, bias: np.ndarray | None) -> tuple[Tensor, Tensor | None]:
    """A kernel of three axes as (out, in), and its bias as (out,)."""
    if kernel.ndim != 3:
        raise HeadwiseError(f"Keras {role} kernel has shape {kernel.shape}; 3 axes are needed, one of them heads")
    for name, array in (("kernel", kernel), ("bias", bias)):
        if array is not None and array.dtype not in (np.float16, np.float32, np.float64):
            raise HeadwiseError(f"Keras {role} {name} is {array.dtype}; pass float16, float32 or float64")
    matrix = torch.tensor(kernel)
    matrix = matrix.flatten(0, 1) if role == "attention_output" else matrix.flatten(1)
    return matrix.t(), None if bias is None else torch.tensor(bias).flatten()
