"""A run folder from beginning to end: its settings, its training, its results.

run.json            settings, status and results
config.json, model.safetensors, tokenizer.json    the model, in Hugging Face layout where it has one
metrics.jsonl       one line a report of training
state.safetensors   where training stands; gone once the model is written
report.html         the report, written by the commands
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.files import is_unfinished, remove_unfinished, write_whole
from headwise.gpt.checkpoint import MODEL_FILES, load_model, save_model
from headwise.gpt.data import Corpus, Documents, text_corpus, verb_corpus
from headwise.gpt.forms import hf_form
from headwise.gpt.generate import generate
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.ngram import NGramModel
from headwise.gpt.presets import Preset, Recipe, check_seed, find_preset
from headwise.gpt.tokens import Tokens
from headwise.gpt.train import METRICS, STATE, Progress, train
from headwise.records import CurvePoint, RunSummary

RUN = "run.json"
FILES = (RUN, *MODEL_FILES, METRICS, STATE, "report.html")
SAMPLES = 5
SAMPLE_TOKENS = 60


@dataclass(frozen=True)
class Settings:
    """All that determines a run: the same settings on the same machine give the same weights."""

    preset: str = "verbs"
    text: str | None = None  # a path; None takes the built-in verb corpus
    tokenizer: str | None = None  # a path; None takes characters, or words for the verb corpus
    lines: bool | None = None  # None takes the preset's way
    seed: int = 0
    steps: int | None = None  # None takes the recipe's
    shape: dict[str, int] = field(default_factory=dict)  # fields of GPTConfig that differ from the preset
    replay: str | None = None  # the rung on which microgpt was replayed: it learned from all lines and held none out

    def resolve(self) -> tuple[Corpus, GPTConfig, Recipe]:
        """The data, the model's shape and the recipe."""
        preset = find_preset(self.preset)
        check_seed(self.seed)
        if self.steps is not None and self.steps < 1:
            raise HeadwiseError(f"steps={self.steps} must be at least 1")
        recipe = preset.recipe if self.steps is None else replace(preset.recipe, steps=self.steps)
        shape = _shape(preset, self.shape)
        GPTConfig(vocab_size=1, **shape)  # a wrong shape is said before a long text is read
        if self.text is None:
            for option, value in (("--tokenizer", self.tokenizer), ("--lines or --stream", self.lines)):
                if value is not None:
                    raise HeadwiseError(
                        f"{option} describes a text file; pass one, or leave it out for the verb corpus"
                    )
            corpus = verb_corpus(self.seed, shape["context"])
        else:
            lines = preset.lines if self.lines is None else self.lines
            tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
            corpus = text_corpus(Path(self.text), lines, shape["context"], self.seed, tokenizer, self.replay is None)
        return corpus, GPTConfig(vocab_size=len(corpus.tokens), **shape), recipe


