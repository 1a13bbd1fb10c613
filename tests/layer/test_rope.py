"""Rotary positions against the paper's complex numbers; scaled ones, for longer texts, against transformers' too."""

import math
from typing import Any

import pytest
import torch
from cases import every, refuses_table
from small_models import by_paper, noisy, normal
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import headwise as hw
from headwise.backends.torch_ import Rotation

B, H, T, D = 2, 3, 7, 10
DIMS = [6, 10, 14, 26, 64, 128]
FACTORS = [1.0, 1.5, 2.0, 7.0, 40.0]
SCALED = {
    "linear": hw.RoPE(scaling="linear", factor=7.0),
    "yarn": hw.RoPE(scaling="yarn", factor=7.0, original_context=53),
    "llama3": hw.RoPE(scaling="llama3", factor=7.0, original_context=53, beta_fast=4.0, beta_slow=1.0),
    "yarn interleaved, in part": hw.RoPE(
        scaling="yarn", factor=3.0, original_context=101, dim=6, interleaved=True, beta_fast=5.0, beta_slow=2.0
    ),
}
ROPES = {
    "halves": hw.RoPE(),
    "interleaved": hw.RoPE(interleaved=True),
    "theta": hw.RoPE(theta=31.0),
    "in part": hw.RoPE(dim=4),
    "in part, interleaved": hw.RoPE(theta=500_000.0, dim=6, interleaved=True),
    **SCALED,
}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # cosines and sines are kept in float32


@pytest.fixture(params=ROPES)
def rope(request: Any) -> hw.RoPE:
    return ROPES[request.param]


def theirs(head_dim: int, **parameters: Any) -> tuple[list[float], float]:
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=8192,
        rope_parameters=parameters,
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    return frequencies.tolist(), factor


@every("low, high", [(1.0, 4.0), (2.0, 16.0)])
@every("original, theta", [(8192, 500_000.0), (257, 10_000.0)])
@every("factor", FACTORS)
@pytest.mark.parametrize("dim", DIMS)
def test_llama3(dim: int, factor: float, original: int, theta: float, low: float, high: float) -> None:
    rope = hw.RoPE(
        theta, scaling="llama3", factor=factor, original_context=original, beta_fast=high, beta_slow=low
    )  # fmt: skip
    expected, _ = theirs(
        dim, rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high,
        original_max_position_embeddings=original,
    )  # fmt: skip
    ours, attention_factor = rope.frequencies(dim)
    # the ramp of transformers is a difference in float32, whose relative error is larger by what it cancels
    assert ours == pytest.approx(expected, rel=64 * 2**-23) and attention_factor == 1


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
    loose = 4 * 2**-23  # transformers takes powers, ratios and ramps in float32: a rounding each
    for m, (mine, other) in enumerate(zip(ours[0], expected[0], strict=True)):
        assert mine == pytest.approx(other, rel=loose, abs=loose * theta ** (-2 * m / dim))
    assert ours[1] == pytest.approx(expected[1], rel=1e-15)
    assert ours[1] == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)


@pytest.mark.parametrize("start", [0, 1, 997])
def test_equals_the_paper(rope: hw.RoPE, start: int) -> None:
    x = normal(B, H, T, D)
    positions = torch.arange(start, start + T)
    turned = Rotation(rope, D)(x, start)
    torch.testing.assert_close(turned, by_paper(x, rope, positions.expand(B, T)), **CLOSE)
    torch.testing.assert_close(Rotation(rope, D)(x, 0, positions), turned, rtol=0, atol=0)


def test_what_is_not_rotated_stays(rope: hw.RoPE) -> None:
    x, dim = normal(B, H, T, D), rope.dim or D
    if rope.scaling != "yarn":  # which stretches all that it rotates
        assert torch.equal(Rotation(rope, D)(x[:, :, :1], 0), x[:, :, :1])
    assert torch.equal(Rotation(rope, D)(x, 29)[..., dim:], x[..., dim:])
    x = x.bfloat16()
    wide = Rotation(rope, D)(x.float(), 1009)
    assert torch.equal(Rotation(rope, D)(x, 1009), wide.bfloat16())  # the angles are not rounded to the input's dtype


@pytest.mark.parametrize("way", ["start", "positions"])
def test_position_100_000_is_accurate_in_float32(way: str) -> None:
    x, place = normal(1, 1, 1, D, dtype=torch.float32), 100_003
    turn = Rotation(hw.RoPE(), D)
    turned = turn(x, place) if way == "start" else turn(x, 0, torch.tensor([place]))
    for m in range(D // 2):
        angle = place * 10_000 ** (-2 * m / D)
        a, b = x[0, 0, 0, m].item(), x[0, 0, 0, m + D // 2].item()
        assert turned[0, 0, 0, m].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)
        assert turned[0, 0, 0, m + D // 2].item() == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("before_norm", [False, True], ids=["norm first", "rotation first"])
@pytest.mark.parametrize("name", ["halves", *SCALED])
def test_the_order_of_norm_and_rotation(name: str, before_norm: bool) -> None:
    rope = hw.RoPE(**{**vars(ROPES[name]), "before_norm": before_norm})
    options: dict[str, Any] = {"n_kv_heads": 2, "mask": hw.Causal(), "qk_norm": True}
    layer, x = noisy(rope=rope, **options), normal(B, T, 31)

    def ready(projection: torch.nn.Linear, gain: Tensor) -> Tensor:
        y = (x @ projection.weight.T).unflatten(-1, (-1, D)).transpose(1, 2)
        norm = lambda y: y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6) * gain  # noqa: E731
        turn = lambda y: by_paper(y, rope, torch.arange(T).expand(B, T))  # noqa: E731
        return norm(turn(y)) if before_norm else turn(norm(y))

    v = (x @ layer.v_proj.weight.T).unflatten(-1, (-1, D)).transpose(1, 2)
    q, k = ready(layer.q_proj, layer.q_norm.weight), ready(layer.k_proj, layer.k_norm.weight)
    out = hw.attend(q, k, v, mask=hw.Causal()).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), out, **CLOSE)
    other = noisy(rope=hw.RoPE(**{**vars(rope), "before_norm": not before_norm}), **options)
    assert (other(x) - layer(x)).abs().max() > 1e-3


YARN: dict[str, Any] = {"scaling": "yarn", "factor": 2.0, "original_context": 64}


def test_a_wrong_scaling_and_what_only_yarn_takes_are_refused() -> None:
    refuses_table("scaling", globals())
    refuses_table("yarn", globals())
