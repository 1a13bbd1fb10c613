"""The commands ladder and trace, and the replay of microgpt, as a user calls them."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from invoking import Invoke, Outcome, assert_refused

from headwise.cli import train as command
from headwise.gpt.run import load_run
from headwise.lab import ladder
from headwise.lab.microgpt import plain

NAMES = ["anna", "bela", "carl", "dora", "emil", "fina", "gero"]


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "names.txt"
    path.write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    return path


def test_a_replay_that_is_cut_short_is_no_obstacle_to_the_next(
    invoke: Invoke, names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of standard input, which lies in the folder from the beginning."""
    run = tmp_path / "run"

    def replayed() -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(names.read_bytes())))
        return invoke("train", "-", "--rung", "plain", "--steps", 2, "--samples", 0, "--out", run)

    run.mkdir()
    (run / "text.txt").write_bytes(names.read_bytes())  # of a call that was killed
    with monkeypatch.context() as patch:
        patch.setattr("headwise.lab.microgpt.tensor.write_run", lambda *_: sys.exit(9))
        assert replayed().code == 9
    assert [path.name for path in run.iterdir()] == ["text.txt"] and not list(tmp_path.glob(".run*"))
    assert replayed().code == 0 and (run / "text.txt").exists() and load_run(run)


def test_a_replay_is_a_run_that_the_other_commands_read(invoke: Invoke, names: Path, tmp_path: Path) -> None:
    run = tmp_path / "kept"
    arguments = ("train", names, "--rung", "tensor", "--steps", 5, "--samples", 2, "--out", run)
    assert f"run folder: {run}" in " ".join(invoke(*arguments).out.split())
    exact = json.loads((run / "microgpt.json").read_text())
    assert len(exact["losses"]) == 5 and len(exact["parameters"]) == 9
    assert_refused(invoke(*arguments), "not empty")

    model, tokens = load_run(run)
    assert tokens.document("anna")[0] == len(tokens) - 1 == tokens.boundary
    plain_model = plain.Model(exact["parameters"], 4, 1)
    logits = plain_model.logits(tokens.boundary, 0, *plain_model.no_tokens_yet())
    assert model(torch.tensor([[tokens.boundary]]))[0, 0].tolist() == pytest.approx(logits, abs=1e-5)

    looked = json.loads(invoke("heads", run, "--json").out)
    assert looked["texts"] == ["what the run learned from"] and len(looked["profiles"]) == 4
    assert invoke("trace", run, "--text", "anna", "--head", 2).code == 0
    assert invoke("trace", run).code == 0  # of a text that the run held out
    assert invoke("heads", run, "--lang", "es", "--html", tmp_path / "es.html").code == 0
    assert '<html lang="es">' in (tmp_path / "es.html").read_text("utf-8")
    assert invoke("generate", run, "--prompt", "an", "--tokens", 5).code == 0


def test_a_replay_takes_a_default_text_heads_and_layers(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--rung", "array", "--steps", 3, "--samples", 1, "--heads", 2, "--layers", 3, "--json")
    document = json.loads(invoke("train", *options).out)
    assert document["run"] == "runs/microgpt"
    config = json.loads((tmp_path / "runs/microgpt/config.json").read_text())["headwise"]
    assert (config["n_heads"], config["n_layers"], config["vocab_size"]) == (2, 3, 27)
    profiles = json.loads(invoke("heads", "runs/microgpt", "--documents", 3, "--ablate", "none", "--json").out)[
        "profiles"
    ]
    assert profiles[-1]["name"] == "L2.H1"
    assert json.loads(invoke("train", *options).out)["run"] == "runs/microgpt-2"
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert json.loads(invoke("train", *options).out)["run"] is None  # without torch there is no folder


def test_the_ladder_prints_a_certificate_and_ends_with_what_it_found(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = invoke("ladder", "--width", 21, "--heads", 3, "--tokens", 5)
    assert outcome.code == 0
    assert "Certificate" in outcome.out and "torch fused" in outcome.out and "cached decode" in outcome.out
    document = json.loads(invoke("ladder", "--width", 21, "--heads", 3, "--tokens", 5, "--json").out)
    assert document["agrees"] is True
    honest = ladder.run_ladder
    monkeypatch.setattr(
        ladder, "run_ladder", lambda *given, **named: dataclasses.replace(honest(*given, **named), agrees=False)
    )
    assert invoke("ladder", "--width", 8, "--heads", 2, "--tokens", 3).code == 1


def test_a_trace_without_a_run(invoke: Invoke, tmp_path: Path) -> None:
    page = tmp_path / "emma.html"
    outcome = invoke("trace", "--text", "emma", "--layer", 0, "--head", 2, "--at", 3, "--html", page)
    assert outcome.code == 0
    assert "L0.H2 at position 3" in outcome.out
    assert "a small model, trained on names just now" in outcome.err
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    document = json.loads(invoke("trace", "--text", "emma", "--head", 2, "--at", 3, "--json").out)
    assert sum(key["weight"] for key in document["keys"]) == pytest.approx(1)
