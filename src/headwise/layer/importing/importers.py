"""Attention modules of torch and transformers, and a course's, made into layers, each with a certificate.

    import_attention(module)        recognises the module and calls the right one of these
    from_torch(module)              torch.nn.MultiheadAttention
    from_gpt2(module)               transformers' GPT2Attention, for self and cross attention
    from_llama(module)              transformers' Llama, Mistral, Mixtral, Qwen2 and Qwen3 attention
    from_bert(module)               transformers' BERT, RoBERTa, XLM-RoBERTa and ELECTRA attention
    from_course(module)             W_query, W_key, W_value, out_proj, num_heads and a causal `mask`
    from_packed, from_separate, from_conv1d, from_keras    bare weights; see `packed`

Each runs a copy of the module beside the layer; the module itself is not touched. Modules are recognised by class name
and attributes, so nothing here imports transformers. What a layer cannot represent is refused by name.
"""

from __future__ import annotations

import copy
import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.certificate import CAUSAL, N_TOKENS, Imported, certified
from headwise.layer.importing.packed import from_conv1d, from_keras, from_packed, from_separate
from headwise.layer.importing.parts import Parts, build
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Mask, Window
from headwise.positions import RoPE

__all__ = [
    "Imported",
    "from_bert",
    "from_conv1d",
    "from_course",
    "from_gpt2",
    "from_keras",
    "from_llama",
    "from_packed",
    "from_separate",
    "from_torch",
    "import_attention",
]

