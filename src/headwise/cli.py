"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.exceptions import TyperException

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.model.run import Result, Settings
    from headwise.model.train import Progress as TrainingProgress
    from headwise.records import HeadMaps

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Multi-head attention in which a head is a thing you can hold.",
)
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)
_show_traceback = False


def _set_debug(value: bool) -> None:
    global _show_traceback
    _show_traceback = _show_traceback or value


Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, written by `headwise train`.")]


def _print_version(value: bool) -> None:
    if value:
        from headwise import __version__

        out.print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Example: headwise train, then headwise heads runs/verbs",
    context_settings={"help_option_names": ["--help", "-h"]},
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Multi-head attention in which a head is a thing you can hold."""
    if context.invoked_subcommand is None:
        out.print(context.get_help())


@app.command(
    epilog="Example: headwise train book.txt --preset llama --heads 8 --kv-heads 2 --steps 500 --out runs/book"
)
def train(
    text: Annotated[
        Path | None, typer.Argument(metavar="[TEXT]", help="A UTF-8 text file; without it the built-in verb corpus.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="verbs (the default), microgpt, nanogpt, llama or fast.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads per layer.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads per layer; a divisor of --heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default width / heads.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest text the model sees, in tokens.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, batches and held-out choice.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; default: characters.")] = None,
    lines: Annotated[
        bool | None, typer.Option("--lines/--stream", help="Each line is a document, or the text is one stream.")
    ] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Run folder; default: a new one in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small GPT and write a report.

    The result is compared with the best n-gram on held-out text. The run folder holds the model, in Hugging Face layout
    where the preset has such a form, and report.html.
    """
    shape = {
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "n_layers": layers,
        "d_model": width,
        "context": context,
    }
    given = {
        "preset": preset,
        "text": None if text is None else str(text.resolve()),
        "tokenizer": None if tokenizer is None else str(tokenizer.resolve()),
        "lines": lines,
        "seed": seed,
        "steps": steps,
        "shape": {name: value for name, value in shape.items() if value is not None} or None,
    }
    folder, settings = _run_settings(given, out_folder, resume)
    with _torch(), _training_progress() as report:
        from headwise.model.run import run_training

        result = run_training(folder, settings, report, resume, _say)
        report_path = _write_report(folder, result.example)
    if as_json:
        _print_json(_result_json(result, report_path))
        return
    _print_result(result)
    out.print(f"\nreport: {report_path}")


def _run_settings(given: dict[str, Any], folder: Path | None, resume: bool) -> tuple[Path, Settings]:
    """The settings of a new run, or those of the run that is resumed, with which the given ones must agree."""
    with _torch():
        from headwise.model.run import Settings, read_run
    wanted = {name: value for name, value in given.items() if value is not None}
    if folder is None:
        if resume:
            raise HeadwiseError("--resume needs --out, the folder of the run to go on with")
        return _free_folder(Path(wanted.get("text", wanted.get("preset", "verbs"))).stem), Settings(**wanted)
    run = read_run(folder) if resume and folder.is_dir() else None
    if run is None:
        if resume:
            err.print(f"headwise: nothing to resume in {folder}; beginning there")
        return folder, Settings(**wanted)
    saved = run["settings"]
    for name, value in wanted.items():
        pairs = value.items() if name == "shape" else [(name, value)]
        before = saved["shape"] if name == "shape" else saved
        for key, new in pairs:
            if before.get(key) != new:
                raise HeadwiseError(
                    f"the run in {folder} has {key}={before.get(key)}, and {key}={new} is asked for; "
                    f"leave it out to resume, or take another --out"
                )
    return folder, Settings(**saved)


def _free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on: an earlier run is never written over."""
    number = 1
    while (folder := Path("runs") / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder


@app.command(epilog='Example: headwise generate runs/verbs --prompt "he will work =" --temperature 0')
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="How many tokens to add at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 samples as the model says.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    cache: Annotated[
        bool, typer.Option(help="Keep keys and values; the text is the same without, only slower.")
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model."""
    with _torch():
        from headwise.model.generate import generate as continue_text
        from headwise.model.run import load_run
    model, tokenizer = load_run(run)
    ids = tokenizer.prompt(prompt) or tokenizer.opening()
    written = tokenizer.decode(ids)
    if not as_json:
        out.print(written, end="")
    began, n_new = time.monotonic(), 0
    for token in continue_text(model, ids, tokens, temperature, top_k, seed, tokenizer.boundary, cache):
        ids.append(token)
        n_new += 1
        text = tokenizer.decode(ids)
        if not as_json and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character that takes two tokens
            out.print(text[len(written) :], end="")
            written = text
    if as_json:
        speed = n_new / max(time.monotonic() - began, 1e-9)
        whole = tokenizer.decode(ids)
        _print_json({"prompt": prompt, "text": whole, "new_tokens": n_new, "tokens_per_second": round(speed, 1)})
    else:
        out.print(tokenizer.decode(ids)[len(written) :])


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
        _print_json({"model": maps.model, "tokens": maps.tokens, "heads": rows, "report": str(path)})
        return
    print_maps(out, maps)
    print_table(out, maps)
    out.print(f"\nreport: {path}")


