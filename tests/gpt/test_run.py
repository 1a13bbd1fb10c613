"""A run folder: what settings mean, whose folder it is, and what is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table

from headwise import HeadwiseError
from headwise.gpt.checkpoint import load_model
from headwise.gpt.presets import PRESETS
from headwise.gpt.run import FILES, FILM, Run, Settings, load_run, read_run, run_training
from headwise.gpt.train import STATE, Progress, Stopped

SHAPE = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_model": 20, "context": 11}


def quiet(progress: Progress) -> None:
    pass


def stop_early(progress: Progress) -> None:
    raise Stopped(progress.step)


@pytest.fixture
def book(tmp_path: Path, prose: Callable[[int], str]) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(prose(120))
    return path


@pytest.fixture
def settings(book: Path) -> Callable[..., Settings]:
    def make(**changes: Any) -> Settings:
        given = {"preset": "llama", "text": str(book), "steps": 23, "shape": SHAPE}
        return Settings(**{**given, **changes})

    return make


def finish(folder: Path, settings: Settings) -> Run:
    return run_training(folder, settings, quiet, resume=False)


def begin(folder: Path, settings: Settings) -> None:
    with pytest.raises(Stopped):
        run_training(folder, settings, stop_early, resume=False)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_s_shape_and_recipe_are_taken(book: Path, preset: str, prose: Any) -> None:
    book.write_text(prose(300))
    corpus, config, recipe = Settings(preset=preset, text=str(book)).resolve()
    assert {name: getattr(config, name) for name in PRESETS[preset].shape} == PRESETS[preset].shape
    assert config.vocab_size == len(corpus.tokens)
    assert recipe == PRESETS[preset].recipe
    assert hasattr(corpus.data, "boundary") == PRESETS[preset].lines


def test_defaults_of_settings(settings: Any) -> None:
    corpus, config, _ = Settings().resolve()
    assert corpus.name == "the verb corpus"
    assert corpus.cells
    assert config.vocab_size == len(corpus.tokens) == 1012
    _, _, recipe = settings(steps=7).resolve()
    assert recipe.steps == 7
    assert recipe.lr == PRESETS["llama"].recipe.lr

    def d_ff(preset: str, **shape: int) -> int:
        config = settings(preset=preset, shape={"context": 11, **shape}).resolve()[1]
        return config.feed_forward_width

    assert d_ff("llama") == 344
    assert d_ff("llama", d_model=64) == 172
    assert d_ff("llama", d_model=64, d_ff=101) == 101
    assert d_ff("nanogpt", d_model=52) == 4 * 52


@pytest.mark.parametrize("preset", ["course", "microgpt"])
def test_presets_for_teaching_learn_the_core(preset: str) -> None:
    corpus, config, _ = Settings(preset).resolve()
    assert corpus.name == "the verb corpus" and len(corpus.cells) == 36
    assert config.vocab_size == len(corpus.tokens) == 361


@pytest.mark.parametrize("lines", [True, False])
def test_lines_go_before_the_preset_s_way(settings: Any, lines: bool) -> None:
    for preset in ("microgpt", "nanogpt"):
        corpus, _, _ = settings(preset=preset, lines=lines, shape={"context": 11}).resolve()
        assert hasattr(corpus.data, "boundary") == lines


def test_wrong_settings_are_refused(settings: Any) -> None:
    refuses_table("settings", {"settings": settings})


def test_wrong_settings_leave_no_folder(tmp_path: Path, settings: Any) -> None:
    with pytest.raises(HeadwiseError):
        finish(tmp_path / "run", settings(shape={"n_heads": 7}))
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused(tmp_path: Path, settings: Any) -> None:
    begin(tmp_path / "run", settings())
    with pytest.raises(HeadwiseError, match="holds a run already; pass resume=True to go on with it, or another out="):
        finish(tmp_path / "run", settings())


def test_a_folder_of_something_else_is_refused(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letters.txt").write_text("dear")
    for resume in (False, True):
        with pytest.raises(HeadwiseError, match="is not empty and holds no run; pass another folder"):
            run_training(folder, settings(), quiet, resume)
    assert [path.name for path in folder.iterdir()] == ["letters.txt"]


def test_a_model_without_room_is_refused(tmp_path: Path, settings: Any) -> None:
    large = settings(shape={"d_model": 2**17, "d_ff": 2**20, "n_layers": 2**8})
    with pytest.raises(HeadwiseError, match=r"parameters take .* to train, and .* are free .*; take a smaller model"):
        run_training(tmp_path / "run", large, quiet, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_the_folder_is_refused(book: Path, settings: Any) -> None:
    refuses(lambda: finish(book, settings()), r"book.txt is a file; pass a folder")


def test_a_finished_run_reads_back_equal(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "run"
    result = finish(folder, settings())
    run = read_run(folder)
    assert run is not None
    assert run == result and run.settings == settings()
    assert run.status == "finished"
    model, tokens = load_run(folder)
    assert tokens.encode(result.example)
    assert f"{model.n_parameters:,}" == result.summary.facts["parameters"]


def test_a_finished_folder_holds_these_files(tmp_path: Path, settings: Any) -> None:
    finish(tmp_path / "run", settings())
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == set(FILES) - {FILM, STATE, "report.html", "walk.html"}


def test_a_summary_says_how_the_model_fared(tmp_path: Path, settings: Any) -> None:
    summary = finish(tmp_path / "run", settings()).summary
    assert summary.held_out_loss == summary.curve[-1].held_out_loss
    assert summary.curve[-1].step == 23
    assert summary.baseline_loss is not None
    assert 0 < summary.baseline_loss < 5
    assert "Kneser-Ney" in str(summary.baseline_name)
    assert len(summary.samples) == 5
    assert summary.facts["Hugging Face form"] == "llama"
    assert summary.facts["steps"] == "23, each of 16 pieces"


@pytest.mark.parametrize("preset", ["microgpt", "nanogpt"])
def test_the_same_settings_give_the_same_bytes(tmp_path: Path, settings: Any, preset: str) -> None:
    shape = {"n_layers": 1, "d_model": 20, "n_heads": 2, "context": 11}
    for name in ("one", "two"):
        torch.manual_seed(len(name))
        finish(tmp_path / name, settings(preset=preset, shape=shape))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_finished_run_is_not_resumed(tmp_path: Path, settings: Any) -> None:
    finish(tmp_path / "run", settings())
    (tmp_path / "run" / "report.html").touch()
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(HeadwiseError, match="is finished; there is nothing to resume"):
        run_training(tmp_path / "run", settings(), quiet, resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_another_text_is_not_resumed(tmp_path: Path, settings: Any, book: Path) -> None:
    begin(tmp_path / "run", settings())
    book.write_text(book.read_text() + "more.\n")
    with pytest.raises(HeadwiseError, match=r"the text is not the one that the run in .* began with; pass that one"):
        run_training(tmp_path / "run", settings(), quiet, resume=True)


def test_a_run_killed_before_its_first_file_can_be_resumed(tmp_path: Path, settings: Any) -> None:
    """A kill while run.json is written leaves a temporary file and nothing else."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".run.json.4711.tmp").write_text('{"settings": {')
    run_training(folder, settings(), quiet, resume=True)
    run = read_run(folder)
    assert run is not None and run.summary is not None


