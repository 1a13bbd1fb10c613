"""A run folder from beginning to end: its settings, its training, its results.

run.json            settings, status and results
config.json, model.safetensors, tokenizer.json    the model, in Hugging Face layout where it has one
film.json           where the heads looked at some of the steps
state.safetensors   where training stands; gone once the model is written
report.html         the report, written by the commands; walk.html beside it, the walk through one head
text.txt            the text, where it came from no file
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path

import torch

from headwise.corpus.tokens import TextTokens, Tokens
from headwise.corpus.training import Corpus, Documents, text_corpus, verb_corpus
from headwise.errors import HeadwiseError
from headwise.families import RUN
from headwise.files import (
    TEXT,
    Sources,
    free_memory,
    read_json,
    require_empty,
    write_json,
    write_whole,
)
from headwise.gpt.checkpoint import hf_form, load_model, save_model
from headwise.gpt.gpt import GPT, GPTConfig, generate
from headwise.gpt.presets import Recipe, check_seed, find_preset
from headwise.gpt.train import STATE, Film, Progress, train
from headwise.layer.projections import shapes_alone
from headwise.records import CurvePoint, RunSummary, head_name, record_of
from headwise.spec import require_size
from headwise.table import amount
from headwise.words import Facts, unknown

REPORT = "report.html"
WALK = "walk.html"
FILM = "film.json"
FILMED = 24  # tokens of the line that a film shows, at most; a round choice
# Texts that a finished model writes for the report, and their length at most; round choices.
SAMPLES = 5
SAMPLE_TOKENS = 60
# of these, and of those shown while it trains; a usual choice: below 1 fewer odd words come
SAMPLE_TEMPERATURE = 0.8
# That a held-out cell is continued by at most. Its Spanish half has up to 3, such as `él ha trabajado`. With 3 here
# `él ha trabajado ella` would be cut to what is right; 4 would do, and 8 is a round choice.
CELL_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """All that determines a run: the same settings on the same machine give the same weights."""

    preset: str = "verbs"
    # paths of files and folders; without them it is the built-in verb corpus
    text: tuple[str, ...] = ()
    tokenizer: str | None = (
        None  # a path; None takes characters, or words for the verb corpus
    )
    lines: bool | None = (
        None  # is each line of the text a document? None takes the preset's way
    )
    seed: int = 0
    steps: int | None = None  # None takes the recipe's
    # fields of GPTConfig that differ from the preset
    shape: Facts = dataclasses.field(default_factory=dict)
    attention: str | None = (
        None  # a class in place of our attention, by the name that `register` gave it
    )

    @property
    def paths(self) -> list[Path]:
        """The files and folders of the text."""
        return list(map(Path, self.text))

    @property
    def text_size(self) -> int:
        """Bytes of the text, by which a run sees that it has changed; 0 of the verb corpus."""
        return Sources(self.paths).size

    def resolve(self) -> tuple[Corpus, GPTConfig, Recipe]:
        """The data, the model's shape and the recipe."""
        preset = find_preset(self.preset)
        check_seed(self.seed)
        recipe = preset.recipe
        if self.steps is not None:
            if self.steps < 1:
                raise HeadwiseError(f"steps={self.steps} must be at least 1")
            recipe = replace(recipe, steps=self.steps)
        names = [each.name for each in fields(GPTConfig)]
        for name in self.shape:
            if name not in names:
                raise unknown(f"no field {name!r} of a model's shape", name, names)
        shape = dict(preset.shape)
        # Another width than the preset's: d_ff stays as many times the width as it is there.
        if "d_model" in self.shape and "d_ff" in shape:
            width = require_size("d_model", self.shape["d_model"])
            shape["d_ff"] = max(1, shape["d_ff"] * width // shape["d_model"])
        shape |= {**self.shape, "own_attention": self.attention}
        # a wrong shape is said before a long text is read
        GPTConfig(vocab_size=1, **shape)
        if self.text:
            lines = preset.lines if self.lines is None else self.lines
            text = Sources(self.paths)
            context = shape["context"]
            corpus = text_corpus(text, lines, context, self.seed, self.tokenizer)
        else:
            for option in ("tokenizer", "lines"):
                if getattr(self, option) is not None:
                    raise HeadwiseError(
                        f"{option}= describes a text file; pass one, or leave it out for the verb corpus"
                    )
            corpus = verb_corpus(self.seed, shape["context"], core=preset.core)
        return corpus, GPTConfig(vocab_size=len(corpus.tokens), **shape), recipe


@dataclass(frozen=True)
class Run:
    """What run.json says of a run; from `summary` on, of one that is finished."""

    settings: Settings
    text_size: int  # bytes of its text; 0 of the verb corpus
    status: str  # "training" or "finished"
    summary: RunSummary | None
    # held-out verb cells: right by the model, right by the n-gram, all
    cells: tuple[int, int, int] | None
    example: str | None  # a held-out text for the report


def run_training(
    folder: Path,
    settings: Settings,
    report: Callable[[Progress], None] = lambda progress: None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    n_samples: int = SAMPLES,
    is_filmed: bool = True,
) -> Run:
    """Train into `folder`, or go on there, and write the model and the results.

    `report` hears of every ten steps, `say` of what else goes on. A film is taken if it `is_filmed`. In the end the
    model writes `n_samples` texts. A folder with a run in it is refused unless `resume` says to go on, with the same
    settings; a finished run is refused.
    """
    corpus, config, recipe = settings.resolve()
    with shapes_alone():
        size = GPT(config).n_parameters
    # 4 bytes for each of a weight, its gradient and AdamW's two moments
    needed = 16 * size
    free = free_memory()
    if needed > free:
        raise HeadwiseError(
            f"{size:,} parameters take {amount(needed)} to train, and {amount(free)} are free; take a smaller model"
        )
    run = _check(folder, settings, resume)
    if run is None:
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(settings, settings.text_size, "training", None, None, None)
        write_run(folder, run)
    say(
        f"training preset {settings.preset}, {size:,} parameters, on {corpus.name}, into {folder}"
    )
    film = None
    if is_filmed and settings.attention is None:  # a film reads our own layers
        film = film_of(folder, corpus, config, recipe)
    began = time.monotonic()
    # Training seeds torch's own generators, from which dropout draws: the caller gets them back as they were.
    with torch.random.fork_rng([]):
        model, curve = train(
            folder, config, recipe, corpus.data, settings.seed, report, film=film
        )
    seconds = time.monotonic() - began
    say("training is done; counting n-grams and writing the report")
    summary, cells = _results(
        settings, corpus, model, recipe, curve, seconds, n_samples
    )
    save_model(folder, model, corpus.tokens)
    run = replace(
        run, status="finished", summary=summary, cells=cells, example=corpus.example
    )
    write_run(folder, run)
    (folder / STATE).unlink(missing_ok=True)
    return run


def film_of(folder: Path, corpus: Corpus, config: GPTConfig, recipe: Recipe) -> Film:
    """The film of a training, on its example."""
    ids = corpus.tokens.prompt(corpus.example)[: min(FILMED, config.context)]
    places = product(range(config.n_layers), range(config.n_heads))
    about = {
        "heads": [head_name(*place) for place in places],
        "tokens": list(corpus.tokens.shown(ids)),
        "steps": recipe.steps,
    }
    return Film(folder / FILM, ids, about)


def read_film(folder: Path) -> Facts | None:
    """The film of a run folder, its maps as base64; None where it has none."""
    return read_json(folder / FILM) if (folder / FILM).exists() else None


@contextmanager
def kept_text(folder: Path, text: str) -> Iterator[Path]:
    """A text that comes from no file, written into the new folder of its run, which is to begin in this block.

    Where the block fails before there is a run.json, the folder is removed again.
    """
    require_empty(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / TEXT, text)
        yield folder / TEXT
    except BaseException:
        if not (folder / RUN).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def read_run(folder: Path) -> Run | None:
    """run.json of a folder; None if there is none."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        return record_of(Run, read_json(path))
    except (HeadwiseError, TypeError, KeyError, AttributeError) as error:
        raise HeadwiseError(
            f"{path} is damaged ({error}); remove it or take another out="
        ) from None


def example_of(folder: Path | None) -> str:
    """A text that a finished run held out; without one "emma", a name of the kind that the preset microgpt learns."""
    run = read_run(folder) if folder else None
    return (run and run.example) or "emma"


def held_out_documents(folder: Path, tokens: TextTokens, limit: int) -> list[list[int]]:
    """What the run in `folder` held out, as ids of documents, about `limit` tokens.

    `tokens` is the tokenizer of the model that is to read them. Raises HeadwiseError when there is no run, or its text
    is no longer there, has another size or, as a corpus of an older headwise, other tokens.
    """
    run = read_run(folder)
    if run is None:
        raise HeadwiseError(
            f"{folder} has no {RUN}, so nothing was held out; pass text="
        )
    corpus = run.settings.resolve()[0]
    if run.settings.text_size != run.text_size:
        raise HeadwiseError(
            f"the text that {folder} was trained on has changed; pass text="
        )
    wanted = corpus.tokens.shown(range(len(corpus.tokens)))
    if tokens.shown(range(len(tokens))) != wanted:
        raise HeadwiseError(
            f"the model of {folder} knows {len(tokens):,} tokens and what it was trained on has {len(corpus.tokens):,} "
            f"others in this version of headwise; pass text=, or train anew"
        )
    return corpus.data.held_out_documents(limit)


def write_run(folder: Path, run: Run) -> None:
    write_json(folder / RUN, asdict(run))


def _check(folder: Path, settings: Settings, resume: bool) -> Run | None:
    """The unfinished run in the folder, None if there is none. HeadwiseError where this training may not go on."""
    if folder.is_file():
        raise HeadwiseError(f"out={folder} is a file; pass a folder")
    run = read_run(folder)
    if run is None:
        if {path.name for path in folder.glob("*")} - {TEXT}:
            raise HeadwiseError(
                f"out={folder} is not empty and holds no run; pass another folder"
            )
        return None
    if not resume:
        raise HeadwiseError(
            f"{folder} holds a run already; pass resume=True to go on with it, or another out="
        )
    if run.status == "finished":
        raise HeadwiseError(
            f"the run in {folder} is finished; there is nothing to resume"
        )
    if run.text_size != settings.text_size:
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
    config = model.config
    tokens = corpus.tokens
    data = corpus.data
    spec = config.attention
    end = tokens.boundary
    pieces = "lines" if isinstance(data, Documents) else "pieces"
    facts = {
        "preset": settings.preset,
        "text": corpus.name,
        "parameters": f"{model.n_parameters:,}",
        "layers x heads": f"{config.n_layers} x {spec.n_heads}",
        "width of a head": str(spec.head_dim),
        "key/value heads": str(spec.n_kv_heads),
        "context": f"{config.context} tokens",
        "vocabulary": f"{len(tokens):,}",
        "steps": f"{recipe.steps:,}",
        f"{pieces} a step": str(recipe.batch),
        "seed": str(settings.seed),
        "training time": f"{seconds:.1f} s",
        "torch threads": str(torch.get_num_threads()),
        "Hugging Face form": hf_form(config) or "-",
    }
    # the order of the best n-gram, and its loss
    order, baseline = data.ngram(len(tokens))
    cells = None
    # what has cells is Documents; asked for the type checker
    if corpus.cells and isinstance(data, Documents):
        prompts = [tokens.prompt(f"{cell.english} =") for cell in corpus.cells]
        # cells whose Spanish the likeliest continuation of the English gives exactly
        right = 0
        ngram_right = data.ngram_right(len(tokens), order)
        for cell, prompt in zip(corpus.cells, prompts, strict=True):
            likeliest = generate(model, prompt, CELL_TOKENS, temperature=0, stops=[end])
            right += tokens.decode(list(likeliest)) == cell.spanish
        cells = right, ngram_right, len(corpus.cells)
        facts |= {
            "held-out cells": str(cells[2]),
            "right": str(right),
            "right by the n-gram": str(ngram_right),
        }
    samples = []
    for seed in range(n_samples):
        opening = tokens.opening()
        options = {"temperature": SAMPLE_TEMPERATURE, "seed": seed, "stops": [end]}
        ids = list(generate(model, opening, SAMPLE_TOKENS, **options))
        samples.append(tokens.decode(ids).strip())
    name = f"{order}-gram, Kneser-Ney"
    held_out = curve[-1].held_out_loss
    return RunSummary(
        facts, tuple(curve), held_out, baseline, name, tuple(samples)
    ), cells


def load_run(folder: Path) -> tuple[GPT, Tokens]:
    """The model and the tokenizer of a folder; refused where it is of a run that has not written its model yet."""
    run = read_run(folder)
    if run and run.status != "finished" and not (folder / "model.safetensors").exists():
        raise HeadwiseError(
            f"the run in {folder} has not finished; train it to its end, with resume=True and out={folder}"
        )
    return load_model(folder)
