"""The film of a training: which steps it has, and that its maps are those of the model."""

import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings, film_of, read_film, run_training
from headwise.gpt.train import FRAMES, STATE, Stopped

SHAPE = {"n_layers": 2, "d_model": 12, "n_heads": 3, "context": 16}


@pytest.mark.parametrize("steps", [1, 7, 100, 5000])
def test_its_maps_are_those_that_a_watcher_sees_at_few_steps(steps: int, tmp_path: Path) -> None:
    corpus, config, recipe = Settings(steps=steps, shape=SHAPE).resolve()
    film = film_of(tmp_path, corpus, config, recipe)
    model = GPT(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for step in range(steps + 1):
        film.see(model, step)
    read: Any = read_film(tmp_path)
    seen_at = [frame["step"] for frame in read["frames"]]
    assert {0, 1, steps} <= set(seen_at) and len(seen_at) <= FRAMES and seen_at == sorted(set(seen_at))
    assert read["steps"] == steps == seen_at[-1] and model.training
    with torch.no_grad(), hw.watch(model.eval(), maps=True) as seen:
        model(torch.tensor([film.ids]))
    maps = np.frombuffer(b64decode(read["frames"][-1]["maps"]), np.uint8).reshape(6, len(film.ids), len(film.ids))
    assert read["heads"] == list(seen)
    for name, weights in zip(seen, maps / 255, strict=True):
        assert np.abs(weights - seen[name].map).max() < 0.51 / 255


def test_a_run_that_goes_on_has_all_frames(tmp_path: Path) -> None:
    settings = Settings(preset="course", steps=23, shape={"n_layers": 1, "d_model": 12, "n_heads": 3})
    run_training(tmp_path / "whole", settings)
    with pytest.raises(Stopped):
        run_training(tmp_path / "run", settings, lambda progress: signal.raise_signal(signal.SIGINT))
    assert (tmp_path / "run" / STATE).exists()
    run_training(tmp_path / "run", settings, resume=True)
    assert read_film(tmp_path / "run") == read_film(tmp_path / "whole")
    assert read_film(tmp_path) is None
