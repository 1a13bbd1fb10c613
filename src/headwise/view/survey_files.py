"""A survey as comma-separated values, and as a picture."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwise.heads.frame import survey_rows
from headwise.heads.profiles import Role, Survey
from headwise.view.figure import figure_class, write_figure
from headwise.view.survey_data import shares_of
from headwise.view.survey_words import badges_of, earners

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The picture, in cells of a mosaic: a thumbnail, and around it room for its name and roles.
SIDE, GAP, LABEL = 32, 4, 15
INCHES = 0.95  # of a thumbnail with its gap
LONGEST = 60.0  # inches of a side; a larger model is drawn smaller
COLOURS = ("#f3efe5", "#7da6c4", "#2f5590", "#151038")  # of weight 0 to 1, as in the report


def survey_csv(survey: Survey) -> str:
    """One line a head; empty for what was not measured or is not finite; columns as in `survey_rows`."""
    return rows_csv(survey_rows(survey))


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as comma-separated values."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.7g}" if isinstance(value, float) else value for key, value in row.items()})
    return file.getvalue()


def survey_png(path: str | Path, survey: Survey) -> None:
    """Write a picture of every head, a row of pictures a layer, with names and the letters of its roles.

    Raises HeadwiseError where matplotlib is missing; a file is written whole or not at all.
    """
    new_figure = figure_class()
    from matplotlib.colors import LinearSegmentedColormap

    mosaic, places = _mosaic(survey)
    tall, wide = (size / (SIDE + GAP) * INCHES for size in mosaic.shape)
    shrink = min(1.0, LONGEST / max(tall, wide))
    earned = [role for role in survey.roles if earners(survey)[role.name]]
    legend = 0.8 + 0.2 * len(earned)
    figure = new_figure(figsize=(max(wide * shrink, 5.0), tall * shrink + legend), facecolor="#fbfaf6")
    height = tall * shrink / (tall * shrink + legend)
    axes = figure.add_axes((0.02, 0.0, 0.96, height))
    colours = LinearSegmentedColormap.from_list("weights", COLOURS)
    axes.imshow(np.ma.masked_invalid(mosaic), cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    axes.set_axis_off()
    axes.set_anchor("NW")
    _write_names(axes, survey, places, 6.5 * shrink)
    _write_legend(figure, survey, earned)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in letters that the font lacks
        write_figure(path, figure)


def _mosaic(survey: Survey) -> tuple[NDArray[np.float64], dict[str, tuple[int, int]]]:
    """All thumbnails in one array, nan between them, and the top left corner of each."""
    pictures = shares_of(survey)
    parts = list(dict.fromkeys(profile.part for profile in survey.profiles))
    layers = sorted({(parts.index(profile.part), profile.layer) for profile in survey.profiles})
    across = 1 + max(profile.head for profile in survey.profiles)
    mosaic = np.full((len(layers) * (SIDE + LABEL), across * (SIDE + GAP)), np.nan)
    places = {}
    for profile in survey.profiles:
        row = layers.index((parts.index(profile.part), profile.layer)) * (SIDE + LABEL)
        column = profile.head * (SIDE + GAP)
        shares = pictures[profile.name][0]
        cells = np.ix_(*(np.arange(SIDE) * size // SIDE for size in shares.shape))  # any size as SIDE x SIDE
        mosaic[row : row + SIDE, column : column + SIDE] = shares[cells]
        places[profile.name] = row, column
    return mosaic, places


def _write_names(axes: Axes, survey: Survey, places: dict[str, tuple[int, int]], size: float) -> None:
    badges = badges_of(survey.roles)
    for profile in survey.profiles:
        row, column = places[profile.name]
        letters = " ".join(badges[role].letter for role in profile.roles)
        axes.text(column, row + SIDE + 1, profile.name, fontsize=size, va="top", parse_math=False)
        axes.text(column, row + SIDE + 7, letters, fontsize=size, va="top", weight="bold", color="#2f5590")


def _write_legend(figure: Figure, survey: Survey, earned: Sequence[Role]) -> None:
    """The model, and what the letters stand for, above the pictures."""
    inch, badges = 1 / figure.get_figheight(), badges_of(survey.roles)
    figure.text(0.02, 1 - 0.15 * inch, survey.model, fontsize=13, va="top", parse_math=False)
    for place, role in enumerate(earned):
        line = f"{badges[role.name].letter}  {role.name}: {role.meaning}"
        figure.text(0.02, 1 - (0.5 + 0.2 * place) * inch, line, fontsize=7.5, va="top", parse_math=False)
