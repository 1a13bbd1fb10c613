"""Head maps: the exact weights of every head, and a model that does not know it is watched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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


@every_preset
def test_rows_sum_to_one_and_the_future_is_zero(model: GPT) -> None:
    for head in head_maps(model, IDS, TOKENS, "run").maps:
        assert head.weights.shape == (7, 7)
        np.testing.assert_allclose(head.weights.sum(1), 1, rtol=1e-6)
        assert not np.triu(head.weights, 1).any()
        assert (head.weights >= 0).all()
        assert head.weights[-1].std() > 1e-3  # heads that look somewhere


@every_preset
def test_heads_are_named_by_layer_and_number(model: GPT) -> None:
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    maps = head_maps(model, IDS, TOKENS, "run")
    assert [head.name for head in maps.maps] == [f"L{n}.H{h}" for n in range(n_layers) for h in range(n_heads)]
    assert (maps.model, maps.tokens) == ("run", tuple(TOKENS))


def test_heads_of_a_group_are_told_apart(model: GPT) -> None:
    maps = {head.name: head.weights for head in head_maps(model, IDS, TOKENS, "run").maps}
    assert not np.allclose(maps["L0.H0"], maps["L0.H1"])


@every_preset
def test_watching_changes_no_output(model: GPT) -> None:
    ids = torch.tensor([IDS])
    with torch.no_grad():
        before, watched = model(ids), []
        layer = attention_layers(model)[0]
        with observe(layer, watched.append):
            during = model(ids)
        assert torch.equal(during, before)
        head_maps(model, IDS, TOKENS, "run")
        assert torch.equal(model(ids), before)
    assert len(watched) == 1


def test_watchers_are_removed(model: GPT) -> None:
    head_maps(model, IDS, TOKENS, "run")
    assert [layer.watchers for layer in attention_layers(model)] == [[], []]


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


def test_a_model_in_training_stays_in_training(model: GPT) -> None:
    model.train()
    head_maps(model, IDS, TOKENS, "run")
    assert model.training


def test_no_gradients_are_kept(model: GPT) -> None:
    head_maps(model, IDS, TOKENS, "run")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_one_token_attends_to_itself(model: GPT) -> None:
    assert all(head.weights.tolist() == [[1.0]] for head in head_maps(model, [3], ["3"], "run").maps)


def test_an_empty_text_is_refused(model: GPT) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"^the text has no tokens; pass one with text=$"):
        head_maps(model, [], [], "run")


def test_a_text_beyond_the_context_is_refused(model: GPT) -> None:
    context = model.config.context
    assert len(head_maps(model, [1] * context, ["1"] * context, "run").maps) == 12
    with pytest.raises(hw.HeadwiseError) as refusal:
        head_maps(model, [1] * (context + 1), ["1"] * (context + 1), "run")
    assert str(refusal.value) == "the text has 129 tokens, and the model's context is 128; pass a shorter one"


def test_a_text_beyond_what_is_drawn_is_refused() -> None:
    model = GPT(GPTConfig(vocab_size=11, context=500, n_layers=1, n_heads=1, d_model=2))
    assert len(head_maps(model, [1] * LONGEST, ["1"] * LONGEST, "run").maps) == 1
    with pytest.raises(hw.HeadwiseError) as refusal:
        head_maps(model, [1] * 401, ["1"] * 401, "run")
    message = "the text has 401 tokens, and the most that whole maps are drawn for is 400; pass a shorter one"
    assert str(refusal.value) == message
