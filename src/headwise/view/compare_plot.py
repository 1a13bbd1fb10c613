"""The plots of a comparison, one line for each arm: drawn once, as marks, and shown in the page as SVG or in a PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.lab.compare.results import Comparison, Metric, Score
from headwise.markup import escaped
from headwise.view.compare import setting, with_unit
from headwise.view.figure import figure_class, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 440, 176, 18, 6, 30, 26  # in the units of the view box
LONGEST = 21  # characters of an arm's name that fit at its left
DIFFERENCE = "difference from the first arm"
# In a PNG; the page has its own colours, for light and dark.
RADII = {"seed": 3.5, "middle": 5.0}  # of a kind of dot
ANCHORS = {"tick": "middle", "arm": "end"}  # what of a label stands at its x
COLOURS = {"grid-line": "#e4e0d6", "zero": "#5f5b69", "tick": "#5f5b69", "arm": "#1d1b22", "seed": "#8c8794"}
ACCENT = "#2c4f8f"


class Line(NamedTuple):
    kind: str
    x1: float
    y1: float
    x2: float
    y2: float


class Dot(NamedTuple):
    kind: str
    x: float
    y: float


class Label(NamedTuple):
    kind: str
    x: float
    y: float  # of the base line
    text: str


Mark = Line | Dot | Label


class Plot(NamedTuple):
    """Marks in a box of WIDTH times `height`, y downwards, and what they say in words."""

    height: float
    words: str
    marks: list[Mark]


def _scores(comparison: Comparison, metric: Metric) -> dict[str, Score]:
    return {arm.name: arm.scores[metric.name] for arm in comparison.arms if metric.name in arm.scores}


def value_plot(comparison: Comparison, metric: Metric) -> Plot | None:
    """Every seed as a dot, the mean as a stroke; None where no arm has a score."""
    scores = _scores(comparison, metric)

    def draw(name: str, x: Callable[[float], float], y: float) -> list[Mark]:
        mean = x(scores[name].mean.mean)
        return [*(Dot("seed", x(value), y) for value in scores[name].values), Line("mean", mean, y - 9, mean, y + 9)]

    words = "; ".join(f"{name} {score.mean.mean:.3f}" for name, score in scores.items())
    values = [value for score in scores.values() for value in score.values]
    return _plot(comparison, f"{metric.words}: {words}", values, list(scores), draw, zero=False)


def difference_plot(comparison: Comparison, metric: Metric) -> Plot | None:
    """The interval of the differences from the first arm as a bar; None where there is none."""
    scores = _scores(comparison, metric)
    differences = {name: score.difference for name, score in scores.items() if score.difference is not None}

    def draw(name: str, x: Callable[[float], float], y: float) -> list[Mark]:
        interval = differences[name]
        return [Line("reach", x(interval.low), y, x(interval.high), y), Dot("middle", x(interval.mean), y)]

    words = ". ".join(score.verdict for score in scores.values() if score.verdict is not None)
    ends = [end for interval in differences.values() for end in (interval.low, interval.high, 0.0)]
    return _plot(comparison, words, ends, list(differences), draw, zero=True)


def _plot(
    comparison: Comparison,
    words: str,
    values: Sequence[float],
    drawn: Sequence[str],
    draw: Callable[[str, Callable[[float], float], float], list[Mark]],
    zero: bool,
) -> Plot | None:
    if not values or not all(map(math.isfinite, values)):
        return None
    ticks = round_ticks(min(values), max(values))
    bottom = TOP + ROW * len(comparison.arms)
    span = ticks[-1] - ticks[0]

    def x(value: float) -> float:
        return LEFT + (value - ticks[0]) / span * (WIDTH - LEFT - RIGHT)

    marks: list[Mark] = [
        *(Line("zero" if zero and tick == 0 else "grid-line", x(tick), TOP, x(tick), bottom) for tick in ticks),
        *(Label("tick", x(tick), bottom + 18, f"{tick:g}") for tick in _apart(ticks)),
    ]
    for place, arm in enumerate(comparison.arms):
        y = TOP + ROW * (place + 0.5)
        name = arm.name if len(arm.name) <= LONGEST else arm.name[: LONGEST - 1] + "…"
        marks.append(Label("arm", LEFT - 12, y + 4.5, name))
        if arm.name in drawn:
            marks += draw(arm.name, x, y)
    return Plot(bottom + BOTTOM, words, marks)


def round_ticks(low: float, high: float) -> list[float]:
    """At most seven round numbers, evenly spaced, from at or below `low` to at or above `high`; at least two."""
    span = (high - low) or max(abs(low), 1.0)
    power = 10.0 ** math.floor(math.log10(span))
    step = next(size for size in (power / 5, power / 2, power, 2 * power) if span <= 5 * size)
    first = math.floor(low / step)
    return [round(number * step, 12) for number in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _apart(ticks: Sequence[float]) -> Sequence[float]:
    """Every tick, or every other one where their numbers would run into one another; 0 stays."""
    if len(ticks) * max(len(f"{tick:g}") for tick in ticks) <= 28:
        return ticks
    first = ticks.index(0.0) % 2 if 0.0 in ticks else 0
    return ticks[first::2]


def svg(plot: Plot) -> str:
    """The plot as an element of a page, whose style sheet knows the kinds of marks."""
    marks, box = "".join(map(_element, plot.marks)), f"0 0 {WIDTH} {plot.height}"
    return f'<svg class="plot" viewBox="{box}" role="img" aria-label="{escaped(plot.words)}">{marks}</svg>'


def _element(mark: Mark) -> str:
    if isinstance(mark, Line):
        x1, x2, y1, y2 = (f"{place:.1f}" for place in (mark.x1, mark.x2, mark.y1, mark.y2))
        return f'<line class="{mark.kind}" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'
    if isinstance(mark, Dot):
        return f'<circle class="{mark.kind}" cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="{RADII[mark.kind]:g}"/>'
    place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" text-anchor="{ANCHORS[mark.kind]}"'
    return f'<text class="{mark.kind}" {place}>{escaped(mark.text)}</text>'


def write_png(path: str | Path, comparisons: Sequence[Comparison]) -> None:
    """Both plots of each comparison, of its first metric, side by side."""
    heights = [(len(comparison.arms) + 2.5) * ROW for comparison in comparisons]
    figure = figure_class()(figsize=(2 * WIDTH / 80, sum(heights) / 80), layout="constrained")
    panels = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for comparison, (values, differences) in zip(comparisons, panels, strict=True):
        metric = comparison.metrics[0]
        _draw(values, value_plot(comparison, metric), with_unit(metric))
        _draw(differences, difference_plot(comparison, metric), f"{DIFFERENCE}, with its 95 % interval")
        values.set_title(f"{comparison.name}: {setting(comparison)}", fontsize=9, loc="left", parse_math=False)
    write_figure(path, figure)


def _draw(axes: Axes, plot: Plot | None, caption: str) -> None:
    axes.set_axis_off()
    if plot is None:
        return
    axes.set(xlim=(0, WIDTH), ylim=(plot.height, 0))
    words: dict[str, Any] = {"fontsize": 9, "parse_math": False}
    axes.text((LEFT + WIDTH - RIGHT) / 2, plot.height + 12, caption, ha="center", va="center", **words)
    for mark in plot.marks:
        colour = COLOURS.get(mark.kind, ACCENT)
        if isinstance(mark, Line):
            width = 2.5 if colour == ACCENT else 1
            axes.plot([mark.x1, mark.x2], [mark.y1, mark.y2], color=colour, linewidth=width, zorder=width)
        elif isinstance(mark, Dot):
            alpha = 0.55 if mark.kind == "seed" else 1
            axes.plot([mark.x], [mark.y], "o", color=colour, markersize=1.5 * RADII[mark.kind], alpha=alpha, zorder=2)
        else:
            side = "right" if ANCHORS[mark.kind] == "end" else "center"
            axes.text(mark.x, mark.y, mark.text, color=colour, ha=side, **words)
