"""`headwise why`, `trace`, `align`, `look` and `verify`: questions about one model."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from headwise.cli.app import (
    File,
    Model,
    Port,
    check_outputs,
    command,
    language,
    named_path,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.cli.heads import REPORT, write_report_of
from headwise.errors import HeadwiseError
from headwise.families import (
    RUN,
    check_answers,
    check_model,
    check_reads_tokens,
    has_tokenizer,
    is_own,
    read_config,
)
from headwise.files import write_whole
from headwise.records import parse_head
from headwise.view import Progress, err, screen


@command()
def why(
    model: Model,
    prompt: Annotated[str, Option()],
    answer: str | None = None,
    other: str | None = None,
    corrupt: str | None = None,
    html: File = None,
    device: str = "cpu",
) -> None:
    """Say which heads bring a prediction, and which work against it.

    Where they looked, too, and what happens without them.

    Args:
        model: A run, or a model folder in Hugging Face layout.
        prompt: The text whose next token is explained; of an encoder the word at its mask, [MASK] or whatever it
            calls it, of an encoder-decoder the first token of its answer.
        answer: The token to explain, one. Default: what the model predicts.
        other: The token that it is compared with, one. Default: what the model answers to --corrupt; where that is
            the same, the log-probability of the answer counts. Without --corrupt: the likeliest other token.
        corrupt: The same text with one thing changed, in as many tokens: heads are ranked by what they carry of the
            difference, and the paths between them are followed.
        html: Also write the story as one HTML page.

    Example: headwise why runs/verbs --prompt "he will work = él" --corrupt "he would work = él"
    """
    # All of these raise HeadwiseError, before torch is loaded.
    check_outputs([model], html=html)
    check_answers(model)
    check_reads_tokens(model)
    with needs_torch():
        from headwise.heads.why import check_question
        from headwise.heads.why import why as story_of
        from headwise.models.open import open_folder
    from headwise.view.page import story_page

    # `open_folder` asks this with the tokenizer, before it reads the weights.
    check = partial(check_question, prompt, corrupt, (answer, other))
    folder = open_folder(model, device=device, check=check)
    with Progress("adding up what each head writes") as progress:
        story = story_of(
            folder.model, prompt, corrupt, answer, other, progress=progress
        )
    if html:
        story_page(html, story, language())
    if wants_json():
        print_json("why", {**vars(story), "html": html})
        return
    story.print(screen)
    _tell_page(html)


def _tell_page(html: Path | None) -> None:
    if html:
        screen.say("\n" + f"page: {html}")


@command()
def trace(
    run: Annotated[Path | None, Argument(parser=named_path, metavar="[RUN]")] = None,
    text: str | None = None,
    head: str = "L0.H0",
    at: int | None = None,
    html: File = None,
) -> None:
    """Show the arithmetic of one head at one position.

    The query, the keys and values, the scores and weights, the output, what each head adds through the output
    projection, and the residual stream, a table each. The page of --html holds the model: text, token and head can be
    changed in it, and its last step runs the model without the head.

    Args:
        run: A run folder. Without it, a small model is trained on names.
        text: The text to read. Default: a text that the run held out; without a run, emma.
        head: The head, such as L0.H2: layer 0, head 2, both from 0.
        at: The position of the query, counted from 0. Default: the last; of an example, the last but one.
        html: Also write a page that walks through the steps.

    Example: headwise trace --text emma --head L0.H2 --at 3 --html emma.html
    """
    check_outputs([run], html=html)
    if text == "":
        raise HeadwiseError("the text is empty; pass one with --text")
    _, layer, number = parse_head(head)
    with needs_torch():
        from headwise.gpt.run import REPORT, example_of, load_run
        from headwise.heads.steps import example_model, head_steps
        from headwise.models.pack import pack_model
        from headwise.view.page import walk_html
        from headwise.view.terminal import print_steps
    if run is None:
        with Progress("training a small model on names") as progress:
            # 0, 0: nobody knows how long
            progress("training a small model on names", 0, 0)
            model, tokens, name = example_model()
    else:
        (model, tokens), name = load_run(run), run.resolve().name
    shown_text = text or example_of(run)
    ids = tokens.prompt(shown_text)
    # Where --at says nothing: the last token of the user's text, where the model guesses what follows; of an example
    # the last but one, at which it guesses the last, so that the guess can be held against it.
    last = len(ids) - (2 if text is None and len(ids) > 1 else 1)
    steps = head_steps(
        model, ids, tokens.shown(ids), layer, number, last if at is None else at, name
    )
    if html:
        # The page links to the report of the run, if there is one.
        report = None
        if run and (run / REPORT).exists():
            report = os.path.relpath(run / REPORT, html.parent)
        packed = pack_model(model, tokens)
        page = walk_html(
            packed,
            shown_text,
            layer,
            number,
            steps.at,
            name=name,
            lang=language(),
            report=report,
        )
        write_whole(html, page)
    if wants_json():
        print_json("trace", {**vars(steps), "html": html})
        return
    print_steps(screen, steps)
    _tell_page(html)
    if run is None:
        err.say(
            "\n"
            + "this is a small model, trained on names just now; for one of yours: headwise trace runs/verbs"
        )


@command()
def align(
    model: Model,
    pairs: Annotated[Path, Option(parser=named_path, metavar="<path>")],
    out: File = None,
    device: str = "cpu",
) -> None:
    """Find the heads that follow the words in time, or in the source.

    Args:
        model: A model folder in Hugging Face layout, with cross attention or without.
        pairs: Texts whose alignment is known, a JSON document a line: audio and words with their seconds; source,
            target and links; or text and links. Heads are chosen by half of them, drawn, and judged on the others.
        out: Write the chosen heads to this file, as alignment_heads.

    Example: headwise align build/models/whisper-base --pairs speech.jsonl --out alignment.json
    """
    check_outputs([model, pairs], out=out)
    check_model(model)
    if not pairs.is_file():
        raise HeadwiseError(f"{pairs} is no file; pass texts whose alignment is known")
    with needs_torch():
        from headwise.heads.align import align as aligned
        from headwise.heads.align import halves, read_aligned
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    texts = read_aligned(folder, pairs)
    if len(texts) < 2:
        raise HeadwiseError(
            f"{pairs} has one text; heads are chosen by some and judged on others: pass more"
        )
    texts, others = halves(texts)
    # Heads that a model's makers chose, to compare with: Whisper's generation config has them, as pairs of a layer
    # and a head of cross attention. Most models have none.
    generation = getattr(folder.model, "generation_config", None)
    published = getattr(generation, "alignment_heads", None) or []
    named = [f"cross.L{layer}.H{head}" for layer, head in published]
    with Progress("reading the texts") as progress:
        step = partial(progress, "reading the texts")
        result = aligned(folder.model, texts, others, named=named, progress=step)
    if out:
        write_whole(out, json.dumps({"alignment_heads": result.alignment_heads}) + "\n")
    if wants_json():
        print_json("align", {**vars(result), "alignment_heads": result.alignment_heads})
        return
    result.table().print(screen)
    screen.print(f"alignment_heads: {json.dumps(result.alignment_heads)}")
    if out:
        screen.say(
            f"written: {out}, for generation_config.json of transformers and config.json of CTranslate2"
        )


@command()
def look(
    model: Model,
    text: Annotated[str | None, Argument(metavar="[TEXT]")] = None,
    live: Annotated[bool, Option("--live")] = False,
    port: Port = None,
    browser: Annotated[bool, Option("--open/--no-open")] = True,
    device: str = "cpu",
) -> None:
    """Touch the heads of a model in the browser.

    The page of a finished run, with the model in it; of any other model a page behind which it runs here until Ctrl-C.

    Args:
        model: The folder of a finished run of `headwise train`, or a model folder in Hugging Face layout.
        text: The text that a live page opens with.
        live: Of a run, too, serve a page behind which the model runs, and not its report.
        port: Port of the served page on 127.0.0.1; 0 or none: any free one.
        browser: Open the page in the browser, or print its address alone.

    Example: headwise look gemma-3-270m
    """
    # A model that is no run has no report to show. A run is served, too, where that, or another text, is asked for.
    if (
        live
        or text is not None
        or (not (model / RUN).exists() and (model / "config.json").exists())
    ):
        _live(model, text, port or 0, browser, device)  # port 0: any free one
        return
    if port is not None:
        raise HeadwiseError(
            f"--port {port} is where --live serves its page; pass --live too, or leave it out"
        )
    report = _report_of(model)
    address = report.resolve().as_uri()
    opened = _opened(address, browser)
    if wants_json():
        print_json(
            "look",
            {"run": model, "report": report, "address": address, "opened": opened},
        )
        return
    screen.say(f"report: {report}")
    screen.print(address)
    if browser and not opened:
        err.say("there is no display here to open it on; open the file in a browser")


def _report_of(run: Path) -> Path:
    """The report of a finished run, written where it is missing."""
    if not run.is_dir():
        raise HeadwiseError(
            f"{run} is no folder; pass the run folder that `headwise train` printed, or a model folder"
        )
    report = run / REPORT
    if report.exists():
        return report
    with needs_torch():
        from headwise.gpt.run import read_run
    record = read_run(run)
    if record is None:
        raise HeadwiseError(
            f"{run} holds no run of `headwise train` and no config.json; pass the folder of a run or of a model"
        )
    if record.status != "finished":
        raise HeadwiseError(
            f"the run in {run} has not finished; go on with `headwise train --resume --out {run}`"
        )
    return write_report_of(run)


def _live(model: Path, text: str | None, port: int, browser: bool, device: str) -> None:
    """Serve the page of a model, and answer it until Ctrl-C. `text` is what it opens with."""
    check_reads_tokens(model)
    # models of images have one of the two
    if {"vision_config", "patch_size"} & read_config(model).keys():
        raise HeadwiseError(
            f"{model} reads images; hw.watch(hw.open('{model}'), maps=True) has the maps of your own"
        )
    if not has_tokenizer(model):
        raise HeadwiseError(
            f"{model} has no tokenizer, so it reads no text; put its tokenizer.json beside the weights"
        )
    with needs_torch():
        from headwise.gpt.run import example_of
        from headwise.heads.look import Desk
        from headwise.models.open import open_folder
    from headwise.view.look import Served

    with Progress("opening the model"):
        desk = Desk(open_folder(model, device=device))
    # What the page opens with: the text asked for, what a run held out; else a text of its own.
    example = text or (example_of(model) if is_own(model) else None)
    served = Served(desk, port, example, language())
    try:
        opened = _opened(served.address, browser)
        if wants_json():
            print_json(
                "live", {"model": model, "address": served.address, "opened": opened}
            )
            sys.stdout.flush()  # whoever reads it opens the page, while this goes on
        else:
            screen.print(served.address)
        err.say(f"the heads of {desk.folder.name} are at this address until Ctrl-C")
        served.work()
    except KeyboardInterrupt:
        err.say("the page is closed")
    finally:
        served.close()


def _opened(address: str, browser: bool) -> bool:
    """Open an address in the browser, if that is wanted and a window can appear; was it opened?

    Where none can, `webbrowser` may start a browser of the terminal, such as lynx, which takes it from the command.
    """
    # Windows and macOS have windows; elsewhere X11 or Wayland sets a variable.
    display = sys.platform in ("win32", "darwin") or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))
    )
    return browser and display and webbrowser.open(address)


@command()
def verify(model: Model, device: str = "cpu") -> None:
    """Check a model's cache, its padding and its batches.

    A text is read whole, and then token by token, in chunks, padded, and beside another text. Where a result differs by
    more than rounding, the layer and the token are named where it begins. Exit code 1 says that one differs.

    Example: headwise verify gemma-3-270m
    """
    check_reads_tokens(model)
    with needs_torch():
        from headwise.models.open import open_folder
        from headwise.models.verify import verify
    with Progress("opening the model") as progress:
        opened = open_folder(model, device=device).model
        progress("reading a text in nine ways", 0, 0)
        verified = verify(opened)
    if wants_json():
        print_json("verify", {**vars(verified), "right": verified.right})
    else:
        screen.print(verified.text())
        screen.say(
            "All that was asked is equal." if verified.right else "They are NOT equal."
        )
    if not verified.right:
        raise typer.Exit(1)
