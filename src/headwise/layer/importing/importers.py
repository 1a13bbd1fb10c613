"""Attention modules of torch and transformers, and a course's, made into layers, each with a certificate.

    import_attention(module)        recognises the module and calls the right one of these
    from_torch(module)              torch.nn.MultiheadAttention
    from_transformers(module)       attention of transformers, of a family that `family` knows
    from_course(module)             W_query, W_key, W_value, out_proj, num_heads and a causal `mask`
    from_packed, from_separate, from_conv1d, from_keras    bare weights; see `packed`

Each runs a copy of the module beside the layer; the module itself is not touched. Modules are recognised by class name
and attributes, so nothing here imports transformers. What a layer cannot represent is refused by name.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.certificate import CAUSAL, N_TOKENS, Imported, certified
from headwise.layer.importing.family import families, family_of
from headwise.layer.importing.hf import from_transformers
from headwise.layer.importing.packed import from_conv1d, from_keras, from_packed, from_separate
from headwise.layer.importing.parts import Parts, build, check_parameters, linear_weights
from headwise.layer.layer import MultiHeadAttention

__all__ = [
    "Imported",
    "from_conv1d",
    "from_course",
    "from_keras",
    "from_packed",
    "from_separate",
    "from_torch",
    "from_transformers",
    "import_attention",
]

COURSE = ("W_query", "W_key", "W_value", "out_proj", "num_heads")


def import_attention(module: nn.Module) -> Imported:
    """A layer that computes what `module` does, with its certificate. Raises HeadwiseError for a module not known."""
    if isinstance(module, nn.MultiheadAttention):
        return from_torch(module)
    if family_of(module) is not None:
        return from_transformers(module)
    if all(hasattr(module, name) for name in COURSE):
        return from_course(module)
    if isinstance(module, MultiHeadAttention):
        raise HeadwiseError("this is a headwise layer already; use copy.deepcopy for another one")
    raise HeadwiseError(
        f"{type(module).__name__} is not known; import_attention knows nn.MultiheadAttention, transformers' "
        f"{', '.join(family.whole for family in families())}, and modules with {', '.join(COURSE)} and a mask. Pass "
        f"the weights of others to from_separate, from_packed (one matrix such as query_key_value or Wqkv), "
        f"from_conv1d or from_keras of headwise.layer.importing.importers"
    )


def from_torch(module: nn.MultiheadAttention) -> Imported:
    """From torch.nn.MultiheadAttention, with packed or separate weights, batch_first or not.

    The layer is batch-first in any case. With kdim or vdim other than embed_dim it is for cross attention alone.
    Masks are passed per call, as there. Refused: add_bias_kv, add_zero_attn.
    """
    if module.bias_k is not None or module.bias_v is not None:
        raise HeadwiseError(
            "add_bias_kv=True appends a learned key and value to each text, and a headwise layer has none; "
            "build the module with add_bias_kv=False"
        )
    if module.add_zero_attn:
        raise HeadwiseError(
            "add_zero_attn=True appends a key and value of zeros to each text; that is a sink logit of 0: "
            "copy the weights into MultiHeadAttention(sink=True) yourself"
        )
    separate = [f"{name}_proj_weight" for name in "qkv"]
    check_parameters(module, {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", *separate})
    packed, bias, n_heads = module.in_proj_weight, module.in_proj_bias, module.num_heads
    weights = [getattr(module, name) for name in separate] if packed is None else packed.chunk(3)
    q, k, v = zip(weights, (None,) * 3 if bias is None else bias.chunk(3), strict=True)
    parts = Parts(q, k, v, linear_weights(module.out_proj, "out_proj"))
    layer = build(parts, n_heads, dropout=module.dropout, training=module.training)
    twin = copy.deepcopy(module).eval()

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        blocked = None
        if added is not None:  # here True = may NOT attend
            blocked = (added == -math.inf).expand(-1, n_heads, -1, -1).flatten(0, 1)
        if not twin.batch_first:
            x, keys, values = (sequence.transpose(0, 1) for sequence in (x, keys, values))
        out: Tensor = twin(x, keys, values, attn_mask=blocked, need_weights=False)[0]
        return out if twin.batch_first else out.transpose(0, 1)

    layout = "separate q, k, v_proj_weight" if packed is None else "packed in_proj_weight"
    return certified(layer, original, f"from_torch, {layout}", "nn.MultiheadAttention")


def from_course(module: nn.Module) -> Imported:
    """From the class that courses build: Linears W_query, W_key, W_value, out_proj, num_heads, a causal `mask`.

    Raschka, "Build a Large Language Model (From Scratch)", section 3.6. forward(x) (B,T,d_in) -> (B,T,d_out), heads
    are adjacent slices of the width, `mask` (context_length, context_length) is 1 where a query may not look. The
    layer has no context_length: it takes texts of any length. `dropout`, where there is one, is on the weights.
    """
    attention: Any = module
    parts = {name: getattr(module, name, None) for name in (*COURSE, "mask")}
    absent = [name for name, part in parts.items() if not isinstance(part, nn.Module | Tensor | int)]
    if absent:
        raise HeadwiseError(
            f"{type(module).__name__} has no {', '.join(absent)}; the course's class has {', '.join(COURSE)} and a "
            f"mask. Pass the weights of others to from_separate(..., mask=Causal())"
        )
    check_parameters(module, {f"{name}.{kind}" for name in COURSE[:4] for kind in ("weight", "bias")})
    q, k, v, o = (linear_weights(getattr(module, name), f"{type(module).__name__}.{name}") for name in COURSE[:4])
    dropout = getattr(module, "dropout", 0.0)
    layer = build(
        Parts(q, k, v, o),
        attention.num_heads,
        mask=CAUSAL,
        dropout=getattr(dropout, "p", dropout),
        training=module.training,
    )
    twin: Any = copy.deepcopy(module).eval()
    n_tokens = min(N_TOKENS, attention.mask.shape[-1])

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        out: Tensor = twin(x)  # which takes no mask: its own buffer must be what the layer's Causal is
        return out

    return certified(layer, original, "from_course", type(module).__name__, ("self",), n_tokens, padding=False)
