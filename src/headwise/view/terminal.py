"""Heads in the terminal: their maps, small pictures side by side; and one head at one position, number by number.

A cell of a map is one of five shades.
"""

from __future__ import annotations

import math
import unicodedata

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from headwise.records import HeadMaps, HeadSteps, Vector
from headwise.table import Table
from headwise.view import Screen

# These four are round choices.
LARGEST_SIDE = 40  # cells in a row or column of a map; a longer text is drawn in blocks
LABEL_WIDTH = 13  # columns for the tokens at the left of the pictures
GAP = 3  # columns between two pictures

UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}  # categories of Unicode
JOINER = "\u200d"  # of two emoji, into one
SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}

# The weight from which each shade is used: a blank below 0.05, "░" from 0.05 to 0.2. The legend below the pictures
# gives these numbers, a round choice: close together among small weights, of which a row has most.
LEVELS = (0.0, 0.05, 0.2, 0.4, 0.7)
SHADES = " ░▒▓█"


def visible(token: str) -> str:
    """The token with each space, line break, tab and unseen character shown by a sign or by its code point."""
    text = ""
    for character in token:
        # The joiner (of Cf) and the variation selectors (Mn) hold emoji together; the rest of Cf turns or hides text.
        is_unseen = unicodedata.category(character) in UNSEEN and character != JOINER
        code = f"<U+{ord(character):04X}>" if is_unseen else character
        text += SIGNS.get(character, code)
    return text or "∅"


def block_maximum(weights: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Shrink (T, T) weights: each cell is the largest weight of a block of (size, size), less at the end.

    The maximum, not the mean, so that a thin diagonal stays as bright as it is.
    """
    starts = np.arange(0, len(weights), size)
    # the largest from each start to the next
    rows = np.maximum.reduceat(weights, starts, axis=0)
    return np.asarray(np.maximum.reduceat(rows, starts, axis=1), dtype=np.float32)


def print_maps(screen: Screen, maps: HeadMaps) -> None:
    """Draw every head's (T, T) map, as many side by side as the screen is wide.

    A text of more than 40 tokens, or wider than the screen, is drawn in blocks, each as bright as the largest weight
    in it, and a line says so.
    """
    count = len(maps.tokens)
    # columns for the pictures; 1 stands between them and the labels
    room = max(1, screen.width - LABEL_WIDTH - 1)
    size = math.ceil(count / min(LARGEST_SIDE, room))  # tokens of a cell
    pictures = [_picture(block_maximum(head.weights, size)) for head in maps.maps]
    # of a picture, below its name
    width = max(len(pictures[0][0]), *(len(head.name) for head in maps.maps))
    labels = _row_labels(maps, size)
    screen.say(
        f"{maps.model}: each row is a token that looks, each column a token looked at"
    )
    # the last picture in a row needs no gap
    across = max(1, (room + GAP) // (width + GAP))
    for start in range(0, len(pictures), across):
        names = [head.name for head in maps.maps[start : start + across]]
        rows = zip(labels, *pictures[start : start + across], strict=True)
        for label, *parts in ((" " * LABEL_WIDTH, *names), *rows):
            line = (" " * GAP).join(part.ljust(width) for part in parts)
            screen.print(Text(f"{label} {line}"), crop=True)
        screen.print("")
    if size > 1:
        screen.say(
            f"{count} tokens: each cell is a block of {size} x {size}, shown by its largest weight"
        )
    legend = [f"{s} from {level}" for s, level in zip(SHADES, LEVELS, strict=True)][1:]
    screen.say(", ".join([f"weight: blank below {LEVELS[1]}", *legend]))


def _row_labels(maps: HeadMaps, size: int) -> list[str]:
    """One label a line, LABEL_WIDTH columns wide: the tokens of its rows, or their numbers where rows are blocks."""
    labels = []
    for start in range(0, len(maps.tokens), size):
        tokens = maps.tokens[start : start + size]
        text = visible(tokens[0]) if size == 1 else f"{start}-{start + len(tokens) - 1}"
        if cell_len(text) > LABEL_WIDTH:
            text = set_cell_size(text, LABEL_WIDTH - 1) + "…"
        labels.append(" " * (LABEL_WIDTH - cell_len(text)) + text)
    return labels


def _picture(cells: NDArray[np.float32]) -> list[str]:
    """The lines of a map."""
    # The number of the last level that is not above a weight: 0.05 itself has shade 1.
    levels = (
        np.searchsorted(np.array(LEVELS, dtype=np.float32), cells, side="right") - 1
    )
    return ["".join(SHADES[level] for level in row) for row in levels]


FEATURES = 16  # numbers of a vector that are shown, at most: a round choice


def print_steps(screen: Screen, steps: HeadSteps) -> None:
    """The arithmetic of one head at one position, a table for each step; of a wide vector the first numbers."""
    tokens = [f"{place} {visible(token)}" for place, token in enumerate(steps.tokens)]
    keys = [(tokens[key.position], key) for key in steps.keys]
    place = f"{steps.name} at position {tokens[steps.at]}, which may look at {len(keys)} of {len(tokens)}"
    screen.say(f"{steps.model}: {place}. It reads key/value head {steps.kv_head}.\n")
    if steps.sharing:
        screen.say(
            f"Key/value head {steps.kv_head} is also read by head {', '.join(map(str, steps.sharing))}.\n"
        )
    query = {f"q of {tokens[steps.at]}": steps.query}
    _print_vectors(
        screen,
        "Query and keys",
        query | {f"k of {name}": key.key for name, key in keys},
    )
    if keys:
        _print_vectors(
            screen, "Values", {f"v of {name}": key.value for name, key in keys}
        )
    says = {"q.k": "dot", f"x {steps.scale:.4g}": "score"}
    if steps.softcap is not None:
        says[f"cap {steps.softcap:g}"] = "capped"
    says |= {"masked": "logit", "weight": "weight"}
    rows = [
        [name, *(_decimal(getattr(key, field)) for field in says.values())]
        for name, key in keys
    ]
    if steps.sink is not None and steps.sink_weight is not None:
        sink = _decimal(steps.sink), _decimal(steps.sink_weight)
        rows.append(["sink", *[""] * (len(says) - 2), *sink])
    Table(["", *says], rows, "Scores, and weights by a softmax").print(screen)
    gate = "" if steps.gate is None else f", times the gate {_decimal(steps.gate)}"
    _print_vectors(
        screen,
        f"Output: the values times their weights, summed{gate}",
        {"out": steps.out},
    )
    added = {
        f"head {h}, length {_decimal(norm)}": steps.added[h]
        for h, norm in enumerate(steps.norms)
    }
    bias = {} if steps.out_bias is None else {"b_O": steps.out_bias}
    _print_vectors(
        screen,
        "W_O: what each head adds, and the sum",
        added | bias | {"layer": steps.layer_out},
    )
    _print_vectors(
        screen,
        "Residual stream",
        {"x": steps.x, "layer": steps.layer_out, "x + layer": steps.x_new},
    )


def _print_vectors(screen: Screen, title: str, vectors: dict[str, Vector]) -> None:
    width = max(map(len, vectors.values()))
    more = f" (the first {FEATURES} of {width} numbers)" if width > FEATURES else ""
    rows = [
        [label, *map(_decimal, vector[:FEATURES])] for label, vector in vectors.items()
    ]
    Table(["", *map(str, range(min(width, FEATURES)))], rows, title + more).print(
        screen
    )


def _decimal(value: float) -> str:
    return f"{value:z.4f}"  # z: no zero has a sign
