"""Text decoders: a record for each family, and the one function that builds a model of any of them.

Every table of defaults is that of the config class named beside it, in transformers 5.23; a test holds them to it. What
a family does with its fields was read in its modelling file of the same version. Fields go by their usual names
(`hidden_size`); a family that calls them otherwise says so in `aliases`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headwise.cost.fields import Family, Fields
from headwise.cost.parts import lm_head, norm, table
from headwise.cost.shape import MAIN, Attention, FeedForward, Latent, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
Windows = Callable[[Fields], list[int | None]]  # of each layer
Forwards = Callable[[Fields], list[FeedForward]]


def _is_set(f: Fields, flag: str | bool) -> bool:
    """A flag by its name, or what every model of the family has."""
    return f.flag(flag) if isinstance(flag, str) else flag


def _gated(f: Fields, bias: bool = False) -> FeedForward:
    return FeedForward(d_model=f.size("hidden_size"), width=f.size("intermediate_size"), gated=True, bias=bias)


def _experts(f: Fields, of: str, width: str = "intermediate_size", **options: Any) -> FeedForward:
    return FeedForward(d_model=f.size("hidden_size"), width=f.size(width), gated=True, **f.experts(of), **options)


def _plain(f: Fields, width: str, bias: bool, gated: bool = False) -> FeedForward:
    """Four widths wide unless the field `width` says else."""
    d = f.size("hidden_size")
    return FeedForward(d_model=d, width=f.optional_size(width) or 4 * d, gated=gated, bias=bias)


def _attention(f: Fields, window: int | None, bias: bool, qkv_bias: bool, **options: Any) -> Attention:
    width = f.head_dim()
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias"), bias or qkv_bias)
    sizes = {"d_model": f.size("hidden_size"), "n_heads": f.size("num_attention_heads"), "n_kv_heads": f.kv_heads()}
    return Attention(**sizes | biases | options, head_dim=width, value_dim=width, window=window, out_bias=bias)


def decoder(
    f: Fields,
    bias: str | bool = False,
    qkv_bias: bool = False,
    gains: Callable[[Fields], tuple[int, int]] = lambda f: (2, 1),
    windows: Windows | None = None,
    forwards: Forwards | None = None,
    attention: Callable[[Fields], Attention] | None = None,
    pieces: Callable[[Fields], list[Piece]] = lambda f: [],
    **options: Any,
) -> ModelShape:
    """A text decoder: token embedding, further pieces, layers, final norm, head.

    bias       on all four matrices of the attention: the name of a flag, or a constant; `qkv_bias` spares W_O
    gains      parameters of the norms of a layer, and of the final one, in model widths
    windows    the window of each layer; default: none
    forwards   the feed-forward of each layer; default: gated, without biases
    attention  instead of grouped heads; `options` are further fields of those
    """
    d, n, vocabulary = f.size("hidden_size"), len(f.layers("num_hidden_layers")), f.size("vocab_size")
    if attention is not None:
        attentions = [attention(f)] * n
    else:
        make = partial(_attention, f, bias=_is_set(f, bias), qkv_bias=qkv_bias, **options)
        attentions = [make(window=window) for window in (windows(f) if windows else [None] * n)]
    a_layer, final = gains(f)
    layers = tuple(
        Layer(name=f"L{i}", stack=MAIN, attention=heads, cross=None, feed_forward=forward, norm_parameters=a_layer * d)
        for i, (heads, forward) in enumerate(zip(attentions, forwards(f) if forwards else [_gated(f)] * n, strict=True))
    )
    head = [lm_head(d, vocabulary, f.flag("tie_word_embeddings"))] if f.head() == "lm" else []
    return ModelShape(
        family=f.family.name,
        d_model=d,
        layers=layers,
        pieces=(table("token embedding", vocabulary, d), *pieces(f), norm("final norm", final * d), *head),
        positions=f.size("max_position_embeddings"),
        notes=f.notes(),
    )


def _same(make: Callable[[Fields], FeedForward]) -> Forwards:
    """The same feed-forward in every layer."""
    return lambda f: [make(f)] * f.size("num_hidden_layers")


def _positions(f: Fields) -> list[Piece]:
    return [table("position embedding", f.size("max_position_embeddings"), f.size("hidden_size"))]


def _one_window(f: Fields) -> list[int | None]:
    return [f.optional_size("sliding_window") for _ in f.layers("num_hidden_layers")]


def _windows(f: Fields, usual: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer: as `layer_types` says, else where `usual` says True."""
    slides, types = [usual(n) for n in f.layers("num_hidden_layers")], f.get("layer_types")
    if types is not None:
        count = len(types) if isinstance(types, list) else 0
        if count != len(slides):
            raise HeadwiseError(f"layer_types has {count} entries for {len(slides)} layers; one for each is needed")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention", "attention")]
        if unknown:
            raise HeadwiseError(
                f"layer_types names {unknown[0]!r}; known: full_attention and sliding_attention, "
                f"other layers keep other caches"
            )
        slides = [kind == "sliding_attention" for kind in types]
    window = f.optional_size("sliding_window") if any(slides) else None
    if any(slides) and window is None:
        raise HeadwiseError("layer_types has sliding_attention and sliding_window is null; give the window")
    return [window if slide else None for slide in slides]


