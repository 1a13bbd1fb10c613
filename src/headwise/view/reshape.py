"""What `headwise share`, `prune` and `narrow` print: the damage as a table, the recovery curve, what was won."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from headwise.table import Cell, Table, say

if TYPE_CHECKING:
    from headwise.reshape.damage import Damage, Pair
    from headwise.reshape.heal import HealPoint
    from headwise.reshape.job import Reshaped

BAR = 20  # columns of the recovery curve
SHOWN_LAYERS = 12  # entropies of more layers are cut


def print_changed(console: Console, what: str, notes: tuple[str, ...]) -> None:
    """What was done, and what to know about it."""
    for line in (what, *notes):
        say(console, line)


def print_damage(console: Console, title: str, damage: Damage) -> None:
    """A row for each number, before and after."""
    Table(("", "before", "after", "change"), rows_of(damage), title).print(console)


def rows_of(damage: Damage) -> list[tuple[str, str, str, str]]:
    """Name, before, after and change of each number, as text."""
    rows = []
    if damage.loss is not None:
        rows.append(("loss, nats per token", *_numbers(damage.loss, 4)))
    if damage.kl is not None:
        rows.append(("KL to the parent, nats per token", "", f"{damage.kl:.4f}", ""))
    if damage.error is not None:
        rows.append(("error of the hidden states, relative", "", f"{damage.error:.4f}", ""))
    for layer, pair in enumerate(damage.entropy[:SHOWN_LAYERS]):
        rows.append((f"entropy of layer {layer}, nats, heads of both", *_numbers(pair, 3)))
    if len(damage.entropy) > SHOWN_LAYERS:
        rows.append((f"... and {len(damage.entropy) - SHOWN_LAYERS} more layers (all in the JSON)", "", "", ""))
    rows.append(("cache, bytes per token", *_counts(damage.cache_bytes)))
    rows.append(("parameters", *_counts(damage.parameters)))
    speed = damage.tokens_per_second
    if speed is not None:
        before, after, factor = _counts(speed)
        name = f"decoding, tokens/s at {damage.decode_context:,} cached"
        rows.append((name, before, after, factor if speed.told_apart else "not told apart"))
        before, after = (f"{low:,.0f}-{high:,.0f}" for low, high in (speed.before_range, speed.after_range))
        rows.append((f"  its range, {speed.runs} runs in turn", before, after, ""))
    return rows


def print_curve(console: Console, curve: tuple[HealPoint, ...]) -> None:
    """The distance to the parent at each evaluation, with a bar."""
    largest = max(point.distance for point in curve)
    sign = "#" if console.options.ascii_only else "█"
    rows: list[list[Cell]] = []
    for point in curve:
        loss = "-" if point.held_out_loss is None else f"{point.held_out_loss:.4f}"
        length = round(BAR * point.distance / largest) if largest else 0
        rows.append([point.step, point.tokens, loss, f"{point.distance:.4f}", sign * length])
    title = "Healing: distance to the parent, on other held-out text than the tables"
    Table(("step", "tokens", "held-out loss", "distance", ""), rows, title).print(console, left=(4,))


def print_reshaped(console: Console, reshaped: Reshaped) -> None:
    """What comes after the first damage: healing, and what was won."""
    if reshaped.curve:
        print_curve(console, reshaped.curve)
    if reshaped.healed is not None:
        print_damage(console, f"After healing{_kept(reshaped.curve)}", reshaped.healed)
    say(console, f"in all: {reshaped.won}")


def _kept(curve: tuple[HealPoint, ...]) -> str:
    """Which weights of the curve were kept, where they are not those of its end."""
    best = min(curve, key=lambda point: point.distance)
    if best is curve[0]:
        return ": no better; the unhealed weights were the best, and are kept"
    return "" if best is curve[-1] else f": the weights of step {best.step:,} were the best, and are kept"


def _numbers(pair: Pair, digits: int) -> tuple[str, str, str]:
    """Before, after and difference."""
    return f"{pair.before:.{digits}f}", f"{pair.after:.{digits}f}", f"{pair.after - pair.before:+.{digits}f}"


def _counts(pair: Pair) -> tuple[str, str, str]:
    """Before, after and factor."""
    if not pair.before:
        factor = ""
    elif pair.after == pair.before:
        factor = "same"
    else:
        factor = f"x {pair.after / pair.before:.2f}"
    return f"{pair.before:,.0f}", f"{pair.after:,.0f}", factor
