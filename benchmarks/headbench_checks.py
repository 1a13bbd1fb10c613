"""Does a model of the bench do what is said of it? What is known of its circuit is tried, and not believed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import headwise as hw
from benchmarks.headbench_models import Known, Pair

SMALL = 0.15  # share of the difference that may leak through all heads outside the circuit together


def faults(known: Known, held_out: list[Pair]) -> list[str]:
    """What is wrong with a model; nothing, if it is right.

    It answers texts that no method is given; the circuit alone carries the whole difference, and gives the answer when
    every other head that is not needed is silent; each head of it is missed when it is not among them.
    """
    wrong = [] if _right(known, held_out, ()) and _right(known, known.pairs, ()) else ["it does not solve its task"]
    every = known.heads
    others = set(every) - known.circuit - known.spare
    if not _right(known, held_out, others - known.needed):
        wrong.append("without the idle heads the answer is another")
    share = _together(known, known.circuit)
    if abs(share - 1) > 0.1:
        wrong.append(f"the circuit carries {share:.2f} of the difference")
    if abs(leak := _together(known, others)) > SMALL:
        wrong.append(f"the other heads carry {leak:.2f}")
    for head in sorted(known.circuit):
        group = {head}.union(*(group for group in known.alike if head in group))
        if abs(taken := _together(known, group, back=False)) < 0.1:
            wrong.append(f"without {sorted(group)} only {taken:.2f} is lost")
    return wrong


@torch.no_grad()
def _right(known: Known, pairs: list[Pair], silent: Iterable[str]) -> bool:
    """Is the answer to each text the likeliest of all tokens?"""
    clean, corrupted, targets = known.texts(pairs)
    with hw.ablate(known.model, silent) if silent else torch.no_grad():
        says = [known.model(ids)[:, -1].argmax(1) for ids in (clean, corrupted)]
    return bool((torch.stack(says, 1) == targets).all())


def _together(known: Known, heads: Iterable[str], back: bool = True) -> float:
    """What these heads bring back together of the clean answer; or, with the other's, take away from it."""
    clean, corrupted, target = known.texts()
    if not back:
        clean, corrupted, target = corrupted, clean, target.flip(1)
    effects = hw.patch(known.model, clean, corrupted, heads=sorted(heads), together=True, target=target).effects
    return effects["together"].mean
