"""`headwise trace` without a run, as a user calls it."""

import json
from pathlib import Path

import pytest
from invoking import Invoke


def test_a_trace_without_a_run(invoke: Invoke, tmp_path: Path) -> None:
    page = tmp_path / "emma.html"
    outcome = invoke("trace", "--text", "emma", "--head", "L0.H2", "--at", 3, "--html", page)
    assert outcome.code == 0
    assert "L0.H2 at position 3" in outcome.out
    assert "a small model, trained on names just now" in outcome.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    document = json.loads(invoke("trace", "--text", "emma", "--head", "L0.H2", "--at", 3, "--json").out)
    assert sum(key["weight"] for key in document["keys"]) == pytest.approx(1)
