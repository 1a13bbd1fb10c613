"""A run folder from beginning to end: its settings, its training, its results.

run.json            settings, status and results
config.json, model.safetensors, tokenizer.json    the model, in Hugging Face layout where it has one
metrics.jsonl       one line a report of training
film.jsonl          what the heads did at some of the steps; see headwise.heads.film
state.safetensors   where training stands; gone once the model is written
report.html         the report, written by the commands; walk.html beside it, the walk through one head
text.txt            the text, where it came from no file
lock                held while a process trains here
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from headwise.corpus.sources import Progress as Reading
from headwise.corpus.sources import Sources
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Corpus, Documents, text_corpus, verb_corpus
from headwise.errors import HeadwiseError
from headwise.families import RUN
from headwise.files import LOCK, TEXT, Kept, is_unfinished, read_bytes, read_json, require_empty, write_whole
from headwise.gpt.checkpoint import MODEL_FILES, hf_form, load_model, save_model
from headwise.gpt.generate import generate
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe, check_seed, find_preset
from headwise.gpt.ranks import current
from headwise.gpt.train import METRICS, STATE, UNDIVIDED, Division, Look, Progress, no_look, train
from headwise.layer.projections import shapes_alone
from headwise.memory import free_memory
from headwise.records import CurvePoint, RunSummary, from_json
from headwise.spec import require_size
from headwise.table import amount
from headwise.words import Note, unknown

REPORT, WALK, FILM = "report.html", "walk.html", "film.jsonl"
# What is written before all else: of a run that was killed before it had a run.json, only these may be there, RUN
# half-written.
FIRST = (TEXT, RUN)
FILES = (RUN, *MODEL_FILES, METRICS, FILM, STATE, REPORT, WALK)
# Texts that a finished model writes for the report, and their length at most; round choices.
SAMPLES, SAMPLE_TOKENS = 5, 60
SAMPLE_TEMPERATURE = 0.8  # of these, and of those shown while it trains; a usual choice: below 1 fewer odd words come
# That a held-out cell is continued by at most. Its Spanish half has up to 3, such as `él ha trabajado`. With 3 here
# `él ha trabajado ella` would be cut to what is right; 4 would do, and 8 is a round choice.
CELL_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """All that determines a run: the same settings on the same machine give the same weights."""

    preset: str = "verbs"
    text: str | tuple[str, ...] | None = None  # paths of files and folders; None takes the built-in verb corpus
    tokenizer: str | None = None  # a path; None takes characters, or words for the verb corpus
    lines: bool | None = None  # is each line of the text a document? None takes the preset's way
    seed: int = 0
    steps: int | None = None  # None takes the recipe's
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of GPTConfig that differ from the preset

    @property
    def paths(self) -> list[Path]:
        """The files and folders of the text."""
        texts = [self.text] if isinstance(self.text, str) else self.text or ()
        return [Path(text) for text in texts]

    def resolve(self, progress: Reading | None = None) -> tuple[Corpus, GPTConfig, Recipe]:
        """The data, the model's shape and the recipe; `progress` hears how much of a large text has been read."""
        preset = find_preset(self.preset)
        check_seed(self.seed)
        if self.steps is not None and self.steps < 1:
            raise HeadwiseError(f"steps={self.steps} must be at least 1")
        recipe = preset.recipe if self.steps is None else replace(preset.recipe, steps=self.steps)
        shape = {**preset.shape, **self.shape}
        names = [each.name for each in fields(GPTConfig)]
        for name in shape:
            if name not in names:
                raise unknown(f"no field {name!r} of a model's shape", name, names)
        require_size("d_model", shape["d_model"])  # before it is multiplied; `GPTConfig` checks the other fields
        # Another width than the preset's: d_ff stays as many times the width as it is there.
        if "d_model" in self.shape and "d_ff" in preset.shape and "d_ff" not in self.shape:
            shape["d_ff"] = max(1, preset.shape["d_ff"] * self.shape["d_model"] // preset.shape["d_model"])
        GPTConfig(vocab_size=1, **shape)  # a wrong shape is said before a long text is read
        if self.text is None:
            for option in ("tokenizer", "lines"):
                if getattr(self, option) is not None:
                    raise HeadwiseError(
                        f"{option}= describes a text file; pass one, or leave it out for the verb corpus"
                    )
            corpus = verb_corpus(self.seed, shape["context"], core=preset.core)
        else:
            lines = preset.lines if self.lines is None else self.lines
            tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
            text = Sources(self.paths, progress)
            corpus = text_corpus(text, lines, shape["context"], self.seed, tokenizer)
        return corpus, GPTConfig(vocab_size=len(corpus.tokens), **shape), recipe


@dataclass(frozen=True)
class Run:
    """What run.json says of a run; from `summary` on, of one that is finished."""

    settings: Settings
    digest: str  # of its text
    status: str  # "training" or "finished"
    summary: RunSummary | None
    cells: tuple[int, int, int] | None  # held-out verb cells: right by the model, right by the n-gram, all
    example: str | None  # a held-out text for the report


def run_training(
    folder: Path,
    settings: Settings,
    report: Callable[[Progress], None],
    resume: bool,
    say: Callable[[str], None] = lambda line: None,
    n_samples: int = SAMPLES,
    film: Callable[[Path, Corpus, GPTConfig, Recipe], Look] | None = None,
    build: Callable[[GPTConfig], GPT] = GPT,
    finish: Callable[[GPT], GPT] = lambda model: model,
    division: Division = UNDIVIDED,
    reading: Reading | None = None,
) -> Run:
    """Train into `folder`, or go on there, and write the model and the results.

    `report` hears of every ten steps, `reading` of a large text that is read, `say` of what else goes on; what `film`
    makes is shown the model after every step. `build` makes the model that learns, and `finish` of it the one that is
    kept. In the end it writes `n_samples` texts. Of several processes this is the first, and the others are in
    `follow_training`. A folder with a run in it is refused unless `resume` says to go on, with the same settings; the
    run that comes back may be one that was finished already.
    """
    corpus, config, recipe = settings.resolve(reading)
    division.check(corpus.data, recipe)
    with shapes_alone():
        size = GPT(config).n_parameters
    needed, free = 16 * size, free_memory()  # 4 bytes for each of a weight, its gradient and AdamW's two moments
    if needed > free and not division.apart:  # where they are apart, it is other memory that is needed
        raise HeadwiseError(
            f"{size:,} parameters take {amount(needed)} to train, and {amount(free)} are free; take a smaller model"
        )
    _check(folder, settings, corpus, resume)  # before a folder is made for it
    with Kept(folder, busy=f"another training is at work in {folder}; wait for it, or take another out=") as kept:
        run = _check(folder, settings, corpus, resume)  # again: another one may just have ended
        # What a killed process left half-written. Before there is a run nothing but FIRST was begun.
        kept.clear((TEXT, *FILES) if run else FIRST)
        if run is None:
            run = Run(settings, corpus.data.digest, "training", None, None, None)
            write_run(folder, run)
        finished = run.status == "finished"  # and resumed for its report, which the caller writes
        if current().agree(lambda: finished):  # the other processes wait for the answer in `follow_training`
            # A kill may have come at the end of this function, after run.json was written, with the state still there.
            (folder / STATE).unlink(missing_ok=True)
            return run
        say(f"training preset {settings.preset}, {size:,} parameters, on {corpus.name}, into {folder}")
        began = time.monotonic()
        look: Look = no_look
        if film is not None and not division.apart:  # it looks at whole weights, on the processor
            look = film(folder, corpus, config, recipe)
        device = current().device
        # Training seeds torch's own generators, from which dropout draws: the caller gets them back as they were.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model, curve = train(
                folder, config, recipe, corpus.data, settings.seed, report, look=look, build=build, division=division
            )
        model = finish(model)
        say("training is done; counting n-grams and writing the report")
        seconds = time.monotonic() - began
        summary, cells = _results(settings, corpus, model, recipe, curve, seconds, n_samples)
        save_model(folder, model, corpus.tokens)
        run = replace(run, status="finished", summary=summary, cells=cells, example=corpus.example)
        write_run(folder, run)
        (folder / STATE).unlink(missing_ok=True)
        return run


