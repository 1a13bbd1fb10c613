"""The experiments by name."""

from __future__ import annotations

from headwise.errors import unknown
from headwise.lab.compare.experiment import Experiment
from headwise.lab.compare.experiments import HEADS, OUTPUT_PROJECTION, SCALE
from headwise.lab.compare.roles import ROLES_OF_HEADS
from headwise.lab.compare.sharing import SHARING
from headwise.lab.compare.two_lookups import TWO_LOOKUPS

CLAIMS = "claims"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (HEADS, SHARING, OUTPUT_PROJECTION, SCALE, TWO_LOOKUPS, ROLES_OF_HEADS)
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name, or an error that offers the nearest ones."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    raise unknown(f"no experiment {name!r}", name, (*EXPERIMENTS, CLAIMS))
