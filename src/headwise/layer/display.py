"""Heads and layers as HTML for notebooks: what they are in words, their weights as small pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from headwise.markup import BINARY, escaped, listed, number, picture, plural, scaled, table

if TYPE_CHECKING:
    from headwise.layer.head import Head, Heads

MOST_HEADS = 24  # rows of a table
SMALL, LARGE = (16, 48), (64, 192)  # the most pixels of a picture, rows and columns; else they are means of blocks


def heads_html(heads: Heads) -> str:
    """A row for each head: what it reads, its slices of the four matrices, its cost."""
    shown = list(heads)[:MOST_HEADS]
    rows = [
        (
            head.name,
            kv_head_of(head),
            *(_picture(head, name, matrix, 24, SMALL) for name, matrix in _matrices(head).items()),
            f"{head.cost.parameters:,}",
            scaled(head.cost.cache_share, 1024, BINARY),
        )
        for head in shown
    ]
    matrices = ("W_Q", "W_K", "W_V", "W_O^T")
    columns = ("head", "key/value head", *matrices, "parameters of its own", "share of cache a token")
    more = len(heads) - len(shown)
    return table(columns, rows) + (f"<p>and {plural(more, 'more head')}</p>" if more else "")


def head_html(head: Head) -> str:
    """One head: its slices large, with their shapes and sizes, and its cost."""
    rows = []
    for name, matrix in _matrices(head).items():
        if matrix is not None:
            size = None if matrix.is_meta else float(matrix.detach().float().norm())
            image = _picture(head, name, matrix, 72, LARGE)
            rows.append((name, f"{matrix.shape[0]} x {matrix.shape[1]}", image, number(size, 3)))
    return (
        f"<p><b>{head.name}</b> reads key/value head {kv_head_of(head)}. {escaped(str(head.cost))}.</p>"
        + table(("matrix", "shape", "weights", "Frobenius norm"), rows)
        + "<p>blue above zero, red below; the largest magnitude is the darkest</p>"
    )


def kv_head_of(head: Head) -> str:
    """The key/value head that a head reads, and who reads it too: `1 with H2`."""
    others = listed([f"H{index}" for index in head.shared_with], 3)
    return f"{head.kv_index}" + (f" with {others}" if others else "")


def _matrices(head: Head) -> dict[str, Tensor | None]:
    """Each with a row for each feature of the head."""
    return {"W_Q": head.wq, "W_K": head.wk, "W_V": head.wv, "W_O^T": None if head.wo is None else head.wo.T}


def _picture(head: Head, name: str, matrix: Tensor | None, height: int, most: tuple[int, int]) -> str:
    if matrix is None or matrix.is_meta:
        return "" if matrix is None else "on the meta device, without numbers"
    pixels = min(matrix.shape[0], most[0]), min(matrix.shape[1], most[1])
    small = adaptive_avg_pool2d(matrix.detach()[None].float().cpu(), pixels)[0]
    label = f"{name.replace('^T', ' transposed')} of {head.name}, {matrix.shape[0]} x {matrix.shape[1]}"
    return picture(small.tolist(), label + ("" if small.shape == matrix.shape else ", means of blocks"), height)
