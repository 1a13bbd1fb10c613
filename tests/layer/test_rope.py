"""Rotary positions against the paper's complex numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import RoPE
from headwise.rungs.tensor import Rotation

B, H, T, D = 2, 3, 7, 10
ROPES = {
    "halves": RoPE(),
    "interleaved": RoPE(interleaved=True),
    "theta": RoPE(theta=31.0),
    "in part": RoPE(dim=4),
    "in part, interleaved": RoPE(theta=500_000.0, dim=6, interleaved=True),
}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # cosines and sines are kept in float32


@pytest.fixture(params=ROPES)
def rope(request: Any) -> RoPE:
    return ROPES[request.param]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("start", [0, 1, 53])
def test_equals_the_paper(rope: RoPE, start: int, by_paper: Any) -> None:
    x = draw(B, H, T, D)
    positions = (torch.arange(T) + start).expand(B, T)
    torch.testing.assert_close(Rotation(rope, D)(x, start), by_paper(x, rope, positions), **CLOSE)


def test_what_is_not_rotated_stays(rope: RoPE) -> None:
    x, dim = draw(B, H, T, D), rope.dim or D
    assert torch.equal(Rotation(rope, D)(x[:, :, :1], 0), x[:, :, :1])
    assert torch.equal(Rotation(rope, D)(x, 29)[..., dim:], x[..., dim:])
    x = x.bfloat16()
    wide = Rotation(rope, D)(x.float(), 1009)
    assert torch.equal(Rotation(rope, D)(x, 1009), wide.bfloat16())  # the angles are not rounded to the input's dtype


@pytest.mark.parametrize("way", ["start", "positions"])
def test_position_100_000_is_accurate_in_float32(way: str) -> None:
    x, place = draw(1, 1, 1, D, dtype=torch.float32), 100_003
    turn = Rotation(RoPE(), D)
    turned = turn(x, place) if way == "start" else turn(x, 0, torch.tensor([place]))
    for m in range(D // 2):
        angle = place * 10_000 ** (-2 * m / D)
        a, b = x[0, 0, 0, m].item(), x[0, 0, 0, m + D // 2].item()
        assert turned[0, 0, 0, m].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)
        assert turned[0, 0, 0, m + D // 2].item() == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-6)


def test_the_table_grows_and_is_made_anew_rarely(rope: RoPE) -> None:
    turn, x = Rotation(rope, D), draw(B, H, 2, D)
    for start in (0, 3, 1, 40, 5, 41, 300, 299, 0):
        assert torch.equal(turn(x, start), turn(x, 0, torch.arange(start, start + 2)))
    turn, x, made = Rotation(RoPE(), D), draw(1, 1, 1, D), 0
    make = turn._cos_sin

    def counted(positions: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal made
        made += 1
        return make(positions)

    turn._cos_sin = counted  # type: ignore[method-assign]
    for start in range(1000):
        turn(x, start)
    assert made <= 12