def _shape(preset: Preset, changes: dict[str, int]) -> dict[str, Any]:
    """The preset's shape with changes; another width takes the feed-forward along in proportion."""
    shape = {**preset.shape, **changes}
    if "d_model" in changes and "d_ff" in preset.shape and "d_ff" not in changes:
        shape["d_ff"] = max(1, preset.shape["d_ff"] * changes["d_model"] // preset.shape["d_model"])
    return shape


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
) -> Result:
    """Train into `folder`, or go on there, and write the model and the results.

    `report` hears of every ten steps, `say` of what else goes on. A folder with a run in it is refused unless `resume`
    says to go on; its settings must then be the same.
    """
    corpus, config, recipe = settings.resolve()
    _claim(folder, settings, corpus, resume)
    with torch.device("meta"):  # shapes alone
        n_parameters = GPT(config).n_parameters
    say(f"training preset {settings.preset}, {n_parameters:,} parameters, on {corpus.name}, into {folder}")
    began = time.monotonic()
    model, curve = train(folder, config, recipe, corpus.data, settings.seed, report)
    say("training is done; counting n-grams and writing the report")
    result = _result(folder, settings, corpus, model, recipe, curve, time.monotonic() - began, n_samples)
    save_model(folder, model, corpus.tokens)
    write_run(folder, settings, corpus.data.digest, "finished", result)
    (folder / STATE).unlink(missing_ok=True)
    return result


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a folder; None if there is none."""
    path = folder / RUN
    if not path.exists():
        return None
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Settings(**run["settings"])
        _ = run["status"], run["digest"]
        if run["summary"] is not None:
            _summary(run["summary"])
    except (ValueError, KeyError, TypeError) as error:
        raise HeadwiseError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it or take another --out"
        ) from None
    return run


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
    if run is None or run.get("summary") is None:
        return None
    return _summary(run["summary"])


def _summary(saved: dict[str, Any]) -> RunSummary:
    curve = tuple(CurvePoint(**point) for point in saved["curve"])
    return RunSummary(**{**saved, "curve": curve, "samples": tuple(saved["samples"])})


def write_run(folder: Path, settings: Settings, digest: str, status: str, result: Result | None) -> None:
    run = {
        "settings": asdict(settings),
        "digest": digest,
        "status": status,
        "summary": None if result is None else asdict(result.summary),
        "cells": None if result is None else result.cells,
        "example": None if result is None else result.example,
    }
    write_whole(folder / RUN, json.dumps(run, indent=2, ensure_ascii=False) + "\n")


def _claim(folder: Path, settings: Settings, corpus: Corpus, resume: bool) -> None:
    """Make the folder ours, or make sure that it is."""
    if folder.exists() and not folder.is_dir():
        raise HeadwiseError(f"--out {folder} is a file; pass a folder")
    run = read_run(folder) if folder.exists() else None
    if run is None:
        if folder.exists() and not all(is_unfinished(path.name, (RUN,)) for path in folder.iterdir()):
            raise HeadwiseError(f"--out {folder} is not empty and holds no run; pass another folder")
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder, (RUN,))
        write_run(folder, settings, corpus.data.digest, "training", None)
        return
    if not resume:
        raise HeadwiseError(f"{folder} holds a run already; pass --resume to go on with it, or another --out")
    if run["status"] == "finished":
        raise HeadwiseError(f"the run in {folder} is finished; there is nothing to resume")
    if (before := Settings(**run["settings"])) != settings:
        differing = [name for name, value in asdict(before).items() if value != asdict(settings)[name]]
        raise HeadwiseError(f"the run in {folder} has other settings ({', '.join(differing)}); resume it with its own")
    if run["digest"] != corpus.data.digest:
        raise HeadwiseError(
            f"the text is not the one that the run in {folder} began with; pass that one, or another --out"
        )
    remove_unfinished(folder, FILES)


def _result(
    folder: Path,
    settings: Settings,
    corpus: Corpus,
    model: GPT,
    recipe: Recipe,
    curve: list[CurvePoint],
    seconds: float,
    n_samples: int,
) -> Result:
    order, baseline = corpus.data.ngram(len(corpus.tokens))
    samples = tuple(sample(model, corpus.tokens, seed) for seed in range(n_samples))
    spec = model.config.attention
    pieces = "lines" if isinstance(corpus.data, Documents) else "pieces"
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
        "training time": f"{seconds:.1f} s, torch threads: {torch.get_num_threads()}",
        "Hugging Face form": hf_form(model.config) or "none: no architecture there computes this model",
    }
    cells = None
    if corpus.cells and isinstance(corpus.data, Documents):
        ngram = corpus.data.ngram_model(len(corpus.tokens), order)
        cells = (_right_by_model(model, corpus), _right_by_ngram(ngram, corpus), len(corpus.cells))
        facts["held out"] = f"the Spanish half of {cells[2]} unseen cells; the training loss counts whole lines"
        facts["held-out cells right"] = f"{cells[0]} of {cells[2]}; {order}-gram {cells[1]}"
    name = f"best n-gram, order {order} (Kneser-Ney)"
    return Result(
        folder, RunSummary(facts, tuple(curve), curve[-1].held_out_loss, baseline, name, samples), cells, corpus.example
    )


def sample(model: GPT, tokens: Tokens, seed: int) -> str:
    """A text that the model makes up."""
    return tokens.decode(
        list(generate(model, tokens.opening(), SAMPLE_TOKENS, 0.8, seed=seed, stop=tokens.boundary))
    ).strip()


def _right_by_model(model: GPT, corpus: Corpus) -> int:
    """Held-out cells whose Spanish the model's likeliest continuation of the English gives exactly."""
    tokens = corpus.tokens
    right = 0
    for cell in corpus.cells:
        continued = generate(model, tokens.prompt(f"{cell.english} ="), 8, temperature=0, stop=tokens.boundary)
        right += tokens.decode(list(continued)) == cell.spanish
    return right


def _right_by_ngram(ngram: NGramModel, corpus: Corpus) -> int:
    """The same by the n-gram's likeliest continuation."""
    tokens, right = corpus.tokens, 0
    for cell in corpus.cells:
        ids = tokens.prompt(f"{cell.english} =")
        start = len(ids)
        while len(ids) < start + 8 and (token := ngram.predict(ids)) != tokens.boundary:
            ids.append(token)
        right += tokens.decode(ids[start:]) == cell.spanish
    return right


def load_run(folder: Path) -> tuple[GPT, Tokens]:
    """The model of a finished run."""
    run = read_run(folder) if folder.is_dir() else None
    if run is not None and run["status"] != "finished" and not (folder / "model.safetensors").exists():
        raise HeadwiseError(
            f"the run in {folder} has not finished; go on with `headwise train --resume --out {folder}`"
        )
    return load_model(folder)
