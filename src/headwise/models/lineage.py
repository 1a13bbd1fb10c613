"""Where a model lies that is named on a command line or in Python, and where the heads of a reshaped one come from.

It is a folder, a GGUF file, or a name on the hub (owner/name). That is looked up in the cache of `huggingface_hub`, and
downloaded through it where there is a network: weights as safetensors, never pickles or code. A GGUF file becomes a
folder once, which is kept in the cache.

`headwise.json` of a reshaped model says which head of each earlier model its heads were. Models are known by the
contents of their weights, not by their folders, which are moved and renamed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.families import RUN, check_folder, read_config
from headwise.files import check_file, read_json
from headwise.records import Ancestor, from_json, head_name
from headwise.words import refusal

if TYPE_CHECKING:
    from torch import nn

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG = "config.json"
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # of a repository's files: no pickles, no code
GGUF_PACKAGES = ("transformers", "torch", "gguf", "accelerate")  # that transformers reads such a file with


def located(source: Path) -> Path:
    """The folder of a model. Raises HeadwiseError where it is named, and neither here nor to be had."""
    if _is_gguf(source):
        return _from_gguf(source)
    return _from_hub(str(source)) if _is_hub_name(source) else source


def config_of(model: str) -> str | Path | dict[str, Any]:
    """What `price` reads: of a name on the hub a folder with the config alone, of a GGUF file the config as a dict.

    Anything else is handed back as it is. Raises HeadwiseError as `located` does.
    """
    path = Path(model)
    if _is_gguf(path):
        _require_readers(path)
        from headwise.models.hf import gguf_config

        return gguf_config(path)
    return _from_hub(model, config_alone=True) if _is_hub_name(path) else model


def _is_hub_name(source: Path) -> bool:
    """Is it a name on the hub? Where owner/ is a folder here, it is the path of a folder, perhaps mistyped."""
    return bool(HUB_NAME.fullmatch(str(source))) and not source.parent.exists()


def _from_hub(name: str, config_alone: bool = False) -> Path:
    try:
        import huggingface_hub as hub
    except ModuleNotFoundError:
        raise HeadwiseError(
            f"{name} is no folder here; to look it up on the hub: pip install 'headwise[hf]', or pass a folder"
        ) from None
    options: dict[str, Any] = {"repo_id": name, "allow_patterns": [CONFIG] if config_alone else PATTERNS}
    with suppress(Exception):  # it is not in the cache, or in a state that the library does not take
        folder = Path(hub.snapshot_download(**options, local_files_only=True))
        # The library hands out what the cache has: after a price the config alone, after a broken download some shards.
        (read_config if config_alone else check_folder)(folder)
        return folder
    try:
        return Path(hub.snapshot_download(**options, etag_timeout=5))  # seconds: without a network nobody waits long
    except Exception as error:  # no network, no such name, no right to read it: the library lets through what it meets
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"{name} is no folder here, and not in the hub's cache; it could not be downloaded ({reason[:80]}): "
            f"run `hf download {name}` where there is a network, or pass a folder"
        ) from None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _from_gguf(path: Path) -> Path:
    """A folder with the weights of a GGUF file in bfloat16, made once; with another size or time it is another file."""
    check_file(path)
    state = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "headwise" / f"{path.stem}-{key}"
    if not folder.exists():
        _require_readers(path)
        from headwise.models.hf import write_gguf

        write_gguf(path, folder)
    return folder


def _require_readers(path: Path) -> None:
    lacking = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise HeadwiseError(f"{path} is a GGUF file; to read one: pip install {' '.join(lacking)}")


# Where the heads of a reshaped model come from.

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
        names = {}
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
