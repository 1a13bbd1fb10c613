"""A learner's class in the GPT: the same model as with our layer, the same training, and a run like any other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from invoking import Invoke

from headwise.cli.train import free_folder
from headwise.errors import HeadwiseError
from headwise.gpt.checkpoint import hf_form
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.models.open import open_model
from headwise.teach.exercises import find_exercise
from headwise.teach.own import SHAPE, carried, load_class, train_apart, with_attention

SMALL = {"d_model": 20, "d_ff": 23, "context": 13}
CONFIG = GPTConfig(vocab_size=11, **{**find_preset("course").shape, **SHAPE, **SMALL})
TEXTS = [[3, 7, 1, 10, 0], [5, 2, 2]]


def learner(tmp_path: Path, change: tuple[str, str] = ("", "")) -> Any:
    path = tmp_path / "11_torch.py"
    path.write_text(find_exercise(11).source("en", True, "b").replace(*change))
    return load_class(path)


def models(attention: Any) -> tuple[GPT, GPT]:
    """A GPT with the learner's class and one with our layer, of one seed."""
    torch.manual_seed(5)
    theirs = with_attention(CONFIG, attention)
    torch.manual_seed(5)
    return theirs, GPT(CONFIG)


def test_a_right_class_is_our_layer_forward_and_backward(tmp_path: Path) -> None:
    theirs, ours = models(learner(tmp_path))
    ids = torch.tensor(TEXTS[:1])
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=0, atol=1e-6)
    for model in (theirs, ours):
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
    for number, block in enumerate(ours.blocks):
        slope: Any = theirs.blocks[number].attention.module
        torch.testing.assert_close(slope.W_key.weight.grad, block.attention.k_proj.weight.grad, rtol=0, atol=1e-7)
        torch.testing.assert_close(slope.out_proj.bias.grad, block.attention.o_proj.bias.grad, rtol=0, atol=1e-7)
    assert hf_form(CONFIG) == "gpt2"


def test_what_was_learned_is_carried_over_or_refused(tmp_path: Path) -> None:
    theirs, _ = models(learner(tmp_path))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    ours, difference = carried(theirs, TEXTS)
    assert difference < 1e-5
    torch.testing.assert_close(ours(torch.tensor(TEXTS[1:])), theirs(torch.tensor(TEXTS[1:])), rtol=0, atol=1e-5)
    wrong, _ = models(learner(tmp_path, (" / math.sqrt(self.head_dim)", "")))
    with torch.no_grad():
        for parameter in wrong.parameters():
            parameter.mul_(9)
    with pytest.raises(HeadwiseError, match=r"the logits differ by|differs"):
        carried(wrong, TEXTS)


def test_a_file_without_the_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="has no class MultiHeadAttention"):
        learner(tmp_path, ("class MultiHeadAttention", "class Other"))
    with pytest.raises(HeadwiseError, match="does not run: ZeroDivisionError"):
        learner(tmp_path, ("import math\n", "1 / 0\n"))


@pytest.mark.slow
@every(
    "ending, said",
    [
        ("open('{outside}', 'w')", "RefusedError: the file must not write {outside}"),
        ("import os; os._exit(7)", "it ends the process (7)"),
    ],
)
def test_the_class_learns_behind_the_guard(ending: str, said: str, tmp_path: Path) -> None:
    path, outside = tmp_path / "11_torch.py", tmp_path / "outside"
    path.write_text(find_exercise(11).source("en", True, "b") + ending.format(outside=outside) + "\n")
    with pytest.raises(HeadwiseError, match=re.escape(said.format(outside=outside))):
        train_apart(tmp_path / "model", path, 2, lambda progress: None, "en")
    assert [entry.name for entry in tmp_path.iterdir()] == ["11_torch.py"]


@pytest.mark.slow
def test_the_command_trains_it_and_writes_the_report(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    assert invoke("learn", folder, "--lang", "es").code == 0
    apart = "import sys\nassert 'pytest' not in sys.modules  # it does not run in this process\n"
    (folder / "11_torch.py").write_text(find_exercise(11).source("es", True, "b") + apart, encoding="utf-8")
    outcome = invoke("learn", folder, "--train", "--steps", 2, "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 0 and document["difference"] < 1e-4
    assert Path(document["report"]).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert isinstance(open_model(folder / "model"), GPT)
    assert free_folder(folder / "model") == folder / "model-2"
