"""Right code in the forms of courses: judged, in a process of its own, and its heads watched."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from casebook import targets
from cases import every
from invoking import contents
from numpy.typing import NDArray

import headwise as hw
from headwise.checker.contract import LAYOUTS, Attention, Target, adapters, build
from headwise.checker.form import Masks, Stages, compute
from headwise.checker.reading import arrays_of, parts_of, readings, renew, width_of
from headwise.checker.search import close
from headwise.checker.source import ENCODINGS, meanings_of
from headwise.errors import HeadwiseError
from headwise.learn.exercises import exercises, judge

TEXT = Path(__file__).with_name("forms.txt").read_text(encoding="utf-8")
FORMS = dict(part.split("\n", 1) for part in re.split(r"^=== ", TEXT, flags=re.M)[1:])
CAPPED = "s = torch.tanh(s / self.softcap) * self.softcap"
MASKED = "s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)"
# two maps a head, of which the form here knows nothing; a scale that is no part of the file, or of no known name
UNCHECKED = {"differential", "scale_of_elsewhere", "learned_factor"}


@every("name, code", FORMS.items(), list(FORMS))
def test_a_right_form_is_not_called_wrong(name: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    first = hw.check(path, seconds=3 if name in UNCHECKED else 200)  # where nothing is found, most of them go by
    for verdict in (first, *first.others):
        assert verdict.right is (None if name in UNCHECKED else True), verdict
        assert not verdict.findings


def test_a_bug_in_a_form_is_named(tmp_path: Path) -> None:
    for name, old, new, bug in (
        ("lecture_file", " * self.key.out_features**-0.5", "", "scale-missing"),
        ("arena", "diagonal=1", "diagonal=2", "mask-sees-next"),
        ("images", "/ self.scale", "", "scale-missing"),
        ("llama_cache", "math.sqrt(self.head_dim)", "self.head_dim", "scale-no-root"),
        ("keyword_only", "dim=1", "dim=0", "softmax-axis"),
        ("alibi", "* ahead\n", "* -ahead\n", "alibi-sign"),
        ("llama_cache", "torch.view_as_real(", "torch.view_as_reel(", "raises"),
        ("handed_rotation", "/ q.shape[-1] ** 0.5", "/ torch.sqrt(q.shape[-1])", "raises"),
        ("handed_rotation", "q.shape[-1] ** 0.5", "c**0.5", "scale-model-width"),
        ("handed_rotation", "self.rope(k).mT", "self.rope(k)", "raises"),
        ("handed_rotation", "reshape(b, t, c)", "view(b, t, c)", "raises"),
        ("keras_layer", "tf.cast(tf.shape(k)[-1], tf.float32)", "self.d_model", "scale-model-width"),
        ("own_tensors", "(C // self.n_head) ** -0.5", "C**-0.5", "scale-model-width"),
        ("softcapped", f"{CAPPED}\n        {MASKED}", f"{MASKED}\n        {CAPPED}", "mask-weak-fill"),
    ):
        path = tmp_path / f"{name}_wrong.py"
        assert FORMS[name].count(old) == 1
        path.write_text(FORMS[name].replace(old, new))
        assert hw.check(path, seconds=200).bugs == (bug,), name


def test_a_function_that_trains_with_the_layer_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    ran = tmp_path / "ran"
    path.write_text(f"{FORMS['annotated']}\ndef run():\n    MultiHeadedAttention(2, 8)\n    open({str(ran)!r}, 'w')\n")
    assert hw.check(f"{path}:MultiHeadedAttention", seconds=200).right and not ran.exists()


def test_a_notebook_is_read_cell_by_cell_and_its_file_beside_it(tmp_path: Path) -> None:
    text = FORMS["annotated"]
    head, _, tail = text.partition("class MultiHeaded")
    cells = ["%matplotlib inline\n!pip install x\n", "from parts import attention, clones\n", "not python (\n"]
    cells += [f"import math, torch\nimport torch.nn as nn\nclass MultiHeaded{tail}", "print(undefined)\n"]
    kinds = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    beside = "size = len(undefined)\ndef unused():\n    return size\n"  # which fails, and nobody needs
    (tmp_path / "parts.py").write_text(f"{head}{beside}raise SystemExit\n")
    path = tmp_path / "lesson.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# Title"}, *kinds]}))
    assert hw.check(path).right


ODD = """
import torch
from torch import nn
class Odd(nn.Module):
    def __init__(self, zork):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(48, zork.get("width")) for _ in range(4))
    def forward(self, x):
        x = x.swapaxes(0, 1)
        y = (self.q(x) @ self.k(x).mT / 48**0.5).softmax(-1) @ self.v(x)
        return self.o(y).swapaxes(0, 1)
