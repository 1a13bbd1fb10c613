"""Which bugs explain what a learner's code computes: each is put into the correct form until the numbers agree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.teach.form import CORRECT, Masks, Stages, allowed_by, compute
from headwise.teach.reading import Reading
from headwise.teach.switches import SWITCHES, changes

TOLERANCE = 3e-5  # of the largest number: float32 rounds to 6e-8, and a dozen sums of 50 terms amplify that
Output = Any


@dataclass(frozen=True)
class Case:
    """One experiment with the learner's code.

    outputs  what came out, by the form in which a mask was passed; more than one where forms are guessed
    """

    name: str
    inputs: tuple[Any, Any, Any]
    masks: Masks
    outputs: Mapping[str, Output]


@dataclass(frozen=True)
class Explanation:
    """Settings under which the form gives the learner's numbers in every case, and the bugs among them."""

    reading: Reading
    bugs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    unexplained: tuple[str, ...] = ()  # cases whose numbers nothing explains


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    """Are two arrays equal but for rounding? What is not finite must be so in the same places, and not everywhere."""
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not finite.any():
        return False
    size = max(1.0, float(np.abs(b[finite]).max()))
    return float(np.abs(a[finite] - b[finite]).max()) <= tolerance * size


class Search:
    """The search for an explanation, within some seconds of processor time, and twice as many of the clock.

    fills  numbers of the source that may stand for a forbidden score
    skip   bugs that are out of the question
    pairs  are two bugs at once looked for?
    """

    def __init__(self, fills: Sequence[float], seconds: float, skip: frozenset[str], pairs: bool = True) -> None:
        self.fills, self.skip, self.pairs = fills, skip, pairs
        self.strong = [fill for fill in fills if fill <= -1e4] or [-1e9]
        self.until, self.clock = time.process_time() + seconds, time.monotonic() + 2 * seconds

    def _over(self) -> bool:
        return time.process_time() > self.until or time.monotonic() > self.clock

    def explain(self, readings: Sequence[Reading], cases: Sequence[Case]) -> Explanation:
        """The explanation with the fewest bugs: of the first case, then of each further one on top of it."""
        best: Explanation | None = None
        for bugs, reading, settings in self._combinations(readings, cases[0], {}):
            best = self._onwards(Explanation(reading, bugs, settings), cases[1:])
            if not best.unexplained:
                return best
            break
        if best is None:
            return Explanation(readings[0], unexplained=(cases[0].name,))
        return best

    def _onwards(self, so_far: Explanation, cases: Sequence[Case]) -> Explanation:
        for case in cases:
            base = so_far.settings
            step = next(self._combinations([so_far.reading], case, base), None)
            if step is None:
                so_far = replace(so_far, unexplained=(*so_far.unexplained, case.name))
                continue
            bugs, _, settings = step
            so_far = replace(so_far, bugs=tuple(dict.fromkeys((*so_far.bugs, *bugs))), settings=settings)
        return so_far

    def _combinations(
        self, readings: Sequence[Reading], case: Case, base: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str, ...], Reading, dict[str, Any]]]:
        """Whatever reproduces a case: no bug, then one, then two."""
        for reading in readings:
            settings = {**reading.settings, **base}
            if (hit := self._fit(reading, settings, case)) is not None:
                yield reading.structural, reading, hit
        # Pairs of the usual forms of each bug come before those of all forms.
        for number, forms in ((1, None), (2, 2), (2, None)) if self.pairs else ((1, None),):
            for reading in readings:
                if self._over():
                    return
                settings = {**reading.settings, **base}
                for names, change in self._sets(number, forms, settings, case):
                    if number == 2 and self._over():
                        return
                    if (hit := self._fit(reading, {**settings, **change}, case)) is not None:
                        yield (*reading.structural, *names), reading, hit

    def _sets(
        self, number: int, forms: int | None, settings: Mapping[str, Any], case: Case
    ) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        masked = case.masks.causal or case.masks.real is not None
        singles = [
            (bug, change)
            for bug in SWITCHES
            if bug not in self.skip and (masked or not bug.startswith(("mask", "padding")))
            for change in itertools.islice(changes(bug, settings, self.fills), forms)
        ]
        if number == 1:
            yield from (((bug,), change) for bug, change in singles)
            return
        for (a, first), (b, second) in itertools.combinations(singles, 2):
            if a != b and not set(first) & set(second):
                yield (a, b), {**first, **second}

    def _fit(self, reading: Reading, settings: dict[str, Any], case: Case) -> dict[str, Any] | None:
        """The settings, with what stands in empty rows filled in, if they give the learner's numbers."""
        for extra in self._fillings(settings, case):
            whole = {**settings, **extra}
            stages = stages_of(reading, whole, case)
            if stages is not None and any(close(output, stages.out) for output in case.outputs.values()):
                return whole
        return None

    def _fillings(self, settings: Mapping[str, Any], case: Case) -> Iterator[dict[str, Any]]:
        """A forbidden score is -inf, or a large negative number: it matters where a row has no key, or no softmax."""
        yield {}
        s = {**CORRECT, **settings}
        if not (case.masks.causal or case.masks.real is not None) or "fill" in settings or s["mask_at"] == "weights":
            return
        (B, T), S = case.inputs[0].shape[:2], case.inputs[1].shape[-2]
        allowed = allowed_by(case.masks, s, B, 1, T, S) if case.inputs[0].ndim == 3 else None
        empty = allowed is None or not allowed.any(-1).all()
        if empty and "empty" not in settings:
            yield {"empty": "zero"}
            yield {"empty": "uniform"}
        if empty or s["norm"] != "softmax" or s["axis"] != -1:
            if s["norm"] not in ("softmax", "exp"):
                yield {"fill": 0.0}
            yield from ({"fill": fill, "fill_by": by} for fill in self.strong for by in ("replace", "add"))


def stages_of(reading: Reading, settings: Mapping[str, Any], case: Case) -> Stages | None:
    """What the form computes; None where the settings do not fit these shapes."""
    with np.errstate(all="ignore"):
        try:
            return compute(reading.weights, case.inputs, case.masks, settings)
        except (ValueError, IndexError):
            return None
