"""The GPT: every preset is one class, causal, the same with and without caches; continuing a text with it."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import refuses, refuses_table
from small_models import tiny
from torch import Tensor

from headwise.gpt.gpt import GPT, GPTConfig, continued, generate
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


PROMPT = [3, 1, 4, 1, 5]
N = 41  # far beyond the context of 11


def text(model: Any, n: int = N, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return list(generate(model, prompt, n, **options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{"seed": 3}, {"temperature": 0.7, "top_k": 5, "seed": 2}], ids=str)
def test_the_cache_does_not_change_the_text(name: str, options: dict[str, Any]) -> None:
    model = tiny(name)
    config = model.config

    def begin() -> Any:  # reads the whole text at each step
        ids: list[Tensor] = []
        return lambda new: ids.append(new) or model(torch.cat(ids, 1))[0, -1]

    sizes = {"context": config.context, "vocab_size": config.vocab_size}
    without = list(continued(begin, PROMPT, N, **sizes, **options))
    assert len(without) == N and text(model, **options) == without


@pytest.mark.parametrize("name", NAMES)
def test_greedy_takes_the_likeliest_and_forgets_the_older_half(name: str) -> None:
    model, ids, expected = tiny(name), list(PROMPT), []
    for _ in range(N):
        if len(ids) > 11:
            ids = ids[-5:]
        with torch.no_grad():
            expected.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        ids.append(expected[-1])
    assert text(model, temperature=0) == expected


@pytest.mark.slow
def test_sampling_follows_the_model_and_its_seed() -> None:
    model = tiny("llama")
    torch.manual_seed(1)
    first = text(model, seed=5)
    torch.manual_seed(2)
    assert text(model, seed=5) == first
    assert text(model, seed=6) != first
    model = tiny("llama")
    before = torch.get_rng_state()
    text(model)
    assert torch.equal(torch.get_rng_state(), before)
    model, n = tiny("llama"), 400
    with torch.no_grad():
        p = (model(torch.tensor([PROMPT]))[0, -1] / 1.5).softmax(-1)
    counts = Counter(next(generate(model, PROMPT, 1, temperature=1.5, seed=seed)) for seed in range(n))
    for token in range(19):
        expected = p[token].item()
        assert abs(counts[token] / n - expected) < 5 * (expected * (1 - expected) / n) ** 0.5 + 1e-3


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_samples_among_the_likeliest(top_k: int) -> None:
    model = tiny("llama")
    with torch.no_grad():
        likeliest = set(model(torch.tensor([PROMPT]))[0, -1].topk(top_k).indices.tolist())
    seen = {next(generate(model, PROMPT, 1, temperature=9.0, top_k=top_k, seed=seed)) for seed in range(100)}
    assert seen == likeliest
    assert text(model, top_k=19) == text(model, top_k=1000) == text(model)


def test_ends_of_a_text() -> None:
    model = tiny("llama")
    whole = text(model, seed=1)
    stop = whole[20]
    assert text(model, seed=1, stops=[stop]) == whole[: whole.index(stop)]
    assert text(tiny("llama"), 0) == []
    model = tiny("llama", context=1)
    assert len(text(model, 7, seed=2)) == 7
    model = tiny("llama")
    text(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", NAMES)
def test_of_a_long_prompt_the_last_context_is_read(name: str) -> None:
    model, long = tiny(name), [(7 * i) % 19 for i in range(50)]
    assert text(model, prompt=long, seed=2) == text(model, prompt=long[-11:], seed=2)


def test_wrong_arguments_are_refused() -> None:
    refuses_table("generate", globals() | {"llama": tiny("llama")})


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named(options: dict[str, Any], value: float) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = value
    refuses(lambda: text(model, **options), r"logits are NaN or inf; its weights are damaged or its training diverged")
