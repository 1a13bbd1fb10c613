"""The commands ladder and trace, and the replay of microgpt, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoking import Invoke, Outcome

NAMES = ["anna", "bela", "carl", "dora", "emil", "fina", "gero"]


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    return path


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert (outcome.code, outcome.out) == (2, ""), outcome
    *progress, message = outcome.err.splitlines()
    assert message.startswith("headwise: ") and not any(line.startswith("headwise: ") for line in progress), outcome.err
    for word in words:
        assert word in message


@pytest.mark.parametrize("rung", ["plain", "array", "tensor"])
def test_each_rung_replays_the_same(invoke: Invoke, names: Path, rung: str) -> None:
    documents = [
        json.loads(
            invoke("train", names, "--preset", "microgpt", "--rung", each, "--steps", 7, "--samples", 3, "--json").out
        )
        for each in ("array", rung)
    ]
    assert documents[0]["losses"] == pytest.approx(documents[1]["losses"], rel=1e-9)
    assert documents[0]["samples"] == documents[1]["samples"]
    assert len(documents[1]["samples"]) == 3


def test_a_replay_is_kept_only_where_asked(invoke: Invoke, names: Path, tmp_path: Path) -> None:
    arguments = ("train", names, "--rung", "array", "--steps", 5, "--samples", 2)
    assert "nothing is kept" in invoke(*arguments).out
    kept = tmp_path / "kept"
    assert str(kept / "microgpt.json") in invoke(*arguments, "--out", kept).out
    assert len(json.loads((kept / "microgpt.json").read_text())["losses"]) == 5
    assert_refused(invoke(*arguments, "--out", kept), "not empty")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rung", "wood"], ["wood", "plain, array, tensor"]),
        (["--rung", "array", "--heads", 2], ["shape", "--rung"]),
        (["--rung", "array", "--preset", "llama"], ["llama"]),
        (["--rung", "array", "--resume"], ["--resume"]),
        (["--rung", "array", "--steps", 0], ["steps=0"]),
        (["--rung", "array", "--samples", -1], ["--samples"]),
    ],
)
def test_what_an_exact_replay_cannot_honour(
    invoke: Invoke, names: Path, options: list[object], words: list[str]
) -> None:
    assert_refused(invoke("train", names, *options), *words)


def test_a_replay_needs_names(invoke: Invoke) -> None:
    assert_refused(invoke("train", "--rung", "array"), "names")


def test_the_ladder_prints_a_certificate_and_ends_well(invoke: Invoke) -> None:
    outcome = invoke("ladder", "--width", 21, "--heads", 3, "--tokens", 5, "--repeats", 1)
    assert outcome.code == 0
    assert "Certificate" in outcome.out and "torch fused" in outcome.out and "cached decode" in outcome.out
    document = json.loads(invoke("ladder", "--width", 21, "--heads", 3, "--tokens", 5, "--repeats", 1, "--json").out)
    assert document["agrees"] is True


def test_a_ladder_with_a_wrong_rung_exits_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from headwise.lab import ladder

    honest = ladder.run_ladder
    monkeypatch.setattr(
        ladder, "run_ladder", lambda *given, **named: dataclasses.replace(honest(*given, **named), agrees=False)
    )
    assert invoke("ladder", "--width", 8, "--heads", 2, "--tokens", 3, "--repeats", 1).code == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--heads", 3], ["3", "64"]),
        (["--kv-heads", 3], ["3", "4"]),
        (["--tokens", 0], ["tokens"]),
        (["--batch", -1], ["batch"]),
    ],
)
def test_bad_sizes_of_a_ladder(invoke: Invoke, options: list[object], words: list[str]) -> None:
    assert_refused(invoke("ladder", *options), *words)


def test_a_trace_without_a_run(invoke: Invoke, tmp_path: Path) -> None:
    page = tmp_path / "emma.html"
    outcome = invoke("trace", "--text", "emma", "--layer", 0, "--head", 2, "--at", 3, "--html", page)
    assert outcome.code == 0
    assert "L0.H2 at position 3" in outcome.out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    document = json.loads(invoke("trace", "--text", "emma", "--head", 2, "--at", 3, "--json").out)
    assert sum(key["weight"] for key in document["keys"]) == pytest.approx(1)


def test_a_trace_in_spanish(invoke: Invoke) -> None:
    assert "posición" in invoke("trace", "--text", "ana", "--lang", "es").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layer", 1], ["layer 1"]),
        (["--head", 4], ["head 4"]),
        (["--at", 5], ["5"]),
        (["--at", -1], ["-1"]),
        (["--lang", "fr"], ["fr", "en, es"]),
        (["--text", ""], ["empty"]),
        (["--text", "Ω"], ["'Ω'", "has not seen"]),
        (["--text", "a" * 40], ["41", "16"]),
        (["--html", "/nowhere/at/all.html"], ["--html"]),
    ],
)
def test_bad_input_of_a_trace(invoke: Invoke, options: list[object], words: list[str]) -> None:
    assert_refused(invoke("trace", *options), *words)


@pytest.mark.parametrize("command", ["ladder", "trace"])
def test_help_has_an_example(invoke: Invoke, command: str) -> None:
    outcome = invoke(command, "--help")
    assert outcome.code == 0
    assert f"Example: headwise {command}" in outcome.out
