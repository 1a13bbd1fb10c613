"""Text decoders: one function builds a model of any family, from the options that the family's line gives it.

Fields stand in families.toml; what families do with them was read in the modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headwise.cost.fields import Fields, check_size, family
from headwise.cost.shape import Attention, FeedForward, Latent, Layer, ModelShape, Piece, lm_head, norm, table
from headwise.errors import HeadwiseError
from headwise.positions import RoPE
from headwise.spec import AttentionSpec

Part = TypeVar("Part")


def _gated(f: Fields, width: str = "intermediate_size", **options: Any) -> FeedForward:
    return FeedForward(d_model=f.size("hidden_size"), width=f.size(width), gated=True, **options)


def _experts(f: Fields, of: str, width: str = "intermediate_size", **options: Any) -> FeedForward:
    active, number = f.size("num_experts_per_tok"), f.size(of)
    if active > number:
        raise HeadwiseError(f"num_experts_per_tok={active} exceeds {of}={number}; correct one of them")
    return _gated(f, width, n_experts=number, n_active=active, **options)


def _plain(f: Fields, width: str, bias: bool, gated: bool = False) -> FeedForward:
    d = f.size("hidden_size")
    return FeedForward(d_model=d, width=f.optional_size(width) or 4 * d, gated=gated, bias=bias)


def _each(parts: Part | list[Part], n: int) -> list[Part]:
    return parts if isinstance(parts, list) else [parts] * n


def decoder(
    f: Fields,
    bias: str | bool = False,
    qkv_bias: bool = False,
    gains: Callable[[Fields], tuple[int, int]] = lambda f: (2, 1),
    windows: Callable[[Fields], int | list[int | None] | None] = lambda f: None,
    forwards: Callable[[Fields], FeedForward | list[FeedForward]] = _gated,
    attention: Callable[[Fields], Attention] | None = None,
    pieces: Callable[[Fields], list[Piece]] = lambda f: [],
    **options: Any,
) -> ModelShape:
    """A text decoder: token embedding, further pieces, layers, final norm, head.

    bias       on all four matrices of the attention: the name of a flag, or a constant; `qkv_bias` spares W_O
    gains      parameters of the norms of a layer, and of the final one, in model widths
    windows    the window of each layer, or of all
    forwards   the feed-forward of each layer, or of all
    attention  instead of grouped heads; `options` are further fields of those
    """
    d, n, vocabulary = f.size("hidden_size"), len(f.layers("num_hidden_layers")), f.size("vocab_size")
    all_windows = _each(windows(f), n)
    if attention is not None:
        heads = attention(f)
    else:
        out_bias = f.flag(bias) if isinstance(bias, str) else bias
        biases = dict.fromkeys(("q_bias", "k_bias", "v_bias"), out_bias or qkv_bias)
        options = {"n_kv_heads": f.kv_heads(), "out_bias": out_bias, **biases, **options}
        heads = Attention.equal_heads(d, f.size("num_attention_heads"), f.head_dim(), **options)
    a_layer, final = gains(f)
    layers = tuple(
        Layer(name=f"L{i}", attention=replace(heads, window=window), feed_forward=forward, norm_parameters=a_layer * d)
        for i, (window, forward) in enumerate(zip(all_windows, _each(forwards(f), n), strict=True))
    )
    head = [lm_head(d, vocabulary, f.flag("tie_word_embeddings"))] if f.head() == "lm" else []
    parts = (table("token embedding", vocabulary, d), *pieces(f), norm("final norm", final * d), *head)
    return ModelShape(d_model=d, layers=layers, pieces=parts, positions=f.size("max_position_embeddings"))


def _positions(f: Fields) -> list[Piece]:
    return [table("position embedding", f.size("max_position_embeddings"), f.size("hidden_size"))]


def _one_window(f: Fields) -> int | None:
    return f.optional_size("sliding_window")


def _windows(f: Fields, usual: Callable[[int], bool]) -> list[int | None]:
    """As `layer_types` says, else where `usual` says True."""
    slides, types = [usual(n) for n in f.layers("num_hidden_layers")], f.get("layer_types")
    if types is not None:
        count = len(types) if isinstance(types, list) else 0
        if count != len(slides):
            raise HeadwiseError(f"layer_types has {count} entries for {len(slides)} layers; one for each is needed")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention", "attention")]
        if unknown:
            known = "known: full_attention and sliding_attention, other layers keep other caches"
            raise HeadwiseError(f"layer_types names {unknown[0]!r}; {known}")
        slides = [kind == "sliding_attention" for kind in types]
    window = f.optional_size("sliding_window") if any(slides) else None
    if any(slides) and window is None:
        raise HeadwiseError("layer_types has sliding_attention and sliding_window is null; give the window")
    return [window if slide else None for slide in slides]


def _qwen_windows(f: Fields) -> list[int | None]:
    """Layers from max_window_layers on slide, where use_sliding_window says so."""
    slides = f.flag("use_sliding_window") and f.optional_size("sliding_window") is not None
    first = f.count("max_window_layers") if slides else 0
    windows = _windows(f, lambda n: slides and n >= first)
    if any(windows) and not slides:
        raise HeadwiseError("layer_types has sliding_attention and use_sliding_window is false; correct one of them")
    return windows


def _qwen_moe_forwards(f: Fields) -> list[FeedForward]:
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
        names = f"num_key_value_heads={f.get('num_key_value_heads')} differs from num_attention_heads={heads}"
        raise HeadwiseError(f"{names}; a latent gives every head keys and values of its own")
    latent = Latent(kv_rank=f.size("kv_lora_rank"), rope_dim=rope, q_rank=f.optional_size("q_lora_rank"))
    width, options = f.size("qk_nope_head_dim") + rope, dict.fromkeys(("k_bias", "out_bias"), bias)
    options["q_bias"] = bias and latent.q_rank is not None  # a full matrix has none
    d_model, value_dim = f.size("hidden_size"), f.size("v_head_dim")
    return Attention.equal_heads(d_model, heads, width, value_dim=value_dim, latent=latent, **options)


def _falcon(f: Fields) -> ModelShape:
    """One key/value head, or a group's with new_decoder_architecture; LayerNorms with biases, one or two a layer."""
    new, parallel = f.flag("new_decoder_architecture"), f.flag("parallel_attn")
    heads = f.size("num_attention_heads")
    groups = f.kv_heads("num_kv_heads") if new or not f.flag("multi_query") else 1
    norms = (f.optional_size("num_ln_in_parallel_attn") or 2) if new else 1
    gains = 2 * (norms if parallel else 2)
    forward = _plain(f, "ffn_hidden_size", f.flag("bias"))
    shape = decoder(f, bias="bias", gains=lambda f: (gains, 2), forwards=lambda f: forward, n_kv_heads=groups)
    if new and groups < heads:
        times = f"{heads // groups} times what is priced"
        return shape.noted(f"transformers repeats the {groups} key/value heads in its cache, {times}")
    return shape