def follow_training(folder: Path, settings: Settings, division: Division) -> None:
    """What the other processes do while the first is in `run_training`: their part of each step, and no file.

    They make the usual GPT: the first may have a `build` of its own only where it is alone.
    """
    corpus, config, recipe = settings.resolve()
    division.check(corpus.data, recipe)
    is_finished = current().agree(lambda: False)  # as the first process says; here nothing is asked
    if not is_finished:
        train(folder, config, recipe, corpus.data, settings.seed, lambda progress: None, division=division)


@contextmanager
def kept_text(folder: Path, text: str) -> Iterator[Path]:
    """A text that comes from no file, written into the folder of its run, which is to begin in this block.

    Where the block fails before there is a run.json, the text is removed again, unless an earlier call had written
    it. Raises HeadwiseError for a folder that is in use, and for one with another text of that name: the user's own.
    """
    path, is_new_folder = folder / TEXT, not folder.exists()
    is_new = not path.exists()
    if not is_new and read_bytes(path) != text.encode():
        raise HeadwiseError(f"{folder} holds another {TEXT}; pass another folder")
    if is_new:
        require_empty(folder, _is_of_a_beginning)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if is_new:
            write_whole(path, text)
        yield path
    except BaseException:
        if is_new and not (folder / RUN).exists():
            path.unlink(missing_ok=True)
            if is_new_folder:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _is_of_a_beginning(name: str) -> bool:
    """Is it the name of a file that a run which was killed at its beginning leaves?"""
    return name in (LOCK, TEXT) or is_unfinished(name, FIRST)


