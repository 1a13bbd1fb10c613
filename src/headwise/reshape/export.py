"""A reshaped model as a plain folder, verified by a fresh process before it gets its name.

That process runs this module: `python -m headwise.reshape.export FOLDER PROBE stock|own|streamed DEVICE` reads a folder
with transformers, with our own layout, or layer by layer, knowing nothing but its files. It compares what the model
answers to the ids in PROBE with the answers there, and prints {"difference": ..., "by": ...}.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.gpt.checkpoint import load_model, read_tensors, write_tensors
from headwise.models.ask import answers, device_of
from headwise.models.lineage import RECORD
from headwise.models.open import Folder, open_folder, write_folder
from headwise.models.stream import stream_of
from headwise.models.weights import cast, reads_as_stock, windows_of
from headwise.reshape.workplace import Workplace
from headwise.words import Note, labelled

# Largest difference of a logit that still passes: rounding alone makes one, for the reader may compute in another
# order. Weights in half precision are compared in float32, too, except those of a streamed model.
TOLERANCE = 1e-4
PROBE_TOKENS = 256  # ids that both models read, where no window asks for more: a round choice


def export(
    model: nn.Module,
    source: Folder,
    workplace: Workplace,
    record: dict[str, Any],
    say: Callable[[Note], None] = lambda line: None,
) -> str:
    """Write `model` with the tokenizer of `source` and `record` as headwise.json; returns what was verified, in words.

    The folder gets its name at the end (`Workplace.finish`); `say` hears what is being done.

    A fresh process reads the folder back and compares its logits; a folder that fails is cleared away where the
    caller leaves `workplace`.
    """
    fresh = workplace.fresh
    shutil.rmtree(fresh, ignore_errors=True)  # what a process that was killed has left
    fresh.mkdir()
    say(Note.of("reshaped.writes", folder=workplace.shown))
    write_folder(fresh, model, source)
    say(Note.of("reshaped.verifies"))
    verified = verify(model, fresh, workplace.probe, source.context)
    write_whole(fresh / RECORD, json.dumps({**record, "verified": verified}, indent=2, ensure_ascii=False) + "\n")
    workplace.finish()
    return verified


@torch.no_grad()
def verify(model: nn.Module, folder: Path, probe: Path, context: int | None) -> str:
    """Compare a folder with the model in memory; returns the comparison in words.

    A fresh process reads the folder. The file `probe` gives it ids, and what the model answers to them. `context` is
    the longest text that the model reads, None: of any length. Raises HeadwiseError where the two differ.
    """
    config: Any = model.config
    streamed = stream_of(model) is not None
    # Twice the widest window at least, so that a window of another length would show.
    count = max(PROBE_TOKENS, 2 * max(filter(None, windows_of(model)), default=0))
    count, dtype = min(count, context or count), next(model.parameters()).dtype
    # Ids from all over the vocabulary. A prime as stride repeats none before all have been, unless it divides the
    # size of the vocabulary. The 1 keeps id 0, often that of padding, from being the first.
    ids = (torch.arange(count)[None] * 7919 + 1) % int(config.vocab_size)
    # A streamed model has been in eval mode since it was made.
    wanted = answers(model if streamed else cast(model.eval(), torch.float32), ids)
    if not streamed:  # back to its own format; of a streamed model weights are borrowed, and cannot be cast
        cast(model, dtype)
    write_tensors(probe, {"ids": ids, "answers": wanted}, {})
    # -P: modules are not looked for in the folder that this is called from.
    command = [sys.executable, "-P", "-m", "headwise.reshape.export", str(folder), str(probe)]
    if streamed:
        command += ["streamed", str(device_of(model))]  # the same device: half precision rounds otherwise on another
    else:  # float32 is alike enough on all devices, and the CPU is always there
        command += ["stock" if reads_as_stock(model) else "own", "cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        probe.unlink(missing_ok=True)
    if done.returncode:  # the last line of a traceback says what went wrong
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HeadwiseError(f"the exported model cannot be read back: {last}; nothing was written")
    result = json.loads(done.stdout)
    reader, difference = result["by"], result["difference"]
    if not difference <= TOLERANCE:  # true of NaN, too
        raise HeadwiseError(
            f"the exported model, read by {reader}, differs from the one in memory by {difference:.2g} in a logit, "
            f"more than {TOLERANCE:.2g}; nothing was written"
        )
    return Note.of("reshaped.read_back", reader=labelled("reshaped", reader), difference=f"{difference:.1e}")


def main(folder: Path, probe: Path, how: str, device: str) -> None:
    tensors, _ = read_tensors(probe)  # the file has no other data
    if how == "streamed":  # not in float32: the answers in PROBE were computed in the format of the weights, too
        by, model = "headwise, layer by layer", open_folder(folder, stream=True, device=device).model
    elif how == "stock" and find_spec("transformers") is not None:
        from headwise.models.hf import load_folder  # imports transformers

        by, model = "stock transformers", cast(load_folder(folder), torch.float32)
    else:
        by = "headwise (transformers is not installed)" if how == "stock" else "headwise"
        model = cast(load_model(folder)[0], torch.float32)  # the model, without the tokenizer
    with torch.no_grad():
        here = answers(model, tensors["ids"]).cpu()
    difference = (here.double() - tensors["answers"].double()).abs().max().item()
    print(json.dumps({"difference": difference, "by": by}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
