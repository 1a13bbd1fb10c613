"""Which bugs explain what a learner's code computes, and in which numbers of it they show.

Each bug is put into the correct form until the numbers agree.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwise.checker.bugs import Bug, Say, Settings, catalogue, changes_of, words
from headwise.checker.form import (
    CORRECT,
    Arrays,
    Inputs,
    Masks,
    Stages,
    allowed_by,
    compute,
    counted,
)
from headwise.checker.reading import Reading

# of the largest number: float32 rounds to 6e-8, and a dozen sums of 50 terms amplify that
TOLERANCE = 3e-5


@dataclass(frozen=True)
class Case:
    """One experiment with the learner's code.

    name     "plain", "mask", "padding" or "context"
    masks    who ought to attend to whom
    outputs  what came out, by the form in which a mask was passed; more than one where forms are guessed
    """

    name: str
    inputs: Inputs
    masks: Masks
    outputs: Arrays

    def queries(self, settings: Settings) -> Any:
        """Which rows of an output anybody reads: those of tokens that are real, and that the code takes to be so."""
        real = self.masks.real
        shape = self.inputs[0].shape
        if real is None or real.shape[1] != shape[-2]:
            return ...
        real = real & counted(real, settings.get("real", "all"))
        return real if len(shape) == 3 else np.repeat(real[:, None], shape[1], 1)

    @property
    def is_masked(self) -> bool:
        return self.masks.causal or self.masks.real is not None


@dataclass(frozen=True)
class Explanation:
    """Settings under which the form gives the learner's numbers, and the bugs among them.

    A bug may show in later cases alone, such as a scale that is forgotten where there is padding: each case has the
    settings that were enough for it, and `settings` are those of the last.
    """

    reading: Reading
    bugs: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    by_case: Mapping[str, Settings] = field(default_factory=dict)
    unexplained: tuple[str, ...] = ()  # cases whose numbers nothing explains


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    """Are two results equal but for rounding? What is not finite must be so in the same places."""
    try:
        a, b = np.asarray(a, float), np.asarray(b, float)
    # of an exercise, as JSON has them: text, or lists of several shapes
    except (ValueError, TypeError):
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return all(close(x, y, tolerance) for x, y in zip(a, b, strict=True))
        return bool(a == b)
    finite = np.isfinite(a)
    if a.shape != b.shape or not np.array_equal(finite, np.isfinite(b)):
        return False
    # The tolerance is of the largest number of b; of 1, where all are smaller.
    size = max(1.0, float(np.abs(b[finite]).max(initial=0)))
    return float(np.abs(a[finite] - b[finite]).max(initial=0)) <= tolerance * size


class Search:
    """The search for an explanation, within some seconds of processor time.

    fills    numbers of the source that may stand for a forbidden score
    seconds  of processor time
    has      what the code has, of that which bugs need; None: all of it
    pairs    rounds in which two bugs at once are looked for: in so many forms of each, None for all
    """

    def __init__(
        self,
        fills: Sequence[float],
        seconds: float,
        has: Collection[str] | None = None,
        pairs: Sequence[int | None] = (2, None),
    ) -> None:
        # `examine` sets a larger one for 16 bits
        self.fills = fills
        self.pairs = pairs
        self.tolerance = TOLERANCE
        # Whether there is a mask is told by the case: see `_sets`.
        self.bugs = [
            bug
            for bug in catalogue().values()
            if has is None or {*bug.needs} <= {*has, "mask"}
        ]
        # so low that its softmax is 0
        self.strong = [fill for fill in fills if fill <= -1e4] or [-1e9]
        # Processor time, so that a busy machine judges alike; a pair of bugs is not looked for longer than twice that.
        self.until = time.process_time() + seconds
        self.clock = time.monotonic() + 2 * seconds

    def right(
        self, readings: Sequence[Reading], cases: Sequence[Case]
    ) -> Explanation | None:
        """The first reading under which the correct form gives the numbers of every case; None where none does."""
        for reading in readings:
            if reading.structural:
                continue
            if time.process_time() > self.until:
                return None
            by_case = {}
            for case in cases:
                settings = self._fit(reading, reading.settings, case)
                if settings is None:
                    break
                by_case[case.name] = settings
            else:
                return Explanation(reading, (), by_case[cases[-1].name], by_case)
        return None

    def explain(
        self, readings: Sequence[Reading], cases: Sequence[Case]
    ) -> Explanation:
        """The explanation with the fewest bugs: of the first case, then of each further one on top of it."""
        is_late = time.process_time() > self.until
        so_far = None if is_late else self._first(readings, cases[0], {})
        if so_far is None:
            return Explanation(readings[0], unexplained=(cases[0].name,))
        by_case = {cases[0].name: so_far.settings}
        # with the same reading of the weights, and the bugs that were found so far
        for case in cases[1:]:
            step = self._first([so_far.reading], case, so_far.settings)
            if step is None:
                so_far = replace(so_far, unexplained=(*so_far.unexplained, case.name))
                continue
            by_case[case.name] = step.settings
            bugs = dict.fromkeys((*so_far.bugs, *step.bugs))
            so_far = replace(so_far, bugs=tuple(bugs), settings=step.settings)
        return replace(so_far, by_case=by_case)

    def _first(
        self, readings: Sequence[Reading], case: Case, base: Settings
    ) -> Explanation | None:
        """The first that reproduces a case: without a bug, then with one, then with two."""
        # How many bugs at once, how many forms of each, None for all, and whether queries of padding count. What such a
        # query gives, nobody reads; it tells bugs apart.
        rounds: list[tuple[int, int | None, bool]] = [(0, None, False), (1, None, True)]
        if case.masks.real is not None:
            rounds.append((1, None, False))
        rounds += [(2, forms, True) for forms in self.pairs]
        for number, forms, whole in rounds:
            if number == 1:
                # The usual reading first. Of the others, one bug leaves the numbers nearer to those of the right one.
                # W_Q that is called W_K comes last.
                usual, *others = readings
                others.sort(
                    key=lambda x: ("q_from" in x.settings, self._gap(x, base, case))
                )
                readings = [usual, *others]
            for reading in readings:
                settings = {**reading.settings, **base}
                for names, change in self._sets(number, forms, settings, case):
                    # Time over; but whether the code is right is always asked.
                    is_late = number and time.process_time() > self.until
                    if is_late or (number == 2 and time.monotonic() > self.clock):
                        return None
                    hit = self._fit(reading, {**settings, **change}, case, whole)
                    if hit is not None:
                        return Explanation(reading, (*reading.structural, *names), hit)
        return None

    def _sets(
        self, number: int, forms: int | None, settings: Settings, case: Case
    ) -> Iterator[tuple[tuple[str, ...], Settings]]:
        """No bug, every bug, or every two of them, in their first `forms`; and what they change in the settings."""
        if number == 0:
            yield (), {}
            return
        # What did not show in the plain case, which comes first, is a bug of the mask, where two bugs give the same
        # numbers: in the cases after it bugs that need a mask come first, False before True.
        bugs = sorted(
            self.bugs, key=lambda bug: case.name != "plain" and "mask" not in bug.needs
        )
        singles = []
        for bug in bugs:
            if case.is_masked or "mask" not in bug.needs:
                changes = changes_of(bug, settings, self.fills)
                singles += [
                    (bug.id, change) for change in itertools.islice(changes, forms)
                ]
        if number == 1:
            yield from (((bug,), change) for bug, change in singles)
            return
        for (a, first), (b, second) in itertools.combinations(singles, 2):
            # two bugs, which change different settings
            if a != b and not set(first) & set(second):
                yield (a, b), {**first, **second}

    def _fit(
        self, reading: Reading, settings: Settings, case: Case, whole: bool = False
    ) -> Settings | None:
        """The settings, with what stands in empty rows filled in, if they give the learner's numbers.

        whole  for queries of padding, too?
        """
        for filling in self._fillings(settings, case):
            filled = {**settings, **filling}
            stages = stages_of(reading, filled, case)
            # An output of NaN alone would equal any other such output.
            if stages is None or not np.isfinite(stages.out).any():
                continue
            read = ... if whole else case.queries(filled)
            for output in case.outputs.values():
                if output.shape == stages.out.shape and close(
                    output[read], stages.out[read], self.tolerance
                ):
                    return filled
        return None

    def _gap(self, reading: Reading, base: Settings, case: Case) -> float:
        """How far the correct form is from the learner's numbers, on average."""
        stages = stages_of(reading, {**reading.settings, **base}, case)
        gaps = [
            float(np.abs(output - stages.out).mean())
            for output in case.outputs.values()
            if stages is not None and output.shape == stages.out.shape
        ]
        return min(gaps, default=np.inf)

    def _fillings(self, settings: Settings, case: Case) -> Iterator[Settings]:
        """What correct code may do otherwise with forbidden scores: settings to add to those of a case, none first.

        Such a score is -inf, or a large negative number: it matters where a row has no key, or no softmax.
        """
        yield {}
        s = {**CORRECT, **settings}
        if not case.is_masked or "fill" in settings or s["mask_at"] == "weights":
            return
        (B, T), S = case.inputs[0].shape[:2], case.inputs[1].shape[-2]
        # Are there rows without a key? Inputs (B,h,T,d), whose second size is not T, are taken to have some.
        empty = (
            case.inputs[0].ndim != 3
            or not allowed_by(case.masks, s, B, 1, T, S).any(-1).all()
        )
        if empty and "empty" not in settings:
            yield {"empty": "zero"}
            yield {"empty": "uniform"}
        if empty or s["norm"] != "softmax" or s["axis"] != -1:
            # without exp a score of 0 forbids: its weight is 0
            if s["norm"] not in ("softmax", "exp"):
                yield {"fill": 0.0}
            for fill in self.strong:
                yield {"fill": fill, "fill_by": "replace"}
                yield {"fill": fill, "fill_by": "add"}


