"""Text decoders: what each config class of transformers means, read in its configuration and modelling files (5.23)."""

from __future__ import annotations

from typing import Any

from headwise.cost.fields import Fields, divide
from headwise.cost.parts import decoder, table, windows
from headwise.cost.shape import MAIN, Attention, FeedForward, Latent, Layer, ModelShape
from headwise.errors import HeadwiseError


def _attention(f: Fields, window: int | None = None, bias: bool = False, **options: Any) -> Attention:
    """Grouped heads; `bias` is on all four matrices, `options` are further fields of Attention."""
    heads, width = f.size("num_attention_heads"), f.head_dim()
    biases: dict[str, Any] = {"q_bias": bias, "k_bias": bias, "v_bias": bias, "out_bias": bias}
    return Attention(
        d_model=f.size("hidden_size"),
        n_heads=heads,
        n_kv_heads=f.kv_heads(),
        head_dim=width,
        value_dim=width,
        window=window,
        **{**biases, **options},
    )


def _gated(f: Fields, width: str = "intermediate_size", bias: bool = False) -> FeedForward:
    return FeedForward(d_model=f.size("hidden_size"), width=f.size(width), gated=True, bias=bias)


def _stack(attentions: list[Attention], forwards: list[FeedForward], norms: int) -> tuple[Layer, ...]:
    """Layers L0, L1, ... whose norms have `norms` parameters each layer."""
    return tuple(
        Layer(name=f"L{n}", stack=MAIN, attention=a, cross=None, feed_forward=w, norm_parameters=norms)
        for n, (a, w) in enumerate(zip(attentions, forwards, strict=True))
    )


def llama(f: Fields) -> ModelShape:
    """RMSNorm, two a layer; `attention_bias` and `mlp_bias` are on all matrices of theirs."""
    d, n = f.size("hidden_size"), len(f.layers("num_hidden_layers"))
    attention, forward = _attention(f, bias=f.flag("attention_bias")), _gated(f, bias=f.flag("mlp_bias"))
    return decoder(f, _stack([attention] * n, [forward] * n, 2 * d), d)


def mistral(f: Fields) -> ModelShape:
    """Llama's layers without biases; one window for all."""
    d, n = f.size("hidden_size"), len(f.layers("num_hidden_layers"))
    attention = _attention(f, f.optional_size("sliding_window"))
    return decoder(f, _stack([attention] * n, [_gated(f)] * n, 2 * d), d)


def mixtral(f: Fields) -> ModelShape:
    d, n = f.size("hidden_size"), len(f.layers("num_hidden_layers"))
    forward = FeedForward(
        d_model=d,
        width=f.size("intermediate_size"),
        gated=True,
        **f.experts("num_local_experts"),
    )
    attention = _attention(f, f.optional_size("sliding_window"))
    return decoder(f, _stack([attention] * n, [forward] * n, 2 * d), d)


def _qwen_windows(f: Fields) -> list[int | None]:
    """Layers from max_window_layers on slide, where use_sliding_window says so."""
    slides = f.flag("use_sliding_window") and f.optional_size("sliding_window") is not None
    first = f.count("max_window_layers") if slides else 0
    found = windows(f, [slides and n >= first for n in f.layers("num_hidden_layers")])
    if any(found) and not slides:
        raise HeadwiseError("layer_types has sliding_attention and use_sliding_window is false; correct one of them")
    return found


def qwen2(f: Fields) -> ModelShape:
    """Biases on queries, keys and values always, on W_O never."""
    d = f.size("hidden_size")
    attentions = [_attention(f, window, q_bias=True, k_bias=True, v_bias=True) for window in _qwen_windows(f)]
    return decoder(f, _stack(attentions, [_gated(f)] * len(attentions), 2 * d), d)


def qwen3(f: Fields) -> ModelShape:
    d, bias = f.size("hidden_size"), f.flag("attention_bias")
    attentions = [_attention(f, window, bias, qk_norm=True) for window in _qwen_windows(f)]
    return decoder(f, _stack(attentions, [_gated(f)] * len(attentions), 2 * d), d)


