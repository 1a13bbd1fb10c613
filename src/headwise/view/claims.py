"""The ledger as a Markdown page, from its record alone."""

from __future__ import annotations

from headwise.lab.compare.results import Comparison, Ledger, Table, ledger_words
from headwise.view.compare import metric_table, setting, shown, spent


def claims_page(ledger: Ledger) -> str:
    """The claims with their verdicts, then all that was measured for them, then the machine."""
    rows = tuple((claim.claim, claim.verdict, claim.measured) for claim in ledger.claims)
    rules = [f"- **{_text(claim.claim)}** {_text(claim.rule)}" for claim in ledger.claims]
    parts = [
        "# What is claimed, and what is so",
        f"Written by `{ledger.command}`; change it by running that, never by hand.",
        ledger_words()["introduction"],
        _grid(("claim", "verdict", "measured"), rows, words=3),
        "## How the verdicts are made",
        "\n".join(rules),
        "## Counted and timed",
        *map(_table, ledger.tables),
        *map(_comparison, ledger.comparisons),
        "## The machine",
        "\n".join(f"- {name}: {_text(str(value))}" for name, value in ledger.machine.items()),
        f"Seeds {ledger.seeds[0]} to {ledger.seeds[-1]}. {spent(ledger)}",
    ]
    return "\n\n".join(parts) + "\n"


def _comparison(comparison: Comparison) -> str:
    parts = [f"## {comparison.question}", f"`headwise compare {comparison.name}`. {setting(comparison)}"]
    parts += [_table(metric_table(comparison, metric)) for metric in comparison.metrics]
    parts.append("\n".join(f"- {_text(line)}" for line in (*comparison.verdicts, *comparison.notes)))
    return "\n\n".join((*parts, *map(_table, comparison.tables)))


def _table(table: Table) -> str:
    rows = tuple(tuple(map(shown, row)) for row in table.rows)
    note = f"\n\n{_text(table.note)}" if table.note else ""
    return f"**{table.title}**\n\n{_grid(table.columns, rows, words=1)}{note}"


def _grid(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...], words: int) -> str:
    """A Markdown table whose first `words` columns stand at the left, the others at the right."""
    rules = ["---" if place < words else "---:" for place in range(len(columns))]
    lines = [columns, rules, *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """What Markdown would take for markup, escaped."""
    for sign in ("\\", "|", "*", "<", "_"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
