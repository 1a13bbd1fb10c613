"""No verb moves the random state of the user's program: what is drawn is drawn from generators of our own."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig

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
