"""Where the heads of a reshaped model come from: `headwise.json` says which head of each earlier model they were.

Models are known by the contents of their weights, not by their folders, which are moved and renamed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.files import read_json
from headwise.folders import RUN
from headwise.records import Ancestor, from_json, head_name
from headwise.words import refusal

if TYPE_CHECKING:
    from torch import nn

RECORD = "headwise.json"  # what was done; also the sign that a folder may be replaced
WEIGHTS = "model*.safetensors"
BLOCK = 1 << 24  # bytes read at once


def ancestors(source: Path, origins: Sequence[Sequence[int]], out: Path | None) -> tuple[Ancestor, ...]:
    """The models that a child of `source`, to be written to `out`, comes from, the nearest first.

    origins  for each layer of the child the number in `source` of each of its heads
    """

    def as_written(path: Path) -> str:
        """The path as seen from `out`, so that both folders may be moved together."""
        return str(path) if out is None else os.path.relpath(path.resolve(), out.resolve())

    lineage = [Ancestor(as_written(source), digest(source), tuple(map(tuple, origins)))]
    for older in recorded(source):
        try:
            heads = []
            for numbers, older_numbers in zip(origins, older.heads, strict=True):
                heads.append(tuple(older_numbers[n] for n in numbers))
            lineage.append(Ancestor(as_written(source / older.folder), older.digest, tuple(heads)))
        except (ValueError, IndexError):
            raise _damaged(source / RECORD) from None
    return tuple(lineage)


def digest(folder: Path) -> str:
    """SHA-256 of a folder's weights."""
    paths = [path.resolve() for path in sorted(folder.glob(WEIGHTS))]
    return _sha256(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the weights of a model in memory."""
    import torch

    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


@lru_cache(maxsize=16)  # a command asks several times, and files may be large
def _sha256(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of files one after the other; sizes and times are there so that a changed file is read again."""
    hashed = hashlib.sha256()
    for path, _, _ in files:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                hashed.update(block)
    return hashed.hexdigest()


def run_of(folder: Path) -> Path | None:
    """The run of headwise that a folder is, or that its model comes from; None without one, or where it has moved."""
    if (folder / RUN).exists():
        return folder
    for older in recorded(folder):
        path = folder / older.folder
        if (path / RUN).exists() and digest(path) == older.digest:
            return path
    return None


def require_run(folder: Path) -> Path:
    """`run_of` where nothing but the run knows what the model was trained on."""
    run = run_of(folder)
    if run is None:
        raise refusal("no_lineage", folder=folder)
    return run


def counterparts(folder: Path, other: Path) -> dict[str, str] | None:
    """Heads of one model and the heads of another that they come from, go to, or share an ancestor with, by name.

    None where neither comes from the other and both come from no third model.
    """
    our_record, their_record = recorded(folder), recorded(other)
    if not our_record and not their_record:
        return None  # and no digest is taken, for files may be large
    our_names, their_names = _names_in(folder, our_record), _names_in(other, their_record)
    common = next((model for model in our_names if model in their_names), None)  # by digest, the nearest first
    if common is None:
        return None
    ours, theirs = our_names[common], their_names[common]
    if theirs is None:
        return ours  # None where both are the common model: the same weights
    name_of = {ancestor: name for name, ancestor in theirs.items()}
    if ours is None:
        return name_of
    return {name: name_of[ancestor] for name, ancestor in ours.items() if ancestor in name_of}


def _names_in(folder: Path, older: Sequence[Ancestor]) -> dict[str, dict[str, str] | None]:
    """What the heads of a folder were called in each model that it comes from, by digest; None for itself."""
    models: dict[str, dict[str, str] | None] = {digest(folder): None}
    for ancestor in older:
        names: dict[str, str] = {}
        for layer, numbers in enumerate(ancestor.heads):
            for n, old in enumerate(numbers):
                names[head_name(layer, n)] = head_name(layer, old)
        models[ancestor.digest] = names
    return models


def recorded(folder: Path) -> list[Ancestor]:
    """The ancestors that a folder's record names; none without a record. Raises HeadwiseError for a damaged one."""
    path = folder / RECORD
    if not path.exists():
        return []
    try:
        saved = from_json(dict[str, Any], read_json(path))
        return list(from_json(tuple[Ancestor, ...], saved.get("ancestors")))
    except HeadwiseError:
        raise _damaged(path) from None


def _damaged(path: Path) -> HeadwiseError:
    return HeadwiseError(f"{path} is damaged: it does not say where the model's heads come from; remove it")
