"""Model folders in Hugging Face layout: config.json, model.safetensors, tokenizer.json.

A model with a Hugging Face form is written in it, so that `AutoModelForCausalLM.from_pretrained(folder)` gives the
same logits; one without (microgpt) keeps headwise's own names. Either way `config.json` carries the `headwise` config,
and reading goes by that. `safetensors` is imported only here; pickled weights are refused.

What headwise writes carries a digest in the header of the safetensors file, and of a model's config and tokenizer,
too. A bit that turned since is found when the file is read. Files of others have none, and are read without it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import read_bytes, read_json, write_whole
from headwise.gpt.forms import from_hf, hf_config, to_hf
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.tokens import BOUNDARY, Tokens
from headwise.layer.layer import shapes_alone

MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "model.safetensors")
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DIGEST = "sha256"
FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
TOO_MANY = 8  # times the numbers in a file: a model of so many is not built


def save_model(folder: str | Path, model: GPT, tokens: Tokens) -> None:
    """Write a model and its tokenizer. Each file appears whole, the weights last.

    What transformers' `AutoTokenizer` and `generate` need to give the same text as ours is written too: the boundary as
    the token that begins and ends a text.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = tokens.boundary is not None
    roles = ("bos_token", "eos_token", "unk_token", "pad_token") if known else ()
    id_roles = ("bos_token_id", "eos_token_id", "pad_token_id") if known else ()
    tokenizer = tokens.to_json()
    write_whole(folder / "tokenizer.json", tokenizer)
    config = hf_config(model.config, tokens.boundary)
    for name, content in (
        ("tokenizer_config.json", {**TOKENIZER_CONFIG, **dict.fromkeys(roles, BOUNDARY)}),
        ("generation_config.json", {"max_length": model.config.context, **dict.fromkeys(id_roles, tokens.boundary)}),
        ("config.json", config),
    ):
        write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    beside = {"config.json": _sha256(config["headwise"]), "tokenizer": _sha256(json.loads(tokenizer))}
    write_tensors(folder / "model.safetensors", to_hf(model), {"format": "pt", **beside})