def test_temporary_files_of_killed_writes_are_cleared_away(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "run"
    begin(folder, settings())
    (folder / f".{STATE}.4711.tmp").write_bytes(b"half")
    run_training(folder, settings(), quiet, resume=True)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "5", "[" * 100_000, "{}", '{"status": "x"}', '{"settings": {}}', '{"settings": 3}'),
        '{"settings": {"colour": 1}}',
        *(
            '{{"settings": {}, "status": {}, "digest": "x", "summary": {}, "cells": {}, "example": ""}}'.format(*parts)
            for parts in (
                ('{"shape": 5}', '"training"', "null", "null"),
                ('{"preset": ["x"]}', '"training"', "null", "null"),
                ('{"seed": "x"}', '"training"', "null", "null"),
                ("{}", "5", "null", "null"),
                ("{}", '"training"', '{"facts": 3}', "null"),
                ("{}", '"training"', "null", "[1, 2]"),
            )
        ),
    ],
)
def test_a_damaged_run_file_is_said(tmp_path: Path, settings: Any, content: str) -> None:
    folder = tmp_path / "run"
    begin(folder, settings())
    (folder / "run.json").write_text(content)
    refuses(lambda: run_training(folder, settings(), quiet, resume=True), "remove it or take another out=")


def test_damaged_metrics_are_said_and_a_line_cut_short_is_not(tmp_path: Path, settings: Any) -> None:
    folder, good = tmp_path / "run", b'{"step": 1, "loss": 2.0, "tokens_per_second": 3.0}\n'
    begin(folder, settings())
    for bad in (
        b"5",
        b"[]",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"step": "a", "loss": 1.0}',
        b'{"loss": 1}',
        b'{"step"',
    ):
        (folder / "metrics.jsonl").write_bytes(good + bad + b"\n" + good)
        with pytest.raises(HeadwiseError, match=r"metrics.jsonl is damaged in line 2; remove that line to resume"):
            run_training(folder, settings(), quiet, resume=True)
    (folder / "metrics.jsonl").write_bytes(good + b'{"step"')
    run_training(folder, settings(), quiet, resume=True)


