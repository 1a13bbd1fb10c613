"""`headwise heads`, and the report of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import Debug, Json, Progress, app, needs_torch, out, print_json
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.heads.profiles import Survey
    from headwise.heads.survey import Text
    from headwise.models.open import Folder
    from headwise.records import HeadMaps

HELD_OUT = 4096  # tokens of what a run held out, where no text is given
ABLATE_UP_TO = 10_000_000  # parameters; a larger model is ablated when asked for: it takes a pass for each head
MAP_CELLS = 2**20  # numbers of exact maps that go into a report
REPORT = "report.html"

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A run of `headwise train`, or a model folder in Hugging Face layout.")
]


@dataclass(frozen=True)
class _Choices:
    """What was asked for, for one model or two."""

    text: tuple[str, ...]
    ids: Path | None
    tokens: int | None
    documents: int | None
    ablate: str | None
    controls: bool
    seed: int


@app.command(
    epilog="Example: headwise heads runs/verbs, or headwise heads MODEL --text book.txt --tokens 512 --html r.html"
)
def heads(
    model: Model,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file, a folder of text files, or a text. You may repeat it. Default: what the run held out."
        ),
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(help="A file of token ids instead of a text, one document per line.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Cut the text into documents of this many tokens.")] = None,
    documents: Annotated[int | None, typer.Option(help="Stop after this many documents.")] = None,
    ablate: Annotated[
        str | None,
        typer.Option(
            help="Remove one head at a time and measure the change in loss: zero, mean or none. "
            "Default: zero for models of up to 10 million parameters."
        ),
    ] = None,
    controls: Annotated[bool, typer.Option(help="Also measure the same model with untrained weights.")] = True,
    sort: Annotated[
        str, typer.Option(help="Order of the table: name, importance, ablation or a statistic, such as entropy.")
    ] = "name",
    against: Annotated[Path | None, typer.Option(metavar="OTHER", help="Compare with another model.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report to this file. Default: report.html in the run folder."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of all heads to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for the untrained control and the repeated tokens.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each head of a model does: statistics, roles, and what breaks without it."""
    for option, path in (("--html", html), ("--png", png), ("--csv", csv)):
        _check_target(option, path)
    choices = _Choices(tuple(text or ()), ids, tokens, documents, ablate, controls, seed)
    _check_choices(choices)
    for folder in (model, against):
        if folder is not None and not folder.is_dir():
            raise HeadwiseError(f"{folder} is no folder; pass a run folder or a model in Hugging Face layout")
    from headwise.heads.statistics import all_statistics
    from headwise.view.survey_files import survey_csv, survey_json, survey_png
    from headwise.view.survey_table import check_order, print_survey

    check_order(all_statistics(), sort)
    survey, maps = look(model, choices)
    other = None if against is None else _compared(model, against, choices)
    # The report in a run tells of the run: a look at another text goes where --html says.
    own = (model / "run.json").exists() and not choices.text and ids is None and controls and other is None
    report = html or (model / REPORT if own else None)
    if report is not None:
        _write_report(model, report, survey, maps, other)
    if csv is not None:
        from headwise.files import write_whole

        write_whole(csv, survey_csv(survey))
    if png is not None:
        survey_png(png, survey)
    if as_json:
        document = survey_json(survey)
        if other is not None:
            document["against"] = survey_json(other)
        print_json({**document, "report": None if report is None else str(report)})
        return
    if maps is not None and len(maps.maps) <= 16:
        from headwise.view.terminal import print_maps

        print_maps(out, maps)
    print_survey(out, survey, sort_by=sort, against=other)
    for what, path in (("report", report), ("picture", png), ("table", csv)):
        if path is not None:
            out.print(f"{what}: {path}")


def _compared(model: Path, against: Path, choices: _Choices) -> Survey:
    """The survey of the other model; where one was made from the other, heads have the names of their counterparts."""
    from headwise.models.lineage import counterparts

    other, pairs = look(against, choices, on=model)[0], counterparts(model, against)
    return other if pairs is None else other.renamed(pairs)


