"""Where a model lies that is named on a command line or in Python: a folder, a GGUF file, a name on the hub.

A name on the hub (owner/name) is looked up in the cache of `huggingface_hub`, and downloaded through it where there is
a network: weights as safetensors, never pickles or code. A GGUF file becomes a folder once, which is kept in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import check_file

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
        # The library hands out what the cache has of a repository; after a price that is the config without weights.
        has_weights = any(folder.glob("*.safetensors"))
        if (folder / CONFIG).exists() and (has_weights or config_alone):
            return folder
    try:
        return Path(hub.snapshot_download(**options, etag_timeout=5))
    except Exception as error:  # no network, no such name, no right to read it: the library lets through what it meets
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"{name} is no folder here, and not in the hub's cache; it could not be downloaded ({reason[:80]}): run "
            f"`hf download {name}` where there is a network, or pass a folder"
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
