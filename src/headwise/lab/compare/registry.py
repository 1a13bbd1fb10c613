"""The experiments by name."""

from __future__ import annotations

import difflib

from headwise.errors import HeadwiseError
from headwise.lab.compare.experiment import Experiment
from headwise.lab.compare.heads import HEADS
from headwise.lab.compare.output_projection import OUTPUT_PROJECTION
from headwise.lab.compare.roles import ROLES_OF_HEADS
from headwise.lab.compare.scale import SCALE
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
    known = (*EXPERIMENTS, CLAIMS)
    near = difflib.get_close_matches(name, known, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    raise HeadwiseError(f"no experiment {name!r}; {hint}")
