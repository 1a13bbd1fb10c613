"""Importance and ablation against direct computations: hooks, and one head at a time."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from cases import every, refuses
from families import IDS, build, gpt_of, model_of
from torch import Tensor

import headwise as hw
from headwise.gpt.gpt import GPT
from headwise.heads.ablate import ablation, importance
from headwise.intervals import interval_of
from headwise.models.ask import predicts

V, T = 17, 13
BATCHES = ((3, 13), (2, 7), (1, 5))  # documents of a batch have one length


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, V, shape, generator=generator) for shape in BATCHES]


def any_model(kind: str) -> Any:
    return gpt_of() if kind == "ours" else build(kind)


KINDS = ("ours", "gpt2", "mistral", "gemma2", "gpt_oss")
PROJECTION = {"ours": "o_proj", "gpt2": "attn.c_proj", "mistral": "o_proj", "gemma2": "o_proj", "gpt_oss": "o_proj"}
SHAPES = {"ours": (2, 6), "gpt2": (2, 3), "mistral": (2, 6), "gemma2": (2, 6), "gpt_oss": (2, 6)}


def logits_of(model: Any, ids: Tensor) -> Tensor:
    return torch.as_tensor(model(ids) if isinstance(model, GPT) else model(input_ids=ids).logits)


def by_hooks(model: Any, kind: str, texts: list[Tensor]) -> dict[str, float]:
    """Michel et al. 2019, section 4.1, from what W_O reads: E |head . dL/dhead|, each layer by its root of squares."""
    n_layers, n_heads = SHAPES[kind]
    totals = torch.zeros(n_layers, n_heads, dtype=torch.float64)
    for ids in texts:
        read: list[Tensor] = []

        def hook(module: Any, args: tuple[Tensor, ...], read: list[Tensor] = read) -> None:
            args[0].retain_grad()
            read.append(args[0])

        projections = (module for path, module in model.named_modules() if path.endswith(PROJECTION[kind]))
        hooks = [module.register_forward_pre_hook(hook) for module in projections]
        logits = logits_of(model, ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
        for one in hooks:
            one.remove()
        for n, joined in enumerate(read):
            assert joined.grad is not None
            totals[n] += (joined.detach() * joined.grad).unflatten(-1, (n_heads, -1)).sum(-1).abs().sum((0, 1)).double()
    scaled = totals / totals.norm(dim=1, keepdim=True)
    return {f"L{n}.H{h}": float(scaled[n, h]) for n in range(n_layers) for h in range(n_heads)}


@pytest.mark.parametrize("kind", KINDS)
def test_importance_is_michels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.models.ask.LOGITS", 97)  # the losses of a few rows at a time
    model = any_model(kind)
    expected = by_hooks(copy.deepcopy(model), kind, batches())
    found = importance(model, batches())
    assert list(found) == list(expected)
    for head, value in expected.items():
        assert found[head] == pytest.approx(value, abs=1e-5), head
    for n in range(2):
        layer = [value for head, value in found.items() if head.startswith(f"L{n}.")]
        assert math.hypot(*layer) == pytest.approx(1, abs=1e-6)
        assert max(layer) - min(layer) > 0.01


@pytest.mark.parametrize("kind", ["ours", "gpt2"])
def test_importance_leaves_the_model_alone(kind: str) -> None:
    """Gradients that were there stay as they were, modes too; frozen weights and no_grad are no obstacle."""
    model = any_model(kind).train()
    parameters = list(model.parameters())
    next(iter(model.children())).eval()
    modes = [module.training for module in model.modules()]
    parameters[0].grad = torch.ones_like(parameters[0])
    expected = importance(model, iter(batches()))
    assert [module.training for module in model.modules()] == modes
    assert (parameters[0].grad == 1).all() and all(p.grad is None for p in parameters[1:])
    model.requires_grad_(False)
    with torch.no_grad():
        assert importance(model, batches()) == pytest.approx(expected, abs=1e-6)
    assert not any(p.requires_grad for p in parameters)
    model = gpt_of(dropout=0.5).train()
    with torch.no_grad():  # 0 divided by 0 is 0
        model.blocks[1].attention.o_proj.weight.zero_()
    found = importance(model, batches())
    assert [found[f"L1.H{h}"] for h in range(6)] == [0] * 6 and found == importance(model, batches())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_ablation_is_one_head_at_a_time(kind: str, how: str) -> None:
    """The change in loss of each document, and the interval over documents."""
    model, texts = any_model(kind), batches()
    found = ablation(model, texts, how=how)
    n_layers, n_heads = SHAPES[kind]
    assert list(found) == [f"L{n}.H{h}" for n in range(n_layers) for h in range(n_heads)]
    for head, interval in found.items():
        changes: list[float] = []
        for ids in texts:
            with torch.no_grad():
                base = logits_of(model, ids)
                with hw.ablate(model, [head], how=how):
                    silent = logits_of(model, ids)
            for before, after, tokens in zip(base, silent, ids, strict=True):
                one, other = (F.cross_entropy(x[:-1], tokens[1:]) for x in (after, before))
                changes.append(float(one - other))
        expected = interval_of(changes)
        assert interval.n == 6
        for name in ("mean", "low", "high"):
            assert getattr(interval, name) == pytest.approx(getattr(expected, name), abs=2e-5), f"{name} of {head}"
    assert max(abs(interval.mean) for interval in found.values()) > 1e-3


def test_ablation_leaves_the_model_alone() -> None:
    model, seen = gpt_of(), []
    whole = ablation(model, batches(), progress=lambda *done: seen.append(done))
    total = 3 * len(whole)  # each head once a batch
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {count for _, count in seen} == {total}
    model = gpt_of(dropout=0.5)
    expected = ablation(model, batches())
    assert ablation(model.train(), batches())["L0.H1"].mean == pytest.approx(expected["L0.H1"].mean, abs=1e-6)
    assert all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
    model = gpt_of().train()
    for call in (ablation, importance):
        with pytest.raises(hw.HeadwiseError, match="exceed the model's context"):
            call(model, [torch.zeros(1, 99, dtype=torch.long)])
        assert all(module.training for module in model.modules())
        assert all(not block.attention.watchers for block in model.blocks)
    found = ablation(gpt_of(), [batches()[2]])["L0.H0"]
    assert found.n == 1 and (found.low, found.high) == (-math.inf, math.inf)


@every("call", [importance, ablation])
def test_what_has_no_loss_is_refused(call: Any) -> None:
    body = tf.GPT2Model(tf.GPT2Config(vocab_size=V, n_embd=33, n_layer=1, n_head=3, n_positions=97, **IDS))
    sizes = {"hidden_size": 33, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 37}
    masked = tf.BertForMaskedLM(tf.BertConfig(vocab_size=V, **sizes))  # its logits are of the token itself
    for model in (body, masked, model_of("bert"), model_of("vit"), model_of("t5")):
        assert predicts(model) != "next"
        refuses(partial(call, model, batches()), f"^{type(model).__name__} does not predict the next token")
    refuses(lambda: call(gpt_of(), [torch.zeros(2, 1, dtype=torch.long)]), "documents of 1 tokens have no next token")
