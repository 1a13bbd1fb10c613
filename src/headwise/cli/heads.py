"""`headwise heads`, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headwise.cli.app import (
    Debug,
    Device,
    Json,
    Lang,
    Progress,
    check_outputs,
    command,
    err,
    needs_torch,
    out,
    print_json,
)
from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.view.page.words import check_lang

if TYPE_CHECKING:
    from headwise.gpt.ranks import Ranks
    from headwise.heads.profiles import Survey
    from headwise.records import HeadMaps

MOST_MAPS = 16  # that are drawn in the terminal
REPORT = "report.html"


@command()
def heads(
    model: Path,
    text: list[str] | None = None,
    ids: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    rows: float | None = None,
    unknown: str = "refuse",
    field: str | None = None,
    ablate: str = "auto",
    controls: bool = True,
    sort: str = "name",
    against: Path | None = None,
    html: Path | None = None,
    lang: Lang = "en",
    png: Path | None = None,
    csv: Path | None = None,
    parquet: Path | None = None,
    headvis: Path | None = None,
    relations: Path | None = None,
    bench: str | None = None,
    circuits: bool = False,
    keep: Path | None = None,
    parallel: str | None = None,
    seed: int = 0,
    stream: bool | None = None,
    dtype: str = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each head does, and what breaks without it."""
    check_lang(lang)
    reading = {"stream": stream, "dtype": dtype, "device": device}
    files = {"html": html, "png": png, "csv": csv, "parquet": parquet}
    if circuits:
        labels: dict[str, Any] = {"relations": relations, "bench": bench}
        _circuits(
            model,
            reading,
            as_json,
            text=text,
            ids=ids,
            against=against,
            headvis=headvis,
            **labels,
            **files,
        )
        return
    _check(model, against, sort, (relations, bench), headvis, **files)
    options: dict[str, Any] = {"text": text, "ids": ids, "tokens": tokens, "documents": documents}
    options |= {"controls": controls, "ablate": ablate, "seed": seed, "relations": relations or bench}
    with needs_torch():
        from headwise.gpt.ranks import current
    ranks = current()
    if parallel is not None:
        _check_parallel(parallel, ranks, headvis=headvis, keep=keep, against=against, relations=relations, bench=bench)
    options |= {"unknown": unknown, "field": field, "rows": rows, "ranks": ranks, "parallel": parallel is not None}
    options["reading"] = reading
    survey, maps = look(model, headvis=None if ranks.rank else headvis, keep=keep, **options)
    options["keep"] = None if keep is None else keep / "against"
    other, other_maps = (None, None) if against is None else _compared(model, against, options)
    if ranks.rank:
        return
    # The report in a run tells of the run: a look at another text goes where --html says.
    special = text or ids is not None or not controls or other is not None or options["relations"]
    report = html or (model / REPORT if (model / "run.json").exists() and not special else None)
    if report is not None:
        _write_report(model, report, survey, maps, other, other_maps, lang)
    _write_tables(survey, png, csv, parquet)
    if as_json:
        _print_json(survey, other, report)
        return
    _print_survey(survey, maps, sort, other, lang)
    for what, path in (("report", report), ("picture", png), ("table", csv), ("table", parquet), ("HeadVis", headvis)):
        if path is not None:
            out.print(f"{what}: {path}")


def _check_parallel(parallel: str, ranks: Ranks, **options: Any) -> None:
    """Refuse what a model whose heads are spread over processes does not do."""
    if parallel != "tensor":
        raise HeadwiseError(f"--parallel {parallel} is not known; there is tensor")
    ranks.require_many("--parallel tensor spreads the heads of a model over processes")
    if passed := [f"--{name}" for name, value in options.items() if value]:
        raise HeadwiseError(f"--parallel tensor with {', '.join(passed)}: that needs the whole model; leave one out")


def _circuits(model: Path, reading: Mapping[str, Any], as_json: bool, **options: Any) -> None:
    """The heads by their weights alone, and who reads whom."""
    passed = [f"--{name}" for name, value in options.items() if value]
    if passed:
        raise HeadwiseError(f"--circuits reads the weights and no text; leave out {', '.join(passed)}")
    if reading["device"] != "cpu":
        raise HeadwiseError("--circuits computes on the processor; leave out --device")
    with needs_torch():
        from headwise.heads.circuits import circuits
        from headwise.models.open import open_folder
    from headwise.view.circuits import print_circuits

    folder = open_folder(model, **reading)
    with Progress("reading the weights of all heads"):
        result = circuits(folder.model)
    if as_json:
        print_json({"model": folder.name, **result.plain()})
    else:
        print_circuits(out, result.plain())


def _write_tables(survey: Survey, png: Path | None, csv: Path | None, parquet: Path | None) -> None:
    from headwise.heads import frame
    from headwise.view.survey_files import survey_csv, survey_png

    if csv is not None:
        write_whole(csv, survey_csv(survey))
    if parquet is not None:
        write_whole(parquet, frame.parquet(frame.survey_rows(survey)))
    if png is not None:
        survey_png(png, survey)


def _print_json(survey: Survey, other: Survey | None, report: Path | None) -> None:
    from headwise.view.page.words import LANGUAGES
    from headwise.view.sentences import head_sentence
    from headwise.view.survey_data import plain_data

    compared = {} if other is None else {"against": plain_data(other)}
    sentences = {lang: {name: head_sentence(survey, survey[name], lang) for name in survey} for lang in LANGUAGES}
    written = None if report is None else str(report)
    print_json({**plain_data(survey), **compared, "sentences": sentences, "report": written})


