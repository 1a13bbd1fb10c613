"""Pieces that several families share: embeddings, norms, heads."""

from __future__ import annotations

from headwise.cost.fields import Fields
from headwise.cost.shape import MAIN, Piece
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
    parameters = width * width + width + 2 * width + vocabulary
    return Piece(
        name="masked language model head",
        part="head",
        parameters=parameters if tied else parameters + width * vocabulary + vocabulary,
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
