"""One head at one position, number by number, in the terminal; the page of it is `page/walk.py`.

A reader who recomputes a line from the shown numbers above it gets the shown result, within what rounding to the stated
number of decimals explains.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from headwise.records import HeadSteps
from headwise.view.step_tables import GAP, Content, Table
from headwise.view.terminal import visible

WIDEST = 100  # columns in the terminal
LABEL_WIDTH = 18


def print_steps(console: Console, steps: HeadSteps, lang: str = "en") -> None:
    """Print every step, at most 100 columns wide; a wider table goes on in further bands below.

    Raises HeadwiseError for a language that is not en or es.
    """
    if console.options.ascii_only:
        plain = tuple(visible(token).encode("ascii", "backslashreplace").decode() for token in steps.tokens)
        steps = replace(steps, tokens=plain)
    content = Content(steps, lang)
    _say(console, content.heading, "bold")
    _say(console, content.say("lede"))
    for number, (title, parts) in enumerate(content.sections(), 1):
        _say(console, "")
        _say(console, f"{number}. {title}", "bold")
        for part in parts:
            if isinstance(part, Table):
                _print_table(console, part)
            elif isinstance(part, str):
                _say(console, part)
            else:
                _print_tokens(console, part)
    _say(console, "")
    _say(console, content.say("rounding"), "dim")


def _width(console: Console) -> int:
    return min(console.width, WIDEST)


def _say(console: Console, text: str, style: str = "") -> None:
    """A paragraph, wrapped here: the console may be one that does not wrap."""
    for line in Text(text).wrap(console, _width(console)) or [Text()]:
        _line(console, line.plain.rstrip(), style)


def _line(console: Console, text: str, style: str = "") -> None:
    text = _ascii(text) if console.options.ascii_only else text
    console.print(Text(text, style), highlight=False, markup=False, soft_wrap=True)


def _ascii(text: str) -> str:
    """This module's own signs and accents in ASCII; tokens are escaped before."""
    for sign, plain in {"√": "sqrt ", "·": ".", "→": ">", "…": "~", "²": "2"}.items():
        text = text.replace(sign, plain)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _print_tokens(console: Console, tokens: list[str]) -> None:
    line = ""
    for token in tokens:
        if line and cell_len(line) + cell_len(token) + 3 > _width(console):
            _line(console, line)
            line = ""
        line += ("   " if line else "") + token
    _line(console, line)


def _print_table(console: Console, table: Table) -> None:
    """Columns side by side as far as they fit, the others in further bands, each with the labels at its left."""
    labels = [row.label.rstrip() for row in table.rows]
    side = min(LABEL_WIDTH, max(map(cell_len, labels), default=0))
    labels = [label if cell_len(label) <= side else set_cell_size(label, side - 1) + GAP for label in labels]
    columns = list(zip(table.columns, *(row.cells for row in table.rows), strict=True))
    widths = [max(map(cell_len, column)) + 2 for column in columns]
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and side + 2 + sum(widths[start : end + 1]) <= _width(console):
            end += 1
        for at, label in enumerate(["", *labels]):
            cells = (" " * (w - cell_len(column[at])) + column[at] for column, w in zip(columns, widths, strict=True))
            strong = at > 0 and table.rows[at - 1].strong
            style = "bold" if strong else "" if at else "dim"
            _line(console, "  " + set_cell_size(label, side) + "".join(list(cells)[start:end]), style)
        start = end
