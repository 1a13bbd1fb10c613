"""`headwise heads`, and the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headwise.cli.app import (
    File,
    Files,
    Model,
    SomeCount,
    check_outputs,
    command,
    language,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.errors import HeadwiseError
from headwise.families import (
    RUN,
    check_reads_tokens,
    is_own,
    read_config,
    require_run,
)
from headwise.files import STDIN, Sources, check_file, contents, is_stream, write_whole
from headwise.table import Table
from headwise.view import Progress, screen
from headwise.words import LANGUAGES

if TYPE_CHECKING:
    from headwise.heads.table import Survey
    from headwise.records import HeadMaps

REPORT = "report.html"  # in a run folder
# relations that come with headwise; --relations takes such a name, or a file
BENCHES = "grammar", "meaning"
# bytes of texts, at most, that are read through at first: some hundredths of a second
AT_ONCE = 2**24


@command()
def heads(
    model: Model,
    text: list[str] | None = None,
    ids: File = None,
    tokens: SomeCount = None,
    documents: SomeCount = None,
    relations: str | None = None,
    ablate: Literal["auto", "zero", "mean", "none"] = "auto",
    html: File = None,
    out: Files = None,
    device: str = "cpu",
) -> None:
    """Show what each head does, and what breaks without it.

    Args:
        model: A run of `headwise train`, or a model folder in Hugging Face layout.
        text: A UTF-8 text file, a folder of them, a text, or - for standard input. You may repeat it. Default: what
            the run held out.
        ids: A file of token ids instead of a text, one document per line.
        tokens: Cut the text into documents of this many tokens. Default: only where it is longer than the model
            takes.
        documents: Stop after this many documents.
        relations: A JSON file of texts with pairs of spans that belong together; each name in it is a role. Or
            grammar, or meaning: labelled sentences that come with headwise.
        ablate: Remove one head at a time and measure the change in loss: zero, mean or none; auto is zero for
            models of up to 10 million parameters.
        html: Write the report to this file. Default: report.html in the run folder.
        out: Write the table to this .csv file. You may repeat it.

    Example: headwise heads runs/verbs, or headwise heads MODEL --text book.txt --tokens 512 --html r.html
    """
    from headwise.view.survey import head_sentence, print_survey

    files = out or []
    labels = relations if relations is None or relations in BENCHES else Path(relations)
    for path in files:
        if path.suffix.lower() != ".csv" and not is_stream(path):
            raise HeadwiseError(
                f"--out {path}: the table is comma-separated values; end the name in .csv"
            )
    check_outputs([model, ids, relations, *(text or ())], html=html, out=files)
    check_reads_tokens(model)
    _check_text(model, text, ids, tokens, labels)
    survey, maps = surveyed(
        model,
        text,
        ids,
        tokens,
        documents,
        labels,
        device,
        ablate=ablate,
    )
    # report.html in a run folder tells of the run on what it held out, or a part of it (--documents). All else goes
    # only where --html says, and --json alone asks for no page.
    special = text or ids is not None or labels or wants_json()
    report = html or (
        model / REPORT if (model / RUN).exists() and not special else None
    )
    if report:
        _write_report(model, report, survey, maps)
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
    print_survey(screen, survey, maps)
    for path in files:
        screen.say(f"table: {path}")
    if report:
        screen.say(f"report: {report}")


def _check_text(
    model: Path,
    text: list[str] | None,
    ids: Path | None,
    tokens: int | None,
    labels: object,
) -> None:
    # What to read is the text, or the ids, or else what relations (`labels`) bring, or else what the run held out.
    if text and ids:
        raise HeadwiseError("--text and --ids: pass one of them")
    if tokens is not None and not text:
        raise HeadwiseError(
            f"--tokens {tokens} cuts a text into documents; pass a text with it"
        )
    for path in (ids, labels):
        if isinstance(path, Path):
            check_file(path)
    if text:
        # standard input can be read only once, and is read later
        sources = Sources(contents([name for name in text if name != STDIN])[0])
        # raises HeadwiseError for what is blank or no UTF-8
        if sources.size <= AT_ONCE:
            list(sources)
    elif ids is None and labels is None:
        require_run(model)
    context = None if tokens is None else _context_told(model)
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(
            f"--tokens {tokens} exceeds what {model} takes at a time, {context}"
        )


def _context_told(model: Path) -> int | None:
    """The longest text by the config; None where it does not say, and the model itself is asked."""
    config = read_config(model)
    ours = config.get("headwise")
    is_gpt2 = config.get("model_type") == "gpt2"
    if isinstance(ours, dict):
        size = ours.get("context")
    else:
        size = config.get("n_positions" if is_gpt2 else "max_position_embeddings")
    return size if isinstance(size, int) else None


def surveyed(
    model: Path,
    text: list[str] | None = None,
    ids: Path | None = None,
    tokens: int | None = None,
    documents: int | None = None,
    relations: Path | str | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[Survey, HeadMaps | None]:
    """The survey of a model folder, and the exact maps of one short document of its text, if there is one.

    relations  a file of them, or one of BENCHES; where no text is given, they bring it
    options    of `hw.survey`
    """
    with needs_torch():
        from headwise.corpus.documents import read_ids
        from headwise.heads.survey import read_texts, survey
        from headwise.heads.watch import example_maps
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    with Progress("reading the text") as progress:
        source = (text or None) if ids is None else read_ids(folder, ids, documents)
        read = read_texts(folder, source, tokens, documents, relations)
        result = survey(folder.model, read, progress=progress, **options)
    return result, example_maps(folder, read)


def _write_report(
    model: Path, path: Path, survey: Survey, maps: HeadMaps | None
) -> None:
    # A report with the model inside, where that is ours and small; that of a run also gets a walk beside it.
    from headwise.gpt.run import WALK, example_of, load_run, read_film, read_run
    from headwise.models.pack import pack_model
    from headwise.view.page import walk_html
    from headwise.view.report import title_of, write_report

    lang = language()
    loaded = load_run(model) if is_own(model) else None
    # "reason" says why a model is not packed
    packed = {"reason": "foreign"} if loaded is None else pack_model(*loaded)
    run = read_run(model)
    walk = None
    summary = None if run is None else run.summary
    if loaded is not None and path == model / REPORT and "reason" not in packed:
        walk = WALK
        text = example_of(model)
        # the last token but one: there the model guesses the last
        at = max(0, len(loaded[1].prompt(text)) - 2)
        name = title_of(survey, summary)
        page = walk_html(packed, text, at=at, name=name, lang=lang, report=path.name)
        write_whole(model / walk, page)
    write_report(path, survey, maps, summary, packed, lang, read_film(model), walk)


def write_report_of(run: Path) -> Path:
    """The report of a finished run: its heads on what it held out, and the exact maps of its example."""
    survey, maps = surveyed(run)
    _write_report(run, run / REPORT, survey, maps)
    return run / REPORT
