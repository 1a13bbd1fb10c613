"""What all commands share: consoles that send no control characters, progress, completion."""

import io
import itertools
import json
import os
import random
import re
import subprocess
import sys

import pytest
from cases import rows
from invoking import Invoke
from rich.table import Table
from rich.text import Text

from headwise import cli
from headwise.cli import app, run
from headwise.cli.app import call, in_options, print_json
from headwise.view import Progress, err, harmless, screen

HOSTILE = "a\x1b[31mred\x9b0m\u202eback\ud800\x07"
SHOWN = r"a\x1b[31mred\x9b0m\u202eback\ud800\x07"


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column("name")
    table.add_row(Text(HOSTILE.replace("\x07", "")))
    screen.print(HOSTILE)
    screen.print(table)
    err.print(Text(HOSTILE.replace("\x07", "")), soft_wrap=True)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == SHOWN and printed.err.strip() == SHOWN.removesuffix(r"\x07")
    assert r"a\x1b[31mred" in printed.out.split("\n", 1)[1]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed.out + printed.err)
    assert harmless("line\r\nnext\tcolumn") == "line\r\nnext\tcolumn"


def test_json_escapes_and_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("name", {"name": HOSTILE, "word": "año"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"schema": "headwise-name-1", "name": HOSTILE, "word": "año"} and "año" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    print_json("losses", {"loss": float("nan"), "bounds": [(1.5, float("inf")), {"low": float("-inf")}]})
    expected = {"schema": "headwise-losses-1", "loss": None, "bounds": [[1.5, None], {"low": None}]}
    assert json.loads(capsys.readouterr().out) == expected


def test_arguments_of_the_library_are_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"n_kv_heads": "--kv-heads", "out": "--out", "keep": "--keep", "force": "--force", "by": "--by"}
    monkeypatch.setattr(call, "options", options)
    for said, shown in rows("as_options"):
        assert in_options(said) == shown


def test_json_goes_to_what_has_no_encoding(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(sys, "stdout", text := io.StringIO())
    assert invoke("cost", "gpt2", "--json").code == 0 and json.loads(text.getvalue())


def test_progress_has_milestones_and_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("reading the text") as progress:
        progress("step", 1, 2)
        progress("step", 2, 2, "loss 0.5", milestone=True)
    assert capsys.readouterr().err == "step 2/2  loss 0.5\n"
    screen = io.StringIO()
    monkeypatch.setattr(err, "_file", screen)
    monkeypatch.setattr(err, "_force_terminal", True)
    monkeypatch.setattr(err, "is_interactive", True)
    with Progress("reading the text") as progress:
        progress("documents", 2, 5, "L1.H0")
        progress("documents", 5, 5, "L1.H0")
    assert "documents" in screen.getvalue() and "5/5" in screen.getvalue()
    # On a clock of its own: steps of 31 to 59 seconds, of a stage that was named long before.
    clock = [0.0]
    monkeypatch.setattr(err, "get_time", lambda: clock[0])
    with Progress("reading the text") as progress:
        progress("later", 0, 1)
        ends = list(itertools.accumulate([500, *random.Random(7).choices(range(31, 60), k=23)]))
        for done, end in enumerate(ends):
            clock[0] = end
            progress("later", done, 23)
            if 2 <= done < 23:
                left = progress._bar.tasks[0].time_remaining
                assert left is not None and (ends[-1] - end) / 2 < left < (ends[-1] - end) * 2


def test_the_shell_completes_commands() -> None:
    words = {run.COMPLETION: "complete_bash", "COMP_WORDS": "headwise pr", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "headwise"]
    shown = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, timeout=300)
    assert "prune" in shown.stdout.split()


def test_the_help_of_each_command_has_an_example_with_options_that_exist(invoke: Invoke) -> None:
    for name in (name for names in app.DOORS.values() for name in names):
        listed, _, example = invoke(name, "--help").out.partition("Example:")
        options = re.findall(r"--[a-z-]+", example)
        assert example.split()[:2] == ["headwise", name] and "--json" in listed and "--debug" in listed
        assert [option for option in options if not re.search(rf"{option}\b", listed)] == [], name


def test_the_first_screen_and_common_options(invoke: Invoke) -> None:
    assert "--install-completion" in invoke("--help").out and "--show-completion" in invoke("--help").out
    screen = invoke("--help").out
    listed = {door: screen.split(f"{door}:\n")[1].split("\n\n")[0].splitlines() for door in app.DOORS}
    assert {door: tuple(line.split()[0] for line in lines) for door, lines in listed.items()} == app.DOORS
    lines = [line for lines in listed.values() for line in lines]
    assert len(lines) == len(app.app.registered_commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)
    documents = [invoke(*words).out for words in (("cost", "gpt2", "--json"), ("--json", "cost", "gpt2"))]
    assert documents[0] == documents[1] and json.loads(documents[0])["model"] == "gpt2"
    assert "parameters" in invoke("cost", "gpt2").out  # and the next call is as it was
    refused = invoke("cost", "--", "--json")
    assert refused.code == 2 and "--json" in refused.err  # a name after --


def test_the_language_is_taken_from_before_two_dashes_alone() -> None:
    words = ["trace", "--lang=es", "--json", "--", "--lang=en", "--language=x"]
    assert run._hoisted(words) == ["--lang", "es", "--json", "trace", "--", "--lang=en", "--language=x"]


def test_threads_that_wait_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
