"""Where the heads look on one line, at twenty of the steps while a GPT trains."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.backends.torch_ import trace
from headwise.corpus.training import Corpus
from headwise.files import read_json, write_whole
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.layer.layer import MultiHeadAttention
from headwise.records import Call, head_name

FILM = "film.json"  # in a run folder
# Round choices. More shows more, and makes the file larger.
FRAMES = 20
LONGEST = 24  # tokens of the line at most

# "step", and "maps" (N,T,T) of N heads as base64 of a byte a weight, 255 times it
Frame = dict[str, Any]


class Film:
    """An observer of a training, `gpt.train.Observer`, that keeps the maps of all heads.

    tell  hears each frame; of a training that goes on first the earlier frames
    """

    def __init__(
        self,
        corpus: Corpus,
        config: GPTConfig,
        recipe: Recipe,
        tell: Callable[[Frame], None] = lambda frame: None,
    ) -> None:
        self.ids, self.tell = (
            corpus.tokens.prompt(corpus.example)[: min(LONGEST, config.context)],
            tell,
        )
        names = [
            head_name(layer, head)
            for layer in range(config.n_layers)
            for head in range(config.n_heads)
        ]
        self.header: dict[str, Any] = {
            "heads": names,
            "tokens": list(corpus.tokens.shown(self.ids)),
            "steps": recipe.steps,
        }
        # The first steps, where most happens, one by one: 0, 1, 2, 4, 8, ...; then evenly, and the last.
        doubled = {0, *(2**n for n in range(FRAMES // 2))}
        evenly = {recipe.steps * n // 9 for n in range(1, 10)}
        self.due = evenly | {step for step in doubled if step < recipe.steps}  # FRAMES at most
        # name of a step: (N,T,T) in bytes; saved with the state of the training
        self.kept: dict[str, Tensor] = {}
        self.frames: list[Frame] = []  # as they were told

    def __call__(self, model: GPT, step: int) -> None:
        if step in self.due:
            self.kept.setdefault(f"film.{step}", maps_on(model, self.ids))
        steps = sorted(int(name.removeprefix("film.")) for name in self.kept)
        for filmed in steps[len(self.frames) :]:
            maps = self.kept[f"film.{filmed}"]
            frame = {"step": filmed, "maps": b64encode(maps.numpy().tobytes()).decode("ascii")}
            self.frames.append(frame)
            self.tell(frame)

    def write(self, folder: Path) -> None:
        write_whole(folder / FILM, json.dumps({**self.header, "frames": self.frames}))


@torch.no_grad()
def maps_on(model: GPT, ids: list[int]) -> Tensor:
    """The weights (N,T,T) of all heads on a text, as bytes of 255 times each."""
    maps: list[Tensor] = []

    def keep(call: Call) -> None:
        maps.append(trace(call.q, call.k, call.v, call.options).weights[0])

    training = model.training
    with ExitStack() as stack:
        for attention in (
            module for module in model.modules() if isinstance(module, MultiHeadAttention)
        ):
            watchers = attention.watchers
            watchers.append(keep)
            stack.callback(watchers.remove, keep)
        model.eval()(torch.tensor([ids]))
    model.train(training)
    return (255 * torch.cat(maps)).round().byte()


def read_film(folder: Path) -> dict[str, Any] | None:
    """The film of a run folder; None where it has none."""
    return read_json(folder / FILM) if (folder / FILM).exists() else None