def qwen3_moe(f: Fields) -> ModelShape:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers names it; one window for all layers."""
    d, step, dense = f.size("hidden_size"), f.size("decoder_sparse_step"), f.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise HeadwiseError(f"mlp_only_layers={dense!r} must be a list of layers")
    experts = FeedForward(
        d_model=d,
        width=f.size("moe_intermediate_size"),
        gated=True,
        **f.experts("num_experts"),
    )
    layers = f.layers("num_hidden_layers")
    forwards = [_gated(f) if n in dense or (n + 1) % step else experts for n in layers]
    window = f.optional_size("sliding_window") if f.flag("use_sliding_window") else None
    attention = _attention(f, window, f.flag("attention_bias"), qk_norm=True)
    return decoder(f, _stack([attention] * len(layers), forwards, 2 * d), d)


def _gemma(f: Fields, usual: list[bool], qk_norm: bool) -> ModelShape:
    """Four RMSNorms a layer: before and after the attention, before and after the feed-forward."""
    d, bias = f.size("hidden_size"), f.flag("attention_bias")
    attentions = [_attention(f, window, bias, qk_norm=qk_norm) for window in windows(f, usual)]
    return decoder(f, _stack(attentions, [_gated(f)] * len(attentions), 4 * d), d)


def gemma2(f: Fields) -> ModelShape:
    return _gemma(f, [n % 2 == 0 for n in f.layers("num_hidden_layers")], qk_norm=False)


def gemma3_text(f: Fields) -> ModelShape:
    every = f.size("sliding_window_pattern")
    return _gemma(f, [(n + 1) % every != 0 for n in f.layers("num_hidden_layers")], qk_norm=True)


def gpt_oss(f: Fields) -> ModelShape:
    """Every other layer slides; a sink a head; experts with biases, and a router with one."""
    d, bias, layers = f.size("hidden_size"), f.flag("attention_bias"), f.layers("num_hidden_layers")
    forward = FeedForward(
        d_model=d,
        width=f.size("intermediate_size"),
        gated=True,
        bias=True,
        **f.experts("num_local_experts"),
        router_bias=True,
    )
    attentions = [_attention(f, window, bias, sink=True) for window in windows(f, [n % 2 == 0 for n in layers])]
    return decoder(f, _stack(attentions, [forward] * len(layers), 2 * d), d)


def deepseek_v3(f: Fields) -> ModelShape:
    """Latent attention; layers from first_k_dense_replace on have routed experts and shared ones."""
    d, heads, bias = f.size("hidden_size"), f.size("num_attention_heads"), f.flag("attention_bias")
    if (f.optional_size("num_key_value_heads") or heads) != heads:
        raise HeadwiseError(
            f"num_key_value_heads={f.get('num_key_value_heads')} differs from num_attention_heads={heads}; "
            f"a latent gives every head keys and values of its own"
        )
    rope = f.size("qk_rope_head_dim")
    attention = Attention(
        d_model=d,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=f.size("qk_nope_head_dim") + rope,
        value_dim=f.size("v_head_dim"),
        q_bias=bias,
        k_bias=bias,
        out_bias=bias,
        latent=Latent(kv_rank=f.size("kv_lora_rank"), rope_dim=rope, q_rank=f.optional_size("q_lora_rank")),
    )
    width = f.size("moe_intermediate_size")
    experts = FeedForward(
        d_model=d,
        width=width,
        gated=True,
        **f.experts("n_routed_experts"),
        shared_width=width * f.size("n_shared_experts"),
    )
    layers, first = f.layers("num_hidden_layers"), f.count("first_k_dense_replace")
    forwards = [_gated(f) if n < first else experts for n in layers]
    return decoder(f, _stack([attention] * len(layers), forwards, 2 * d), d)


def gpt2(f: Fields) -> ModelShape:
    """LayerNorm and biases everywhere, learned positions, a plain feed-forward of 4 widths unless n_inner says else."""
    d, heads, layers = f.size("n_embd"), f.size("n_head"), f.layers("n_layer")
    width = divide("n_embd", d, "n_head", heads)
    attention = Attention(
        d_model=d,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width,
        value_dim=width,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        out_bias=True,
    )
    forward = FeedForward(d_model=d, width=f.optional_size("n_inner") or 4 * d, gated=False, bias=True)
    stack = _stack([attention] * len(layers), [forward] * len(layers), 4 * d)
    return decoder(f, stack, 2 * d, table("position embedding", f.size("n_positions"), d), positions="n_positions")