def _own_gains(f: Fields) -> tuple[int, int]:
    a_norm = f.flag("norm_gain") * (2 if f.choice("norm", "rms", "layer") == "layer" and f.flag("bias") else 1)
    return 2 * a_norm, f.flag("final_norm") * a_norm


def _own_pieces(f: Fields) -> list[Piece]:
    learned, d = f.choice("position", "rope", "learned") == "learned", f.size("hidden_size")
    embedding_norm = norm("embedding norm", _own_gains(f)[0] // 2 * d)
    return (_positions(f) if learned else []) + ([embedding_norm] if f.flag("embedding_norm") else [])


def _own_windows(f: Fields) -> list[int | None]:
    n, windows = len(f.layers("num_hidden_layers")), f.get("windows")
    windows = [None] * n if windows is None else windows
    if not isinstance(windows, list | tuple) or len(windows) != n:
        raise HeadwiseError(f"windows={windows!r} must list a number of tokens, or null, for each of {n} layers")
    return [None if window is None else check_size("windows", window) for window in windows]


def _own_latent(f: Fields) -> Attention:
    """As the spec of the config fills its sizes in."""
    names = ("d_model", "n_heads", "latent_dim", "rope_dim", "q_latent_dim")
    sizes: dict[str, Any] = {name: f.optional_size(name) for name in names}
    rope = RoPE() if f.choice("position", "rope", "learned") == "rope" else None
    bias, width = f.flag("bias"), f.head_dim()
    return Attention.of(AttentionSpec(**sizes, head_dim=width, rope=rope, q_bias=bias, kv_bias=bias, out_bias=bias))


def _own(f: Fields) -> ModelShape:
    forward = _plain(f, "d_ff", f.flag("bias"), gated=f.flag("gated"))
    build = partial(decoder, bias="bias", gains=_own_gains, pieces=_own_pieces)
    attention = None if f.get("latent_dim") is None else _own_latent
    return build(f, forwards=lambda f: forward, windows=_own_windows, attention=attention, qk_norm=f.flag("qk_norm"))


_local_experts = partial(_experts, of="num_local_experts")
_experts_with_biases = partial(_local_experts, bias=True, router_bias=True)
_four_widths = partial(_plain, width="n_inner", bias=True)
_every_other = partial(_windows, usual=lambda n: n % 2 == 0)
_gemma = partial(decoder, bias="attention_bias", gains=lambda f: (4, 1))  # norms before and after each part of a layer
_qwen3 = partial(decoder, bias="attention_bias", qk_norm=True)
GEMMA3_TEXT = family(
    "gemma3_text",
    _gemma,
    windows=lambda f: _windows(f, lambda n: (n + 1) % f.size("sliding_window_pattern") > 0),
    qk_norm=True,
)
DECODERS = (
    family("headwise", _own),
    family("gpt2", decoder, bias=True, gains=lambda f: (4, 2), forwards=_four_widths, pieces=_positions),
    family("llama", decoder, bias="attention_bias", forwards=lambda f: _gated(f, bias=f.flag("mlp_bias"))),
    family("mistral", decoder, windows=_one_window),
    family("mixtral", decoder, windows=_one_window, forwards=_local_experts),
    family("qwen2", decoder, qkv_bias=True, windows=_qwen_windows),
    family("qwen3", _qwen3, windows=_qwen_windows),
    family(
        "qwen3_moe",
        _qwen3,
        windows=lambda f: _one_window(f) if f.flag("use_sliding_window") else None,
        forwards=_qwen_moe_forwards,
    ),
    family("gemma2", _gemma, windows=_every_other),
    GEMMA3_TEXT,
    family("gpt_oss", decoder, bias="attention_bias", windows=_every_other, forwards=_experts_with_biases, sink=True),
    family("deepseek_v3", decoder, attention=_latent_attention, forwards=_deepseek_forwards),
    family("falcon", _falcon),
    family("palm", decoder, gains=lambda f: (1, 1)),  # parallel layers: one norm, without a bias
)
