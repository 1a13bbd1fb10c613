"""`headwise bugs`: the catalogue in the terminal, maps with a bug and without."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.app import (
    UNITS,
    check_outputs,
    command,
    err,
    in_words,
    language,
    needs_torch,
    out,
    print_json,
    units_kept_in,
    wants_json,
)
from headwise.files import write_whole
from headwise.table import Markup, Table, escaped, picture
from headwise.words import phrase

if TYPE_CHECKING:
    from headwise.teach.bugs import Bug
    from headwise.teach.study import Shown

FOLDER = Path("runs") / "bugs"


@command()
def bugs(
    bug: str | None = None,
    seeds: int = 3,
    steps: int = 400,
    folder: Path = FOLDER,
    html: Path | None = None,
    workers: int | None = None,
    train: bool = False,
) -> None:
    """List the bugs that learners write, and what training hides.

    Without an ID the catalogue; with one, what that bug is and does. With --train or --html the verb model is trained
    with it and without; after Ctrl-C the same command goes on where it was. `all` trains all.
    """
    from headwise.teach.bugs import bug_named, catalogue, words

    lang = language()
    words(lang)
    if bug is None:
        _list(catalogue().values(), lang)
        return
    names = list(catalogue()) if bug == "all" else [bug_named(bug).id]
    check_outputs((), {"--out": (folder, UNITS)}, html=html)
    if not (train or html or bug == "all"):
        _tell(bug_named(bug), lang)
        return
    with needs_torch():
        from headwise.teach.study import study
    with units_kept_in(folder) as report:
        comparison, shown = study(names, folder, seeds, steps, workers or os.cpu_count() or 1, report, lang)
    written = html is not None and len(shown) == 1 and shown[0].loss is not None
    if html is not None and written:
        _write_maps(html, shown[0], steps, lang)
    if wants_json():
        print_json("hidden", {"bugs": shown, "comparison": comparison})
        return
    if len(shown) == 1:
        out.print(bug_text(bug_named(shown[0].bug), lang))
    out.print("\n".join(f"{entry.bug}: {entry.sentence}" for entry in shown))
    if written:
        out.print(in_words("tell.written", path=html))


def _list(entries: Iterable[Bug], lang: str) -> None:
    from headwise.teach.bugs import words

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]} for entry in entries]})
    else:
        out.print("\n".join(f"{entry.id:<26} {entry.name(lang)}" for entry in entries))
        err.print("\n" + words(lang)["of_the_list"])


def _tell(entry: Bug, lang: str) -> None:
    from headwise.teach.bugs import words

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]}]})
        return
    out.print(bug_text(entry, lang))
    lack = words(lang)["untrained"].format(why=words(lang)[f"lacks_{entry.untrained}"]) if entry.untrained else ""
    err.print("\n" + (lack or words(lang)["to_train"].format(bug=entry.id)))


def _write_maps(path: Path, shown: Shown, steps: int, lang: str) -> None:
    """The page of the maps with a bug and without."""
    from headwise.lab.experiments import SHAPE
    from headwise.teach.bugs import bug_named
    from headwise.teach.study import trained_maps

    right, tokens = trained_maps(None, steps)
    wrong, _ = trained_maps(shown.bug, steps)
    write_whole(path, maps_page(bug_named(shown.bug), shown, (right, wrong), tokens, SHAPE["n_heads"], lang))


def bug_text(bug: Any, lang: str) -> str:
    """What the catalogue says of one bug."""
    parts = [f"{bug.name(lang)} ({bug.id})", *(bug.text(what, lang) for what in ("wrong", "symptom", "how", "fix"))]
    return "\n  ".join(parts)


def maps_page(bug: Any, shown: Any, maps: tuple[Any, Any], tokens: Sequence[str], n_heads: int, lang: str) -> str:
    """The maps of every head, without the bug and with it, side by side."""
    from headwise.view.page import page

    rows = []
    for index, pair in enumerate(zip(*maps, strict=True)):
        name = f"L{index // n_heads}.H{index % n_heads}"
        # The page's policy allows no style in an element; the sheet has it.
        drawn = (picture(weights.tolist(), f"{name}: {' '.join(tokens)}", 132) for weights in pair)
        pictures = [Markup(re.sub(' style="[^"]*"', "", image)) for image in drawn]
        rows.append((name, *pictures))
    words = "".join(f"<p>{escaped(bug.text(what, lang))}</p>" for what in ("wrong", "symptom", "fix"))
    body = f"<main><h1>{escaped(bug.name(lang))}</h1>{words}<p><b>{escaped(shown.sentence)}.</b></p>"
    heads = (phrase("bugs.head", lang), phrase("bugs.correct", lang), bug.id)
    body += f"<p>{escaped(' '.join(tokens))}</p>{Table(heads, rows).html()}</main>"
    return page("bugs", body, title=bug.name(lang), styles=("bugs.css",), lang=lang)
