"""Each study that can be run again starts, at its smallest size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_torture_starts() -> None:
    command = [sys.executable, "studies/torture", "--seed", "31", "--cases", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+): 1 cases, 0 failed", done.stdout, re.M) == ["calls", "files", "cycles"]
