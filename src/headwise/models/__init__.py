"""Any model: open it, find its attention, read each call. Here, without torch: where a model lies, and its price.

It is a folder, a GGUF file, or a name on the hub (owner/name). A name is looked up in the cache of `huggingface_hub`,
and downloaded through it where there is a network: weights as safetensors, never pickles or code. A GGUF file becomes
a folder once, which is kept in a cache of our own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwise.cost import Price, make_setting, price_shape, read_shape
from headwise.cost.shape import ModelShape
from headwise.errors import HeadwiseError
from headwise.families import check_folder, read_config
from headwise.files import check_file, read_json

# "openai-community/gpt2", with one slash and no leading dot
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG = "config.json"
# of a repository's files: no pickles, no code
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
# what transformers needs to read such a file
GGUF_PACKAGES = ("transformers", "torch", "gguf", "accelerate")


def located(source: Path) -> Path:
    """The folder of a model, downloaded or made of a GGUF file where that is what is named.

    Raises HeadwiseError for a name that is not in the hub's cache and cannot be downloaded, and for a GGUF file that
    cannot be read. Whether a folder is one of a model is not looked at.
    """
    if _is_gguf(source):
        return _from_gguf(source)
    return _from_hub(str(source)) if _is_hub_name(source) else source


def price(config: Any, **setting: Any) -> Price:
    """What a model costs: parameters, cache, FLOPs, bytes moved, what fits in memory.

    Args:
        config: the name of a preset; the path of a config.json, of a folder that holds one or of a GGUF file; a name
            on the hub; the dict of a config.json; an AttentionSpec (one layer, attention alone); a GPTConfig, a config
            of transformers, or a model that has one of these as `config` or `spec`
        **setting: all optional: context (tokens; default the model's own length), batch (texts, 1), dtype and
            kv_dtype (fp32, bf16, fp8, ...; default the config's), gpu_memory ("24GiB" or bytes)

    Raises:
        HeadwiseError: with the name of the field, for what cannot be priced exactly.
    """
    name, shape = shape_of(config)
    return price_shape(name, shape, make_setting(shape, **setting))


def shape_of(config: Any) -> tuple[str, ModelShape]:
    """What `cost.read_shape` gives, of a name on the hub and of a GGUF file, too."""
    path = Path(config) if isinstance(config, str | Path) else Path()
    if _is_gguf(path):
        _require_readers(path)
        # here: this module is imported where torch is not
        from headwise.models.hf import gguf_config

        shape = read_shape(gguf_config(path))[1]
        note = (
            "a GGUF file: all weights are priced in one number format, however the file packs them"
        )
        return path.stem, shape.noted(note)
    if isinstance(config, str) and _is_hub_name(path):
        return config, read_shape(_from_hub(config, config_alone=True))[1]
    return read_shape(config)


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
    options: dict[str, Any] = {
        "repo_id": name,
        "allow_patterns": [CONFIG] if config_alone else PATTERNS,
    }
    # First from the cache, without a network. What is suppressed: it is not there, or not whole.
    with suppress(Exception):
        folder = Path(hub.snapshot_download(**options, local_files_only=True))
        # The library hands out what the cache has, if that is the config alone (after `shape_of`) or some shards
        # (after a broken download). Here this raises, so that the rest is downloaded below.
        (read_config if config_alone else check_folder)(folder)
        index = folder / "model.safetensors.index.json"
        if not config_alone and index.exists() and not (folder / "model.safetensors").exists():
            for name in read_json(index)["weight_map"].values():
                (folder / name).stat()
        return folder
    try:
        # The library asks first which version is the newest: so many seconds at most, for there may be no network.
        return Path(hub.snapshot_download(**options, etag_timeout=5))
    # no network, no such name, no right to read it: the library lets through what it meets
    except Exception as error:
        # The first line of its message, or the name of its class where it has none.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"{name} is no folder here, and not in the hub's cache; it could not be downloaded ({reason[:80]}): "
            f"run `hf download {name}` where there is a network, or pass a folder"
        ) from None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _from_gguf(path: Path) -> Path:
    """A folder with the weights of a GGUF file, made once.

    Its name has a hash of the file's path, size and time of change: a file that has changed gets another folder.
    """
    check_file(path)
    state = path.stat()
    # 2 is a number of the way in which the folder is made. 16 hexadecimal digits are 64 bits: two files of one name get
    # the same ones by chance once in 2^64.
    key = hashlib.sha256(
        f"{path.resolve()} {state.st_size} {state.st_mtime_ns} 2".encode()
    ).hexdigest()[:16]
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
