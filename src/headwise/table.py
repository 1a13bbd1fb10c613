"""A table of words and numbers, and its ways out: the terminal, a notebook, comma-separated values.

On a narrow console no digit is cut and no column dropped. `rich` is loaded only where something is printed. First stand
the pieces of HTML and of plain sentences that every package writes alike: escaping, numbers.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.errors import HeadwiseError
from headwise.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

MISSING = "\u2013"  # an en dash
# units of bytes, each 1024 of the one before
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# of operations, each 1000 of the one before
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def escaped(text: str) -> str:
    """Safe in an element or a quoted attribute; half a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    # names of files may hold such halves
    return html.escape(text.encode("utf-8", "replace").decode())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: list[str], most: int) -> str:
    """The first names in a row, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def number(value: float | None, decimals: int, signed: bool = False) -> str:
    """A number for a column; a dash for what is not finite or was not measured. No zero has a sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = round(value, decimals) or 0.0  # -0.0 becomes 0.0
    sign = "+" if signed and rounded else ""
    # the minus of typography is as wide as a plus
    return f"{rounded:{sign},.{decimals}f}".replace("-", "\u2212")


def scaled(value: float, base: int, units: Sequence[str]) -> str:
    """A number with the unit that fits it, three digits: `scaled(327680, 1024, BINARY)` is `320 KiB`."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    # which would write 1,000 as 1e+03
    digits = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {units[power]}".rstrip()


def amount(size: float) -> str:
    """Bytes, with the unit that fits them."""
    return scaled(size, 1024, BINARY)


Cell = str | int | float | None
# Begin a cell that a spreadsheet may run as a formula; the last four are the full-width forms of the first.
FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def say(console: Console, line: str) -> None:
    """A paragraph as it is: brackets are no markup, numbers get no colour. A terminal wraps it between words."""
    from rich.text import Text

    # soft_wrap leaves a line whole, which a console may ask for and a terminal does not get.
    console.print(
        Text(line),
        highlight=False,
        markup=False,
        soft_wrap=console.soft_wrap and not console.is_terminal,
    )


def shown(cell: Cell) -> str:
    """A cell as text: whole numbers in full, others to three digits, nothing for None."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


