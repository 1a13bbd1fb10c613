"""The shape of a model with layers of ours: attention by its specs, all else by its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headwise.cost.config import layer_of
from headwise.cost.shape import ModelShape, Outside
from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.models.ask import context_of
from headwise.spec import AttentionSpec


def shape_of_run(section: Mapping[str, Any]) -> ModelShape:
    """The shape of a GPT of ours, built without memory from the section `headwise` of its config.json."""
    try:
        config = GPTConfig(**section)
    except TypeError as error:
        raise HeadwiseError(
            f"the section `headwise` describes no model: {error}"
        ) from None
    with torch.device("meta"):
        return shape_of_modules(GPT(config))


def shape_of_modules(model: Any) -> ModelShape:
    """The shape of a model of one's own. Raises HeadwiseError for a matrix that is no Linear or Embedding."""
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
        family="headwise" if isinstance(model, GPT) else "own",
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
