"""Made-up comparisons, whose figures a test chooses."""

from collections.abc import Mapping, Sequence

from headwise.intervals import interval_of
from headwise.lab.experiments import ROLES, ROLES_OF_HEADS
from headwise.lab.results import ArmResult, Comparison, Ledger, Metric, Score, sentence
from headwise.table import Table

LOSS = Metric("loss", "held-out loss", "nats", lower_is_better=True)
ACCURACY = Metric("accuracy", "share of exact answers", "")
WIGGLE = (0.0, 0.01, -0.01)  # what the three seeds add to a figure


def arm(
    name: str, scores: Mapping[str, float], first: Mapping[str, float] | None, metrics: Sequence[Metric], size: int = 31
) -> ArmResult:
    """An arm whose three seeds lie around the given scores, and, against the first arm, differ a little less."""
    known = {metric.name: metric for metric in metrics}
    found = {}
    for number, (key, value) in enumerate(scores.items()):
        values = [value + extra * (1 + 0.1 * number + (first is not None)) for extra in WIGGLE]
        if first is None:
            found[key] = Score(tuple(values), interval_of(values), None, None)
            continue
        difference = interval_of([mine - (first[key] + extra) for mine, extra in zip(values, WIGGLE, strict=True)])
        message = sentence(name, "first", difference, known[key]) if key in known else None
        found[key] = Score(tuple(values), interval_of(values), difference, message)
    return ArmResult(name, "", size, found, None)


def comparison(name: str, arms: Mapping[str, Mapping[str, float]], metrics: Sequence[Metric] = (LOSS,)) -> Comparison:
    """Arms by name with their scores; the first is what the others are compared with."""
    (first_name, first), *others = arms.items()
    found = (arm(first_name, first, None, metrics), *(arm(one, scores, first, metrics) for one, scores in others))
    verdicts = tuple(score.verdict for one in found for score in one.scores.values() if score.verdict)
    return Comparison(
        name, f"What about {name}?", "made-up data", 7, (0, 1, 2), tuple(metrics), found, verdicts, ("a note",), 1.5
    )


def all_comparisons(
    heads: Sequence[float] = (0.5, 0.5, 0.5),
    lookups: Sequence[float] = (0.7, 1.0, 1.0),
    sharing: Sequence[float] = (0.5, 0.6, 0.7),
    masses: float = 0.8,
    cost: float = 0.5,
    without: float = 0.5,
) -> tuple[Comparison, ...]:
    """What the ledger judges; the figures of the arms in their order, those of the roles alike for all roles."""
    untrained, trained = {}, {}
    for role in ROLES:
        untrained |= {role: 0.2, f"even {role}": 0.2, f"silenced {role}": 0.0}
        trained |= {role: masses, f"even {role}": 0.2, f"silenced {role}": cost}
    return (
        comparison("heads", {f"{h} heads": {"loss": v} for h, v in zip((1, 2, 4), heads, strict=True)}),
        comparison("sharing", {n: {"loss": v} for n, v in zip(("MHA", "GQA", "MQA"), sharing, strict=True)}),
        comparison(
            "two-lookups", {f"{h} heads": {"accuracy": v} for h, v in zip((1, 2, 4), lookups, strict=True)}, [ACCURACY]
        ),
        comparison("roles", {"untrained": untrained, "trained": trained}, ROLES_OF_HEADS.metrics),
        comparison("output-projection", {"with W_O": {"loss": 0.5}, "without W_O": {"loss": without}}),
    )


def ledger(claims: tuple, comparisons: tuple[Comparison, ...]) -> Ledger:
    """A ledger of these claims."""
    table = Table(("what", "count", "ms"), (("this", 12345, 0.012345), ("that", 7, 1234.5)), "A table", "A note.")
    machine = {"processor": "a processor", "cores": 2}
    return Ledger("headwise compare claims", machine, (0, 1, 2), claims, comparisons, (table,), 90.0, 150.0)
