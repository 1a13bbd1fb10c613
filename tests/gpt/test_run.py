"""A run folder: what settings mean, whose folder it is, and what is read back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from invoking import contents
from small_models import prose, quiet, stop

from headwise import HeadwiseError
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import load_model
from headwise.gpt.presets import PRESETS
from headwise.gpt.run import Run, Settings, held_out_documents, load_run, read_run, run_training
from headwise.gpt.train import STATE, Stopped

SHAPE = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_model": 20, "context": 11}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(prose(120))
    return path


@pytest.fixture
def settings(book: Path) -> Callable[..., Settings]:
    def make(**changes: Any) -> Settings:
        given = {"preset": "llama", "text": (str(book),), "steps": 23, "shape": SHAPE}
        return Settings(**{**given, **changes})

    return make


def finish(folder: Path, settings: Settings) -> Run:
    return run_training(folder, settings, quiet, resume=False)


def begin(folder: Path, settings: Settings) -> None:
    with pytest.raises(Stopped):
        run_training(folder, settings, stop, resume=False)


def go_on(folder: Path, settings: Settings) -> Run:
    return run_training(folder, settings, quiet, resume=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_s_shape_and_recipe_are_taken(book: Path, preset: str) -> None:
    book.write_text(prose(300))
    corpus, config, recipe = Settings(preset=preset, text=(str(book),)).resolve()
    assert {name: getattr(config, name) for name in PRESETS[preset].shape} == PRESETS[preset].shape
    assert config.vocab_size == len(corpus.tokens)
    assert recipe == PRESETS[preset].recipe
    assert hasattr(corpus.data, "boundary") == PRESETS[preset].lines


def test_defaults_of_settings(settings: Any) -> None:
    for preset, size in (("verbs", 1265), ("course", 361), ("microgpt", 361)):  # those for teaching learn the core
        corpus, config, _ = Settings(preset).resolve()
        assert corpus.name == "the verb corpus" and len(corpus.cells) == 36
        assert config.vocab_size == len(corpus.tokens) == size
    assert Settings().preset == "verbs"
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


def test_wrong_settings_are_refused(settings: Any) -> None:
    refuses_table("settings", {"settings": settings})


def test_a_folder_of_something_else_is_refused(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letters.txt").write_text("dear")
    for resume in (False, True):
        with pytest.raises(HeadwiseError, match="is not empty and holds no run; pass another folder"):
            run_training(folder, settings(), quiet, resume)
    assert [path.name for path in folder.iterdir()] == ["letters.txt"]


def test_what_cannot_be_trained_leaves_no_folder(tmp_path: Path, settings: Any, book: Path) -> None:
    refuses(lambda: finish(book, settings()), r"book.txt is a file; pass a folder")
    refuses(lambda: finish(tmp_path / "run", settings(shape={"n_heads": 7})), "n_heads=7")
    large = settings(shape={"d_model": 2**17, "d_ff": 2**20, "n_layers": 2**8})
    with pytest.raises(HeadwiseError, match=r"parameters take .* to train, and .* are free; take a smaller model"):
        run_training(tmp_path / "run", large, quiet, resume=False)
    assert not (tmp_path / "run").exists()


def test_another_text_is_not_resumed(tmp_path: Path, settings: Any, book: Path) -> None:
    begin(tmp_path / "run", settings())
    book.write_text(book.read_text() + "more.\n")
    with pytest.raises(HeadwiseError, match=r"the text is not the one that the run in .* began with; pass that one"):
        go_on(tmp_path / "run", settings())


def test_a_finished_run(tmp_path: Path, settings: Any) -> None:
    """It reads back equal, holds what it says, and is not resumed."""
    folder = tmp_path / "run"
    result = finish(folder, settings())
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "film.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    run, summary = read_run(folder), result.summary
    assert run == result and run.settings == settings() and run.status == "finished"
    model, tokens = load_run(folder)
    ids = torch.tensor([tokens.encode(result.example)])
    assert torch.equal(model(ids), load_model(folder)[0](ids))
    assert f"{model.n_parameters:,}" == summary.facts["parameters"]
    assert summary.held_out_loss == summary.curve[-1].held_out_loss and summary.curve[-1].step == 23
    assert 0 < summary.baseline_loss < 5 and "Kneser-Ney" in str(summary.baseline_name)
    assert len(summary.samples) == 5
    assert summary.facts["Hugging Face form"] == "llama"
    assert summary.facts["steps"] == "23" and summary.facts["pieces a step"] == "16"
    others = Tokens.characters("ab", boundary=True)  # such as those of a corpus before it changed
    refuses(lambda: held_out_documents(folder, others, 9), r"knows 3 tokens and what it was trained on has \d+ others")
    assert len(held_out_documents(folder, tokens, 9)[0]) > 1
    before = contents(folder)
    refuses(lambda: go_on(folder, settings()), "is finished; there is nothing to resume")
    assert contents(folder) == before


def test_a_run_that_was_stopped(tmp_path: Path, settings: Any) -> None:
    """It is not loaded and not begun anew; it goes on."""
    folder = tmp_path / "run"
    begin(folder, settings())
    refuses(lambda: load_run(folder), "has not finished; train it to its end, with resume=True and out=")
    run = read_run(folder)
    assert run is not None and run.summary is None
    before = contents(folder)
    refuses(lambda: finish(folder, settings()), "holds a run already; pass resume=True to go on with it, or another")
    assert contents(folder) == before
    go_on(folder, settings())
    assert not (folder / STATE).exists()


def test_a_damaged_run_is_said(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "run"
    begin(folder, settings())
    whole = (folder / "run.json").read_text()
    for content in ("", "{", "[]", "5", "{}", '{"status": "x"}', '{"settings": {"colour": 1}}', "[" * 100_000):
        (folder / "run.json").write_text(content)
        refuses(lambda: go_on(folder, settings()), "remove it or take another out=")
    (folder / "run.json").write_text(whole)
    go_on(folder, settings())
