"""Heads and layers as HTML for notebooks: what they are in words, their weights as small pictures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from headwise.markup import BINARY, escaped, listed, number, picture, plural, scaled, table

if TYPE_CHECKING:
    from headwise.layer.head import Head
    from headwise.layer.layer import MultiHeadAttention

MOST_HEADS = 24  # rows of a table
SMALL, LARGE = (
    (16, 48),
    (64, 192),
)  # the most pixels of a picture, rows and columns; means of blocks where there are more


def layer_html(layer: MultiHeadAttention) -> str:
    """The spec and the heads of a layer."""
    return layer.spec._repr_html_() + heads_html(layer.heads)


def heads_html(heads: Iterable[Head]) -> str:
    """A row for each head: what it reads, its slices of the four matrices, its cost."""
    everyone = list(heads)
    rows = [
        (
            head.name,
            kv_head_of(head),
            *_pictures(head, 24, SMALL),
            f"{head.cost.parameters:,}",
            scaled(head.cost.cache_share, 1024, BINARY),
        )
        for head in everyone[:MOST_HEADS]
    ]
    columns = (
        "head",
        "key/value head",
        "W_Q",
        "W_K",
        "W_V",
        "W_O^T",
        "parameters of its own",
        "share of cache a token",
    )
    more = len(everyone) - MOST_HEADS
    return table(columns, rows) + (f"<p>and {plural(more, 'more head')}</p>" if more > 0 else "")


def head_html(head: Head) -> str:
    """One head: its slices large, with their shapes and sizes, and its cost."""
    matrices = dict(zip(("W_Q", "W_K", "W_V", "W_O^T"), _matrices(head), strict=True))
    rows = []
    for (name, matrix), image in zip(matrices.items(), _pictures(head, 72, LARGE), strict=True):
        if matrix is not None:
            size = None if matrix.is_meta else float(matrix.detach().float().norm())
            rows.append((name, f"{matrix.shape[0]} x {matrix.shape[1]}", image, number(size, 3)))
    note = "blue above zero, red below; the largest magnitude is the darkest"
    return (
        f"<p><b>{head.name}</b> reads key/value head {kv_head_of(head)}. {escaped(str(head.cost))}.</p>"
        + table(("matrix", "shape", "weights", "Frobenius norm"), rows)
        + f"<p>{note}</p>"
    )


def kv_head_of(head: Head) -> str:
    """The key/value head that a head reads, and who reads it too: `1 with H2`."""
    others = listed([f"H{index}" for index in head.shared_with], 3)
    return f"{head.kv_index}" + (f" with {others}" if others else "")


def _matrices(head: Head) -> tuple[Tensor | None, ...]:
    """Each with a row for each feature of the head."""
    return head.wq, head.wk, head.wv, None if head.wo is None else head.wo.T


def _pictures(head: Head, height: int, most: tuple[int, int]) -> list[str]:
    names = ("W_Q", "W_K", "W_V", "W_O transposed")
    return [
        "" if matrix is None else _picture(matrix, f"{name} of {head.name}", height, most)
        for name, matrix in zip(names, _matrices(head), strict=True)
    ]


def _picture(matrix: Tensor, label: str, height: int, most: tuple[int, int]) -> str:
    if matrix.is_meta:
        return "on the meta device, without numbers"
    with torch.no_grad():
        pixels = min(matrix.shape[0], most[0]), min(matrix.shape[1], most[1])
        small = adaptive_avg_pool2d(matrix.detach()[None].float().cpu(), pixels)[0]
    label += f", {matrix.shape[0]} x {matrix.shape[1]}" + ("" if small.shape == matrix.shape else ", means of blocks")
    return picture(small.tolist(), label, height)
