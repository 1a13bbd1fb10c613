"""Head maps in the terminal: small pictures side by side.

Where there are colours a character holds two cells, one above the other (a half block). Without colours, for
example in a pipe, a cell is one of five shades.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from headwise.records import HeadMaps
from headwise.table import say
from headwise.words import phrase

LARGEST_SIDE = 40  # cells; a longer text is drawn in blocks
LABEL_WIDTH = 13
GAP = 3  # columns between two pictures

SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}

# The first level is "less than the second number"; few levels, so the numbers are printed under the pictures.
LEVELS = (0.0, 0.05, 0.2, 0.4, 0.7)
SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"
RAMP = np.array([[29, 29, 39], [63, 75, 147], [197, 111, 134], [255, 231, 168]], dtype=np.float64)


def visible(token: str) -> str:
    """The token with each space, line break, tab and unseen character shown by a sign or by its code point."""
    return "".join(map(_visible_character, token)) or "∅"


def _visible_character(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    # The joiner and the variation selectors (Mn) hold an emoji together; the rest of Cf turns or hides text.
    if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"} and character != "\u200d":
        return f"<U+{ord(character):04X}>"
    return character


def block_maximum(weights: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Shrink (T, T) weights to at most (side, side): each cell is the largest weight in its block.

    The maximum, not the mean, so that a thin diagonal stays as bright as it is.
    """
    starts = np.arange(0, len(weights), -(-len(weights) // side))
    rows = np.maximum.reduceat(weights, starts, axis=0)
    return np.asarray(np.maximum.reduceat(rows, starts, axis=1), dtype=np.float32)


def print_maps(console: Console, maps: HeadMaps, lang: str = "en") -> None:
    """Draw every head's (T, T) map, as many side by side as the console is wide.

    A text of more than 40 tokens, or wider than the console, is drawn in blocks, each as bright as the largest weight
    in it, and a line says so.
    """
    count = len(maps.tokens)
    labelled = console.width >= 2 * LABEL_WIDTH
    room = console.width - (LABEL_WIDTH + 1 if labelled else 0)
    size = -(-count // max(1, min(count, LARGEST_SIDE, room)))
    coloured = _has_colours(console)
    pictures = [_picture(console, block_maximum(head.weights, -(-count // size)), coloured) for head in maps.maps]
    width = max(pictures[0][0].cell_len, *(len(head.name) for head in maps.maps))
    labels = Text("\n".join(_row_labels(maps, size, 2 if coloured else 1, console.options.ascii_only)))
    say(console, phrase("survey.maps", lang, model=maps.model))
    across = max(1, (room + GAP) // (width + GAP))
    for start in range(0, len(pictures), across):
        band = slice(start, start + across)
        grid = Table.grid()
        for column in (LABEL_WIDTH + 1,) * labelled + (width + GAP,) * (len(pictures[band]) - 1) + (width,):
            grid.add_column(width=column, no_wrap=True, overflow="crop")
        grid.add_row(*[""] * labelled, *(Text(head.name) for head in maps.maps[band]))
        grid.add_row(*[labels] * labelled, *(Text("\n").join(picture) for picture in pictures[band]))
        console.print(grid, "", crop=True)
    if size > 1:
        say(console, phrase("survey.blocks", lang, count=count, size=size))
    console.print(_legend(console, coloured, lang), highlight=False, markup=False)


def _has_colours(console: Console) -> bool:
    """Sixteen colours cannot make a ramp; there the shades say more."""
    enough = console.color_system in ("256", "truecolor")
    return console.is_terminal and enough and not console.no_color and not console.options.ascii_only


def _row_labels(maps: HeadMaps, size: int, rows_per_line: int, ascii_only: bool) -> list[str]:
    """One label a line, LABEL_WIDTH columns wide: the tokens of its rows, or their numbers where rows are blocks."""
    step = size * rows_per_line
    labels = []
    for start in range(0, len(maps.tokens), step):
        stop = min(start + step, len(maps.tokens))
        text = " ".join(map(visible, maps.tokens[start:stop])) if size == 1 else f"{start}-{stop - 1}"
        if ascii_only:
            text = text.encode("ascii", "backslashreplace").decode()
        if cell_len(text) > LABEL_WIDTH:
            text = set_cell_size(text, LABEL_WIDTH - 1) + ("~" if ascii_only else "…")
        labels.append(" " * (LABEL_WIDTH - cell_len(text)) + text)
    return labels


def _picture(console: Console, cells: NDArray[np.float32], coloured: bool) -> list[Text]:
    if coloured:
        return [_half_blocks(cells[row : row + 2]) for row in range(0, len(cells), 2)]
    shades = ASCII_SHADES if console.options.ascii_only else SHADES
    levels = np.searchsorted(np.array(LEVELS, dtype=np.float32), cells, side="right") - 1
    return [Text("".join(shades[level] for level in row)) for row in levels]


def _half_blocks(pair: NDArray[np.float32]) -> Text:
    """Two rows of cells in one line; an odd last row keeps the terminal's own background below it."""
    line = Text()
    for column in pair.T:
        below = _colour(column[1]) if len(column) == 2 else None
        line.append("▀", Style(color=_colour(column[0]), bgcolor=below))
    return line


def _colour(weight: float) -> Color:
    place = np.linspace(0.0, 1.0, len(RAMP))
    red, green, blue = (round(float(np.interp(weight, place, RAMP[:, channel]))) for channel in range(3))
    return Color.from_triplet(ColorTriplet(red, green, blue))


def _legend(console: Console, coloured: bool, lang: str) -> Text:
    if coloured:
        line = Text(f"{phrase('survey.weight', lang)} 0 ")
        for weight in np.linspace(0.0, 1.0, 21):
            line.append("█", Style(color=_colour(float(weight))))
        return line.append(" 1")
    shades = ASCII_SHADES if console.options.ascii_only else SHADES
    steps = zip(shades[1:], LEVELS[1:], strict=True)
    parts = [phrase("survey.from", lang, shade=shade, level=level) for shade, level in steps]
    return Text(", ".join([phrase("survey.blank", lang, level=LEVELS[1]), *parts]))
