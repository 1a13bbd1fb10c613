"""Windows by layer: which a model has, which it could be given, and the model that has them.

A config of transformers says so in `layer_types` and `sliding_window`: one window for all layers that have one. A
Llama or Mistral has no such fields. It computes what a Qwen2 computes whose biases are zero, and that has them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headwise.gpt.gpt import GPT
from headwise.models.weights import family_of, rebuilt

AS_QWEN2 = {"llama": "Llama", "mistral": "Mistral"}  # family and what the names of its classes begin with
SLIDING, FULL = "sliding_attention", "full_attention"
DROPPED = ("model_type", "architectures", "transformers_version", "dtype", "layer_types", "attention_bias", "mlp_bias")


def windows_of(model: nn.Module) -> list[int | None]:
    """For each layer the tokens that a query sees, its own included; None: all, as far as the config tells."""
    config: Any = model.config
    if isinstance(model, GPT):
        return [config.window(layer) for layer in range(config.n_layers)]
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    return [window if kind == SLIDING else None for kind in types]


def cannot_narrow(model: nn.Module) -> str | None:
    """Why the model's family cannot be given windows by layer; None where it can."""
    if isinstance(model, GPT):
        return None
    config: Any = model.config
    name = family_of(model).name
    if name in AS_QWEN2:
        biases = [key for key, x in model.state_dict().items() if key.endswith(("o_proj.bias", "mlp.bias")) and x.any()]
        mlp = getattr(config, "mlp_bias", False)
        if biases or mlp:
            return f"this {name} has biases ({biases[0] if biases else 'mlp_bias'}) that no Qwen2 has a place for"
        return None
    if isinstance(getattr(config, "layer_types", None), list) and hasattr(config, "sliding_window"):
        foreign = set(config.layer_types) - {SLIDING, FULL}
        return f"{name} has layers of {min(foreign)}, which keep no keys and values" if foreign else None
    return (
        f"{name} has no layer_types in its config, and no family is known that computes the same and has them; for our "
        f"own runtime, `headwise windows --plan` writes what each head keeps"
    )


@torch.no_grad()
def with_windows(model: nn.Module, windows: Sequence[int | None]) -> nn.Module:
    """The model with these windows, which have one length; `model` is left alone. Ask `cannot_narrow` before."""
    if isinstance(model, GPT):
        return rebuilt(model, dataclasses.replace(model.config, windows=tuple(windows)))
    whole: Any = model
    kind, prefix = type(whole), AS_QWEN2.get(family_of(whole).name)
    if prefix is not None:
        from headwise.models.hf import class_named

        kind = class_named(kind.__name__.replace(prefix, "Qwen2"))
    fields = {key: value for key, value in whole.config.to_dict().items() if key not in DROPPED or prefix is None}
    fields |= {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next(window for window in windows if window is not None),
    }
    if prefix is not None or "use_sliding_window" in fields:
        fields |= {"use_sliding_window": True, "max_window_layers": 0}
    fields.pop("model_type", None)
    child: Any = rebuilt(model, kind.config_class(**fields), kind)
    for name in child.state_dict().keys() - model.state_dict().keys():  # biases of a Qwen2, which a Llama has not
        child.get_parameter(name).zero_()
    if whole.can_generate():
        child.generation_config = copy.deepcopy(whole.generation_config)
    return child  # type: ignore[no-any-return]
