"""Pictures drawn by matplotlib, asked for only here: the maps of a text, an image under what a head looks at."""

from __future__ import annotations

import io
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.records import HeadMaps
from headwise.table import figure_class
from headwise.view import Screen
from headwise.view.terminal import print_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwise.heads.watch import SeenHead


class DrawnMaps(HeadMaps):
    """The maps of every head on one short text: a notebook shows them as pictures, `text()` is for a terminal."""

    def text(self, width: int = 100) -> str:
        """The maps as characters, as many side by side as fit."""
        file = io.StringIO()
        print_maps(Screen(file=file, width=width), self)
        return file.getvalue()

    def figure(self) -> Figure:
        """A figure of matplotlib, a row a layer: of each map queries go downwards, keys to the right."""
        layers = sorted({head.layer for head in self.maps})
        across = 1 + max(head.head for head in self.maps)
        figure = figure_class()(figsize=(across, 1.2 * len(layers)))  # inches
        for head in self.maps:
            axes = figure.add_subplot(
                len(layers), across, layers.index(head.layer) * across + head.head + 1
            )
            axes.imshow(head.weights, cmap="Blues", vmin=0, vmax=1)
            axes.set_title(head.name, fontsize=6)
            axes.set_axis_off()
        return figure

    def _repr_png_(self) -> bytes:
        return png(self.figure())

    def __repr__(self) -> str:
        return f"DrawnMaps({self.model}: {len(self.maps)} heads, {len(self.tokens)} tokens)"


def attention(model: Any, text: Any) -> DrawnMaps:
    """The exact attention maps of every head on one short text.

        hw.attention(model, "The keys to the cabinet are")     # pictures in a notebook; print(....text()) elsewhere

    Args:
        model: what `hw.open` gave
        text: a text, of a model that `open` opened, or ids (T,); up to 400 tokens

    Raises:
        HeadwiseError: for a model of several stacks: there `watch(model, text, maps=True)` has the maps.
    """
    # here, since the rest of this package needs no torch
    from headwise.heads.watch import head_maps
    from headwise.models.open import folder_of, ids_of

    folder = folder_of(model)
    ids = [int(i) for i in ids_of(model, text)]
    # A model without a tokenizer has numbers for words.
    shown = tuple(map(str, ids)) if folder.tokens is None else folder.tokens.shown(ids)
    maps = head_maps(model, ids, shown, folder.name)
    return DrawnMaps(maps.model, maps.tokens, maps.maps)


def png(figure: Figure) -> bytes:
    """A figure as a PNG; the same figure gives the same bytes."""
    file = io.BytesIO()
    # 120 pixels an inch is a round choice. The line Software, which is left out, would name matplotlib's version.
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    return file.getvalue()


WIDE, LINE = 5.0, 0.25  # inches: width of the picture, height of the line above it
# how dark a patch without weight is made: at 1 it would be black, and the image could not be told
DARK = 0.75


def overlay(
    path: str | Path, image: Any, head: SeenHead, grid: tuple[int, int] | None = None
) -> None:
    """Write a PNG of an image and, over each of its patches, how much a head looks there.

        with hw.watch(model, maps=[-1]) as seen:                       # the last token of the text
            model(**inputs)
        hw.overlay("cat.png", inputs["pixel_values"][0], seen["language_model.L3.H5"])

    The patches are the last keys of the image: before them may stand a class token.

    Args:
        path: of the PNG
        image: what the model saw, as its processor cut it: an array (rows, columns, 3) or (3, rows, columns)
        head: a head of the text over the places of an image, or one of a tower that reads an image; the weights
            drawn are means over the rows of its `map`, each patch beside the largest one
        grid: rows and columns of patches; default: a square. Models that keep the shape of an image need it
            (Qwen2-VL)

    Raises:
        HeadwiseError: where the grid does not fit, where the map was not kept, for what is no image, and where
            matplotlib is missing.
    """
    new_figure = figure_class()
    pixels = _pixels(image)
    weights = patches(head, grid)
    height, width = pixels.shape[:2]
    tall = WIDE * height / width
    figure = new_figure(figsize=(WIDE, tall + LINE), facecolor="#fbfaf6")
    # below the line, as wide as the figure
    axes = figure.add_axes((0, 0, 1, tall / (tall + LINE)))
    # left, right, bottom, top: rows of pixels count downwards
    place = (0, width, height, 0)
    axes.imshow(pixels, extent=place, cmap="gray", aspect="auto")
    # Over the image an image of zeros, which is black, stretched to the same size: the less weight, the less of the
    # patch below it shines through.
    shade = DARK * (1 - weights / (weights.max() or 1))
    axes.imshow(
        np.zeros_like(weights), extent=place, alpha=shade, cmap="gray", aspect="auto"
    )
    axes.set_axis_off()
    line = f"{head.name}: {weights.sum():.2f} of its weight on the image, {weights.max():.3f} on the brightest patch"
    # 0.05 inches below the upper edge. Letters of 8 points, 0.11 inches, fit into LINE.
    figure.text(
        0.01, 1 - 0.05 / (tall + LINE), line, fontsize=8, va="top", parse_math=False
    )
    write_whole(path, png(figure))


def patches(head: SeenHead, grid: tuple[int, int] | None) -> NDArray[np.float64]:
    """The weights of the patches, (rows, columns), means over the rows of the map. HeadwiseError as in `overlay`."""
    # (tokens that look, places of the image)
    weights = np.asarray(head.image_map, np.float64)
    if not len(weights):
        raise HeadwiseError(
            f"{head.name}: no row was kept; list rows that are there, watch(model, maps=[-1])"
        )
    n = weights.shape[1]
    rows, columns = grid or (isqrt(n), isqrt(n))
    # Of a square that was guessed at most a class token may be left over; whoever passes a grid knows what is before.
    before = n - rows * columns
    if min(rows, columns) < 1 or before < 0 or (grid is None and before > 1):
        raise HeadwiseError(
            f"{head.name} sees {n} places of the image, not {rows} x {columns}; pass grid=(rows, columns) of patches"
        )
    return weights.mean(0)[before:].reshape(rows, columns)


def _pixels(image: Any) -> Any:
    """An image as matplotlib draws it, numbers from 0 to 1: (rows, columns, 1 or 3)."""
    if hasattr(image, "detach"):
        image = image.detach().cpu().float()
    try:
        pixels = np.asarray(image, np.float64)
    except (TypeError, ValueError):
        raise HeadwiseError(
            f"image={image!r:.60} is no array of numbers; matplotlib.image.imread reads a file"
        ) from None
    # Colours first, as processors give them, become colours last: 1 is grey, 3 are colours, 4 have opacity besides.
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if not pixels.size or pixels.shape[2:] not in [(1,), (3,), (4,)]:
        raise HeadwiseError(
            f"an image is (rows, columns, 3) or (3, rows, columns), and this one is {pixels.shape}"
        )
    pixels = pixels[..., :3]  # without opacity
    # From the darkest to the brightest: what a processor normed lies around 0. A copy, for the image is the caller's.
    pixels = pixels - pixels.min()
    return pixels / (pixels.max() or 1)
