"""What does W_O do? Without it each head writes to its own slice of the residual stream."""

from __future__ import annotations

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.lab.compare.base import SHAPE, VERBS_OR_TEXT
from headwise.lab.compare.experiment import Arm, Experiment, with_attention
from headwise.layer.layer import MultiHeadAttention


def without_output(config: GPTConfig) -> GPT:
    """The model whose layers join their heads and stop there."""
    return with_attention(config, lambda spec: MultiHeadAttention.from_spec(spec.replace(out_proj=False)))


OUTPUT_PROJECTION = Experiment(
    name="output-projection",
    question="Does the output projection W_O earn its parameters?",
    task=VERBS_OR_TEXT,
    arms=(
        Arm(name="with W_O", shape=SHAPE),
        Arm(
            name="without W_O",
            about="feed-forward widened by as much",
            shape=SHAPE,
            build=without_output,
            widened=True,
        ),
    ),
)
