"""microgpt in torch: the drawn weights in the project's own GPT, in double precision, with torch's autograd and Adam.

Also a replay of any rung as a run folder, which `heads`, `trace` and `generate` read like that of any training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from headwise.files import TEXT, require_empty, whole_folder, write_whole
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import find_preset
from headwise.gpt.run import Run, Settings, write_run
from headwise.gpt.train import Adam
from headwise.lab.microgpt import (
    ADAM_EPS,
    BETA1,
    BETA2,
    N_HEADS,
    TEMPERATURE,
    Draw,
    Matrix,
    Replay,
    Report,
    train,
)
from headwise.layer.projections import shapes_alone

EXACT = "microgpt.json"  # a `Replay` in double precision; the model's file in the same folder has single precision

# The last part of a key of the draw, and of the same matrix's name in a GPT.
NAMES = {
    "wte": "token_embedding",
    "wpe": "position_embedding",
    "lm_head": "lm_head",
    "attn_wq": "attention.q_proj",
    "attn_wk": "attention.k_proj",
    "attn_wv": "attention.v_proj",
    "attn_wo": "attention.o_proj",
    "mlp_fc1": "feed_forward.up",
    "mlp_fc2": "feed_forward.down",
}


def name_of(key: str) -> str:
    """The name in a GPT of the matrix `key` of a draw: layer0.attn_wq is blocks.0.attention.q_proj.weight."""
    layer, _, name = key.rpartition(".")  # "layer0", ".", "attn_wq"; of wte, which belongs to no layer, "", "", "wte"
    return (f"blocks.{layer.removeprefix('layer')}." if layer else "") + f"{NAMES[name]}.weight"


def build(weights: Mapping[str, Matrix], n_heads: int = N_HEADS) -> GPT:
    """The model of the preset `microgpt`, in float64, with the weights of a `Draw` or of a `Replay`.

    Layers, width, context and vocabulary are those of the weights, which do not tell how many heads share them.
    """
    n_layers = sum(key.endswith("attn_wq") for key in weights)  # each layer has one
    context, width = len(weights["wpe"]), len(weights["wpe"][0])
    shape = {**find_preset("microgpt").shape, "n_heads": n_heads, "n_layers": n_layers}
    shape |= {"context": context, "d_model": width}
    # Weights of its own are neither stored nor drawn: `assign` below puts the given ones in their place, as float64.
    with shapes_alone():
        model = GPT(GPTConfig(vocab_size=len(weights["wte"]), **shape))
    state = {name_of(key): torch.tensor(matrix, dtype=torch.float64) for key, matrix in weights.items()}
    model.load_state_dict(state, assign=True)
    return model


def loss_of(model: GPT, ids: list[int]) -> torch.Tensor:
    """Mean cross-entropy of one document in nats per token. `GPT.loss` gives it too, but in single precision."""
    logits = model(torch.tensor([ids[:-1]]))[0]  # [0]: the one text of the batch, (T,V)
    return F.cross_entropy(logits, torch.tensor(ids[1:]))


def run(draw: Draw, steps: int, n_samples: int, report: Report | None) -> Replay:
    """Learn from one document a step, then write some of our own."""
    model = build(draw.weights, draw.n_heads)
    adam = Adam(model.parameters(), betas=(BETA1, BETA2), eps=ADAM_EPS)

    def step_on(ids: list[int], rate: float) -> float:
        adam.param_groups[0]["lr"] = rate  # in place of Adam's own default
        loss = loss_of(model, ids)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        return loss.item()

    @torch.no_grad()
    def following(ids: list[int]) -> list[float]:
        logits = model(torch.tensor([ids]), last_only=True)[0, 0]  # (1,1,V): of the last token alone
        return torch.softmax(logits / TEMPERATURE, dim=0).tolist()

    losses = train(draw, steps, report, step_on)
    samples = [draw.write(following) for _ in range(n_samples)]
    state = model.state_dict()
    return Replay(losses, samples, {key: state[name_of(key)].tolist() for key in draw.weights})


def write_folder(folder: Path, result: Replay, settings: Settings) -> None:
    """Write the model in the preset microgpt, its tokenizer, run.json, and all of the replay as JSON; or nothing.

    settings  of the replay: its text, rung, seed and steps, and in `shape` its heads and layers

    HeadwiseError where the folder holds anything but the text of the replay.
    """
    corpus, config, _ = settings.resolve()  # the recipe of the preset is left aside: a replay has its own
    # A text from standard input was kept in the folder itself, before the folder is filled.
    is_ours = os.path.realpath(folder / TEXT) == settings.text
    require_empty(folder, lambda name: is_ours and name == TEXT)
    with whole_folder(folder) as fresh:
        write_whole(fresh / EXACT, json.dumps(asdict(result), ensure_ascii=False))
        save_model(fresh, build(result.parameters, config.n_heads).float(), corpus.tokens)
        # No summary, no cells and no example: they are measured on held-out text, and nothing was measured here.
        write_run(fresh, Run(settings, corpus.data.digest, "finished", None, None, None))
        if is_ours:  # `fresh` takes the place of `folder`. Last, so that an error before leaves the text where it is
            (folder / TEXT).rename(fresh / TEXT)
