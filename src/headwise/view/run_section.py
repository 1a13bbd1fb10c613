"""The part of the report that tells of a training run: facts, held-out loss against a baseline, curve, samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headwise.markup import escaped
from headwise.records import CurvePoint, RunSummary

# The loss curve, in the units of its view box.
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 78, 34, 14, 62


def run_section(summary: RunSummary) -> str:
    """The section as HTML; a curve or a loss that is not finite is said in words."""
    facts = "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(value)}</dd>" for label, value in summary.facts.items())
    parts = [
        '<section aria-labelledby="run-title"><h2 id="run-title">The training run</h2>',
        f'<div class="run"><div>{f"<dl>{facts}</dl>" if facts else ""}</div><div>{_comparison(summary)}</div></div>',
        _curve_figure(summary),
    ]
    if summary.samples:
        items = "".join(f'<li><pre dir="auto">{escaped(sample)}</pre></li>' for sample in summary.samples)
        parts.append(f'<h3>What it writes</h3><ol class="samples">{items}</ol>')
    return "".join(parts) + "</section>"


def _comparison(summary: RunSummary) -> str:
    """The held-out loss and the baseline as two bars from zero on one scale, and the difference in words."""
    loss, baseline = summary.held_out_loss, summary.baseline_loss
    losses = [value for value in (loss, baseline) if value is not None and math.isfinite(value)]
    longest = max(losses, default=0.0) or 1.0
    bars = _bar("This model, held-out loss", loss, longest, "ours")
    if baseline is None:
        verdict = "No baseline was measured on these tokens."
    else:
        bars += _bar(_baseline_name(summary), baseline, longest, "theirs")
        verdict = _verdict(baseline - loss)
    unit = "Nats per token on the same held-out tokens; lower is better." if baseline is not None else "Nats per token."
    return f'{bars}<p class="verdict">{verdict}</p><p class="unit">{unit}</p>'


def _baseline_name(summary: RunSummary) -> str:
    return f"Baseline, {summary.baseline_name}" if summary.baseline_name else "Baseline"


def _bar(label: str, loss: float, longest: float, kind: str) -> str:
    share = 100 * max(0.0, loss) / longest if math.isfinite(loss) else 0.0
    return (
        f'<div class="measure"><span>{escaped(label)}</span><span class="value">{loss:.3f}</span>'
        f'<svg aria-hidden="true"><rect class="track" width="100%" height="100%"/>'
        f'<rect class="{kind}" width="{share:.2f}%" height="100%"/></svg></div>'
    )


def _verdict(gain: float) -> str:
    if not math.isfinite(gain):
        return "The two cannot be compared: one of the losses is not a finite number."
    if abs(gain) < 0.0005:
        return "The model and the baseline do not differ in the third decimal."
    word = "better" if gain > 0 else "worse"
    return f"The model is <b>{abs(gain):.3f} nats per token {word}</b> than the baseline."


def _curve_figure(summary: RunSummary) -> str:
    points = sorted(summary.curve, key=lambda point: point.step)
    if not points:
        return ""
    baseline = summary.baseline_loss
    if baseline is not None and not math.isfinite(baseline):
        baseline = None
    keys = [("train", "training"), ("held-out", "held-out")]
    if baseline is not None:
        keys.append(("baseline", _baseline_name(summary)))
    key = "".join(
        f'<span><svg aria-hidden="true"><line class="{kind}" x1="0" x2="100%" y1="2" y2="2"/></svg>'
        f"{escaped(name)}</span>"
        for kind, name in keys
    )
    rows = "".join(
        f"<tr><td>{point.step:,}</td><td>{point.train_loss:.3f}</td><td>{point.held_out_loss:.3f}</td></tr>"
        for point in points
    )
    return (
        f'<h3>Loss while training</h3><figure><div class="key">{key}</div>{_curve_drawing(points, baseline)}'
        '<details><summary>The curve in numbers</summary><div class="scroll" tabindex="0"><table><thead><tr>'
        '<th scope="col">step</th><th scope="col">training loss</th><th scope="col">held-out loss</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></figure>"
    )


def _curve_drawing(points: Sequence[CurvePoint], baseline: float | None) -> str:
    losses = [loss for point in points for loss in (point.train_loss, point.held_out_loss) if math.isfinite(loss)]
    if not losses:
        return '<p class="notice">No loss of this run is a finite number, so there is no curve to draw.</p>'
    levels = [*losses, baseline] if baseline is not None else losses
    ticks = round_steps(min(levels), max(levels))
    across = round_steps(points[0].step, points[-1].step, whole=True)
    x = _scale(points[0].step, points[-1].step, LEFT, WIDTH - RIGHT)
    y = _scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="curve-words">'
        f'<title id="curve-words">{_curve_words(points, baseline)}</title>'
    ]
    for tick in ticks:
        line = f'<line class="grid-line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        parts.append(line + _label(LEFT - 8, y(tick) + 5, f"{tick:g}", "end"))
    steps = [tick for tick in across if points[0].step <= tick <= points[-1].step]
    parts += [_label(x(tick), HEIGHT - BOTTOM + 24, f"{tick:,.0f}", "middle") for tick in steps]
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "training step", "middle"))
    turned = f'transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">loss, nats per token</text>')
    if baseline is not None:
        height = f"{y(baseline):.1f}"
        parts.append(f'<line class="baseline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
    for kind, series in (("train", [p.train_loss for p in points]), ("held-out", [p.held_out_loss for p in points])):
        pairs = zip(points, series, strict=True)
        corners = [f"{x(point.step):.1f} {y(loss):.1f}" for point, loss in pairs if math.isfinite(loss)]
        if corners:
            tail = "h0.1" if len(corners) == 1 else ""  # a path of one point shows as a dot only where it has a length
            parts.append(f'<path class="{kind}" d="M{" L".join(corners)}{tail}" stroke-linecap="round"/>')
    return "".join(parts) + "</svg>"


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve_words(points: Sequence[CurvePoint], baseline: float | None) -> str:
    first, last = points[0], points[-1]
    words = (
        f"From step {first.step:,} to step {last.step:,} the training loss goes from {first.train_loss:.3f} to "
        f"{last.train_loss:.3f} and the held-out loss from {first.held_out_loss:.3f} to {last.held_out_loss:.3f} "
        "nats per token."
    )
    return words + (f" The baseline is at {baseline:.3f}." if baseline is not None else "")


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """The straight map that takes low to start and high to stop; a range of no width goes to the middle."""
    if high == low:
        return lambda value: (start + stop) / 2
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def round_steps(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers, evenly spaced, the first at or below `low`, the last at or above `high`."""
    span = (high - low) or max(abs(low), 1.0)
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= span / 4)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]
