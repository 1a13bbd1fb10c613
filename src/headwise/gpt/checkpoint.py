"""Model folders in Hugging Face layout: config.json, model.safetensors, tokenizer.json.

A model with a Hugging Face form is written in it, so that `AutoModelForCausalLM.from_pretrained(folder)` gives the
same logits; one without (microgpt) keeps headwise's own names. Either way `config.json` carries the `headwise` config,
and reading goes by that. `safetensors` is imported only here; pickled weights are refused.

The forms tell which architecture computes the same function, its config and its tensor names (`hf_form`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from headwise.corpus.tokens import BOUNDARY, Tokens
from headwise.errors import HeadwiseError
from headwise.families import FAMILIES, check_folder
from headwise.files import read_bytes, write_json, write_whole
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.layer.projections import shapes_alone

Tensors = dict[str, Tensor]  # by their names

# For transformers, which else may drop the spaces before commas and full stops from what it decodes.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}


def save_model(folder: str | Path, model: GPT, tokens: Tokens) -> None:
    """Write a model and its tokenizer. Each file appears whole, the weights last.

    What transformers' `AutoTokenizer` and `generate` need to give the same text as ours is written too: the boundary as
    the token that begins and ends a text, stands for unknown characters, and fills up the shorter texts of a batch.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = dict(TOKENIZER_CONFIG)
    generation = {"max_length": model.config.context}
    if tokens.boundary is not None:
        texts |= dict.fromkeys(
            ("bos_token", "eos_token", "unk_token", "pad_token"), BOUNDARY
        )
        generation |= dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id"), tokens.boundary
        )
    write_whole(folder / "tokenizer.json", tokens.to_json())
    config = hf_config(model.config, tokens.boundary)
    for name, content in (
        ("tokenizer_config.json", texts),
        ("generation_config.json", generation),
        ("config.json", config),
    ):
        write_json(folder / name, content)
    # "format" says that the tensors are torch's; some versions of transformers refuse a file without it.
    write_tensors(folder / "model.safetensors", to_hf(model), {"format": "pt"})


def load_model(folder: str | Path) -> tuple[GPT, Tokens]:
    """Read a folder that `save_model` wrote: the model, in evaluation mode on the CPU, and its tokenizer.

    Raises HeadwiseError for anything damaged, foreign or pickled.
    """
    folder = Path(folder)
    described = check_folder(folder)
    weights = folder / "model.safetensors"
    path = folder / "config.json"
    for name in ("model.safetensors", "tokenizer.json"):
        if not (folder / name).exists():
            raise HeadwiseError(f"{folder} has no {name}")
    try:
        config = GPTConfig(**described["headwise"])
    except HeadwiseError as error:
        raise HeadwiseError(f"{path}: {error}") from None
    except (KeyError, TypeError) as error:
        raise HeadwiseError(
            f"{path} does not describe a headwise model ({type(error).__name__}: {error})"
        ) from None
    tensors, _ = read_tensors(weights)
    # A buffer of one's own attention may be a mask of -inf.
    for name, tensor in tensors.items():
        if config.own_attention is None and not tensor.isfinite().all():
            raise HeadwiseError(
                f"{weights} has NaN or inf in {name}; the model is not usable"
            )
    try:
        state = from_hf(config, tensors)
        # A new GPT draws weights, which are replaced: the caller's random numbers must not move for it.
        with torch.random.fork_rng(devices=[]):
            model = GPT(config)
        model.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        # torch lists all that does not fit, a line each
        misfit = str(error).strip().splitlines()[-1].strip()
        raise HeadwiseError(
            f"{folder} holds weights that do not fit its config.json: {misfit}"
        ) from None
    return model.eval(), Tokens.from_file(folder / "tokenizer.json")


def read_tensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file, and the strings by their names in its header.

    Raises HeadwiseError for a file that is damaged.
    """
    data = read_bytes(path)
    try:
        tensors = load(data)
    # KeyError: a type that torch does not have
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise HeadwiseError(
            f"{path} is damaged or cut short ({len(data)} bytes): {error}"
        ) from None
    size = int.from_bytes(data[:8], "little")  # of the header
    return tensors, json.loads(data[8 : 8 + size]).get("__metadata__") or {}


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all."""
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(on_cpu, metadata))


