"""More heads, or wider ones? Width, parameters and matrix products stay the same; W_O is kept throughout."""

from __future__ import annotations

from headwise.lab.compare.base import SHAPE, VERBS_OR_TEXT
from headwise.lab.compare.experiment import Arm, Experiment

COUNTS = (1, 2, 4, 8, 16)


def arm_of(count: int) -> Arm:
    """The model with that many heads, of width 64 together."""
    return Arm(
        name=f"{count} head{'s' * (count > 1)}",
        about=f"of width {SHAPE['d_model'] // count}",
        shape={**SHAPE, "n_heads": count},
    )


HEADS = Experiment(
    name="heads",
    question="Do several narrow heads learn more than one wide head with as many parameters?",
    task=VERBS_OR_TEXT,
    arms=tuple(map(arm_of, COUNTS)),
)
