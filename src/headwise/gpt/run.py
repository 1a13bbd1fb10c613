"""A run folder from beginning to end: its settings, its training, its results.

run.json            settings, status and results
config.json, model.safetensors, tokenizer.json    the model, in Hugging Face layout where it has one
metrics.jsonl       one line a report of training
film.jsonl          what the heads did at some of the steps; see headwise.heads.film
state.safetensors   where training stands; gone once the model is written
report.html         the report, written by the commands
text.txt            the text, where it came from no file
lock                held while a process trains here
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, unknown
from headwise.files import is_unfinished, read_json, remove_unfinished, take_lock, write_whole
from headwise.gpt.checkpoint import MODEL_FILES, load_model, save_model
from headwise.gpt.data import Corpus, Documents, text_corpus, verb_corpus
from headwise.gpt.forms import hf_form
from headwise.gpt.generate import generate
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe, check_seed, find_preset
from headwise.gpt.ranks import current
from headwise.gpt.tokens import Tokens
from headwise.gpt.train import METRICS, STATE, UNSHARED, Film, Progress, Sharing, no_film, train
from headwise.layer.layer import shapes_alone
from headwise.markup import amount
from headwise.memory import free_memory
from headwise.records import CurvePoint, RunSummary, from_json
from headwise.sources import Progress as Reading
from headwise.sources import Sources
from headwise.spec import require_size

RUN, REPORT, TEXT, LOCK, FILM = "run.json", "report.html", "text.txt", "lock", "film.jsonl"
FILES = (RUN, *MODEL_FILES, METRICS, FILM, STATE, REPORT)
SAMPLES = 5
SAMPLE_TOKENS = 60


@dataclass(frozen=True)
class Settings:
    """All that determines a run: the same settings on the same machine give the same weights."""

    preset: str = "verbs"
    text: str | tuple[str, ...] | None = None  # paths of files and folders; None takes the built-in verb corpus
    tokenizer: str | None = None  # a path; None takes characters, or words for the verb corpus
    lines: bool | None = None  # None takes the preset's way
    seed: int = 0
    steps: int | None = None  # None takes the recipe's
    shape: dict[str, Any] = field(default_factory=dict)  # fields of GPTConfig that differ from the preset
    field: str | None = None  # of the records of .jsonl and .parquet the one with the text; None takes "text"
    replay: str | None = None  # the rung on which microgpt was replayed: it learned from all lines and held none out

    @property
    def paths(self) -> list[Path]:
        """The files and folders of the text."""
        return [Path(path) for path in ((self.text,) if isinstance(self.text, str) else self.text or ())]

    def resolve(self, progress: Reading | None = None) -> tuple[Corpus, GPTConfig, Recipe]:
        """The data, the model's shape and the recipe; `progress` hears how much of a large text has been read."""
        preset = find_preset(self.preset)
        check_seed(self.seed)
        if self.steps is not None and self.steps < 1:
            raise HeadwiseError(f"steps={self.steps} must be at least 1")
        recipe = preset.recipe if self.steps is None else replace(preset.recipe, steps=self.steps)
        shape = {**preset.shape, **self.shape}
        for name in shape.keys() - {known.name for known in fields(GPTConfig)}:
            raise unknown(f"no field {name!r} of a model's shape", name, (known.name for known in fields(GPTConfig)))
        require_size("d_model", shape["d_model"])
        if "d_model" in self.shape and "d_ff" in preset.shape and "d_ff" not in self.shape:  # it goes along
            shape["d_ff"] = max(1, preset.shape["d_ff"] * self.shape["d_model"] // preset.shape["d_model"])
        if "latent_dim" in self.shape:  # which takes the place of these
            shape |= {"n_kv_heads": None, "qk_norm": False} | self.shape
        GPTConfig(vocab_size=1, **shape)  # a wrong shape is said before a long text is read
        if self.text is None:
            options = {"--tokenizer": self.tokenizer, "--lines or --stream": self.lines, "--field": self.field}
            for option in (option for option, value in options.items() if value is not None):
                raise HeadwiseError(f"{option} describes a text file; pass one, or leave it out for the verb corpus")
            corpus = verb_corpus(self.seed, shape["context"])
        else:
            lines = preset.lines if self.lines is None else self.lines
            tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
            text = Sources(self.paths, self.field, progress)
            corpus = text_corpus(text, lines, shape["context"], self.seed, tokenizer, self.replay is None)
        return corpus, GPTConfig(vocab_size=len(corpus.tokens), **shape), recipe


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: RunSummary
    cells: tuple[int, int, int] | None  # held-out verb cells: right by the model, right by the n-gram, all
    example: str  # a held-out text for the report


def run_training(
    folder: Path,
    settings: Settings,
    report: Callable[[Progress], None],
    resume: bool,
    say: Callable[[str], None] = lambda line: None,
    n_samples: int = SAMPLES,
    film: Callable[[Path, Corpus, GPTConfig, Recipe], Film] | None = None,
    build: Callable[[GPTConfig], GPT] = GPT,
    finish: Callable[[GPT], GPT] = lambda model: model,
    sharing: Sharing = UNSHARED,
    reading: Reading | None = None,
) -> Result:
    """Train into `folder`, or go on there, and write the model and the results.

    `report` hears of every ten steps, `reading` of a large text that is read, `say` of what else goes on; what `film`
    makes is shown the model after every step. `build` makes the model that learns, and `finish` of it the one that is
    kept. A folder with a run in it is refused unless `resume` says to go on, with the same settings.
    """
    corpus, config, recipe = settings.resolve(reading)
    sharing.check(corpus.data, recipe)
    size = _size(config, sharing)
    _check(folder, settings, corpus, resume)
    folder.mkdir(parents=True, exist_ok=True)
    held = take_lock(folder / LOCK, f"another training is at work in {folder}; wait for it, or take another --out")
    try:
        run = _check(folder, settings, corpus, resume)  # again: another one may just have ended
        remove_unfinished(folder, FILES if run else (RUN,))
        if run is None:
            write_run(folder, settings, corpus.data.digest, "training", None)
        if current().agree(lambda: run is not None and run["status"] == "finished") and run:
            (folder / STATE).unlink(missing_ok=True)
            return Result(folder, run["summary"], run["cells"], run["example"])
        say(f"training preset {settings.preset}, {size:,} parameters, on {corpus.name}, into {folder}")
        began = time.monotonic()
        looks_on = no_film if film is None or sharing.apart else film(folder, corpus, config, recipe)
        learns = config, recipe, corpus.data, settings.seed, report
        model, curve = train(folder, *learns, film=looks_on, build=build, sharing=sharing)
        model = finish(model)
        say("training is done; counting n-grams and writing the report")
        facts = _facts(settings, corpus, model, recipe, time.monotonic() - began)
        result = _result(folder, corpus, model, facts, curve, n_samples)
        save_model(folder, model, corpus.tokens)
        write_run(folder, settings, corpus.data.digest, "finished", result)
        (folder / STATE).unlink(missing_ok=True)
        return result
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(held)


def _size(config: GPTConfig, sharing: Sharing) -> int:
    """The parameters of a model. Raises HeadwiseError where there is no room to train as many."""
    with shapes_alone():
        size = GPT(config).n_parameters
    needed, room = 16 * size, free_memory()  # bytes of weights, gradients and two moments in float32
    if needed > room.size and not sharing.apart:
        raise HeadwiseError(
            f"{size:,} parameters take {amount(needed)} to train, and {amount(room.size)} are free ({room.limit}); "
            f"take a smaller model"
        )
    return size


def follow_training(folder: Path, settings: Settings, sharing: Sharing) -> None:
    """What the other processes do while the first is in `run_training`: their part of each step, and no file."""
    corpus, config, recipe = settings.resolve()
    sharing.check(corpus.data, recipe)
    if not current().agree(bool):  # is it finished?
        train(folder, config, recipe, corpus.data, settings.seed, lambda progress: None, sharing=sharing)


def keep_text(folder: Path, text: str) -> Path:
    """Write a text that comes from no file into the folder of its run. Raises HeadwiseError for one that is in use."""
    if folder.exists() and (not folder.is_dir() or {entry.name for entry in folder.iterdir()} - {TEXT}):
        raise HeadwiseError(f"{folder} exists and is not empty; pass another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TEXT, text)
    return folder / TEXT


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a folder, its summary as a RunSummary; None if there is none."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        run = from_json(dict[str, Any], read_json(path))
        kinds: dict[str, Any] = {"status": str, "digest": str, "settings": Settings, "summary": RunSummary | None}
        kinds |= {"example": str | None, "cells": tuple[int, int, int] | None}
        read = {name: from_json(kind, run[name], name) for name, kind in kinds.items()}
    except (HeadwiseError, KeyError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise HeadwiseError(f"{path} is damaged ({missing}); remove it or take another --out") from None
    return {**read, "settings": asdict(read["settings"])}


def example_of(folder: Path | None) -> str:
    """A text that a finished run held out; a name where there is no run, or none that is finished."""
    run = None if folder is None else read_run(folder)
    return "emma" if run is None or not run["example"] else str(run["example"])


def held_out_documents(folder: Path, limit: int) -> list[list[int]]:
    """What the run in `folder` held out, as ids of documents, about `limit` tokens.

    Raises HeadwiseError when there is no run, or its text is no longer there or no longer the same.
    """
    run = read_run(folder)
    if run is None:
        raise HeadwiseError(f"{folder} has no {RUN}, so nothing was held out; pass --text")
    corpus, _, _ = Settings(**run["settings"]).resolve()
    if corpus.data.digest != run["digest"]:
        raise HeadwiseError(f"the text that {folder} was trained on has changed; pass --text")
    return corpus.data.held_out_documents(limit)


def read_summary(folder: Path) -> RunSummary | None:
    """The results of a finished run, for its report."""
    run = read_run(folder)
    summary: RunSummary | None = None if run is None else run["summary"]
    return summary


def write_run(folder: Path, settings: Settings, digest: str, status: str, result: Result | None) -> None:
    results = {name: None if result is None else asdict(result)[name] for name in ("summary", "cells", "example")}
    run = {"settings": asdict(settings), "digest": digest, "status": status, **results}
    write_whole(folder / RUN, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _check(folder: Path, settings: Settings, corpus: Corpus, resume: bool) -> dict[str, Any] | None:
    """The run in the folder, None if there is none yet. Raises HeadwiseError where this training may not go on there.

    A finished run may be resumed only while its report, which the commands write last, is missing.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadwiseError(f"--out {folder} is a file; pass a folder")
    run = read_run(folder) if folder.exists() else None
    if run is None:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        if not all(name in (LOCK, TEXT) or is_unfinished(name, (RUN,)) for name in names):
            raise HeadwiseError(f"--out {folder} is not empty and holds no run; pass another folder")
        return None
    if not resume:
        raise HeadwiseError(f"{folder} holds a run already; pass --resume to go on with it, or another --out")
    if run["status"] == "finished" and ((folder / REPORT).exists() or run["summary"] is None):
        raise HeadwiseError(f"the run in {folder} is finished; there is nothing to resume")
    if (before := Settings(**run["settings"])) != settings:
        differing = [name for name, value in asdict(before).items() if value != asdict(settings)[name]]
        raise HeadwiseError(f"the run in {folder} has other settings ({', '.join(differing)}); resume it with its own")
    if run["digest"] != corpus.data.digest:
        raise HeadwiseError(
            f"the text is not the one that the run in {folder} began with; pass that one, or another --out"
        )
    return run


def _facts(settings: Settings, corpus: Corpus, model: GPT, recipe: Recipe, seconds: float) -> dict[str, str]:
    """What a reader of the report should know of a run."""
    spec = model.config.attention
    pieces = "lines" if isinstance(corpus.data, Documents) else "pieces"
    return {
        "preset": settings.preset,
        "text": corpus.name,
        "parameters": f"{model.n_parameters:,}",
        "layers x heads": f"{model.config.n_layers} x {spec.n_heads} of width {spec.head_dim}",
        "key/value heads": str(spec.n_kv_heads),
        **({} if spec.latent_dim is None else {"latent + rotary key": f"{spec.latent_dim} + {spec.rope_dim}"}),
        "context": f"{model.config.context} tokens",
        "vocabulary": f"{len(corpus.tokens):,}",
        "steps": f"{recipe.steps:,}, each of {recipe.batch} {pieces}",
        "seed": str(settings.seed),
        "training time": f"{seconds:.1f} s, processes: {current().world}, torch threads: {torch.get_num_threads()}",
        "Hugging Face form": hf_form(model.config) or "none: no architecture there computes this model",
    }


def _result(
    folder: Path, corpus: Corpus, model: GPT, facts: dict[str, str], curve: list[CurvePoint], n_samples: int
) -> Result:
    """The trained model beside the best n-gram, on the held-out part; samples; held-out cells of the verb corpus."""
    tokens, cells = corpus.tokens, None
    order, baseline = corpus.data.ngram(len(tokens))
    if corpus.cells and isinstance(corpus.data, Documents):
        ngram = corpus.data.ngram_model(len(tokens), order)
        right = _cells_right(corpus, lambda ids: generate(model, ids, 8, temperature=0, stop=tokens.boundary))
        ngram_right = _cells_right(corpus, lambda ids: ngram.generate(ids, 8, tokens.boundary))
        cells = right, ngram_right, len(corpus.cells)
        facts = facts | {
            "held out": f"the Spanish half of {cells[2]} unseen cells; the training loss counts whole lines",
            "held-out cells right": f"{right} of {cells[2]}; {order}-gram {ngram_right}",
        }
    name = f"best n-gram, order {order} (Kneser-Ney)"
    texts = (
        generate(model, tokens.opening(), SAMPLE_TOKENS, temperature=0.8, seed=n, stop=tokens.boundary)
        for n in range(n_samples)
    )
    samples = tuple(tokens.decode(list(ids)).strip() for ids in texts)
    summary = RunSummary(facts, tuple(curve), curve[-1].held_out_loss, baseline, name, samples)
    return Result(folder, summary, cells, corpus.example)


def _cells_right(corpus: Corpus, likeliest: Callable[[list[int]], Iterable[int]]) -> int:
    """Held-out cells whose Spanish the likeliest continuation of the English gives exactly."""
    tokens = corpus.tokens
    texts = [tokens.decode(list(likeliest(tokens.prompt(f"{cell.english} =")))) for cell in corpus.cells]
    return sum(text == cell.spanish for text, cell in zip(texts, corpus.cells, strict=True))


def load_run(folder: Path) -> tuple[GPT, Tokens]:
    """The model of a finished run."""
    run = read_run(folder) if folder.is_dir() else None
    if run is not None and run["status"] != "finished" and not (folder / "model.safetensors").exists():
        raise HeadwiseError(
            f"the run in {folder} has not finished; go on with `headwise train --resume --out {folder}`"
        )
    return load_model(folder)
