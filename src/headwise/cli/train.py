"""`headwise train`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.app import (
    Progress,
    command,
    err,
    needs_torch,
    out,
    print_json,
    wants_json,
)
from headwise.cli.early import language
from headwise.cli.heads import write_report_of
from headwise.cli.interrupt import leaving
from headwise.cli.live import filmed, live_page, show_report, told
from headwise.corpus.sources import Sources
from headwise.errors import HeadwiseError
from headwise.files import STDIN, TEXT, packaged, read_text, text_path
from headwise.gpt.presets import find_preset
from headwise.words import spoken

if TYPE_CHECKING:
    from headwise.gpt.run import Run, Settings
    from headwise.gpt.train import Progress as TrainingProgress
    from headwise.gpt.train import Sharing
    from headwise.view.live import Live


def _presets() -> list[str]:
    from headwise.gpt.presets import PRESETS

    return list(PRESETS)


@command(preset=_presets)
@leaving()
def train(
    text: list[Path] | None = None,
    preset: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    latent_dim: int | None = None,
    rope_dim: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    context: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    tokenizer: Path | None = None,
    lines: bool | None = None,
    field: str | None = None,
    rung: str | None = None,
    samples: int | None = None,
    out_folder: Path | None = None,
    resume: bool = False,
    live: bool = False,
    port: int | None = None,
    accumulate: int = 1,
    shard: bool = False,
    as_list: bool = False,
) -> None:
    """Train a small GPT and write a report.

    The result is compared with the best n-gram on held-out text. The run folder holds the model and report.html.
    """
    if as_list:
        _list_presets()
        return
    port, lang = _port(live, port, rung), language(None)
    if shard and (live or rung is not None):
        raise HeadwiseError(f"--shard with {'--live' if live else '--rung'}: that needs the whole model; leave one out")
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "n_layers": layers}
    sizes |= {"d_model": width, "context": context, "latent_dim": latent_dim, "rope_dim": rope_dim}
    if preset is not None:
        find_preset(preset)
    with _kept_input(text or [], out_folder, resume) as (texts, out_folder):
        names = [os.path.realpath(text_path(each)) for each in texts]
        if names:
            Sources(list(map(Path, names)), field)
        options = {
            "preset": preset,
            "text": tuple(names) if len(names) > 1 else next(iter(names), None),
            "tokenizer": None if tokenizer is None else os.path.realpath(tokenizer),
            "lines": lines,
            "field": field,
            "seed": seed,
            "steps": steps,
            "shape": {name: value for name, value in sizes.items() if value is not None} or None,
        }
        if rung is not None:
            folder = out_folder or free_folder(Path("runs") / (texts[0].stem if texts else "microgpt"))
            replay_microgpt(options, rung, 20 if samples is None else samples, resume, folder)
        else:
            with needs_torch():
                from headwise.gpt.ranks import current
                from headwise.gpt.run import follow_training
                from headwise.gpt.train import Sharing
            folder, settings = current().agree(lambda: run_settings(options, out_folder, resume))
            sharing = Sharing(accumulate, shard)
            if current().rank:
                follow_training(folder, settings, sharing)
                return
            with live_page(folder, settings, port) as run:
                _train(*run, resume, samples, sharing, lang)


@contextmanager
def _kept_input(text: list[Path], folder: Path | None, resume: bool) -> Iterator[tuple[list[Path], Path | None]]:
    """The texts, and the folder of the run: it keeps standard input, where that is the text, for --resume."""
    if Path(STDIN) not in text or (resume and folder is None):
        yield text, folder
        return
    if len(text) > 1:
        raise HeadwiseError(f"{STDIN} is standard input, a text by itself; pass it alone, or files")
    with needs_torch():
        from headwise.gpt.run import kept_text
    folder = folder or free_folder(Path("runs") / "stdin")
    with kept_text(folder, read_text(STDIN)) as path:
        yield [path], folder


def _port(live: bool, port: int | None, rung: str | None) -> int | None:
    """Where the training is shown; 0 is any free port, None nowhere."""
    if port is not None and not live:
        raise HeadwiseError(f"--port {port} is where --live shows the training; pass --live too, or leave it out")
    if live and rung is not None:
        raise HeadwiseError(f"--live --rung {rung}: microgpt is replayed without a page; leave one of them out")
    return (port or 0) if live else None


def _train(
    folder: Path,
    settings: Settings,
    page: Live | None,
    resume: bool,
    samples: int | None,
    sharing: Sharing,
    lang: str,
) -> None:
    """Train, report, and print what came out."""
    with needs_torch():
        from headwise.gpt.run import SAMPLES, run_training
        from headwise.heads.film import Film
    with leaving_run(folder), training_progress(lang) as (report, reading):

        def say(line: str) -> None:
            err.print(spoken(line, lang), soft_wrap=True)

        n_samples = SAMPLES if samples is None else samples
        film = Film if page is None else partial(filmed, page)
        report = report if page is None else told(page, report)
        result = run_training(folder, settings, report, resume, say, n_samples, film, sharing=sharing, reading=reading)
        report_path = write_report_of(folder, lang)
    if wants_json():
        print_json("train", result_json(folder, result, report_path))
    else:
        _print_result(result, lang)
        out.print("\n" + spoken(f"report: {report_path}", lang))
        say(f"open it in a browser, or with: headwise look {folder}")
    if page is not None:
        show_report(page, report_path)


def _list_presets() -> None:
    """What each preset is, and its size."""
    from headwise.gpt.presets import PRESETS

    sizes = ("n_layers", "n_heads", "n_kv_heads", "d_model", "context")
    rows: list[dict[str, Any]] = []
    for preset in PRESETS.values():
        shape = {"n_kv_heads": preset.shape["n_heads"], **preset.shape}
        recipe = {"steps": preset.recipe.steps, "batch": preset.recipe.batch, "lines": preset.lines}
        rows.append({"name": preset.name, "about": preset.about, **{size: shape[size] for size in sizes}, **recipe})
    if wants_json():
        print_json("presets", {"presets": rows})
        return
    for row in rows:
        out.print(f"{row['name']:9} {row['about']}")
        out.print(
            f"{'':9} layers {row['n_layers']}, heads {row['n_heads']}, key/value heads {row['n_kv_heads']}, "
            f"width {row['d_model']}, context {row['context']}, steps {row['steps']:,} of {row['batch']}"
        )


def run_settings(options: dict[str, Any], folder: Path | None, resume: bool) -> tuple[Path, Settings]:
    """The settings of a new run, or those of the run that is resumed, with which these options must agree."""
    with needs_torch():
        from headwise.gpt.run import Settings, read_run
    wanted = {name: value for name, value in options.items() if value is not None}
    if folder is None:
        settings = Settings(**wanted)
        name = settings.paths[0] if settings.paths else Path(settings.preset)
        usual = Path("runs") / name.stem
        stopped, free = _stopped(usual, settings), free_folder(usual)
        if resume and stopped is None:
            raise HeadwiseError(
                f"--resume: no run in {usual} was stopped; pass --out, the folder of the run to go on with"
            )
        if stopped is not None and not resume:
            err.print(f"{stopped} was stopped: --resume goes on there; this is a new run", soft_wrap=True)
        return stopped if resume and stopped else free, settings
    run = read_run(folder) if resume and folder.is_dir() else None
    if run is None:
        if resume:
            err.print(f"headwise: nothing to resume in {folder}; beginning there")
        return folder, Settings(**wanted)
    saved = vars(run.settings) | run.settings.shape
    shape = wanted.pop("shape", {})
    for name, value in {**wanted, **shape}.items():
        if saved.get(name) != value:
            raise HeadwiseError(
                f"the run in {folder} has {name}={saved.get(name)}, and {name}={value} is asked for; "
                f"leave it out to resume, or take another out="
            )
    return folder, run.settings


def _stopped(folder: Path, settings: Settings) -> Path | None:
    """The latest run of these settings that has not finished, in the folder or one of those beside it."""
    from headwise.gpt.run import read_run

    stopped = None
    for each in itertools.takewhile(Path.exists, _beside(folder)):
        with suppress(HeadwiseError):  # what cannot be read is nobody's to go on with
            run = read_run(each)
            if run is not None and run.status != "finished" and run.settings == settings:
                stopped = each
    return stopped


def free_folder(folder: Path) -> Path:
    """The folder, or `NAME-2` beside it and so on: an earlier run is never written over."""
    return next(each for each in _beside(folder) if not each.exists())


def _beside(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))


def result_json(folder: Path, result: Run, report: Path) -> dict[str, Any]:
    summary = result.summary
    assert summary is not None
    cells = None if result.cells is None else dict(zip(("model", "ngram", "all"), result.cells, strict=True))
    return {
        "run": str(folder),
        "report": str(report),
        "held_out_loss": summary.held_out_loss,
        "baseline_loss": summary.baseline_loss,
        "baseline": summary.baseline_name,
        "cells_right": cells,
        "facts": summary.facts,
        "samples": summary.samples,
    }


def _print_result(result: Run, lang: str) -> None:
    summary = result.summary
    assert summary is not None

    def say(line: str) -> None:
        out.print(spoken(line, lang))

    say(f"held-out loss   {summary.held_out_loss:.3f} nats per token")
    if summary.baseline_loss is not None:
        gain, best = summary.baseline_loss - summary.held_out_loss, min(summary.curve, key=lambda x: x.held_out_loss)
        remedy = "more --steps may help"
        if best.held_out_loss < summary.held_out_loss - 0.02:  # it learns the text by heart
            remedy = f"its best was {best.held_out_loss:.3f}, at step {best.step}: take fewer --steps, or more text"
        verdict = f"the model is {abs(gain):.3f} " + ("better" if gain > 0 else f"worse; {remedy}")
        say(f"the baseline    {summary.baseline_loss:.3f}, {summary.baseline_name}: {verdict}")
    if result.cells is not None:
        model, ngram, count = result.cells
        say(f"held-out cells  {model} of {count} translated exactly; the n-gram {ngram}")
    out.print("\n" + spoken("samples", lang))
    for sample in summary.samples:
        out.print("  " + sample.replace("\n", "\n  "))


def leaving_run(folder: Path) -> AbstractContextManager[None]:
    """Ctrl-C within this block, where the training itself has no step to tell of, says how its run goes on."""

    def tell() -> str:
        begun = (folder / "run.json").exists()
        return f"the run has begun in {folder}: go on with --resume --out {folder}" if begun else "nothing was written"

    return leaving(tell)


@contextmanager
def training_progress(lang: str = "en") -> Iterator[tuple[Callable[[TrainingProgress], None], Progress]]:
    """Of the steps, and of what else takes long. Where there is no terminal, each evaluation has a line."""
    held_out = ""
    with Progress("preparing the text and the model", lang) as progress:

        def report(state: TrainingProgress) -> None:
            nonlocal held_out
            if state.held_out_loss is not None:
                held_out = f"  held-out {state.held_out_loss:.3f}"
            numbers = f"loss {state.loss:.3f}{held_out}  {state.tokens_per_second:,.0f} tokens/s"
            progress("step", state.step, state.steps, numbers, milestone=state.held_out_loss is not None)

        yield report, progress


SHOWN = 5  # losses at either end
FIXED = {"n_kv_heads": "--kv-heads", "head_dim": "--head-dim", "d_model": "--width", "context": "--context"}


def replay_microgpt(options: dict[str, Any], rung: str, n_samples: int, resume: bool, folder: Path) -> None:
    """Train microgpt on the lines of a text, print losses and samples, and write a run folder.

    options  those of `headwise train`, by name; what an exact replay cannot honour is refused
    """
    from headwise.lab.microgpt import replay

    _check_options(options, resume, folder)
    text = Path(options["text"] or packaged("names"))
    seed = 42 if options["seed"] is None else options["seed"]
    steps = 1000 if options["steps"] is None else options["steps"]
    shape = options["shape"] or {}
    began = time.perf_counter()
    with Progress("reading the names") as progress:
        every = max(1, steps // 200)  # a bar that moves at each step would take longer than the steps

        def report(step: int, loss: float) -> None:
            if step % every == 0 or step == steps:
                progress("step", step, steps, f"loss {loss:.4f}")

        result = replay(read_text(text).splitlines(), rung, steps, seed, n_samples, report, **shape)
    seconds = time.perf_counter() - began
    written = find_spec("torch") is not None  # the rungs plain and array replay without it
    if written:
        from headwise.gpt.run import Settings
        from headwise.lab.microgpt.tensor import write_folder

        settings = Settings("microgpt", str(text), seed=seed, steps=steps, shape=shape, replay=rung)
        write_folder(folder, result, settings)
    if wants_json():
        document = {"rung": rung, "steps": steps, "seed": seed, "seconds": seconds, "losses": result.losses}
        print_json("replay", {**document, "samples": result.samples, "run": str(folder) if written else None})
        return
    for step, loss in enumerate(result.losses, 1):
        if step <= SHOWN or step > steps - SHOWN:
            out.print(f"step {step:4}  loss {loss:.4f}")
    out.print("\n".join(["\nsamples", *(f"  {sample}" for sample in result.samples)]))
    out.print(f"\n{steps} steps on the {rung} rung in {seconds:.2f} s")
    no_folder = "no run folder is written: that needs torch, pip install 'headwise[torch]'"
    out.print(f"run folder: {folder}, for headwise heads, trace and generate" if written else no_folder)


def _check_options(options: dict[str, Any], resume: bool, folder: Path) -> None:
    """Refuse what an exact replay cannot honour."""
    if options["preset"] not in (None, "microgpt"):
        raise HeadwiseError(f"--rung replays microgpt, and --preset {options['preset']} is asked for; leave one out")
    shape = options["shape"] or {}
    refused = {"--tokenizer": options["tokenizer"], "--lines/--stream": options["lines"], "--resume": resume or None}
    refused |= {"--field": options["field"], "a second text": isinstance(options["text"], tuple) or None}
    for option, value in (refused | {flag: shape.get(name) for name, flag in FIXED.items()}).items():
        if value is not None:
            raise HeadwiseError(f"--rung replays microgpt exactly, so {option} cannot be honoured; leave it out")
    kept = os.path.realpath(folder / TEXT) == options["text"]  # of standard input
    if folder.exists() and (
        not folder.is_dir() or {path.name for path in folder.iterdir()} - ({TEXT} if kept else set())
    ):
        raise HeadwiseError(f"--out {folder} exists and is not empty; pass another folder")
