"""docs/truth.md: what `python -m benchmarks headbench` measured, and which method to trust for which question."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WHY, TAKES, EITHER, BESIDE, FAST, ZERO, MEAN = (
    "`why`, `patch`: what a head brings",
    "`patch`, texts exchanged: what it takes",
    "`patch(contexts=0)`: brings or takes",
    "`patch(contexts=8)`",
    "`patch(fast=True)`",
    "`ablation`, zero",
    "`ablation`, mean",
)
SHARES = (WHY, TAKES, EITHER, BESIDE, FAST)  # methods whose scores are shares of the difference

Rows = Sequence[dict[str, Any]]


TEMPLATE = Path(__file__).with_name("headbench_page.md")
TWICE = "two lookups, each by either of two"


def page(models: Rows, headless: Rows, seconds: float, held_out: int) -> str:
    needed = [row for row in models if "breaks" in row]
    spares = [row["spare"] for row in models if "spare" in row]
    fields: dict[str, Any] = {
        "n_models": len(models),
        "n_tasks": len(_grouped(models, "task")),
        "n_forms": len({row["form"].removeprefix("trained, ") for row in models}),
        "n_trained": sum(row["form"].startswith("trained") for row in models),
        "minutes": f"{seconds / 60:.0f}",
        "n_pairs": models[0]["pairs"],
        "held_out": 2 * held_out,
        "why": f"{_mean(row['marks'][WHY].auroc for row in models):.3f}",
        "why_best": f"{_mean(_is_best(row['marks'], WHY) for row in models):.0%}",
        "over": [f"{_mean(row['marks'][name].named for row in models):.0%}" for name in (WHY, EITHER, BESIDE)],
        "by_method": _by_method(models),
        "by_task": _by_task(models),
        "by_form": _by_form(models),
        "smallest": [f"{_smallest(models, name):.2f}" for name in (BESIDE, WHY, EITHER)],
        "n_needed": len(needed),
        "breaks": [f"{_mean(row['breaks'][name].auroc for row in needed):.2f}" for name in (MEAN, ZERO, WHY)],
        "alone": [f"{nats:.2f}" for nats in _alike(models)],
        "n_spares": len(spares),
        "spare": [f"{_mean(spare[n] for spare in spares):.2f}" for n in (None, 8)],
        "n_paths": sum(bool(row["paths"]) for row in models),
        "paths": _paths(models),
        "n_headless": len(headless),
        "named": [sum(row[method][0] > 0 for row in headless) for method in ("why", "contexts")],
        "n_prompts": sum(len(row["why"][1]) for row in headless),
        "prompts": [sum(n > 0 for row in headless for n in row[method][1]) for method in ("why", "contexts")],
    }
    return TEMPLATE.read_text(encoding="utf-8").format(**fields)


def _by_method(models: Rows) -> str:
    rows, row_pairs = [], models[0]["pairs"]
    for name in models[0]["marks"]:
        marks = [row["marks"][name] for row in models]
        means = [statistics.fmean(column) for column in zip(*marks, strict=True)]
        auroc, precision, exact, over, _, texts, seconds = means
        bar = f"{over:.0%}" if name in SHARES else ""
        best = _mean(_is_best(row["marks"], name) for row in models)
        rows.append(
            f"| {name} | {auroc:.3f} | {precision:.3f} | {exact:.0%} | {bar} | {best:.0%} | {texts / row_pairs:.0f} | "
            f"{seconds:.2f} |"
        )
    head = "| method | AUROC | average precision | exact | named | best or tied | texts | seconds |"
    return "\n".join([head, "|" + " --- |" * 8, *rows])


def _by_task(models: Rows) -> str:
    shown = {
        "`why`": WHY, "takes": TAKES, "contexts": BESIDE, "fast": FAST,
        "attribute": "`attribute`", "less corrupted": "`attribute`, clean less corrupted", "zero": ZERO, "mean": MEAN,
        "importance": "`importance`", "named by `why`": WHY, "by contexts": BESIDE,
    }  # fmt: skip
    rows = [f"| task | {' | '.join(shown)} |", "|" + " --- |" * (len(shown) + 1)]
    for task, members in _grouped(models, "task").items():
        cells = []
        for title, name in shown.items():
            if "by" in title.split():
                cells.append(f"{_mean(row['marks'][name].named for row in members):.0%}")
            else:
                cells.append(f"{_mean(row['marks'][name].auroc for row in members):.2f}")
        rows.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _by_form(models: Rows) -> str:
    names = (WHY, BESIDE, FAST, "`attribute`", MEAN)
    rows = [f"| form | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
    for form, members in _grouped(models, "form").items():
        cells = (f"{_mean(row['marks'][name].auroc for row in members):.3f}" for name in names)
        rows.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _paths(models: Rows) -> str:
    members = [row["paths"] for row in models if row["paths"]]
    rows = ["| method | AUROC | average precision | exact |", "| --- | --- | --- | --- |"]
    for name in members[0]:
        auroc, precision, exact, *_ = (
            statistics.fmean(column) for column in zip(*(row[name] for row in members), strict=True)
        )
        rows.append(f"| {name} | {auroc:.3f} | {precision:.3f} | {exact:.0%} |")
    return "\n".join(rows)


def _alike(models: Rows) -> list[float]:
    """What the answer loses without one of two heads that stand in for each other, and without both, in nats."""
    pairs = [pair for row in models if row["task"] == "two lookups, either will do" for pair in row["alike"]]
    return [_mean(column) for column in zip(*pairs, strict=True)]


def _smallest(models: Rows, name: str) -> float:
    hard = [row["marks"][name].smallest for row in models if row["task"] == TWICE]
    return statistics.median(hard)


def _is_best(marks: dict[str, Any], name: str) -> bool:
    return bool(marks[name].auroc >= max(each.auroc for each in marks.values()))


def _grouped(rows: Rows, by: str) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row[by]].append(row)
    return groups


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
