"""Heads in the terminal: their maps, small pictures side by side; and one head at one position, number by number.

Where there are colours a character of a map holds two cells, one above the other (a half block). Without colours, for
example in a pipe, a cell is one of five shades.

A reader who recomputes a line of the numbers from those shown above it gets the shown result, within what rounding to
the stated number of decimals explains. The page of them is the guided walk (`walk_html` in `page.py`).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from headwise.records import HeadMaps, HeadSteps, KeySteps
from headwise.table import Cell, Table
from headwise.view import Screen
from headwise.words import phrase

# These four are round choices.
LARGEST_SIDE = 40  # cells in a row or column of a map; a longer text is drawn in blocks
LABEL_WIDTH = 13  # columns for the tokens at the left of the pictures
GAP = 3  # columns between two pictures

JOINER = "\u200d"  # of two emoji, into one
SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}

# The weight from which each shade is used: a blank below 0.05, "░" from 0.05 to 0.2. The legend below the pictures
# gives these numbers, a round choice: close together among small weights, of which a row has most.
LEVELS = (0.0, 0.05, 0.2, 0.4, 0.7)
SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"
# Red, green and blue of weights 0, 1/3, 2/3 and 1; between them colours are mixed.
RAMP = np.array([[29, 29, 39], [63, 75, 147], [197, 111, 134], [255, 231, 168]], dtype=np.float64)


def visible(token: str) -> str:
    """The token with each space, line break, tab and unseen character shown by a sign or by its code point."""
    return "".join(map(_visible_character, token)) or "∅"


def _visible_character(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    # The joiner (of Cf) and the variation selectors (Mn) hold an emoji together; the rest of Cf turns or hides text.
    is_unseen = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"} and character != JOINER
    return f"<U+{ord(character):04X}>" if is_unseen else character


def block_maximum(weights: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Shrink (T, T) weights: each cell is the largest weight of a block of (size, size), less at the end.

    The maximum, not the mean, so that a thin diagonal stays as bright as it is.
    """
    starts = np.arange(0, len(weights), size)
    rows = np.maximum.reduceat(weights, starts, axis=0)  # the largest from each start to the next
    return np.asarray(np.maximum.reduceat(rows, starts, axis=1), dtype=np.float32)


