"""The ladder in the terminal: how far each rung is from the plain loop, and what those that agree cost."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from headwise.lab.ladder import LEAVES, STAGES
from headwise.markup import BINARY, plural, scaled
from headwise.records import Ladder, LadderRung
from headwise.table import Cell, Table, say

COURSE = (
    'The stacked heads and the course class are those of "Build a Large Language Model (From Scratch)", section 3.6.'
)


def print_ladder(console: Console, ladder: Ladder) -> None:
    """The certificate, of values and of gradients, then the costs; below them why a rung has no number."""
    say(console, f"One causal attention layer on {len(ladder.rungs)} rungs: {ladder.sizes}, seed {ladder.seed}")
    if ladder.note is not None:
        say(console, ladder.note)
    say(console, "")
    _print_values(console, ladder)
    _print_gradients(console, ladder)
    _print_costs(console, ladder)
    for rung in ladder.rungs:
        if rung.not_timed is not None:
            say(console, f"{rung.name} is not timed: {rung.not_timed}")
    say(
        console,
        "Times are medians of forward calls, speed is relative to plain; "
        "memory is the most that a call held at a time besides weights and input.",
    )
    say(console, COURSE)
    wrong = [rung.name for rung in ladder.rungs if rung.refused is None and not rung.agrees]
    if ladder.agrees:
        say(console, "Every rung that can run this layer gives the same on this draw, within what rounding allows.")
    else:
        say(console, f"NOT the same function: {', '.join(wrong)}")


def _print_values(console: Console, ladder: Ladder) -> None:
    def agrees(rung: LadderRung) -> str:
        return "-" if rung.refused is not None else "yes" if rung.agrees else "NO"

    rows = [[rung.name, *(_far(rung.differences, key) for key in STAGES), agrees(rung)] for rung in ladder.rungs]
    rows.append(["allowed", *(_far(ladder.tolerances, key) for key in STAGES), ""])
    title = "Certificate: largest difference from the plain loop, float64"
    Table(("rung", *STAGES, "agrees"), rows, title).print(console, last=1)


def _print_gradients(console: Console, ladder: Ladder) -> None:
    rows = []
    for rung in ladder.rungs:
        absent = "none" if rung.refused is None else "-"
        output = f"{_number(rung.timed_difference)} {rung.dtype}" if rung.refused is None else "-"
        rows.append([rung.name, *(_far(rung.gradients or {}, key, absent) for key in LEAVES), output])
    formats = sorted({rung.dtype for rung in ladder.rungs}, reverse=True)
    for dtype in formats:
        cells = [_far(ladder.tolerances, key) if dtype == "float64" else "" for key in LEAVES]
        rows.append(["allowed", *cells, f"{_far(ladder.tolerances, f'timed {dtype}')} {dtype}"])
    title = "Certificate: the same of the gradients, and of the output in the timed precision"
    Table(("rung", *LEAVES, "output as timed"), rows, title).print(console, last=len(formats))


def _print_costs(console: Console, ladder: Ladder) -> None:
    rows: list[list[Cell]] = []
    for rung in ladder.rungs:
        plain, ms, peak = ladder.rungs[0].ms, rung.ms, rung.peak_bytes
        speed = "-" if plain is None or ms is None else f"{_three_digits(plain / ms)}x"
        memory = "-" if peak is None else scaled(peak, 1024, BINARY)
        rows.append([rung.name, rung.parameters, _three_digits(ms), speed, memory, rung.how])
    title = f"Costs: {ladder.sizes}, {plural(ladder.threads, 'torch thread')}"
    Table(("rung", "parameters", "ms", "speed", "memory", "how"), rows, title).print(console, (0, 5))


def _far(differences: Mapping[str, float | None], key: str, absent: str = "-") -> str:
    """A difference; or what stands where the rung does not hand out that stage."""
    return _number(differences[key]) if key in differences else absent


def _number(far: float | None) -> str:
    return "wrong" if far is None else "0" if far == 0 else f"{far:.0e}"


def _three_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
