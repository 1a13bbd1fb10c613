"""Each study that can be run again starts, at its smallest size."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_torture_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["torture", "--seed", "31", "--cases", "1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "studies" / "torture"), run_name="__main__")
    assert re.findall(r"^(\w+): 1 cases, 0 failed", capsys.readouterr().out, re.M) == ["calls", "files", "cycles"]
