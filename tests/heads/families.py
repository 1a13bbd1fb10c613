"""Tiny models: ours, and every family of transformers that goes through its attention interface; what to feed them."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from small_models import shaken
from torch import Tensor, nn

from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import PRESETS

V, T, B = 131, 29, 2
TARGET, IMAGE, SOUND = 11, 20, 23  # tokens of a decoder, pixels, frames after the encoder's stride
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TABLES = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
ROTARY: dict[str, Any] = TABLES["rotary"]


@dataclass(frozen=True)
class Family:
    """An entry of families.toml, whose head says what its fields mean."""

    model: str
    w_o: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    like: str | None = None
    takes: str = "text"
    eager: bool = False


FAMILIES = {name: Family(**entry) for name, entry in TABLES["families"].items()}
TEXT = tuple(name for name, family in FAMILIES.items() if family.takes == "text")
DECODERS = tuple(name for name in TEXT if name != "bert")


def untrained(name: str, table: str = "families") -> Any:
    """A new model of a table, with the weights that it starts with."""
    family = Family(**TABLES[table][name])
    fields = {**(ROTARY if family.like else {}), **family.fields}
    model_class = getattr(tf, family.model)
    config = model_class.config_class(**{key: None if value == "none" else value for key, value in fields.items()})
    return model_class(config).eval()


def build(name: str) -> Any:
    """A new model whose attention is not flat, and in which no bias, sink or gain is what it starts at."""
    return shake(untrained(name))


def shake(model: nn.Module, std: float = 0.3, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std, generator=generator)
            elif key.endswith("weight"):  # gains of norms
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=std, generator=generator)
    return model


def gpt_of(preset: str = "llama", vocab_size: int = 17, **changes: Any) -> GPT:
    """A model of ours with two layers of six heads, which reads 41 tokens."""
    sizes = {"n_layers": 2, "n_heads": 6, "d_model": 24, "d_ff": 23, "context": 41}
    if preset == "llama":
        sizes["n_kv_heads"] = 2
    torch.manual_seed(2)
    model: GPT = shaken(GPT(GPTConfig(vocab_size=vocab_size, **{**PRESETS[preset].shape, **sizes, **changes})))
    return model


@cache
def model_of(name: str) -> Any:
    """One model of a family for all tests; they must leave it as it was."""
    return build(name)


def padding_mask(padding: str, length: int = T) -> Tensor:
    """(B,T), 1 = real; the second document is the shorter one."""
    mask = torch.ones(B, length, dtype=torch.long)
    if padding == "left":
        mask[1, :5] = 0
    elif padding == "right":
        mask[1, -5:] = 0
    return mask


def inputs_of(name: str, padding: str = "none", seed: int = 1) -> dict[str, Tensor]:
    """What the model is called with. Few distinct tokens, so that some come again."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(3, 17, (B, length), generator=generator)

    takes = FAMILIES[name].takes
    if takes == "image":
        return {"pixel_values": torch.randn(B, 3, IMAGE, IMAGE, generator=generator)}
    if takes == "sound":
        return {"input_features": torch.randn(B, 13, 2 * SOUND, generator=generator), "decoder_input_ids": ids(TARGET)}
    if takes == "pair":
        return {
            "input_ids": ids(T),
            "attention_mask": padding_mask(padding),
            "decoder_input_ids": ids(TARGET),
            "decoder_attention_mask": padding_mask(padding, TARGET),
        }
    return {"input_ids": ids(T), "attention_mask": padding_mask(padding)}


def answer(output: Any) -> Tensor:
    result: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return result


def real(name: str, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
    """(B,T,1) bool: the rows of the answer that stand for a token."""
    mask = inputs.get("decoder_attention_mask" if FAMILIES[name].takes == "pair" else "attention_mask")
    return torch.ones(*output.shape[:2], 1, dtype=torch.bool) if mask is None else mask.bool()[..., None]
