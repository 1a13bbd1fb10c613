"""What becomes of the process in which a learner's file runs."""

import sys
from pathlib import Path

import pytest
from invoking import contents

import headwise as hw
from headwise.learn.exercises import exercises, judge

CLASS = "class Attention:\n    def __init__(self, d_model): exec(WORK)\n    def forward(self, x): return x\n"


@pytest.mark.slow
def test_a_file_stands_in_a_folder_of_its_own_that_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "learner.py"
    writes = "import os\nopen('left', 'w').write('x')\nprint('loud')\n"
    writes += "raise ValueError(os.getcwd() + '|' + os.environ['TMPDIR'])\n"
    path.write_text(f"WORK = {writes!r}\n{CLASS}")
    before = contents(tmp_path)
    reason, *_ = hw.check(path, seconds=300).not_checked
    folder, temporary = reason.removeprefix("ValueError: ").split(" (line")[0].split("|")
    assert folder == temporary and not Path(folder).exists()
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_neither_a_thread_nor_a_child_holds_the_check_up(tmp_path: Path) -> None:
    path = tmp_path / "learner.py"
    waits = "import signal, subprocess, sys, threading\nthreading.Thread(target=signal.pause).start()\n"
    child = "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    work = f"{waits}{child}raise ValueError('done')\n"
    path.write_text(f"WORK = {work!r}\n{CLASS}")
    assert hw.check(path, seconds=300).not_checked[0].startswith("ValueError: done")


def test_code_that_wants_torch_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "learner.py"
    path.write_text(f"from torch import nn\n{CLASS}")
    needs = r"needs torch: pip install 'headwise\[torch\]'"
    with pytest.raises(hw.HeadwiseError, match=f"learner.py:Attention {needs}"):
        hw.check(f"{path}:Attention")
    exercise = next(each for each in exercises() if "import torch" in each.code())
    with pytest.raises(hw.HeadwiseError, match=f"{exercise.file} {needs}"):
        judge(exercise, exercise.code(), None, "en")