def _head_maps(run: Path, text: str | None) -> HeadMaps:
    with _torch():
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


def _write_report(run: Path, text: str) -> Path:
    return _write_maps(run, _head_maps(run, text))


def _result_json(result: Result, report: Path) -> dict[str, Any]:
    summary = result.summary
    cells = None if result.cells is None else dict(zip(("model", "ngram", "all"), result.cells, strict=True))
    return {
        "run": str(result.folder),
        "report": str(report),
        "held_out_loss": summary.held_out_loss,
        "baseline_loss": summary.baseline_loss,
        "baseline": summary.baseline_name,
        "cells_right": cells,
        "facts": summary.facts,
        "samples": summary.samples,
    }


def _print_result(result: Result) -> None:
    summary = result.summary
    out.print(f"held-out loss   {summary.held_out_loss:.3f} nats per token")
    if summary.baseline_loss is not None:
        gain = summary.baseline_loss - summary.held_out_loss
        verdict = f"the model is {abs(gain):.3f} " + ("better" if gain > 0 else "worse; more --steps may help")
        out.print(f"the baseline    {summary.baseline_loss:.3f}, {summary.baseline_name}: {verdict}")
    if result.cells is not None:
        model, ngram, count = result.cells
        out.print(f"held-out cells  {model} of {count} translated exactly; the n-gram {ngram}")
    out.print("\nsamples")
    for sample in summary.samples:
        out.print("  " + sample.replace("\n", "\n  "))


def _say(line: str) -> None:
    err.print(line, soft_wrap=True)


@contextmanager
def _training_progress() -> Iterator[Callable[[TrainingProgress], None]]:
    """A bar on a terminal, a line an evaluation elsewhere; both on standard error."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        BarColumn(bar_width=24),
    )
    held_out = ""
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("training", total=None, numbers="")

        def report(progress: TrainingProgress) -> None:
            nonlocal held_out
            if progress.held_out_loss is not None:
                held_out = f"  held-out {progress.held_out_loss:.3f}"
            numbers = f"loss {progress.loss:.3f}{held_out}  {progress.tokens_per_second:,.0f} tokens/s"
            bar.update(task, total=progress.steps, completed=progress.step, numbers=numbers)
            if bar.disable and progress.held_out_loss is not None:
                err.print(f"step {progress.step}/{progress.steps}  {numbers}")

        yield report


@contextmanager
def _torch() -> Iterator[None]:
    """Imports of rooms that need torch, with one clear line where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        raise HeadwiseError(f"this command needs {error.name}: pip install 'headwise[torch]'") from None


def _print_json(document: dict[str, Any]) -> None:
    if sys.stdout is not None:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def main() -> NoReturn:
    """Run the command line. Exit code 2 for bad input, 130 for Ctrl-C; one line each, a traceback with --debug."""
    code = 0
    try:
        # Not app(): that turns Ctrl-C and a closed pipe into exit codes before this can say what was saved.
        command = typer.main.get_command(app)
        with command.make_context("headwise", sys.argv[1:]) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as stop:
        code = stop.exit_code
    except TyperException as error:
        code = _failed(error, error.format_message())
    except HeadwiseError as error:
        code = _failed(error, str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on: stay quiet at exit
    except OSError as error:
        code = _failed(error, _os_message(error))
    except (KeyboardInterrupt, typer.Abort) as error:
        code = _failed(error, _interrupt_message(error), code=130)
    except Exception as error:
        code = _failed(error, f"{type(error).__name__}: {error}; this is a bug, and --debug shows where", code=1)
    sys.exit(code)


def _failed(error: BaseException, message: str, code: int = 2) -> int:
    if _show_traceback:
        raise error
    err.print(f"headwise: {' '.join(message.split())}", soft_wrap=True)
    return code


def _os_message(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = error.strerror or str(error)
    where = f" {error.filename}" if error.filename else ""
    return f"cannot {'write' if full else 'use'}{where}: {reason}{'; earlier files are whole' if full else ''}"


def _interrupt_message(error: BaseException) -> str:
    step = getattr(error, "step", None)
    if step is None:
        return "interrupted"
    return f"stopped after step {step}, and saved; go on with --resume and the same --out"


if __name__ == "__main__":
    main()
