"""A replay as a run folder, which `heads`, `trace` and `generate` read like that of any training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from headwise.files import write_whole
from headwise.gpt.checkpoint import save_model
from headwise.gpt.run import Settings, write_run
from headwise.lab.microgpt.draw import Replay
from headwise.lab.microgpt.tensor import build

EXACT = "microgpt.json"  # losses, samples and weights in double precision; the model's file has single precision


def write_folder(folder: Path, result: Replay, settings: Settings) -> None:
    """Write the model in the preset microgpt, its tokenizer, run.json, and all of the replay as JSON.

    settings  of the replay: its text, rung, seed and steps, and in `shape` its heads and layers
    """
    corpus, config, _ = settings.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / EXACT, json.dumps(asdict(result), ensure_ascii=False))
    save_model(folder, build(result.parameters, config.n_heads).float(), corpus.tokens)
    write_run(folder, settings, corpus.data.digest, "finished", None)
