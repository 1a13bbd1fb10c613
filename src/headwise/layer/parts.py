"""The weights of an attention as a layer has them, and the layer that copies of them make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.families import Family
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.spec import USUAL, AttentionSpec, require_size

Module = Callable[[Tensor], Tensor]


class Parts(NamedTuple):
    """Weights as our layer has them, y = W x: q (h*d, in), k (g*d, context), v (g*e, context), o (out, h*e).

    Each with its bias, which may be None; and the gains (d,) of norms over each head's queries and keys. Of a layer
    with a latent, k is `kv_up`, v is not read, the gains are those of latents; q reads one where there is `q_down`.
    """

    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None]
    v: tuple[Tensor, Tensor | None]
    o: tuple[Tensor | None, Tensor | None] = (None, None)
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    kv_down: tuple[Tensor, Tensor | None] | None = None
    q_down: tuple[Tensor, Tensor | None] | None = None


# What parts are called in our layer, where that is not their name with "_proj" behind.
PLACES = {name: name for name in ("q_norm", "k_norm", "kv_down", "q_down")}
PLACES_WITH_LATENT = PLACES | {"k": "kv_up", "q_norm": "q_latent_norm", "k_norm": "kv_latent_norm"}


def parts_of(family: Family, core: nn.Module, w_o: nn.Module | None) -> Parts:
    """The weights of a family's attention as a layer has them, y = W x: views of the module's own.

    `w_o` is the module of W_O, or None to do without.
    """

    def projection(path: str) -> tuple[Tensor, Tensor | None]:
        return linear_weights(family.read(core, path), f"{type(core).__name__}.{family.within_core(path)}")

    def split(*counts: int) -> list[tuple[Tensor, Tensor | None]]:
        """What one packed projection holds, for so many heads each."""
        weight, bias = projection(family.k)
        if weight.shape[0] % sum(counts):
            raise HeadwiseError(f"{family.k} has {weight.shape[0]} rows, no multiple of {sum(counts)} heads")
        per_head = weight.shape[0] // sum(counts)
        rows = [per_head * count for count in counts]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        return list(zip(torch.split(weight, rows), biases, strict=True))

    def gain(path: str | None, width: int) -> Tensor | None:
        norm = family.read(core, path)
        if norm is not None and tuple(norm.weight.shape) != (width,):
            raise HeadwiseError(
                f"{path} norms {len(norm.weight)} features at once, and a headwise layer each head's {width} apart; it "
                f"can be neither imported nor reshaped"
            )
        if norm is None:
            return None
        weight: Tensor = norm.weight  # a view that can be written to, where there is no offset
        return weight + family.norm_offset if family.norm_offset else weight

    n_heads = family.read(core, family.n_heads)
    n_kv_heads = family.read(core, family.n_kv_heads) or n_heads
    q_down = None if family.read(core, family.q_down) is None else family.q_down
    if family.cross_q is not None and family.is_cross(core):
        q, (k, v) = projection(family.cross_q), split(n_kv_heads, n_kv_heads)
    elif family.packed:  # its q, k and v name one module
        q, k, v = split(n_heads, n_kv_heads, n_kv_heads)
    else:
        queries = family.q if q_down is None or family.q_up is None else family.q_up
        q, k, v = (projection(path) for path in (queries, family.k, family.v))
    q_width = k_width = q[0].shape[0] // n_heads
    if family.kv_down is not None:  # there the norms are of latents: of what q_up and kv_up read
        q_width, k_width = q[0].shape[1], k[0].shape[1]
    return Parts(
        q,
        k,
        v,
        o=(None, None) if w_o is None else linear_weights(w_o, f"{family.whole}.{family.o}"),
        q_norm=gain(family.q_norm, q_width),
        k_norm=gain(family.k_norm, k_width),
        kv_down=None if family.kv_down is None else projection(family.kv_down),
        q_down=None if q_down is None else projection(q_down),
    )


def parameters_of(family: Family) -> set[str]:
    """Names of the parameters, seen from the core, that a layer would get."""
    paths = [family.q, family.k, family.v, family.o, family.cross_q, family.q_norm, family.k_norm]
    paths += [family.kv_down, family.q_down, family.q_up]
    return {f"{family.within_core(path)}.{kind}" for path in paths if path for kind in ("weight", "bias")}


def build(
    parts: Parts, n_heads: int, n_kv_heads: int | None = None, *, training: bool = True, **options: Any
) -> MultiHeadAttention:
    """The layer with copies of these weights. Raises HeadwiseError when they do not fit together.

    options  the fields of AttentionSpec that weights do not say: mask, rope, scale, dropout, ...
    """
    kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    require_size("n_heads", n_heads)
    require_size("n_kv_heads", kv_heads)
    tensors = _tensors(parts)
    fields = _latent_fields(tensors, n_heads) if "kv_down" in tensors else _fields(tensors, n_heads, kv_heads)
    spec = AttentionSpec(
        n_heads=n_heads,
        d_out=len(tensors["o"]) if "o" in tensors else USUAL,
        out_bias="o_bias" in tensors,
        out_proj="o" in tensors,
        **fields,
        **options,
    )
    with torch.inference_mode(False):
        with shapes_alone():  # elsewhere initial values would be drawn from the RNG
            layer = MultiHeadAttention.from_spec(spec)
        places = PLACES_WITH_LATENT if "kv_down" in tensors else PLACES
        state = {}
        for name, tensor in tensors.items():
            part, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
            place = f"{places.get(part, f'{part}_proj')}.{kind}"
            state[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        layer.load_state_dict(state, assign=True)
    return layer.train(training)


def _tensors(parts: Parts) -> dict[str, Tensor]:
    """The weights that are there: q, q_bias, ... Raises HeadwiseError for what no layer can have."""
    projections = {"q": parts.q, "k": parts.k, "o": parts.o, "kv_down": parts.kv_down, "q_down": parts.q_down}
    if parts.kv_down is None:
        projections["v"] = parts.v
    tensors = {"q_norm": parts.q_norm, "k_norm": parts.k_norm}
    for name, pair in projections.items():
        tensors[name], tensors[f"{name}_bias"] = pair or (None, None)
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    like = present["q"]
    for name, tensor in present.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise HeadwiseError(f"{name} is {tensor.dtype}: quantised weights have no layer; dequantise them first")
        if tensor.is_meta:
            raise HeadwiseError(f"{name} is on the meta device and holds no numbers; load the weights first")
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise HeadwiseError(
                f"q is {like.dtype} on {like.device}, {name} is {tensor.dtype} on {tensor.device}; "
                f"bring them to one dtype and device"
            )
    return present


def _fields(tensors: dict[str, Tensor], n_heads: int, kv_heads: int) -> dict[str, Any]:
    """What the matrices of a layer say of its spec; a bias that only keys or only values have is joined by zeros."""
    head_dim, value_dim = _head_widths(tensors, n_heads, kv_heads)
    kv_bias = "k_bias" in tensors or "v_bias" in tensors
    if kv_bias:
        for name in "kv":
            tensors.setdefault(f"{name}_bias", tensors[name].new_zeros(len(tensors[name])))
    widths = {"d_model": tensors["q"].shape[1], "d_context": tensors["k"].shape[1], "d_values": tensors["v"].shape[1]}
    biases = {"q_bias": "q_bias" in tensors, "kv_bias": kv_bias, "qk_norm": "q_norm" in tensors}
    return {"n_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, **widths, **biases}


def _latent_fields(tensors: dict[str, Tensor], n_heads: int) -> dict[str, Any]:
    """The same of a layer with a latent."""
    up, down = tensors["k"], tensors["kv_down"]
    q_latent_dim = len(tensors["q_down"]) if "q_down" in tensors else None
    reads_x = "q" if q_latent_dim is None else "q_down"
    rope_dim, head_dim = len(down) - up.shape[1], len(tensors["q"]) // n_heads
    value_dim = len(up) // n_heads - (head_dim - rope_dim)  # `up` makes the rest of a key, and a value
    heads = {"head_dim": head_dim, "value_dim": value_dim, "rope_dim": rope_dim, "q_latent_dim": q_latent_dim}
    widths = {"d_model": tensors[reads_x].shape[1], "d_context": down.shape[1], "latent_dim": up.shape[1]}
    return {**heads, **widths, "q_bias": f"{reads_x}_bias" in tensors, "kv_bias": "kv_down_bias" in tensors}


def _head_widths(tensors: dict[str, Tensor], n_heads: int, kv_heads: int) -> tuple[int, int]:
    """Head width and value width, on which all four matrices must agree."""
    widths = {}
    for name, heads in (("q", n_heads), ("k", kv_heads), ("v", kv_heads)):
        widths[name], rest = divmod(len(tensors[name]), heads)
        if rest:
            field = "n_heads" if name == "q" else "n_kv_heads"
            raise HeadwiseError(f"{name} has {len(tensors[name])} rows; {field}={heads} does not divide them")
    if widths["k"] != widths["q"]:
        raise HeadwiseError(
            f"n_heads={n_heads} makes queries of width {widths['q']} of {len(tensors['q'])} rows, n_kv_heads={kv_heads}"
            f" keys of width {widths['k']} of {len(tensors['k'])} rows; they must be equal: check the numbers of heads"
        )
    joined = n_heads * widths["v"]
    if "o" in tensors and tensors["o"].shape[1] != joined:
        raise HeadwiseError(
            f"o reads width {tensors['o'].shape[1]}; {n_heads} heads of value width {widths['v']} join to {joined}"
        )
    return widths["q"], widths["v"]


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
    if not (isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"):
        raise HeadwiseError(f"{name} is {type(linear).__name__}, not nn.Linear; dequantise or unfuse it")
    return as_rows(linear), linear.bias


def as_rows(module: nn.Module) -> Tensor:
    """The weight of a projection as y = W x, (out, in); GPT-2's Conv1D holds y = x W."""
    weight: Any = module.weight
    matrix: Tensor = weight.T if type(module).__name__ == "Conv1D" else weight
    return matrix
