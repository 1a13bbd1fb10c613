"""The families of text decoders: which fields each reads, and what its config class fills in for those left out.

Every table of defaults is that of the config class named beside it, in transformers 5.23; a test holds them to it.
"""

from __future__ import annotations

from typing import Any

from headwise.cost import decoders
from headwise.cost.fields import Family

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def _causal(prefix: str) -> dict[str, str]:
    return {f"{prefix}ForCausalLM": "lm", f"{prefix}Model": "base"}


GEMMA3_TEXT = Family(
    name="gemma3_text",
    # The published 4B config leaves its heads to the class; a width without layers would still say nothing.
    required=("hidden_size", "num_hidden_layers"),
    defaults={  # Gemma3TextConfig
        "vocab_size": 262_208,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
    fixed={"use_bidirectional_attention": False},
    build=decoders.gemma3_text,
    heads=_causal("Gemma3") | {"Gemma3TextModel": "base"},
)

_QWEN: dict[str, Any] = {  # Qwen2Config, Qwen3Config
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

_MISTRAL: dict[str, Any] = {  # MistralConfig, MixtralConfig
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}

DECODERS: tuple[Family, ...] = (
    Family(
        name="gpt2",
        required=("n_embd", "n_layer", "n_head"),
        defaults={  # GPT2Config
            "vocab_size": 50_257,
            "n_positions": 1024,
            "n_inner": None,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        fixed={"add_cross_attention": False},
        build=decoders.gpt2,
        heads={"GPT2LMHeadModel": "lm", "GPT2Model": "base"},
    ),
    Family(
        name="llama",
        required=REQUIRED,
        defaults={  # LlamaConfig
            "vocab_size": 32_000,
            "intermediate_size": 11_008,
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
        build=decoders.llama,
        heads=_causal("Llama"),
    ),
    Family(name="mistral", required=REQUIRED, defaults=_MISTRAL, build=decoders.mistral, heads=_causal("Mistral")),
    Family(
        name="mixtral",
        required=REQUIRED,
        defaults=_MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        build=decoders.mixtral,
        heads=_causal("Mixtral"),
    ),
    Family(
        name="qwen2",
        required=REQUIRED,
        defaults=_QWEN | {"head_dim": None},
        build=decoders.qwen2,
        heads=_causal("Qwen2"),
    ),
    Family(
        name="qwen3",
        required=REQUIRED,
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        build=decoders.qwen3,
        heads=_causal("Qwen3"),
    ),
    Family(
        name="qwen3_moe",
        required=REQUIRED,
        defaults={  # Qwen3MoeConfig; head_dim is no field of the class, and read where a file has it
            "vocab_size": 151_936,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "head_dim": None,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "mlp_only_layers": None,
        },
        aliases={"num_local_experts": "num_experts"},
        build=decoders.qwen3_moe,
        heads=_causal("Qwen3Moe"),
    ),
    Family(
        name="gemma2",
        required=REQUIRED,
        defaults={  # Gemma2Config
            "vocab_size": 256_000,
            "intermediate_size": 9216,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "sliding_window": 4096,
            "layer_types": None,
        },
        fixed={"use_bidirectional_attention": False},
        build=decoders.gemma2,
        heads=_causal("Gemma2"),
    ),
    GEMMA3_TEXT,
    Family(
        name="gpt_oss",
        required=REQUIRED,
        defaults={  # GptOssConfig
            "vocab_size": 201_088,
            "intermediate_size": 2880,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        # The published file also names the second as in the original release.
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        build=decoders.gpt_oss,
        heads=_causal("GptOss"),
    ),
    Family(
        name="deepseek_v3",
        required=REQUIRED,
        defaults={  # DeepseekV3Config
            "vocab_size": 129_280,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        fixed={"moe_layer_freq": 1},
        derived=("head_dim", "qk_head_dim"),
        build=decoders.deepseek_v3,
        heads=_causal("DeepseekV3"),
    ),
)
