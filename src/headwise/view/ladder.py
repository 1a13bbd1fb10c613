"""The ladder in the terminal: how far each rung is from the plain loop, and what those that agree cost."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.markup import BINARY, plural, scaled
from headwise.records import Ladder, LadderRung, LadderSizes

STAGES = ("q", "k", "v", "scores", "weights", "heads", "joined", "output")
GRADIENTS = ("W_Q", "W_K", "W_V", "W_O", "x")
COURSE = (
    "The stacked heads, the wrapper and the course class are those of "
    '"Build a Large Language Model (From Scratch)", section 3.6.'
)


def print_ladder(console: Console, ladder: Ladder) -> None:
    """The certificate, of values and of gradients, then the costs; below them why a rung has no number."""
    certified = [rung for rung in ladder.rungs if rung.another is None]
    _say(console, f"One causal attention layer on {len(certified)} rungs: {_shape(ladder.sizes)}, seed {ladder.seed}")
    if ladder.note is not None:
        _say(console, ladder.note)
    _say(console, "")
    console.print(_values(ladder, certified))
    console.print(_gradients(ladder, certified))
    console.print(_costs(ladder))
    for rung in ladder.rungs:
        if rung.not_timed is not None:
            _say(console, f"{rung.name} is not timed: {rung.not_timed}")
        if rung.another is not None:
            _say(console, f"{rung.name} is another function, and is not held to the others: {rung.another}")
    _say(
        console,
        "Times are medians of forward calls, speed is relative to plain; "
        "memory is the most that a call held at a time besides weights and input.",
    )
    _say(console, COURSE)
    _say(console, _verdict(certified, ladder.agrees))


def _shape(n: LadderSizes) -> str:
    return f"batch {n.batch}, {n.tokens} tokens, width {n.width}, {n.heads} heads, {n.kv_heads} key/value heads"


def _values(ladder: Ladder, certified: list[LadderRung]) -> Table:
    table = _table("Certificate: largest difference from the plain loop, float64", [*STAGES, "agrees"])
    for rung in certified:
        cells = [_far(rung.differences, key) for key in STAGES]
        agrees = "-" if rung.refused is not None else "yes" if rung.agrees else "NO"
        table.add_row(rung.name, *cells, agrees)
    table.add_section()
    table.add_row("allowed", *(_far(ladder.tolerances, key) for key in STAGES), "")
    return table


def _gradients(ladder: Ladder, certified: list[LadderRung]) -> Table:
    table = _table(
        "Certificate: the same of the gradients, and of the output in the timed precision",
        [*GRADIENTS, "output as timed"],
    )
    for rung in certified:
        if rung.gradients is None:
            cells = ["-" if rung.refused is not None else "none"] * len(GRADIENTS)
        else:
            cells = [_far(rung.gradients, key) for key in GRADIENTS]
        output = "-" if rung.refused is not None else f"{_number(rung.timed_difference)} {rung.dtype}"
        table.add_row(rung.name, *cells, output)
    table.add_section()
    for dtype in sorted({rung.dtype for rung in ladder.rungs}, reverse=True):
        cells = [_far(ladder.tolerances, key) if dtype == "float64" else "" for key in GRADIENTS]
        table.add_row("allowed", *cells, f"{_far(ladder.tolerances, f'timed {dtype}')} {dtype}")
    return table


def _costs(ladder: Ladder) -> Table:
    threads = plural(ladder.threads, "torch thread")
    table = _table(f"Costs: {_shape(ladder.sizes)}, {threads}", ["parameters", "ms", "speed", "memory"])
    table.add_column("how", overflow="fold")
    plain = ladder.rungs[0].ms
    for rung in sorted(ladder.rungs, key=lambda rung: rung.another is not None):
        if rung.another is not None:
            table.add_section()
        table.add_row(rung.name, f"{rung.parameters:,}", *_prices(rung, plain), rung.how)
    return table


def _prices(rung: LadderRung, plain: float | None) -> list[str]:
    if rung.ms is None:
        return ["-", "-", "-"]
    speed = "-" if plain is None else f"{_three_digits(plain / rung.ms)}x"
    return [_three_digits(rung.ms), speed, "-" if rung.peak_bytes is None else scaled(rung.peak_bytes, 1024, BINARY)]


def _table(title: str, headings: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", padding=0)
    table.add_column("rung", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _far(differences: dict[str, float | None] | dict[str, float], key: str) -> str:
    """A difference; "-" where the rung does not hand out that stage."""
    return _number(differences[key]) if key in differences else "-"


def _number(far: float | None) -> str:
    return "wrong" if far is None else "0" if far == 0 else f"{far:.0e}"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _verdict(certified: list[LadderRung], agrees: bool) -> str:
    if agrees:
        return "Every rung that can run this layer computes the same function, within what rounding allows."
    wrong = [rung.name for rung in certified if rung.refused is None and not rung.agrees]
    return f"NOT the same function: {', '.join(wrong)}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), highlight=False, markup=False)
