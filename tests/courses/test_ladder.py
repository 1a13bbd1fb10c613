"""The ladder: eight ways are one function, a wrong one is found out, and the command prints and ends by it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import refuses_table
from invoking import Invoke

from headwise.courses import ladder as study
from headwise.courses.ladder import run_ladder

WIDTH, HEADS, TOKENS = 35, 5, 11  # heads of 7


def test_eight_ways_agree_within_rounding() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found = run_ladder(WIDTH, HEADS, TOKENS, seed=3, rounds=1)
    assert torch.equal(torch.rand(3), expected)  # nobody's random state has moved
    assert found.agrees and len(found.ways) == 8 and found.ways[0].difference == 0
    assert all(way.ms > 0 and way.difference <= found.tolerance for way in found.ways)  # type: ignore[operator]
    assert found.ways[1].difference < 1e-13  # type: ignore[operator]  # in float64, as the loops
    assert all(way.difference > 0 for way in found.ways[1:])  # type: ignore[operator]  # each computes by itself
    assert run_ladder(WIDTH, 1, 1, rounds=1).agrees


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda call: lambda: call() * factor


SPOILED: dict[str, Callable[[Any], Any]] = {
    "scaled": scaled(1.01),
    "rounded to bfloat16": lambda call: lambda: call().bfloat16().float(),
    "not a number": scaled(float("nan")),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_way_is_found_out(how: str, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    honest = study.ways

    def spoiled(*given: Any) -> dict[str, Callable[[], Any]]:
        calls = honest(*given)
        return calls | {"course class": SPOILED[how](calls["course class"])}

    monkeypatch.setattr(study, "ways", spoiled)
    outcome = invoke("ladder", "--width", WIDTH, "--heads", HEADS, "--json")
    record = json.loads(outcome.out)
    assert outcome.code == 1 and record["agrees"] is False
    wrong = [way["name"] for way in record["ways"] if not (way["difference"] or 1.0) <= record["tolerance"]]
    assert wrong[-1] == "course class"


def test_sizes_that_do_not_fit_are_refused() -> None:
    refuses_table("ladder", {"run_ladder": run_ladder}, exact=True)