LLAMAS = {f"{family}Attention" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3")}
BERTS = ("Bert", "Roberta", "XLMRoberta", "Electra")
BERT_SELF = {f"{family}SelfAttention" for family in BERTS}
BERT_CROSS = {f"{family}CrossAttention" for family in BERTS}
COURSE = ("W_query", "W_key", "W_value", "out_proj", "num_heads")


def import_attention(module: nn.Module) -> Imported:
    """A layer that computes what `module` does, with its certificate. Raises HeadwiseError for a module not known."""
    names = _class_names(module)
    if isinstance(module, nn.MultiheadAttention):
        return from_torch(module)
    if "GPT2Attention" in names:
        return from_gpt2(module)
    if names & LLAMAS:
        return from_llama(module)
    if names & (BERT_SELF | BERT_CROSS) or names & {f"{family}Attention" for family in BERTS}:
        return from_bert(module)
    if all(hasattr(module, name) for name in COURSE):
        return from_course(module)
    if isinstance(module, MultiHeadAttention):
        raise HeadwiseError("this is a headwise layer already; use copy.deepcopy for another one")
    raise HeadwiseError(
        f"{type(module).__name__} is not known; import_attention knows nn.MultiheadAttention, GPT2Attention, "
        f"{', '.join(sorted(LLAMAS))}, the self, cross and whole attention of {', '.join(BERTS)}, and modules with "
        f"{', '.join(COURSE)} and a mask. Pass the weights of others to from_separate, from_packed (one matrix such as "
        f"query_key_value or Wqkv), from_conv1d or from_keras"
    )


def from_torch(module: nn.MultiheadAttention) -> Imported:
    """From torch.nn.MultiheadAttention, with packed or separate weights, batch_first or not.

    The layer is batch-first in any case. With kdim = vdim other than embed_dim it is for cross attention alone.
    Masks are passed per call, as there. Refused: add_bias_kv, add_zero_attn, kdim other than vdim.
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
    if module.kdim != module.vdim:
        raise HeadwiseError(
            f"kdim={module.kdim} and vdim={module.vdim} differ: a headwise layer reads keys and values from one "
            f"context, of width d_context"
        )
    separate = {f"{name}_proj_weight" for name in "qkv"}
    _only(module, {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"} | separate)
    given: Any = module
    packed = given.in_proj_weight
    q, k, v = (getattr(given, f"{name}_proj_weight") for name in "qkv") if packed is None else packed.chunk(3)
    bq, bk, bv = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    o, bo = _projection(module, "out_proj")
    n_heads = module.num_heads
    layer = build(Parts(q, k, v, o, bq, bk, bv, bo), n_heads, dropout=module.dropout, training=module.training)
    twin = copy.deepcopy(module).eval()

    def original(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        source = x if context is None else context
        blocked = None
        if added is not None:  # here True = may NOT attend
            blocked = (added == -math.inf).expand(-1, n_heads, -1, -1).flatten(0, 1)
        if not twin.batch_first:
            x, source = x.transpose(0, 1), source.transpose(0, 1)
        out: Tensor = twin(x, source, source, attn_mask=blocked, need_weights=False)[0]
        return out if twin.batch_first else out.transpose(0, 1)

    found = "separate q, k, v_proj_weight" if packed is None else "packed in_proj_weight"
    return certified(layer, original, f"from_torch, {found}", "nn.MultiheadAttention")


def from_gpt2(module: nn.Module) -> Imported:
    """From transformers' GPT2Attention: c_attn and c_proj with transposed weights (Conv1D), causal.

    A cross-attention module (q_attn for the queries) becomes a layer without mask, to be called with context=.
    scale_attn_weights=False is folded into the queries' weights. reorder_and_upcast_attn is about rounding alone: the
    layer takes its softmax in float32 anyway. resid_pdrop belongs to the block around it and is not taken.
    Refused: scale_attn_by_inverse_layer_idx.
    """
    given: Any = module
    if given.scale_attn_by_inverse_layer_idx:
        raise HeadwiseError(
            f"scale_attn_by_inverse_layer_idx=True divides the scores of layer {given.layer_idx} by "
            f"{given.layer_idx + 1}, and a headwise layer scales by 1/sqrt(head_dim); divide the query columns of "
            f"c_attn by {given.layer_idx + 1} and turn it off"
        )
    cross = given.is_cross_attention
    _only(module, {f"{part}.{kind}" for part in ("c_attn", "c_proj", "q_attn") for kind in ("weight", "bias")})
    c_attn, c_proj = given.c_attn, given.c_proj
    weights, biases = c_attn.weight.t(), c_attn.bias
    if cross:  # c_attn holds keys and values only
        weights, biases = torch.cat([given.q_attn.weight.t(), weights]), torch.cat([given.q_attn.bias, biases])
    (q, k, v), (bq, bk, bv) = weights.chunk(3), biases.chunk(3)
    if not given.scale_attn_weights:
        unscaled = math.sqrt(given.head_dim)
        q, bq = q * unscaled, bq * unscaled
    layer = build(
        Parts(q, k, v, c_proj.weight.t(), bq, bk, bv, c_proj.bias),
        given.num_heads,
        mask=None if cross else CAUSAL,
        dropout=given.attn_dropout.p,
        training=module.training,
    )
    twin = _twin(module)

    def original(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        lowest = torch.float32 if given.reorder_and_upcast_attn else x.dtype
        masks = {"encoder_attention_mask" if cross else "attention_mask": _additive(added, lowest)}
        out: Tensor = twin(x, **masks, **({"encoder_hidden_states": context} if cross else {}))[0]
        return out

    kind = "cross" if cross else "self"
    return certified(layer, original, f"from_gpt2, {kind} attention", type(module).__name__, (kind,))


def from_llama(module: nn.Module) -> Imported:
    """From transformers' Llama, Mistral, Mixtral, Qwen2 or Qwen3 attention: RoPE, causal, perhaps a sliding window.

    Biases, qk-norm and grouped heads are taken as they are found, rope from `module.config.rope_parameters`: default,
    linear, yarn. The model's own rotary embedding makes the angles of the certificate, and its frequencies are compared
    with ours. Their angles are rounded to float32, ours are exact, so in float64 the difference is about 1e-7.
    Refused: other rope types, a qk-norm with an eps other than 1e-6, scores not scaled by 1/sqrt(head_dim).
    """
    given: Any = module
    if not _class_names(module) & LLAMAS:
        raise HeadwiseError(f"{type(module).__name__} is not one of {', '.join(sorted(LLAMAS))}; try from_separate")
    norms = {"q_norm", "k_norm"} if hasattr(module, "q_norm") else set()
    _only(
        module,
        {f"{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")} | {f"{n}.weight" for n in norms},
    )
    (q, bq), (k, bk), (v, bv), (o, bo) = (_projection(module, f"{name}_proj") for name in "qkvo")
    for name in sorted(norms):
        eps = getattr(module, name).variance_epsilon
        if eps != 1e-6:
            raise HeadwiseError(f"{name} has eps={eps}; a headwise layer's qk-norm has 1e-6, and no field for another")
    if given.scaling != given.head_dim**-0.5:
        raise HeadwiseError(
            f"the scores are scaled by {given.scaling}; a headwise layer scales by 1/sqrt({given.head_dim}) = "
            f"{given.head_dim**-0.5}; multiply q_proj by the ratio"
        )
    rope, rotary = _rope(module)
    gains = (given.q_norm.weight, given.k_norm.weight) if norms else (None, None)
    layer = build(
        Parts(q, k, v, o, bq, bk, bv, bo, *gains),
        q.shape[0] // given.head_dim,
        k.shape[0] // given.head_dim,
        mask=_llama_mask(module),
        rope=rope,
        dropout=given.attention_dropout,
        training=module.training,
    )
    twin = _twin(module)

    def original(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        out: Tensor = twin(x, position_embeddings=rotary(x, places), attention_mask=_additive(added, x.dtype))[0]
        return out

    kind = given.config.rope_parameters["rope_type"]
    return certified(layer, original, f"from_llama, {kind} rope", type(module).__name__, ("self",))


def from_bert(module: nn.Module, output: nn.Module | None = None) -> Imported:
    """From transformers' BertSelfAttention or BertCrossAttention (RoBERTa, XLM-RoBERTa and ELECTRA alike).

    output  the BertSelfOutput behind it, whose `dense` is the output projection; its dropout, residual sum and
            LayerNorm belong to the block and are not taken. Without it the layer has no output projection. A whole
            BertAttention brings its own

    In a decoder (is_decoder) the layer is causal; one of cross attention is to be called with context=.
    """
    given: Any = module
    if hasattr(module, "self") and hasattr(module, "output"):
        return from_bert(given.self, given.output if output is None else output)
    names = _class_names(module)
    if not names & (BERT_SELF | BERT_CROSS):
        raise HeadwiseError(f"{type(module).__name__} is not the self or cross attention of {', '.join(BERTS)}")
    cross = bool(names & BERT_CROSS)
    _only(module, {f"{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")})
    (q, bq), (k, bk), (v, bv) = (_projection(module, name) for name in ("query", "key", "value"))
    o, bo = (None, None) if output is None else _projection(output, "dense")
    causal = not cross and (given.is_causal or given.is_decoder)
    layer = build(
        Parts(q, k, v, o, bq, bk, bv, bo),
        given.num_attention_heads,
        mask=CAUSAL if causal else None,
        dropout=given.dropout.p,
        training=module.training,
    )
    twin: Any = _twin(module)
    dense: Any = None if output is None else copy.deepcopy(output).eval().dense

    def original(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        more = {"encoder_hidden_states": context} if cross else {}
        out: Tensor = twin(x, attention_mask=_additive(added, x.dtype), **more)[0]
        return out if dense is None else dense(out)

    what = type(module).__name__ + ("" if output is None else f" and {type(output).__name__}.dense")
    return certified(layer, original, f"from_bert, {what}", what, ("cross" if cross else "self",))


def from_course(module: nn.Module) -> Imported:
    """From the class that courses build: Linears W_query, W_key, W_value, out_proj, num_heads, a causal `mask`.

    Raschka, "Build a Large Language Model (From Scratch)", section 3.6. forward(x) (B,T,d_in) -> (B,T,d_out), heads
    are adjacent slices of the width, `mask` (context_length, context_length) is 1 where a query may not look. The
    layer has no context_length: it takes texts of any length. `dropout`, where there is one, is on the weights.
    """
    given: Any = module
    absent = [
        name for name in (*COURSE, "mask") if not isinstance(getattr(module, name, None), nn.Module | Tensor | int)
    ]
    if absent:
        raise HeadwiseError(
            f"{type(module).__name__} has no {', '.join(absent)}; the course's class has {', '.join(COURSE)} and a "
            f"mask. Pass the weights of others to from_separate(..., mask=Causal())"
        )
    _only(module, {f"{name}.{kind}" for name in COURSE[:4] for kind in ("weight", "bias")})
    (q, bq), (k, bk), (v, bv), (o, bo) = (_projection(module, name) for name in COURSE[:4])
    dropout = getattr(module, "dropout", 0.0)
    layer = build(
        Parts(q, k, v, o, bq, bk, bv, bo),
        given.num_heads,
        mask=CAUSAL,
        dropout=getattr(dropout, "p", dropout),
        training=module.training,
    )
    twin: Any = copy.deepcopy(module).eval()
    n_tokens = min(N_TOKENS, given.mask.shape[-1])

    def original(x: Tensor, context: Tensor | None, added: Tensor | None) -> Tensor:
        out: Tensor = twin(x)  # which takes no mask: its own buffer must be what the layer's Causal is
        return out

    return certified(layer, original, "from_course", type(module).__name__, ("self",), n_tokens, padding=False)


def _llama_mask(module: Any) -> Mask:
    """Causal, or the window that the model's own mask function would draw."""
    if not getattr(module.config, "is_causal", True) or not module.is_causal:
        raise HeadwiseError("is_causal=False: from_llama makes causal layers; use from_separate(..., rope=)")
    window = getattr(module, "sliding_window", None)  # Qwen: by layer
    if _class_names(module) & {"MistralAttention", "MixtralAttention"}:
        window = module.config.sliding_window  # all layers
    return CAUSAL if window is None else Window(window - 1, 0)  # transformers counts the query itself


def _rope(module: Any) -> tuple[RoPE, Any]:
    """The RoPE of a module's config, and the model's own rotary embedding, against whose frequencies it is held."""
    given = module.config.rope_parameters
    kind = given.get("rope_type")
    if kind not in ("default", "linear", "yarn"):
        raise HeadwiseError(f"rope_type={kind!r} cannot be represented; headwise.RoPE has default, linear and yarn")
    fields: dict[str, Any] = {"theta": given["rope_theta"]}
    if kind != "default":
        fields |= {"scaling": kind, "factor": given["factor"]}
    if kind == "yarn":
        fields |= {"original_context": given["original_max_position_embeddings"]}
        fields |= {name: given[name] for name in ("beta_fast", "beta_slow") if given.get(name)}
    rope = RoPE(**fields)
    frequencies, sharper = rope.frequencies(module.head_dim)
    with torch.device(module.q_proj.weight.device):
        rotary = _rotary(module)
        ours, theirs = torch.tensor(frequencies, dtype=torch.float64), rotary.inv_freq.double()
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-5, atol=0):
        raise HeadwiseError(f"rope_parameters={given} make other frequencies than {rope}; a field has no counterpart")
    if not math.isclose(rotary.attention_scaling, sharper, rel_tol=1e-6):
        raise HeadwiseError(
            f"rope_parameters={given} multiply cosines and sines by {rotary.attention_scaling:.6g}, and {rope} by "
            f"{sharper:.6g}; attention_factor and mscale have no counterpart"
        )
    return rope, rotary


