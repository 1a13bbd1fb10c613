"""Model folders in Hugging Face layout: config.json, model.safetensors, tokenizer.json.

A model with a Hugging Face form is written in it, so that `AutoModelForCausalLM.from_pretrained(folder)` gives the
same logits; one without (microgpt) keeps headwise's own names. Either way `config.json` carries the `headwise` config,
and reading goes by that. `safetensors` is imported only here; pickled weights are refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.gpt.forms import from_hf, hf_config, to_hf
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.tokens import BOUNDARY, Tokens

MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "model.safetensors")
TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
    write_whole(folder / "tokenizer.json", tokens.to_json())
    for name, content in (
        ("tokenizer_config.json", {**TOKENIZER_CONFIG, **dict.fromkeys(roles, BOUNDARY)}),
        ("generation_config.json", {"max_length": model.config.context, **dict.fromkeys(id_roles, tokens.boundary)}),
        ("config.json", hf_config(model.config, tokens.boundary)),
    ):
        write_whole(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / "model.safetensors", save(to_hf(model), metadata={"format": "pt"}))


def load_model(folder: str | Path) -> tuple[GPT, Tokens]:
    """Read a folder that `save_model` wrote. Raises HeadwiseError for anything damaged, foreign or pickled."""
    folder = Path(folder)
    config = _read_config(folder)
    tensors = read_tensors(folder / "model.safetensors")
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise HeadwiseError(f"{folder / 'model.safetensors'} has NaN or inf in {bad[0]}; the model is not usable")
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
    return model.eval(), tokens


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    if path.suffix in PICKLED:
        raise _pickle(path)
    data = path.read_bytes()
    try:
        tensors: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        if data[:1] == b"\x80" or data[:2] == b"PK":
            raise _pickle(path, "a pickle under another name", "safetensors") from None
        raise HeadwiseError(f"{path} is damaged or cut short ({len(data)} bytes): {error}") from None
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    write_whole(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata))


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form strings in the header of a safetensors file that `read_tensors` accepts."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def _pickle(path: Path, kind: str = "a pickle", remedy: str = "model.safetensors first") -> HeadwiseError:
    return HeadwiseError(f"{path} is {kind}, which can run code; convert it to {remedy}")


def _read_config(folder: Path) -> GPTConfig:
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
    try:
        return GPTConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8"))["headwise"])
    except HeadwiseError as error:
        raise HeadwiseError(f"{folder / 'config.json'}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise HeadwiseError(
            f"{folder / 'config.json'} does not describe a headwise model ({type(error).__name__}: {error})"
        ) from None
