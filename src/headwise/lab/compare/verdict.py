"""From an interval to a sentence, and from sentences to a verdict; nothing here is typed in by hand."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.intervals import Interval
from headwise.lab.compare.results import DEPENDS, FAILS, HOLDS, Metric


def effect(difference: Interval, metric: Metric) -> int:
    """1 where the interval lies on the better side of 0, -1 where on the worse side, 0 where it contains 0."""
    if not difference.excludes(0.0):
        return 0
    return 1 if (difference.mean < 0) == metric.lower_is_better else -1


def sentence(arm: str, first: str, difference: Interval, metric: Metric) -> str:
    """What the differences of an arm from the first one, seed by seed, allow to say."""
    unit = f" {metric.unit}" if metric.unit else ""
    if not difference.excludes(0.0):
        return (
            f"{arm} against {first}: no detectable difference in {metric.words} "
            f"({difference.mean:+z.3f}{unit}, half width {difference.half_width:.3f}, {difference.n} seeds)"
        )
    way = "lower" if difference.mean < 0 else "higher"
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return (
        f"{arm} against {first}: {metric.words} {way} by {abs(difference.mean):.3f}{unit} "
        f"(95 % interval {low:.3f} to {high:.3f}, {difference.n} seeds)"
    )


def of_all(shown: Sequence[bool]) -> str:
    """The verdict on a claim about several cases: it holds in all, in none, or it depends."""
    return HOLDS if all(shown) else DEPENDS if any(shown) else FAILS
