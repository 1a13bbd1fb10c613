"""`headwise train` and `generate`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from headwise.cli.app import (
    File,
    Model,
    Seed,
    SomeCount,
    command,
    named_path,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.cli.heads import write_report_of
from headwise.errors import HeadwiseError
from headwise.families import check_next
from headwise.files import STDIN, read_text, text_path
from headwise.view import Progress, err, screen
from headwise.words import Facts

if TYPE_CHECKING:
    from headwise.gpt.run import Run, Settings
    from headwise.gpt.train import Progress as TrainingProgress


@command()
def train(
    text: Annotated[
        list[Path] | None, Argument(parser=named_path, metavar="[TEXT]...")
    ] = None,
    preset: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    context: int | None = None,
    steps: int | None = None,
    # a signed number of 64 bits holds no more
    seed: Annotated[int | None, Option(min=0, max=2**63 - 1)] = None,
    tokenizer: File = None,
    lines: bool | None = None,
    out: File = None,  # a folder, or none
    resume: Annotated[bool, Option("--resume")] = False,
    attention: Annotated[str | None, Option(metavar="FILE:CLASS")] = None,
) -> None:
    """Train a small GPT and write a report.

    The result is compared with the best n-gram on held-out text. The run folder holds the model and report.html.

    Args:
        text: UTF-8 text files, or folders of them; - for standard input; tale, a little book; default: the verb
            corpus.
        preset: verbs (the default), microgpt, nanogpt, fast, book, llama or course.
        heads: Query heads per layer.
        kv_heads: Key/value heads per layer; a divisor of --heads.
        head_dim: Width of a head. Default: --width divided by --heads.
        layers: Number of layers.
        width: Width of the model.
        context: Longest text the model sees, in tokens.
        steps: Training steps (updates of the weights).
        seed: Seed for the weights, the batches and the choice of held-out text.
        tokenizer: A tokenizer.json. Default: a token is a character.
        lines: Is each line a document of its own, or is the text one stream?
        out: The run folder, in Hugging Face layout where the preset has such a form. Default: a new one in runs/.
        resume: Continue the run in --out.
        attention: A class in a file of Python that takes the place of the attention, such as attention.py:Mine. Its
            code is run.

    Example: headwise train book.txt --preset llama --heads 8 --kv-heads 2 --steps 500 --out runs/book
    """
    asked = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim}
    asked |= {"n_layers": layers, "d_model": width, "context": context}
    shape = {name: size for name, size in asked.items() if size is not None}
    with needs_torch():
        from headwise.gpt.gpt import register_file
        from headwise.gpt.run import kept_text, run_training
    with ExitStack() as stack:
        # it cannot be read twice: the folder keeps it
        if text == [Path(STDIN)] and not resume:
            out = out or free_folder(Path("runs") / "stdin")
            text = [stack.enter_context(kept_text(out, read_text(STDIN)))]
        elif text and Path(STDIN) in text:
            raise HeadwiseError(
                f"{STDIN} is standard input, a text by itself; leave it out with --resume"
            )
        names = tuple(os.path.realpath(text_path(path)) for path in text or [])
        options = {
            "preset": preset,
            "text": names or None,
            "tokenizer": tokenizer and os.path.realpath(tokenizer),
            "lines": lines,
            "seed": seed,
            "steps": steps,
            "shape": shape,
            "attention": attention and register_file(attention),
        }
        folder, settings = run_settings(options, out, resume)
        try:
            with Progress("preparing the text and the model") as progress:
                report = _reporter(progress)
                result = run_training(folder, settings, report, resume, err.say)
            # the report has a progress of its own
            page = write_report_of(folder)
        except KeyboardInterrupt as stop:
            stop.add_note(f"go on with: headwise train --resume --out {folder}")
            raise
    _print_result(folder, result, page)


def run_settings(
    options: Facts, folder: Path | None, resume: bool
) -> tuple[Path, Settings]:
    """The folder and the settings of a new run, or those of the run that is resumed, with which the options must agree.

    options  fields of `Settings`; None where nothing was asked for
    folder   what --out says; without it a folder in runs/ by the name of the text or of the preset
    """
    from headwise.gpt.run import Settings, read_run

    wanted = {name: value for name, value in options.items() if value is not None}
    if folder is None:
        if resume:
            raise HeadwiseError(
                "--resume needs --out, the folder of the run to go on with"
            )
        settings = Settings(**wanted)
        name = settings.paths[0] if settings.paths else Path(settings.preset)
        return free_folder(Path("runs") / name.stem), settings
    run = read_run(folder) if resume and folder.is_dir() else None
    if run is None:
        if resume:
            err.say(f"headwise: nothing to resume in {folder}; beginning there")
        return folder, Settings(**wanted)
    # fields and sizes side by side, by their names
    saved = vars(run.settings) | run.settings.shape
    for name, value in {**wanted, **wanted.pop("shape", {})}.items():
        # also a size of the preset's that the run did not ask for by itself
        if name != "shape" and saved.get(name) != value:
            raise HeadwiseError(
                f"the run in {folder} has {name}={saved.get(name)}, and {name}={value} is asked for; leave it "
                "out to resume, or take another out="
            )
    return folder, run.settings


def free_folder(folder: Path) -> Path:
    """The folder, or `NAME-2` beside it and so on: an earlier run is never written over."""
    free = folder
    number = 2
    while free.exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


def _print_result(folder: Path, result: Run, page: Path) -> None:
    """What a finished run has learned, and where its report is."""
    summary = result.summary
    cells = result.cells
    assert summary is not None
    if wants_json():
        # Held-out forms of verbs. A run on a text has none.
        names = ("model", "ngram", "all")
        document = {
            "run": folder,
            "report": page,
            "held_out_loss": summary.held_out_loss,
            "baseline_loss": summary.baseline_loss,
            "baseline": summary.baseline_name,
            "cells_right": cells and dict(zip(names, cells, strict=True)),
            "facts": summary.facts,
            "samples": summary.samples,
        }
        print_json("train", document)
        return
    screen.say(f"held-out loss   {summary.held_out_loss:.3f} nats per token")
    gain = summary.baseline_loss - summary.held_out_loss
    verdict = f"{gain:.3f} better"
    if gain <= 0:
        best = min(summary.curve, key=lambda point: point.held_out_loss)
        # After its best it learned its own text by heart: fewer --steps; a best at the end asks for more.
        verdict = f"{-gain:.3f} worse; its best was {best.held_out_loss:.3f}, at step {best.step}"
    baseline = f"{summary.baseline_loss:.3f}, {summary.baseline_name}"
    screen.say(f"the baseline    {baseline}: the model is {verdict}")
    if cells is not None:
        model, ngram, count = cells
        screen.say(
            f"held-out cells  {model} of {count} translated exactly; the n-gram {ngram}"
        )
    screen.say("\nsamples")
    for sample in summary.samples:
        screen.print("  " + sample.replace("\n", "\n  "))
    screen.say(f"\nreport: {page}")
    err.say(f"open it in a browser, or with: headwise look {folder}")


def _reporter(progress: Progress) -> Callable[[TrainingProgress], None]:
    """Shows each step; where there is no terminal, each evaluation on held-out text has a line."""
    # the latest: most steps have no evaluation, and it is shown until the next
    held_out = ""

    def report(state: TrainingProgress) -> None:
        nonlocal held_out
        is_evaluated = state.held_out_loss is not None
        if is_evaluated:
            held_out = f"  held-out {state.held_out_loss:.3f}"
        numbers = f"loss {state.loss:.3f}{held_out}"
        progress("step", state.step, state.steps, numbers, milestone=is_evaluated)

    return report


@command()
def generate(
    model: Model,
    prompt: str = "",
    tokens: Annotated[int | None, Option(min=0)] = None,
    temperature: Annotated[float | None, Option(min=0.0)] = None,
    top_k: SomeCount = None,
    seed: Seed = 0,
    device: str = "cpu",
) -> None:
    """Continue a text with a model that predicts the next token.

    Args:
        model: A run folder, or a model folder in Hugging Face layout.
        prompt: The text to continue. ___ at its end is the place for one word.
        tokens: The largest number of tokens to add. Default: 100, and 1 for ___.
        temperature: 0: always the most likely token. 1: sample from the model's probabilities. Higher: more random.
            Default: 0.8, and 0 for ___.
        top_k: Sample from the k most likely tokens only.
        seed: Seed for sampling.

    Example: headwise generate runs/verbs --prompt "he will work =" --temperature 0
    """
    check_next(
        model,
        "pass a model with a causal language-model head, such as a GPT-2, a Llama or a Gemma",
    )
    with needs_torch():
        from headwise.corpus.tokens import BLANK, ELLIPSIS, require_tokens
        from headwise.models.open import generate, open_folder, prompt_ids
    folder = open_folder(model, device=device)
    decode = require_tokens(folder).decode
    ids = prompt_ids(folder.model, prompt)
    # ids leave out a ___ that is a place to fill, and keep one that is text
    dots = ELLIPSIS.search(prompt)
    blank = dots[1] if dots else BLANK
    fills = blank in prompt and blank not in decode(ids)
    if tokens is None:
        tokens = 1 if fills else 100
    if temperature is None:
        temperature = 0.0 if fills else 0.8
    stream = generate(folder.model, ids, tokens, temperature, top_k, seed, stream=True)
    if not wants_json():
        _print_text(ids, stream, decode)
        return
    n_prompt = len(ids)
    began = time.monotonic()
    with Progress("reading the prompt") as progress:
        for token in stream:
            ids.append(token)
            progress("token", len(ids) - n_prompt, tokens)
    n_new = len(ids) - n_prompt
    seconds = max(time.monotonic() - began, 1e-9)  # never 0: it divides
    document = {
        "prompt": prompt,
        "text": decode(ids),
        "ids": ids,
        "n_tokens": n_new,
        "tokens_per_second": round(n_new / seconds, 1),
    }
    print_json("generate", document)


def _print_text(
    ids: list[int], stream: Iterable[int], decode: Callable[[list[int]], str]
) -> None:
    """Print the prompt, then each token as it comes. `ids` holds the prompt; the new tokens are appended to it."""
    written = decode(ids)
    screen.print(written, end="")
    for token in stream:
        ids.append(token)
        # the whole text, as the text of a token may depend on the tokens before it
        text = decode(ids)
        # A character of several tokens decodes to U+FFFD until its last token arrives, so printing waits.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            screen.print(text[len(written) :], end="")
            written = text
    # the rest that waited, and the line end
    screen.print(decode(ids)[len(written) :])
