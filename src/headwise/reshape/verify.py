"""Read a model folder and compare its answers with given ones: `python -m headwise.reshape.verify FOLDER PROBE HOW`.

A process of its own, which knows nothing but the files. HOW is `stock` for transformers, `own` for our own layout.
Prints {"difference": ..., "by": ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from headwise.gpt.checkpoint import load_model, read_tensors
from headwise.models.ask import answers
from headwise.models.weights import cast


def main(folder: Path, probe: Path, how: str) -> None:
    tensors = read_tensors(probe)
    model, by = _load(folder, how)
    with torch.no_grad():
        here = answers(cast(model, torch.float32), tensors["ids"])
    difference = (here.double() - tensors["answers"].double()).abs().max().item()
    print(json.dumps({"difference": difference, "by": by}))


def _load(folder: Path, how: str) -> tuple[nn.Module, str]:
    if how == "own":
        return load_model(folder)[0], "headwise"
    try:
        from headwise.models.hf import load_folder
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return load_model(folder)[0], "headwise (transformers is not installed)"
    return load_folder(folder), "stock transformers"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
