"""microgpt, replayed exactly on three rungs: scalar autograd, NumPy with a backward by hand, and the general model.

microgpt (Karpathy 2026) is a GPT of one layer, 4 heads and width 16 that learns names, one name a step. The rungs share
`draw`: the same stream of random numbers, so the same losses and the same samples, letter for letter. Read `plain` first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.study.microgpt.draw import Draw, Matrix

RUNGS = ("plain", "array", "tensor")
Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Replay:
    """What a run left: the loss of each step, in nats per character; the samples; the weights, as `Draw.weights`."""

    losses: list[float]
    samples: list[str]
    parameters: dict[str, Matrix]


def replay(
    documents: Sequence[str],
    rung: str = "array",
    steps: int = 1000,
    seed: int = 42,
    n_samples: int = 20,
    report: Report | None = None,
) -> Replay:
    """Train microgpt on documents, such as a list of names, and draw samples from it.

    documents  texts without the empty ones; step i trains on the i-th of them, shuffled, and starts again at the end
    rung       plain (scalars), array (NumPy, no torch) or tensor (torch, the project's own GPT); all in double precision
    steps      the learning rate falls from 0.01 to 0 over max(steps, 1000): a short run is the beginning of a long one
    seed       of the one stream of Python's `random` that draws order, weights and samples
    n_samples  how many texts of at most 16 characters to draw afterwards, at temperature 0.5
    report     called after each step with its number, from 1, and its loss
    """
    if rung not in RUNGS:
        raise HeadwiseError(f"rung={rung!r} is not known; one of {', '.join(RUNGS)}")
    if steps < 1:
        raise HeadwiseError(f"steps={steps} trains nothing; pass at least 1")
    if n_samples < 0:
        raise HeadwiseError(f"n_samples={n_samples} is less than none; pass 0 or more")
    if isinstance(documents, str):
        raise HeadwiseError("documents is one string; pass a list of texts, such as its lines")
    if not any(documents):
        raise HeadwiseError(f"none of the {len(documents)} documents has a character; pass at least one name")
    draw = Draw(documents, seed)
    model = _rung(rung).Model(draw.weights)
    losses = []
    for step in range(steps):
        losses.append(model.step(draw.document(step), step, steps))
        if report is not None:
            report(step + 1, losses[-1])
    samples = [draw.tokens.decode(model.sample(draw)) for _ in range(n_samples)]
    return Replay(losses, samples, model.parameters())
