"""Encoders with a decoder that looks at them: T5 and Whisper."""

from __future__ import annotations

from dataclasses import replace

from headwise.cost.fields import Fields, family
from headwise.cost.parts import lm_head, norm, table
from headwise.cost.shape import ENCODER, MAIN, Attention, FeedForward, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError


def _stacks(
    encoder: tuple[Attention, FeedForward, int],
    decoder: tuple[Attention, FeedForward, int],
    counts: tuple[int, int],
) -> list[Layer]:
    """Layers out of (attention, feed-forward, parameters of one norm); a decoder layer has a third norm, for cross."""
    layers = []
    for stack, (attention, forward, gain), count in zip((ENCODER, MAIN), (encoder, decoder), counts, strict=True):
        cross = replace(attention, causal=False) if stack == MAIN else None
        layers += [
            Layer(
                name=f"{'decoder' if cross else 'encoder'}.L{n}",
                stack=stack,
                attention=attention,
                cross=cross,
                feed_forward=forward,
                norm_parameters=(3 if cross else 2) * gain,
            )
            for n in range(count)
        ]
    return layers


def t5(f: Fields) -> ModelShape:
    """RMSNorm, no biases, head width d_kv; the first layer of each stack holds the bias by distance for all of it."""
    d, heads, width = f.size("d_model"), f.size("num_heads"), f.size("d_kv")
    attention = Attention(d_model=d, n_heads=heads, n_kv_heads=heads, head_dim=width, value_dim=width)
    kind = f.get("feed_forward_proj")
    parts = kind.split("-") if isinstance(kind, str) else []
    if len(parts) not in (1, 2) or (len(parts) == 2 and parts[0] != "gated"):
        raise HeadwiseError(f"feed_forward_proj={kind!r} is not priced; known: an activation, or gated-ACTIVATION")
    forward = FeedForward(d_model=d, width=f.size("d_ff"), gated=len(parts) == 2)
    encoder_layers = len(f.layers("num_layers"))
    decoder_layers = len(f.layers("num_decoder_layers")) if f.get("num_decoder_layers") else encoder_layers
    both = (replace(attention, causal=False), forward, d), (attention, forward, d)
    layers = _stacks(*both, (encoder_layers, decoder_layers))
    for n in (0, encoder_layers):
        layers[n] = replace(
            layers[n], attention=replace(layers[n].attention, buckets=f.size("relative_attention_num_buckets"))
        )
    vocabulary, tied = f.size("vocab_size"), f.flag("tie_word_embeddings")
    head = [lm_head(d, vocabulary, tied)] if f.head() == "lm" else []
    pieces = [table("token embedding", vocabulary, d), norm("encoder norm", d, ENCODER), norm("final norm", d), *head]
    untied = "tie_word_embeddings is false: the head counts as a matrix of its own, as in the published T5 1.1 and Flan"
    return ModelShape(
        family=f.family.name,
        d_model=d,
        layers=tuple(layers),
        pieces=tuple(pieces),
        positions=f.optional_size("n_positions"),
        notes=(*f.notes(), *(() if tied else (untied,))),
    )


def whisper(f: Fields) -> ModelShape:
    """LayerNorm; biases on all but the keys. Two convolutions halve the frames of the spectrogram."""
    d = f.size("d_model")
    encoder = _whisper_side(f, "encoder"), _whisper_forward(f, "encoder"), 2 * d
    decoder = _whisper_side(f, "decoder"), _whisper_forward(f, "decoder"), 2 * d
    layers = _stacks(
        (replace(encoder[0], causal=False), *encoder[1:]),
        decoder,
        (len(f.layers("encoder_layers")), len(f.layers("decoder_layers"))),
    )
    frames, vocabulary = f.size("max_source_positions"), f.size("vocab_size")
    first, second = 3 * f.size("num_mel_bins") * d, 3 * d * d  # kernels of 3; the second moves by 2 frames
    stem = Piece(
        name="convolutions",
        part="stem",
        parameters=first + second + 2 * d,
        stack=ENCODER,
        once=first * 2 * frames + second * frames,
    )
    head = [lm_head(d, vocabulary, f.flag("tie_word_embeddings"))] if f.head() == "lm" else []
    pieces = [
        stem,
        table("encoder positions", frames, d, ENCODER),
        norm("encoder norm", 2 * d, ENCODER),
        table("token embedding", vocabulary, d),
        table("position embedding", f.size("max_target_positions"), d),
        norm("final norm", 2 * d),
        *head,
    ]
    return ModelShape(
        family=f.family.name,
        d_model=d,
        layers=tuple(layers),
        pieces=tuple(pieces),
        positions=f.size("max_target_positions"),
        source_positions=frames,
        notes=f.notes(),
    )


def _whisper_side(f: Fields, side: str) -> Attention:
    heads = f.size(f"{side}_attention_heads")
    width = f.head_dim("d_model", f"{side}_attention_heads")
    return Attention(
        d_model=f.size("d_model"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width,
        value_dim=width,
        q_bias=True,
        v_bias=True,
        out_bias=True,
    )


def _whisper_forward(f: Fields, side: str) -> FeedForward:
    return FeedForward(d_model=f.size("d_model"), width=f.size(f"{side}_ffn_dim"), gated=False, bias=True)


SEQ2SEQ = (family("t5", t5), family("whisper", whisper))
