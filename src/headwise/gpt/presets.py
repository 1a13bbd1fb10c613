"""The presets: what they are is data, in presets.toml. A preset is a shape, a recipe and a way to read text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_toml
from headwise.words import unknown


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Learning rates are peaks; both optimizers follow one schedule.

    The defaults are usual ones, which nanoGPT has, too; a preset names what it does otherwise.
    """

    steps: int  # updates of the weights
    batch: int  # texts of each
    lr: float  # AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)
    # Muon on the matrices of the blocks (Jordan et al. 2024); None = AdamW on all
    muon_lr: float | None = None
    # of AdamW: how slowly its means of gradients, and their squares, move
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1  # of matrices; see `make_optimizers`
    warmup: int = 100  # steps in which the rate rises
    final_lr: float = 0.1  # the cosine ends at this fraction of the peak
    # the rate stays at its peak, then falls to 0 in a line over this last part of the steps; None: the cosine
    decay: float | None = None
    clip: float = 1.0  # largest norm of all gradients together

    def rate(self, step: int) -> float:
        """The fraction of the peak learning rate at a step."""
        if self.decay is None:
            return warm_cosine(step, self.steps, self.warmup, self.final_lr)
        fall = (self.steps - step) / (self.decay * self.steps)
        return min(1, (step + 1) / max(1, self.warmup), fall)


@dataclass(frozen=True, kw_only=True)
class Preset:  # a record of presets.toml
    name: str
    shape: dict[str, Any]  # fields of GPTConfig, without the vocabulary
    recipe: Recipe
    lines: bool  # each line is a document of its own; otherwise the text is one stream
    # of the verb corpus, which is read where no text is named, it learns the first 20 verbs alone
    core: bool = False


PRESETS = {
    # The name stands in the file as the key of the record, and once more in errors.
    name: Preset(name=name, **{**record, "recipe": Recipe(**record["recipe"])})
    for name, record in read_toml("gpt/presets.toml").items()
}


def warm_cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """The fraction of the peak learning rate at a step, from 0: linear warm-up, then a cosine down to `final`.

    Loshchilov & Hutter 2016 (arXiv 1608.03983), without restarts. `step` lies below `steps`: `final` itself would be
    the fraction of the step after the last one.
    """
    if step < warmup:
        return (step + 1) / warmup  # + 1: the first step, of number 0, learns already
    progress = (step - warmup) / (steps - warmup)  # from 0, and below 1
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def check_seed(seed: Any) -> None:
    """Refuse what is no seed: a whole number from 0 on, below 2^63.

    NumPy's generators take none below 0; torch's end at 2^64, which leaves room for a sum such as `seed + n`.
    """
    # `random` and torch take no number of NumPy's
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise HeadwiseError(f"seed={seed!r} is no whole number from 0 to 2^63 - 1")


def find_preset(name: str) -> Preset:
    """The preset of that name, or an error that offers the nearest ones."""
    if name not in PRESETS:
        raise unknown(f"no preset {name!r}", name, PRESETS)
    return PRESETS[name]
