"""microgpt in torch, by the project's own GPT: the preset `microgpt` is the same function as the scalars of `plain`.

The algorithm is that of Karpathy's microgpt (2026). Nothing of the model is written here: the drawn weights go into
`headwise.gpt.gpt.GPT` in double precision, autograd gives the gradients, and Adam is torch's, which puts its eps
outside the root as microgpt does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.lab.microgpt.draw import (
    ADAM_EPS,
    BETA1,
    BETA2,
    CONTEXT,
    LEARNING_RATE,
    TEMPERATURE,
    Draw,
    Matrix,
    Replay,
    Report,
    learning_rate,
)

# The key of each matrix of the draw, and the same matrix's name in a GPT.
NAMES = {
    "wte": "token_embedding.weight",
    "wpe": "position_embedding.weight",
    "lm_head": "lm_head.weight",
    "layer0.attn_wq": "blocks.0.attention.q_proj.weight",
    "layer0.attn_wk": "blocks.0.attention.k_proj.weight",
    "layer0.attn_wv": "blocks.0.attention.v_proj.weight",
    "layer0.attn_wo": "blocks.0.attention.o_proj.weight",
    "layer0.mlp_fc1": "blocks.0.feed_forward.up.weight",
    "layer0.mlp_fc2": "blocks.0.feed_forward.down.weight",
}


def build(weights: dict[str, Matrix]) -> GPT:
    """The model of the preset, in float64, with the weights of a `Draw`."""
    config = GPTConfig(vocab_size=len(weights["wte"]), **find_preset("microgpt").shape)
    with torch.device("meta"):  # weights of its own are neither stored nor drawn
        model = GPT(config)
    state = {NAMES[key]: torch.tensor(matrix, dtype=torch.float64) for key, matrix in weights.items()}
    model.load_state_dict(state, assign=True)
    return model


def loss_of(model: GPT, ids: list[int]) -> torch.Tensor:
    """Mean cross-entropy of one document in nats per token. `GPT.loss` gives it too, but in single precision."""
    logits = model(torch.tensor([ids[:-1]]))[0]
    return F.cross_entropy(logits, torch.tensor(ids[1:]))


@torch.no_grad()
def write(model: GPT, draw: Draw) -> str:
    """A new document, one token after another, each drawn by what the model expects next."""
    ids = [draw.tokens.end]
    while len(ids) <= CONTEXT:
        logits = model(torch.tensor([ids]), last_only=True)[0, 0]
        ids.append(draw.choose(torch.softmax(logits / TEMPERATURE, dim=0).tolist()))
        if ids[-1] == draw.tokens.end:
            break
    return draw.tokens.decode(ids)


def run(draw: Draw, steps: int, n_samples: int, report: Report | None) -> Replay:
    """Learn from one document a step, then write some of our own."""
    model = build(draw.weights)
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=ADAM_EPS)
    losses = []
    for step in range(steps):
        adam.param_groups[0]["lr"] = learning_rate(step, steps)
        loss = loss_of(model, draw.document(step))
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        losses.append(loss.item())
        if report is not None:
            report(step + 1, losses[-1])
    samples = [write(model, draw) for _ in range(n_samples)]
    state = model.state_dict()
    return Replay(losses, samples, {key: state[name].tolist() for key, name in NAMES.items()})
