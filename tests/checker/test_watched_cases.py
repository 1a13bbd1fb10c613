"""The right torch classes of the cases: what `hw.watch` says of their heads, beside maps that the correct form makes.

A class is built and called as `headwise.check` does it, with new weights. The correct form, in float64 and without a
line of the listener, gives the maps; their statistics are taken by the definitions.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from casebook import targets
from numpy.typing import NDArray

import headwise as hw
from headwise.checker.contract import LAYOUTS, Attention, Target, adapters, build
from headwise.checker.form import Masks, Stages, compute
from headwise.checker.reading import arrays_of, parts_of, readings, renew, width_of
from headwise.checker.search import close
from headwise.checker.source import ENCODINGS, meanings_of
from headwise.errors import HeadwiseError

ROOT = Path(__file__).resolve().parents[2]
BATCH, TOKENS = 2, 7
NATS = 1e-5  # float32 against float64


def called(target: Target) -> tuple[hw.Seen, Stages]:
    """Its class built and run under `hw.watch`: what was seen, and what the correct form computes on the way."""
    try:
        module = build(target, {}).eval()
        return watched(target, module)
    except (RuntimeError, LookupError):  # it has sizes of its own
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
