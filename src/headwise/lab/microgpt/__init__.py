"""microgpt, replayed exactly on three rungs: scalar autograd, NumPy with a backward by hand, and the general model.

microgpt (Karpathy 2026) is a GPT of one layer, 4 heads and width 16 that learns names, one a step. The rungs share one
stream of random numbers (`draw`), and so give the same losses and samples, letter for letter. Read `plain` first.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from headwise.errors import HeadwiseError
from headwise.lab.microgpt.draw import N_HEADS, N_LAYERS, WIDTH, Draw, Replay, Report
from headwise.spec import require_size
from headwise.words import refusal

__all__ = ["RUNGS", "Draw", "Replay", "replay"]

RUNGS = ("plain", "array", "tensor")


def replay(
    documents: Sequence[str],
    rung: str = "array",
    steps: int = 1000,
    seed: int = 42,
    n_samples: int = 20,
    report: Report | None = None,
    n_heads: int = N_HEADS,
    n_layers: int = N_LAYERS,
) -> Replay:
    """Train microgpt on documents, such as the lines of a list of names, and draw samples from it.

    documents  texts; they are stripped, and empty ones left out. Step i trains on the i-th of them, shuffled, and
               begins again after the last
    rung       plain (scalars), array (NumPy, no torch) or tensor (torch, the project's own GPT); all in float64
    steps      the learning rate falls from 0.01 to 0 over max(steps, 1000): a short run is the beginning of a long one
    seed       of the one stream of Python's `random` that draws order, weights and samples
    n_samples  how many texts of at most 16 characters to draw afterwards, at temperature 0.5
    report     is called after each step with its number, from 1, and its loss in nats per character
    n_heads    a divisor of the width 16; microgpt has 4
    n_layers   microgpt has 1
    """
    if rung not in RUNGS:
        raise refusal("no_rung", rung=repr(rung), value=", ".join(RUNGS))
    if steps < 1:
        raise HeadwiseError(f"steps={steps} trains nothing; pass at least 1")
    if n_samples < 0:
        raise HeadwiseError(f"n_samples={n_samples} is less than none; pass 0 or more")
    if isinstance(documents, str):
        raise HeadwiseError("documents is one text; pass a list of them, such as its lines")
    stripped = [document.strip() for document in documents]
    kept = [document for document in stripped if document]
    if not kept:
        raise HeadwiseError(f"none of the {len(stripped)} documents has a character; pass at least one name")
    require_size("n_layers", n_layers)
    require_size("n_heads", n_heads)
    if WIDTH % n_heads:
        raise refusal("microgpt_heads", n_heads=n_heads, width=WIDTH)
    try:  # loaded when it is asked for: array needs no torch, plain no NumPy either
        module: Any = importlib.import_module(f"headwise.lab.microgpt.{rung}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "rung='tensor' needs torch, which is not installed: pip install 'headwise[torch]'"
        raise HeadwiseError(message) from None
    replayed: Replay = module.run(Draw(kept, seed, n_heads, n_layers), steps, n_samples, report)
    return replayed
