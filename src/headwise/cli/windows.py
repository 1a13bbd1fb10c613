"""`headwise windows`: how far each key/value head looks, as a table, a picture and a page."""

from __future__ import annotations

import math
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from rich.console import Console

from headwise.cli.app import (
    Progress,
    as_options,
    command,
    err,
    in_words,
    language,
    needs_torch,
    out,
    print_json,
    running_options,
    wants_json,
)
from headwise.cli.early import check_model, check_texts
from headwise.cli.heads import check_tables, tell_files, write_tables
from headwise.families import check_next
from headwise.files import is_stream, write_whole
from headwise.table import Table, number, say
from headwise.words import phrase, refusal, said, sent

if TYPE_CHECKING:
    from headwise.plan import Windows

MOST_COLUMNS = 6  # windows in the table; the page and the files have all


@command()
def windows(
    model: Path,
    text: list[str] | None = None,
    tokens: int | None = None,
    documents: int = 32,
    sinks: int = 4,
    plan: Path | None = None,
    tolerance: float | None = None,
    cache: float | None = None,
    html: Path | None = None,
    out_files: list[Path] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Measure how far back key/value heads look: what to remember."""
    from headwise.plan import check_plan

    if plan is None and (tolerance, cache) != (None, None):
        raise refusal("plan_needed")
    check_plan(tolerance, cache, sinks)
    check_tables(out_files or [])
    form = None if plan is None else _format_of(plan)
    check_model(model)
    check_next(model, "next_by_distance")
    check_texts(model, text)
    with needs_torch():
        from headwise.heads.texts import read_texts
        from headwise.heads.windows import forecast
        from headwise.heads.windows import windows as measure
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    with Progress("reading the text") as progress:
        read = read_texts(folder, text or None, tokens, documents)
        if line := forecast(folder.model, read):
            err.print(as_options(said(line, language()), running_options()), soft_wrap=True)
        reach = measure(folder.model, read, seed=seed, progress=progress)
    chosen = None if plan is None else reach.plan(tolerance, cache, sinks)
    if plan is not None and chosen is not None and form is not None:
        chosen.export(plan, form)
    if html is not None:
        write_whole(html, windows_html(reach, language()))
    write_tables(out_files or [], reach.rows(), lambda path: windows_png(path, reach, sinks))
    share = None if chosen is None else chosen.share(reach.longest)
    if wants_json():
        print_json("windows", {**reach.document(), "plan": None if plan is None else str(plan), "share": share})
        return
    print_windows(out, reach, sinks, language())
    if chosen is not None:
        full = sum(layer.count(None) for layer in chosen.keep)
        facts = {"full": full, "count": len(reach.heads), "share": f"{share:.3f}", "tokens": f"{reach.longest:,}"}
        out.print(in_words("windows.plan", plan=plan, **facts))
        if full == len(reach.heads):
            out.print(in_words("windows.nothing_saved"))
        else:
            out.print(in_words("windows.try_it", model=model, plan=plan))
    tell_files(out_files or [], page=html)


def _format_of(plan: Path) -> str:
    """How a plan is written there: as a file of ours, or as a folder of DuoAttention, whose name has no suffix."""
    if is_stream(plan) or plan.suffix == ".json":
        return "headwise"
    if plan.suffix or plan.is_file():
        raise refusal("plan_name", path=plan)
    return "duo"


def print_windows(console: Console, reach: Windows, sinks: int, lang: str = "en") -> None:
    """A row a head: mass outside each window, how far most of the mass reaches, the needle."""
    from headwise.plan import SHARES, SINKS

    sizes = reach.windows[:-1]  # the longest drops nothing
    every = -(-len(sizes) // MOST_COLUMNS)
    shown = [n for n in range(len(sizes)) if n % every == 0]
    head = [phrase("windows.head", lang)]
    head += [phrase("windows.outside", lang, size=f"{sizes[n]:,}") for n in shown]
    head += [phrase("windows.within", lang, share=f"{100 * share:.0f}") for share in SHARES]
    head += [phrase("windows.needle", lang)]
    retrieves = " " + phrase("windows.retrieves", lang)
    rows = []
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
    from headwise.plan import SINKS
    from headwise.view.pictures import COLOURS, figure_class, write_figure

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
    from headwise.view.page import json_block, package_text, page, word

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