def _print_survey(survey: Survey, maps: HeadMaps | None, sort: str, other: Survey | None, lang: str) -> None:
    from headwise.view.relation_table import print_relations, print_sentences
    from headwise.view.survey_table import print_survey
    from headwise.view.terminal import print_maps

    if maps is not None and len(maps.maps) <= MOST_MAPS:
        print_maps(out, maps)
    print_survey(out, survey, sort_by=sort, against=other)
    print_relations(out, survey)
    if other is None and len(survey) <= MOST_MAPS:
        print_sentences(out, survey, lang)


def _check(
    model: Path,
    against: Path | None,
    sort: str,
    labels: tuple[Path | None, str | None],
    headvis: Path | None,
    **outputs: Path | None,
) -> None:
    """Refuse what would fail only after long work."""
    from headwise.gpt.verbs import RELATIONS
    from headwise.heads.frame import parquet
    from headwise.heads.statistics import all_statistics
    from headwise.view.survey_table import check_order

    check_outputs(**outputs)
    if headvis is not None:
        with needs_torch():
            from headwise.heads.headvis import check_headvis
        check_headvis(headvis)
    if outputs["parquet"] is not None:
        parquet([])  # is it installed?
    png = outputs["png"]
    if png is not None and png.suffix.lower() != ".png":
        raise HeadwiseError(f"--png {png} must end in .png: that is what is written")
    for folder in (model, against):
        if folder is not None and not folder.is_dir():
            raise HeadwiseError(f"{folder} is no folder; pass a run folder or a model in Hugging Face layout")
    if all(labels):
        raise HeadwiseError("--relations and --bench: pass one of them")
    if not any(labels):  # else its names are known later
        check_order([*all_statistics(), *RELATIONS], sort)


def look(
    model: Path,
    text: list[str] | None = None,
    ids: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    on: Path | None = None,
    relations: Path | str | None = None,
    unknown: str = "refuse",
    field: str | None = None,
    headvis: Path | None = None,
    parallel: bool = False,
    ranks: Ranks | None = None,
    reading: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Survey, HeadMaps | None]:
    """The survey of a model folder, with the `options` of `hw.survey`; and exact maps of one short document.

    `on` names the run whose held-out text is looked at where no text is given; default `model` itself. The maps are
    then of the run's example. Where relations come without a text, they bring it. `headvis` is a folder to write to,
    `reading` is for `open_folder`.
    """
    if text and ids is not None:
        raise HeadwiseError("--text and --ids: pass one of them")
    with needs_torch():
        from headwise.gpt.ranks import ALONE
        from headwise.heads.headvis import write_headvis
        from headwise.heads.maps import maps_of_text
        from headwise.heads.survey import survey, text_of
        from headwise.heads.texts import read_ids, read_texts
        from headwise.models.lineage import run_of
        from headwise.models.open import open_folder
    ranks = ranks or ALONE
    folder = open_folder(model, ranks if parallel else ALONE, **reading)
    read = None if ids is None else read_ids(folder, ids, documents)
    with Progress("reading the text") as progress:
        if ids is None and (text or relations is None):
            read = read_texts(folder, text or None, tokens, documents, on, unknown, field, progress)
        labelled = text_of(folder, read, tokens, documents, relations)
        _print_forecast(folder.model, labelled.documents)
        result = survey(folder.model, labelled, progress=progress, ranks=ranks, **options)
        if headvis is not None:
            progress("HeadVis", 0, 0)
            write_headvis(headvis, folder.model, labelled, result)
    if read is not None and not text and ids is None and (run := run_of(on or model)) is not None:
        read = _example_of(run, folder.tokens, read)
    return result, None if read is None or parallel else maps_of_text(folder.model, read, folder.name)


def _example_of(run: Path, tokens: Any, text: Any) -> Any:
    """The example of a run in the place of its text, where it has one."""
    from headwise.gpt.run import read_run

    example = (read_run(run) or {}).get("example")
    if not example or tokens is None:
        return text
    before, after = tokens.frame
    return replace(text, documents=[[*before, *tokens.encode(example), *after]])


def _print_forecast(model: Any, documents: Sequence[Sequence[int]]) -> None:
    """What reading the documents takes, where the model is read layer by layer."""
    from headwise.models.stream import stream_of

    if (stream := stream_of(model)) is not None:
        lengths = [len(document) for document in documents]
        err.print(stream.forecast(sum(lengths), max(lengths)), soft_wrap=True)


def _compared(model: Path, against: Path, options: dict[str, Any]) -> tuple[Survey, HeadMaps | None]:
    """The same look at the other model; where one comes from the other, heads have the names of their counterparts."""
    from headwise.models.lineage import counterparts

    other, maps = look(against, on=model, **options)
    pairs = counterparts(model, against)
    return other if pairs is None else other.renamed(pairs), maps


def _write_report(
    model: Path,
    path: Path,
    survey: Survey,
    maps: HeadMaps | None,
    against: Survey | None = None,
    against_maps: HeadMaps | None = None,
    lang: str = "en",
) -> None:
    from headwise.gpt.run import load_run, read_summary
    from headwise.heads.film import read_film
    from headwise.models.open import is_own
    from headwise.models.pack import pack_model
    from headwise.view.report import write_report

    packed = pack_model(*load_run(model)) if is_own(model) else {"reason": "foreign"}
    write_report(path, survey, maps, read_summary(model), against, against_maps, packed, lang, read_film(model))


def write_report_of(run: Path) -> Path:
    """The report of a finished run: its heads on what it held out, and the exact maps of its example."""
    survey, maps = look(run)
    _write_report(run, run / REPORT, survey, maps)
    return run / REPORT
