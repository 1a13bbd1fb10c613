"""`headwise why`, `trace`, `align`, `windows` and `look`: questions about the heads of one model."""

from __future__ import annotations

import json
import os
import random
import sys
import webbrowser
from dataclasses import asdict
from functools import partial
from pathlib import Path

from headwise.cli.app import (
    Progress,
    as_options,
    command,
    err,
    in_words,
    language,
    needs_torch,
    print_json,
    running_options,
    wants_json,
)
from headwise.cli.app import out as console
from headwise.cli.early import check_model, check_texts
from headwise.cli.heads import REPORT, check_tables, tell_files, write_report_of, write_tables
from headwise.errors import HeadwiseError
from headwise.families import RUN, check_answers, check_next, check_reads_tokens, is_own, read_config
from headwise.files import is_stream, write_whole
from headwise.intervals import held_apart
from headwise.records import MOST_ALIGNED
from headwise.words import refusal, said, translator

TOKENIZERS = "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.txt", "vocab.json", "spiece.model"


@command()
def why(
    model: Path,
    prompt: str,
    answer: str | None = None,
    other: str | None = None,
    corrupt: str | None = None,
    html: Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> None:
    """Say which heads bring a prediction, and which work against it.

    Where they looked, too, and what happens without them.
    """
    lang = language()
    check_model(model, dtype)
    check_answers(model)
    check_reads_tokens(model)
    with needs_torch():
        from headwise.heads.why import check_question, forecast
        from headwise.heads.why import why as story_of
        from headwise.models.open import open_folder
    from headwise.view.page import story_page

    check = partial(check_question, model, prompt, corrupt, (answer, other))
    folder = open_folder(model, dtype=dtype, device=device, check=check)
    if line := forecast(folder.model, prompt, corrupt):
        err.print(said(line, lang), soft_wrap=True)
    with Progress("adding up what each head writes") as progress:
        story = story_of(folder.model, prompt, corrupt, answer, other, progress=progress)
    if html is not None:
        story_page(html, story, lang)
    if wants_json():
        print_json("why", {**asdict(story), "html": None if html is None else str(html)})
        return
    story.print(console, lang)
    if html is not None:
        console.print("\n" + in_words("tell.page", path=html))


@command()
def trace(
    run: Path | None = None,
    text: str | None = None,
    layer: int = 0,
    head: int = 0,
    at: int | None = None,
    html: Path | None = None,
) -> None:
    """Show the arithmetic of one head at one position.

    Every number can be recomputed from the lines above it: the query, the keys, their products, the softmax, the
    values, what each head adds through the output projection, and the residual. The page of --html holds the model:
    text, token and head can be changed in it, and its last step runs the model without the head.
    """
    with needs_torch():
        from headwise.gpt.run import REPORT, example_of, load_run
        from headwise.heads.steps import example_model, head_steps
        from headwise.models.pack import pack_model
        from headwise.view.page import walk_html
        from headwise.view.terminal import print_steps
    lang = language()
    if text == "":
        raise refusal("empty_trace")
    if run is None:
        with Progress("training a small model on names") as progress:
            progress("training a small model on names", 0, 0)
            model, tokens, name = example_model()
            name = said(name, lang)
    else:
        (model, tokens), name = load_run(run), run.resolve().name
    shown_text = text or example_of(run)
    ids = tokens.prompt(shown_text)
    last = len(ids) - (2 if text is None and len(ids) > 1 else 1)  # of an example, from where its last token is guessed
    steps = head_steps(model, ids, tokens.shown(ids), layer, head, last if at is None else at, name)
    if html is not None:
        report = None if run is None or not (run / REPORT).exists() else os.path.relpath(run / REPORT, html.parent)
        packed = pack_model(model, tokens)
        write_whole(html, walk_html(packed, shown_text, layer, head, steps.at, name=name, lang=lang, report=report))
    if wants_json():
        print_json("trace", {**vars(steps), "html": None if html is None else str(html)})
        return
    print_steps(console, steps, lang)
    if html is not None:
        console.print("\n" + in_words("tell.page", path=html))
    if run is None:
        err.print("\n" + in_words("tell.just_now"))


@command()
def align(
    model: Path,
    pairs: Path,
    judge: Path | None = None,
    out: Path | None = None,
    most: int = MOST_ALIGNED,
    device: str = "cpu",
) -> None:
    """Find the heads that follow the words in time, or in the source."""
    check_model(model)
    for file in filter(None, (pairs, judge)):  # before torch is loaded
        if not file.is_file():
            raise HeadwiseError(f"{file} is no file; pass texts whose alignment is known")
    with needs_torch():
        from headwise.heads.alignment import align as aligned
        from headwise.heads.texts import read_aligned
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    texts = read_aligned(folder, pairs)
    if judge is not None:
        others = read_aligned(folder, judge)
    elif len(texts) < 2:
        raise HeadwiseError(f"{pairs} has one text; heads are chosen by some and judged on others: pass more")
    else:
        texts, others = held_apart(texts, random.Random(0))
    published = getattr(getattr(folder.model, "generation_config", None), "alignment_heads", None) or []
    named = [f"cross.L{layer}.H{head}" for layer, head in published]
    with Progress("reading the texts") as progress:
        step = partial(progress, "reading the maps")
        result = aligned(folder.model, texts, others, named=named, most=most, progress=step)
    if out is not None:
        write_whole(out, json.dumps({"alignment_heads": result.alignment_heads}) + "\n")
    if wants_json():
        print_json("align", {**vars(result), "alignment_heads": result.alignment_heads})
        return
    result.table().print(console, speak=translator("aligned", language()))
    console.print(f"alignment_heads: {json.dumps(result.alignment_heads)}")
    if out is not None:
        console.print(in_words("aligned.written", path=out))


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
    from headwise.view.page import windows_html
    from headwise.view.pictures import windows_png
    from headwise.view.terminal import print_windows

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
    print_windows(console, reach, sinks, language())
    if chosen is not None:
        full = sum(layer.count(None) for layer in chosen.keep)
        facts = {"full": full, "count": len(reach.heads), "share": f"{share:.3f}", "tokens": f"{reach.longest:,}"}
        console.print(in_words("windows.plan", plan=plan, **facts))
        if full == len(reach.heads):
            console.print(in_words("windows.nothing_saved"))
        else:
            console.print(in_words("windows.try_it", model=model, plan=plan))
    tell_files(out_files or [], page=html)


def _format_of(plan: Path) -> str:
    """How a plan is written there: as a file of ours, or as a folder of DuoAttention, whose name has no suffix."""
    if is_stream(plan) or plan.suffix == ".json":
        return "headwise"
    if plan.suffix or plan.is_file():
        raise refusal("plan_name", path=plan)
    return "duo"


@command()
def look(
    model: Path,
    text: str | None = None,
    live: bool = False,
    port: int | None = None,
    browser: bool = True,
    dtype: str = "auto",
    device: str = "cpu",
) -> None:
    """Touch the heads of a model in the browser.

    The page of a finished run, with the model in it; of any other model a page behind which it runs here until Ctrl-C.
    """
    if live or text is not None or (not (model / RUN).exists() and (model / "config.json").exists()):
        _live(model, text, port or 0, browser, dtype, device)
        return
    if port is not None:
        raise refusal("port_look", port=port)
    report = _report_of(model)
    address = report.resolve().as_uri()
    opened = _opened(address, browser)
    if wants_json():
        print_json("look", {"run": str(model), "report": str(report), "address": address, "opened": opened})
        return
    console.print(in_words("tell.report", path=report) + f"\n{address}")
    if browser and not opened:
        err.print(in_words("tell.no_display"), soft_wrap=True)


def _report_of(run: Path) -> Path:
    """The report of a finished run, written where it is missing."""
    if not run.is_dir():
        raise refusal("no_run_folder", run=run)
    report = run / REPORT
    if report.exists():
        return report
    with needs_torch():
        from headwise.gpt.run import read_run
    record = read_run(run)
    if record is None:
        raise refusal("no_run_no_model", run=run)
    if record.status != "finished":
        raise refusal("look_unfinished", run=run)
    return write_report_of(run)


def _live(model: Path, text: str | None, port: int, browser: bool, dtype: str, device: str) -> None:
    """Serve the page of a model, and answer it until Ctrl-C."""
    check_model(model, dtype)
    sound = Path(text) if text is not None and text.lower().endswith(".wav") else None
    _check_reads(model, sound)
    with needs_torch():
        from headwise.gpt.run import example_of
        from headwise.heads.look import Desk
        from headwise.models.open import open_folder
    from headwise.view.look import Served

    with Progress("opening the model"):
        desk = Desk(open_folder(model, dtype=dtype, device=device), sound)
    example = desk.example or text or (example_of(model) if is_own(model) else None)
    served = Served(desk, port, example, language())
    try:
        opened = _opened(served.address, browser)
        if wants_json():
            print_json("live", {"model": str(model), "address": served.address, "opened": opened})
            sys.stdout.flush()  # whoever reads it opens the page, while this goes on
        else:
            console.print(served.address)
        err.print(in_words("tell.at_address", name=desk.folder.name), soft_wrap=True)
        served.work()
    except KeyboardInterrupt:
        err.print(in_words("tell.page_closed"), soft_wrap=True)
    finally:
        served.close()


def _check_reads(model: Path, sound: Path | None) -> None:
    """Refuse by its files a model that reads no text, and one that hears and is given no sound."""
    check_reads_tokens(model, [] if sound is None else [str(sound)])
    if {"vision_config", "patch_size"} & read_config(model).keys():
        raise HeadwiseError(f"{model} reads images; hw.look(hw.open({str(model)!r}), ...) shows its heads on your own")
    if not any((model / name).exists() for name in TOKENIZERS):
        raise refusal("look_no_tokenizer", model=model)


def _opened(address: str, browser: bool) -> bool:
    """Open an address where there is somewhere a window could appear, else `webbrowser` may take the terminal."""
    display = sys.platform in ("win32", "darwin") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return browser and display and webbrowser.open(address)
