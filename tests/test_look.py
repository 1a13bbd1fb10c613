"""`headwise look`: the page of a run in the browser, or where to find it."""

import json
import webbrowser
from pathlib import Path

import pytest
from invoking import Invoke
from word_models import word_folder

import headwise as hw
from headwise.gpt.run import example_of
from headwise.view.look import Served


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained in Python, which has no report yet."""
    folder = tmp_path_factory.mktemp("look") / "a run"
    hw.train(out=folder, steps=3, n_layers=1, n_heads=2, d_model=8, context=16)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open; there is a display."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    return addresses


@pytest.mark.slow
def test_the_page_is_written_where_it_is_missing_and_opened(invoke: Invoke, run: Path, opened: list[str]) -> None:
    outcome, report = invoke("look", run), run / "report.html"
    assert outcome.code == 0 and outcome.out == f"report: {report}\n{report.as_uri()}\n"
    assert opened == [report.as_uri()] and "%20" in opened[0]
    report.write_text("as it was")
    outcome = invoke("look", run, "--json")
    assert json.loads(outcome.out) == {
        "schema": "headwise-look-1", "run": str(run), "report": str(report), "address": report.as_uri(), "opened": True
    }  # fmt: skip
    assert report.read_text() == "as it was" and len(opened) == 2


@pytest.mark.slow
def test_it_says_where_it_is(invoke: Invoke, run: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    (run / "report.html").touch()
    outcome = invoke("look", run)
    assert outcome.code == 0 and (run / "report.html").as_uri() in outcome.out and opened == []
    assert "there is no display here to open it on; open the file in a browser" in outcome.err
    assert json.loads(invoke("look", run, "--json").out)["opened"] is False


def test_what_is_no_finished_run_is_said(invoke: Invoke, tmp_path: Path) -> None:
    settings = '{"settings": {}, "text_size": 0, "status": "training", "summary": null, "cells": null, "example": null}'
    (tmp_path / "run.json").write_text(settings)
    outcome = invoke("look", tmp_path)
    remedy = f"has not finished; go on with `headwise train --resume --out {tmp_path}`"
    assert outcome.code == 2 and remedy in outcome.err


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The page of a model ends at once, as after Ctrl-C; the ports of the pages that were served."""
    ports: list[int] = []

    def work(served: Served) -> None:
        ports.append(served.server_port)
        raise KeyboardInterrupt

    monkeypatch.setattr(Served, "work", work)
    return ports


@pytest.mark.slow
def test_a_model_is_served_until_ctrl_c(invoke: Invoke, tmp_path: Path, opened: list[str], stopped: list[int]) -> None:
    model = word_folder(tmp_path / "words", "next")
    outcome = invoke("look", model)
    address = outcome.out.strip()
    assert outcome.code == 0 and address.startswith(f"http://127.0.0.1:{stopped[0]}/") and opened == [address]
    assert "until Ctrl-C" in outcome.err and outcome.err.endswith("the page is closed\n")
    outcome = invoke("look", model, "--json", "--no-open")
    told = json.loads(outcome.out)
    assert told.keys() == {"schema", "model", "address", "opened"} and told["opened"] is False and len(opened) == 1
    assert invoke("look", model, "--port", stopped[1], "--no-open").code == 0 and stopped[2] == stopped[1]


@pytest.mark.slow
def test_a_run_is_served_where_that_is_asked(
    invoke: Invoke, run: Path, opened: list[str], stopped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents: list[str] = []
    close = Served.close
    monkeypatch.setattr(Served, "close", lambda served: documents.append(served.document) or close(served))
    outcome = invoke("look", run, "--live", "--no-open")
    assert outcome.code == 0 and f"127.0.0.1:{stopped[0]}/" in outcome.out and opened == []
    assert json.dumps(example_of(run)) in documents[0]  # the text that the page opens with
