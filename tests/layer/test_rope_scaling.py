"""RoPE for longer texts: its frequencies against transformers' and the formulas, and the order of norm and rotation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import every, refuses_table
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import headwise as hw
from headwise.rungs.tensor import Rotation

B, T, D = 2, 7, 10
FLOAT32 = {"rel": 4 * 2**-23}  # transformers takes powers, ratios and ramps in float32: a rounding each
DIMS = [6, 10, 14, 26, 64, 128]
FACTORS = [1.0, 1.5, 2.0, 7.0, 40.0]
SCALED = {
    "linear": hw.RoPE(scaling="linear", factor=7.0),
    "ntk": hw.RoPE(scaling="ntk", factor=7.0),
    "yarn": hw.RoPE(scaling="yarn", factor=7.0, original_context=53),
    "yarn interleaved, in part": hw.RoPE(
        scaling="yarn", factor=3.0, original_context=101, dim=6, interleaved=True, beta_fast=5.0, beta_slow=2.0
    ),
}


def theirs(head_dim: int, **parameters: Any) -> tuple[list[float], float]:
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=8192,
        rope_parameters=parameters,
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return frequencies.tolist(), factor


@every("theta", [10_000.0, 500_000.0, 31.0])
@every("factor", FACTORS)
@pytest.mark.parametrize("dim", DIMS)
def test_linear(dim: int, factor: float, theta: float) -> None:
    ours = hw.RoPE(theta, scaling="linear", factor=factor).frequencies(dim)
    expected = theirs(dim, rope_type="linear", factor=factor, rope_theta=theta)
    assert ours[0] == pytest.approx(expected[0], **FLOAT32)
    assert ours[1] == expected[1] == 1.0


@every("betas", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}])
@every("original, theta", [(4096, 10_000.0), (257, 10_000.0), (32_768, 1_000_000.0), (53, 31.0)])
@every("factor", FACTORS)
@pytest.mark.parametrize("dim", DIMS)
def test_yarn(dim: int, factor: float, original: int, theta: float, betas: dict[str, float]) -> None:
    ours = hw.RoPE(theta, scaling="yarn", factor=factor, original_context=original, **betas).frequencies(dim)
    expected = theirs(
        dim, rope_type="yarn", factor=factor, rope_theta=theta, original_max_position_embeddings=original, **betas
    )
    # Between fast and slow they mix two frequencies, and the roundings are those of the larger one.
    loose = 4 * 2**-23
    for m, (mine, other) in enumerate(zip(ours[0], expected[0], strict=True)):
        assert mine == pytest.approx(other, rel=loose, abs=loose * theta ** (-2 * m / dim))
    assert ours[1] == pytest.approx(expected[1], rel=1e-15)
    assert ours[1] == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)


@every("theta", [10_000.0, 31.0])
@every("factor", FACTORS)
@pytest.mark.parametrize("dim", DIMS)
def test_ntk(dim: int, factor: float, theta: float) -> None:
    """The base grows so that the slowest pair turns `factor` times slower, and the fastest as ever."""
    frequencies, attention = hw.RoPE(theta, scaling="ntk", factor=factor).frequencies(dim)
    base = theta * factor ** (dim / (dim - 2))
    assert frequencies == pytest.approx([base ** (-2 * m / dim) for m in range(dim // 2)], rel=1e-14)
    assert frequencies[0] == attention == 1
    assert hw.RoPE(scaling="ntk", factor=factor).frequencies(2) == ([1.0], 1.0)  # a single pair
    assert frequencies[-1] == pytest.approx(theta ** (-(dim - 2) / dim) / factor, rel=1e-12)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x_bhtd: Tensor, rope: hw.RoPE, start: int = 0) -> Tensor:
    """Each pair turned by its frequency times the position, and stretched."""
    dim, out = rope.dim or x_bhtd.shape[-1], x_bhtd.clone()
    frequencies, stretch = rope.frequencies(x_bhtd.shape[-1])
    for m, frequency in enumerate(frequencies):
        one, other = (2 * m, 2 * m + 1) if rope.interleaved else (m, m + dim // 2)
        for t in range(x_bhtd.shape[2]):
            c, s = math.cos(frequency * (start + t)), math.sin(frequency * (start + t))
            a, b = x_bhtd[:, :, t, one], x_bhtd[:, :, t, other]
            out[:, :, t, one], out[:, :, t, other] = stretch * (a * c - b * s), stretch * (b * c + a * s)
    return out


@pytest.mark.parametrize("start", [0, 997])
@pytest.mark.parametrize("name", SCALED)
def test_rotation_uses_the_scaled_frequencies_and_the_factor(name: str, start: int) -> None:
    rope, x = SCALED[name], draw(B, 3, T, D)
    turned = Rotation(rope, D)(x, start)
    torch.testing.assert_close(turned, by_hand(x, rope, start), rtol=1e-6, atol=1e-6)
    unscaled = hw.RoPE(rope.theta, rope.dim, rope.interleaved)
    assert (turned - by_hand(x, unscaled, start)).abs().max() > 1e-2
    positions = torch.arange(start, start + T)
    torch.testing.assert_close(Rotation(rope, D)(x, 0, positions), turned, rtol=0, atol=0)


# --- in a layer ---

ROPES = {"none": hw.RoPE(), **SCALED}


def make(rope: hw.RoPE, shaken: Any, **options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(1)
    made = hw.MultiHeadAttention(29, 6, **{"n_kv_heads": 2, "head_dim": D, "mask": hw.Causal(), **options}, rope=rope)
    layer: hw.MultiHeadAttention = shaken(made.double())
    return layer


@pytest.mark.parametrize("before_norm", [False, True], ids=["norm first", "rotation first"])
@pytest.mark.parametrize("name", ROPES)
def test_the_order_of_norm_and_rotation(name: str, before_norm: bool, shaken: Any) -> None:
    rope = hw.RoPE(**{**vars(ROPES[name]), "before_norm": before_norm})
    layer, x = make(rope, shaken, qk_norm=True), draw(B, T, 29)

    def ready(projection: torch.nn.Linear, gain: Tensor) -> Tensor:
        y = (x @ projection.weight.T).unflatten(-1, (-1, D)).transpose(1, 2)
        norm = lambda y: y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6) * gain  # noqa: E731
        return norm(by_hand(y, rope)) if before_norm else by_hand(norm(y), rope)

    v = (x @ layer.v_proj.weight.T).unflatten(-1, (-1, D)).transpose(1, 2)
    q, k = ready(layer.q_proj, layer.q_norm.weight), ready(layer.k_proj, layer.k_norm.weight)
    out = hw.attend(q, k, v, mask=hw.Causal()).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), out, rtol=1e-6, atol=1e-6)
    other = make(hw.RoPE(**{**vars(rope), "before_norm": not before_norm}), shaken, qk_norm=True)
    assert (other(x) - layer(x)).abs().max() > 1e-3


# --- errors ---


def test_a_wrong_scaling_is_refused() -> None:
    refuses_table("scaling", globals())


YARN: dict[str, Any] = {"scaling": "yarn", "factor": 2.0, "original_context": 64}


def test_what_only_yarn_takes_is_honoured_or_refused() -> None:
    refuses_table("yarn", globals())
