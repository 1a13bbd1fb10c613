"""torch.nn.MultiheadAttention and the courses' class made into layers of ours, each tried against the original."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.layer import MultiHeadAttention
from headwise.layer.projections import shapes_alone
from headwise.masks import Causal, Lengths
from headwise.spec import AttentionSpec

# Linears, beside `num_heads` and a causal `mask`
COURSE = ("W_query", "W_key", "W_value", "out_proj")
N_TEXTS, N_TOKENS, N_KEYS = 3, 13, 11  # that both are run on: small, and different primes


def from_torch(module: nn.Module) -> MultiHeadAttention:
    """The layer that computes what a module of torch does, with copies of its weights.

        layer = hw.from_torch(nn.MultiheadAttention(96, 6, batch_first=True))
        y = layer(x, mask=hw.Causal())

    Both are run on random texts: in float32 and wider a difference beyond rounding is an error.

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
    is_stock, kind = isinstance(module, nn.MultiheadAttention), type(module).__name__
    if isinstance(module, MultiHeadAttention):
        raise HeadwiseError("this is a headwise layer already; use copy.deepcopy for another one")
    if isinstance(getattr(module, "heads", None), nn.ModuleList):
        raise HeadwiseError(
            f"{kind} stacks single heads; headwise.courses.from_scratch.class_from_wrapper makes of the courses' "
            f"wrapper one layer, which from_torch takes"
        )
    n_heads = getattr(module, "num_heads", None)
    is_course = isinstance(getattr(module, "mask", None), Tensor) and all(
        hasattr(module, name) for name in COURSE
    )
    if not isinstance(n_heads, int) or not (is_stock or is_course):
        raise HeadwiseError(
            f"{kind} is not known; from_torch takes nn.MultiheadAttention, and modules with {', '.join(COURSE)}, "
            f"num_heads and a mask. Of others copy the weights into a MultiHeadAttention"
        )
    if isinstance(module, nn.MultiheadAttention) and (
        module.add_zero_attn or module.bias_k is not None
    ):
        raise HeadwiseError(
            "add_bias_kv and add_zero_attn append a key and value to each text, and a layer has none; build without"
        )
    layer = _layer(module, n_heads, None if is_stock else Causal())
    return layer, _difference(layer, module)


