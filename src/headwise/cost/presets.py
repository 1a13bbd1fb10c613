"""Known models as data: the fields of each one's published config.json that size it, with the source beside it.

A preset is read by the same code as a file, so it can be wrong only in its numbers; tests hold their totals to the
published ones.
"""

from __future__ import annotations

import difflib
from typing import Any

from headwise.errors import HeadwiseError

PRESETS: dict[str, dict[str, Any]] = {
    # Devlin et al. 2018, arXiv 1810.04805, section 3; vocabulary of the uncased release, google-bert/bert-base-uncased
    "bert-base": {
        "model_type": "bert",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 30_522,
        "dtype": "float32",
    },
    # The same section; google-bert/bert-large-uncased
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "vocab_size": 30_522,
        "dtype": "float32",
    },
    # Radford et al. 2019, table 2, its smallest row; openai-community/gpt2
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
        "dtype": "float32",
    },
    # Brown et al. 2020, arXiv 2005.14165, table 2.1: GPT-2's architecture, its last row. Section 2.1 makes every other
    # layer locally banded without saying how wide; all are priced as full. The weights were trained in half precision.
    "gpt3": {
        "model_type": "gpt2",
        "n_embd": 12_288,
        "n_layer": 96,
        "n_head": 96,
        "n_positions": 2048,
        "vocab_size": 50_257,
        "dtype": "float16",
    },
    # Touvron et al. 2023, arXiv 2307.09288, table 1; meta-llama/Llama-2-70b-hf
    "llama-2-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "dtype": "float16",
    },
    # Jiang et al. 2023, arXiv 2310.06825, table 1; mistralai/Mistral-7B-v0.1
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # Grattafiori et al. 2024, arXiv 2407.21783, table 3; the first release, meta-llama/Meta-Llama-3-8B, reads 8,192
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # The same table; meta-llama/Meta-Llama-3-70B
    "llama-3-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # Yang et al. 2025, arXiv 2505.09388, table 1; Qwen/Qwen3-0.6B
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    # The same table; Qwen/Qwen3-8B
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # Gemma Team 2025, arXiv 2503.19786, table 1; google/gemma-3-27b-it, with its SigLIP tower
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_channels": 3,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "dtype": "bfloat16",
    },
    # OpenAI 2025, gpt-oss model card, arXiv 2508.10925, table 1; openai/gpt-oss-20b, here without its 4-bit experts
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "vocab_size": 201_088,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "dtype": "bfloat16",
    },
    # DeepSeek-AI 2024, arXiv 2412.19437, section 4.2; deepseek-ai/DeepSeek-V3, whose file asks for 8-bit weights
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163_840,
        "vocab_size": 129_280,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}

# What the reader of a price should know besides the config.
NOTES = {
    "gpt3": "GPT-3 bands every other layer, by a width that its paper does not give; all are priced as full",
    "gpt-oss-20b": "published with experts of about 4 bits a weight; priced in one number format",
    "deepseek-v3": "published in 8 bits a weight (--dtype fp8)",
}


def find_preset(name: str) -> dict[str, Any]:
    """The config of that name, or an error that offers the nearest ones."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(PRESETS)}"
    raise HeadwiseError(f"no preset {name!r}, and no file or folder of that name; {hint}")
