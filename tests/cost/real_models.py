"""Tiny random models of transformers, one for each family, and what is counted on them.

Sizes are different primes wherever a family lets them be, so that no two can be mistaken for one another.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

BATCH, TOKENS, SOURCE = 3, 13, 17
LLAMA = {
    "hidden_size": 66,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 59,
}
WIDE = LLAMA | {"head_dim": 10}
FALCON = {
    "hidden_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 101,
    "ffn_hidden_size": 37,
    "max_position_embeddings": 59,
}
BERT = {
    "hidden_size": 33,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 101,
    "max_position_embeddings": 59,
    "type_vocab_size": 5,
}
T5 = {
    "d_model": 31,
    "d_kv": 7,
    "d_ff": 37,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "vocab_size": 101,
    "relative_attention_num_buckets": 11,
}
GEMMA = WIDE | {"num_hidden_layers": 7, "sliding_window": 5}

# name: class of the model, fields of its config
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": 59, "vocab_size": 101}),
    "gpt2 inner": ("GPT2Model", {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_inner": 47, "vocab_size": 101}),
    "llama": ("LlamaForCausalLM", LLAMA | {"head_dim": 22}),
    "llama biases, tied": (
        "LlamaForCausalLM",
        WIDE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "falcon": ("FalconForCausalLM", FALCON),
    "falcon heads": ("FalconForCausalLM", FALCON | {"multi_query": False, "bias": True, "parallel_attn": False}),
    "mistral": ("MistralForCausalLM", WIDE | {"sliding_window": 5}),
    "mistral full": ("MistralModel", WIDE | {"sliding_window": None}),
    "mixtral": (
        "MixtralForCausalLM",
        WIDE | {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": None},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        LLAMA | {"hidden_size": 60, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", WIDE | {"hidden_size": 41, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        WIDE
        | {"hidden_size": 41, "moe_intermediate_size": 23, "num_experts": 7, "num_experts_per_tok": 3}
        | {"mlp_only_layers": [1]},
    ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3 layer types": (
        "Gemma3ForCausalLM",
        GEMMA | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt_oss": ("GptOssForCausalLM", WIDE | {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 5}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 6, "moe_intermediate_size": 23, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "attention_bias": True}
        | {"kv_lora_rank": 19, "q_lora_rank": 29, "qk_rope_head_dim": 4, "qk_nope_head_dim": 7, "v_head_dim": 5},
    ),
    "deepseek_v3 full queries": (
        "DeepseekV3ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 6, "num_hidden_layers": 1, "q_lora_rank": None}
        | {"kv_lora_rank": 19, "qk_rope_head_dim": 4, "qk_nope_head_dim": 7, "v_head_dim": 5},
    ),
    "bert": ("BertModel", BERT),
    "bert masked": ("BertForMaskedLM", BERT),
    "bert pretraining, untied": ("BertForPreTraining", BERT | {"tie_word_embeddings": False}),
    "roberta": ("RobertaForMaskedLM", BERT),
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
        | {"image_size": [22, 29], "patch_size": 7, "num_channels": 2, "num_labels": 11, "qkv_bias": False},
    ),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 gated": ("T5Model", T5 | {"feed_forward_proj": "gated-gelu"}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 30, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 5, "num_mel_bins": 7}
        | {"decoder_attention_heads": 3, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41, "vocab_size": 101}
        | {"max_source_positions": SOURCE, "max_target_positions": 23, "pad_token_id": 0},
    ),
}


@cache
def build(case: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and its config as it would lie in config.json; made once for all tests."""
    name, fields = CASES[case]
    model_class = getattr(transformers, name)
    # The loop over experts is plain matrix products, which the counter of FLOPs knows.
    config = model_class.config_class(**fields, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    written = json.loads(model.config.to_json_string())
    written["architectures"] = [name]
    return model, written


def inputs(config: dict[str, Any], tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """What the model reads: token ids (B,T), and an image or a source where it has one."""
    kind = config["model_type"]
    if kind == "vit":
        return {"pixel_values": torch.randn(BATCH, config["num_channels"], *config["image_size"])}
    ids = torch.randint(6, config["vocab_size"], (BATCH, tokens))
    if kind == "t5":
        return {"input_ids": torch.randint(6, config["vocab_size"], (BATCH, SOURCE)), "decoder_input_ids": ids}
    if kind == "whisper":
        return {"input_features": torch.randn(BATCH, config["num_mel_bins"], 2 * SOURCE), "decoder_input_ids": ids}
    return {"input_ids": ids}


@torch.no_grad()
def run(model: nn.Module, **arguments: Any) -> tuple[Any, int]:
    """What the model returns, and the FLOPs that torch counts, the angles of RoPE left out: they are a tiny product."""
    with FlopCounterMode(display=False) as counter:
        result = model(**arguments)
    counts = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    angles = sum(count for module, count in counts.items() if module.endswith(("rotary_emb", "rotary_emb_local")))
    return result, counter.get_total_flops() - angles


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values that a cache holds."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.numel() * x.element_size() for x in tensors)
