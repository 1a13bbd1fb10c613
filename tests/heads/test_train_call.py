"""Training from Python: what a run folder holds, and what stays when there is none."""

from pathlib import Path

import pytest
import torch
from cases import refuses

from headwise import HeadwiseError
from headwise.gpt.run import read_run
from headwise.heads.film import train
from headwise.models.generate import generate
from headwise.models.open import described, open_model

TEXT = "the cat sat on the mat\n" * 19
SHAPE = {"n_layers": 1, "n_heads": 2, "d_model": 8, "context": 7}


def test_a_training_in_python(tmp_path: Path) -> None:
    (tmp_path / "cat.txt").write_text(TEXT)
    models = [
        train(text, "nanogpt", steps=3, **SHAPE) for text in (TEXT, tmp_path / "cat.txt", str(tmp_path / "cat.txt"))
    ]
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not models[0].training and models[0].config.d_model == 8
    folder = described(models[0])
    assert folder is not None and not folder.path.exists()
    assert len(list(generate(models[0], "the ", 5))) == 5
    assert list(tmp_path.iterdir()) == [tmp_path / "cat.txt"]
    model = train(TEXT, "nanogpt", tmp_path / "run", steps=3, seed=5, lines=True, **SHAPE)
    folder, run = described(model), read_run(tmp_path / "run")
    assert folder is not None and folder.path == tmp_path / "run" and run is not None
    assert (tmp_path / "run" / "text.txt").read_text() == TEXT
    settings = {"preset": "nanogpt", "seed": 5, "steps": 3, "lines": True, "shape": SHAPE}
    assert settings.items() <= vars(run.settings).items() and run.status == "finished"
    again = open_model(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    model = train(steps=1, n_layers=1, d_model=8, n_heads=2)
    assert next(generate(model, "I work =", 1)) >= 0


def test_what_does_not_fit_is_refused_and_another_folder_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for text in (TEXT, None):
        with pytest.raises(HeadwiseError, match="not empty"):
            train(text, out=tmp_path)
    refuses(lambda: train(TEXT, "nanogpt", tmp_path / "run", n_heads=3), "n_heads=3 does not divide")
    refuses(lambda: train(preset="lama"), "no preset 'lama'; did you mean")
    refuses(lambda: train("bok"), "bok does not exist")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["thesis.txt"]
    assert train(TEXT, "nanogpt", tmp_path / "run", steps=1, **SHAPE)  # the text that was left there is no obstacle