def stages_of(reading: Reading, settings: Settings, case: Case) -> Stages | None:
    """What the form computes; None where the settings do not fit these shapes."""
    with np.errstate(all="ignore"):
        try:
            return compute(reading.weights, case.inputs, case.masks, settings)
        except (ValueError, IndexError):
            return None


def evidence_of(bug: Bug, explanation: Explanation, cases: list[Case], say: Say) -> str:
    """A sentence that shows a bug, with numbers where there are any.

    The form with the bug gives the learner's output, so its stages are taken for the learner's: `wrong`, beside
    `right`, those of the form without it. `bug.evidence` says which stage shows this bug. A phrase of the bug's
    own comes first, where the outputs are alike or a property shows the bug; then what the bug changes; last, how far
    the outputs are apart.
    """
    shown = _shown_in(explanation, cases)
    own_phrase = f"by_property_{bug.id}"
    is_same = shown is None or close(shown[0].out, shown[1].out)
    if own_phrase in words("en") and (
        is_same or bug.evidence in ("dropout", "batch", "property")
    ):
        return say(own_phrase)
    if bug.id in explanation.reading.structural:
        return say("structural")
    # the correct form cannot compute these shapes, or no case is explained
    if shown is None:
        return say("not_finite" if bug.evidence == "difference" else "by_property")
    wrong, right, case = shown
    text = ""
    if bug.evidence == "future":
        text = _future(wrong, right, case, say)
    # Without a weight on a forbidden key the rows may show it: weights that are masked after softmax add up to less.
    if bug.evidence == "rows" or (
        bug.evidence == "future" and case.is_masked and not text
    ):
        text = _rows(wrong, say)
    if bug.evidence == "scores":
        text = _scores(wrong, right, say)
    if text:
        return f"{text} ({say('handed')})" if case.name == "handed" else text
    if wrong.out.shape != right.out.shape or not np.isfinite(wrong.out).all():
        return say("not_finite")
    return say(
        "difference",
        gap=float(np.abs(wrong.out - right.out).max()),
        size=float(np.abs(right.out).max()),
    )