def parts(module: nn.Module) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """By the names of our parameters: the numbers, and the parameter of the module that they lie in."""
    of_module: dict[str, tuple[Tensor, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        kind = name.removeprefix("in_proj_")
        if kind != name:  # the rows of all three, stacked
            chunks = parameter.detach().chunk(3)
            of_module |= {
                f"{ours}_proj.{kind}": (rows, parameter)
                for ours, rows in zip("qkv", chunks, strict=True)
            }
            continue
        for ours, course in zip("qkvo", COURSE, strict=True):
            # with kdim or vdim torch has q_proj_weight
            for theirs in (f"{course}.", f"{ours}_proj_"):
                if name.startswith(theirs):
                    name = f"{ours}_proj.{name.removeprefix(theirs)}"
        of_module[name] = parameter.detach(), parameter
    return of_module


def _layer(module: nn.Module, n_heads: int, mask: Causal | None) -> MultiHeadAttention:
    """The layer with copies of the module's weights."""
    kind, weights = (
        type(module).__name__,
        {name: numbers for name, (numbers, _) in parts(module).items()},
    )
    stored = {f"{x.dtype} on {x.device}" for x in weights.values()}
    q, k, v, o = (weights.get(f"{name}_proj.weight") for name in "qkvo")
    if q is None or k is None or v is None or o is None:
        raise HeadwiseError(
            f"{kind} has no weight of a projection; dequantise or unfuse its Linears"
        )
    # floats of one byte: float8
    if len(stored) > 1 or not q.is_floating_point() or q.dtype.itemsize < 2 or q.is_meta:
        raise HeadwiseError(
            f"{kind} has weights in {', '.join(sorted(stored))}; a layer has floats of one dtype on one device: "
            f"dequantise, load or cast them first"
        )
    dropout: Any = getattr(module, "dropout", 0.0)  # an nn.Dropout, or a number
    spec = AttentionSpec(
        d_model=q.shape[1],
        n_heads=n_heads,
        head_dim=len(q) // n_heads,
        value_dim=len(v) // n_heads,
        d_context=k.shape[1],
        d_values=v.shape[1],
        d_out=len(o),
        q_bias="q_proj.bias" in weights,
        kv_bias="k_proj.bias" in weights,
        out_bias="o_proj.bias" in weights,
        mask=mask,
        dropout=getattr(dropout, "p", dropout),
    )
    # parameters that are made in inference mode could never be trained
    with torch.inference_mode(False):
        # else first weights would be drawn, and the caller's random numbers change
        with shapes_alone():
            layer = MultiHeadAttention.from_spec(spec)
        shapes, wanted = (
            {name: tuple(x.shape) for name, x in w.items()} for w in (weights, layer.state_dict())
        )
        if wrong := sorted(dict(shapes.items() ^ wanted.items())):
            has = ", ".join(f"{name} {shapes.get(name, 'missing')}" for name in wrong)
            raise HeadwiseError(
                f"{kind} is no layer of {n_heads} heads: {has}; merge adapters into the weights first"
            )
        copies = {
            name: x.clone(memory_format=torch.contiguous_format)
            for name, x in weights.items()
            # a plain clone of a transposed matrix would stay transposed, and safetensors writes none such
        }
        # assigned: a parameter without numbers cannot be written to
        layer.load_state_dict(copies, assign=True)
    return layer.train(module.training)


def _difference(layer: MultiHeadAttention, module: Any) -> float:
    """The largest difference of both on random texts in eval mode; HeadwiseError where it is beyond rounding."""
    spec, like = layer.spec, layer.q_proj.weight
    layer, module = copy.deepcopy(layer).eval(), copy.deepcopy(module).eval()
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(length: int, width: int) -> Tensor:
        return torch.randn(N_TEXTS, length, width, generator=generator, device="cpu").to(like)

    pairs = []  # of what both give
    # The original may make tensors of its own: where the weights are.
    with (
        torch.no_grad(),
        torch.device(like.device),
        torch.autocast(like.device.type, enabled=False),
    ):
        # a course's, which takes no mask, and no longer text than its own
        if spec.mask is not None:
            x = drawn(min(N_TOKENS, module.mask.shape[-1]), spec.d_in)
            pairs.append((layer(x), module(x)))
        else:
            module.batch_first = True
            x, keys, values = (
                drawn(N_TOKENS, spec.d_in),
                drawn(N_KEYS, spec.d_context),
                drawn(N_KEYS, spec.d_values),
            )
            # a whole text, a good half, a single key
            lengths = torch.tensor([N_KEYS, N_KEYS // 2 + 1, 1])
            padding = torch.arange(N_KEYS) >= lengths[:, None]
            ours = layer(x, keys, values, mask=Lengths(lengths))
            pairs.append((ours, module(x, keys, values, key_padding_mask=padding)[0]))
            if spec.d_in == spec.d_context == spec.d_values:
                later = torch.ones(N_TOKENS, N_TOKENS, dtype=torch.bool).triu(1)
                pairs.append((layer(x, mask=Causal()), module(x, x, x, attn_mask=later)[0]))
        measured = [
            torch.stack([(ours - theirs).abs().max(), theirs.abs().max()]) for ours, theirs in pairs
        ]
    largest, reached = torch.stack(measured).amax(0).tolist()  # of all runs; NaN in one stays NaN
    # A thousandth of the largest output is a round choice: far above rounding in float32, far below what a wrong rule
    # changes. `not <=` refuses NaN, too.
    if like.dtype.itemsize >= 4 and not largest <= 1e-3 * reached:
        raise HeadwiseError(
            f"the layer differs from the module by {largest:.3g} where outputs reach {reached:.3g}, beyond rounding; "
            f"its forward is not what its weights and name say, so it is not converted"
        )
    return float(largest)
