"""For layer, gpt and models: weights that hide nothing, RoPE by its paper's formula, a text, tiny models."""

import cmath
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise import KVCache, MultiHeadAttention, RoPE
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Stream
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.gpt.train import Progress, Stopped
from headwise.models.ask import CACHES, cache_in
from headwise.records import Call

SMALL: dict[str, Any] = {"n_layers": 2, "n_heads": 2, "d_model": 20, "d_ff": 23, "context": 11}
TINY: dict[str, dict[str, Any]] = {  # presets whose heads want other sizes
    "verbs": {**SMALL, "n_heads": 3, "d_model": 18},
    "llama": {**SMALL, "n_heads": 6, "n_kv_heads": 2, "d_model": 24},
}


# The classes of the courses, by their names, as somebody else writes them.
COURSES_FILE = Path(__file__).with_name("courses.txt")


def course_classes() -> dict[str, type[nn.Module]]:
    """The classes of that file by their names."""
    names: dict[str, Any] = {"__name__": "courses"}
    exec(compile(COURSES_FILE.read_text(encoding="utf-8"), str(COURSES_FILE), "exec"), names)
    return names


def noisy(n_heads: int = 6, seed: int = 0, d_model: int = 31, **options: Any) -> MultiHeadAttention:
    """A layer with heads of width 10, in float64, with noise on every parameter: no gain is 1, no bias is 0."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(d_model, n_heads, **{"head_dim": 10, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that are drawn anew and come out the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def floats(*shape: int, seed: int = 3) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float32)


# Layers beside LAYER's sizes, and the arguments of a call on two texts of T tokens.
LAYER: dict[str, Any] = {"d_model": 29, "n_heads": 6, "head_dim": 10}
LAYERS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "causal": ({"mask": hw.Causal()}, lambda T: {}),
    "gqa": ({"mask": hw.Causal(), "n_kv_heads": 2}, lambda T: {}),
    "value_dim": ({"mask": hw.Causal(), "n_kv_heads": 2, "value_dim": 3}, lambda T: {}),
    "kv_index": ({"n_kv_heads": 4, "kv_index": (0, 1, 1, 2, 3, 3)}, lambda T: {}),
    "window": ({"mask": hw.Window(2, 0)}, lambda T: {}),
    "rope": ({"mask": hw.Causal(), "rope": hw.RoPE()}, lambda T: {}),
    "positions": ({"mask": hw.Causal(), "rope": hw.RoPE()}, lambda T: {"positions": torch.arange(T) + 3}),
    "qk_norm": ({"mask": hw.Causal(), "n_kv_heads": 3, "qk_norm": True, "rope": hw.RoPE()}, lambda T: {}),
    "alibi": ({"mask": hw.Causal() & hw.Alibi()}, lambda T: {}),
    "sink": ({"mask": hw.Causal(), "sink": True}, lambda T: {}),
    "softcap": ({"mask": hw.Causal(), "softcap": 0.7}, lambda T: {}),
    "scale and biases": (
        {"mask": hw.Causal(), "scale": 0.2, "q_bias": True, "kv_bias": True, "out_bias": True},
        lambda T: {},
    ),
    "gate": ({"mask": hw.Causal()}, lambda T: {"gate": torch.linspace(-1, 1, 6)}),
    "allowed": ({}, lambda T: {"mask": hw.Allowed(floats(2, 1, T, T, seed=5) > 0)}),
    "lengths": ({"mask": hw.Causal()}, lambda T: {"mask": hw.Lengths(torch.tensor([3, T]))}),
    "segments": ({"mask": hw.Causal()}, lambda T: {"mask": hw.Segments(*2 * [torch.arange(2 * T).reshape(2, T) // 3])}),
    "bias": ({}, lambda T: {"mask": hw.Bias(floats(T, T, seed=7))}),
    "cross": ({"d_context": 13}, lambda T: {"context": floats(2, 5, 13, seed=8)}),
    "values": (
        {"d_context": 13, "d_values": 11},
        lambda T: {"context": floats(2, 5, 13, seed=8), "values": floats(2, 5, 11, seed=9)},
    ),
    "cross lengths": (
        {"d_context": 13},
        lambda T: {"context": floats(2, 5, 13), "mask": hw.Lengths(torch.tensor([5, 2]))},
    ),
}


def call_inside(layer: MultiHeadAttention, *arguments: Any, **options: Any) -> Call:
    """What the attention inside a layer gets and gives in one call of the layer."""
    seen: list[Call] = []
    layer.watchers.append(seen.append)
    layer(*arguments, **options)
    layer.watchers.remove(seen.append)
    (call,) = seen
    return call


def in_chunks(layer: MultiHeadAttention, x_btc: Tensor, at: Sequence[int], cache: Any = None, **call: Any) -> Tensor:
    """What a layer gives that reads a text in pieces, from one place of `at` to the next, with a cache."""
    cache = KVCache() if cache is None else cache
    return torch.cat([layer(x_btc[:, start:stop], cache=cache, **call) for start, stop in pairwise(at)], 1)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def shaken(module: nn.Module, seed: int = 0, size: float = 0.3) -> Any:
    """The module with noise on every parameter: no gain is 1, no bias and no sink is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * size)
    return module.eval()