def _every_other(f: Fields) -> list[int | None]:
    return _windows(f, lambda n: n % 2 == 0)


def _gemma3_windows(f: Fields) -> list[int | None]:
    every = f.size("sliding_window_pattern")
    return _windows(f, lambda n: (n + 1) % every != 0)


def _qwen_windows(f: Fields) -> list[int | None]:
    """Layers from max_window_layers on slide, where use_sliding_window says so."""
    slides = f.flag("use_sliding_window") and f.optional_size("sliding_window") is not None
    first = f.count("max_window_layers") if slides else 0
    windows = _windows(f, lambda n: slides and n >= first)
    if any(windows) and not slides:
        raise HeadwiseError("layer_types has sliding_attention and use_sliding_window is false; correct one of them")
    return windows


def _qwen_moe_windows(f: Fields) -> list[int | None]:
    """One window for all layers."""
    return _one_window(f) if f.flag("use_sliding_window") else [None] * f.size("num_hidden_layers")


def _qwen_moe_forwards(f: Fields) -> list[FeedForward]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it."""
    step, dense = f.size("decoder_sparse_step"), f.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise HeadwiseError(f"mlp_only_layers={dense!r} must be a list of layers")
    experts = _experts(f, "num_experts", "moe_intermediate_size")
    return [_gated(f) if n in dense or (n + 1) % step else experts for n in f.layers("num_hidden_layers")]


def _deepseek_forwards(f: Fields) -> list[FeedForward]:
    """Layers from first_k_dense_replace on have routed experts and shared ones."""
    shared, first = f.size("moe_intermediate_size") * f.size("n_shared_experts"), f.count("first_k_dense_replace")
    experts = _experts(f, "n_routed_experts", "moe_intermediate_size", shared_width=shared)
    return [_gated(f) if n < first else experts for n in f.layers("num_hidden_layers")]


def _latent_attention(f: Fields) -> Attention:
    heads, bias, rope = f.size("num_attention_heads"), f.flag("attention_bias"), f.size("qk_rope_head_dim")
    if (f.optional_size("num_key_value_heads") or heads) != heads:
        raise HeadwiseError(
            f"num_key_value_heads={f.get('num_key_value_heads')} differs from num_attention_heads={heads}; "
            f"a latent gives every head keys and values of its own"
        )
    return Attention(
        d_model=f.size("hidden_size"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=f.size("qk_nope_head_dim") + rope,
        value_dim=f.size("v_head_dim"),
        q_bias=bias,
        k_bias=bias,
        out_bias=bias,
        latent=Latent(kv_rank=f.size("kv_lora_rank"), rope_dim=rope, q_rank=f.optional_size("q_lora_rank")),
    )


def _falcon(f: Fields) -> ModelShape:
    """One key/value head, or a group's with new_decoder_architecture; LayerNorms with biases, one or two a layer."""
    new, parallel = f.flag("new_decoder_architecture"), f.flag("parallel_attn")
    heads = f.size("num_attention_heads")
    groups = f.kv_heads("num_kv_heads") if new or not f.flag("multi_query") else 1
    norms = (f.optional_size("num_ln_in_parallel_attn") or 2) if new else 1
    gains = 2 * (norms if parallel else 2)
    shape = decoder(
        f,
        bias="bias",
        gains=lambda f: (gains, 2),
        forwards=_same(lambda f: _plain(f, "ffn_hidden_size", f.flag("bias"))),
        n_kv_heads=groups,
    )
    if new and groups < heads:
        note = f"transformers repeats the {groups} key/value heads in its cache, {heads // groups} times what is priced"
        shape = shape.noted(note)
    return shape


