"""Student's interval against published quantiles."""

import math

import pytest
from cases import rows

from headwise.intervals import Interval, interval_of, t_quantile


# Two-sided 95 %, as printed in every table of Student's t.
@pytest.mark.parametrize(("degrees", "expected"), rows("quantiles"))
def test_quantiles(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-5)


def test_intervals() -> None:
    assert t_quantile(5, 0.99) == pytest.approx(4.0321, abs=6e-5)
    found = interval_of([1.0, 2.0, 3.0, 4.0, 5.0])
    # mean 3, standard error sqrt(2.5 / 5), t of 4 degrees
    assert found.mean == 3.0
    assert found.high - 3.0 == pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-5)
    assert found.low == pytest.approx(6.0 - found.high)
    assert found.excludes(0.5) and not found.excludes(2.0)
    assert interval_of([1.0, math.nan, 3.0]) == interval_of([1.0, 3.0])
    assert interval_of([2.0]) == interval_of([2.0]).of_fraction() == Interval(2.0, -math.inf, math.inf, 1)
    assert interval_of([0.0, 0.0, 1.0]).of_fraction() == Interval(1 / 3, 0.0, 1.0, 3)
    found = interval_of([])
    assert math.isnan(found.mean) and found.n == 0