def tiny_config(preset: str, vocab_size: int = 19, **changes: Any) -> GPTConfig:
    """A preset's configuration at a size for tests."""
    return GPTConfig(vocab_size=vocab_size, **{**PRESETS[preset].shape, **TINY.get(preset, SMALL), **changes})


def tiny(preset: str, vocab_size: int = 19, seed: int = 0, **changes: Any) -> GPT:
    """A model of a preset at a size for tests, with weights that hide nothing."""
    torch.manual_seed(seed)
    model: GPT = shaken(GPT(tiny_config(preset, vocab_size, **changes)), seed)
    return model


def prose(n_lines: int, seed: int = 0) -> str:
    """A text of so many short lines, in which some letters follow others far more often."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("bdglmnrst", k=2)) + rng.choice("aeiou") for _ in range(29)]
    return "".join(" ".join(rng.choices(words, k=rng.randint(2, 5))) + ".\n" for _ in range(n_lines))


def quiet(progress: object) -> None:
    """For trainings that nobody listens to."""


def stop(progress: Progress) -> None:
    """As Ctrl-C at the first step that is told of."""
    raise Stopped(progress.step, Path("run"))


def by_paper(x_bhtd: Tensor, rope: RoPE, positions_bt: Tensor) -> Tensor:
    """Su et al. 2021, section 3.2: a pair of features is a complex number, and position p multiplies it by e^(ipt).

    Scaled frequencies are the package's, which test_rope.py holds against transformers.
    """
    dim = rope.dim or x_bhtd.shape[-1]
    angles, stretch = [rope.theta ** (-2 * m / dim) for m in range(dim // 2)], 1.0
    if rope.scaling is not None:
        angles, stretch = rope.frequencies(x_bhtd.shape[-1])
    out = x_bhtd.double().clone()
    for m, angle in enumerate(angles):
        one, other = (2 * m, 2 * m + 1) if rope.interleaved else (m, m + dim // 2)
        for b, row in enumerate(positions_bt.tolist()):
            for t, p in enumerate(row):
                z = torch.complex(x_bhtd[b, :, t, one].double(), x_bhtd[b, :, t, other].double())
                z = z * stretch * cmath.exp(1j * p * angle)
                out[b, :, t, one], out[b, :, t, other] = z.real, z.imag
    return out


def text_stream(tokens: Tokens, text: str, context: int) -> Stream:
    """A text in memory to learn from."""
    return Stream(tokens.encode(text), context)


def past(answer: Any) -> dict[str, Any]:
    """What a model of transformers is passed so that it goes on from an answer: its cache, by the name it has there."""
    name = next(name for name in CACHES if hasattr(answer, name))
    return {name: cache_in(answer)}
