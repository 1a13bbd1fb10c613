"""Hugging Face forms of our models: which architecture computes the same function, its config, its tensor names."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.layer.layer import shapes_alone

# What the parts of our tensors' names are called there; a part that is not in the table keeps its name.
_LLAMA = {
    "token_embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    **{part: f"{part}_proj" for part in ("gate", "up", "down")},
    "final_norm": "model.norm",
}
_GPT2 = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention": "attn",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "c_attn"),
    "o_proj": "c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward": "mlp",
    "up": "c_fc",
    "down": "c_proj",
    "final_norm": "transformer.ln_f",
}


def hf_form(config: GPTConfig) -> str | None:
    """The Hugging Face architecture that computes exactly this model: llama, qwen3, gpt2, or None."""
    spec = config.attention
    common = config.norm_gain and config.final_norm and not config.embedding_norm
    if common and (config.norm, config.position, config.gated) == ("rms", "rope", True):
        if not config.qk_norm:
            return "llama"
        # Qwen3 has one epsilon for all norms, ours has 1e-6 for queries and keys, and no biases in the feed-forward.
        return "qwen3" if config.norm_eps == 1e-6 and not config.bias else None
    square = spec.n_kv_heads == spec.n_heads and spec.q_dim == config.d_model
    if common and square and (config.norm, config.position, config.gated) == ("layer", "learned", False):
        return "gpt2" if not config.qk_norm and config.activation.startswith("gelu") else None
    return None


def hf_config(config: GPTConfig, boundary: int | None) -> dict[str, Any]:
    """config.json: the Hugging Face fields, where there is a form, and our own under `headwise`."""
    form, spec = hf_form(config), config.attention
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
    if form == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": config.d_model,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_positions": config.context,
            "n_inner": config.feed_forward_width,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
            "layer_norm_epsilon": config.norm_eps,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), config.dropout),
            **general,
        }
    return {
        "model_type": form,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[form]],
        "hidden_size": config.d_model,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
        **general,
    }


def _stacks(config: GPTConfig) -> dict[str, list[str]]:
    """The tensors of the file, and which of ours each stacks: GPT-2 has queries, keys and values in one."""
    form = hf_form(config)
    parts = {None: {}, "gpt2": _GPT2}.get(form, _LLAMA)
    stacks: dict[str, list[str]] = {}
    for name in _meta_state(replace(config, bias=True) if form == "gpt2" else config):  # GPT-2 always has biases
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
    """The tensors under the names of the form. GPT-2's biases are zeros where the model has none."""
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
