"""A survey whose documents two processes share: the numbers of one, printed once."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Started, command, together

import headwise as hw

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "verbs"
    hw.train(preset="course", out=folder, steps=3, n_layers=2, n_heads=3, d_model=24)
    return folder


def numbers(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        head["name"]: {key: value["mean"] for key, value in head["scores"].items()} for head in document["profiles"]
    }


def test_two_processes_say_what_one_says(run: Path, tmp_path: Path) -> None:
    asked = ("heads", run, "--ablate", "none", "--documents", 19, "--json")
    (alone,) = together(tmp_path / "one", 1, command, *asked)
    first, second = together(tmp_path / "two", 2, command, *asked)
    assert (alone.code, first.code, second.code) == (0, 0, 0), first.err + second.err
    assert second.out == second.err == ""
    one, two = json.loads(alone.out), json.loads(first.out)
    assert one["n_documents"] == two["n_documents"] == 19 and one["notes"] == two["notes"]
    expected = numbers(one)
    assert len(expected) == 6
    for name, scores in numbers(two).items():
        assert scores == pytest.approx(expected[name], abs=1e-6, nan_ok=True)


def test_what_works_in_one_process_alone_says_so(run: Path, tmp_path: Path) -> None:
    ended = Started(tmp_path / "said", 2, command, "cost", "gpt2").wait()
    assert [each.code for each in ended] == [2, 2]
    assert "headwise cost works in one process; torchrun is for headwise heads" in ended[0].err
