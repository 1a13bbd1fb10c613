"""Presets, layers out of specs, models with layers of ours; and sizes of a config that no model has.

Presets are layers as data, which `python studies/presets.py` writes out of configs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from headwise.cost.shape import Flops, Heads, Kept, Layer, ModelShape, Outside
from headwise.errors import HeadwiseError
from headwise.records import record_of
from headwise.spec import AttentionSpec, LatentSpec

_FILES = resources.files("headwise.cost")
PRESETS: dict[str, dict[str, Any]] = json.loads(
    (_FILES / "presets.json").read_text(encoding="utf-8")
)

LARGEST = 2**40  # of one size: far above any real one, so a larger number is a slip
# far above any real model; each layer is built, so a slip would take for ever
MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 4096}
# the names that families give a size, and the usual one
USUAL = {
    "hidden_size": "hidden_size",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "n_inner": "intermediate_size",
    "d_ff": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "context": "max_position_embeddings",
}


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has, before anything is built; also those of the dicts inside."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value)
        elif name in USUAL and not isinstance(value, list | None):
            most = MOST.get(USUAL[name], LARGEST)
            if type(value) is not int or not 0 < value <= most:
                raise HeadwiseError(
                    f"{name}={value!r:.60} must be a whole number from 1 to {most:,}"
                )


def preset(name: str) -> ModelShape:
    """The sizes of a known model: rows of layers, and which layer is which row."""
    fields = {**PRESETS[name], "layers": ()}
    rows = [record_of(Layer, {"name": "", **row}) for row in fields.pop("rows")]
    layers = []
    for n, number in enumerate(fields.pop("order")):
        layers.append(replace(rows[number], name=f"L{n}"))
    return replace(record_of(ModelShape, fields), layers=tuple(layers))


def layer_of(name: str, spec: AttentionSpec) -> Layer:
    """A layer with this attention alone."""
    weights = spec.q_weights + spec.kv_weights + spec.o_weights
    values, rows = spec.cache_values_per_token, spec.window
    latent, kind = None, "full" if rows is None else "sliding"
    width = read_as = spec.head_dim + spec.value_dim
    if isinstance(spec, LatentSpec):
        latent, kind = values, "latent"
        weights += spec.expanding_weights
        # What is kept of a token, latent and rotary key, is read as a key, and its latent alone as a value.
        read_as = values + spec.latent_dim
    heads = Heads(
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        window=rows,
        causal=spec.causal,
        sink=spec.sink,
        latent=latent,
        kv_head_parameters=spec.kv_head_parameters,
        parameters=spec.n_parameters,
    )
    return Layer(
        name=name,
        kind=kind,
        attention=heads,
        kept=(Kept(values=values, rows=rows, heads=True),),
        reading=Flops(2 * weights, 2 * spec.n_heads * width),
        writing=Flops(2 * weights, 2 * spec.n_heads * read_as),
    )


def shape_of_run(section: Mapping[str, Any]) -> ModelShape:
    """The shape of a GPT of ours, built without memory from the section `headwise` of its config.json."""
    import torch  # here: presets and specs need none

    from headwise.gpt.gpt import GPT, GPTConfig

    try:
        config = GPTConfig(**section)
    except TypeError as error:
        raise HeadwiseError(
            f"the section `headwise` describes no model: {error}"
        ) from None
    with torch.device("meta"):
        return shape_of_modules(GPT(config), "headwise")


def shape_of_modules(model: Any, family: str = "own") -> ModelShape:
    """The shape of a model with layers of ours: attention by its specs, all else by its modules.

    Raises HeadwiseError for a matrix that is no Linear or Embedding.
    """
    from headwise.models.ask import context_of  # here: it loads torch

    modules = dict(model.named_modules())
    specs: dict[str, AttentionSpec] = {}
    for path, module in modules.items():
        if isinstance(getattr(module, "spec", None), AttentionSpec):
            specs[path] = module.spec
    if not specs:
        raise HeadwiseError(
            f"a {type(model).__name__} has no layer of headwise; pass the config of its family"
        )
    layers = {path: layer_of(f"L{n}", specs[path]) for n, path in enumerate(specs)}
    outside: Counter[str] = Counter()
    counted: set[Any] = set()
    for path, module in modules.items():
        if any(_is_in(path, attention) for attention in specs):
            continue
        weights = set(module.parameters(recurse=False))
        size = sum(p.numel() for p in weights - counted)
        is_table = hasattr(module, "num_embeddings")
        matrix = module.weight.numel() if hasattr(module, "in_features") else 0
        if not (matrix or is_table) and any(p.ndim > 1 for p in weights):
            raise HeadwiseError(
                f"{path or type(model).__name__} has a matrix and is no Linear or Embedding, so that what a token "
                f"costs there is not known; price the model with Linears in their place"
            )
        attention = _beside(path, specs)
        if attention is not None:
            layers[attention] = layers[attention].beside(size, matrix)
        elif is_table:
            outside.update(embeddings=size, row=module.embedding_dim)
        else:
            outside["head" if matrix else "norms"] += size
            outside["flops"] += 2 * matrix
            if weights & counted:  # a head that is tied to a table
                outside["borrowed"] += matrix
        counted |= weights
    first = next(iter(specs.values()))
    return ModelShape(
        family=family,
        d_model=first.d_model,
        layers=tuple(layers.values()),
        outside=Outside(**outside),
        positions=context_of(model),
        generates=first.causal,
        dtype=str(next(model.parameters()).dtype),
    )


def _is_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _beside(path: str, attentions: Iterable[str]) -> str | None:
    """The attention in whose layer a module stands: the only one in the smallest module around both."""
    while path:
        around = [each for each in attentions if _is_in(each, path)]
        if around:
            return around[0] if len(around) == 1 else None
        path = path.rpartition(".")[0]
    return None
