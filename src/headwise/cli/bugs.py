"""`headwise bugs`."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.app import Debug, Json, Progress, app, check_outputs, err, needs_torch, out, print_json
from headwise.files import write_whole

FOLDER = Path("runs") / "bugs"
PAGE = Path("docs") / "bugs.md"


@app.command(epilog="Example: headwise bugs join-no-transpose --html maps.html")
def bugs(
    bug: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A bug; or all, which trains them all. Default: the list.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each model, at least 3.")] = 3,
    steps: Annotated[int, typer.Option(help="Training steps for each model.")] = 400,
    folder: Annotated[Path, typer.Option("--out", help="Folder that keeps finished work.")] = FOLDER,
    html: Annotated[Path | None, typer.Option(help="Write the maps with and without the bug to this file.")] = None,
    page: Annotated[Path | None, typer.Option(help=f"With all: write the page to this file. Default: {PAGE}.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes. Default: one for each core.")] = None,
    lang: Annotated[str, typer.Option(help="Language of the catalogue: en or es.")] = "en",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the bugs that learners write, and show what training hides of them.

    Without an ID the catalogue; with one, that bug in the verb model, trained with it and without. After Ctrl-C the
    same command goes on where it was. `all` trains them all and writes docs/bugs.md.
    """
    from headwise.teach.catalogue import bug_named, catalogue, words
    from headwise.view.bugs import bug_text

    words(lang)
    if bug is None:
        if as_json:
            print_json({"bugs": [{"id": entry.id, **entry.texts[lang]} for entry in catalogue().values()]})
        else:
            out.print("\n".join(f"{entry.id:<26} {entry.name(lang)}" for entry in catalogue().values()))
        return
    if bug != "all":
        bug_named(bug)
    if bug == "all":
        page = page or PAGE
    check_outputs(html=html, page=page)
    with needs_torch():
        from headwise.teach import study
    try:
        with Progress() as progress:
            comparison, shown = study.study(
                list(catalogue()) if bug == "all" else [bug], folder, seeds, steps, workers or os.cpu_count() or 1,
                lambda text, done, total: progress("unit", done, total, text, milestone=True),
            )  # fmt: skip
    except KeyboardInterrupt:
        err.print(f"finished units are kept in {folder}; the same command goes on from there", soft_wrap=True)
        raise
    if html is not None and bug != "all" and shown[0].loss is not None:
        _write_maps(html, bug, shown[0], steps, lang)
    if page is not None:
        from headwise.view.bugs import bugs_page

        extra = f" --steps {steps}" if steps != study.STEPS else ""
        command = shlex.join(["headwise", "bugs", "all"]) + extra
        setting = f"Seeds 0 to {seeds - 1}, {steps} steps each, the verb model without qk-norm."
        write_whole(page, bugs_page(shown, catalogue(), command, setting))
    if as_json:
        print_json(
            {"bugs": [asdict(entry) for entry in shown], "comparison": asdict(comparison) if comparison else None}
        )
        return
    if bug != "all":
        out.print(bug_text(bug_named(bug), lang))
    out.print("\n".join(f"{entry.bug}: {entry.sentence}" for entry in shown))
    for path in (html, page):
        if path is not None and path.exists():
            out.print(f"written: {path}")


def _write_maps(path: Path, bug: str, shown: Any, steps: int, lang: str) -> None:
    from headwise.lab.compare.experiments import SHAPE
    from headwise.teach.catalogue import bug_named
    from headwise.teach.study import trained_maps
    from headwise.view.bugs import maps_page

    right, tokens = trained_maps(None, steps)
    wrong, _ = trained_maps(bug, steps)
    write_whole(path, maps_page(bug_named(bug), shown, (right, wrong), tokens, SHAPE["n_heads"], lang))
