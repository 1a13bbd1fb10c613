"""Encoders with a decoder that looks at them: T5 and Whisper."""

from __future__ import annotations

from dataclasses import replace

from headwise.cost.fields import Fields, family
from headwise.cost.shape import ENCODER, MAIN, Attention, FeedForward, Layer, ModelShape, Piece, lm_head, norm, table
from headwise.errors import HeadwiseError


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


SEQ2SEQ = (family("t5", t5), family("whisper", whisper))
