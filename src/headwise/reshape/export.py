"""A reshaped model as a plain folder: written beside its place, verified by a fresh process, then renamed.

That process runs this module: `python -m headwise.reshape.export FOLDER PROBE stock|own` reads the folder with
transformers or with our own layout, knowing nothing but its files. It compares what the model answers to the ids in
PROBE with the answers there, and prints {"difference": ..., "by": ...}.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.families import RECORD
from headwise.files import whole_folder, write_whole
from headwise.gpt.checkpoint import load_model, read_tensors, write_tensors
from headwise.models.ask import answers
from headwise.models.open import Folder, write_folder
from headwise.models.weights import cast, reads_as_stock, windows_of
from headwise.reshape.arguments import check_free, check_place

TOLERANCE = 1e-4  # largest difference of a logit in float32 that rounding in another order may make
PROBE_TOKENS = 256  # ids that both models read, where no window asks for more


def export(
    model: nn.Module,
    source: Folder,
    out: Path,
    force: bool,
    record: dict[str, Any],
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Write `model` to `out` with the tokenizer of `source`, and `record` as headwise.json.

    A fresh process reads the folder back and compares its logits; only then does the folder get its name. `say`
    hears what is being done. Returns what was verified, in words. Raises HeadwiseError where the two differ, or where
    `out` may not be replaced; nothing is written then.
    """
    with replaced(source.path, out, force) as fresh:
        say(f"writing {out}")
        write_folder(fresh, model, source)
        say("verifying in a fresh process")
        verified = verify(model, fresh, source.context)
        text = json.dumps({**record, "verified": verified}, indent=2, ensure_ascii=False)
        write_whole(fresh / RECORD, text + "\n")
    return verified


@contextmanager
def replaced(source: Path, out: Path, force: bool) -> Iterator[Path]:
    """A new folder to fill; when the block ends it takes the place of `out`.

    A model that `out` held before stays until then. A kill between the two renames leaves it in a hidden folder beside
    `out`, whose name ends in .before.
    """
    before = out.with_name(f".{out.name}.{os.getpid()}.before")
    try:
        with whole_folder(out) as fresh:
            yield fresh
            check_place(source, out)  # hours may have passed since the first check
            check_free(out, force)
            if out.exists():
                out.rename(before)
    except BaseException:  # Ctrl-C, too
        if before.exists() and not out.exists():
            before.rename(out)
        raise
    shutil.rmtree(before, ignore_errors=True)


@torch.no_grad()
def verify(model: nn.Module, folder: Path, context: int | None) -> str:
    """Compare a folder with the model in memory; returns the comparison in words.

    A fresh process reads the folder, in float32, as the model in memory is read. `context` is the longest text that the
    model reads, None: of any length. Raises HeadwiseError where a logit differs by more than TOLERANCE.
    """
    config: Any = model.config
    # Twice the widest window at least, so that a window of another length would show.
    count = max(PROBE_TOKENS, 2 * max(filter(None, windows_of(model)), default=0))
    count = min(count, context or count)
    # Ids from all over the vocabulary. A prime as stride repeats none before all have been, unless it divides the
    # size of the vocabulary. The 1 keeps id 0, often that of padding, from being the first.
    ids = (torch.arange(count)[None] * 7919 + 1) % int(config.vocab_size)
    dtype = next(model.parameters()).dtype
    wanted = answers(cast(model.eval(), torch.float32), ids)
    cast(model, dtype)
    with tempfile.TemporaryDirectory() as temporary:
        probe = Path(temporary) / "probe.safetensors"
        write_tensors(probe, {"ids": ids, "answers": wanted}, {})
        # -P: modules are not looked for in the folder that this is called from.
        command = [sys.executable, "-P", "-m", "headwise.reshape.export", str(folder), str(probe)]
        command.append("stock" if reads_as_stock(model) else "own")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    return f"{reader}, in a fresh process, largest difference of a logit {difference:.1e}"


def main(folder: Path, probe: Path, how: str) -> None:
    tensors, _ = read_tensors(probe)  # the file has no other data
    if how == "stock" and find_spec("transformers") is not None:
        from headwise.models.hf import load_folder  # imports transformers

        by, model = "stock transformers", load_folder(folder)
    else:
        by = "headwise (transformers is not installed)" if how == "stock" else "headwise"
        model = load_model(folder)[0]
    with torch.no_grad():
        here = answers(cast(model, torch.float32), tensors["ids"])
    difference = (here.double() - tensors["answers"].double()).abs().max().item()
    print(json.dumps({"difference": difference, "by": by}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
