"""Trained models of packages: how their files are read, and, where `make models` built them, that they open."""

import sys
from pathlib import Path

import pytest
import torch

import headwise as hw

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-270m", "whisper-base", "rxnmapper", "all-minilm-l6-v2"])
def test_a_trained_model_opens_and_is_watched(name: str) -> None:
    if not (models.MODELS / name).is_dir():
        pytest.skip(f"build/models has no {name}: `make models` builds it")
    model = hw.open(models.MODELS / name)
    inputs = {"input_ids": torch.tensor([[3, 5, 7]])}
    if name.startswith("whisper"):
        inputs = {
            "input_features": torch.zeros(1, 80, 3000),
            "decoder_input_ids": torch.tensor([[50258, 50259, 50359]]),
        }
    with hw.watch(model) as seen, torch.no_grad():
        model(**inputs)
    sizes = {"gemma-3-270m": 18 * 4, "whisper-base": 3 * 6 * 8, "rxnmapper": 12 * 8, "all-minilm-l6-v2": 6 * 12}
    assert len(list(seen)) == sizes[name]
