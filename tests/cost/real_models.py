"""Tiny random models of transformers, those of models.toml, and what is counted on them."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

BATCH, TOKENS = 3, 13
PRESETS: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "studies/presets.toml").read_text("utf-8"))
TABLES = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def fields_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, those that it has of another entry among them."""
    base = fields_of(TABLES["like"][entry["like"]]) if "like" in entry else {}
    own = {key: None if value == "none" else value for key, value in entry.items() if key not in ("model", "like")}
    return base | own


LLAMA, WIDE, GEMMA, BERT = (fields_of(TABLES["like"][name]) for name in ("llama", "wide", "gemma", "bert"))
CASES = {name: (str(entry["model"]), fields_of(entry)) for name, entry in TABLES["models"].items()}


@cache
def build(case: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and its config as it would lie in config.json; made once for all tests."""
    name, fields = CASES[case]
    model_class = getattr(transformers, name)
    # The loop over experts is plain matrix products, which the counter of FLOPs knows.
    config = model_class.config_class(**fields, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = model_class(config).eval()
    written = json.loads(model.config.to_json_string())
    written["architectures"] = [name]
    return model, written


def inputs(config: dict[str, Any], tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """What the model reads: token ids (B,T)."""
    return {"input_ids": torch.randint(6, config["vocab_size"], (BATCH, tokens))}


@torch.no_grad()
def run(model: nn.Module, **arguments: Any) -> tuple[Any, int]:
    """What the model returns, and the FLOPs that torch counts, the angles of RoPE left out: they are a tiny product."""
    with FlopCounterMode(display=False) as counter:
        result = model(**arguments)
    counts = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    angles = sum(count for module, count in counts.items() if module.endswith(("rotary_emb", "rotary_emb_local")))
    return result, counter.get_total_flops() - angles


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values that a cache holds."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.numel() * x.element_size() for x in tensors)
