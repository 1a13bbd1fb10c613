"""Steering by heads: against hooks of our own, and in a model built by hand in which one head decides."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cases import refuses_table
from planted import WORDS, induction_model
from torch import Tensor, nn

import headwise as hw
from headwise.models.ask import logits

V, T = 131, 13


def llama() -> nn.Module:
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=V, hidden_size=36, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=37, max_position_embeddings=97,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def ids(seed: int = 5) -> Tensor:
    return torch.randint(3, V, (1, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("change", "strength"), [("add", 1.0), ("add", -1.7), ("scale", 1.0), ("scale", 0.3)])
@torch.no_grad()
def test_steering_is_a_hook_before_w_o(change: str, strength: float) -> None:
    """Grouped heads: head 4 reads key/value head 1, and only its own six columns of W_O's input move."""
    model, vector = llama(), torch.randn(6, generator=torch.Generator().manual_seed(7))
    projection: Any = model.model.layers[1].self_attn.o_proj  # type: ignore[union-attr]

    def hook(module: nn.Module, args: Any) -> Any:
        joined = args[0].clone()
        part = joined[..., 24:30]
        part.copy_(part + strength * vector if change == "add" else part * (1 + strength * (0.2 - 1)))
        return (joined,)

    handle = projection.register_forward_pre_hook(hook)
    expected = logits(model, ids())
    handle.remove()
    with hw.steer(model, {"L1.H4": vector if change == "add" else 0.2}, strength):
        assert torch.equal(logits(model, ids()), expected)
    assert not torch.equal(logits(model, ids()), expected)


def induction_pairs(n: int) -> tuple[list[list[int]], list[list[int]]]:
    """... 7 2 ... 7 -> 2, and the same text with 7 3 in it: what the induction head fetches decides."""
    clean, corrupted = [], []
    for number in range(n):
        generator = torch.Generator().manual_seed(number)
        text = (torch.randperm(WORDS - 4, generator=generator) + 4).tolist()[:6]
        clean.append([*text[:3], 1, 2, *text[3:], 1])
        corrupted.append([*text[:3], 1, 3, *text[3:], 1])
    return clean, corrupted


def test_directions_and_what_they_move() -> None:
    model = induction_model()
    found = hw.direction(model, *induction_pairs(17))
    assert list(found.vectors) == ["L1.H0"]
    assert (found.n_pairs, found.success.n) == (9, 8)
    assert found.success.mean == 1
    assert found.control.n == 8 and found.control.mean < 0.5
    _, corrupted = induction_pairs(23)
    # A direction steers with the strength with which it was judged: with a hundredth it turns nothing.
    for strength, direction, answer in ((None, found, 2), (None, replace(found, strength=0.01), 3), (0.01, found, 3)):
        with hw.steer(model, direction, strength):
            answers = [int(logits(model, torch.tensor([x]))[0, -1].argmax()) for x in corrupted[17:]]
        assert answers == [answer] * 6
    assert "L1.H0: 100% of 8 held-out texts" in repr(found)
    # A head that is added to at every token moves other predictions too; the numbers are KL as it is defined.
    model, (clean, corrupted) = induction_model(), induction_pairs(11)
    text = [4, 5, 6, 7]
    found = hw.direction(model, clean, corrupted, other=[text])
    plain = logits(model, torch.tensor([text]))[0].detach().log_softmax(-1)
    with hw.steer(model, found):
        steered = logits(model, torch.tensor([text]))[0].detach().log_softmax(-1)
    nats = torch.nn.functional.kl_div(steered, plain, log_target=True, reduction="none").sum(-1)
    assert found.elsewhere.mean == pytest.approx(float(nats.mean()), rel=1e-4)
    assert found.moved == pytest.approx(dict(zip(text, nats.tolist(), strict=True)), rel=1e-4)
    model, pairs = induction_model().train(), induction_pairs(11)
    state = torch.random.get_rng_state()
    first = hw.direction(model, *pairs, seed=3)
    second = hw.direction(model, *pairs, heads=iter(first.vectors), seed=3)  # a generator is read once
    assert repr(first) == repr(second) and model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_be_added_is_refused() -> None:
    def steered(changes: Any) -> None:
        model = llama()
        with hw.steer(model, changes):
            logits(model, ids())

    pairs = dict(zip(("clean", "corrupted"), induction_pairs(7), strict=True))
    refuses_table("steering", globals() | pairs | {"steered": steered, "model": induction_model()})


def test_a_vector_is_added_and_a_number_multiplies_whatever_they_are_made_of() -> None:
    model, width = llama(), 6

    def steered(change: Any) -> Tensor:
        with hw.steer(model, {"L0.H3": change}):
            return logits(model, ids())

    vector = torch.arange(width) / 3
    assert not torch.allclose(steered(vector), logits(model, ids()), atol=1e-3)
    for same in (vector.numpy(), vector.tolist()):
        assert torch.equal(steered(same), steered(vector))
    for half in (torch.tensor(0.5), np.float32(0.5)):
        assert torch.equal(steered(half), steered(0.5))
