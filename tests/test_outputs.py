"""What a call leaves alone: an output takes the place of nothing else, and no verb moves the random state."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, read_table, refused
from invoking import Invoke

import headwise as hw
from headwise.cli.app import check_outputs
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without weights, a model that comes of it, and texts: no command may get as far as to read them."""
    place = tmp_path_factory.mktemp("place")
    for name in ("run", "child", "units", "texts", "links"):
        (place / name).mkdir()
    (place / "t.csv").write_text("the cat sat\n")
    (place / "t.txt").write_text("the cat sat\n")
    (place / "book.txt").write_text("the dog sat\n")
    (place / "texts" / "a.md").write_text("")
    for name in ("config.json", "model.safetensors", "report.html", "table.csv"):
        (place / "run" / name).write_text("{}")
    (place / "run" / "run.json").write_text(json.dumps({"settings": {"text": [str(place / "book.txt")]}}))
    (place / "child" / "config.json").symlink_to("../links/blob")  # as the cache of a hub has it
    (place / "links" / "blob").write_text("{}")
    (place / "child" / "headwise.json").write_text(json.dumps({"run": "../run"}))
    (place / "links" / "soft.csv").symlink_to("../t.csv")
    (place / "links" / "hard.csv").hardlink_to(place / "t.csv")
    (place / "links" / "run").symlink_to("../run")
    (place / "units" / "unit-1.json").write_text("{}")
    return place


@every("words,said", refused(read_table("refusals")["outputs"]))
def test_what_would_be_lost_is_refused(words: str, said: str, place: Path, invoke: Invoke) -> None:
    before = {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in place.rglob("*")}
    code, printed, message = invoke(*(word.replace("@", f"{place}/") for word in words.split()))
    assert (code, printed) == (2, "") and message.count("\n") == 1, (printed, message)
    assert re.search(said, message.replace(f"{os.path.realpath(place)}/", "@").replace(f"{place}/", "@")), message
    assert {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in place.rglob("*")} == before


def test_what_harms_nobody_is_allowed(place: Path) -> None:
    run = place / "run"
    check_outputs([run, place / "t.txt", place / "texts"], html=run / "report.html", out=[run / "table.csv"])
    check_outputs(["/dev/stdin"], out=[Path("/dev/stdout")], html=Path("/dev/stdout"))


TEXT = "the cat sat on the mat\nthe dog sat\n" * 7
RESHAPED: dict[str, Any] = {"text": TEXT}
VERBS: dict[str, Callable[[Path], Any]] = {
    "open": hw.open,
    "survey": lambda folder: hw.survey(folder, TEXT, ablate="zero"),
    "share": lambda folder: hw.share(folder, 2, heal=1, **RESHAPED),
    "prune": lambda folder: hw.prune(folder, ["L0.H1"], **RESHAPED),
    "generate": lambda folder: list(hw.generate(folder, "the ", 3)),
    "train": lambda folder: hw.train(TEXT, steps=2, n_layers=1, n_heads=1, d_model=4, context=11, dropout=0.1),
}


@pytest.fixture(scope="module", params=["ours", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = Tokens.characters(TEXT, boundary=True)
    config = GPTConfig(vocab_size=len(tokens), context=11, n_layers=2, n_heads=4, d_model=24)
    path = tmp_path_factory.mktemp("random") / "model"
    save_model(path, GPT(config).eval(), tokens)
    if request.param == "llama":  # the same weights, read by transformers
        described = json.loads((path / "config.json").read_text())
        del described["headwise"]
        (path / "config.json").write_text(json.dumps(described))
    return path


def states() -> list[Any]:
    words = np.random.get_state()[1]
    return [random.getstate(), words.tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leaves_the_global_random_state_alone(verb: str, folder: Path) -> None:
    before = states()
    VERBS[verb](folder)
    assert states() == before
