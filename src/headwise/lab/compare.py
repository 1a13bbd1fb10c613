"""Run experiments, side by side, and gather their units into comparisons.

A unit is one model: an arm of an experiment with one seed. Each is kept as soon as it is done, and none is done twice:
its file is named by a digest of all that decides its scores. Experiments that share an arm share its units, and a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import Kept, digest, read_json, write_whole
from headwise.intervals import interval_of
from headwise.lab.experiments import (
    HEADS,
    OUTPUT_PROJECTION,
    ROLES_OF_HEADS,
    SCALE,
    SHARING,
    TWO_LOOKUPS,
    Arm,
    Experiment,
    Report,
    Scored,
    Unit,
    run_unit,
)
from headwise.lab.results import ArmResult, Comparison, Metric, Score, paired, sentence
from headwise.records import from_json
from headwise.words import Note, known, refusal, unknown


class Store:
    """A folder of finished units, one JSON file for each. It needs no lock, since files appear whole."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise refusal("out_is_file", folder=folder)
        self.folder = Kept(folder, ["unit-*.json"]).folder  # cleared of what killed processes left half-written

    def path(self, unit: Unit) -> Path:
        # 16 hexadecimal digits keep the name short. Should two units ever meet in them, `read` finds another key.
        return self.folder / f"unit-{digest(unit.key)[:16]}.json"

    def read(self, unit: Unit) -> Scored | None:
        """What the unit gave; None where it was not run yet. HeadwiseError where its file was changed afterwards."""
        path = self.path(unit)
        if not path.exists():
            return None
        try:
            saved = from_json(dict[str, Any], read_json(path))
            if saved.get("key") != json.loads(json.dumps(unit.key)):  # as JSON has it: its tuples are lists
                raise HeadwiseError("it is another unit")
            if saved.get("sha256") != digest(saved.get("scored")):
                raise HeadwiseError("its scores are not those that were written")
            scored: Scored = from_json(Scored, saved.get("scored"), "scored")
        except HeadwiseError as error:
            raise refusal("damaged", path=path, error=error) from None
        return scored

    def write(self, unit: Unit, scored: Scored) -> None:
        scores = asdict(scored)
        document = {"unit": unit.label, "key": unit.key, "scored": scores, "sha256": digest(scores)}
        write_whole(self.path(unit), json.dumps(document, indent=2) + "\n")


def run_units(units: Sequence[Unit], store: Store, workers: int, report: Report) -> dict[Path, Scored]:
    """All units, from the store or run now in `workers` processes of one thread: the unit's file -> its scores."""
    files = {store.path(unit): unit for unit in units}  # units that experiments share have one file, and run once
    finished: dict[Path, Scored] = {}
    for path, unit in files.items():
        scored = store.read(unit)
        if scored is not None:
            finished[path] = scored
    missing = [unit for path, unit in files.items() if path not in finished]
    if finished:
        before = Note.of("comparison.units_before", count=len(finished), folder=store.folder)
        report(before, len(finished), len(files))

    def finish(unit: Unit, scored: Scored) -> None:
        store.write(unit, scored)
        finished[store.path(unit)] = scored
        metric = unit.experiment.metrics[0]
        result = scored.failure or Note.of(  # a Note is a string
            "comparison.scored",
            metric=metric.words,
            score=f"{scored.scores[metric.name]:.3f}",
            seconds=f"{scored.cpu_seconds:.1f}",
        )
        report(Note.of("comparison.unit_done", unit=unit.label, result=result), len(finished), len(files))

    if workers == 1 or len(missing) <= 1:  # in this process: another one would have to load torch first
        for unit in missing:
            finish(unit, run_unit(unit))
        return finished
    with _processes(min(workers, len(missing))) as pool:
        with _deaf_to_interrupts():
            futures = {pool.submit(run_unit, unit): unit for unit in missing}
        for future in as_completed(futures):
            try:
                scored = future.result()
            except BrokenProcessPool:
                raise HeadwiseError(
                    "a worker process died, perhaps for want of memory; finished units are kept: "
                    "run the same command again, with workers=1"
                ) from None
            finish(futures[future], scored)
    return finished


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with this block, in the middle of a unit where it is left by an error or Ctrl-C."""
    before = set(multiprocessing.active_children())  # other children of the caller, which are left alone
    # Not forked: a fork of a process whose torch has run threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:  # KeyboardInterrupt, too
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """In a worker: a thread that waits for the end of the process that started it, and ends the worker then.

    For a parent that is killed (SIGKILL, want of memory): it cannot run the clean-up of `_processes`.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # it is None in the main process alone

    def wait() -> None:
        parent.join()
        # At once, in the middle of a unit: nobody is left to take its scores. sys.exit would end this thread alone.
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that start in this block ignore Ctrl-C, which reaches all of a terminal's: the parent decides.

    It is enough around `submit`: with "spawn" the pool starts its workers inside the calls of it, none later, and a new
    process inherits that SIGINT is ignored (Python sets its own handler only where it is not).
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


