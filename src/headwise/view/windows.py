"""How far each key/value head looks, as a table, a picture and a page."""

from __future__ import annotations

import math
from pathlib import Path
from string import Template

from rich.console import Console

from headwise.heads.reach import SHARES, SINKS, Windows
from headwise.markup import number
from headwise.table import Table, say
from headwise.view.page.assemble import json_block, package_text, page, word
from headwise.view.pictures import COLOURS, figure_class, write_figure
from headwise.words import phrase, said, sent

MOST_COLUMNS = 6  # windows in the table; the page and the files have all


def print_windows(console: Console, reach: Windows, sinks: int, lang: str = "en") -> None:
    """A row a head: mass outside each window, how far most of the mass reaches, the needle."""
    sizes = reach.windows[:-1]  # the longest drops nothing
    every = -(-len(sizes) // MOST_COLUMNS)
    shown = [n for n in range(len(sizes)) if n % every == 0]
    head = [phrase("windows.head", lang)]
    head += [phrase("windows.outside", lang, size=f"{sizes[n]:,}") for n in shown]
    head += [phrase("windows.within", lang, share=f"{100 * share:.0f}") for share in SHARES]
    head += [phrase("windows.needle", lang)]
    retrieves = " " + phrase("windows.retrieves", lang)
    rows: list[list[str]] = []
    for kv_head in reach.heads:
        outside = kv_head.outside[SINKS.index(sinks)]
        row = [kv_head.name]
        row += [number(outside[n].mean, 3) for n in shown]
        row += [f"{distance.mean:,.0f}" for distance in kv_head.reached]
        row += [number(kv_head.needle.mean, 2) + (retrieves if kv_head.retrieves else "")]
        rows.append(row)
    title = phrase("windows.table", lang, model=reach.model, sinks=sinks, documents=f"{reach.n_documents:,}")
    Table(head, rows, title).print(console, (0, len(head) - 1))
    for note in reach.notes:
        say(console, said(note, lang))
    if lifts := [f"{head.name} (x {math.exp(head.lift.mean):.0f})" for head in reach.heads if head.retrieves]:
        say(console, phrase("windows.lifts", lang, heads=", ".join(lifts)))


def windows_png(path: str | Path, reach: Windows, sinks: int) -> None:
    """Write a picture: a row a head, a column a window, darker where more mass lies outside."""
    new_figure = figure_class()
    from matplotlib.colors import LinearSegmentedColormap

    table = [[mass.mean for mass in head.outside[SINKS.index(sinks)]] for head in reach.heads]
    figure = new_figure(figsize=(2.5 + 0.7 * len(reach.windows), min(60, 1.4 + 0.26 * len(table))), facecolor="#fbfaf6")
    axes = figure.add_subplot()
    axes.imshow(table, cmap=LinearSegmentedColormap.from_list("mass", COLOURS), vmin=0, vmax=1, aspect="auto")
    axes.set_yticks(range(len(table)), [head.name + " *" * head.retrieves for head in reach.heads], fontsize=7)
    axes.set_xticks(range(len(reach.windows)), [f"{n:,}" for n in reach.windows], fontsize=7)
    axes.set_xlabel(f"window, beside the first {sinks} tokens; * finds needles", fontsize=8)
    axes.set_title(f"{reach.model}: mass outside", fontsize=9, parse_math=False)
    for row, masses in enumerate(table):
        for column, mass in enumerate(masses):
            colour = "white" if mass > 0.4 else "black"
            axes.text(column, row, f"{mass:.2f}", ha="center", va="center", fontsize=6, color=colour)
    figure.tight_layout()
    write_figure(path, figure)


def windows_html(reach: Windows, lang: str = "en") -> str:
    """The page: a map of heads and windows, for any number of first tokens."""
    document = reach.document() | {"notes": list(map(sent, reach.notes))}
    return page(
        "windows",
        Template(package_text("windows.html")).substitute(heading=word("windows.title", "h1", model=reach.model)),
        title=word("windows.title", "title", model=reach.model),
        styles=("windows.css",),
        script="windows.js",
        data={"reach": json_block(document)},
        words=("windows", "note"),
        lang=lang,
    )
