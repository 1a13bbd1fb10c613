"""Encoders: BERT, RoBERTa and ViT, which keep no cache, Gemma 3's image tower, and those of T5 and Whisper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwise.cost.decoders import GEMMA3_TEXT
from headwise.cost.fields import Fields, check_size, family
from headwise.cost.shape import (
    ENCODER,
    MAIN,
    VISION,
    Attention,
    FeedForward,
    Layer,
    ModelShape,
    Piece,
    lm_head,
    norm,
    table,
)
from headwise.errors import HeadwiseError


def _layers(f: Fields, stack: str = MAIN, prefix: str = "", qkv_bias: bool = True) -> tuple[Layer, ...]:
    d = f.size("hidden_size")
    biases = {"q_bias": qkv_bias, "k_bias": qkv_bias, "v_bias": qkv_bias, "out_bias": True}
    attention = Attention.equal_heads(d, f.size("num_attention_heads"), f.head_dim(), causal=False, **biases)
    forward = FeedForward(d_model=d, width=f.size("intermediate_size"), gated=False, bias=True)
    return tuple(
        Layer(name=f"{prefix}L{n}", stack=stack, attention=attention, feed_forward=forward, norm_parameters=4 * d)
        for n in f.layers("num_hidden_layers")
    )


def masked_lm_head(width: int, vocabulary: int, tied: bool) -> Piece:
    """BERT's and RoBERTa's head; untied, the decoder's own bias is a second one beside the head's."""
    name, square, rows = "masked language model head", width * width, width * vocabulary
    parameters = square + width + 2 * width + vocabulary + (not tied) * (rows + vocabulary)
    return Piece(name=name, part="head", parameters=parameters, weights=square + rows, borrowed=tied * rows)


def once(name: str, d_in: int, d_out: int) -> Piece:
    return Piece(name=name, part="head", parameters=d_in * d_out + d_out, once=d_in * d_out)


def patches(f: Fields) -> tuple[Piece, int]:
    (height, width), (rows, columns) = f.side("image_size"), f.side("patch_size")
    if rows > height or columns > width:
        raise HeadwiseError(f"patch_size={rows}x{columns} exceeds image_size={height}x{width}: there is no patch")
    count, d_model = (height // rows) * (width // columns), f.size("hidden_size")
    weights = f.size("num_channels") * rows * columns * d_model
    stem = Piece(name="patches", part="stem", parameters=weights + d_model, once=weights * count)
    return stem, count


def _text_encoder(f: Fields, pooled: tuple[str, ...], positions: int | None = None) -> ModelShape:
    d, vocabulary, kind = f.size("hidden_size"), f.size("vocab_size"), f.head()
    rows = f.size("max_position_embeddings")
    pieces = [
        table("token embedding", vocabulary, d),
        table("position embedding", rows, d),
        table("segment embedding", f.size("type_vocab_size"), d),
        norm("embedding norm", 2 * d),
    ]
    if kind in pooled:
        pieces.append(once("pooler", d, d))
    if kind in ("masked", "pretraining"):
        pieces.append(masked_lm_head(d, vocabulary, f.flag("tie_word_embeddings")))
    if kind == "pretraining":
        pieces.append(once("next sentence", d, 2))
    return ModelShape(d_model=d, layers=_layers(f), pieces=tuple(pieces), positions=positions or rows, generates=False)


def roberta(f: Fields) -> ModelShape:
    """Positions count from after the padding token's id, so that many rows and one more are never a position."""
    lost = f.count("pad_token_id") + 1
    rows = f.size("max_position_embeddings")
    if rows <= lost:
        raise HeadwiseError(f"max_position_embeddings={rows} leaves no position: {lost}, pad_token_id + 1, rest")
    return _text_encoder(f, ("base",), rows - lost)


def vit(f: Fields) -> ModelShape:
    d, (stem, count) = f.size("hidden_size"), patches(f)
    if f.head() == "base":
        head = once("pooler", d, f.optional_size("pooler_output_size") or d)
    else:
        head = once("classifier", d, _labels(f.config))
    class_token = Piece(name="class token", part="embeddings", parameters=d, row=d)
    pieces = (stem, class_token, table("position embedding", count + 1, d), norm("final norm", 2 * d), head)
    layers = _layers(f, qkv_bias=f.flag("qkv_bias"))
    return ModelShape(d_model=d, layers=layers, pieces=pieces, positions=count + 1, generates=False)


def _labels(config: dict[str, Any]) -> int:
    names = config.get("id2label")  # transformers keeps silent about the usual two
    return len(names) if isinstance(names, dict) and names else check_size("num_labels", config.get("num_labels", 2))


SIGLIP = family("siglip_vision_model", vit)


