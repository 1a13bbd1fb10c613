"""Hugging Face forms of our models: which architecture computes the same function, its config, its tensor names."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.layer.layer import shapes_alone

_FORMS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("forms.toml").read_text(encoding="utf-8"))
_FORMS |= {name: _FORMS["llama"] | {"architecture": f"{name.capitalize()}ForCausalLM"} for name in ("qwen2", "qwen3")}
BIASED = {"gpt2": r"\.bias$", "qwen2": r"\.[qkv]_proj\.bias$"}  # the biases that a form always has

LLAMA_FIELDS = {"vocab_size": "vocab_size", "context": "max_position_embeddings", "n_layers": "num_hidden_layers"}
LLAMA_FIELDS |= {"n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "d_model": "hidden_size"}
LLAMA_FIELDS |= {"d_ff": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}


def hf_form(config: GPTConfig) -> str | None:
    """The Hugging Face form that computes exactly this model: llama, qwen2, qwen3, deepseek_v3, gpt2, or None."""
    spec, windows = config.attention, set(config.windows or ()) - {None}
    if len(windows) > 1:
        return None  # a config of transformers has one sliding_window for all layers
    common = config.norm_gain and config.final_norm and not config.embedding_norm
    if common and (config.norm, config.position, config.gated) == ("rms", "rope", True):
        if config.latent_dim is not None:
            return None if config.bias or windows else "deepseek_v3"
        if not config.qk_norm and not windows:
            return "llama"
        if not config.qk_norm:  # a Llama has no windows, and a Qwen2 whose biases are zero is one that has
            return None if config.bias else "qwen2"
        # Qwen3 has one epsilon for all norms, ours has 1e-6 for queries and keys, and no biases in the feed-forward.
        return "qwen3" if config.norm_eps == 1e-6 and not config.bias else None
    square = config.latent_dim is None and spec.n_kv_heads == spec.n_heads and spec.q_dim == config.d_model
    if common and square and (config.norm, config.position, config.gated) == ("layer", "learned", False):
        return "gpt2" if not config.qk_norm and not windows and config.activation.startswith("gelu") else None
    return None


def hf_config(config: GPTConfig, boundary: int | None) -> dict[str, Any]:
    """config.json: the Hugging Face fields, where there is a form, and our own under `headwise`."""
    form = hf_form(config)
    general = {
        "vocab_size": config.vocab_size,
        "bos_token_id": boundary,
        "eos_token_id": boundary,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
        "headwise": asdict(config),
    }
    if form is None:
        return {"model_type": "headwise", **general}
    record = _FORMS[form]
    fields = {field: attrgetter(path)(config) for field, path in record["fields"].items()}
    fields |= record.get("constants", {})
    fields[record["activation"]] = record.get(config.activation, config.activation)
    if "rope_theta" in fields:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if any(config.windows or ()):
        fields |= {
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows or ()],
            "sliding_window": max(w for w in config.windows or () if w is not None),
            "use_sliding_window": True,
        }
    return {"model_type": form, "architectures": [record["architecture"]], **fields, **general}


def _stacks(config: GPTConfig) -> dict[str, list[str]]:
    """The tensors of the file, and which of ours each stacks: GPT-2 has queries, keys and values in one."""
    form, names = hf_form(config), list(_meta_state(config))
    parts: dict[str, str] = {} if form is None else _FORMS[form]["names"]
    parts = parts | {"q_proj": "q_b_proj"} if config.q_latent_dim else parts
    if form in BIASED:  # with or without biases in our own
        all_names = _meta_state(replace(config, bias=True))
        names = [name for name in all_names if name in names or re.search(BIASED[form], name)]
    stacks: dict[str, list[str]] = {}
    for name in names:
        if not (config.tied and name == "lm_head.weight"):
            stacks.setdefault(".".join(parts.get(part, part) for part in name.split(".")), []).append(name)
    return stacks


def _turned(name: str, tensor: Tensor) -> Tensor:
    """GPT-2's matrices hold y = x W instead of y = W x."""
    return tensor.T if ".c_" in name and tensor.ndim == 2 else tensor


def _meta_state(config: GPTConfig) -> dict[str, Tensor]:
    """Names and shapes of our tensors."""
    with shapes_alone():
        return GPT(config).state_dict()


def to_hf(model: GPT) -> dict[str, Tensor]:
    """The tensors under the names of the form. Biases that only the form has are zeros."""
    state = model.state_dict()
    zeros = {name.removesuffix("weight") + "bias": weight.new_zeros(len(weight)) for name, weight in state.items()}
    state = zeros | state
    return {
        name: _turned(name, torch.cat([state[part] for part in ours])).contiguous()
        for name, ours in _stacks(model.config).items()
    }


def from_hf(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `to_hf`."""
    wanted, stacks = _meta_state(config), _stacks(config)
    foreign = set(tensors) - set(stacks)
    if foreign:
        raise KeyError(f"the config has no place for {min(foreign)}")
    state: dict[str, Tensor] = {}
    for name, ours in stacks.items():
        tensor = _turned(name, tensors[name])
        sizes = [len(wanted[part]) if part in wanted else 0 for part in ours]
        if any(sizes):
            state |= dict(zip(ours, torch.split(tensor, sizes), strict=True))
        elif tensor.any():  # a bias that only the form has
            raise KeyError(f"the config has no biases, and {name} is not zero")
    if config.tied:
        state["lm_head.weight"] = state["token_embedding.weight"]
    return {name: tensor.contiguous() for name, tensor in state.items()}


def as_gpt(fields: dict[str, Any], tensors: dict[str, Tensor]) -> GPT:
    """The GPT with the tensors of a Llama-like model, by its config.json; what it cannot carry is not looked for."""
    window, kinds = fields.get("sliding_window"), fields.get("layer_types") or ["sliding_attention"]
    n_layers = fields["num_hidden_layers"]
    config = GPTConfig(
        **{ours: fields[theirs] for ours, theirs in LLAMA_FIELDS.items()},
        head_dim=fields.get("head_dim"),
        activation={"gelu_pytorch_tanh": "gelu_tanh"}.get(fields["hidden_act"], fields["hidden_act"]),
        bias=any(name.endswith("_proj.bias") and bool(x.any()) for name, x in tensors.items()),
        qk_norm="model.layers.0.self_attn.q_norm.weight" in tensors,
        windows=tuple(window if (kinds * n_layers)[n] == "sliding_attention" else None for n in range(n_layers)),
    )
    zeros = {name.removesuffix("weight") + "bias": x.new_zeros(len(x)) for name, x in tensors.items()}
    with shapes_alone():
        model = GPT(config)
    model.load_state_dict(from_hf(config, {name: (zeros | tensors)[name] for name in _stacks(config)}), assign=True)
    return model.eval()
