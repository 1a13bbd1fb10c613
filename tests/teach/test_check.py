"""`hw.check`: what it says of right and of wrong code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import Invoke

import headwise as hw

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "attention_from_scratch.py"


@pytest.mark.slow
def test_the_command_says_right_and_wrong(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("check", EXAMPLE, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["right"] is True
    wrong = tmp_path / "wrong.py"
    wrong.write_text(EXAMPLE.read_text().replace(" / np.sqrt(self.d_head)", ""))
    outcome = invoke("check", f"{wrong}:MultiHeadAttention", "--json")
    record = json.loads(outcome.out)
    assert set(record) == {"target", "kind", "right", "bugs", "checked", "not_checked"}
    assert (outcome.code, record["right"], [bug["bug"] for bug in record["bugs"]]) == (1, False, ["scale-missing"])
    assert set(record["bugs"][0]) == {"bug", "line", "evidence", "fix"}
    assert "scores = q @ k" in wrong.read_text().splitlines()[record["bugs"][0]["line"] - 1]


def attention(q, k, v, mask=None):  # type: ignore[no-untyped-def]
    import numpy as np

    scores = q @ k.swapaxes(-1, -2)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def test_an_object_is_checked_in_place() -> None:
    verdict = hw.check(attention, lang="es")
    assert (verdict.right, set(verdict.bugs)) == (False, {"scale-missing", "mask-missing"})
    assert "Los puntajes no se escalan" in str(verdict)
    assert "<script" not in verdict._repr_html_()
