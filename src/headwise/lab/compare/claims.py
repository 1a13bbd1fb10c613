"""The ledger: what courses claim, measured here, and a verdict that a rule makes of the figures.

No verdict and no figure of this machine is typed in; what cannot run here stands with the published figure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from headwise.intervals import Interval, interval_of
from headwise.lab.compare.experiment import Report
from headwise.lab.compare.experiments import ROLES
from headwise.lab.compare.measured import (
    course_forms,
    decoding,
    flops_with_heads,
    heads_of_models,
    machine,
    parameters_with_heads,
    printed_wrapper,
    split_heads,
)
from headwise.lab.compare.results import (
    DEPENDS,
    FAILS,
    HOLDS,
    NOT_RUN,
    ArmResult,
    Claim,
    Comparison,
    Ledger,
    Metric,
    effect,
    judged_claim,
    of_all,
)
from headwise.lab.compare.run import EXPERIMENTS, SEEDS, compare, silent
from headwise.spec import AttentionSpec
from headwise.table import Table

CLEAR = 2.0  # times the mass of an even look that a head must give to a role

ELSEWHERE = tuple(
    judged_claim(f"elsewhere-{name}", NOT_RUN) for name in ("shared", "needed", "deep", "semantic", "parallel")
)
COUNTED: dict[str, Callable[[], tuple[Claim, Table]]] = {
    "split heads": split_heads,
    "parameters": parameters_with_heads,
    "FLOPs": flops_with_heads,
    "heads by size": heads_of_models,
    "course forms": course_forms,
    "wrapper as printed": printed_wrapper,
    "decoding": decoding,
}


def run_claims(
    out: Path,
    command: str,
    n_seeds: int = SEEDS,
    steps: int | None = None,
    workers: int = 1,
    report: Report = silent,
) -> Ledger:
    """Run all experiments, then count and time, and judge every claim. The arguments are those of `compare`.

    command  how the ledger was asked for, to stand on its page
    """
    wall, cpu = time.monotonic(), _cpu_seconds()
    comparisons = compare(list(EXPERIMENTS.values()), out, n_seeds, steps, None, workers, report)
    rows: list[tuple[Claim, Table]] = []
    for name, measure in COUNTED.items():
        report(f"claims: {name}", len(rows), len(COUNTED))
        rows.append(measure())
    report("claims: all measured", len(rows), len(COUNTED))
    return Ledger(
        command=command,
        machine=machine(),
        seeds=tuple(range(n_seeds)),
        claims=(*(claim for claim, _ in rows), *judged(comparisons), *ELSEWHERE),
        comparisons=comparisons,
        tables=tuple(table for _, table in rows),
        wall_seconds=time.monotonic() - wall,
        cpu_seconds=_cpu_seconds() - cpu,
    )


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def judged(comparisons: tuple[Comparison, ...]) -> tuple[Claim, ...]:
    named = {comparison.name: comparison for comparison in comparisons}
    sharing, roles = named["sharing"], named["roles"]
    return (
        several_heads(named["heads"], named["two-lookups"]),
        ordered_quality(sharing),
        advice(sharing),
        indispensable_output(named["output-projection"]),
        roles_of_heads(roles),
        robust(roles),
    )


def several_heads(heads: Comparison, lookups: Comparison) -> Claim:
    shown, differences = [], []
    for comparison in (heads, lookups):
        metric, first = comparison.metrics[0], comparison.arms[0]
        equal = [arm for arm in comparison.arms[1:] if arm.parameters == first.parameters]
        shown += [_effect(arm, metric) == 1 for arm in equal]
        each = ", ".join(_difference(arm, metric) for arm in equal)
        differences.append(f"{comparison.name}, {metric.words}: {each}")
    return judged_claim("several-heads", of_all(shown), differences=_capital(". ".join(differences)))


def _price_of_sharing(sharing: Comparison) -> tuple[str, str]:
    """The verdict on "each step costs quality", and the steps with their intervals."""
    metric, (mha, gqa, mqa) = sharing.metrics[0], sharing.arms
    steps = [paired(gqa, mha, metric), paired(mqa, gqa, metric)]
    effects = [0 if step is None else effect(step, metric) for step in steps]
    differences = [f"{name} {_pm(step)}" for name, step in zip(("GQA less MHA", "MQA less GQA"), steps, strict=True)]
    return FAILS if 1 in effects else of_all([step == -1 for step in effects]), ", ".join(differences)


def ordered_quality(sharing: Comparison) -> Claim:
    verdict, differences = _price_of_sharing(sharing)
    return judged_claim("ordered-quality", verdict, differences=differences)


def advice(sharing: Comparison) -> Claim:
    verdict, differences = _price_of_sharing(sharing)
    cached = {
        name: AttentionSpec(d_model=512, n_heads=8, n_kv_heads=groups).cache_values_per_token
        for name, groups in (("mha", 8), ("gqa", 2), ("mqa", 1))
    }
    return judged_claim("advice", verdict, differences=differences, **cached)


def indispensable_output(output: Comparison) -> Claim:
    metric, (_, without) = output.metrics[0], output.arms
    verdict = HOLDS if _effect(without, metric) == -1 or without.failure is not None else FAILS
    difference = _difference(without, metric)
    return judged_claim("indispensable-output", verdict, metric=_capital(metric.words), difference=difference)


def roles_of_heads(roles: Comparison) -> Claim:
    trained = roles.arm("trained")
    metrics = {metric.name: metric for metric in roles.metrics}
    shown, masses = [], []
    for role in ROLES if trained.scores else ():
        mass, even = trained.scores[role].mean.mean, trained.scores[f"even {role}"].mean.mean
        cost = trained.scores[f"silenced {role}"].mean
        learned = _effect(trained, metrics[role]) == 1 and mass >= CLEAR * even
        shown.append(learned and cost.low > 0)
        before = roles.arm("untrained").scores[role].mean.mean
        silenced = f"silenced {cost.mean:+z.2f} ± {cost.half_width:.2f} nats"
        no_role = "" if shown[-1] else ": no role"
        masses.append(f"{role} {mass:.2f} (untrained {before:.2f}, even {even:.2f}), {silenced}{no_role}")
    words = "; ".join(masses) or "diverged"
    return judged_claim("roles", of_all(shown or [False]), masses=words, bar=CLEAR, count=len(ROLES))


def robust(roles: Comparison) -> Claim:
    trained = roles.arm("trained")
    costs = {role: trained.scores[f"silenced {role}"].mean for role in ROLES if trained.scores}
    words = ", ".join(f"{role} {_pm(cost)}" for role, cost in costs.items()) or "diverged"
    return judged_claim("robust", FAILS if any(cost.low > 0 for cost in costs.values()) else DEPENDS, costs=words)


def _effect(arm: ArmResult, metric: Metric) -> int:
    """1 better than the first arm, -1 worse, 0 not detectably different, or not trained to the end."""
    score = arm.scores.get(metric.name)
    return 0 if score is None or score.difference is None else effect(score.difference, metric)


def paired(arm: ArmResult, other: ArmResult, metric: Metric) -> Interval | None:
    if metric.name not in arm.scores or metric.name not in other.scores:
        return None
    pairs = zip(arm.scores[metric.name].values, other.scores[metric.name].values, strict=True)
    return interval_of([value - baseline for value, baseline in pairs])


def _difference(arm: ArmResult, metric: Metric) -> str:
    score = arm.scores.get(metric.name)
    return f"{arm.name} {_pm(None if score is None else score.difference)}"


def _pm(difference: Interval | None) -> str:
    return "diverged" if difference is None else f"{difference.mean:+z.3f} ± {difference.half_width:.3f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
