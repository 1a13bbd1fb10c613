"""Learners' files run in the process of a test: one of their own takes seconds to start. The mark `slow` starts it."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwise.checker import verdict
from headwise.checker.bugs import Verdict
from headwise.checker.contract import Target


def check_here(target: Target, seconds: float) -> Verdict:
    """What the process of its own is asked, and answers."""
    asked, load = verdict.read_request(verdict.request_of(target))
    answer = verdict.judged(asked, seconds, load)
    return replace(answer, not_checked=(*target.lent, *answer.not_checked))


@pytest.fixture(autouse=True)
def _in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(verdict, "_check_apart", check_here)
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cuda)  # what a check puts there goes
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(tempfile.gettempdir()):
            del sys.modules[name]  # of a file that lay beside the learner's
