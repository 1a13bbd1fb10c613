"""Steering by heads, against hooks of our own."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from cases import refuses_table
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


@pytest.mark.parametrize("change", ["add", "scale"])
@torch.no_grad()
def test_steering_is_a_hook_before_w_o(change: str) -> None:
    """Grouped heads: head 4 reads key/value head 1, and only its own six columns of W_O's input move."""
    model, vector = llama(), torch.randn(6, generator=torch.Generator().manual_seed(7))
    projection: Any = model.model.layers[1].self_attn.o_proj  # type: ignore[union-attr]

    def hook(module: nn.Module, args: Any) -> Any:
        joined = args[0].clone()
        part = joined[..., 24:30]
        part.copy_(part + vector if change == "add" else part * 0.2)
        return (joined,)

    handle = projection.register_forward_pre_hook(hook)
    expected = logits(model, ids())
    handle.remove()
    with hw.steer(model, {"L1.H4": vector if change == "add" else 0.2}):
        assert torch.equal(logits(model, ids()), expected)
    assert not torch.equal(logits(model, ids()), expected)


def test_what_cannot_be_added_is_refused() -> None:
    def steered(changes: Any) -> None:
        model = llama()
        with hw.steer(model, changes):
            logits(model, ids())

    refuses_table("steering", globals() | {"steered": steered})


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