def test_a_damaged_summary_is_said(tmp_path: Path, settings: Any) -> None:
    finish(tmp_path / "run", settings())
    path = tmp_path / "run" / "run.json"
    run = json.loads(path.read_text())
    for summary in ({}, 3, {**run["summary"], "curve": [{"step": 1}]}, {**run["summary"], "more": 1}):
        path.write_text(json.dumps({**run, "summary": summary}))
        with pytest.raises(HeadwiseError, match=r"run.json is damaged"):
            read_run(tmp_path / "run")


def test_an_unfinished_run_cannot_be_loaded(tmp_path: Path, settings: Any) -> None:
    begin(tmp_path / "run", settings())
    refuses(lambda: load_run(tmp_path / "run"), "has not finished; train it to its end, with resume=True and out=")
    run = read_run(tmp_path / "run")
    assert run is not None and run.summary is None


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert read_run(tmp_path / "empty") is None
    refuses(lambda: load_run(tmp_path / "empty"), r"has no config.json")
    refuses(lambda: load_run(tmp_path / "none"), "is no folder; pass a run folder")


def test_a_model_trained_by_a_run_is_the_model_loaded(tmp_path: Path, settings: Any) -> None:
    finish(tmp_path / "run", settings())
    model, tokens = load_run(tmp_path / "run")
    again, _ = load_model(tmp_path / "run")
    ids = torch.tensor([tokens.encode("da")])
    assert torch.equal(model(ids), again(ids))


def test_a_run_that_is_refused_keeps_all_its_files_and_one_that_goes_on_loses_ours(
    tmp_path: Path, settings: Any
) -> None:
    folder = tmp_path / "run"
    begin(folder, settings())
    for name in (".mine.tmp", ".model.safetensors.7.tmp"):
        (folder / name).write_text("x")
    refuses(lambda: finish(folder, settings()), "holds a run already")
    assert {".mine.tmp", ".model.safetensors.7.tmp"} <= {path.name for path in folder.iterdir()}
    run_training(folder, settings(), quiet, resume=True)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".mine.tmp"]


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path, settings: Any) -> None:
    folder, refusals = tmp_path / "run", []

    def try_again(progress: Progress) -> None:
        with pytest.raises(HeadwiseError, match=r"another training is at work in .*run; wait for it") as refusal:
            run_training(folder, settings(), quiet, resume=True)
        refusals.append(refusal)

    run_training(folder, settings(), try_again, resume=False)
    assert len(refusals) > 1 and not (folder / "lock").exists()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_the_lock_of_a_dead_process_is_no_obstacle(tmp_path: Path, settings: Any) -> None:
    begin(tmp_path / "run", settings())
    (tmp_path / "run" / "lock").touch()
    run_training(tmp_path / "run", settings(), quiet, resume=True)
    assert not (tmp_path / "run" / "lock").exists()
