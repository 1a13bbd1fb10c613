"""The plot of a comparison as a PNG file. matplotlib is loaded only here, and only when a PNG is asked for."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.lab.compare.results import Comparison
from headwise.view.compare import setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SEEDS, LINE = "#2c4f8f", "#8c8794", "#5f5b69"


def check_plotting() -> None:
    """Raise HeadwiseError where matplotlib is missing."""
    _figure_class()


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HeadwiseError("a PNG needs matplotlib: pip install 'headwise[all]'") from None
    return Figure


def write_png(path: str | Path, comparisons: Sequence[Comparison]) -> None:
    """Two panels for each comparison, of its first metric: every seed with the mean, and the differences from arm 1."""
    heights = [1.2 + 0.42 * len(comparison.arms) for comparison in comparisons]
    figure = _figure_class()(figsize=(10, sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for comparison, (values, differences) in zip(comparisons, panels, strict=True):
        _draw_values(values, comparison)
        _draw_differences(differences, comparison)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_whole(path, picture.getvalue())


def _draw_values(axes: Axes, comparison: Comparison) -> None:
    metric = comparison.metrics[0]
    for place, arm in enumerate(comparison.arms):
        if (score := arm.scores.get(metric.name)) is not None:
            axes.plot(score.values, [place] * len(score.values), "o", color=SEEDS, markersize=4, alpha=0.7)
            axes.plot([score.mean.mean] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=2.5)
    _finish(axes, comparison)
    axes.set_yticks(range(len(comparison.arms)), [arm.name for arm in comparison.arms])
    axes.set_title(f"{comparison.name}: {setting(comparison)}", fontsize=9, loc="left")
    axes.set_xlabel(f"{metric.words}, {metric.unit}" if metric.unit else metric.words, fontsize=9)


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    metric = comparison.metrics[0]
    axes.axvline(0, color=LINE, linewidth=1)
    for place, arm in enumerate(comparison.arms):
        far = score.difference if (score := arm.scores.get(metric.name)) is not None else None
        if far is not None:
            axes.plot([far.low, far.high], [place, place], color=INK, linewidth=2)
            axes.plot([far.mean], [place], "o", color=INK, markersize=6)
    _finish(axes, comparison)
    axes.set_yticks(range(len(comparison.arms)), [""] * len(comparison.arms))
    axes.set_xlabel("difference from the first arm, with its 95 % interval", fontsize=9)


def _finish(axes: Axes, comparison: Comparison) -> None:
    axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(len(comparison.arms) - 0.5, -0.5)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e4e0d6", linewidth=0.8)
    axes.set_axisbelow(True)
