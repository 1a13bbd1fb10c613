"""Tables and paragraphs in the terminal, on which a narrow console cuts no digit and drops no column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

WORDS = 10  # columns of the console that a column of words keeps, however narrow the console is


def say(console: Console, line: str) -> None:
    """A paragraph as it is: brackets are no markup, numbers get no colour. A terminal wraps it between words."""
    console.print(Text(line), highlight=False, markup=False, soft_wrap=console.soft_wrap and not console.is_terminal)


def print_table(
    console: Console,
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Iterable[int] = (0,),
    last: int = 0,
) -> None:
    """A table whose first column names its rows.

    Columns that do not fit go on in a further table below, behind the first column again. Numbers are never broken;
    headings and the columns that `words` lists may wrap. The `last` rows stand below a line.
    """
    cells = [list(row) for row in rows]
    lefts = set(words)
    columns = [[heading, *(row[place] for row in cells)] for place, heading in enumerate(head)]
    wide = [max(map(cell_len, column)) for column in columns]
    least = [_least(column, place in lefts) for place, column in enumerate(columns)]
    fits = sum(wide) + 2 * len(wide) <= console.width
    gap = 2 if fits else 1  # between two columns
    beside = console.width - 2 - sum(least[1:]) - gap * (len(least) - 1)  # where all columns stand in one table
    first = wide[0] if fits else min(wide[0], max(least[0], console.width // 3, beside))
    start = 1
    while start < len(columns) or start == 1:
        end, room = start, console.width - first - 2
        while end < len(columns) and (end == start or sum(least[start : end + 1]) + gap * (end + 1 - start) <= room):
            end += 1
        widths = _spread(wide[start:end], least[start:end], room - gap * (end - start))
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_header=any(head))
        if title:
            grid.title, grid.title_justify = Text(title if start == 1 else f"{title}, continued"), "left"
        for place, width in ((0, first), *zip(range(start, end), widths, strict=True)):
            justify = "left" if place in lefts else "right"
            grid.add_column(Text(head[place]), justify=justify, width=max(1, width), overflow="fold")  # type: ignore
        for number, row in enumerate(cells):
            if last and number == len(cells) - last:
                grid.add_section()
            grid.add_row(*(Text(row[place]) for place in (0, *range(start, end))))
        console.print(grid)
        start = max(end, 2)


def _least(column: list[str], is_words: bool) -> int:
    """The narrowest that a column may be: its longest number, or the longest word of its heading."""
    heading = max((cell_len(word) for word in column[0].split()), default=0)
    longest = max((cell_len(cell) for cell in column[1:]), default=0)
    return max(heading, min(longest, WORDS) if is_words else longest)


def _spread(wide: list[int], least: list[int], room: int) -> list[int]:
    """What each column gets: its least, and from the left what is still free up to all that it can use."""
    free = room - sum(least)
    widths = []
    for full, small in zip(wide, least, strict=True):
        more = max(0, min(full - small, free))
        widths.append(small + more)
        free -= more
    return widths
