"""Heads in the terminal: their maps, small pictures side by side; and one head at one position, number by number.

A cell of a map is one of five shades.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from headwise.records import HeadMaps, HeadSteps, Vector
from headwise.table import Table
from headwise.view import Screen

# These four are round choices.
LARGEST_SIDE = 40  # tokens in a row or column of a map, at most
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


def print_maps(screen: Screen, maps: HeadMaps) -> None:
    """Draw every head's (T, T) map, as many side by side as the screen is wide.

    Of a text of more than 40 tokens, or wider than the screen, the first are drawn, and a line says so.
    """
    count = len(maps.tokens)
    # columns for the pictures; 1 stands between them and the labels
    room = max(1, screen.width - LABEL_WIDTH - 1)
    side = min(LARGEST_SIDE, room, count)  # tokens that are drawn
    # the name of a head, and the lines of its map
    pictures = [
        [head.name, *_picture(head.weights[:side, :side])] for head in maps.maps
    ]
    # of a picture, below its name
    width = max(side, *(len(head.name) for head in maps.maps))
    labels = [""]  # that of the line with the names
    for token in map(visible, maps.tokens[:side]):
        is_long = cell_len(token) > LABEL_WIDTH
        label = set_cell_size(token, LABEL_WIDTH - 1) + "…" if is_long else token
        labels.append(label)
    screen.say(
        f"{maps.model}: each row is a token that looks, each column a token looked at"
    )
    # the last picture in a row needs no gap
    across = max(1, (room + GAP) // (width + GAP))
    for start in range(0, len(pictures), across):
        for label, *parts in zip(
            labels, *pictures[start : start + across], strict=True
        ):
            line = (" " * GAP).join(part.ljust(width) for part in parts)
            space = " " * (LABEL_WIDTH - cell_len(label))
            screen.print(Text(f"{space}{label} {line}"), crop=True)
        screen.print("")
    if side < count:
        screen.say(f"the first {side} of {count} tokens")
    legend = [f"{s} from {level}" for s, level in zip(SHADES, LEVELS, strict=True)][1:]
    screen.say(", ".join([f"weight: blank below {LEVELS[1]}", *legend]))


def _picture(cells: NDArray[np.float32]) -> list[str]:
    """The lines of a map."""
    # The number of the last level that is not above a weight: 0.05 itself has shade 1.
    levels = np.digitize(cells, np.array(LEVELS, np.float32)) - 1
    return ["".join(SHADES[level] for level in row) for row in levels]


FEATURES = 16  # numbers of a vector that are shown, at most: a round choice


def print_steps(screen: Screen, steps: HeadSteps) -> None:
    """The arithmetic of one head at one position, a table for each step; of a wide vector the first numbers."""
    tokens = [f"{place} {visible(token)}" for place, token in enumerate(steps.tokens)]
    keys = [(tokens[key.position], key) for key in steps.keys]
    asking = tokens[steps.at]
    place = f"{steps.name} at position {asking}, which may look at {len(keys)} of {len(tokens)}"
    others = ", ".join(map(str, steps.sharing))
    readers = f", as does head {others}" if others else ""
    screen.say(
        f"{steps.model}: {place}. It reads key/value head {steps.kv_head}{readers}.\n"
    )

    def vectors(title: str, rows: dict[str, Vector]) -> None:
        width = max(map(len, rows.values()))
        more = f" (the first {FEATURES} of {width} numbers)" if width > FEATURES else ""
        numbers = [[name, *map(_decimal, row[:FEATURES])] for name, row in rows.items()]
        features = map(str, range(min(width, FEATURES)))
        Table(["", *features], numbers, title + more).print(screen)

    query = {f"q of {asking}": steps.query}
    vectors("Query and keys", query | {f"k of {name}": key.key for name, key in keys})
    if keys:
        vectors("Values", {f"v of {name}": key.value for name, key in keys})
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
    out = f"Output: the values times their weights, summed{gate}"
    vectors(out, {"out": steps.out})
    added = {
        f"head {h}, length {_decimal(norm)}": steps.added[h]
        for h, norm in enumerate(steps.norms)
    }
    bias = {} if steps.out_bias is None else {"b_O": steps.out_bias}
    layer = {"layer": steps.layer_out}
    vectors("W_O: what each head adds, and the sum", added | bias | layer)
    stream = {"x": steps.x} | layer | {"x + layer": steps.x_new}
    vectors("Residual stream", stream)


def _decimal(value: float) -> str:
    return f"{value:z.4f}"  # z: no zero has a sign