def read_run(folder: Path) -> Run | None:
    """run.json of a folder; None if there is none."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        return from_json(Run, read_json(path))
    except HeadwiseError as error:
        raise HeadwiseError(f"{path} is damaged ({error}); remove it or take another out=") from None


def example_of(folder: Path | None) -> str:
    """A text that a finished run held out; without one "emma", a name of the kind that the preset microgpt learns."""
    run = read_run(folder) if folder else None
    return (run and run.example) or "emma"


def held_out_documents(folder: Path, limit: int) -> list[list[int]]:
    """What the run in `folder` held out, as ids of documents, about `limit` tokens.

    Raises HeadwiseError when there is no run, or its text is no longer there or no longer the same.
    """
    run = read_run(folder)
    if run is None:
        raise HeadwiseError(f"{folder} has no {RUN}, so nothing was held out; pass text=")
    corpus, _, _ = run.settings.resolve()
    if corpus.data.digest != run.digest:
        raise HeadwiseError(f"the text that {folder} was trained on has changed; pass text=")
    return corpus.data.held_out_documents(limit)


def write_run(folder: Path, run: Run) -> None:
    write_whole(folder / RUN, json.dumps(asdict(run), indent=2, ensure_ascii=False) + "\n")


def _check(folder: Path, settings: Settings, corpus: Corpus, resume: bool) -> Run | None:
    """The run in the folder, None if there is none yet. Raises HeadwiseError where this training may not go on there.

    Without `resume` it may not where there is a run at all. A finished run may be resumed only while its report,
    which the commands write last, is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadwiseError(f"out={folder} is a file; pass a folder")
    run = read_run(folder)
    if run is None:
        if folder.exists() and not all(_is_of_a_beginning(path.name) for path in folder.iterdir()):
            raise HeadwiseError(f"out={folder} is not empty and holds no run; pass another folder")
        return None
    if not resume:
        raise HeadwiseError(f"{folder} holds a run already; pass resume=True to go on with it, or another out=")
    if run.status == "finished" and (folder / REPORT).exists():
        raise HeadwiseError(f"the run in {folder} is finished; there is nothing to resume")
    if run.settings != settings:
        differing = [name for name, value in asdict(run.settings).items() if value != asdict(settings)[name]]
        raise HeadwiseError(f"the run in {folder} has other settings ({', '.join(differing)}); resume it with its own")
    if run.digest != corpus.data.digest:
        raise HeadwiseError(
            f"the text is not the one that the run in {folder} began with; pass that one, or another out="
        )
    return run


