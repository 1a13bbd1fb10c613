"""A reshaped model as a plain folder, verified by a fresh process before it gets its name.

All work goes on in `OUT.partial`, beside OUT and on the same disk; the finished folder inside it is renamed to OUT in
one move. Whatever stops the work, OUT is whole or not there, and the source is only read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.model.checkpoint import save_model, write_tensors
from headwise.model.folder import Folder
from headwise.model.gpt import GPT
from headwise.model.tokens import Tokens
from headwise.reshape.distance import answers
from headwise.reshape.lineage import RECORD
from headwise.reshape.weights import stock_form

TOLERANCE = 1e-4  # largest difference of a logit in float32; coarser formats are allowed their own rounding
PROBE_TOKENS = 32
# What stands beside the weights and belongs to the tokenizer or to generation; weights and config are written anew.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def check_out(source: Path, out: Path, force: bool) -> None:
    """Raise HeadwiseError where `out` must not be written."""
    here, there = source.resolve(), out.resolve()
    if here == there:
        raise HeadwiseError(f"--out {out} is the source itself, which is never changed; pass another folder")
    if here in there.parents:
        raise HeadwiseError(
            f"--out {out} lies inside the source {source}, which is never changed; pass a folder elsewhere"
        )
    if there in here.parents:
        raise HeadwiseError(f"--out {out} holds the source {source}, which is never changed; pass a folder elsewhere")
    if not there.parent.is_dir():
        raise HeadwiseError(f"--out {out}: the folder {out.parent} does not exist")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise HeadwiseError(f"--out {out} is a file; pass a folder")
    if not force:
        raise HeadwiseError(f"--out {out} exists already; pass --force to replace it, or another folder")
    if not (out / RECORD).exists():
        raise HeadwiseError(
            f"--out {out} exists and has no {RECORD}, so it was not written by share or prune and --force leaves it "
            f"alone; pass another folder"
        )


def work_folder(out: Path) -> Path:
    """OUT.partial, where the work goes on."""
    return out.parent / f"{out.name}.partial"


def export(
    model: nn.Module, source: Folder, out: Path, record: dict[str, Any], say: Callable[[str], None] = lambda line: None
) -> str:
    """Write `model` to `out` with the tokenizer of `source` and `record` as headwise.json; returns what was verified.

    The folder is read back by a fresh process, stock transformers where the model has such a form, and its logits are
    compared with those in memory. A folder that fails is not left behind.
    """
    work = work_folder(out)
    fresh = work / "export"
    shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
    fresh.mkdir(parents=True)
    try:
        say(f"writing {out}")
        _write(model, source, fresh)
        say("verifying in a fresh process")
        said = verify(model, fresh, source.context)
        write_whole(fresh / RECORD, json.dumps({**record, "verified": said}, indent=2, ensure_ascii=False) + "\n")
        for path in fresh.iterdir():
            _sync(path)
        _move(fresh, out, work)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return said


def _write(model: nn.Module, source: Folder, fresh: Path) -> None:
    if isinstance(model, GPT):
        assert isinstance(source.tokens, Tokens)
        save_model(fresh, model, source.tokens)
        return
    written: Any = model
    written.save_pretrained(fresh)
    for name in COPIED:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, fresh / name)


def _move(fresh: Path, out: Path, work: Path) -> None:
    """Give the finished folder its name; what stood there is set aside first and removed after."""
    if not out.exists():
        fresh.rename(out)
        return
    aside = work / "replaced"
    shutil.rmtree(aside, ignore_errors=True)
    out.rename(aside)
    try:
        fresh.rename(out)
    except BaseException:  # Ctrl-C too: what stood there comes back
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@torch.no_grad()
def verify(model: nn.Module, folder: Path, context: int | None) -> str:
    """Compare a folder, read by a fresh process, with the model in memory; returns what was compared, in words."""
    config: Any = model.config
    count = min(PROBE_TOKENS, context or PROBE_TOKENS)
    n_tokens = int(config.vocab_size)
    ids = (torch.arange(2 * count).reshape(2, count) * 7919 + 1) % n_tokens  # a stride that visits the vocabulary
    wanted = answers(model.eval(), ids)
    probe = folder.parent / "probe.safetensors"
    write_tensors(probe, {"ids": ids, "answers": wanted.contiguous()}, {})
    stock = not isinstance(model, GPT) or stock_form(model.config) is not None
    command = [sys.executable, "-m", "headwise.reshape.verify", str(folder), str(probe), "stock" if stock else "own"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        probe.unlink(missing_ok=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HeadwiseError(f"the exported model cannot be read back: {last}; nothing was written")
    found = json.loads(done.stdout)
    allowed = TOLERANCE if wanted.dtype == torch.float32 else _rounding(wanted)
    if not found["difference"] <= allowed:
        raise HeadwiseError(
            f"the exported model, read by {found['by']}, differs from the one in memory by {found['difference']:.2g} "
            f"in a logit, more than {allowed:.2g}; nothing was written"
        )
    return f"{found['by']}, in a fresh process, largest difference of a logit {found['difference']:.1e}"


def _rounding(wanted: Tensor) -> float:
    """Four steps of the number format at the largest value."""
    return 4 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max())
