"""What a comparison found, in plain types that go into JSON as they are, and what may be said of it. No torch here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from headwise.intervals import Interval, interval_of
from headwise.table import Cell, Table
from headwise.words import Note

HOLDS, FAILS, DEPENDS, NOT_RUN = "holds", "does not hold", "depends", "not run here"  # the verdicts on a claim


@dataclass(frozen=True)
class Metric:
    """What is measured on a trained model."""

    name: str  # its key among the scores
    words: str  # "held-out loss"
    unit: str  # "nats"; empty for a fraction of a whole, such as accuracy
    lower_is_better: bool = False


@dataclass(frozen=True)
class Score:
    """One arm under one metric; values and differences go seed by seed, in the order of the seeds."""

    values: tuple[float, ...]
    mean: Interval  # of the values
    difference: Interval | None  # from the first arm, seed by seed; None for the first arm, and where that one failed
    verdict: str | None  # that difference in words; None for a score that is no metric of the experiment


@dataclass(frozen=True)
class ArmResult:
    """One variant of the model, over all seeds."""

    name: str
    about: str  # what is unusual about it; empty where the name says it all
    parameters: int
    scores: Mapping[str, Score]  # by the names of metrics, and of numbers besides; empty where training diverged
    failure: str | None  # why there are no scores


@dataclass(frozen=True)
class Comparison:
    """One experiment, done."""

    name: str
    question: str
    data: str  # what the models learned from
    steps: int
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]  # the first is the one that the experiment asks for
    arms: tuple[ArmResult, ...]  # the others are compared with the first
    verdicts: tuple[str, ...]  # which arms failed, then the verdicts of all scores, metric by metric
    notes: tuple[str, ...]  # what a reader of the numbers must know
    cpu_seconds: float  # of all training and measuring, whether now or by an earlier call

    def arm(self, name: str) -> ArmResult:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Claim:
    """One row of the ledger."""

    claim: str
    measured: str
    verdict: str  # HOLDS, FAILS, DEPENDS or NOT_RUN
    rule: str  # how the verdict follows from the figures; for NOT_RUN why it was not run


Measured = tuple[Claim, Table]  # a claim, and the table that was measured for it


# Name of a claim -> its texts, with places for figures: {"parameters": {"claim": ..., "rule": ...}}.
@cache
def ledger_words() -> dict[str, Any]:
    return tomllib.loads(resources.files("headwise.lab").joinpath("claims.toml").read_text(encoding="utf-8"))


def judged_claim(name: str, verdict: str, **figures: object) -> Claim:
    """The claim of that name in claims.toml, with these figures in its words: each at the places of its name."""
    claim, measured, rule = (ledger_words()[name][part].format(**figures) for part in ("claim", "measured", "rule"))
    return Claim(claim, measured, verdict, rule)


def measured_claim(name: str, verdict: str, rows: Iterable[tuple[Cell, ...]], **figures: object) -> Measured:
    """The claim of that name and its table of these rows, whose heading and columns are in claims.toml, too."""
    words = ledger_words()[name]
    title, note = words["title"].format(**figures), words.get("note", "").format(**figures)
    return judged_claim(name, verdict, **figures), Table(tuple(words["columns"]), tuple(rows), title, note)


@dataclass(frozen=True)
class Ledger:
    """The claims with all that was measured for them."""

    command: str  # what to type to make it again
    machine: Mapping[str, str | int]  # its processor, cores and system, and the versions of libraries
    seeds: tuple[int, ...]
    claims: tuple[Claim, ...]
    comparisons: tuple[Comparison, ...]
    tables: tuple[Table, ...]  # of the claims that need no training
    wall_seconds: float  # of this call alone; units that an earlier one finished are not made again
    cpu_seconds: float  # of this call alone, its workers included


def paired(values: Sequence[float], others: Sequence[float]) -> Interval:
    """How far values lie from others, both in the order of their seeds: the interval of the differences."""
    return interval_of([value - other for value, other in zip(values, others, strict=True)])


def effect(difference: Interval | None, metric: Metric) -> int:
    """1 where the interval lies on the better side of 0, -1 on the worse side; 0 where it contains 0, or is None."""
    if difference is None or not difference.excludes(0.0):
        return 0
    return 1 if (difference.mean < 0) == metric.lower_is_better else -1  # better: below 0 for a loss, else above


def sentence(arm: str, first: str, difference: Interval, metric: Metric) -> str:
    """How an arm differs from the first one, in words: lower, higher, or not detectably, where 0 is in the interval."""
    unit = f" {metric.unit}" if metric.unit else ""
    facts = {"arm": arm, "first": first, "metric": metric.words, "unit": unit, "seeds": difference.n}
    if not difference.excludes(0.0):
        mean, half_width = f"{difference.mean:+z.3f}", f"{difference.half_width:.3f}"  # "z": no -0.000
        return Note.of("comparison.no_difference", **facts, mean=mean, half_width=half_width)
    # The sign is in the word. Without it the bounds of "lower", -0.3 and -0.1, change places.
    low, high = sorted((abs(difference.low), abs(difference.high)))
    way = "comparison.lower" if difference.mean < 0 else "comparison.higher"
    return Note.of(way, **facts, by=f"{abs(difference.mean):.3f}", low=f"{low:.3f}", high=f"{high:.3f}")


def of_all(shown: Sequence[bool]) -> str:
    """The verdict on a claim that is made of all these cases, one or more: was it shown in all, in some, in none?"""
    return HOLDS if all(shown) else DEPENDS if any(shown) else FAILS
