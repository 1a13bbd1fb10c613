"""`headwise heads`, and the report of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from headwise.cli.app import (
    File,
    Files,
    Model,
    Seed,
    SomeCount,
    check_outputs,
    command,
    in_options,
    is_one_of_many,
    language,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.cli.early import check_model, check_texts, context_in, shape_of
from headwise.errors import HeadwiseError
from headwise.families import check_reads_tokens, is_own
from headwise.files import check_file, is_stream, write_whole
from headwise.table import Table
from headwise.view import Progress, err, screen
from headwise.words import LANGUAGES, Facts

if TYPE_CHECKING:
    from headwise.heads.table import Survey
    from headwise.records import HeadMaps

# heads, at most, of a model whose maps and sentences the terminal shows; a round choice
MOST_MAPS = 16
REPORT = "report.html"  # in a run folder
# relations that come with headwise; --relations takes such a name, or a file
BENCHES = "grammar", "meaning"


@command()
def heads(
    model: Model,
    text: list[str] | None = None,
    ids: File = None,
    tokens: SomeCount = None,
    documents: SomeCount = None,
    ablate: Literal["auto", "zero", "mean", "none"] = "auto",
    sort: str = "name",
    html: File = None,
    out: Files = None,
    relations: str | None = None,
    embed: Annotated[bool, Option("--embed")] = False,
    seed: Seed = 0,
    dtype: str = "auto",
    device: str = "cpu",
) -> None:
    # its options: [heads] in commands.toml
    """Show what each head does, and what breaks without it."""
    from headwise.corpus.verbs import RELATIONS
    from headwise.heads.statistics import all_statistics
    from headwise.view.survey import check_order, head_sentence

    files = out or []
    check_outputs([model, ids, relations, *(text or ())], html=html, out=files)
    labels = relations if relations is None or relations in BENCHES else Path(relations)
    check_tables(files)
    check_model(model, dtype)
    check_reads_tokens(model)
    _check_text(model, text, ids, tokens, labels)
    # a file of relations brings names to sort by, which are known once it is read
    if labels is None:
        check_order([*all_statistics(), *RELATIONS], sort)
    if embed and not is_own(model):
        raise HeadwiseError(
            f"--embed: in a page run only models that headwise trained, and {model} is none; leave it out, and "
            f"open the model live: headwise look {model}"
        )
    with needs_torch():
        from headwise.heads.tally import join_ranks
    options: Facts = {"text": text, "ids": ids, "tokens": tokens, "documents": documents}
    options |= {
        "relations": labels,
        "ablate": ablate,
        "seed": seed,
        "distributed": is_one_of_many(),
    }
    options |= {"reading": {"dtype": dtype, "device": device}}
    if is_one_of_many():
        join_ranks()
    survey, maps = surveyed(model, **options)
    if screen.quiet:  # of many processes the first alone writes and prints
        return
    # report.html in a run folder tells of the run on what it held out, or a part of it (--documents). All else goes
    # only where --html says.
    special = text or ids is not None or labels
    report = html or (model / REPORT if (model / "run.json").exists() and not special else None)
    if report is not None:
        _write_report(model, report, survey, maps, embed)
    if files:
        table = Table.of(survey.records()).csv()
        for path in files:
            write_whole(path, table)
    if wants_json():
        sentences = {
            lang: {name: head_sentence(survey, survey[name], lang) for name in survey}
            for lang in LANGUAGES
        }
        print_json("heads", {**vars(survey), "sentences": sentences, "report": report})
        return
    _print_survey(survey, maps, sort)
    tell_files(files, report=report)


def check_tables(paths: Iterable[Path]) -> None:
    """Refuse a suffix that is no .csv; a pipe needs none."""
    for path in paths:
        if path.suffix.lower() != ".csv" and not is_stream(path):
            raise HeadwiseError(
                f"--out {path}: the table is comma-separated values; end the name in .csv"
            )


def tell_files(tables: Iterable[Path], **others: Path | None) -> None:
    """Print what was written where; `others` by the names of what they are."""
    for path in tables:
        screen.say(f"table: {path}")
    for what, other in others.items():
        if other is not None:
            screen.say(f"{what}: {other}")


def _print_survey(survey: Survey, maps: HeadMaps | None, sort: str) -> None:
    """Print the survey: its table and roles; of a model of few heads also their maps and a sentence of each."""
    from headwise.view.survey import print_relations, print_sentences, print_survey
    from headwise.view.terminal import print_maps

    if maps is not None and len(maps.maps) <= MOST_MAPS:
        print_maps(screen, maps)
    print_survey(screen, survey, sort)
    print_relations(screen, survey)
    if len(survey) <= MOST_MAPS:
        print_sentences(screen, survey)


def _check_text(
    model: Path, text: list[str] | None, ids: Path | None, tokens: int | None, labels: object
) -> None:
    # What to read is the text, or the ids, or else what relations (`labels`) bring, or else what the run held out.
    if text and ids is not None:
        raise HeadwiseError("--text and --ids: pass one of them")
    if tokens is not None and not text:
        raise HeadwiseError(f"--tokens {tokens} cuts a text into documents; pass a text with it")
    for path in (ids, labels):
        if isinstance(path, Path):
            check_file(path)
    if ids is None and (text or labels is None):
        check_texts(model, text)
    context = context_in(shape_of(model))
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(f"--tokens {tokens} exceeds what {model} takes at a time, {context}")


def surveyed(
    model: Path,
    text: list[str] | None = None,
    ids: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    relations: Path | str | None = None,
    reading: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Survey, HeadMaps | None]:
    """The survey of a model folder, and exact maps of one short document; None where there is no such document.

    relations  a file of them, or one of BENCHES; where no text is given, they bring it
    reading    how to open the model: for `open_folder`
    options    of `hw.survey`
    """
    with needs_torch():
        from headwise.corpus.documents import read_ids
        from headwise.families import run_of
        from headwise.gpt.run import read_run
        from headwise.heads.survey import forecast, survey
        from headwise.heads.texts import read_texts
        from headwise.heads.watch import maps_of_short
        from headwise.models.open import open_folder
    folder = open_folder(model, **reading)
    with Progress("reading the text") as progress:
        source = (text or None) if ids is None else read_ids(folder, ids, documents)
        read = read_texts(folder, source, tokens, documents, progress, relations)
        if line := forecast(folder.model, read.documents):  # how long it will take
            err.print(in_options(line))  # this line names arguments, such as documents=
        result = survey(folder.model, read, progress=progress, **options)
    if source is None and relations is not None:  # no maps: the texts of relations are many
        return result, None
    run = run_of(model) if source is None else None
    record = None if run is None else read_run(run)
    short = read.documents
    if record is not None and record.example and folder.tokens is not None:
        before, after = folder.tokens.frame  # ids that every document begins and ends with
        short = [[*before, *folder.tokens.encode(record.example), *after]]
    return result, maps_of_short(folder.model, short, read.shown, folder.name)


def _write_report(
    model: Path, path: Path, survey: Survey, maps: HeadMaps | None, embed: bool = False
) -> None:
    # A report with the model inside, where that is ours and small; that of a run also gets a walk beside it.
    from headwise.gpt.film import read_film
    from headwise.gpt.run import WALK, example_of, load_run, read_run
    from headwise.models.pack import EMBEDDED, MOST, pack_model
    from headwise.view.page import walk_html
    from headwise.view.report import write_report

    lang, loaded = language(), load_run(model) if is_own(model) else None
    # "reason" says why a model is not packed. The two numbers are the most parameters it may have.
    packed = (
        {"reason": "foreign"}
        if loaded is None
        else pack_model(*loaded, EMBEDDED if embed else MOST)
    )
    run, walk = read_run(model), None
    # A walk holds the model once more, up to 80 MB with --embed: then there is none.
    if loaded is not None and path == model / REPORT and not embed and "reason" not in packed:
        walk, text = WALK, example_of(model)
        # the last token but one: there the model guesses the last
        at = max(0, len(loaded[1].prompt(text)) - 2)
        # opens with L0.H0
        page = walk_html(packed, text, 0, 0, at, name=survey.model, lang=lang, report=path.name)
        write_whole(model / walk, page)
    write_report(path, survey, maps, run and run.summary, packed, lang, read_film(model), walk)


def write_report_of(run: Path) -> Path:
    """The report of a finished run: its heads on what it held out, and the exact maps of its example."""
    survey, maps = surveyed(run)
    _write_report(run, run / REPORT, survey, maps)
    return run / REPORT