def _results(
    settings: Settings,
    corpus: Corpus,
    model: GPT,
    recipe: Recipe,
    curve: list[CurvePoint],
    seconds: float,
    n_samples: int,
) -> tuple[RunSummary, tuple[int, int, int] | None]:
    """What a reader of the report should know of a run: facts, losses beside the best n-gram, samples; and the
    `cells` of `Run`, None for any other text than the verb corpus."""
    spec, tokens = model.config.attention, corpus.tokens
    cells, pieces = None, "lines" if isinstance(corpus.data, Documents) else "pieces"
    facts = {
        "preset": settings.preset,
        "text": corpus.name,
        "parameters": f"{model.n_parameters:,}",
        "layers x heads": f"{model.config.n_layers} x {spec.n_heads} of width {spec.head_dim}",
        "key/value heads": str(spec.n_kv_heads),
        "context": f"{model.config.context} tokens",
        "vocabulary": f"{len(corpus.tokens):,}",
        "steps": f"{recipe.steps:,}, each of {recipe.batch} {pieces}",
        "seed": str(settings.seed),
        "training time": f"{seconds:.1f} s, processes: {current().world}, torch threads: {torch.get_num_threads()}",
        "Hugging Face form": hf_form(model.config) or "none: no architecture there computes this model",
    }
    order, baseline = corpus.data.ngram(len(tokens))  # the order of the best n-gram, and its loss
    if corpus.cells and isinstance(corpus.data, Documents):  # what has cells is Documents; asked for the type checker
        ngram = corpus.data.ngram_model(len(tokens), order)
        right = _cells_right(corpus, lambda ids: generate(model, ids, CELL_TOKENS, temperature=0, stop=tokens.boundary))
        ngram_right = _cells_right(corpus, lambda ids: ngram.generate(ids, CELL_TOKENS, tokens.boundary))
        cells = right, ngram_right, len(corpus.cells)
        facts |= {
            "held out": f"the Spanish half of {cells[2]} unseen cells; the training loss counts whole lines",
            "held-out cells right": f"{right} of {cells[2]}; {order}-gram {ngram_right}",
        }
    name = Note.of("kept.best_ngram", order=order)
    samples = []
    for seed in range(n_samples):
        ids = generate(
            model, tokens.opening(), SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=seed, stop=tokens.boundary
        )
        samples.append(tokens.decode(list(ids)).strip())
    return RunSummary(facts, tuple(curve), curve[-1].held_out_loss, baseline, name, tuple(samples)), cells


def _cells_right(corpus: Corpus, likeliest: Callable[[list[int]], Iterable[int]]) -> int:
    """Held-out cells whose Spanish the likeliest continuation of the English gives exactly."""
    tokens, right = corpus.tokens, 0
    for cell in corpus.cells:
        ids = likeliest(tokens.prompt(f"{cell.english} ="))
        right += tokens.decode(list(ids)) == cell.spanish
    return right


def load_run(folder: Path) -> tuple[GPT, Tokens]:
    """The model and the tokenizer of a folder; refused where it is of a run that has not written its model yet."""
    run = read_run(folder)
    if run is not None and run.status != "finished" and not (folder / "model.safetensors").exists():
        raise HeadwiseError(
            f"the run in {folder} has not finished; train it to its end, with resume=True and out={folder}"
        )
    return load_model(folder)
