"""Any model: open it, find its attention, read each call. Here, without torch: where a model lies.

It is a folder, or a name on the hub (owner/name). A name is looked up in the cache of `huggingface_hub`, and downloaded
through it where there is a network: weights as safetensors, never pickles or code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, first_line
from headwise.families import require_transformers
from headwise.words import unknown

# "openai-community/gpt2", with one slash and no leading dot
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG = "config.json"
# of a repository's files: no pickles, no code
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


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
        require_transformers(path)
        # here: this module is imported where torch is not
        from headwise.models.hf import gguf_config

        return path.stem, gguf_config(path)
    if _is_hub_name(path):
        return str(path), _from_hub(str(path), [CONFIG]) / CONFIG
    file = path / CONFIG if path.is_dir() else path
    if not file.exists():
        raise HeadwiseError(
            f"{file} does not exist; pass a folder with {CONFIG}, such a file, or a preset"
        )
    # llama/config.json and llama are called "llama", sizes.json is "sizes.json"; the folder "." has no name
    whole = path.resolve()
    return whole.parent.name if path.name == CONFIG else whole.name, file


# Bits of one number. MXFP4 shares a scale of 8 bits among 32 numbers of 4; other scales are not counted.
BITS: dict[str, float] = {
    "fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4, "mxfp4": 4.25,
}  # fmt: skip
LONG_NAMES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16"}
# float8_e4m3fn: eight bits, and how they are used
OF_TORCH = re.compile(r"float(\d+)(_e\dm\d(fn)?(uz)?)?")
# the formats that models run in, by torch's names
COMPUTED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def number_format(name: object) -> str:
    """The short name, a key of BITS, of a number format: float16, half, torch.float16 and fp16 are all "fp16".

    Raises:
        HeadwiseError: for a name that is not known.
    """
    word = str(name).lower().removeprefix("torch.")
    short = LONG_NAMES.get(word) or OF_TORCH.sub(r"fp\1", word)
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


def _from_hub(name: str, patterns: list[str] = PATTERNS) -> Path:
    """The folder with the files of a name on the hub, downloaded as far as the cache lacks them."""
    try:
        import huggingface_hub as hub
    except ModuleNotFoundError:
        raise HeadwiseError(
            f"{name} is no folder here; to look it up on the hub: pip install 'headwise[hf]', or pass a folder"
        ) from None
    try:
        # It asks for the newest version, so many seconds at most; without a network it hands out the cache's.
        folder = hub.snapshot_download(name, allow_patterns=patterns, etag_timeout=5)
        return Path(folder)
    # no network, no such name, no right to read it: the library lets through what it meets
    except Exception as error:
        raise HeadwiseError(
            f"{name} is no folder here, and not in the hub's cache; it could not be downloaded "
            f"({first_line(error)[:80]}): run `hf download {name}` where there is a network, or pass a folder"
        ) from None


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()
