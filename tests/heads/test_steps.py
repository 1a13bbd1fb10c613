"""The steps of one head: every recorded line follows from the lines before it, and the numbers are the model's own."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses, refuses_table
from families import gpt_of
from torch import nn

import headwise as hw
from headwise.files import packaged, read_text
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.heads.steps import example_model, head_steps
from headwise.heads.watch import head_maps
from headwise.layer.layer import MultiHeadAttention
from headwise.models.sites import attention_layers

IDS = [3, 1, 4, 1, 5, 9, 2]
TOKENS = [str(i) for i in IDS]


def build(preset: str) -> GPT:
    return gpt_of(preset, bias=preset == "nanogpt")  # GPT-2 has biases


every_preset = pytest.mark.parametrize("preset", PRESETS)


def plain_steps(model: GPT, layer: int = 1, head: int = 1, at: int = 4) -> dict[str, Any]:
    """The record as it comes back from JSON."""
    steps = head_steps(model, IDS, TOKENS, layer, head, at, "run")
    document = json.dumps(asdict(steps), allow_nan=False)
    result: dict[str, Any] = json.loads(document)
    return result


def close(actual: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9, err_msg=what)


def check_every_line(s: dict[str, Any]) -> None:
    """Recompute each number of a record from the numbers recorded before it."""
    keys, cap = s["keys"], s["softcap"]
    for key in keys:
        close(key["dot"], np.array(s["query"]) @ np.array(key["key"]), "dot")
        close(key["score"], key["dot"] * s["scale"], "score")
        close(key["capped"], key["score"] if cap is None else cap * math.tanh(key["score"] / cap), "capped")
        close(key["logit"], key["capped"] + key["bias"], "logit")
    logits = [key["logit"] for key in keys] + ([] if s["sink"] is None else [s["sink"]])
    weights = [key["weight"] for key in keys] + ([] if s["sink"] is None else [s["sink_weight"]])
    summed = np.zeros(len(s["out"]))
    if keys:
        close(weights, np.exp(logits) / np.exp(logits).sum(), "weights")
        summed = np.sum([key["weight"] * np.array(key["value"]) for key in keys], axis=0)
    close(s["out"], summed * (1 if s["gate"] is None else s["gate"]), "out")
    close(s["norms"], np.linalg.norm(s["added"], axis=1), "norms")
    close(s["layer_out"], np.sum(s["added"], axis=0) + np.array(s["out_bias"] or 0), "layer_out")
    close(s["x_new"], np.array(s["x"]) + np.array(s["layer_out"]), "x_new")


@every_preset
@pytest.mark.parametrize("place", [(0, 0, 0), (0, 1, 6), (-1, -1, 4)])
def test_every_line_follows_from_the_lines_before(preset: str, place: tuple[int, int, int]) -> None:
    model = build(preset)
    layer, head, at = place[0] % model.config.n_layers, place[1] % model.config.n_heads, place[2]
    s = plain_steps(model, layer, head, at)
    check_every_line(s)
    assert [key["position"] for key in s["keys"]] == list(range(at + 1))
    assert (s["layer"], s["head"], s["at"], s["tokens"], s["model"]) == (layer, head, at, TOKENS, "run")
    assert min(np.abs(s["layer_out"]).max(), min(s["norms"])) > 0.01  # it is about something


@every_preset
def test_the_numbers_are_those_of_the_model(preset: str) -> None:
    """Recomputed from the state of the model, with slices written out here and every kind of norm torch's own."""
    model = build(preset).double()
    block: Any = model.blocks[1]
    layer, config = block.attention, model.config
    D, group = layer.spec.head_dim, layer.spec.n_heads // layer.spec.n_kv_heads
    inputs: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]))
        handle.remove()
        x = inputs[0]
        normed = block.attention_norm(x)
        attended = layer(normed)
    s = plain_steps(model, 1, config.n_heads - 1, 4)
    g = (config.n_heads - 1) // group

    def projected(linear: nn.Linear, n: int, t: int) -> Any:
        rows = slice(n * D, (n + 1) * D)
        bias = 0 if linear.bias is None else linear.bias[rows]
        return (linear.weight[rows] @ normed[0, t] + bias).tolist()

    turns = config.position == "rope"
    if not (config.qk_norm or turns):  # else what is scored is no longer what was projected
        close(s["query"], projected(layer.q_proj, config.n_heads - 1, 4), "q")
    for j, key in enumerate(s["keys"]):
        if not (config.qk_norm or turns):
            close(key["key"], projected(layer.k_proj, g, j), "k")
        close(key["value"], projected(layer.v_proj, g, j), "v")
    close(s["added"][-1], layer.o_proj.weight[:, -D:].detach() @ torch.tensor(s["out"], dtype=torch.float64), "added")
    close(s["x"], x[0, 4].tolist(), "x")
    close(s["layer_out"], attended[0, 4].tolist(), "layer_out")
    close(s["x_new"], (x + attended)[0, 4].tolist(), "x_new")
    assert s["kv_head"] == g
    assert s["sharing"] == list(range(g * group, config.n_heads - 1))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"mask": hw.Causal(), "softcap": 0.7},
    "sink": {"mask": hw.Causal(), "sink": True},
    "window": {"mask": hw.Window(2, 0)},
    "both sides": {"mask": None},
    "alibi": {"mask": hw.Causal() & hw.Alibi(), "softcap": 1.5},
    "hidden in the middle": {"mask": hw.Causal() & hw.Allowed([[True, False, True, True, True, False, True]])},
    "value width": {"mask": hw.Causal(), "value_dim": 3, "n_kv_heads": 1, "sink": True, "out_bias": True},
    "kv_index": {"mask": hw.Causal(), "n_kv_heads": 2, "kv_index": (1, 0, 1)},
    "turned before the norm": {"mask": hw.Causal(), "qk_norm": True, "rope": hw.RoPE(before_norm=True)},
    "biases before rope": {"mask": hw.Causal(), "rope": hw.RoPE(), "q_bias": True, "kv_bias": True, "n_kv_heads": 1},
    "interleaved": {"mask": hw.Causal(), "rope": hw.RoPE(dim=4, interleaved=True)},
    "yarn": {"mask": hw.Causal(), "rope": hw.RoPE(scaling="yarn", factor=4.0, original_context=64)},
}