def print_maps(screen: Screen, maps: HeadMaps) -> None:
    """Draw every head's (T, T) map, as many side by side as the screen is wide.

    A text of more than 40 tokens, or wider than the screen, is drawn in blocks, each as bright as the largest weight
    in it, and a line says so.
    """
    count = len(maps.tokens)
    room = max(1, screen.width - LABEL_WIDTH - 1)  # columns for the pictures; 1 stands between them and the labels
    size = math.ceil(count / min(LARGEST_SIDE, room))  # tokens of a cell
    shades = _shades(screen)
    pictures = [_picture(block_maximum(head.weights, size), shades) for head in maps.maps]
    width = max(pictures[0][0].cell_len, *(len(head.name) for head in maps.maps))  # of a picture, below its name
    # In colours a line holds two rows of cells, so a label stands for two.
    labels = Text("\n".join(_row_labels(maps, size, 1 if shades else 2, screen.options.ascii_only)))
    screen.say(f"{maps.model}: each row is a token that looks, each column a token looked at")
    across = max(1, (room + GAP) // (width + GAP))  # the last picture in a row needs no gap
    for start in range(0, len(pictures), across):
        # Of each column its width, a name and below it a picture; the labels of the rows come first, without a name.
        columns = [(LABEL_WIDTH + 1, Text(), labels)]
        for head, picture in list(zip(maps.maps, pictures, strict=True))[start : start + across]:
            columns.append((width + GAP, Text(head.name), Text("\n").join(picture)))
        columns[-1] = (width, *columns[-1][1:])  # no gap behind the last one
        grid = Grid.grid()
        widths, names, drawn = zip(*columns, strict=True)
        for column in widths:
            grid.add_column(width=column, no_wrap=True, overflow="crop")
        grid.add_row(*names)
        grid.add_row(*drawn)
        screen.print(grid, "", crop=True)  # "": an empty line below
    if size > 1:
        screen.say(f"{count} tokens: each cell is a block of {size} x {size}, shown by its largest weight")
    screen.print(_legend(screen, shades), highlight=False, markup=False)


def _shades(screen: Screen) -> str:
    """The characters of a map, one for each of LEVELS; none where it is drawn in colours."""
    if screen.options.ascii_only:
        return ASCII_SHADES
    enough = screen.color_system in ("256", "truecolor")  # sixteen cannot make a ramp: there the shades say more
    return "" if screen.is_terminal and enough and not screen.no_color else SHADES


def _row_labels(maps: HeadMaps, size: int, rows_per_line: int, ascii_only: bool) -> list[str]:
    """One label a line, LABEL_WIDTH columns wide: the tokens of its rows, or their numbers where rows are blocks."""
    step = size * rows_per_line
    labels = []
    for start in range(0, len(maps.tokens), step):
        tokens = maps.tokens[start : start + step]
        text = " ".join(map(visible, tokens)) if size == 1 else f"{start}-{start + len(tokens) - 1}"
        if ascii_only:
            text = text.encode("ascii", "backslashreplace").decode()
        if cell_len(text) > LABEL_WIDTH:
            text = set_cell_size(text, LABEL_WIDTH - 1) + ("~" if ascii_only else "…")
        labels.append(" " * (LABEL_WIDTH - cell_len(text)) + text)
    return labels


def _picture(cells: NDArray[np.float32], shades: str) -> list[Text]:
    """The lines of a map; without shades two rows of cells a line, in colours."""
    if not shades:
        return [_half_blocks(cells[row : row + 2]) for row in range(0, len(cells), 2)]
    # The number of the last level that is not above a weight: 0.05 itself has shade 1.
    levels = np.searchsorted(np.array(LEVELS, dtype=np.float32), cells, side="right") - 1
    return [Text("".join(shades[level] for level in row)) for row in levels]


def _half_blocks(pair: NDArray[np.float32]) -> Text:
    """Two rows of cells in one line; an odd last row keeps the terminal's own background below it."""
    line = Text()
    for above, *below in pair.T:
        # The upper half of the character is drawn in its colour, the lower half in that of its background.
        line.append("▀", Style(color=_colour(above), bgcolor=_colour(below[0]) if below else None))
    return line


def _colour(weight: float) -> Color:
    """The colour of a weight, mixed of its two neighbours on `RAMP`."""
    place = np.linspace(0.0, 1.0, len(RAMP))
    red, green, blue = (round(float(np.interp(weight, place, RAMP[:, channel]))) for channel in range(3))
    return Color.from_triplet(ColorTriplet(red, green, blue))


def _legend(screen: Screen, shades: str) -> Text:
    """What colours or shades stand for."""
    if not shades:
        line = Text("weight 0 ")
        for weight in np.linspace(0.0, 1.0, 21):  # a ramp 21 characters long, in steps of 0.05
            line.append("█", Style(color=_colour(float(weight))))
        return line.append(" 1")
    parts = [f"weight: blank below {LEVELS[1]}"]
    for shade, level in zip(shades[1:], LEVELS[1:], strict=True):
        parts.append(f"{shade} from {level}")
    return Text(", ".join(parts))


# One head at one position, number by number.

ALL_SHOWN = 16  # features of a vector that are all shown; of more, eight are, and the rest is summed up
LEFT_OUT = "…"  # stands for features that are not shown
NONE = "-"  # stands where a table has no number
WIDEST = 100  # columns in the terminal, at most, however wide it is; a round choice
WIDEST_LABEL = 18  # columns of the labels at the left of a table; a longer one is cut; more leave numbers less room
TOTALS = {"softmax", "weighted", "gated", "added", "residual"}  # titles of tables whose last line sums up

Part = str | Table | list[str]  # a paragraph, a table, the tokens of the text
Parts = list[Part]
Section = tuple[str, Parts]  # a title, and what stands below it


def decimals_for(steps: HeadSteps) -> int:
    """4, or as many, up to 8, as the largest number of every group of numbers needs to show three digits.

    So the numbers of all tables have the same decimals, and no table is all zeros.
    """
    # Most other numbers are of the size of these, as gains and scores are, or not all small, as cosines and weights.
    groups = [steps.summed, steps.out, steps.layer_out, steps.x, *steps.added, chain(*steps.wo)]
    groups += [chain(*(key.value for key in steps.keys)), *(key.products for key in steps.keys)]
    for stages in (steps.query, *(key.stages for key in steps.keys)):
        groups += [stage.values for stage in stages]
    largest = [max(map(abs, group), default=0.0) for group in groups]
    smallest = min(filter(None, largest), default=1.0)  # a group of zeros needs no digits
    return min(8, max(4, math.ceil(2 - math.log10(smallest))))  # 0.0123 has three digits at 4 decimals


class Features:
    """Which numbers of a vector are shown: all of up to 16; of more the first and the last four, or four pairs."""

    def __init__(self, width: int, pairs: Sequence[tuple[int, int]] = ()) -> None:
        """RoPE rotates `pairs`: of a wide vector four whole pairs are shown, no feature without its partner."""
        self.width = width
        if width <= ALL_SHOWN:
            self.shown = list(range(width))
        elif pairs:
            self.shown = sorted(chain(*pairs[:4]))
        else:
            self.shown = [*range(4), *range(width - 4, width)]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """The shown values, with a sign in each gap between them."""
        cells: list[Any] = []
        # From one shown place to the next: -1 stands before the first feature, the width behind the last.
        for before, place in pairwise([-1, *self.shown, self.width]):
            if place > before + 1:
                cells.append(LEFT_OUT)
            cells += values[place : place + 1]  # none at the end, where no value stands
        return cells

    def names(self) -> list[str]:
        return list(map(str, self.spread(range(self.width))))

    def summed(self, values: Sequence[float], terms: Sequence[float], total: float) -> list[Cell]:
        """The shown values, then `sums`."""
        return [*(values[place] for place in self.shown), *self.sums(terms, total)]

    def sums(self, terms: Sequence[float], total: float) -> list[Cell]:
        """What the terms of features that are not shown make, where there are such, and what all terms make."""
        hidden = [term for place, term in enumerate(terms) if place not in self.shown]
        return [math.fsum(hidden), total] if hidden else [total]


class Content:
    """The sections of a trace, in one language. A trace is the arithmetic of one head at one position."""

    def __init__(self, steps: HeadSteps, lang: str) -> None:
        self.steps, self.lang, self.decimals = steps, lang, decimals_for(steps)
        # What is shown of queries and keys, of values, and of the residual stream.
        self.features = Features(len(steps.query[0].values), steps.pairs)
        self.values = Features(len(steps.out))
        self.width = Features(len(steps.x))
        self.tokens = tuple(map(visible, steps.tokens))

    def say(self, key: str, /, **facts: object) -> str:
        """A phrase of [trace] of the words with its facts; those that many phrases share need not be given."""
        steps = self.steps
        shared = {"at": steps.at, "model": steps.model, "layer": steps.layer, "number": steps.head}
        return phrase(f"trace.{key}", self.lang, **shared | {"kv": steps.kv_head, "decimals": self.decimals} | facts)

    def number(self, cell: Cell) -> str:
        """A cell as it is shown; no zero has a sign."""
        if not isinstance(cell, float):
            return str(cell)
        text = f"{cell:.{self.decimals}f}"
        return text.lstrip("-") if float(text) == 0 else text

    def sections(self) -> list[Section]:
        parts = {
            "text": self._text(),
            "vectors": self._vectors(),
            "products": self._products(),
            "scores": self._scores(),
            "softmax": self._softmax(),
            "values": self._values(),
            "output": self._output(),
            "residual": self._residual(),
        }
        return [(self.say(name), contents) for name, contents in parts.items()]

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
        """A table of text. Its title is `name`, in every language: it is not printed, and `TOTALS` asks for it."""
        return Table(columns, [list(map(self.number, row)) for row in rows], name)

    def _some(self, features: Features) -> Parts:
        """A line that says so where not all features are shown."""
        count = len(features.shown)
        return [self.say("some_features", width=features.width, shown=count)] if count < features.width else []

    def _sums(self, features: Features, rest: str, total: str) -> list[str]:
        """The headings of `Features.sums`."""
        return [self.say(rest), total] if len(features.shown) < features.width else [total]

    def _summed(self, features: Features, rest: str, total: str) -> list[str]:
        """The headings of `Features.summed`."""
        return [*map(str, features.shown), *self._sums(features, rest, total)]

    def _keys(self, label: str, cells: Callable[[KeySteps], Sequence[Cell]]) -> list[list[Cell]]:
        """A line for each key that may be seen; of position 3 and token "he" the label "k{0}" makes "k3 he"."""
        lines: list[list[Cell]] = []
        for key in self.steps.keys:
            lines.append([f"{label.format(key.position)} {self.tokens[key.position]}", *cells(key)])
        return lines

    def _text(self) -> Parts:
        """The tokens with their positions; what the mask hides stands in brackets."""
        seen = {key.position for key in self.steps.keys}
        tokens = []
        for place, token in enumerate(self.tokens):
            numbered = f"→{place} {token}" if place == self.steps.at else f"{place} {token}"
            tokens.append(numbered if place in seen else f"({numbered})")
        asked = self.say("asked", seen=len(seen), count=len(tokens))
        return [asked, tokens, self.say("legend_hidden" if len(seen) < len(tokens) else "legend")]

    def _vectors(self) -> Parts:
        """The query and the keys, stage by stage: projected, then normed and rotated where the layer does that."""
        steps, features = self.steps, self.features
        parts: Parts = [self.say("query_is" if steps.keys else "nothing")]  # a mask may hide all keys
        if steps.sharing:  # other query heads that read the same key/value head
            parts.append(self.say("shared", heads=", ".join(map(str, sorted((steps.head, *steps.sharing))))))
        parts += self._some(features)
        for n, stage in enumerate(steps.query):
            if stage.kind == "normed":
                # `or ()` is for the type checker: a layer that norms has both gains.
                gains = [[self.say("gain_q"), *features.spread(steps.q_gain or ())]]
                gains.append([self.say("gain_k"), *features.spread(steps.k_gain or ())])
                parts.append(self.say("normed", width=features.width, eps=steps.norm_eps))
                parts.append(self._table("gains", features.names(), gains))
            elif stage.kind == "turned":
                pairs = [pair for pair in steps.pairs if pair[0] in features.shown]
                parts += [self.say("turned", pairs=", ".join(map(str, pairs))), self._angles(n, len(pairs))]
            elif len(steps.query) > 1:  # a first stage that others follow; alone, it needs no name
                parts.append(self.say("projected"))
            parts.append(self._stage(n))
        return parts

    def _angles(self, n: int, n_pairs: int) -> Table:
        """Cosine and sine of each shown pair at stage n, a line a position."""
        stages = {self.steps.at: self.steps.query[n]}
        for key in self.steps.keys:
            stages[key.position] = key.stages[n]
        rows = []
        for position, stage in sorted(stages.items()):
            angles = [*(stage.cos or ())[:n_pairs], *(stage.sin or ())[:n_pairs]]  # a rotated stage has both
            rows.append([f"{position} {self.tokens[position]}", *angles])
        return self._table("angles", [f"{name}{m}" for name in ("cos", "sin") for m in range(n_pairs)], rows)

    def _stage(self, n: int) -> Table:
        """The query and the shown keys as they are at one stage.

        A table of normed vectors also lets the reader recompute the root mean square r by which a vector of the stage
        before was divided. The squares of the features that are shown follow from the table above; those of the
        features that are not shown stand here, summed up, and then r.
        """
        columns = self.features.names()
        vectors = [("q", self.steps.at, self.steps.query)]  # a label, a position, the stages
        vectors += [(f"k{key.position}", key.position, key.stages) for key in self.steps.keys]
        rows = []
        for sign, position, stages in vectors:
            cells = self.features.spread(stages[n].values)
            if (rms := stages[n].rms) is not None:  # a normed stage, never the first: it has one before it
                cells += self.features.sums([value * value for value in stages[n - 1].values], rms)
            rows.append([f"{sign} {self.tokens[position]}", *cells])
        kind = self.steps.query[n].kind
        if kind == "normed":
            columns += self._sums(self.features, "rest_squares", "r")
        return self._table(kind, columns, rows)

    def _products(self) -> Parts:
        """q_d * k_d, feature by feature, and the dot product of each key."""
        rows = self._keys("k{0}", lambda key: self.features.summed(key.products, key.products, key.dot))
        return [self.say("products_are"), self._table("products", self._summed(self.features, "rest", "q·k"), rows)]

    def _scores(self) -> Parts:
        """From the dot product to the logit that the softmax reads: scale, softcap, bias."""
        steps = self.steps
        fields = ["score"] if steps.softcap is None else ["score", "capped"]  # of `KeySteps`, a column each
        biased = any(key.bias for key in steps.keys)
        # Without a bias the last of them is the logit, and is called so.
        fields = [*fields, "bias", "logit"] if biased else [*fields[:-1], "logit"]
        words = list(map(self.say, fields))
        width = self.features.width
        # The usual scale, 1/sqrt(width), is said as such; another as a number.
        scaled = "scaled" if math.isclose(steps.scale, 1 / math.sqrt(width)) else "scaled_by"
        parts = [self.say(scaled, name=words[0], width=width, scale=self.number(steps.scale))]
        if steps.softcap is not None:
            parts.append(self.say("softcap", name=words[1], cap=f"{steps.softcap:g}"))
        if biased:
            parts.append(self.say("bias_is", before=words[-3]))  # the column to which the bias is added
        return [*parts, self._table("scores", ["q·k", *words], self._keys("k{0}", attrgetter("dot", *fields)))]

    def _softmax(self) -> Parts:
        """Each logit less the largest one, its exponential, its weight; a sink has a line as a key has."""
        steps = self.steps
        rows = self._keys("k{0}", attrgetter("logit", "shifted", "exp", "weight"))
        weights = math.fsum(key.weight for key in steps.keys)
        parts = [self.say("softmax_is", top=self.number(steps.top))]
        if steps.sink is not None and steps.sink_weight is not None:
            parts.append(self.say("sink_is", sink=self.number(steps.sink), left=self.number(weights)))
            rows.append([self.say("sink"), steps.sink, steps.sink - steps.top, steps.sink_exp, steps.sink_weight])
            weights += steps.sink_weight
        rows.append([self.say("total"), NONE, NONE, steps.total, weights])
        columns = [self.say("logit"), self.say("shifted"), "exp", self.say("weight")]
        return [*parts, self._table("softmax", columns, rows)]

    def _values(self) -> Parts:
        """The values, the values times their weights, and their sum; times the gate where there is one."""
        steps, features = self.steps, self.values
        columns = features.names()
        values = self._keys("v{0}", lambda key: features.spread(key.value))
        rows = self._keys("w{0} v{0}", lambda key: features.spread(key.weighted))
        rows.append([self.say("sum"), *features.spread(steps.summed)])
        parts = [*self._some(features), self.say("values_are"), self._table("values", columns, values)]
        parts += [self.say("weighted_are"), self._table("weighted", columns, rows)]
        if steps.gate is not None:
            gated = [[self.say("sum"), *features.spread(steps.out)]]
            parts += [self.say("gate_is", gate=self.number(steps.gate)), self._table("gated", columns, gated)]
        return parts

    def _output(self) -> Parts:
        """W_O line by line; then what each head adds, the bias, and the layer's output, with their lengths.

        With e over the features of a value and c over those of the residual stream:

            c      W_O[c, e] for each e shown   sum over the other e of W_O[c, e] out[e]   what the head adds at c
            head   added[c] for each c shown    sum over the other c of added[c] squared   length of added
        """
        steps = self.steps
        block = []
        for c in self.width.shown:
            products = [weight * out for weight, out in zip(steps.wo[c], steps.out, strict=True)]
            block.append([f"c={c}", *self.values.summed(steps.wo[c], products, steps.added[steps.head][c])])
        lines = {}  # a label, and the vector of its line
        for h, added in enumerate(steps.added):
            name = self.say("head", number=h)
            lines[f"→{name}" if h == steps.head else name] = added
        if steps.out_bias is not None:
            lines["b_O"] = steps.out_bias
        lines[self.say("layer_out")] = steps.layer_out
        rows = []
        for label, values in lines.items():
            squares = [value * value for value in values]
            rows.append([label, *self.width.summed(values, squares, math.sqrt(math.fsum(squares)))])
        wo_columns = self._summed(self.values, "rest", self.say("added"))
        parts = [*self._some(self.width), self.say("wo_is"), self._table("wo", wo_columns, block)]
        added_columns = self._summed(self.width, "rest_squares", "|·|")
        return [*parts, self.say("added_are"), self._table("added", added_columns, rows)]

    def _residual(self) -> Parts:
        """The stream before the layer, what the layer gives, and their sum."""
        steps = self.steps
        lines = {"before": steps.x, "layer_out": steps.layer_out, "new": steps.x_new}
        rows = [[self.say(name), *self.width.spread(values)] for name, values in lines.items()]
        rows[1][0] = f"+ {rows[1][0]}"  # what the layer gives is added
        return [self.say("residual_is"), self._table("residual", self.width.names(), rows)]


def print_steps(screen: Screen, steps: HeadSteps) -> None:
    """Print every step, at most 100 columns wide; a wider table goes on in further bands below."""
    if screen.options.ascii_only:
        plain = tuple(visible(token).encode("ascii", "backslashreplace").decode() for token in steps.tokens)
        steps = replace(steps, tokens=plain)
    content = Content(steps, "en")
    _paragraph(screen, content.say("heading", head=steps.name, token=content.tokens[steps.at]), "bold")
    _paragraph(screen, content.say("lede"))
    for number_of_section, (title, parts) in enumerate(content.sections(), 1):
        _line(screen, "")
        _paragraph(screen, f"{number_of_section}. {title}", "bold")
        for part in parts:
            if isinstance(part, Table):
                _print_table(screen, part)
            elif isinstance(part, str):
                _paragraph(screen, part)
            else:  # a list
                _print_tokens(screen, part)
    _line(screen, "")
    _paragraph(screen, content.say("rounding"), "dim")


def _width(screen: Screen) -> int:
    return min(screen.width, WIDEST)


def _paragraph(screen: Screen, text: str, style: str = "") -> None:
    """A paragraph, wrapped here: the screen may be one that does not wrap."""
    for line in Text(text).wrap(screen, _width(screen)):
        _line(screen, line.plain.rstrip(), style)


def _line(screen: Screen, text: str, style: str = "") -> None:
    if screen.options.ascii_only:  # this module's own signs and accents; tokens are escaped before
        for sign, plain in {"√": "sqrt ", "·": ".", "→": ">", "…": "~", "²": "2"}.items():
            text = text.replace(sign, plain)
        # NFKD takes é apart into e and an accent, which is then dropped.
        text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    screen.print(Text(text, style), highlight=False, markup=False, soft_wrap=True)


def _print_tokens(screen: Screen, tokens: list[str]) -> None:
    """Tokens with three spaces between them; none is broken at the end of a line."""
    line = ""
    for token in tokens:
        if line and cell_len(line) + cell_len(token) + 3 > _width(screen):
            _line(screen, line)
            line = ""
        line += ("   " if line else "") + token
    _line(screen, line)


def _print_table(screen: Screen, table: Table) -> None:
    """Columns side by side as far as they fit, the others in further bands, each with the labels at its left."""
    # Lines become columns: first the labels, which have no heading, then the others, each with its heading first.
    labels, *columns = zip(["", *table.columns], *table.rows, strict=True)
    labels = tuple(label.rstrip() for label in labels)
    side = min(WIDEST_LABEL, max(map(cell_len, labels)))
    widths = [max(map(cell_len, column)) + 2 for column in columns]  # with two spaces before it
    styles = {0: "dim"}  # line 0 has the headings
    if table.title in TOTALS:
        styles[len(labels) - 1] = "bold"  # the last line
    start = 0
    while start < len(columns):
        end = start + 1  # a band has one column at least, however wide; the 2 below is the indent of the line
        while end < len(columns) and side + 2 + sum(widths[start : end + 1]) <= _width(screen):
            end += 1
        for at, label in enumerate(labels):
            if cell_len(label) > side:
                label = set_cell_size(label, side - 1) + LEFT_OUT
            line = set_cell_size(label, side)
            for width, column in zip(widths[start:end], columns[start:end], strict=True):
                line += " " * (width - cell_len(column[at])) + column[at]
            _line(screen, f"  {line}", styles.get(at, ""))
        start = end