def load_model(folder: str | Path) -> tuple[GPT, Tokens]:
    """Read a folder that `save_model` wrote. Raises HeadwiseError for anything damaged, foreign or pickled."""
    folder = Path(folder)
    section, config = _read_config(folder)
    weights = folder / "model.safetensors"
    tensors = read_tensors(weights)
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise HeadwiseError(f"{weights} has NaN or inf in {bad[0]}; the model is not usable")
    _check_sizes(folder, config, tensors)
    model = GPT(config)
    try:
        model.load_state_dict(from_hf(config, tensors))
    except (KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise HeadwiseError(f"{folder} holds weights that do not fit its config.json: {first}") from None
    tokens = Tokens.from_file(folder / "tokenizer.json")
    if len(tokens) > config.vocab_size:
        raise HeadwiseError(
            f"{folder / 'tokenizer.json'} has {len(tokens)} tokens and the model knows {config.vocab_size}: "
            f"they do not belong together"
        )
    written = read_metadata(weights)
    sealed = {"config.json": section, "tokenizer": read_json(folder / "tokenizer.json")}
    sealed |= {"tokenizer.json": tokens.vocabulary}  # all that earlier versions sealed of it
    for name, content in sealed.items():
        if written.get(name, digest := _sha256(content)) != digest:
            path = folder / Path(name).with_suffix(".json")
            raise HeadwiseError(f"{path} is not the one that {weights.name} was written with; bring that back")
    return model.eval(), tokens


def _check_sizes(folder: Path, config: GPTConfig, tensors: dict[str, Tensor]) -> None:
    """Compare what config.json describes with the weights, before anything of that size is made."""
    there = sum(tensor.numel() for tensor in tensors.values())
    side = max((side for tensor in tensors.values() for side in tensor.shape), default=0)
    sizes = {"n_layers": config.n_layers, "vocab_size": config.vocab_size, "d_model": config.d_model}
    sizes |= {"d_ff": config.feed_forward_width, "n_heads * head_dim": config.attention.q_dim}
    name, size = max(sizes.items(), key=lambda item: item[1])
    described = f"{name}={size:,}"
    if config.n_layers <= len(tensors) and size <= TOO_MANY * side:
        with shapes_alone():
            n_parameters = GPT(config).n_parameters
        if n_parameters <= TOO_MANY * there:
            return  # what does not fit in detail has a name, and is said with it
        described = f"{n_parameters:,} of them"
    raise HeadwiseError(
        f"{folder} holds weights that do not fit its config.json: that describes {described}, and there are "
        f"{there:,} in {len(tensors):,} tensors"
    )


def _sha256(document: Any, more: bytes = b"") -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode() + more).hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    if path.suffix in PICKLED:
        raise _pickle(path)
    data = read_bytes(path)
    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: a type that torch does not have
        # The length of a header may begin like a pickle or a zip archive, and goes on with zeros.
        if (data[:1] == b"\x80" or data[:2] == b"PK") and any(data[3:8]):
            raise _pickle(path, "a pickle under another name", "safetensors") from None
        raise HeadwiseError(f"{path} is damaged or cut short ({len(data)} bytes): {error}") from None
    header, contents = _split(data)
    written = (header.get("__metadata__") or {}).pop(DIGEST, None)
    if written not in (None, _sha256(header, contents)):
        raise HeadwiseError(f"{path} is damaged: its contents are not those that were written to it (SHA-256)")
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with a digest of what it holds, whole or not at all."""
    header, contents = _split(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
    header["__metadata__"] = dict(metadata)  # in our order: the library's differs from call to call
    header["__metadata__"][DIGEST] = _sha256(header, contents)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_whole(path, len(text).to_bytes(8, "little") + text + contents)


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


class Place(NamedTuple):
    """Where a tensor lies in a safetensors file."""

    path: Path
    start: int  # byte of the file
    size: int  # bytes
    dtype: str  # as the format calls it: "BF16"
    shape: tuple[int, ...]

    def borrow(self) -> Tensor:
        """The tensor as pages of the file, which the system brings and takes away; what is written to it is lost."""
        if self.dtype not in FORMATS:
            raise HeadwiseError(f"{self.path} holds numbers of type {self.dtype}; known are {', '.join(FORMATS)}")
        if not self.size:
            return torch.empty(self.shape, dtype=FORMATS[self.dtype])
        before = self.start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), before + self.size, access=mmap.ACCESS_COPY, offset=self.start - before)
        return torch.frombuffer(pages, dtype=FORMATS[self.dtype], offset=before).view(self.shape)


def tensors_in(path: Path) -> dict[str, Place]:
    """The tensors of a safetensors file, from its header alone; none where that is damaged."""
    with path.open("rb") as file:
        size, whole = int.from_bytes(file.read(8), "little"), path.stat().st_size
        try:
            header = json.loads(file.read(size)) if size < whole else {}
            header.pop("__metadata__", None)
            places = {}
            for name, entry in header.items():
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                shape, dtype = tuple(entry["shape"]), FORMATS.get(entry["dtype"])
                wanted = 0 if dtype is None else math.prod(shape) * dtype.itemsize
                if not 8 + size <= start <= start + wanted <= end <= whole:
                    return {}
                places[name] = Place(path, start, end - start, entry["dtype"], shape)
            return places
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file tensor by tensor, in no more memory than one takes, to a folder without its name yet."""
    kinds = {dtype: name for name, dtype in FORMATS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": kinds[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form strings in the header of a safetensors file that `read_tensors` accepts."""
    header, _ = _split(read_bytes(path))
    metadata: dict[str, str] = header.get("__metadata__") or {}
    return {name: text for name, text in metadata.items() if name != DIGEST}


def _pickle(path: Path, kind: str = "a pickle", remedy: str = "model.safetensors first") -> HeadwiseError:
    return HeadwiseError(f"{path} is {kind}, which can run code; convert it to {remedy}")


def _read_config(folder: Path) -> tuple[Any, GPTConfig]:
    """Our section of config.json, and the config that it describes."""
    if folder.is_file() and folder.suffix in PICKLED:
        raise _pickle(folder)
    if not folder.is_dir():
        raise HeadwiseError(f"{folder} is no run folder; train one with `headwise train --out {folder}`")
    if not (folder / "model.safetensors").exists():
        pickled = sorted(path for path in folder.iterdir() if path.suffix in PICKLED)
        if pickled:
            raise _pickle(pickled[0])
        raise HeadwiseError(f"{folder} has no model.safetensors: it is no run folder, or its training has not finished")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise HeadwiseError(f"{folder} has no {name}")
    path = folder / "config.json"
    try:
        section = read_json(path)["headwise"]
    except (HeadwiseError, KeyError, TypeError) as error:
        raise HeadwiseError(f"{path} does not describe a headwise model ({type(error).__name__}: {error})") from None
    try:
        return section, GPTConfig(**section)
    except HeadwiseError as error:
        raise HeadwiseError(f"{path}: {error}") from None
    except TypeError as error:
        raise HeadwiseError(f"{path} does not describe a headwise model ({error})") from None
