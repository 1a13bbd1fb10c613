"""Pieces that several families share: embeddings, norms, heads, and what a decoder looks like once its layers stand."""

from __future__ import annotations

from headwise.cost.fields import Fields
from headwise.cost.shape import MAIN, Layer, ModelShape, Piece
from headwise.errors import HeadwiseError


def table(name: str, rows: int, width: int, stack: str = MAIN) -> Piece:
    """An embedding: rows x width numbers, of which a token reads one row."""
    return Piece(name=name, part="embeddings", parameters=rows * width, stack=stack, row=width)


def norm(name: str, parameters: int, stack: str = MAIN) -> Piece:
    return Piece(name=name, part="norms", parameters=parameters, stack=stack)


def lm_head(width: int, vocabulary: int, tied: bool) -> Piece:
    """The matrix from the last width to the vocabulary; tied, it is the token embedding."""
    weights = width * vocabulary
    return Piece(
        name="lm_head",
        part="head",
        parameters=0 if tied else weights,
        weights=weights,
        borrowed=weights if tied else 0,
    )


def masked_lm_head(width: int, vocabulary: int, tied: bool) -> Piece:
    """BERT's and RoBERTa's head: a square matrix, a LayerNorm, then the vocabulary, with biases.

    Untied, the decoder's own bias is a second one beside the head's.
    """
    own = width * width + width + 2 * width + vocabulary
    return Piece(
        name="masked language model head",
        part="head",
        parameters=own if tied else own + width * vocabulary + vocabulary,
        weights=width * width + width * vocabulary,
        borrowed=width * vocabulary if tied else 0,
    )


def once(name: str, d_in: int, d_out: int) -> Piece:
    """A linear layer with bias that one token of a sequence meets: a pooler, a classifier."""
    return Piece(name=name, part="head", parameters=d_in * d_out + d_out, once=d_in * d_out)


def patches(f: Fields) -> tuple[Piece, int]:
    """The convolution that makes vectors of the patches of an image, and how many there are."""
    (height, width), (rows, columns) = f.side("image_size"), f.side("patch_size")
    if rows > height or columns > width:
        raise HeadwiseError(f"patch_size={rows}x{columns} exceeds image_size={height}x{width}: there is no patch")
    count, d_model = (height // rows) * (width // columns), f.size("hidden_size")
    weights = f.size("num_channels") * rows * columns * d_model
    stem = Piece(name="patches", part="stem", parameters=weights + d_model, once=weights * count)
    return stem, count


def windows(f: Fields, usual: list[bool]) -> list[int | None]:
    """The window of each layer: as `layer_types` says, else where `usual` says True."""
    types = f.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != len(usual):
            count = len(types) if isinstance(types, list) else 0
            raise HeadwiseError(f"layer_types has {count} entries for {len(usual)} layers; one for each is needed")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention", "attention")]
        if unknown:
            raise HeadwiseError(
                f"layer_types names {unknown[0]!r}; known: full_attention and sliding_attention, "
                f"other layers keep other caches"
            )
        usual = [kind == "sliding_attention" for kind in types]
    window = f.optional_size("sliding_window") if any(usual) else None
    if any(usual) and window is None:
        raise HeadwiseError("layer_types has sliding_attention and sliding_window is null; give the window")
    return [window if slides else None for slides in usual]


def taken_note(f: Fields) -> tuple[str, ...]:
    """Which sizes the file leaves out, in a line."""
    said = ", ".join(f"{name}={value}" for name, value in f.taken.items())
    return (f"left out of the config, so the default of the {f.family.name} class: {said}",) if said else ()


def decoder(
    f: Fields,
    layers: tuple[Layer, ...],
    final_norm: int,
    *pieces: Piece,
    positions: str = "max_position_embeddings",
    tied: str = "tie_word_embeddings",
) -> ModelShape:
    """A text decoder: token embedding, further pieces, layers, final norm, head; the last two name fields."""
    d_model, vocabulary = layers[0].attention.d_model, f.size("vocab_size")
    head = [lm_head(d_model, vocabulary, f.flag(tied))] if f.head() == "lm" else []
    return ModelShape(
        family=f.family.name,
        d_model=d_model,
        layers=layers,
        pieces=(table("token embedding", vocabulary, d_model), *pieces, norm("final norm", final_norm), *head),
        positions=f.size(positions),
        notes=taken_note(f),
    )
