"""The presets: what they are is data, not branches. A preset is a shape, a recipe and a way to read text.

`course` is the layer as the courses teach it, and learns the verb corpus. What it takes: the persons of the conjugation
lines in any order (`data.verb_corpus`), the token embedding as the output, strong weight decay, and 1,400 steps at 5e-3
(after 1,000 at 3e-3, 3 to 4 more of 36 cells are wrong).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.errors import HeadwiseError, unknown


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Learning rates are peaks; both optimizers follow one schedule."""

    steps: int
    batch: int
    lr: float  # AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)
    muon_lr: float | None = None  # Muon on the matrices of the blocks (Jordan et al. 2024); None = AdamW on all
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int = 100
    final_lr: float = 0.1  # the cosine ends at this share of the peak
    clip: float = 1.0  # largest norm of all gradients together


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    about: str
    shape: dict[str, Any]  # fields of GPTConfig, without the vocabulary
    recipe: Recipe
    lines: bool  # each line is a document of its own; otherwise the text is one stream


def _shape(context: int, n_layers: int, d_model: int, n_heads: int = 4, **others: Any) -> dict[str, Any]:
    return {"context": context, "n_layers": n_layers, "n_heads": n_heads, "d_model": d_model, **others}


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="verbs",
            about="the default: a small Qwen3 for the built-in verb corpus, 0.1 M parameters",
            shape=_shape(64, n_layers=2, d_model=64, d_ff=192, norm_eps=1e-6, qk_norm=True, tied=True),
            recipe=Recipe(steps=1000, batch=64, lr=3e-3, muon_lr=0.02, weight_decay=1.0, warmup=50),
            lines=False,
        ),
        Preset(
            name="microgpt",
            about="a toy of 4,192 parameters at 27 characters: one layer, width 16, 4 heads; each line is a document",
            shape=_shape(16, n_layers=1, d_model=16, position="learned", activation="relu", gated=False)
            | {"norm_gain": False, "embedding_norm": True, "final_norm": False}
            | {"init_std": 0.08, "scale_residual_init": False},
            recipe=Recipe(steps=1000, batch=32, lr=1e-2, betas=(0.85, 0.99), weight_decay=0.0, warmup=0, final_lr=0.0),
            lines=True,
        ),
        Preset(
            name="nanogpt",
            about="GPT-2's architecture at the size of nanoGPT's CPU recipe, 0.8 M parameters",
            shape=_shape(64, n_layers=4, d_model=128, tied=True, activation="gelu", gated=False)
            | {"norm": "layer", "position": "learned"},
            recipe=Recipe(steps=2000, batch=12, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup=100),
            lines=False,
        ),
        Preset(
            name="fast",
            about="the shortest way known here to nanoGPT's loss on tinyshakespeare, 0.4 M parameters",
            shape=_shape(64, n_layers=2, d_model=128, d_ff=512, norm_eps=1e-6, activation="relu2", gated=False)
            | {"qk_norm": True},
            recipe=Recipe(steps=280, batch=16, lr=1e-2, muon_lr=0.012, weight_decay=0.0, warmup=20, final_lr=0.02),
            lines=False,
        ),
        Preset(
            name="llama",
            about="Llama's architecture with grouped heads, 0.8 M parameters at 65 characters",
            shape=_shape(128, n_layers=4, d_model=128, n_kv_heads=2, d_ff=344),
            recipe=Recipe(steps=1000, batch=16, lr=2e-3, muon_lr=0.02, weight_decay=0.1, warmup=50),
            lines=False,
        ),
        Preset(
            name="course",
            about="for teaching: learned positions, LayerNorm, GELU, AdamW, as the courses build it; 0.1 M parameters",
            shape=_shape(64, n_layers=2, d_model=64, tied=True, activation="gelu", gated=False)
            | {"norm": "layer", "position": "learned"},
            recipe=Recipe(steps=1400, batch=64, lr=5e-3, weight_decay=1.0, warmup=50),
            lines=False,
        ),
    )
}


def warm_cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """The share of the peak learning rate at a step: linear warm-up, then a cosine down to `final`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def check_seed(seed: int) -> None:
    """What torch takes as a seed."""
    if not 0 <= seed < 2**63:
        raise HeadwiseError(f"seed={seed} lies outside 0 to 2^63 - 1")


def find_preset(name: str) -> Preset:
    """The preset of that name, or an error that offers the nearest ones."""
    if name not in PRESETS:
        raise unknown(f"no preset {name!r}", name, PRESETS)
    return PRESETS[name]
