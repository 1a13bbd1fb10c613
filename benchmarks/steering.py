"""Steering the verb model by its heads: tense and person, both ways, in three models of other seeds.

Of all pairs of lines that differ in will and would, or in I and you, half make the direction, and half judge it. Added
at every token; what moves is the divergence at all tokens but the last.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)


def run(runs: int) -> dict[str, Any]:
    rows = [row for seed in SEEDS for row in _judged(seed)]
    lines = ["seed  turned                 heads           success  random  elsewhere, nats"]
    for row in rows:
        shares = f"{row['success']:7.0%}  {row['control']:6.0%}  {row['elsewhere']:15.3f}"
        line = f"{row['seed']:4}  {row['turned']:21}  {' '.join(row['heads']):14}  {shares}"
        lines.append(line)
    return {"rows": rows, "table": "\n".join(lines)}


def _judged(seed: int) -> list[dict[str, Any]]:
    import headwise as hw
    from headwise.corpus.verbs import Cell, cells
    from headwise.models.open import open_folder

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verbs"
        hw.train(path, seed=seed)
        opened = open_folder(path)
    model, tokens = opened.model, opened.tokens
    assert tokens is not None
    sides: dict[str, list[tuple[str, str]]] = {"tense": [], "person": []}
    for cell in cells():
        if cell.tense == "future":
            other = Cell(cell.verb, "conditional", cell.person)
            sides["tense"].append((cell.line.rpartition(" ")[0], other.line.rpartition(" ")[0]))
        if cell.person == "I":
            sides["person"].append((f"{cell.english} =", f"{Cell(cell.verb, cell.tense, 'you').english} ="))
    rows = []
    for name, lines in sides.items():
        pairs = [(tokens.prompt(a), tokens.prompt(b)) for a, b in lines if len(a.split()) == len(b.split())]
        first, second = ([pair[i] for pair in pairs] for i in (0, 1))
        ends = {"tense": ("would", "will"), "person": ("you", "I")}[name]
        for clean, corrupted, turned in (
            (second, first, f"{ends[1]} to {ends[0]}"),
            (first, second, f"{ends[0]} to {ends[1]}"),
        ):
            found = hw.direction(model, clean, corrupted, seed=seed)
            row = {"seed": seed, "turned": turned, "heads": list(found.vectors)}
            row |= {"success": found.success.mean, "control": found.control.mean, "n": found.success.n}
            rows.append(row | {"elsewhere": found.elsewhere.mean})
    return rows
