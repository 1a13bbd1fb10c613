"""What the lab measures: comparisons and the ledger of claims, in the terminal and as an HTML page; and the ladder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from headwise.lab.results import Comparison, Ledger, Metric
from headwise.records import LEAVES, STAGES, Ladder, LadderRung, plain_data
from headwise.table import Cell, Table, amount, escaped, shown
from headwise.view import Screen
from headwise.view.page import frame, json_block, page, word
from headwise.words import Facts, Note, labelled

MISSING = "-"  # stands where a table has no number


def print_comparison(screen: Screen, comparison: Comparison) -> None:
    """The question, a table for each metric, the verdicts and notes."""
    screen.say(f"{comparison.name}: {screen.spoken(comparison.question)}")
    screen.say(setting(comparison))
    for metric in comparison.metrics:
        screen.say("")
        screen.show(metric_table(comparison, metric), "comparison")
    for line in (*comparison.verdicts, *comparison.notes):
        screen.say(line)


def print_ledger(screen: Screen, ledger: Ledger) -> None:
    """Claim by claim: the verdict, what was measured, and the rule between the two."""
    for claim in ledger.claims:
        for line in (f"{claim.verdict.upper()}: {claim.claim}", f"  {claim.measured}", f"  {claim.rule}", ""):
            screen.say(line)
    screen.say(spent(ledger))


def setting(comparison: Comparison) -> Note:
    """Data, steps and seeds, the first to the last, in a line."""
    facts = {"data": comparison.data, "steps": f"{comparison.steps:,}"}
    return Note.of("comparison.setting", **facts, first=comparison.seeds[0], last=comparison.seeds[-1])


def spent(ledger: Ledger) -> str:
    """How long the call took; no `Note`, as the claims beside it are in English alone."""
    return f"Took {ledger.wall_seconds / 60:.1f} minutes, and {ledger.cpu_seconds / 60:.1f} minutes of processor time."


def metric_table(comparison: Comparison, metric: Metric) -> Table:
    """The arms under one metric: means with intervals, and differences from the first arm."""
    rows: list[tuple[Cell, ...]] = []
    for arm in comparison.arms:
        name = Note.of("comparison.with_about", name=arm.name, about=arm.about) if arm.about else arm.name
        score = arm.scores.get(metric.name)
        if score is None:  # its training failed
            rows.append((name, arm.parameters, "diverged", *[MISSING] * 3))
            continue
        row: list[Cell] = [name, arm.parameters, f"{score.mean.mean:.3f}", f"{score.mean.half_width:.3f}"]
        far = score.difference
        if far is None:  # the others are compared with this one
            rows.append((*row, "the first", MISSING))
        else:
            # The z of these formats turns -0.000 into +0.000.
            interval = Note.of("comparison.from_to", low=f"{far.low:+z.3f}", high=f"{far.high:+z.3f}")
            rows.append((*row, f"{far.mean:+z.3f}", interval))
    columns = ("arm", "parameters", "mean", "±", "difference", "95 % interval")
    title = Note.of("comparison.with_about", name=metric.words, about=metric.unit) if metric.unit else metric.words
    return Table(columns, tuple(rows), title)


def page_html(record: Comparison | Ledger, lang: str = "en") -> str:
    """One comparison, or the ledger with all of its comparisons. What was measured stays as the record says it."""
    if isinstance(record, Comparison):
        title, lede = record.question, str(setting(record))  # in English, as the record has them
        heading = f'<h1 lang="en">{escaped(title)}</h1>'
        data: Facts = {"comparisons": [_comparison_data(record)]}
    else:
        title, lede, heading = word("compare.ledger", "title"), spent(record), word("compare.ledger", "h1")
        data = {
            "claims": record.claims,
            "tables": list(map(_table_data, record.tables)),
            "comparisons": list(map(_comparison_data, record.comparisons)),
            "facts": {"command": record.command, **record.machine, "seeds": f"{record.seeds[0]} to {record.seeds[-1]}"},
        }
    return page(
        "compare",
        frame("compare.html", heading=heading, lede=escaped(lede)),
        title=title,
        styles=("compare.css",),
        script="compare.js",
        data={"record": json_block(plain_data(data))},
        words=("compare",),
        lang=lang,
    )


def _comparison_data(comparison: Comparison) -> Facts:
    metrics = [
        {"name": metric.name, "words": metric.words, "table": _table_data(metric_table(comparison, metric))}
        for metric in comparison.metrics
    ]
    return {**asdict(comparison), "setting": setting(comparison), "metrics": metrics}


def _table_data(table: Table) -> Facts:
    return {**asdict(table), "rows": [list(map(shown, row)) for row in table.rows]}


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
    screen.show(Table(("rung", *STAGES, "agrees"), rows, Note.of("ladder.certificate")), "ladder", last=1)


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
    screen.show(Table(("rung", *LEAVES, "output as timed"), rows, title), "ladder", last=len(formats))


def _print_costs(screen: Screen, ladder: Ladder) -> None:
    rows: list[list[Cell]] = []
    for rung in ladder.rungs:
        plain, ms = ladder.rungs[0].ms, rung.ms  # the first rung, plain loops, is what speed is held against
        speed = MISSING if plain is None or ms is None else f"{shown(plain / ms)}x"
        memory = MISSING if rung.peak_bytes is None else amount(rung.peak_bytes)
        rows.append([rung.name, rung.parameters, MISSING if ms is None else ms, speed, memory, rung.how])
    title = Note.of("ladder.costs", sizes=ladder.sizes.note, threads=ladder.threads)
    # Words stand at the left, in columns 0 and 5.
    screen.show(Table(("rung", "parameters", "ms", "speed", "memory", "how"), rows, title), "ladder", (0, 5))


def _far(differences: Mapping[str, float | None], key: str, absent: str = MISSING) -> str:
    """A difference, or an allowed one; `absent` stands where the rung does not hand out that stage."""
    return _number(differences[key]) if key in differences else absent


def _number(far: float | None) -> str:
    if far is None:  # what the rung gave was not finite, or of another shape
        return "wrong"
    return f"{far:.0e}" if far else "0"  # 3e-16: of a difference the power of ten matters
