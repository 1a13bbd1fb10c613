"""The plots of a comparison, drawn in the page: one line for each arm."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from headwise.lab.compare.results import Comparison, Metric

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 440, 176, 18, 6, 30, 26  # in the units of the view box
LONGEST = 21  # characters of an arm's name that fit at its left


def escaped(text: str) -> str:
    """For an element or a quoted attribute; half a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode())


def value_plot(comparison: Comparison, metric: Metric) -> str:
    """Every seed as a dot, the mean as a stroke; empty where no arm has a score."""
    scores = {arm.name: arm.scores[metric.name] for arm in comparison.arms if metric.name in arm.scores}
    values = [value for score in scores.values() for value in score.values]

    def draw(name: str, x: Callable[[float], float], y: float) -> str:
        score = scores[name]
        dots = "".join(f'<circle class="seed" cx="{x(v):.1f}" cy="{y:.1f}" r="3.5"/>' for v in score.values)
        mean = x(score.mean.mean)
        return f'{dots}<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}"/>'

    words = "; ".join(f"{name} {score.mean.mean:.3f}" for name, score in scores.items())
    return _plot(comparison, f"{metric.words}: {words}", values, list(scores), draw, zero=False)


def difference_plot(comparison: Comparison, metric: Metric) -> str:
    """The interval of the differences from the first arm as a bar; empty where there is none."""
    found = {arm.name: arm.scores[metric.name] for arm in comparison.arms if metric.name in arm.scores}
    far = {name: score.difference for name, score in found.items() if score.difference is not None}
    ends = [end for one in far.values() for end in (one.low, one.high, 0.0)]

    def draw(name: str, x: Callable[[float], float], y: float) -> str:
        one = far[name]
        reach = f'<line class="reach" x1="{x(one.low):.1f}" x2="{x(one.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        return f'{reach}<circle class="middle" cx="{x(one.mean):.1f}" cy="{y:.1f}" r="5"/>'

    words = ". ".join(score.verdict for score in found.values() if score.verdict is not None)
    return _plot(comparison, words, ends, list(far), draw, zero=True)


def _plot(
    comparison: Comparison,
    words: str,
    values: Sequence[float],
    drawn: Sequence[str],
    draw: Callable[[str, Callable[[float], float], float], str],
    zero: bool,
) -> str:
    if not values or not all(map(math.isfinite, values)):
        return ""
    ticks = round_ticks(min(values), max(values))
    bottom = TOP + ROW * len(comparison.arms)
    span = ticks[-1] - ticks[0]

    def x(value: float) -> float:
        return LEFT + (value - ticks[0]) / span * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="{escaped(words)}">',
        *(_line("zero" if zero and tick == 0 else "grid-line", x(tick), bottom) for tick in ticks),
        *(_label(x(tick), bottom + 18, f"{tick:g}", "middle") for tick in _apart(ticks)),
    ]
    for place, arm in enumerate(comparison.arms):
        y = TOP + ROW * (place + 0.5)
        name = arm.name if len(arm.name) <= LONGEST else arm.name[: LONGEST - 1] + "…"
        parts.append(_label(LEFT - 12, y + 4.5, name, "end", "arm"))
        if arm.name in drawn:
            parts.append(draw(arm.name, x, y))
    return "".join(parts) + "</svg>"


def round_ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers, evenly spaced, from at or below `low` to at or above `high`; at least two."""
    span = (high - low) or max(abs(low), 1.0)
    power = 10.0 ** math.floor(math.log10(span))
    step = next(size for size in (power / 5, power / 2, power, 2 * power) if span <= 5 * size)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _apart(ticks: Sequence[float]) -> Sequence[float]:
    """Every tick, or every other one where their numbers would run into one another; 0 stays."""
    if len(ticks) * max(len(f"{tick:g}") for tick in ticks) <= 28:
        return ticks
    first = ticks.index(0.0) % 2 if 0.0 in ticks else 0
    return ticks[first::2]


def _line(kind: str, x: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'


def _label(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'