def with_layer(**options: Any) -> GPT:
    """A model whose second layer has options that no preset has."""
    model = build("verbs")
    torch.manual_seed(2)
    layer = MultiHeadAttention(**{"d_model": 24, "n_heads": 3, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.7, 0.9)
    model.blocks[1].attention = layer  # type: ignore[union-attr]
    return model.eval()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_layer_is_in_the_record(name: str) -> None:
    model = with_layer(**OPTIONS[name])
    for head in range(3):
        s = plain_steps(model, 1, head, 4)
        check_every_line(s)
    seen = {"window": [2, 3, 4], "both sides": list(range(7)), "hidden in the middle": [0, 2, 3, 4]}
    assert [key["position"] for key in s["keys"]] == seen.get(name, [0, 1, 2, 3, 4])
    spec = model.blocks[1].attention.spec  # type: ignore[union-attr]
    assert s["softcap"] == spec.softcap
    assert (s["sink"] is not None) == spec.sink
    assert any(key["bias"] for key in s["keys"]) == (name == "alibi")
    assert (len(s["out"]), s["n_kv_heads"]) == (spec.value_dim, spec.n_kv_heads)
    assert s["kv_head"] == spec.kv_index[2]
    assert sum(key["weight"] for key in s["keys"]) == pytest.approx(1 - (s["sink_weight"] or 0))


def test_positions_without_keys_and_other_gates() -> None:
    model = build("llama")
    gates = torch.tensor([0.5, 0.0, 2.0, 1.0, 1.0, -1.0])

    def gated(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "gate": gates}

    model.blocks[1].attention.register_forward_pre_hook(gated, with_kwargs=True)  # type: ignore[union-attr]
    for head in range(6):
        s = plain_steps(model, 1, head)
        check_every_line(s)
        assert s["gate"] == gates[head]
    assert plain_steps(model, 1, 1)["norms"][1] == 0
    for sink in (False, True):
        s = plain_steps(with_layer(mask=hw.Causal(offset=-1), sink=sink), 1, 0, 0)
        check_every_line(s)
        assert s["keys"] == [] and s["out"] == [0.0] * 8 and s["sink"] is None
    model = with_layer(mask=hw.Causal(), sink=True)
    model.blocks[1].attention.sink.data.fill_(-math.inf)  # type: ignore[union-attr]
    s = plain_steps(model)
    check_every_line(s)
    assert s["sink"] is None


def test_the_model_is_left_alone() -> None:
    model = build("llama").train()
    seen: list[Any] = []
    attention_layers(model)[1].watchers.append(seen.append)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    plain_steps(model)
    assert seen == []  # somebody else's watcher has watched nothing
    assert model.training and torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    config = build("llama").config
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**asdict(config), "dropout": 0.5})).train()
    s = plain_steps(model)
    check_every_line(s)
    assert s == plain_steps(model)


def test_what_does_not_exist_is_refused() -> None:
    place: dict[str, Any] = {"ids": IDS, "tokens": TOKENS, "layer": 1, "head": 1, "at": 4, "name": "run"}
    refuses_table("steps", {"steps": lambda **change: head_steps(build("llama"), **place | change)})


def test_what_a_record_cannot_hold_is_refused() -> None:
    model = GPT(GPTConfig(vocab_size=11, context=5, n_layers=1, n_heads=1, d_model=2))
    with pytest.raises(hw.HeadwiseError, match=r"layer 1: the model has 1, counted from 0$"):
        head_steps(model, [1], ["1"], 1, 0, 0, "run")
    check_every_line(json.loads(json.dumps(asdict(head_steps(model, [1], ["1"], 0, 0, 0, "run")))))
    refuses(lambda: plain_steps(with_layer(mask=hw.Causal(), out_proj=False)), "no output projection")
    said = "^the text has 6 tokens, and the model's context is 5; pass a shorter one$"
    refuses(lambda: head_maps(model, [1] * 6, ["1"] * 6, "run"), said)


@pytest.mark.slow
def test_the_example_model_can_trace_emma() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():  # whoever calls it
        model, tokens, name = example_model()
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    ids = tokens.prompt("emma")
    steps = head_steps(model, ids, tokens.shown(ids), 0, 2, 3, name)
    assert steps.tokens == ("<|end|>", "e", "m", "m", "a") and steps.name == "L0.H2" and "microgpt" in steps.model
    check_every_line(json.loads(json.dumps(asdict(steps))))
    assert model.config.d_model == 16 and len(tokens) == 27 and not model.training

    again = example_model()[0].state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    names = read_text(packaged("data/names.txt")).split()
    with torch.no_grad():
        losses = [model.loss(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])) for ids in map(tokens.document, names)]
    assert sum(losses) / len(losses) < 2.2  # of log 27 = 3.3: it has learned something to look at
