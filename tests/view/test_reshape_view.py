"""What `share` and `prune` print: speeds that differ and speeds that do not, and which weights healing kept."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from headwise.cli.reshape import print_damage, print_reshaped
from headwise.reshape.heal import Damage, HealPoint, Pair, Speed
from headwise.reshape.job import Reshaped

SPEED = Speed(12345.4, 23456.4, (11111.0, 13131.0), (21212.0, 29292.0), runs=9, told_apart=True)
DAMAGE = Damage(
    loss=Pair(1.25, 1.5), kl=0.125, error=None, entropy=(Pair(2.0, 1.75),), cache_bytes=Pair(512, 128),
    parameters=Pair(1_234_567, 1_234_567), tokens_per_second=SPEED, decode_context=2040,
)  # fmt: skip


def printed(damage: Damage, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, soft_wrap=True)
    print_damage(console, "Before any training", damage)
    file: Any = console.file
    return str(file.getvalue())


@pytest.mark.parametrize("width", [60, 80])
def test_no_digit_is_cut(width: int) -> None:
    text = printed(DAMAGE, width)
    assert max(map(len, text.splitlines())) <= width
    for number in ("+0.2500", "0.1250", "-0.250", "x 0.25", "same", "1,234,567", "12,345", "11,111-13,131", "x 1.90"):
        assert number in text
    assert "21,212-29,292" in text and "not told apart" not in text


def test_speeds_whose_ranges_overlap_are_not_told_apart() -> None:
    text = printed(replace(DAMAGE, tokens_per_second=replace(SPEED, told_apart=False)), 80)
    assert "not told apart" in text and "x 1.90" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("distances", "sentence"),
    [
        ((0.5, 0.6, 0.7), "After healing: no better; the unhealed weights were the best, and are kept"),
        ((0.5, 0.3, 0.4), "After healing: the weights of step 3 were the best, and are kept"),
        ((0.5, 0.4, 0.3), "After healing\n"),
    ],
)
def test_which_weights_were_kept_is_said(distances: tuple[float, ...], sentence: str) -> None:
    curve = tuple(HealPoint(3 * n, 0, None, None, distance) for n, distance in enumerate(distances))
    model: Any = None
    reshaped = Reshaped(model, "a", "b", "what", (), {}, (), DAMAGE, curve, DAMAGE, "read back")
    console = Console(file=io.StringIO(), width=100)
    print_reshaped(console, reshaped)
    file: Any = console.file
    text = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
    assert sentence in text
    assert reshaped.document()["damage"]["tokens_per_second"]["told_apart"] is True
    assert "model" not in reshaped.document()


def test_its_repr_is_two_lines() -> None:
    model: Any = None
    curve = tuple(HealPoint(n, 0, None, None, 0.1) for n in range(50))
    reshaped = Reshaped(model, "a", None, "2 key/value heads, 8 before", (), {}, (), DAMAGE, curve)
    assert repr(reshaped).splitlines() == ["Reshaped(2 key/value heads, 8 before;", f"         {reshaped.won})"]
