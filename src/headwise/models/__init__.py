"""Any model: open it, find its attention, read each call. Here, without torch: where a model lies.

It is a folder, or a name on the hub (owner/name). A name is looked up in the cache of `huggingface_hub`, and downloaded
through it where there is a network: weights as safetensors, never pickles or code.
"""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, first_line
from headwise.families import check_folder, read_config
from headwise.files import read_json
from headwise.words import unknown

# "openai-community/gpt2", with one slash and no leading dot
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG = "config.json"
# of a repository's files: no pickles, no code
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
# what transformers needs to read such a file
GGUF_PACKAGES = ("transformers", "torch", "gguf", "accelerate")


def located(source: Path) -> Path:
    """The folder of a model, downloaded where a name on the hub is given.

    Raises HeadwiseError for a name that is not in the hub's cache and cannot be downloaded, and for a GGUF file.
    Whether a folder is one of a model is not looked at.
    """
    if _is_gguf(source):
        raise HeadwiseError(
            f"{source} is a GGUF file; read it with transformers, model = AutoModelForCausalLM.from_pretrained("
            f"{str(source.parent)!r}, gguf_file={source.name!r}), and pass headwise.open(model)"
        )
    return _from_hub(str(source)) if _is_hub_name(source) else source


def config_source(description: str | Path) -> tuple[str, Path | dict[str, Any]]:
    """A short name, and the config.json, of what lies at a path or is called so on the hub; of a GGUF file its fields.

    Raises HeadwiseError where there is none.
    """
    path = Path(description)
    if _is_gguf(path):
        _require_readers(path)
        # here: this module is imported where torch is not
        from headwise.models.hf import gguf_config

        return path.stem, gguf_config(path)
    if _is_hub_name(path) and not path.exists():
        return str(description), _from_hub(str(description), config_alone=True) / CONFIG
    if not path.exists():
        raise HeadwiseError(
            f"{path} does not exist; pass a folder with {CONFIG}, such a file, or a preset"
        )
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise HeadwiseError(f"{path} holds no {CONFIG}; pass the folder of a model")
    # Whose name the model gets: llama/config.json and llama give "llama", sizes.json gives "sizes.json". The path is
    # resolved, for the folder "." has no name.
    named = path.resolve().parent if path.name == CONFIG else path.resolve()
    return named.name, file


# Bits of one number. MXFP4 shares a scale of 8 bits among 32 numbers of 4; other scales are not counted.
BITS: dict[str, float] = {
    "fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4, "mxfp4": 4.25,
}  # fmt: skip
LONG_NAMES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16"}
# those that models run in, as torch calls them
COMPUTED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def number_format(name: object) -> str:
    """The short name, one of BITS, of a number format that is given by a name of it, or as a dtype of torch.

    Raises:
        HeadwiseError: for a name that is not known.
    """
    # str(torch.float16) is "torch.float16"
    long = str(name).lower().removeprefix("torch.")
    # float16 -> fp16, float8_e4m3fn -> fp8: what follows the bits only says how they are used.
    short = LONG_NAMES.get(long) or re.sub(
        r"float(\d+)(_e\dm\d(fn)?(uz)?)?", r"fp\1", long
    )
    if short in BITS:
        return short
    raise unknown(f"no number format {name!r}", short, BITS)


def computed_in(dtype: str) -> str:
    """torch's name of a number format that models run in; "auto" as it is. Raises HeadwiseError for any other."""
    if dtype == "auto":
        return dtype
    short = number_format(dtype)
    if short not in COMPUTED:
        raise HeadwiseError(
            f"dtype={dtype} is not computed in; one of auto, {', '.join(COMPUTED)}"
        )
    return COMPUTED[short]


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
        whole, index = folder / "model.safetensors", "model.safetensors.index.json"
        if not config_alone and not whole.exists():
            for shard in read_json(folder / index)["weight_map"].values():
                (folder / shard).stat()
        return folder
    try:
        # The library asks first which version is the newest: so many seconds at most, for there may be no network.
        return Path(hub.snapshot_download(**options, etag_timeout=5))
    # no network, no such name, no right to read it: the library lets through what it meets
    except Exception as error:
        raise HeadwiseError(
            f"{name} is no folder here, and not in the hub's cache; it could not be downloaded "
            f"({first_line(error)[:80]}): run `hf download {name}` where there is a network, or pass a folder"
        ) from None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _require_readers(path: Path) -> None:
    lacking = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise HeadwiseError(
            f"{path} is a GGUF file; to price one: pip install {' '.join(lacking)}"
        )