def _rotary(module: Any) -> Any:
    """The rotary embedding that stands beside the attention in the model's source, built from the same config."""
    for known in type(module).__mro__:
        home = vars(sys.modules[known.__module__])
        name = known.__name__.removesuffix("Attention") + "RotaryEmbedding"
        if known.__name__ in LLAMAS and name in home:
            return home[name](module.config)
    raise HeadwiseError(
        f"{type(module).__name__} has no RotaryEmbedding beside it, so its angles are unknown; use from_separate"
    )


def _class_names(module: nn.Module) -> set[str]:
    return {known.__name__ for known in type(module).__mro__}


def _only(module: nn.Module, known: set[str]) -> None:
    """Refuse a module with parameters that the layer would not get."""
    unknown = sorted(name for name, _ in module.named_parameters() if name not in known)
    if unknown:
        raise HeadwiseError(
            f"{type(module).__name__} has parameters that would be lost: {', '.join(unknown)}; merge adapters into the "
            f"weights first, or use from_separate"
        )


def _projection(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    part = getattr(module, name, None)
    if not isinstance(part, nn.Linear):
        raise HeadwiseError(
            f"{type(module).__name__}.{name} is {type(part).__name__}, not nn.Linear; dequantise or unfuse it, or pass "
            f"the tensors to from_separate"
        )
    return part.weight, part.bias


def _twin(module: nn.Module) -> Any:
    """A copy of a transformers module to run: in eval mode, with its own file's attention, which takes any mask."""
    twin: Any = copy.deepcopy(module).eval()
    twin.config._attn_implementation = "eager"
    return twin


def _additive(added: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as transformers writes it: in the model's dtype, its lowest number instead of -inf."""
    return None if added is None else added.clamp(min=torch.finfo(dtype).min).to(dtype)
