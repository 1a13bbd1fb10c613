"""Run experiments and gather their units into comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.errors import HeadwiseError, unknown
from headwise.intervals import interval_of
from headwise.lab.compare.experiment import Arm, Experiment, Report, Scored, Unit
from headwise.lab.compare.experiments import HEADS, OUTPUT_PROJECTION, SCALE
from headwise.lab.compare.results import ArmResult, Comparison, Score, Table, sentence
from headwise.lab.compare.roles import ROLES_OF_HEADS
from headwise.lab.compare.sharing import SHARING
from headwise.lab.compare.two_lookups import TWO_LOOKUPS
from headwise.lab.compare.units import Store, run_units

CLAIMS = "claims"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (HEADS, SHARING, OUTPUT_PROJECTION, SCALE, TWO_LOOKUPS, ROLES_OF_HEADS)
}
SEEDS = 5
FEWEST_SEEDS = 2  # one says nothing about the spread


def find_experiment(name: str) -> Experiment:
    """The experiment of that name, or an error that offers the nearest ones."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    raise unknown(f"no experiment {name!r}", name, (*EXPERIMENTS, CLAIMS))


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

    n_seeds  seeds 0 to n_seeds - 1; at least 2
    steps    updates of each model; default: the recipe's
    text     a UTF-8 file instead of the built-in data
    workers  processes side by side; the results do not depend on it. Call it under `if __name__ == "__main__":`
    """
    if n_seeds < FEWEST_SEEDS:
        raise HeadwiseError(
            f"seeds={n_seeds} gives no interval: the spread shows from {FEWEST_SEEDS} seeds on; {SEEDS} are usual"
        )
    if workers < 1:
        raise HeadwiseError(f"workers={workers} must be at least 1")
    for experiment in experiments:
        experiment.recipe(steps, text)  # what does not fit is said before anything is trained
        if text is not None:
            experiment.task.corpus(text, 0)
    store = Store(out)
    units = {experiment.name: units_of(experiment, range(n_seeds), steps, text) for experiment in experiments}
    scored = run_units([unit for each in units.values() for unit in each], store, workers, report)
    comparisons = []
    for experiment in experiments:
        results: dict[str, list[Scored]] = {arm.name: [] for arm in experiment.arms}
        for unit in units[experiment.name]:
            results[unit.arm.name].append(scored[store.path(unit.key)])
        tables = experiment.timed(report) if experiment.timed else ()
        comparisons.append(_gathered(experiment, results, tables, steps, text))
    return tuple(comparisons)


def units_of(experiment: Experiment, seeds: Sequence[int], steps: int | None, text: Path | None) -> list[Unit]:
    # Seed by seed, so that the arms of a seed find its data ready.
    return [Unit(experiment, arm, seed, steps, text) for seed in seeds for arm in experiment.arms]


def _gathered(
    experiment: Experiment,
    results: dict[str, list[Scored]],
    tables: tuple[Table, ...],
    steps: int | None,
    text: Path | None,
) -> Comparison:
    first = results[experiment.arms[0].name]
    arms = tuple(_arm_result(experiment, arm, results[arm.name], first) for arm in experiment.arms)
    verdicts = [f"{arm.name}: training {arm.failure}" for arm in arms if arm.failure is not None]
    for metric in experiment.metrics:
        scores = [arm.scores[metric.name] for arm in arms if metric.name in arm.scores]
        verdicts += [score.verdict for score in scores if score.verdict is not None]
    done, whole = experiment.recipe(steps, text).steps, experiment.recipe(None, text).steps
    cut_short = (
        f"Trained for {done:,} of the recipe's {whole:,} steps: a model that has learned nothing yet is not told "
        "apart from one that cannot."
    )
    return Comparison(
        name=experiment.name,
        question=experiment.question,
        data=experiment.task.data if text is None else text.name.encode("utf-8", "replace").decode(),
        steps=done,
        seeds=tuple(range(len(first))),
        metrics=experiment.metrics,
        arms=arms,
        verdicts=tuple(verdicts),
        notes=(*experiment.notes, cut_short) if done < whole else experiment.notes,
        tables=tables,
        cpu_seconds=sum(scored.cpu_seconds for each in results.values() for scored in each),
    )


def _arm_result(experiment: Experiment, arm: Arm, results: Sequence[Scored], first: Sequence[Scored]) -> ArmResult:
    failure = next((scored.failure for scored in results if scored.failure is not None), None)
    scores = {}
    metrics = {metric.name: metric for metric in experiment.metrics}
    compared = results is not first and all(scored.failure is None for scored in first)
    for name in results[0].scores if failure is None else ():
        values = tuple(scored.scores[name] for scored in results)
        difference = verdict = None
        if compared:
            pairs = zip(values, first, strict=True)
            difference = interval_of([value - other.scores[name] for value, other in pairs])
            if name in metrics:
                verdict = sentence(arm.name, experiment.arms[0].name, difference, metrics[name])
        scores[name] = Score(values, interval_of(values), difference, verdict)
    return ArmResult(arm.name, arm.about, results[0].parameters, scores, failure)
