"""The ladder in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.records import LEAVES, STAGES, Ladder, LadderRung
from headwise.table import Cell, Table, amount, shown
from headwise.view import Screen
from headwise.words import Note, labelled

MISSING = "-"  # stands where a table has no number


def print_ladder(screen: Screen, ladder: Ladder) -> None:
    """The certificate, of values and of gradients, then the costs; below them why a rung has no number."""
    screen.tell("ladder.heading", count=len(ladder.rungs), sizes=ladder.sizes.note, seed=ladder.seed)
    if ladder.note is not None:
        screen.say(ladder.note)
    screen.say("")
    _print_values(screen, ladder)
    _print_gradients(screen, ladder)
    _print_costs(screen, ladder)
    for rung in ladder.rungs:
        if rung.not_timed is not None:
            screen.tell("ladder.not_timed", rung=labelled("ladder", rung.name), why=rung.not_timed)
    screen.tell("ladder.medians")
    screen.tell("ladder.book")
    wrong = [labelled("ladder", rung.name) for rung in ladder.rungs if rung.refused is None and not rung.agrees]
    if ladder.agrees:
        screen.tell("ladder.all_agree")
    else:
        screen.tell("ladder.differ", rungs=wrong)


def _print_values(screen: Screen, ladder: Ladder) -> None:
    def agrees(rung: LadderRung) -> str:
        if rung.refused is not None:
            return MISSING
        return "yes" if rung.agrees else "NO"

    rows = []
    for rung in ladder.rungs:
        rows.append([rung.name, *(_far(rung.differences, key) for key in STAGES), agrees(rung)])
    rows.append(["allowed", *(_far(ladder.tolerances, key) for key in STAGES), ""])
    Table(("rung", *STAGES, "agrees"), rows, Note.of("ladder.certificate")).print(screen, last=1)


def _print_gradients(screen: Screen, ladder: Ladder) -> None:
    rows = []
    for rung in ladder.rungs:
        absent, output = "none", f"{_number(rung.timed_difference)} {rung.dtype}"  # none: it has no gradients
        if rung.refused is not None:  # it cannot run this layer
            absent = output = MISSING
        rows.append([rung.name, *(_far(rung.gradients or {}, key, absent) for key in LEAVES), output])
    formats = sorted({rung.dtype for rung in ladder.rungs}, reverse=True)  # float64 first
    for dtype in formats:
        # Gradients are compared in float64 alone; only the output is compared in the format that was timed, too.
        cells = [_far(ladder.tolerances, key) if dtype == "float64" else "" for key in LEAVES]
        rows.append(["allowed", *cells, f"{_far(ladder.tolerances, f'timed {dtype}')} {dtype}"])
    title = Note.of("ladder.certificate_of_gradients")
    Table(("rung", *LEAVES, "output as timed"), rows, title).print(screen, last=len(formats))


def _print_costs(screen: Screen, ladder: Ladder) -> None:
    rows: list[list[Cell]] = []
    for rung in ladder.rungs:
        plain, ms = ladder.rungs[0].ms, rung.ms  # the first rung, plain loops, is what speed is held against
        speed = MISSING if plain is None or ms is None else f"{shown(plain / ms)}x"
        memory = MISSING if rung.peak_bytes is None else amount(rung.peak_bytes)
        rows.append([rung.name, rung.parameters, MISSING if ms is None else ms, speed, memory, rung.how])
    title = Note.of("ladder.costs", sizes=ladder.sizes.note, threads=ladder.threads)
    # Words stand at the left, in columns 0 and 5.
    Table(("rung", "parameters", "ms", "speed", "memory", "how"), rows, title).print(screen, (0, 5))


def _far(differences: Mapping[str, float | None], key: str, absent: str = MISSING) -> str:
    """A difference, or an allowed one; `absent` stands where the rung does not hand out that stage."""
    return _number(differences[key]) if key in differences else absent


def _number(far: float | None) -> str:
    if far is None:  # what the rung gave was not finite, or of another shape
        return "wrong"
    return f"{far:.0e}" if far else "0"  # 3e-16: of a difference the power of ten matters