def _shown_in(
    explanation: Explanation, cases: Sequence[Case]
) -> tuple[Stages, Stages, Case] | None:
    """The first case in which learner and form differ, as both compute it; where none does, the first of all.

    Returns the stages with the bugs, those of the correct form, and the case; None where no case is explained.
    """
    first = None
    for case in cases:
        if case.name in explanation.unexplained:
            continue
        settings = explanation.by_case.get(case.name, explanation.settings)
        wrong = stages_of(explanation.reading, settings, case)
        right = stages_of(explanation.reading, explanation.reading.settings, case)
        if wrong is None or right is None:
            continue
        if not close(wrong.out, right.out):
            return wrong, right, case
        first = first or (wrong, right, case)
    return first


def _future(wrong: Stages, right: Stages, case: Case, say: Say) -> str:
    """The largest weight on a key that a query must not see; empty where there is none."""
    if not case.is_masked or wrong.weights.shape != right.weights.shape:
        return ""
    allowed = allowed_by(case.masks, CORRECT, *right.weights.shape)
    # the weights on forbidden keys alone
    leak = np.where(allowed, 0.0, np.nan_to_num(wrong.weights))
    b, h, t, s = np.unravel_index(np.abs(leak).argmax(), leak.shape)
    # 1e-4 is a round choice, far above what rounding leaves there
    weight = float(leak[b, h, t, s])
    return (
        say("future", document=b, head=h, row=t, weight=weight, key=s)
        if abs(weight) > 1e-4
        else ""
    )


