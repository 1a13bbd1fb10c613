"""Where a head looks in an image, drawn over the image."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError
from headwise.view.figure import figure_class, write_figure

if TYPE_CHECKING:
    from headwise.heads.seen import SeenHead

INCHES, LINE = 5.0, 0.25  # width of the picture, height of the line above it
DARK = 0.75  # of a patch that gets no weight


def overlay(path: str | Path, image: Any, head: SeenHead, grid: tuple[int, int] | None = None) -> None:
    """Write a PNG of an image and, over each of its patches, how much a head looks there.

        with hw.watch(model, maps=[-1]) as seen:                       # the last token of the text
            model(**inputs)
        hw.overlay("cat.png", inputs["pixel_values"][0], seen["language_model.L3.H5"])

    path   of the PNG
    image  what the model saw, as its processor cut it: a file, or an array (rows, columns, 3) or (3, rows, columns)
    head   a head of the text over the places of an image, or one of a tower that reads an image; the weights drawn are
           means over the rows of its `map`, each patch beside the largest one
    grid   rows and columns of patches; default: a square. Models that keep the shape of an image need it (Qwen2-VL)

    The patches are the last keys of the image: before them may stand a class token. Raises HeadwiseError where the grid
    does not fit, where the map was not kept, for a file that is no image, and where matplotlib is missing.
    """
    new_figure = figure_class()
    picture, weights = _pixels(image), patches(head, grid)
    height, width = picture.shape[:2]
    tall = INCHES * height / width
    figure = new_figure(figsize=(INCHES, tall + LINE), facecolor="#fbfaf6")
    axes = figure.add_axes((0, 0, 1, tall / (tall + LINE)))
    place = (0, width, height, 0)
    axes.imshow(picture, extent=place, cmap="gray", aspect="auto")
    shade = DARK * (1 - weights / (weights.max() or 1))
    axes.imshow(np.zeros_like(weights), extent=place, alpha=shade, cmap="gray", aspect="auto")
    axes.set_axis_off()
    line = f"{head.name}: {weights.sum():.2f} of its weight on the image, {weights.max():.3f} on the brightest patch"
    figure.text(0.01, 1 - 0.05 / (tall + LINE), line, fontsize=8, va="top", parse_math=False)
    write_figure(path, figure)


def patches(head: SeenHead, grid: tuple[int, int] | None) -> NDArray[np.float64]:
    """The mean weights of the patches, (rows, columns)."""
    weights = np.asarray(head.image_map, np.float64)
    if not len(weights):
        raise HeadwiseError(f"{head.name}: no row was kept; list rows that are there, watch(model, maps=[-1])")
    n = weights.shape[1]
    rows, columns = grid or (isqrt(n), isqrt(n))
    before = n - rows * columns
    if min(rows, columns) < 1 or not 0 <= before <= (1 if grid is None else n):
        shape = "no square" if grid is None else f"fewer than {rows} x {columns}"
        raise HeadwiseError(f"{head.name} sees {n} places of the image, {shape}; pass grid=(rows, columns) of patches")
    patch_weights: NDArray[np.float64] = weights.mean(0)[before:].reshape(rows, columns)
    return patch_weights


def _pixels(image: Any) -> Any:
    """An image as matplotlib draws it, (rows, columns) or (rows, columns, 3), of numbers from 0 to 1."""
    if isinstance(image, str | Path):
        from matplotlib.image import imread

        try:
            image = imread(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise HeadwiseError(f"{image} cannot be read as an image: {error}") from None
    pixels = np.asarray(image.detach().cpu().float() if hasattr(image, "detach") else image, np.float64)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim not in (2, 3) or not pixels.size or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise HeadwiseError(f"an image is (rows, columns, 3) or (3, rows, columns), and this one is {pixels.shape}")
    pixels = pixels[..., :3] if pixels.ndim == 3 else pixels
    pixels = pixels - pixels.min()  # a copy: the image is the caller's
    return pixels / (pixels.max() or 1)
