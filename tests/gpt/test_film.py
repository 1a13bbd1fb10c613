"""The film of a training: which steps it has, and that its maps are those of the model."""

import json
import signal
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.gpt.film import FILM, FRAMES, Film, read_film
from headwise.gpt.gpt import GPT
from headwise.gpt.run import Settings, run_training
from headwise.gpt.train import STATE, Stopped

SHAPE = {"n_layers": 2, "d_model": 12, "n_heads": 3, "context": 16}


def unpacked(film: dict[str, Any], frame: dict[str, Any]) -> Any:
    T = len(film["tokens"])
    return np.frombuffer(b64decode(frame["maps"]), np.uint8).reshape(len(film["heads"]), T, T) / 255


@pytest.mark.parametrize("steps", [1, 7, 100, 5000])
def test_frames_are_few_and_begin_and_end_the_training(steps: int) -> None:
    due = Film(*Settings(steps=steps, shape=SHAPE).resolve()).due
    assert {0, 1, steps} <= due and len(due) <= FRAMES and max(due) == steps


def test_the_maps_are_those_that_a_watcher_sees() -> None:
    corpus, config, recipe = Settings(steps=70, shape=SHAPE).resolve()
    told: list[Any] = []
    film, model = Film(corpus, config, recipe, told.append), GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    film(model.train(), 0)
    assert model.training and [frame["step"] for frame in told] == [0]
    maps = unpacked(film.header, told[0])
    with torch.no_grad(), hw.watch(model.eval(), maps=True) as seen:
        model(torch.tensor([film.ids]))
    assert film.header["heads"] == list(seen)
    for name, weights in zip(seen, maps, strict=True):
        assert np.abs(weights - seen[name].map).max() < 0.51 / 255
    film(model, 2)
    film(model, 3)  # not due
    assert [frame["step"] for frame in told] == [0, 2]


def test_a_run_that_goes_on_has_all_frames(tmp_path: Path) -> None:
    settings = Settings(preset="course", steps=23, shape={"n_layers": 1, "d_model": 12, "n_heads": 3})
    run_training(tmp_path / "whole", settings)
    with pytest.raises(Stopped):
        run_training(tmp_path / "run", settings, lambda progress: signal.raise_signal(signal.SIGINT))
    assert (tmp_path / "run" / STATE).exists()
    run_training(tmp_path / "run", settings, resume=True)
    assert json.loads((tmp_path / "run" / FILM).read_text()) == read_film(tmp_path / "whole")
    assert read_film(tmp_path) is None