def gemma3(f: Fields) -> ModelShape:
    """Gemma 3 with eyes: the text decoder, a SigLIP tower, and the projection between them."""
    text, vision = f.config.get("text_config"), f.config.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        missing = "vision_config" if isinstance(text, dict) else "text_config"
        raise HeadwiseError(f"{missing} is missing; gemma3 reads text and images (a model of text says gemma3_text)")
    if "vision_use_head" not in vision:
        raise HeadwiseError("vision_use_head is missing in vision_config, and only vision_use_head=false is priced")
    head = {"tie_word_embeddings": f.flag("tie_word_embeddings")}  # the outer one decides
    shape, eyes = GEMMA3_TEXT.read({**text, **head}), Fields(vision, SIGLIP)
    d, (stem, count) = eyes.size("hidden_size"), patches(eyes)
    tower = (
        replace(stem, name="vision patches", stack=VISION),
        table("vision position embedding", count, d, VISION),
        norm("vision final norm", 2 * d, VISION),
        Piece(name="vision projection", part="stem", parameters=d * shape.d_model, stack=VISION),
        norm("vision projection norm", d, VISION),
    )
    note = "images: the vision tower counts in the parameters, and the FLOPs are those of text alone"
    layers = shape.layers + _layers(eyes, VISION, "vision.")
    return replace(shape, layers=layers, pieces=shape.pieces + tower, notes=(*shape.notes, *eyes.notes(), note))


def _stack(side: str, numbers: range, attention: Attention, forward: FeedForward, norm_size: int) -> list[Layer]:
    encodes, both_ways = side == "encoder", replace(attention, causal=False)
    return [
        Layer(
            name=f"{side}.L{n}",
            stack=ENCODER if encodes else MAIN,
            attention=both_ways if encodes else attention,
            cross=None if encodes else both_ways,
            feed_forward=forward,
            norm_parameters=(2 if encodes else 3) * norm_size,
        )
        for n in numbers
    ]


def t5(f: Fields) -> ModelShape:
    """RMSNorm, no biases, head width d_kv; the first layer of each stack holds the bias by distance for all of it."""
    d = f.size("d_model")
    attention = Attention.equal_heads(d, f.size("num_heads"), f.size("d_kv"))
    kind = f.get("feed_forward_proj")
    parts = kind.split("-") if isinstance(kind, str) else []
    if len(parts) not in (1, 2) or (len(parts) == 2 and parts[0] != "gated"):
        raise HeadwiseError(f"feed_forward_proj={kind!r} is not priced; known: an activation, or gated-ACTIVATION")
    forward = FeedForward(d_model=d, width=f.size("d_ff"), gated=len(parts) == 2)
    numbers = f.layers("num_layers")
    encoder = _stack("encoder", numbers, attention, forward, d)
    if f.get("num_decoder_layers"):
        numbers = f.layers("num_decoder_layers")
    decoder = _stack("decoder", numbers, attention, forward, d)
    for layers in (encoder, decoder):
        buckets = f.size("relative_attention_num_buckets")
        layers[0] = replace(layers[0], attention=replace(layers[0].attention, buckets=buckets))
    vocabulary, tied = f.size("vocab_size"), f.flag("tie_word_embeddings")
    head = [lm_head(d, vocabulary, tied)] if f.head() == "lm" else []
    pieces = (table("token embedding", vocabulary, d), norm("encoder norm", d, ENCODER), norm("final norm", d), *head)
    untied = "tie_word_embeddings is false: the head counts as a matrix of its own, as in the published T5 1.1 and Flan"
    positions, notes = f.optional_size("n_positions"), () if tied else (untied,)
    return ModelShape(d_model=d, layers=(*encoder, *decoder), pieces=pieces, positions=positions, notes=notes)


def whisper(f: Fields) -> ModelShape:
    """LayerNorm; biases on all but the keys. Two convolutions halve the frames of the spectrogram."""
    d = f.size("d_model")
    layers = (*_whisper_stack(f, "encoder"), *_whisper_stack(f, "decoder"))
    frames, positions, vocabulary = f.size("max_source_positions"), f.size("max_target_positions"), f.size("vocab_size")
    first, second = 3 * f.size("num_mel_bins") * d, 3 * d * d  # kernels of 3; the second moves by 2 frames
    products = first * 2 * frames + second * frames
    pieces = (
        Piece(name="convolutions", part="stem", parameters=first + second + 2 * d, stack=ENCODER, once=products),
        table("encoder positions", frames, d, ENCODER),
        norm("encoder norm", 2 * d, ENCODER),
        table("token embedding", vocabulary, d),
        table("position embedding", positions, d),
        norm("final norm", 2 * d),
        *([lm_head(d, vocabulary, f.flag("tie_word_embeddings"))] if f.head() == "lm" else []),
    )
    return ModelShape(d_model=d, layers=layers, pieces=pieces, positions=positions, source_positions=frames)


def _whisper_stack(f: Fields, side: str) -> list[Layer]:
    d, heads = f.size("d_model"), f"{side}_attention_heads"
    width = f.head_dim("d_model", heads)
    attention = Attention.equal_heads(d, f.size(heads), width, q_bias=True, v_bias=True, out_bias=True)
    forward = FeedForward(d_model=d, width=f.size(f"{side}_ffn_dim"), gated=False, bias=True)
    return _stack(side, f.layers(f"{side}_layers"), attention, forward, 2 * d)


BERT = family("bert", _text_encoder, pooled=("base", "pretraining"))
BUILDERS = {"gemma3": gemma3, "roberta": roberta, "vit": vit, "t5": t5, "whisper": whisper}
ENCODERS = (BERT, *(family(name, build) for name, build in BUILDERS.items()))
