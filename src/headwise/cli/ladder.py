"""`headwise ladder`: how far each rung is from the plain loop, and what those that agree cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer
from rich.console import Console

from headwise.cli.app import Progress, command, language, needs_torch, out, print_json, wants_json
from headwise.records import LEAVES, STAGES, Ladder, LadderRung
from headwise.table import BINARY, Cell, Table, say, scaled
from headwise.words import Note, phrase, said, translator

Speak = Callable[[str], str]


@command()
def ladder(
    width: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    tokens: int = 16,
    batch: int = 1,
    seed: int = 0,
) -> None:
    """Compare loop and fast kernel on one draw, then time them.

    One set of weights and one input go through every way to build the layer, from plain loops to the fused kernel.
    First the largest difference at each stage and of each gradient; then, only for rungs that agree, time and memory.
    Exit code 1 when one does not agree.
    """
    with needs_torch():
        from headwise.lab.ladder import run_ladder
    with Progress("drawing weights") as progress:
        sizes = (width, heads, kv_heads, tokens, batch)
        record = run_ladder(*sizes, seed=seed, report=lambda rung, done, total: progress("rung", done, total, rung))
    if wants_json():
        print_json("ladder", vars(record))
    else:
        print_ladder(out, record, language())
    if not record.agrees:
        raise typer.Exit(1)


def print_ladder(console: Console, ladder: Ladder, lang: str = "en") -> None:
    """The certificate, of values and of gradients, then the costs; below them why a rung has no number."""
    sizes = ladder.sizes.note
    say(console, phrase("ladder.heading", lang, count=len(ladder.rungs), sizes=sizes, seed=ladder.seed))
    if ladder.note is not None:
        say(console, said(ladder.note, lang))
    say(console, "")
    speak = translator("ladder", lang)
    _print_values(console, ladder, speak)
    _print_gradients(console, ladder, speak)
    _print_costs(console, ladder, speak)
    for rung in ladder.rungs:
        if rung.not_timed is not None:
            say(console, phrase("ladder.not_timed", lang, rung=speak(rung.name), why=rung.not_timed))
    say(console, phrase("ladder.medians", lang))
    say(console, phrase("ladder.book", lang))
    wrong = [speak(rung.name) for rung in ladder.rungs if rung.refused is None and not rung.agrees]
    if ladder.agrees:
        say(console, phrase("ladder.all_agree", lang))
    else:
        say(console, phrase("ladder.differ", lang, rungs=", ".join(wrong)))


def _print_values(console: Console, ladder: Ladder, speak: Speak) -> None:
    def agrees(rung: LadderRung) -> str:
        return "-" if rung.refused is not None else "yes" if rung.agrees else "NO"

    rows = [[rung.name, *(_far(rung.differences, key) for key in STAGES), agrees(rung)] for rung in ladder.rungs]
    rows.append(["allowed", *(_far(ladder.tolerances, key) for key in STAGES), ""])
    title = Note.of("ladder.certificate")
    Table(("rung", *STAGES, "agrees"), rows, title).print(console, last=1, speak=speak)


def _print_gradients(console: Console, ladder: Ladder, speak: Speak) -> None:
    rows = []
    for rung in ladder.rungs:
        absent = "none" if rung.refused is None else "-"
        output = f"{_number(rung.timed_difference)} {rung.dtype}" if rung.refused is None else "-"
        rows.append([rung.name, *(_far(rung.gradients or {}, key, absent) for key in LEAVES), output])
    formats = sorted({rung.dtype for rung in ladder.rungs}, reverse=True)
    for dtype in formats:
        cells = [_far(ladder.tolerances, key) if dtype == "float64" else "" for key in LEAVES]
        rows.append(["allowed", *cells, f"{_far(ladder.tolerances, f'timed {dtype}')} {dtype}"])
    title = Note.of("ladder.certificate_of_gradients")
    Table(("rung", *LEAVES, "output as timed"), rows, title).print(console, last=len(formats), speak=speak)


def _print_costs(console: Console, ladder: Ladder, speak: Speak) -> None:
    rows: list[list[Cell]] = []
    for rung in ladder.rungs:
        plain, ms, peak = ladder.rungs[0].ms, rung.ms, rung.peak_bytes
        speed = "-" if plain is None or ms is None else f"{_three_digits(plain / ms)}x"
        memory = "-" if peak is None else scaled(peak, 1024, BINARY)
        rows.append([rung.name, rung.parameters, _three_digits(ms), speed, memory, rung.how])
    title = Note.of("ladder.costs", sizes=ladder.sizes.note, threads=ladder.threads)
    Table(("rung", "parameters", "ms", "speed", "memory", "how"), rows, title).print(console, (0, 5), speak=speak)


def _far(differences: Mapping[str, float | None], key: str, absent: str = "-") -> str:
    """A difference; or what stands where the rung does not hand out that stage."""
    return _number(differences[key]) if key in differences else absent


def _number(far: float | None) -> str:
    return "wrong" if far is None else "0" if far == 0 else f"{far:.0e}"


def _three_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
