"""`headwise train`; and what is seen of it while it goes on: the first maps in the terminal, or a page of its own."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from headwise.cli.app import File, command, named_path, needs_torch, print_json, wants_json
from headwise.cli.heads import write_report_of
from headwise.corpus.sources import Sources
from headwise.errors import HeadwiseError
from headwise.files import STDIN, read_text, text_path
from headwise.gpt.presets import PRESETS, find_preset
from headwise.view import Progress, err, screen
from headwise.words import Facts

if TYPE_CHECKING:
    from headwise.corpus.training import Corpus
    from headwise.gpt.film import Film, Frame
    from headwise.gpt.gpt import GPTConfig
    from headwise.gpt.presets import Recipe
    from headwise.gpt.run import Run, Settings
    from headwise.gpt.train import Progress as TrainingProgress

LISTED = "list"  # of --preset: what presets there are
# of a preset, as they are listed
SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_model", "context")


def _presets() -> list[str]:  # what a shell offers to complete --preset
    return [*PRESETS, LISTED]


@command()
def train(
    text: Annotated[list[Path] | None, Argument(parser=named_path, metavar="[TEXT]...")] = None,
    preset: Annotated[str | None, Option(autocompletion=_presets)] = None,
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
    live: Annotated[bool, Option("--live")] = False,
    attention: Annotated[str | None, Option(metavar="FILE:CLASS")] = None,
) -> None:
    """Train a small GPT and write a report.

    The result is compared with the best n-gram on held-out text. The run folder holds the model and report.html.
    """
    if preset == LISTED:
        _list_presets()
        return
    if preset is not None:
        find_preset(preset)  # raises HeadwiseError
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": head_dim, "n_layers": layers}
    sizes |= {"d_model": width, "context": context}
    with _kept_input(text or [], out, resume) as (texts, out):
        # a run may be resumed from another folder
        names = [os.path.realpath(text_path(each)) for each in texts]
        if names:
            Sources(list(map(Path, names)))  # refuses what is not there, before torch is loaded
        # fields of `Settings`; what is None was not asked for, and a run that is resumed keeps its own
        options = {
            "preset": preset,
            "text": tuple(names) or None,
            "tokenizer": None if tokenizer is None else os.path.realpath(tokenizer),
            "lines": lines,
            "seed": seed,
            "steps": steps,
            "shape": {name: value for name, value in sizes.items() if value is not None},
        }
        with needs_torch():
            from headwise.gpt.own import register_file
            from headwise.gpt.run import run_training
        options["attention"] = None if attention is None else register_file(attention)
        folder, settings = run_settings(options, out, resume)
        try:
            with training_progress() as (report, reading):
                result = run_training(
                    folder, settings, report, resume, err.say, _film(folder, live), reading
                )
                report_path = write_report_of(folder)
        except KeyboardInterrupt as stop:
            stop.add_note(_how_it_goes_on(folder))
            raise
        if wants_json():
            print_json("train", result_json(folder, result, report_path))
        else:
            _print_result(result)
            screen.say(f"\nreport: {report_path}")
            err.say(f"open it in a browser, or with: headwise look {folder}")


@contextmanager
def _kept_input(
    text: list[Path], folder: Path | None, resume: bool
) -> Iterator[tuple[list[Path], Path | None]]:
    """The paths of the texts, and the folder of the run as asked for (None: it is chosen later).

    Where the text is standard input, which cannot be read twice, the folder is chosen here and keeps it for --resume.
    """
    if Path(STDIN) not in text:
        yield text, folder
        return
    if len(text) > 1:
        raise HeadwiseError(f"{STDIN} is standard input, a text by itself; pass it alone, or files")
    if resume:
        raise HeadwiseError(f"--resume with {STDIN}: the run has kept its text; leave {STDIN} out")
    with needs_torch():  # gpt.run imports it
        from headwise.gpt.run import kept_text
    folder = folder or free_folder(Path("runs") / "stdin")
    with kept_text(folder, read_text(STDIN)) as path:
        yield [path], folder


def _list_presets() -> None:
    """What each preset is, and its size."""
    rows = []
    for preset in PRESETS.values():
        # A preset that does not name key/value heads has as many as query heads.
        shape, recipe = {"n_kv_heads": preset.shape["n_heads"], **preset.shape}, preset.recipe
        row: Facts = {"name": preset.name, "about": preset.about}
        row |= {size: shape[size] for size in SIZES}
        rows.append(row | {"steps": recipe.steps, "batch": recipe.batch, "lines": preset.lines})
    if wants_json():
        print_json("presets", {"presets": rows})
        return
    for row in rows:
        screen.print(f"{row['name']:9} {row['about']}")
        screen.print(
            f"{'':9} " + ", ".join(f"{name} {row[name]:,}" for name in (*SIZES, "steps", "batch"))
        )


def run_settings(options: Facts, folder: Path | None, resume: bool) -> tuple[Path, Settings]:
    """The folder and the settings of a new run, or those of the run that is resumed, with which the options must agree.

    options  fields of `Settings`; None where nothing was asked for
    folder   what --out says; without it a folder in runs/ by the name of the text or of the preset
    """
    with needs_torch():
        from headwise.gpt.run import Settings, read_run
    wanted = {name: value for name, value in options.items() if value is not None}
    if folder is None:
        if resume:
            raise HeadwiseError("--resume needs --out, the folder of the run to go on with")
        settings = Settings(**wanted)
        name = settings.paths[0] if settings.paths else Path(settings.preset)
        return free_folder(Path("runs") / name.stem), settings
    run = read_run(folder) if resume and folder.is_dir() else None
    if run is None:
        if resume:
            err.say(f"headwise: nothing to resume in {folder}; beginning there")
        return folder, Settings(**wanted)
    saved = vars(run.settings) | run.settings.shape  # fields and sizes side by side, by their names
    shape = wanted.pop("shape", {})
    for name, value in {**wanted, **shape}.items():  # what was not asked for stays as it was
        # also a size of the preset's that the run did not ask for by itself
        if saved.get(name) != value:
            raise HeadwiseError(
                f"the run in {folder} has {name}={saved.get(name)}, and {name}={value} is asked for; leave it "
                "out to resume, or take another out="
            )
    return folder, run.settings


def free_folder(folder: Path) -> Path:
    """The folder, or `NAME-2` beside it and so on: an earlier run is never written over."""
    free, number = folder, 2
    while free.exists():
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free


# of a finished run, which has a summary
def result_json(folder: Path, result: Run, report: Path) -> Facts:
    summary = result.summary
    assert summary is not None
    # Held-out forms of verbs: right by the model, right by the n-gram, and all. A run on a text has none.
    cells = (
        None
        if result.cells is None
        else dict(zip(("model", "ngram", "all"), result.cells, strict=True))
    )
    return {
        "run": folder,
        "report": report,
        "held_out_loss": summary.held_out_loss,
        "baseline_loss": summary.baseline_loss,
        "baseline": summary.baseline_name,
        "cells_right": cells,
        "facts": summary.facts,
        "samples": summary.samples,
    }


def _print_result(result: Run) -> None:  # of a finished run
    summary = result.summary
    assert summary is not None
    screen.say(f"held-out loss   {summary.held_out_loss:.3f} nats per token")
    if summary.baseline_loss is not None:
        gain, best = (
            summary.baseline_loss - summary.held_out_loss,
            min(summary.curve, key=lambda x: x.held_out_loss),
        )
        # The model got worse again on held-out text: it learns its own text by heart. A rise of under 0.02 nats does
        # not count, a round choice; with a larger margin fewer runs are told to take fewer steps.
        by_heart = best.held_out_loss < summary.held_out_loss - 0.02
        advice = "; more --steps may help"
        if by_heart:
            advice = f"; its best was {best.held_out_loss:.3f}, at step {best.step}: take fewer --steps, or more text"
        verdict = f"{gain:.3f} better" if gain > 0 else f"{-gain:.3f} worse{advice}"
        screen.say(
            f"the baseline    {summary.baseline_loss:.3f}, {summary.baseline_name}: the model is {verdict}"
        )
    if result.cells is not None:
        model, ngram, count = result.cells
        screen.say(f"held-out cells  {model} of {count} translated exactly; the n-gram {ngram}")
    screen.say("\nsamples")
    for sample in summary.samples:
        screen.print("  " + sample.replace("\n", "\n  "))


def _how_it_goes_on(folder: Path) -> str:
    """What Ctrl-C says where the training itself has no step to tell of."""
    from headwise.gpt.run import read_run

    run = read_run(folder) if folder.is_dir() else None
    if run is not None and run.status == "finished":
        return f"the model is written; its report: headwise heads {folder}"
    if run is None:
        return "no file was written"
    return f"the run has begun in {folder}: go on with --resume --out {folder}"


@contextmanager
def training_progress() -> Iterator[tuple[Callable[[TrainingProgress], None], Progress]]:
    """Gives what the training reports its steps to, and what else takes long (reading a text) its progress.

    Where there is no terminal, each evaluation on held-out text has a line.
    """
    # the latest: most steps have no evaluation, and it is shown until the next
    held_out: float | None = None
    with Progress("preparing the text and the model") as progress:

        def report(state: TrainingProgress) -> None:
            nonlocal held_out
            if state.held_out_loss is not None:
                held_out = state.held_out_loss
            latest = "" if held_out is None else f"  held-out {held_out:.3f}"
            numbers = f"loss {state.loss:.3f}{latest}  {state.tokens_per_second:,.0f} tokens/s"
            progress(
                "step", state.step, state.steps, numbers, milestone=state.held_out_loss is not None
            )

        yield report, progress


# What is seen of a training while it goes on: round choices.
EARLY = 1 / 10  # of the steps: heads differ by then, and who started the training is still watching
FIRST_HEADS, FIRST_TOKENS = 8, 16  # that the terminal shows: two rows of pictures, as a rule


def _film(folder: Path, live: bool) -> Callable[[Corpus, GPTConfig, Recipe], Film]:
    """Makes the film of a training, whose frames are drawn as they come: all of them if `live`, else an early one."""
    from headwise.gpt.film import Film

    def make(corpus: Corpus, config: GPTConfig, recipe: Recipe) -> Film:
        drawn = False

        def draw(frame: Frame) -> None:
            nonlocal drawn
            if live or (not drawn and EARLY * recipe.steps <= frame["step"] < recipe.steps):
                drawn = True
                _print_maps(folder, film, frame)

        film = Film(corpus, config, recipe, draw)
        return film

    return make


def _print_maps(folder: Path, film: Film, frame: Frame) -> None:
    """The maps of the first heads on the first tokens of the line."""
    import numpy as np

    from headwise.records import HeadMap, HeadMaps, parse_head
    from headwise.view.terminal import print_maps

    heads, T = film.header["heads"], len(film.header["tokens"])
    weights = np.frombuffer(b64decode(frame["maps"]), np.uint8).reshape(
        len(heads), T, T
    ) / np.float32(255)
    maps = []
    for name, of_head in zip(heads[:FIRST_HEADS], weights, strict=False):
        _, layer, head = parse_head(name)  # _: the stack, of which our GPT has one
        maps.append(HeadMap(layer, head, of_head[:FIRST_TOKENS, :FIRST_TOKENS]))
    step = f"step {frame['step']} of {film.header['steps']}"
    err.say(f"{step}: where heads look so far (--live shows it at twenty steps)")
    print_maps(err, HeadMaps(folder.name, tuple(film.header["tokens"][:FIRST_TOKENS]), tuple(maps)))
