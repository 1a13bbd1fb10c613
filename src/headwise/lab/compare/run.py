"""Run experiments and gather their units into comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.intervals import interval_of
from headwise.lab.compare.experiment import Arm, Experiment, Report, Scored
from headwise.lab.compare.results import ArmResult, Comparison, Metric, Score, Table, sentence
from headwise.lab.compare.units import Store, run_units, units_of

SEEDS = 5
FEWEST_SEEDS = 2  # one says nothing about the spread


def silent(text: str, done: int, total: int) -> None:
    """A report that goes nowhere."""


def compare(
    experiment: Experiment,
    out: Path,
    n_seeds: int = SEEDS,
    steps: int | None = None,
    text: Path | None = None,
    workers: int = 1,
    report: Report = silent,
) -> Comparison:
    """Run one experiment, or what of it is not in the folder `out` yet, and compare its arms.

    n_seeds  seeds 0 to n_seeds - 1; at least 2
    steps    updates of each model; default: the recipe's
    text     a UTF-8 file instead of the built-in data
    workers  processes side by side; the results do not depend on it. Call it under `if __name__ == "__main__":`
    """
    return compare_all([experiment], out, n_seeds, steps, text, workers, report)[0]


def compare_all(
    experiments: Sequence[Experiment],
    out: Path,
    n_seeds: int = SEEDS,
    steps: int | None = None,
    text: Path | None = None,
    workers: int = 1,
    report: Report = silent,
) -> tuple[Comparison, ...]:
    """`compare` for several experiments at once; what is timed is timed at the end, with no worker beside it."""
    if n_seeds < FEWEST_SEEDS:
        raise HeadwiseError(
            f"seeds={n_seeds} gives no interval: the spread shows from {FEWEST_SEEDS} seeds on; {SEEDS} are usual"
        )
    if workers < 1:
        raise HeadwiseError(f"workers={workers} must be at least 1")
    seeds = tuple(range(n_seeds))
    for experiment in experiments:
        experiment.recipe(steps, text)  # what does not fit is said before anything is trained
        if text is not None:
            experiment.task.corpus(text, seeds[0])
    store = Store(out)
    units = {experiment.name: units_of(experiment, seeds, steps, text) for experiment in experiments}
    scored = run_units([unit for each in units.values() for unit in each], store, workers, report)
    comparisons = []
    for experiment in experiments:
        results = {(unit.arm.name, unit.seed): scored[store.path(unit.key)] for unit in units[experiment.name]}
        tables = experiment.timed(report) if experiment.timed else ()
        comparisons.append(_gathered(experiment, seeds, results, tables, experiment.recipe(steps, text).steps, text))
    return tuple(comparisons)


def _gathered(
    experiment: Experiment,
    seeds: tuple[int, ...],
    results: dict[tuple[str, int], Scored],
    tables: tuple[Table, ...],
    steps: int,
    text: Path | None,
) -> Comparison:
    first = [results[experiment.arms[0].name, seed] for seed in seeds]
    arms = tuple(
        _arm_result(experiment, arm, [results[arm.name, seed] for seed in seeds], first) for arm in experiment.arms
    )
    return Comparison(
        name=experiment.name,
        question=experiment.question,
        data=experiment.task.data if text is None else text.name.encode("utf-8", "replace").decode(),
        steps=steps,
        seeds=seeds,
        metrics=experiment.metrics,
        arms=arms,
        verdicts=tuple(_verdicts(experiment, arms)),
        notes=(*experiment.notes, *_cut_short(experiment, steps, text)),
        tables=tables,
        cpu_seconds=sum(scored.cpu_seconds for scored in results.values()),
    )


def _cut_short(experiment: Experiment, steps: int, text: Path | None) -> list[str]:
    """A warning where the models had less than the recipe's steps."""
    whole = experiment.recipe(None, text).steps
    if steps >= whole:
        return []
    return [
        f"Trained for {steps:,} of the recipe's {whole:,} steps: a model that has learned nothing yet is not told "
        f"apart from one that cannot."
    ]


def _arm_result(experiment: Experiment, arm: Arm, results: Sequence[Scored], first: Sequence[Scored]) -> ArmResult:
    failure = next((scored.failure for scored in results if scored.failure is not None), None)
    scores = {}
    if failure is None:
        known = {metric.name: metric for metric in experiment.metrics}
        comparable = arm is not experiment.arms[0] and all(scored.failure is None for scored in first)
        for name in results[0].scores:
            values = [scored.scores[name] for scored in results]
            baseline = [scored.scores[name] for scored in first] if comparable else None
            scores[name] = _score(arm, experiment.arms[0], values, baseline, known.get(name))
    return ArmResult(arm.name, arm.about, results[0].parameters, scores, failure)


def _score(
    arm: Arm, first: Arm, values: Sequence[float], baseline: Sequence[float] | None, metric: Metric | None
) -> Score:
    if baseline is None:
        return Score(tuple(values), interval_of(values), None, None)
    difference = interval_of([value - other for value, other in zip(values, baseline, strict=True)])
    verdict = None if metric is None else sentence(arm.name, first.name, difference, metric)
    return Score(tuple(values), interval_of(values), difference, verdict)


def _verdicts(experiment: Experiment, arms: Sequence[ArmResult]) -> list[str]:
    """One sentence for each arm but the first, metric by metric."""
    sentences = [f"{arm.name}: training {arm.failure}" for arm in arms if arm.failure is not None]
    for metric in experiment.metrics:
        scores = [arm.scores.get(metric.name) for arm in arms]
        sentences += [score.verdict for score in scores if score is not None and score.verdict is not None]
    return sentences