def mine(x):
    return Odd(zork={"width": 48})(x.swapaxes(0, 1)).swapaxes(0, 1)
"""


def test_a_function_of_a_few_lines_adapts_a_class(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    for code, bugs in ((ODD, ()), (ODD.replace("48**0.5", "48"), ("scale-no-root",))):
        path.write_text(code)
        assert hw.check(f"{path}:Odd").not_checked[0].endswith("layer = Odd(zork=...)\n    return layer(x=x)")
        verdict = hw.check(f"{path}:mine")
        assert verdict.bugs == bugs and verdict.right is not bool(bugs), verdict


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


ROOT = Path(__file__).resolve().parents[2]
BATCH, TOKENS = 2, 7
NATS = 1e-5  # float32 against float64


def called(target: Target) -> tuple[hw.Seen, Stages]:
    """Its class built and run under `hw.watch`: what was seen, and what the correct form computes on the way."""
    try:
        module = build(target, {}).eval()
        return watched(target, module)
    except (RuntimeError, LookupError, AssertionError):  # it has sizes of its own
        return watched(target, build(target, {}, theirs=True).eval())


def watched(target: Target, module: Any) -> tuple[hw.Seen, Stages]:
    renew(arrays_of(module), np.random.default_rng(3))
    subject = next(adapters(target, module.forward, module, ["btc"]))
    subject.call = module  # with its hooks, which `forward` does not call
    choices = readings(target, module, folded=True)
    width = width_of(parts_of(module, {}), {})
    x = np.random.default_rng(5).normal(size=(BATCH, TOKENS, width))
    for rank, mask in ((rank, mask) for rank in (3, 2) for mask in masks(target, subject)):
        subject.layout = LAYOUTS["btc" if rank == 3 else "tc"]
        try:
            with hw.watch(module) as seen:
                out = subject((x, x, x), mask)
        except HeadwiseError:
            raise
        except Exception:  # a form of the input, or of the mask, that this code does not take
            continue
        for causal in (True, False):
            for reading in choices:
                stages = compute(reading.weights, (x, x, x), Masks(causal), reading.settings)
                if close(out, stages.out):
                    return seen, stages
    raise LookupError(f"{target.name}: no reading gives its numbers")


def masks(target: Target, subject: Attention) -> list[Any]:
    """None, and causal masks in the forms that the code may take."""
    if subject.mask is None:
        return [None]
    past = np.tril(np.ones((BATCH, TOKENS, TOKENS), bool))
    shapes = (past[0], past[:, None], past)
    meanings = meanings_of(target.scope, target.source, subject.mask)
    return [None, *(ENCODINGS[meaning](shape) for meaning in meanings for shape in shapes)]


def statistics(stages: Stages) -> dict[str, NDArray[np.float64]]:
    """Name -> (H,B*T) by their definitions, from whole maps in double precision."""
    p = np.concatenate(stages.weights, 1)  # (H,B*T,S), a text after the other
    return {"entropy": -xlogx(p).sum(-1), "confidence": p.max(-1), "first": p[..., 0]}


def xlogx(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return p * np.log(np.where(p > 0, p, 1.0))


@pytest.mark.slow
def test_the_heads_of_every_right_class_are_watched() -> None:
    count = 0
    for target in targets():
        seen, stages = called(target)
        assert len(seen) == stages.weights.shape[1], target.source.path
        for statistic, right in statistics(stages).items():
            rows = [seen[name].rows[statistic] for name in seen]
            np.testing.assert_allclose(rows, right, rtol=0, atol=NATS, err_msg=target.source.path)
        count += 1
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert f"all {count} right classes" in page