@dataclass(frozen=True)
class Table:
    """Rows of cells under their headings; the first column names the rows.

    In its methods `left` lists the columns of words by their number from 0: they stand at the left and may wrap, and
    numbers stand at the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""  # said below the table

    @staticmethod
    def of(rows: Sequence[Mapping[str, Any]]) -> Table:
        """Of rows with the same keys, which are the columns."""
        return Table(list(rows[0]), [list(row.values()) for row in rows])

    def csv(self) -> str:
        """Comma-separated values; floats have seven digits, and None is empty.

        A text that a spreadsheet would run begins with `'`: names of relations, models and heads come from others.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        for row in (self.columns, *self.rows):
            writer.writerow(map(_value, row))
        return file.getvalue()

    def html(self) -> str:
        """An HTML table, without title and note."""
        columns = "".join(
            f'<th scope="col">{_html(cell)}</th>' for cell in self.columns
        )
        lines = [f"<table><thead><tr>{columns}</tr></thead><tbody>"]
        for first, *cells in self.rows:
            values = "".join(f"<td>{_html(cell)}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{_html(first)}</th>{values}</tr>')
        return f"{''.join(lines)}</tbody></table>"

    _repr_html_ = html  # in a notebook

    def text(self, width: int = 100) -> str:
        """What `print` prints on a console of that width, in characters."""
        from rich.console import Console

        file = io.StringIO()
        self.print(Console(file=file, width=width))
        return file.getvalue()

    def print(
        self, console: Console, left: Iterable[int] = (0,), last: int = 0
    ) -> None:
        """Columns that do not fit go on in a further table below, behind the first column again.

        Such a table is a band of columns. The box takes one place at either edge, which the 2 below stand for:

            edge, first column, gap, column, gap, column, ..., edge

        left  the columns of words, which stand at the left; numbers stand at the right, and are never broken
        last  so many rows at the end stand below a line, such as sums
        """
        from rich import box
        from rich.cells import cell_len
        from rich.table import Table as Grid
        from rich.text import Text

        cells = [[shown(cell) for cell in row] for row in self.rows]
        columns = list(zip(self.columns, *cells, strict=True))
        lefts = set(left)
        # `cell_len` is a text's width on a console, where a Chinese character takes two places.
        widths = [max(map(cell_len, column)) for column in columns]
        gap = 2
        if sum(widths) + 2 * len(widths) > console.width:
            gap = 1
            # words and headings are broken, numbers never
            for place, (heading, *column) in enumerate(columns):
                longest = max(map(cell_len, column), default=0)
                if place in lefts:
                    longest = min(longest, console.width // 3)
                widths[place] = max(longest, *map(cell_len, heading.split() or [""]))
        # for the gaps and the other columns of a band
        free = console.width - widths[0] - 2
        bands = list[list[int]]()
        used = free
        for place in range(1, len(columns)):
            used += gap + widths[place]
            if used > free:
                bands.append([])
                used = gap + widths[place]
            bands[-1].append(place)
        for number, places in enumerate(bands):
            # The box itself sets one place between columns, and the padding adds the rest of the gap.
            grid = Grid(
                box=box.SIMPLE_HEAD,
                padding=(0, gap - 1, 0, 0),
                pad_edge=False,
                show_header=any(self.columns),
            )
            if self.title:
                grid.title = Text(self.title + (", continued" if number else ""))
                grid.title_justify = "left"
            for place in (0, *places):
                side: Literal["left", "right"] = "left" if place in lefts else "right"
                # A column of empty cells is 0 wide, and keeps one place.
                grid.add_column(
                    Text(columns[place][0]),
                    justify=side,
                    width=max(1, widths[place]),
                    overflow="fold",
                )
            for n, row in enumerate(cells):
                if last and n == len(cells) - last:
                    grid.add_section()
                grid.add_row(*(Text(row[place]) for place in (0, *places)))
            console.print(grid)
        if self.note:
            say(console, self.note)


def _value(cell: Cell) -> Cell:
    if isinstance(cell, str) and cell.startswith(FORMULAS):
        return f"'{cell}"
    return f"{cell:.7g}" if isinstance(cell, float) else cell  # the digits of a float32


def _html(cell: Cell) -> str:
    return escaped(shown(cell))


def figure_class() -> type[Figure]:
    """The class of matplotlib's figures. Raises HeadwiseError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HeadwiseError(
            "a picture needs matplotlib: pip install 'headwise[all]'"
        ) from None
    return Figure


def head_figure(
    values: Mapping[str, Interval | float], title: str, n: int | None = None
) -> Figure:
    """Numbers of heads as a figure of matplotlib: a line a layer, red above 0 and blue below.

    With n: the n largest by size, as bars with their intervals.
    """
    means = {}
    reach = {}  # from the mean to the bounds
    for name, value in values.items():
        means[name] = value.mean if isinstance(value, Interval) else value
        reach[name] = 0.0
        if isinstance(value, Interval) and math.isfinite(value.high):
            reach[name] = value.high - value.mean
    if n is not None:
        names = sorted(means, key=lambda name: -abs(means[name]))[:n]
        figure = figure_class()(figsize=(5, 0.6 + 0.25 * len(names)), layout="tight")
        axes = figure.add_subplot()
        axes.barh(
            names, [means[name] for name in names], xerr=[reach[name] for name in names]
        )
        axes.invert_yaxis()
    else:
        layers: dict[str, list[float]] = {}
        for name, mean in means.items():
            layers.setdefault(name.rpartition(".")[0], []).append(mean)
        across = max(map(len, layers.values()))
        grid = [row + [math.nan] * (across - len(row)) for row in layers.values()]
        size = (1.8 + 0.35 * across, 1 + 0.3 * len(layers))  # inches
        figure = figure_class()(figsize=size, layout="tight")
        axes = figure.add_subplot()
        most = max((abs(mean) for mean in means.values() if mean == mean), default=0)
        drawn = axes.imshow(grid, cmap="RdBu_r", vmin=-(most or 1), vmax=most or 1)
        axes.set_yticks(range(len(layers)), list(layers))
        axes.set_xticks(range(across))
        figure.colorbar(drawn)
    axes.set_title(title, fontsize=9)
    return figure
