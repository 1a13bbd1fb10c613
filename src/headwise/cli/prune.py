"""`headwise prune`."""

from __future__ import annotations

from typing import Any

from headwise.cli.app import command, needs_torch
from headwise.cli.reshape import with_options


@command()
@with_options
def prune(
    heads: str | None = None,
    keep: float | None = None,
    by: str | None = None,
    uniform: bool = False,
) -> Any:
    """Remove query heads from a model.

    Heads leave the weights where the format can carry what remains: as many from each layer, whole groups or evenly
    from each group. Otherwise they are zeroed, and the reason is printed. The rest is as in `headwise share`: the
    damage is measured, healed if you ask for it, and a verified folder is written.
    """
    with needs_torch():
        from headwise.reshape.prune import Pruning
    return Pruning(heads, keep, by, uniform)
