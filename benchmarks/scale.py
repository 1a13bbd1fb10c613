"""How a training step and a survey grow with processes of one thread: `python -m benchmarks.scale`, a minute.

Figures of docs/scale.md. Each number of processes runs on this machine, over gloo; more of them than cores share cores.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace

import torch

from headwise.corpus.documents import Text, token_file
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Stream
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS
from headwise.gpt.ranks import current, joined
from headwise.gpt.train import make_optimizers, step_loss, update
from headwise.heads.survey import survey

WORLDS, STEPS, BATCH, CONTEXT, DOCUMENTS = (1, 2, 4), 9, 16, 128, 256
TEXT = "".join(f"{n * n} sheep, {n * 7 % 31} goats.\n" for n in range(997))


def work(shard: bool) -> dict[str, float]:
    """Seconds of the fastest step, and of the documents of a survey, in this process of its group."""
    torch.set_num_threads(1)
    tokens = Tokens.characters(TEXT, boundary=False)
    data = Stream(token_file(lambda: ([[tokens.encode(TEXT)]], len(tokens), {})), CONTEXT)
    shape = {"context": CONTEXT, "n_layers": 4, "n_heads": 8, "d_model": 256}
    model, recipe = GPT(GPTConfig(vocab_size=len(set(TEXT)), **shape)), PRESETS["course"].recipe  # type: ignore[arg-type]
    pieces = torch.tensor(data.held_out_documents(10**9)).flatten().repeat(99)[: DOCUMENTS * CONTEXT].view(-1, CONTEXT)
    text = Text(pieces.tolist(), lambda ids: tuple(map(str, ids)))
    marks: dict[str, list[float]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        marks.setdefault(stage, []).append(time.monotonic())

    began = time.monotonic()
    survey(model, text, controls=False, ablate="none", ranks=current(), progress=progress)
    read = marks["repeated tokens"][0] - began
    losses = current().loss_module(model, shard)
    optimizers, seconds = make_optimizers(model, replace(recipe, muon_lr=None)), []
    for step in range(STEPS):
        began = time.monotonic()
        batch = data.batch(torch.Generator().manual_seed(step), BATCH)
        update(step_loss(losses, batch, 1), losses.parameters(), optimizers, step, 1.0)
        seconds.append(time.monotonic() - began)
    return {"step": min(seconds[2:]), "read": read, "parameters": model.n_parameters}


def group(world: int, shard: bool) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scale", "shard" if shard else "ddp"]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(r)}, stdout=subprocess.PIPE) for r in range(world)]
    answers = [json.loads(rank.communicate()[0]) for rank in ranks]
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def main() -> None:
    for world in WORLDS:
        for shard in (False, True):
            if world > 1 or not shard:
                print(world, "shard" if shard else "ddp", group(world, shard), flush=True)


if __name__ == "__main__" and "RANK" in os.environ:
    with joined() if os.environ["WORLD_SIZE"] != "1" else nullcontext():
        print(json.dumps(work(sys.argv[1] == "shard")), flush=True)
elif __name__ == "__main__":
    main()
