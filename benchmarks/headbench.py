"""HeadBench: how often is a method right about which heads did it? On models whose circuit is known.

`python -m benchmarks headbench` builds the models from seeds, tries each of them, tries every method on each, and
writes what came out to docs/truth.md. `bench` tries a method of one's own.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from benchmarks.headbench_checks import faults
from benchmarks.headbench_methods import CLEAR, METHODS, Marks, Method, path_marks, tried
from benchmarks.headbench_models import Known
from benchmarks.headbench_page import page
from benchmarks.headbench_tasks import HEADLESS, TASKS, known, numbers
from benchmarks.headbench_trained import LESSONS, trained

PAGE = Path(__file__).resolve().parents[1] / "docs" / "truth.md"
WORKERS = 4
HELD_OUT = 200  # pairs of texts on which a model must be right, beside those that methods are given


def bench(method: Method, tasks: Sequence[str] | None = None) -> dict[str, Marks]:
    """The marks of a method of one's own, by task: the mean over the models of each."""
    result = {}
    for t, task in enumerate(TASKS):
        if tasks is None or task.name in tasks:
            result[task.name] = mean([tried(known(t, f), method) for number, f in numbers() if number == t])
    return result


def mean(rows: Sequence[Marks]) -> Marks:
    return Marks(*(statistics.fmean(column) for column in zip(*rows, strict=True)))


def one_model(number: tuple[int, int]) -> dict[str, Any]:
    """Everything about one model, in a process of its own; (-1, n) is the nth of those that were trained."""
    began = time.process_time()
    torch.set_num_threads(1)
    model = trained(number[1]) if number[0] < 0 else known(*number)
    task = next(task for task in TASKS if task.name == model.task)
    rng = random.Random(sum(number))
    held_out = [task.pair(rng) for _ in range(HELD_OUT)]
    row: dict[str, Any] = {"name": model.name, "task": model.task, "form": model.form}
    row["pairs"] = len(model.pairs)
    row["faults"] = faults(model, held_out)
    row["marks"] = {name: tried(model, method) for name, method in METHODS.items()}
    row["paths"] = path_marks(model) if model.paths else {}
    if model.needed:
        both = model.circuit | model.needed
        row["breaks"] = {name: tried(model, method, both) for name, method in METHODS.items()}
    row["alike"] = [(max(_lost(model, [head]) for head in group), _lost(model, group)) for group in model.alike]
    if model.spare:
        spare = next(iter(model.spare))
        row["spare"] = {n: abs(model.effects(model.pairs, n)[spare]) for n in (None, 8)}
    return row | {"seconds": time.process_time() - began}


@torch.no_grad()
def _lost(model: Known, silent: Iterable[str]) -> float:
    """What the answer loses in log-probability without these heads, in nats, the mean over the texts."""
    clean, _, target = model.texts()
    whole = model.model(clean)[:, -1].log_softmax(-1).gather(1, target[:, :1])
    with hw.ablate(model.model, silent):
        return float((whole - model.model(clean)[:, -1].log_softmax(-1).gather(1, target[:, :1])).mean())


def claims(number: tuple[int, int]) -> dict[str, Any]:
    """How many heads are named, by all texts and by each, where feed-forwards do the work and no head does."""
    began = time.process_time()
    torch.set_num_threads(1)
    model = known(*number, tasks=HEADLESS)
    row: dict[str, Any] = {"name": model.name}
    for method, contexts in (("why", None), ("contexts", 8)):
        counts = []
        for pairs in (model.pairs, *([pair] for pair in model.pairs)):
            effects = model.effects(pairs, contexts).values()
            counts.append(sum(abs(effect) >= CLEAR for effect in effects))
        row[method] = counts[0], counts[1:]
    return row | {"seconds": time.process_time() - began}


def run(runs: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        models = pool.map(one_model, [*numbers(), *((-1, n) for n in range(len(LESSONS)))], chunksize=1)
        headless = pool.map(claims, numbers(HEADLESS), chunksize=1)
    seconds = sum(row["seconds"] for row in [*models, *headless])
    sound = [row for row in models if not row["faults"]]  # one that is not what is said of it tells nothing
    by_method: dict[str, list[Marks]] = defaultdict(list)
    for row in sound:
        for name, marks in row["marks"].items():
            by_method[name].append(marks)
    PAGE.write_text(page(sound, headless, seconds, HELD_OUT), encoding="utf-8")
    table = "\n".join(
        f"{name:55} AUROC {marks.auroc:.3f}  precision {marks.precision:.3f}  exact {marks.exact:.0%}"
        for name, marks in ((name, mean(rows)) for name, rows in by_method.items())
    )
    for row in models:
        for fault in row["faults"]:
            print(f"{row['name']}: {fault}", file=sys.stderr)
    return {"models": models, "headless": headless, "seconds": seconds, "table": table}
