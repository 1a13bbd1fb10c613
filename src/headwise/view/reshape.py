"""What `headwise share` and `headwise prune` print: the damage as a table, the recovery curve, where the model went."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.reshape.report import Damage, HealPoint, Pair, Reshaped

BAR = 20  # columns of the recovery curve
SHOWN_LAYERS = 12  # entropies of more layers are cut


def print_changed(console: Console, what: str, notes: tuple[str, ...]) -> None:
    """What was done, and what to know about it."""
    for line in (what, *notes):
        _say(console, line)


def print_damage(console: Console, title: str, damage: Damage) -> None:
    """One row a number, before and after."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, before, after, change in rows_of(damage):
        table.add_row(name, before, after, change)
    console.print(table)


def rows_of(damage: Damage) -> list[tuple[str, str, str, str]]:
    """Name, before, after and change of each number, as text."""
    rows = []
    if damage.loss is not None:
        rows.append(
            ("loss, nats a token", f"{damage.loss.before:.4f}", f"{damage.loss.after:.4f}", _difference(damage.loss))
        )
    if damage.kl is not None:
        rows.append(("KL to the parent, nats a token", "", f"{damage.kl:.4f}", ""))
    if damage.error is not None:
        rows.append(("error of the hidden states, relative", "", f"{damage.error:.4f}", ""))
    for layer, pair in enumerate(damage.entropy[:SHOWN_LAYERS]):
        name = f"entropy of layer {layer}, nats, heads of both"
        rows.append((name, f"{pair.before:.3f}", f"{pair.after:.3f}", _difference(pair, 3)))
    if len(damage.entropy) > SHOWN_LAYERS:
        rows.append((f"... and {len(damage.entropy) - SHOWN_LAYERS} more layers (--json has all)", "", "", ""))
    for name, counts in (("cache, bytes a token", damage.cache_bytes), ("parameters", damage.parameters)):
        rows.append((name, f"{counts.before:,.0f}", f"{counts.after:,.0f}", _share(counts)))
    if damage.tokens_per_second is not None:
        speed = damage.tokens_per_second
        name = f"decoding, tokens/s at {damage.decode_context:,} cached"
        rows.append((name, f"{speed.before:,.0f}", f"{speed.after:,.0f}", _share(speed)))
    return rows


def print_curve(console: Console, curve: tuple[HealPoint, ...]) -> None:
    """The distance to the parent against the steps, a bar a line."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text("Healing: distance to the parent, on other held-out text than the tables"),
        title_justify="left",
        padding=(0, 1),
    )
    for heading in ("step", "tokens", "held-out loss", "distance"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    largest = max(point.distance for point in curve)
    sign = "#" if console.options.ascii_only else "█"
    for point in curve:
        loss = "-" if point.held_out_loss is None else f"{point.held_out_loss:.4f}"
        length = round(BAR * point.distance / largest) if largest else 0
        table.add_row(f"{point.step:,}", f"{point.tokens:,}", loss, f"{point.distance:.4f}", sign * length)
    console.print(table)


def print_reshaped(console: Console, report: Reshaped) -> None:
    """What comes after the first damage: healing, and the folder."""
    if report.curve:
        print_curve(console, report.curve)
    if report.healed is not None:
        print_damage(console, "After healing", report.healed)
    if report.out is None:
        _say(console, "nothing was written; pass --out for a model folder")
    else:
        _say(console, f"verified: {report.verified}")
        _say(console, f"model: {report.out}")


def _difference(pair: Pair, digits: int = 4) -> str:
    return f"{pair.after - pair.before:+.{digits}f}"


def _share(pair: Pair) -> str:
    return "" if not pair.before else "same" if pair.after == pair.before else f"x {pair.after / pair.before:.2f}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), highlight=False, markup=False, soft_wrap=True)