def _rows(wrong: Stages, say: Say) -> str:
    """The row whose weights add up to a number farthest from 1, empty where that is 1; a row of NaN adds up to 0."""
    sums = np.nan_to_num(wrong.weights, posinf=0, neginf=0).sum(-1)
    b, h, t = np.unravel_index(np.abs(sums - 1).argmax(), sums.shape)
    # the phrase shows 3 digits: less than 1e-3 away it would mostly read 1
    total = float(sums[b, h, t])
    return (
        say("rows", document=b, head=h, row=t, total=total)
        if abs(total - 1) > 1e-3
        else ""
    )


def _scores(wrong: Stages, right: Stages, say: Say) -> str:
    """How far scores spread: their standard deviation, without those that stand for -inf, which are beyond 1000."""
    values = [
        scores[np.isfinite(scores) & (np.abs(scores) < 1e3)]
        for scores in (wrong.scores, right.scores)
    ]
    if not (values[0].size and values[1].size):
        return ""
    return say("scores", wrong=float(values[0].std()), right=float(values[1].std()))


def stage_of(explanation: Explanation, case: Case, say: Say) -> str:
    """What can be said of a difference that nothing explains: its size, and where it starts, as far as can be seen."""
    reading = explanation.reading
    right = stages_of(reading, {**reading.settings, **explanation.settings}, case)
    output = next(iter(case.outputs.values()))
    if right is None or right.out.shape != output.shape:
        # None: with these settings the form cannot compute such shapes.
        return say(
            "other_shape",
            theirs=output.shape,
            ours=None if right is None else right.out.shape,
        )
    if not np.isfinite(output).any():
        return say("all_nan")
    gap = np.abs(output - right.out)
    # The largest difference of each token, whose axis is the last but one.
    rows = np.nan_to_num(
        np.moveaxis(gap, -2, 0).reshape(gap.shape[-2], -1), nan=np.inf, posinf=np.inf
    ).max(-1)
    # a small difference begins somewhere, too
    first = int((rows > min(1e-3, rows.max() / 2)).argmax())
    stage = "any"
    # Row 0 of a causal layer sees only itself. Its weight is 1, whatever the score: only values can be wrong in it.
    if case.masks.causal:
        stage = "scores" if first else "values"
    return say("starts", gap=float(rows.max()), row=first, stage=say(f"stage_{stage}"))
