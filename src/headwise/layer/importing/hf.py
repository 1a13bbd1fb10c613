"""Attention modules of transformers made into layers, by the records of their families; see `family`."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.layer.importing.certificate import CAUSAL, Imported, Original, certified
from headwise.layer.importing.family import Family, class_names, families, family_of
from headwise.layer.importing.parts import build, check_parameters
from headwise.masks import Mask, Window
from headwise.positions import RoPE


def from_transformers(module: nn.Module, output: nn.Module | None = None) -> Imported:
    """From an attention module of transformers whose family is known: Llama, Mistral, Qwen, Gemma, GPT-2, BERT, ...

    output  for the part of BERT's attention that has no W_O: the module behind it whose `dense` is W_O; its dropout,
            residual sum and LayerNorm belong to the block and are not taken. Without it the layer has no output
            projection. A whole BertAttention brings its own

    Biases, grouped heads, qk-norm, scale, softcap, sliding window and dropout of the weights are taken as they are
    found; rope from `config.rope_parameters`: default, linear, yarn. The model's own rotary embedding makes the angles
    of the certificate. Its angles are rounded to float32, ours are exact, so in float64 the difference is about 1e-7.
    A module for cross attention becomes a layer without mask, to be called with context=.
    """
    family = family_of(module)
    if family is None:
        names = ", ".join(known.whole for known in families())
        raise HeadwiseError(f"{type(module).__name__} is none of {names}; try from_separate")
    whole = module if family.whole in class_names(module) else None
    core = module if whole is None else whole.get_submodule(family.core)
    w_o = None if whole is None else whole.get_submodule(family.o)
    if output is not None:
        w_o = getattr(output, family.o.rpartition(".")[2], None)
    cross = family.is_cross(core)
    check_parameters(core, family.parameters(core))
    rope, parts = _rope(core, family), family.parts(core, w_o)
    n_heads, scale = family.read(core, family.n_heads), float(family.read(core, family.scale))
    usual = math.isclose(scale, (len(parts.q[0]) // n_heads) ** -0.5, rel_tol=1e-12)
    layer = build(
        parts,
        n_heads,
        family.read(core, family.n_kv_heads),
        mask=None if cross else _mask(core, family),
        rope=rope,
        qk_norm_eps=_norm_eps(core, family),
        scale=None if usual else scale,
        softcap=family.read(core, family.softcap),
        dropout=family.read(core, family.dropout),
        training=module.training,
    )
    what = type(core).__name__ if w_o is None or core is whole else f"{type(core).__name__} and {type(w_o).__name__}"
    path = f"from_transformers, {family.name}, {'cross' if cross else 'self'} attention"
    if rope is not None:
        path += f", {rope.scaling or 'default'} rope"
    ways = ("cross" if cross else "self",)
    return certified(layer, _original(core, family, None if core is whole else w_o), path, what, ways)


def _original(core: nn.Module, family: Family, w_o: nn.Module | None) -> Original:
    """A call of a copy of the module, in eval mode, with its own file's attention, which takes any mask."""
    twin: Any = copy.deepcopy(core).eval()
    twin.config._attn_implementation = "eager"
    project = copy.deepcopy(w_o)
    rotary = _rotary(core, family) if family.rope else None
    cross = family.is_cross(core)

    def original(x: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
        # Its mask is in its own dtype, with the lowest number instead of -inf.
        dtype = torch.float32 if getattr(twin, "reorder_and_upcast_attn", False) else x.dtype
        mask = None if added is None else added.clamp(min=torch.finfo(dtype).min).to(dtype)
        keywords: dict[str, Any] = {family.cross_mask if cross else "attention_mask": mask}
        if cross:
            keywords["encoder_hidden_states"] = keys
        if rotary is not None:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
            keywords["position_embeddings"] = rotary(x, places)
        out: Tensor = twin(x, **keywords)[0]
        return out if project is None else project(out)

    return original


def _mask(core: Any, family: Family) -> Mask | None:
    """Causal, or the window that the model's own mask function would draw."""
    window = family.read(core, family.window)
    if not any(family.read(core, path) for path in family.causal) or not getattr(core.config, "is_causal", True):
        if window is not None:
            raise HeadwiseError(
                f"{type(core).__name__} is not causal and has a window of {window}; its mask is not known: use "
                f"from_separate(..., mask=Window(left, right))"
            )
        return None
    return CAUSAL if window is None else Window(window - 1, 0)  # transformers counts the query itself


def _norm_eps(core: nn.Module, family: Family) -> float:
    norms = [norm for path in (family.q_norm, family.k_norm) if (norm := family.read(core, path)) is not None]
    eps = {float(getattr(norm, "variance_epsilon", None) or norm.eps) for norm in norms} or {1e-6}
    if len(eps) > 1:
        raise HeadwiseError(f"the norms of queries and keys have eps {sorted(eps)}; a headwise layer has one for both")
    return eps.pop()


def _rope(core: Any, family: Family) -> RoPE | None:
    """The RoPE of a module's config, held against the frequencies of the model's own rotary embedding."""
    if not family.rope:
        return None
    parameters = core.config.rope_parameters
    kind = parameters.get("rope_type")
    if kind not in ("default", "linear", "yarn"):
        raise HeadwiseError(f"rope_type={kind!r} cannot be represented; headwise.RoPE has default, linear and yarn")
    width, pairs = family.read(core, family.rope_width), family.interleaved
    interleaved = bool(family.read(core, pairs) if isinstance(pairs, str) else pairs)
    fields: dict[str, Any] = {"theta": parameters["rope_theta"], "interleaved": interleaved}
    if kind != "default":
        fields |= {"scaling": kind, "factor": parameters["factor"]}
    if kind == "yarn":
        fields |= {"original_context": parameters["original_max_position_embeddings"]}
        fields |= {name: parameters[name] for name in ("beta_fast", "beta_slow") if parameters.get(name)}
    if parameters.get("partial_rotary_factor", 1) != 1:
        fields["dim"] = int(width * parameters["partial_rotary_factor"])
    rope = RoPE(**fields)
    frequencies, sharper = rope.frequencies(width)
    rotary = _rotary(core, family)
    ours, theirs = torch.tensor(frequencies, dtype=torch.float64), rotary.inv_freq.double().cpu()
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=1e-5, atol=0):
        raise HeadwiseError(
            f"rope_parameters={parameters} make other frequencies than {rope}; a field has no counterpart"
        )
    usual = math.isclose(rotary.attention_scaling, sharper, rel_tol=1e-6)
    return rope if usual else replace(rope, attention_factor=float(rotary.attention_scaling))


def _rotary(core: Any, family: Family) -> Any:
    """The rotary embedding that stands beside the attention in the model's source, built from the same config."""
    name = f"{family.prefix}RotaryEmbedding"
    for base in type(core).__mro__:
        beside = vars(sys.modules[base.__module__])
        if name in beside:
            with torch.device(next(core.parameters()).device):
                return beside[name](core.config)
    raise HeadwiseError(f"{type(core).__name__} has no {name} beside it, so its angles are unknown; use from_separate")
