"""Hugging Face forms of our models: which architecture computes the same function, its config, its tensor names."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headwise.gpt.gpt import GPT, GPTConfig

HF_ACTIVATION = {"relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: which of our tensors it stacks, and whether it holds y = x W instead of y = W x."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False


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
        "headwise": {f.name: getattr(config, f.name) for f in fields(config)},
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
            "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
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
        "hidden_act": HF_ACTIVATION[config.activation],
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
        **general,
    }


def _entries(config: GPTConfig) -> list[Entry]:
    """The tensors of the file, for the model's form."""
    form = hf_form(config)
    if form is None:
        names = [name for name in GPT(config).state_dict() if not (config.tied and name == "lm_head.weight")]
        return [Entry(name, (name,)) for name in names]
    return _gpt2_entries(config) if form == "gpt2" else _llama_entries(config)


def _llama_entries(config: GPTConfig) -> list[Entry]:
    entries = [
        Entry("model.embed_tokens.weight", ("token_embedding.weight",)),
        Entry("model.norm.weight", ("final_norm.weight",)),
    ]
    if not config.tied:
        entries.append(Entry("lm_head.weight", ("lm_head.weight",)))
    matrices = {f"self_attn.{x}_proj": f"attention.{x}_proj" for x in "qkvo"}
    matrices |= {f"mlp.{x}_proj": f"feed_forward.{x}" for x in ("gate", "up", "down")}
    gains = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feed_forward_norm"}
    if config.qk_norm:
        gains |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
    for n in range(config.n_layers):
        for theirs, ours in {**matrices, **gains}.items():
            kinds = ("weight", "bias") if config.bias and theirs in matrices else ("weight",)
            entries += [Entry(f"model.layers.{n}.{theirs}.{kind}", (f"blocks.{n}.{ours}.{kind}",)) for kind in kinds]
    return entries


def _gpt2_entries(config: GPTConfig) -> list[Entry]:
    entries = [
        Entry("transformer.wte.weight", ("token_embedding.weight",)),
        Entry("transformer.wpe.weight", ("position_embedding.weight",)),
    ]
    if not config.tied:
        entries.append(Entry("lm_head.weight", ("lm_head.weight",)))
    norms = {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}
    matrices = {
        "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attn.c_proj": ("attention.o_proj",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
    }
    for kind in ("weight", "bias"):
        entries.append(Entry(f"transformer.ln_f.{kind}", (f"final_norm.{kind}",)))
        for n in range(config.n_layers):
            for theirs, norm in norms.items():
                entries.append(Entry(f"transformer.h.{n}.{theirs}.{kind}", (f"blocks.{n}.{norm}.{kind}",)))
            for theirs, names in matrices.items():
                ours = tuple(f"blocks.{n}.{name}.{kind}" for name in names)
                entries.append(Entry(f"transformer.h.{n}.{theirs}.{kind}", ours, transposed=kind == "weight"))
    return entries


def to_hf(model: GPT) -> dict[str, Tensor]:
    """The tensors under the names of the form. GPT-2 always has biases: where the model has none, they are zeros."""
    state = model.state_dict()
    tensors = {}
    for entry in _entries(model.config):
        parts = [state[name] if name in state else _zero_bias(state, name) for name in entry.ours]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        tensors[entry.name] = (tensor.T if entry.transposed else tensor).contiguous()
    return tensors


def _zero_bias(state: dict[str, Tensor], name: str) -> Tensor:
    weight = state[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])


def from_hf(config: GPTConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `to_hf`."""
    with torch.device("meta"):
        wanted = GPT(config).state_dict()
    state: dict[str, Tensor] = {}
    foreign = set(tensors) - {entry.name for entry in _entries(config)}
    if foreign:
        raise KeyError(f"the config has no place for {sorted(foreign)[0]}")
    for entry in _entries(config):
        tensor = tensors[entry.name]
        tensor = tensor.T if entry.transposed and tensor.ndim == 2 else tensor
        sizes = [wanted[name].shape[0] if name in wanted else 0 for name in entry.ours]
        if not any(sizes):  # a bias that only the form has
            if tensor.any():
                raise KeyError(f"the config has no biases, and {entry.name} is not zero")
            continue
        state |= dict(zip(entry.ours, torch.split(tensor, sizes) if len(sizes) > 1 else (tensor,), strict=True))
    if config.tied:
        state["lm_head.weight"] = state["token_embedding.weight"]
    return {name: tensor.contiguous() for name, tensor in state.items()}
