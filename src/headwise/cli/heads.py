"""`headwise heads`, and the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import Debug, Json, Run, app, needs_torch, out, print_json
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.records import HeadMaps


@app.command(epilog='Example: headwise heads runs/verbs --text "he will work = él trabajará"')
def heads(
    run: Run,
    text: Annotated[str | None, typer.Option(help="A short text; default: a held-out one of the run.")] = None,
    html: Annotated[Path | None, typer.Option(help="Where the report goes; default: report.html in RUN.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where each head looks, in the terminal and in one HTML file.

    The report in RUN is written anew, with the maps of this text.
    """
    maps = _head_maps(run, text)
    path = _write_maps(run, maps, html)
    from headwise.view.terminal import head_facts, print_maps, print_table

    if as_json:
        from dataclasses import asdict

        rows = [{**asdict(head_facts(head)), "weights": head.weights.tolist()} for head in maps.maps]
        print_json({"model": maps.model, "tokens": maps.tokens, "heads": rows, "report": str(path)})
        return
    print_maps(out, maps)
    print_table(out, maps)
    out.print(f"\nreport: {path}")


def _head_maps(run: Path, text: str | None) -> HeadMaps:
    with needs_torch():
        from headwise.heads.maps import head_maps
        from headwise.model.run import load_run, read_run
    model, tokens = load_run(run)
    if text is None:
        text = (read_run(run) or {}).get("example")
    if not text:
        raise HeadwiseError("the text is empty; pass one with --text")
    ids = tokens.prompt(text)
    return head_maps(model, ids, tokens.shown(ids), run.resolve().name)


def _write_maps(run: Path, maps: HeadMaps, path: Path | None = None) -> Path:
    from headwise.model.run import read_summary
    from headwise.view.report import write_report

    path = path or run / "report.html"
    if path.is_dir():
        raise HeadwiseError(f"--html {path} is a folder; pass a file name")
    if not path.parent.is_dir():
        raise HeadwiseError(f"--html {path}: the folder {path.parent} does not exist")
    write_report(path, maps, read_summary(run))
    return path


def write_report_of(run: Path, text: str) -> Path:
    return _write_maps(run, _head_maps(run, text))
