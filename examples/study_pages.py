"""Write docs/claims.md and docs/bugs.md: what `headwise compare claims` and `headwise bugs all` measure.

    python examples/study_pages.py            # or with one of the names claims and bugs
    python examples/spanish_pages.py          # then the Spanish of the ledger

It takes hours. Models that lie finished in runs/compare and runs/bugs, of the commands too, are not trained again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headwise.files import write_whole
from headwise.lab.claims import run_claims
from headwise.lab.results import Comparison, Ledger, ledger_words
from headwise.table import Markup, Table, markdown_text
from headwise.teach.bugs import bug_named, catalogue
from headwise.teach.study import SEEDS, STEPS, Shown, study
from headwise.view.lab import metric_table, setting, spent

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "Measured by `{command}`, written by `python examples/study_pages.py`; never change it by hand."
BUGS = """\
Each bug of the catalogue in the verb model: trained with it and without, with the same seeds, batches and arithmetic.
The figure after ± is half the width of the 95 % interval (Student) of the differences seed by seed. The rule: **the
loss betrays** a bug if training fails, or if the loss of every seed is more than twice or less than half that of the
correct model. Whatever is less, nobody sees in a loss curve without the correct one beside it."""


def claims_page(ledger: Ledger) -> str:
    """The claims with their verdicts, then all that was measured for them, then the machine."""
    rows = [(claim.claim, claim.verdict, claim.measured) for claim in ledger.claims]
    rules = [f"- **{markdown_text(claim.claim)}** {markdown_text(claim.rule)}" for claim in ledger.claims]
    parts = [
        "# What is claimed, and what is so",
        WRITTEN.format(command=ledger.command),
        ledger_words()["introduction"],
        Table(("claim", "verdict", "measured"), rows).markdown(range(3)),
        "## How the verdicts are made",
        "\n".join(rules),
        "## Counted and timed",
        *map(_table, ledger.tables),
        *map(_comparison, ledger.comparisons),
        "## The machine",
        "\n".join(f"- {name}: {markdown_text(str(value))}" for name, value in ledger.machine.items()),
        f"Seeds {ledger.seeds[0]} to {ledger.seeds[-1]}. {spent(ledger)}",
    ]
    return "\n\n".join(parts) + "\n"


def _comparison(comparison: Comparison) -> str:
    parts = [f"## {comparison.question}", f"`headwise compare {comparison.name}`. {setting(comparison)}"]
    parts += [_table(metric_table(comparison, metric)) for metric in comparison.metrics]
    parts.append("\n".join(f"- {markdown_text(line)}" for line in (*comparison.verdicts, *comparison.notes)))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    note = f"\n\n{markdown_text(table.note)}" if table.note else ""
    return f"**{table.title}**\n\n{table.markdown()}{note}"


def bugs_page(shown: Sequence[Shown]) -> str:
    """Each bug, its effect on the loss, whether a curve betrays it, and what does."""
    rows = []
    for entry in shown:
        bug = bug_named(entry.bug)
        loss = "" if entry.loss is None else f"{entry.loss.mean:.3f}"
        far = entry.difference
        difference = "" if far is None else f"{far.mean:+.3f} ± {far.half_width:.3f}"
        verdict = {True: "**yes**", False: "no", None: "not trained"}[entry.betrayed]
        cells = (f"`{entry.bug}` {bug.text('wrong')}", loss, difference, verdict, bug.text("how"))
        rows.append([Markup(cell) for cell in cells])
    columns = ("bug", "loss", "difference", "does the loss betray it?", "what does")
    trained = sum(entry.betrayed is not None for entry in shown)
    hidden = sum(entry.betrayed is False for entry in shown)
    measured = f"Seeds 0 to {SEEDS - 1}, {STEPS} steps each, the verb model without qk-norm."
    parts = [
        "# What training hides",
        WRITTEN.format(command="headwise bugs all"),
        BUGS,
        f"{measured} Of {trained} bugs that were trained, the loss hides {hidden}.",
        Table(columns, rows).markdown((0, 3, 4)),
        "## Bug by bug",
        "\n".join(f"- `{entry.bug}`: {entry.sentence}." for entry in shown),
    ]
    return "\n\n".join(parts) + "\n"


def told(message: str, done: int, total: int) -> None:
    print(f"{done}/{total} {message}", flush=True)


def main() -> None:
    workers = os.cpu_count() or 1
    names = sys.argv[1:] or ["claims", "bugs"]
    if "claims" in names:
        ledger = run_claims(ROOT / "runs" / "compare", "headwise compare claims", workers=workers, report=told)
        write_whole(ROOT / "docs" / "claims.md", claims_page(ledger))
    if "bugs" in names:
        _, shown = study(list(catalogue()), ROOT / "runs" / "bugs", workers=workers, report=told)
        write_whole(ROOT / "docs" / "bugs.md", bugs_page(shown))


if __name__ == "__main__":
    main()