def look(model: Path, choices: _Choices, on: Path | None = None) -> tuple[Survey, HeadMaps | None]:
    """The survey of a model folder; and exact maps, where there is one short document.

    `on` names the run whose held-out text is looked at where no text is given; default `model` itself.
    """
    with needs_torch():
        from headwise.heads.maps import LONGEST, head_maps
        from headwise.heads.survey import survey
        from headwise.models.open import open_folder
    folder = open_folder(model)
    text = _text(folder, choices, on or model)
    size = sum(parameter.numel() for parameter in folder.model.parameters())
    ablate = choices.ablate or ("zero" if size <= ABLATE_UP_TO else "none")
    with Progress() as progress:
        found = survey(
            folder.model,
            text,
            folder.name,
            folder.family,
            context=folder.context,
            controls=choices.controls,
            ablate=None if ablate == "none" else ablate,
            seed=choices.seed,
            progress=progress,
        )
    if not choices.text and choices.ids is None and found.loss is not None and _on_verbs(on or model):
        from headwise.gpt.verbs import WHOLE_LINES

        found = replace(found, notes=(*found.notes, WHOLE_LINES))
    first = text.documents[0]
    plain = all(profile.part == "" for profile in found.profiles)
    if not plain or len(text.documents) > 1 or len(first) > LONGEST:
        return found, None
    if len(first) ** 2 * len(found.profiles) > MAP_CELLS:
        return found, None
    return found, head_maps(folder.model, first, text.shown(first), folder.name)


def _text(folder: Folder, choices: _Choices, run: Path) -> Text:
    from headwise.gpt.run import held_out_documents, read_run
    from headwise.heads.survey import Text
    from headwise.heads.texts import read_documents, read_ids
    from headwise.models.lineage import run_of

    if choices.ids is not None:
        return read_ids(folder, choices.ids, choices.documents)
    if choices.text:
        return read_documents(folder, choices.text, choices.tokens, choices.documents)
    own = run_of(run)
    if own is None:
        raise HeadwiseError(
            f"{run} is no run of headwise, nor made from one that can be found, so it has no text; pass one with --text"
        )
    if folder.tokens is None:
        raise HeadwiseError(f"{folder.path} has no tokenizer; pass token ids with --ids FILE")
    found = held_out_documents(own, HELD_OUT)[: choices.documents]
    run_record = read_run(own)
    replayed = run_record is not None and run_record["settings"].get("replay") is not None
    words = "what the run learned from" if replayed else "what the run held out"
    tokens = folder.tokens
    return Text(found, tokens.shown, tokens.specials, tokens.frame, (words,))


def _on_verbs(run: Path) -> bool:
    """Was the model, or the run it comes from, trained on the built-in corpus?"""
    from headwise.gpt.run import read_run
    from headwise.models.lineage import run_of

    own = run_of(run)
    found = None if own is None else read_run(own)
    return found is not None and found["settings"]["text"] is None


def _check_choices(choices: _Choices) -> None:
    if choices.text and choices.ids is not None:
        raise HeadwiseError("--text and --ids: pass one of them")
    if choices.ablate not in (None, "zero", "mean", "none"):
        raise HeadwiseError(f"--ablate {choices.ablate} is not known; one of zero, mean, none")
    for option, value in (("--tokens", choices.tokens), ("--documents", choices.documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{option} {value} must be at least 1")
    if choices.tokens is not None and not choices.text:
        raise HeadwiseError("--tokens cuts a text into documents; pass one with --text")


def _check_target(option: str, path: Path | None) -> None:
    """Said before the work begins, so that none is lost."""
    if path is None:
        return
    if path.is_dir():
        raise HeadwiseError(f"{option} {path} is a folder; pass a file name")
    if not path.parent.is_dir():
        raise HeadwiseError(f"{option} {path}: the folder {path.parent} does not exist")
    if option == "--png" and path.suffix.lower() != ".png":
        raise HeadwiseError(f"--png {path} must end in .png: that is what is written")
    if option == "--png" and find_spec("matplotlib") is None:
        raise HeadwiseError("--png needs matplotlib: pip install 'headwise[all]'")


def _write_report(model: Path, path: Path, survey: Survey, maps: HeadMaps | None, against: Survey | None) -> None:
    from headwise.gpt.run import read_summary
    from headwise.view.report import write_report

    write_report(path, survey, maps=maps, summary=read_summary(model), against=against)


def write_report_of(run: Path, example: str) -> Path:
    """The report of a finished run: its heads on what it held out, and the exact maps of an example."""
    with needs_torch():
        from headwise.heads.maps import head_maps
        from headwise.models.open import open_folder
    survey, _ = look(run, _Choices((), None, None, None, None, True, 0))
    folder = open_folder(run)
    assert folder.tokens is not None
    before, after = folder.tokens.frame
    ids = [*before, *folder.tokens.encode(example), *after]
    maps = head_maps(folder.model, ids, folder.tokens.shown(ids), folder.name)
    _write_report(run, run / REPORT, survey, maps, None)
    return run / REPORT