def hf_form(config: GPTConfig) -> str | None:
    """The Hugging Face form that computes exactly this model: llama, qwen3, gpt2, or None.

    That is the first family of families.toml all of whose `needs` are among the facts of the model.
    """
    if config.own_attention is not None:
        return None
    spec = config.attention
    facts = asdict(config) | {
        "gelu": config.activation.startswith("gelu"),
        # W_Q, W_K, W_V and W_O have equal sizes, as those of GPT-2.
        "square": spec.n_kv_heads == spec.n_heads and spec.q_dim == config.d_model,
    }
    for name, family in FAMILIES.items():
        if family.form is not None and family.form["needs"].items() <= facts.items():
            return name
    return None


def hf_config(config: GPTConfig, boundary: int | None) -> dict[str, Any]:
    """config.json: the Hugging Face fields, where there is a form, and our own under `headwise`.

    boundary  the id of the token that begins and ends documents; None where there is none
    """
    record = _record(config)
    general = {
        "vocab_size": config.vocab_size,
        "bos_token_id": boundary,
        "eos_token_id": boundary,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
        "headwise": asdict(config),
    }
    if not record:
        return {"model_type": "headwise", **general}
    fields = {
        field: attrgetter(path)(config) for field, path in record["fields"].items()
    }
    # under their name for it
    fields[record["activation"]] = record.get(config.activation, config.activation)
    # which transformers reads in `rope_parameters` from version 5 on
    if "rope_theta" in fields:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        fields["rope_parameters"] = rope
    return {
        "model_type": hf_form(config),
        "architectures": [record["architecture"]],
        **fields,
        **general,
    }


def _record(config: GPTConfig) -> Mapping[str, Any]:
    """How the model is written in its form; empty where it has none."""
    form = hf_form(config)
    return (form and FAMILIES[form].form) or {}


def _stacks(config: GPTConfig) -> dict[str, dict[str, int]]:
    """The tensors of the file, and which of ours each stacks, with their rows: GPT-2 has W_Q, W_K and W_V in one.

    "transformer.h.0.attn.c_attn.weight" -> the weights of q_proj, k_proj and v_proj of block 0; in Llama each has its
    own. Without a form each tensor stands for itself.
    """
    record = _record(config)
    state = _meta_state(config)
    # the form has these biases always, also for a model of ours that has none: then as zeros
    if "biases" in record:
        for name, tensor in _meta_state(replace(config, bias=True)).items():
            if re.search(record["biases"], name):
                state[name] = tensor
    parts = record.get("names", {})
    stacks: dict[str, dict[str, int]] = {}
    for name, tensor in state.items():
        # it is the embedding, which is written once
        if config.tied and name == "lm_head.weight":
            continue
        # Part by part: "blocks.0.feed_forward.up.weight" -> "model.layers.0.mlp.up_proj.weight".
        theirs = ".".join(parts.get(part, part) for part in name.split("."))
        stacks.setdefault(theirs, {})[name] = len(tensor)
    return stacks


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """GPT-2's matrices, whose names alone have `.c_`, hold y = x W instead of y = W x."""
    return tensor.T if ".c_" in name and tensor.ndim == 2 else tensor


def _meta_state(config: GPTConfig) -> Tensors:
    """Our tensors by their names, which have a shape each and no numbers: nothing of their size is made."""
    with shapes_alone():
        return GPT(config).state_dict()


def to_hf(model: GPT) -> Tensors:
    """The tensors under the names of the form. Biases that only the form has are zeros."""
    state = model.state_dict()
    tensors = {}
    for name, ours in _stacks(model.config).items():
        parts = []
        for part, rows in ours.items():
            parts.append(state.get(part, model.lm_head.weight.new_zeros(rows)))
        tensors[name] = _transposed(name, torch.cat(parts))
    return tensors


def from_hf(config: GPTConfig, tensors: Tensors) -> Tensors:
    """The reverse of `to_hf`: our tensors by our names. Raises KeyError for one too many or too few."""
    stacks = _stacks(config)
    state = Tensors()
    foreign = set(tensors) - set(stacks)
    if foreign:
        raise KeyError(f"the config has no place for {min(foreign)}")
    for name, ours in stacks.items():
        rows = torch.split(_transposed(name, tensors[name]), [*ours.values()])
        state |= zip(ours, rows, strict=True)
    for name in state.keys() - _meta_state(config).keys():
        if state.pop(name).any():
            raise KeyError(f"the config has no biases, and {name} is not zero")
    if config.tied:
        state["lm_head.weight"] = state["token_embedding.weight"]
    return state
