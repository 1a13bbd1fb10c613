"""The GPT: every preset is one class, causal, the same with and without caches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import refuses, refuses_table
from small_models import tiny

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS

NAMES = tuple(PRESETS)
B, V = 2, 19


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


def test_sizes_and_losses() -> None:
    model = GPT(GPTConfig(vocab_size=27, **PRESETS["microgpt"].shape))
    assert model.n_parameters == 4192
    assert all(parameter.ndim == 2 for parameter in model.parameters())
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=101, context=11, n_layers=8, n_heads=4, d_model=64, init_std=0.05))
    block = model.blocks[3]
    for matrix, std in (
        (block.attention.q_proj, 0.05),
        (block.feed_forward.up, 0.05),
        (model.token_embedding, 0.05),
        (block.attention.o_proj, 0.05 / 4),
        (block.feed_forward.down, 0.05 / 4),
    ):
        assert matrix.weight.std().item() == pytest.approx(std, rel=0.1)
    model, text, targets = tiny("llama"), ids(7), ids(7, 1)
    targets[0, 3:] = -100
    rows = F.log_softmax(model(text), -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    expected = -rows[targets >= 0].mean()
    torch.testing.assert_close(model.loss(text, targets), expected)
    model, plain = tiny("llama", dropout=0.3), tiny("llama")
    assert torch.equal(model(ids(7)), plain(ids(7)))
    torch.testing.assert_close(plain(ids(7), last_only=True), plain(ids(7))[:, -1:])
    model.train()
    assert not torch.equal(model(ids(7)), model(ids(7)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [5, 1, 2, 3]], ids=str)
def test_cached_equals_whole(name: str, chunks: list[int]) -> None:
    model, text = tiny(name).double(), ids(11)
    caches = model.new_caches()
    with torch.no_grad():
        parts = [model(piece, caches) for piece in text.split(chunks, 1)]
        tolerance = 1e-12 if model.config.position == "learned" else 1e-6
        torch.testing.assert_close(torch.cat(parts, 1), model(text), rtol=tolerance, atol=tolerance)
    assert [cache.length for cache in caches] == [11, 11]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_used(name: str) -> None:
    model = tiny(name)
    model.loss(ids(11), ids(11, 1)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_the_shape_matters(name: str) -> None:
    """Turning a switch round changes the model's answer or its parameters."""
    model = tiny(name)
    base, config = model(ids(7)), model.config
    switches: dict[str, Any] = {
        "norm": "layer" if config.norm == "rms" else "rms",
        "norm_eps": 0.5,
        "norm_gain": not config.norm_gain,
        "embedding_norm": not config.embedding_norm,
        "final_norm": not config.final_norm,
        "position": "learned" if config.position == "rope" else "rope",
        "activation": "gelu_tanh" if config.activation == "relu2" else "relu2",
        "gated": not config.gated,
        "bias": not config.bias,
        "tied": not config.tied,
        "qk_norm": not config.qk_norm,
        "d_ff": 29,
        "n_layers": 3,
    }
    if config.position == "rope":
        switches["rope_theta"] = 3.0
    for field, value in switches.items():
        other = tiny(name, **{field: value})
        same = {n: p.shape for n, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
        assert not (same and torch.allclose(other(ids(7)), base)), field


@pytest.mark.parametrize("name", NAMES)
def test_a_text_longer_than_the_context_is_refused(name: str) -> None:
    model = tiny(name)
    refuses(lambda: model(ids(12)), r"^12 tokens exceed the model's context of 11; pass fewer, or train with")
    caches = model.new_caches()
    model(ids(7), caches)
    refuses(lambda: model(ids(5), caches), r"^12 tokens exceed the model's context of 11")


def test_a_wrong_configuration_is_refused() -> None:
    shape = {"vocab_size": V, "context": 11, "n_layers": 2, "n_heads": 6, "d_model": 24}
    refuses_table("gpt", {"config": lambda **changes: GPTConfig(**{**shape, **changes})})