def _own_gains(f: Fields) -> tuple[int, int]:
    """Our GPT: a gain or none in each norm, and a bias in a LayerNorm of a model with biases."""
    a_norm = f.flag("norm_gain") * (2 if f.choice("norm", "rms", "layer") == "layer" and f.flag("bias") else 1)
    return 2 * a_norm, f.flag("final_norm") * a_norm


def _own_pieces(f: Fields) -> list[Piece]:
    learned, d = f.choice("position", "rope", "learned") == "learned", f.size("hidden_size")
    embedding_norm = norm("embedding norm", _own_gains(f)[0] // 2 * d)
    return (_positions(f) if learned else []) + ([embedding_norm] if f.flag("embedding_norm") else [])


def _own(f: Fields) -> ModelShape:
    forward = _same(lambda f: _plain(f, "d_ff", f.flag("bias"), gated=f.flag("gated")))
    return decoder(f, bias="bias", gains=_own_gains, forwards=forward, pieces=_own_pieces, qk_norm=f.flag("qk_norm"))


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
    build=partial(decoder, bias="attention_bias", gains=lambda f: (4, 1), windows=_gemma3_windows, qk_norm=True),
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
        name="headwise",
        required=("vocab_size", "context", "n_layers", "n_heads", "d_model"),
        defaults={  # GPTConfig in gpt/gpt.py
            "n_kv_heads": None,
            "head_dim": None,
            "d_ff": None,
            "norm": "rms",
            "norm_gain": True,
            "embedding_norm": False,
            "final_norm": True,
            "position": "rope",
            "gated": True,
            "bias": False,
            "tied": False,
            "qk_norm": False,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
            "max_position_embeddings": "context",
            "tie_word_embeddings": "tied",
        },
        derived=("scale_residual_init",),
        build=_own,
        heads={"GPT": "lm"},
    ),
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
        build=partial(
            decoder,
            bias=True,
            gains=lambda f: (4, 2),
            forwards=_same(lambda f: _plain(f, "n_inner", bias=True)),
            pieces=_positions,
        ),
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
        build=partial(decoder, bias="attention_bias", forwards=_same(lambda f: _gated(f, bias=f.flag("mlp_bias")))),
        heads=_causal("Llama"),
    ),
    Family(
        name="mistral",
        required=REQUIRED,
        defaults=_MISTRAL,
        build=partial(decoder, windows=_one_window),
        heads=_causal("Mistral"),
    ),
    Family(
        name="mixtral",
        required=REQUIRED,
        defaults=_MISTRAL | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        aliases={"num_experts": "num_local_experts"},
        build=partial(decoder, windows=_one_window, forwards=_same(lambda f: _experts(f, "num_local_experts"))),
        heads=_causal("Mixtral"),
    ),
    Family(
        name="qwen2",
        required=REQUIRED,
        defaults=_QWEN | {"head_dim": None},
        build=partial(decoder, qkv_bias=True, windows=_qwen_windows),
        heads=_causal("Qwen2"),
    ),
    Family(
        name="qwen3",
        required=REQUIRED,
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        build=partial(decoder, bias="attention_bias", windows=_qwen_windows, qk_norm=True),
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
        build=partial(
            decoder,
            bias="attention_bias",
            windows=_qwen_moe_windows,
            forwards=_qwen_moe_forwards,
            qk_norm=True,
        ),
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
        build=partial(decoder, bias="attention_bias", gains=lambda f: (4, 1), windows=_every_other),
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
        build=partial(
            decoder,
            bias="attention_bias",
            windows=_every_other,
            forwards=_same(lambda f: _experts(f, "num_local_experts", bias=True, router_bias=True)),
            sink=True,
        ),
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
        build=partial(decoder, attention=_latent_attention, forwards=_deepseek_forwards),
        heads=_causal("DeepseekV3"),
    ),
    Family(
        name="falcon",
        required=REQUIRED,
        defaults={  # FalconConfig
            "vocab_size": 65_024,
            "num_kv_heads": None,
            "ffn_hidden_size": None,
            "num_ln_in_parallel_attn": None,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        fixed={"alibi": False},
        derived=("head_dim",),
        build=_falcon,
        heads=_causal("Falcon"),
    ),
    # No class of transformers: Chowdhery et al. 2022, arXiv 2204.02311, section 2. Layers are parallel, with one norm
    # that has no bias.
    Family(
        name="palm",
        required=(*REQUIRED, "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size"),
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
        build=partial(decoder, gains=lambda f: (1, 1)),
        heads=_causal("Palm"),
    ),
)