CLAIMS = "claims"  # what `headwise compare` takes besides: all experiments, and the ledger made of them
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (HEADS, SHARING, OUTPUT_PROJECTION, SCALE, TWO_LOOKUPS, ROLES_OF_HEADS)
}
SEEDS = 5  # a round choice: more make the intervals smaller, and take as many times as long
FEWEST_SEEDS = 2  # one says nothing about the spread


def find_experiment(name: str) -> Experiment:
    """The experiment of that name, or an error that offers the nearest ones."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    raise unknown(Note.of("refused.no_experiment", name=repr(name)), name, (*EXPERIMENTS, CLAIMS))


def silent(text: str, done: int, total: int) -> None:
    """A report that goes nowhere."""


def compare(
    experiments: Sequence[Experiment],
    out: Path,
    n_seeds: int = SEEDS,
    steps: int | None = None,
    text: Path | None = None,
    workers: int = 1,
    report: Report = silent,
) -> tuple[Comparison, ...]:
    """Run experiments, or what of them is not in the folder `out` yet, and compare the arms of each.

    out      folder of finished units; it is made where it is not there
    n_seeds  seeds 0 to n_seeds - 1; at least 2
    steps    updates of each model; default: the recipe's
    text     a UTF-8 file instead of the built-in data
    workers  processes side by side; the results do not depend on it. With several, call it in a script under
             `if __name__ == "__main__":`, since each process imports the script again
    report   is told what happened, how many units are done, and how many there are

    HeadwiseError where an argument does not fit, the text is too short, or a file in `out` was changed.
    """
    if n_seeds < FEWEST_SEEDS:
        raise refusal("few_seeds", n_seeds=n_seeds, fewest_seeds=FEWEST_SEEDS, seeds=SEEDS)
    if workers < 1:
        raise refusal("workers", workers=workers)
    # What does not fit is said before anything is trained.
    asked = [experiment.as_asked(steps, text) for experiment in experiments]
    if text is not None:
        for experiment in asked:
            experiment.task.corpus(text, 0)  # for its errors alone: is the text there, and long enough?
    store = Store(out)
    units = {experiment.name: units_of(experiment, range(n_seeds)) for experiment in asked}
    scored = run_units([unit for each in units.values() for unit in each], store, workers, report)
    comparisons = []
    for experiment in asked:
        results: dict[str, list[Scored]] = {arm.name: [] for arm in experiment.arms}
        for unit in units[experiment.name]:
            results[unit.arm.name].append(scored[store.path(unit)])
        comparisons.append(_gathered(experiment, results))
    return tuple(comparisons)


def units_of(experiment: Experiment, seeds: Sequence[int]) -> list[Unit]:
    # Seed by seed, so that the arms of a seed find its data ready.
    return [Unit(experiment, arm, seed) for seed in seeds for arm in experiment.arms]


def _gathered(experiment: Experiment, results: dict[str, list[Scored]]) -> Comparison:
    """The comparison of an experiment. `results` has what each arm gave, by its name, seed by seed."""
    arms: list[ArmResult] = []
    for arm in experiment.arms:  # all but the first are compared with the first
        arms.append(_arm_result(arm, results[arm.name], experiment.metrics, arms[0] if arms else None))
    # A unit's file has the failure in English; `known` finds the phrase again, so that it can be said in Spanish.
    failures = [
        Note.of("comparison.failed", arm=arm.name, failure=known(arm.failure) or arm.failure)
        for arm in arms
        if arm.failure is not None
    ]
    scores = [arm.scores[metric.name] for metric in experiment.metrics for arm in arms if metric.name in arm.scores]
    return Comparison(
        name=experiment.name,
        question=experiment.question,
        data=experiment.task.data,
        steps=experiment.task.recipe.steps,
        seeds=tuple(range(len(results[arms[0].name]))),
        metrics=experiment.metrics,
        arms=tuple(arms),
        verdicts=(*failures, *(score.verdict for score in scores if score.verdict is not None)),
        notes=experiment.notes,
        cpu_seconds=sum(scored.cpu_seconds for each in results.values() for scored in each),
    )


def _arm_result(arm: Arm, results: Sequence[Scored], metrics: Sequence[Metric], first: ArmResult | None) -> ArmResult:
    """An arm over its seeds, compared with `first`, the first arm, which is None where this is the first arm.

    One seed that failed leaves an arm without any scores: a mean of the others would hide it.
    """
    failure = next((scored.failure for scored in results if scored.failure is not None), None)
    named = {metric.name: metric for metric in metrics}  # a unit may have other scores, which get no verdict
    scores = {}
    for name in results[0].scores if failure is None else ():
        values = tuple(scored.scores[name] for scored in results)
        difference = verdict = None
        if first is not None and first.scores:  # they are empty where the first arm failed
            difference = paired(values, first.scores[name].values)
            if name in named:
                verdict = sentence(arm.name, first.name, difference, named[name])
        scores[name] = Score(values, interval_of(values), difference, verdict)
    return ArmResult(arm.name, arm.about, results[0].parameters, scores, failure)
