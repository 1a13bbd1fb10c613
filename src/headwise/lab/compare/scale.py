"""By what should a score be divided? The scale enters the scores themselves, not the initial weights of W_Q.

Folded into W_Q it would be the same function on the first step only: the optimizers move every weight by about the
learning rate, whatever its size, and weight decay shrinks it in proportion. So the layer is given another scale, and
W_Q starts the same in all arms.
"""

from __future__ import annotations

import math

from torch import Tensor

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.lab.compare.base import SHAPE, VERBS_OR_TEXT
from headwise.lab.compare.experiment import Arm, Experiment, with_attention
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Mask
from headwise.spec import AttentionSpec, Options


class ScaledAttention(MultiHeadAttention):
    """The layer with scores q.k * scale, where the scale is not 1/sqrt(head_dim)."""

    scale = math.nan

    def options(self, mask: Mask | None, gate: Tensor | None) -> Options:
        """What the layer passes to `attend`, with its scale."""
        return super().options(mask, gate)._replace(scale=self.scale)


def scaled(config: GPTConfig, scale: float) -> GPT:
    """The model whose layers multiply their scores by `scale`."""

    def make(spec: AttentionSpec) -> ScaledAttention:
        layer = ScaledAttention.from_spec(spec)
        assert isinstance(layer, ScaledAttention)
        layer.scale = scale
        return layer

    return with_attention(config, make)


def by_model_width(config: GPTConfig) -> GPT:
    """Scores divided by sqrt(d_model)."""
    return scaled(config, 1 / math.sqrt(config.d_model))


def unscaled(config: GPTConfig) -> GPT:
    """Scores as they are."""
    return scaled(config, 1.0)


SCALE = Experiment(
    name="scale",
    question="Does it matter by what the scores are divided?",
    task=VERBS_OR_TEXT,
    arms=(
        Arm(name="1/sqrt(head_dim)", about="0.25", shape=SHAPE),
        Arm(name="1/sqrt(d_model)", about="0.125", shape=SHAPE, build=by_model_width),
        Arm(name="none", about="1", shape=SHAPE, build=unscaled),
    ),
)
