"""What shows a bug, in numbers of the learner's own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.teach.catalogue import Bug
from headwise.teach.form import CORRECT, Stages, allowed_by
from headwise.teach.search import Case, Explanation, stages_of


def evidence_of(bug: Bug, explanation: Explanation, cases: list[Case], say: Mapping[str, str]) -> str:
    """A sentence with numbers. The form with the bug gives the learner's output, so its stages are the learner's."""
    wrong = right = None
    for case in cases:
        if case.name in explanation.unexplained:
            continue
        wrong = stages_of(explanation.reading, explanation.settings, case)
        right = stages_of(explanation.reading, explanation.reading.settings, case)
        if wrong is not None and right is not None and not np.allclose(wrong.out.sum(), right.out.sum()):
            break
    known = f"by_property_{bug.id}"
    if known in say and (wrong is None or right is None or bug.evidence in ("dropout", "batch")):
        return say[known]
    if bug.id in explanation.reading.structural:
        return say["structural"]
    if wrong is None or right is None:
        return say["not_finite" if bug.evidence == "difference" else "by_property"]
    kinds = {"future": _future, "rows": _rows, "scores": _scores}
    text = kinds[bug.evidence](wrong, right, case, say) if bug.evidence in kinds else None
    return text or _difference(wrong, right, say)


def _future(wrong: Stages, right: Stages, case: Case, say: Mapping[str, str]) -> str | None:
    """The largest weight on a key that a query must not see, or the query that is kept from itself."""
    B, H, T, S = right.weights.shape
    if wrong.weights.shape != right.weights.shape:
        return None
    allowed = allowed_by(case.masks, CORRECT, B, H, T, S)
    if allowed is None:
        return None
    leak = np.where(np.broadcast_to(allowed, wrong.weights.shape), 0.0, np.nan_to_num(wrong.weights))
    if np.abs(leak).max() > 1e-4:
        b, h, t, s = np.unravel_index(np.abs(leak).argmax(), leak.shape)
        return say["future"].format(document=b, head=h, row=t, weight=float(leak[b, h, t, s]), key=s)
    return _rows(wrong, right, case, say)


def _rows(wrong: Stages, right: Stages, case: Case, say: Mapping[str, str]) -> str | None:
    """The row whose weights add up to something else than 1; a row of NaN adds up to 0."""
    sums = np.nan_to_num(wrong.weights, posinf=0, neginf=0).sum(-1)
    off = np.abs(sums - 1)
    b, h, t = np.unravel_index(off.argmax(), off.shape)
    return say["rows"].format(document=b, head=h, row=t, total=float(sums[b, h, t])) if off.max() > 1e-3 else None


def _scores(wrong: Stages, right: Stages, case: Case, say: Mapping[str, str]) -> str | None:
    values = [stages.scores[np.isfinite(stages.scores) & (np.abs(stages.scores) < 1e3)] for stages in (wrong, right)]
    if not all(v.size for v in values):
        return None
    return say["scores"].format(wrong=float(values[0].std()), right=float(values[1].std()))


def _difference(wrong: Stages, right: Stages, say: Mapping[str, str]) -> str:
    if wrong.out.shape != right.out.shape or not np.isfinite(wrong.out).all():
        return say["not_finite"]
    gap = np.abs(wrong.out - right.out)
    return say["difference"].format(gap=float(gap.max()), size=float(np.abs(right.out).max()))


def stage_of(explanation: Explanation, case: Case, say: Mapping[str, str]) -> str:
    """What can be said of a difference that nothing explains: its size, and where it starts, as far as can be seen."""
    reading = explanation.reading
    right: Any = stages_of(reading, {**reading.settings, **explanation.settings}, case)
    output = next(iter(case.outputs.values()))
    if right is None or right.out.shape != output.shape:
        return say["shape"].format(theirs=output.shape, ours=None if right is None else right.out.shape)
    gap = np.abs(output - right.out)
    axes = tuple(i for i in range(gap.ndim) if i != gap.ndim - 2)
    rows = np.nan_to_num(gap, nan=np.inf).max(axes)
    first = int((rows > 1e-3).argmax())
    stage = "values" if first == 0 else "scores"
    return say["starts"].format(gap=float(np.nan_to_num(gap).max()), row=first, stage=say["stage_" + stage])
