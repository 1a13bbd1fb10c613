"""torch.nn.MultiheadAttention and the courses' classes made into layers of ours, each tried against the original."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.masks import Causal, Lengths, Mask
from headwise.rungs.tensor import trace
from headwise.spec import AttentionSpec, Options

COURSE = ("W_query", "W_key", "W_value", "out_proj")  # Linears, beside `num_heads` and a causal `mask`

# Texts that both are run on, tokens of each, and keys of a context: small, and different primes.
N_TEXTS, N_TOKENS, N_KEYS = 3, 13, 11

# What is converted, as a function: of x (B,T,c), of what keys (B,S,c) and values (B,S,c) are made of, and of what is
# added to the scores, (B,H,T,S) or None, -inf = forbidden.
Original = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def from_torch(module: nn.Module) -> MultiHeadAttention:
    """The layer that computes what a module of torch does, with copies of its weights.

        layer = hw.from_torch(nn.MultiheadAttention(96, 6, batch_first=True))
        y = layer(x, mask=hw.Causal())

    Both are run on random texts, with and without masks: in float32 and wider a difference beyond rounding is an error.

    Args:
        module: an nn.MultiheadAttention, or a course's class (Raschka, "Build a Large Language Model (From Scratch)",
            section 3.6): Linears W_query, W_key, W_value and out_proj, num_heads, a causal `mask`. It is left alone.
            The layer takes (batch, tokens, width) in any case, texts of any length, and a mask with each call; with
            kdim or vdim other than embed_dim it is for cross attention alone.

    Raises:
        HeadwiseError: for another module, and with the name of what a layer cannot represent.
    """
    return converted(module)[0]


def converted(module: nn.Module) -> tuple[MultiHeadAttention, float]:
    """`from_torch`, with the largest difference between layer and module."""
    if isinstance(module, nn.MultiheadAttention):
        return _from_stock(module)
    if all(isinstance(getattr(module, name, None), nn.Module) for name in COURSE):
        return _from_course(module)
    if isinstance(module, MultiHeadAttention):
        raise HeadwiseError("this is a headwise layer already; use copy.deepcopy for another one")
    if isinstance(getattr(module, "heads", None), nn.ModuleList):
        raise HeadwiseError(
            f"{type(module).__name__} stacks single heads; headwise.courses.from_scratch.class_from_wrapper makes of "
            f"the courses' wrapper one layer, which from_torch takes"
        )
    raise HeadwiseError(
        f"{type(module).__name__} is not known; from_torch takes nn.MultiheadAttention, and modules with "
        f"{', '.join(COURSE)}, num_heads and a mask. Of others copy the weights into a MultiHeadAttention"
    )


def _from_stock(module: nn.MultiheadAttention) -> tuple[MultiHeadAttention, float]:
    if module.bias_k is not None or module.bias_v is not None:
        raise HeadwiseError(
            "add_bias_kv=True appends a learned key and value to each text, and a headwise layer has none; "
            "build the module with add_bias_kv=False"
        )
    if module.add_zero_attn:  # not built like that here: a sink of ours learns, and torch's stays 0
        raise HeadwiseError(
            "add_zero_attn=True appends a key and value of zeros to each text; that is a sink logit of 0: "
            "copy the weights into MultiHeadAttention(sink=True) yourself"
        )
    # With kdim or vdim torch keeps three matrices, else a single one, in which their rows are stacked. The biases of
    # all three are stacked either way.
    separate = [f"{name}_proj_weight" for name in "qkv"]
    _check_known(module, {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", *separate})
    packed, bias = module.in_proj_weight, module.in_proj_bias
    matrices = [getattr(module, name) for name in separate] if packed is None else packed.chunk(3)
    weights = {f"{name}_proj.weight": matrix for name, matrix in zip("qkv", matrices, strict=True)}
    if bias is not None:
        weights |= {f"{name}_proj.bias": part for name, part in zip("qkv", bias.chunk(3), strict=True)}
    weights |= {f"o_proj.{name}": part for name, part in module.out_proj.named_parameters()}
    layer = _layer(weights, module.num_heads, module.training, dropout=module.dropout)
    twin = copy.deepcopy(module).eval()

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        # Of 0 and -inf; torch takes it as (B*H,T,S), True = may NOT attend.
        blocked = None if added is None else (added == -math.inf).flatten(0, 1)
        if not twin.batch_first:
            x, keys, values = (sequence.transpose(0, 1) for sequence in (x, keys, values))
        out: Tensor = twin(x, keys, values, attn_mask=blocked, need_weights=False)[0]
        return out if twin.batch_first else out.transpose(0, 1)

    only_cross = module.kdim != module.embed_dim or module.vdim != module.embed_dim
    masks = [None, Causal(), Lengths([N_TOKENS, N_TOKENS // 2 + 1, 1])]  # a whole text, a good half, a single key
    difference = _apart(layer, original, N_TOKENS, N_KEYS, [None, Lengths([N_KEYS, N_KEYS // 2 + 1, 1])])
    if not only_cross:
        difference = max(difference, _apart(layer, original, N_TOKENS, None, masks))
    return layer, difference


def _from_course(module: Any) -> tuple[MultiHeadAttention, float]:
    n_heads, mask = getattr(module, "num_heads", None), getattr(module, "mask", None)
    if not isinstance(n_heads, int) or not isinstance(mask, Tensor):
        raise HeadwiseError(
            f"{type(module).__name__} has no {'mask' if isinstance(n_heads, int) else 'num_heads'}; the course's class "
            f"has {', '.join(COURSE)}, num_heads and a mask. Of others copy the weights into a MultiHeadAttention"
        )
    _check_known(module, {f"{name}.{kind}" for name in COURSE for kind in ("weight", "bias")})
    weights: dict[str, Tensor] = {}
    for ours, name in zip("qkvo", COURSE, strict=True):
        linear = getattr(module, name)
        if not isinstance(linear, nn.Linear):
            raise HeadwiseError(
                f"{type(module).__name__}.{name} is {type(linear).__name__}, not nn.Linear; dequantise or unfuse it"
            )
        weights |= {f"{ours}_proj.{part}": tensor for part, tensor in linear.named_parameters()}
    dropout = getattr(module, "dropout", 0.0)  # an nn.Dropout, or a number
    layer = _layer(weights, n_heads, module.training, mask=Causal(), dropout=getattr(dropout, "p", dropout))
    twin = copy.deepcopy(module).eval()
    # It takes no mask: its own must be what the layer's Causal is. And no longer text than that.
    n_tokens = min(N_TOKENS, mask.shape[-1])
    return layer, _apart(layer, lambda x, *rest: twin(x), n_tokens, None, [None])


def _check_known(module: nn.Module, known: set[str]) -> None:
    """Refuse a module with parameters that the layer would not get."""
    unknown = sorted(name for name, _ in module.named_parameters() if name not in known)
    if unknown:
        raise HeadwiseError(
            f"{type(module).__name__} has parameters that would be lost: {', '.join(unknown)}; merge adapters into the "
            f"weights first"
        )


def _layer(weights: dict[str, Tensor], n_heads: int, training: bool, **options: Any) -> MultiHeadAttention:
    """The layer with copies of these weights, by the names of its parameters."""
    q, k, v, o = (weights[f"{name}_proj.weight"] for name in "qkvo")
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # floats of one byte: float8
            raise HeadwiseError(f"{name} is {tensor.dtype}: quantised weights have no layer; dequantise them first")
        if tensor.is_meta:
            raise HeadwiseError(f"{name} is on the meta device and holds no numbers; load the weights first")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise HeadwiseError(
                f"q_proj.weight is {q.dtype} on {q.device}, {name} is {tensor.dtype} on {tensor.device}; "
                f"bring them to one dtype and device"
            )
    if len(q) % n_heads or len(v) % n_heads:
        raise HeadwiseError(f"q has {len(q)} rows, v has {len(v)}; num_heads={n_heads} does not divide them")
    if len(k) != len(q) or o.shape[1] != len(v):
        raise HeadwiseError(f"q, k and v have {len(q)}, {len(k)} and {len(v)} rows, and o reads width {o.shape[1]}")
    has_bias = {"k_proj.bias", "v_proj.bias"} & weights.keys()
    for name, matrix in (("k_proj", k), ("v_proj", v)):  # a layer has both or neither: the missing one becomes zeros
        if has_bias and f"{name}.bias" not in weights:
            weights |= {f"{name}.bias": matrix.new_zeros(len(matrix))}
    spec = AttentionSpec(
        d_model=q.shape[1],
        n_heads=n_heads,
        head_dim=len(q) // n_heads,
        value_dim=len(v) // n_heads,
        d_context=k.shape[1],
        d_values=v.shape[1],
        d_out=len(o),
        q_bias="q_proj.bias" in weights,
        kv_bias=bool(has_bias),
        out_bias="o_proj.bias" in weights,
        **options,
    )
    with torch.inference_mode(False):  # parameters that are made in inference mode could never be trained
        with shapes_alone():  # else first weights would be drawn, and the caller's random numbers change
            layer = MultiHeadAttention.from_spec(spec)
        copies = {
            name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in weights.items()
        }  # a plain clone of a transposed matrix would stay transposed, and safetensors writes none such
        layer.load_state_dict(copies, assign=True)  # assigned: a parameter without numbers cannot be written to
    return layer.train(training)


def _apart(
    layer: MultiHeadAttention, original: Original, n_tokens: int, n_keys: int | None, masks: Sequence[Mask | None]
) -> float:
    """The largest difference of both on random input in eval mode; HeadwiseError where it is beyond rounding.

    n_keys  keys of a context; None: self attention
    """
    spec, like, mode = layer.spec, layer.q_proj.weight, layer.training
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(length: int, width: int) -> Tensor:
        return torch.randn(N_TEXTS, length, width, generator=generator, device="cpu").to(like)

    layer.eval()  # no dropout; its mode comes back below
    measured = []  # of each run the largest difference, and the largest output
    # The original may make tensors of its own: where the weights are.
    with torch.no_grad(), torch.device(like.device), torch.autocast(like.device.type, enabled=False):
        x = drawn(n_tokens, spec.d_in)
        keys = x if n_keys is None else drawn(n_keys, spec.d_context)
        values = x if n_keys is None else drawn(n_keys, spec.d_values)
        for mask in masks:
            added = None
            if mask is not None:  # as numbers that are added to the scores: those of queries and keys that are all 0
                queries = like.new_zeros(N_TEXTS, spec.n_heads, n_tokens, 1)
                zeros = like.new_zeros(N_TEXTS, spec.n_heads, keys.shape[1], 1)
                added = trace(queries, zeros, zeros, Options(mask)).masked
            expected, ours = original(x, keys, values, added), layer(x, keys, values, mask=mask)
            measured.append(torch.stack([(ours - expected).abs().max(), expected.abs().max()]))
    layer.train(mode)
    largest, reached = torch.stack(measured).amax(0).tolist()  # of all runs; NaN in one stays NaN
    # A thousandth of the largest output is a round choice: far above rounding in float32, far below what a wrong rule
    # changes. `not <=` refuses NaN, too.
    if like.dtype.itemsize >= 4 and not largest <= 1e-3 * reached:
        raise HeadwiseError(
            f"the layer differs from the module by {largest:.3g} where outputs reach {reached:.3g}, beyond rounding; "
            f"its forward is not what its weights and name say, so it is not converted"
        )
    return float(largest)
