"""How sure a mean is: Student's interval over seeds or documents; and texts that are held apart to judge on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

LEVEL = 0.95  # of confidence, the usual one: `Interval` says what it means


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds between which the true mean lies in 95 of 100 such samples."""

    mean: float
    low: float  # -inf and inf where a single value says nothing about its spread
    high: float
    n: int  # values: seeds, or documents

    def of_fraction(self) -> Interval:
        """The same with its bounds between 0 and 1, where a fraction lies; of a single value they stay open."""
        return (
            self
            if self.n < 2
            else Interval(self.mean, max(self.low, 0.0), min(self.high, 1.0), self.n)
        )

    def excludes(self, value: float) -> bool:
        """Does the interval lie on one side of `value`?"""
        return not self.low <= value <= self.high


T = TypeVar("T")


def interval_of(values: Sequence[float]) -> Interval:
    """Mean and Student's t interval of independent values (Student 1908). NaNs are left out; of none all is NaN."""
    numbers = [value for value in values if not math.isnan(value)]
    mean = math.fsum(numbers) / len(numbers) if numbers else math.nan
    return interval_from(
        len(numbers), mean, math.fsum((value - mean) ** 2 for value in numbers)
    )


def interval_from(n: int, mean: float, squares: float) -> Interval:
    """The interval of n values whose mean is known, and `squares`, the sum of their squared distances from it."""
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    if n == 1:  # one value says nothing of how far others lie
        return Interval(mean, -math.inf, math.inf, 1)
    # the root is the standard error of the mean
    reach = t_quantile(n - 1) * math.sqrt(squares / (n - 1) / n)
    return Interval(mean, mean - reach, mean + reach, n)


@cache
def t_quantile(degrees: int) -> float:
    """t such that a Student variable of `degrees` degrees of freedom lies within +-t with probability LEVEL."""
    low, high = 0.0, 1.0  # a first guess, and then bisection
    while _inside(degrees, high) < LEVEL:  # until t lies between `low` and `high`
        high *= 2
    for _ in range(60):  # halvings: more than a float has digits
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _inside(degrees, middle) < LEVEL else (low, middle)
        )
    return (low + high) / 2


def _inside(degrees: int, t: float) -> float:
    """P(|T| < t), by the finite series of Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.

    With c = cos(angle), odd: 2/pi * (angle + sin(angle) * (c + 2/3 c^3 + ...)), even: sin(angle) * (1 + 1/2 c^2 + ...).
    """
    angle = math.atan(t / math.sqrt(degrees))
    # the series differ: 26.7.3 is for odd degrees, 26.7.4 for even ones
    odd = degrees % 2
    cosine = math.cos(angle)
    term = cosine if odd else 1.0
    total = 0.0
    # one term for each two degrees; k is the divisor of the next one
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
