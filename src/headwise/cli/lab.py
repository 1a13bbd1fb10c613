"""`headwise compare` and `ladder`: what the lab measures."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.app import (
    UNITS,
    Count,
    File,
    Folder,
    Progress,
    Seed,
    SomeCount,
    check_outputs,
    command,
    needs_torch,
    print_json,
    screen,
    units_kept_in,
    wants_json,
)
from headwise.corpus.sources import Sources
from headwise.files import write_whole
from headwise.words import refusal

if TYPE_CHECKING:
    from headwise.lab.results import Comparison

FOLDER = Path("runs") / "compare"  # keeps the finished work of `compare` where --out says nothing
SEEDS = 5  # of `compare`: more make the intervals of the differences narrower, and take longer


@command()
def compare(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT")],
    text: File = None,
    seeds: Annotated[int, typer.Option(min=2)] = SEEDS,  # one seed alone has no interval
    steps: SomeCount = None,
    out: Folder = FOLDER,
    workers: SomeCount = None,
    html: File = None,
) -> None:
    """Measure what courses claim about heads, over several seeds.

    Each arm of an experiment is trained with each seed; the verdict comes from the interval of the differences. After
    Ctrl-C the same command goes on where it was. `claims` runs everything and judges each claim.
    """
    check_outputs([text], {"--out": (out, UNITS)}, html=html)
    if text is not None:
        Sources([text])  # raises HeadwiseError for a text that is not there, before torch is loaded
    with needs_torch():
        from headwise.lab.claims import run_claims
        from headwise.lab.compare import CLAIMS, find_experiment
        from headwise.lab.compare import compare as compared
    from headwise.lab.results import Ledger
    from headwise.view.lab import page_html, print_comparison, print_ledger

    chosen = None if experiment == CLAIMS else find_experiment(experiment)  # None: all of them
    if chosen is None and text is not None:
        raise refusal("claims_text")
    count = workers or os.cpu_count() or 1  # cpu_count is None where the system does not tell
    with units_kept_in(out) as report:
        if chosen is None:
            record: Comparison | Ledger = run_claims(out, _command(seeds, steps), seeds, steps, count, report)
        else:
            record = compared([chosen], out, seeds, steps, text, count, report)[0]  # one for each experiment
    if html is not None:
        write_whole(html, page_html(record, screen.lang))
    if wants_json():
        print_json("ledger" if isinstance(record, Ledger) else "compare", vars(record))
        return
    if isinstance(record, Ledger):
        print_ledger(screen, record)
    else:
        print_comparison(screen, record)
    if html is not None:
        screen.tell("tell.written", path=html)


def _command(seeds: int, steps: int | None) -> str:
    """What to type to make the same ledger again, as it says itself; --out and --workers do not change what comes."""
    options = []
    if seeds != SEEDS:
        options += ["--seeds", str(seeds)]
    if steps is not None:
        options += ["--steps", str(steps)]
    return shlex.join(["headwise", "compare", "claims", *options])


@command()
def ladder(
    width: Count = 64,
    heads: Count = 4,
    kv_heads: SomeCount = None,
    tokens: Count = 16,
    batch: Count = 1,
    seed: Seed = 0,
) -> None:
    """Compare loop and fast kernel on one draw, then time them.

    One set of weights and one input go through every way to build the layer, from plain loops to the fused kernel.
    First the largest difference at each stage and of each gradient; then, only for rungs that agree, time and memory.
    Exit code 1 when one does not agree.
    """
    with needs_torch():
        from headwise.lab.ladder import run_ladder
    from headwise.view.lab import print_ladder

    with Progress("drawing weights") as progress:
        sizes = (width, heads, kv_heads, tokens, batch)  # kv_heads None: as many as heads
        record = run_ladder(*sizes, seed=seed, report=lambda rung, done, total: progress("rung", done, total, rung))
    if wants_json():
        print_json("ladder", vars(record))
    else:
        print_ladder(screen, record)
    if not record.agrees:
        raise typer.Exit(1)
