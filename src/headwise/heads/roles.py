"""Which jobs a head has: a score, a threshold, and two controls that it must beat.

A head earns a role when its score reaches the threshold and the lower bound of its interval over documents lies above
both controls: attention spread evenly over what the mask allows, and the largest score that any head of the same model
reaches with untrained weights. A single document gives no interval, so no role that a text decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwise.heads.profiles import Role
from headwise.intervals import Interval

MASS = 0.4  # of the attention; heads that are named in the papers below lie well above, even attention well below

ROLES = (
    Role("previous token", "previous", MASS, "looks at the token right before", "Voita et al. 2019, 1905.09418"),
    Role("next token", "next", MASS, "looks at the token right after", "Clark et al. 2019, 1906.04341"),
    Role("self", "self", MASS, "looks at the token itself", "Clark et al. 2019, 1906.04341"),
    Role("first token", "first", 0.3, "rests on the first token, a sink", "Gu et al. 2024, 2410.10781"),
    Role("delimiter", "delimiter", MASS, "looks at separators and punctuation", "Clark et al. 2019, 1906.04341"),
    Role("duplicate token", "duplicate", MASS, "looks at an earlier copy of the token", "Wang et al. 2022, 2211.00593"),
    Role("induction", "prefix", MASS, "looks at what came after an earlier copy", "Olsson et al. 2022, 2209.11895"),
    Role("positional", "positional", 0.9, "looks hardest at one fixed offset", "Voita et al. 2019, 1905.09418"),
    Role(
        "copying", "copying", 0.8, "raises the logits of what it looks at", "Elhage et al. 2021, transformer circuits"
    ),
    Role("rare token", "rare_top", MASS, "looks hardest at the rarest tokens", "Voita et al. 2019, 1905.09418"),
)


def roles_of(
    scores: Mapping[str, Interval], uniform: Mapping[str, float], untrained: Mapping[str, float] | None
) -> tuple[str, ...]:
    """Names of the roles that a head earns by its scores and their controls."""
    return tuple(role.name for role in ROLES if role.score in scores and _earns(role, scores, uniform, untrained))


def _earns(
    role: Role, scores: Mapping[str, Interval], uniform: Mapping[str, float], untrained: Mapping[str, float] | None
) -> bool:
    score = scores[role.score]
    controls = [control[role.score] for control in (uniform, untrained or {}) if role.score in control]
    return score.mean >= role.threshold and all(score.low > control for control in controls)
