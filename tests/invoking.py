"""The command line, run within the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from headwise import cli


class Outcome(NamedTuple):
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Runs the command in this process, without lines of progress, which depend on how busy the machine is."""
    monkeypatch.setattr(cli.app, "_show_traceback", False)
    monkeypatch.setattr(cli.app.Progress, "FIRST", 3600.0)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), printed.out, printed.err)

    return run
