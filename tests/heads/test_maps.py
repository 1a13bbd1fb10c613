"""Head maps: the exact weights of every head, and a model that does not know it is watched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.watch import LONGEST, head_maps
from headwise.models.hook import observe
from headwise.models.sites import attention_layers

IDS = [3, 1, 4, 1, 5, 9, 2]
TOKENS = [str(i) for i in IDS]
SMALL: dict[str, Any] = {"n_heads": 2, "d_model": 20, "n_layers": 2}
SIZES: dict[str, dict[str, Any]] = {  # presets whose heads want other sizes
    "verbs": {"n_heads": 3, "d_model": 18, "n_layers": 3},
    "llama": {"n_heads": 6, "n_kv_heads": 2, "d_model": 24, "n_layers": 2},
}


@pytest.fixture
def model(request: Any) -> GPT:
    name = getattr(request, "param", "llama")
    torch.manual_seed(0)
    made = GPT(GPTConfig(vocab_size=11, **{**PRESETS[name].shape, **SIZES.get(name, SMALL), "init_std": 0.5}))
    return made.eval()


every_preset = pytest.mark.parametrize("model", PRESETS, indirect=True)


@every_preset
def test_weights_are_those_of_each_layer_s_trace(model: GPT) -> None:
    """Two orders of the same sums: scores of some tens differ in their last digit, and weights by as much."""
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
    context = model.config.context
    assert len(head_maps(model, [1] * context, ["1"] * context, "run").maps) == 12
    with pytest.raises(hw.HeadwiseError) as refusal:
        head_maps(model, [1] * (context + 1), ["1"] * (context + 1), "run")
    assert str(refusal.value) == "the text has 129 tokens, and the model's context is 128; pass a shorter one"
    model = GPT(GPTConfig(vocab_size=11, context=500, n_layers=1, n_heads=1, d_model=2))
    assert len(head_maps(model, [1] * LONGEST, ["1"] * LONGEST, "run").maps) == 1
    with pytest.raises(hw.HeadwiseError) as refusal:
        head_maps(model, [1] * 401, ["1"] * 401, "run")
    message = "the text has 401 tokens, and the most that whole maps are drawn for is 400; pass a shorter one"
    assert str(refusal.value) == message
