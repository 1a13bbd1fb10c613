"""`headwise bugs`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.app import (
    UNITS,
    check_outputs,
    command,
    err,
    needs_torch,
    out,
    print_json,
    units_kept_in,
    wants_json,
)
from headwise.cli.early import in_words, language
from headwise.files import write_whole

if TYPE_CHECKING:
    from headwise.teach.bugs import Bug
    from headwise.teach.study import Shown

FOLDER = Path("runs") / "bugs"
PAGE = Path("docs") / "bugs.md"


@command()
def bugs(
    bug: str | None = None,
    seeds: int = 3,
    steps: int = 400,
    folder: Path = FOLDER,
    html: Path | None = None,
    page: Path | None = None,
    workers: int | None = None,
    train: bool = False,
) -> None:
    """List the bugs that learners write, and what training hides.

    Without an ID the catalogue; with one, what that bug is and does. With --train or --html the verb model is trained
    with it and without; after Ctrl-C the same command goes on where it was. `all` trains all and writes docs/bugs.md.
    """
    from headwise.teach.bugs import bug_named, catalogue, words

    lang = language()
    words(lang)
    if bug is None:
        _list(catalogue().values(), lang)
        return
    names = list(catalogue()) if bug == "all" else [bug_named(bug).id]
    page = page or PAGE if bug == "all" else None
    check_outputs((), {"--out": (folder, UNITS)}, html=html, page=page)
    if not (train or html or bug == "all"):
        _tell(bug_named(bug), lang)
        return
    with needs_torch():
        from headwise.teach.study import study
    with units_kept_in(folder) as report:
        comparison, shown = study(names, folder, seeds, steps, workers or os.cpu_count() or 1, report, lang)
    _write(html, page, shown, seeds, steps, lang)
    if wants_json():
        compared = asdict(comparison) if comparison else None
        print_json("hidden", {"bugs": [asdict(entry) for entry in shown], "comparison": compared})
        return
    _print(shown, lang)
    for path in (html, page):
        if path is not None and path.exists():
            out.print(in_words("tell.written", path=path))


def _list(entries: Iterable[Bug], lang: str) -> None:
    from headwise.teach.bugs import words

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]} for entry in entries]})
    else:
        out.print("\n".join(f"{entry.id:<26} {entry.name(lang)}" for entry in entries))
        err.print("\n" + words(lang)["of_the_list"])


def _tell(entry: Bug, lang: str) -> None:
    from headwise.teach.bugs import words
    from headwise.view.bugs import bug_text

    if wants_json():
        print_json("bugs", {"bugs": [{"id": entry.id, **entry.texts[lang]}]})
        return
    out.print(bug_text(entry, lang))
    lack = words(lang)["untrained"].format(why=words(lang)[f"lacks_{entry.untrained}"]) if entry.untrained else ""
    err.print("\n" + (lack or words(lang)["to_train"].format(bug=entry.id)))


def _print(shown: Sequence[Shown], lang: str) -> None:
    from headwise.teach.bugs import bug_named
    from headwise.view.bugs import bug_text

    if len(shown) == 1:
        out.print(bug_text(bug_named(shown[0].bug), lang))
    out.print("\n".join(f"{entry.bug}: {entry.sentence}" for entry in shown))


def _write(html: Path | None, page: Path | None, shown: Sequence[Shown], seeds: int, steps: int, lang: str) -> None:
    """The page of maps of one bug, and the page of all."""
    from headwise.lab.compare.experiments import SHAPE
    from headwise.teach.bugs import bug_named, catalogue
    from headwise.teach.study import STEPS, trained_maps
    from headwise.view.bugs import bugs_page, maps_page

    if html is not None and len(shown) == 1 and shown[0].loss is not None:
        right, tokens = trained_maps(None, steps)
        wrong, _ = trained_maps(shown[0].bug, steps)
        text = maps_page(bug_named(shown[0].bug), shown[0], (right, wrong), tokens, SHAPE["n_heads"], lang)
        write_whole(html, text)
    if page is not None:
        command = "headwise bugs all" + (f" --steps {steps}" if steps != STEPS else "")
        setting = f"Seeds 0 to {seeds - 1}, {steps} steps each, the verb model without qk-norm."
        write_whole(page, bugs_page(shown, catalogue(), command, setting))
