"""Continuing a text: the cache changes nothing, the seed decides everything, and limits are kept."""

from collections import Counter
from typing import Any

import pytest
import torch
from cases import refuses, refuses_table
from small_models import tiny
from torch import Tensor

from headwise.gpt.generate import continued, generate
from headwise.gpt.presets import PRESETS

NAMES = tuple(PRESETS)
PROMPT = [3, 1, 4, 1, 5]
N = 41  # far beyond the context of 11


def text(model: Any, n: int = N, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return list(generate(model, prompt, n, **options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [{"seed": 3}, {"temperature": 0.7, "top_k": 5, "seed": 2}],
    ids=str,
)
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
    model, n = tiny("llama"), 1000
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
