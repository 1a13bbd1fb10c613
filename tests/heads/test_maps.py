"""Head maps: the exact weights of every head, and a model that does not know it is watched."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses
from families import gpt_of

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.watch import LONGEST, head_maps
from headwise.models.hook import observe
from headwise.models.sites import attention_layers

IDS = [3, 1, 4, 1, 5, 9, 2]
TOKENS = [str(i) for i in IDS]


@pytest.fixture
def model() -> GPT:
    return gpt_of()


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_those_of_each_layer_s_trace(preset: str) -> None:
    """Two orders of the same sums: scores of some tens differ in their last digit, and weights by as much."""
    model = gpt_of(preset)
    calls: list[Any] = []
    for layer in attention_layers(model):
        layer.watchers.append(calls.append)
    with torch.no_grad():
        model(torch.tensor([IDS]))
    for layer in attention_layers(model):
        layer.watchers.clear()
    maps = iter(head_maps(model, IDS, TOKENS, "run").maps)
    for call in calls:
        for weights in hw.trace(call.q, call.k, call.v, mask=hw.Causal()).weights[0]:
            np.testing.assert_allclose(next(maps).weights, weights.numpy(), rtol=64 * np.finfo(np.float32).eps)
    assert next(maps, None) is None


def test_watchers_are_removed_after_an_exception(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("headwise.heads.watch.row_weights", fail)
    with pytest.raises(MemoryError):
        head_maps(model, IDS, TOKENS, "run")
    assert [layer.watchers for layer in attention_layers(model)] == [[], []]


def test_a_watcher_of_somebody_else_stays(model: GPT) -> None:
    seen: list[Any] = []
    layer = attention_layers(model)[1]
    with observe(layer, seen.append):
        head_maps(model, IDS, TOKENS, "run")
        assert len(layer.watchers) == 1
    assert len(seen) == 1


def test_heads_have_names_and_rows(model: GPT) -> None:
    assert all(head.weights.tolist() == [[1.0]] for head in head_maps(model, [3], ["3"], "run").maps)
    maps = {head.name: head.weights for head in head_maps(model, IDS, TOKENS, "run").maps}
    assert not np.allclose(maps["L0.H0"], maps["L0.H1"])


def test_what_has_no_maps_is_refused(model: GPT) -> None:
    refuses(lambda: head_maps(model, [], [], "run"), r"^the text has no tokens; pass one with text=$")
    wide = GPT(GPTConfig(vocab_size=11, context=500, n_layers=1, n_heads=1, d_model=2))
    for each, longest, bound in (
        (model, 41, "the model's context is 41"),
        (wide, LONGEST, "the most that whole maps are drawn for is 400"),
    ):
        head_maps(each, [1] * longest, ["1"] * longest, "run")
        call = partial(head_maps, each, [1] * (longest + 1), ["1"] * (longest + 1), "run")
        refuses(call, f"^the text has {longest + 1} tokens, and {bound}; pass a shorter one$")
