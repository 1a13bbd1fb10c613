"""A class of one's own as the attention of the GPT: how it is built, and how it is called."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError

# What a parameter of a class asks for, by its name; the first that fits counts.
MEANINGS = (
    (r"kv|group", "n_kv_heads"),
    (r"head_?(dim|size|width)|d_?head|^d_?[kv]$", "head_dim"),
    (r"head|^h$", "n_heads"),
    (r"context|block|seq|max|len", "context"),
    (r"drop", "dropout"),
    (r"causal", "causal"),
    (r"model|emb|hidden|width|dim|d_?in|d_?out|channel|feature|^[cd]$", "d_model"),
)
_classes: dict[str, type[nn.Module]] = {}  # by the name that a config has for it; of this process alone


def register(kind: Any) -> str:
    """The name under which a config finds a class, in this process alone."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise HeadwiseError(f"attention={kind!r} is no class of torch modules (torch.nn.Module)")
    name = f"{kind.__module__}:{kind.__qualname__}"
    _classes[name] = kind
    return name


def register_file(place: str) -> str:
    """The same of FILE:CLASS, a class in a file of Python, which is run."""
    file, _, name = place.rpartition(":")
    path = Path(file).resolve()
    if not (file and path.is_file()):
        raise HeadwiseError(f"attention={place!r} names no class in a file; pass FILE:CLASS, such as attention.py:Mine")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise HeadwiseError(f"{path} has no class {name!r}")
    register(getattr(module, name))
    _classes[f"{path}:{name}"] = getattr(module, name)
    return f"{path}:{name}"


class InputCache:
    """What a class without a cache of its own has read: the inputs (B,T,C), which it reads again at each step."""

    inputs: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.inputs is None else self.inputs.shape[1]

    def join(self, x: Tensor) -> Tensor:
        self.inputs = x if self.inputs is None else torch.cat([self.inputs, x], 1)
        return self.inputs


class OwnAttention(nn.Module):
    """A module of a registered class, called as its parameters ask: (B,T,C) -> (B,T,C), causal."""

    def __init__(self, name: str, sizes: dict[str, Any]) -> None:
        super().__init__()
        if name not in _classes:
            raise HeadwiseError(
                f"the attention of this model is {name}, and headwise runs no code that a folder names; train it again "
                f"with attention=, or load the weights into that class"
            )
        self.name, self.form = name, ""
        self.module = _classes[name](**_arguments(_classes[name], sizes))

    def forward(self, x: Tensor, cache: InputCache | None = None) -> Tensor:
        self.form = self.form or self._form_for(x)
        return self._call(x if cache is None else cache.join(x), self.form)[:, -x.shape[1] :]

    def _call(self, x: Tensor, form: str) -> Tensor:
        T, arguments = x.shape[1], {}
        visible = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        masks = {"1 is seen": visible.to(x), "True is hidden": ~visible, "True is seen": visible}
        masks["-inf is hidden"] = torch.zeros(T, T).to(x).masked_fill(~visible, -torch.inf)
        for name, parameter in inspect.signature(self.module.forward).parameters.items():
            if "mask" in name.lower():
                arguments[name] = masks.get(form)
            elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                arguments[name] = x
        result = self.module(**arguments)
        return result[0] if isinstance(result, tuple | list) else result

    @torch.no_grad()
    def _form_for(self, x: Tensor) -> str:
        """How its mask is written, so that it gives the shape of its input and sees no later token."""
        probe = torch.linspace(-1, 1, 2 * 5 * x.shape[2], dtype=x.dtype, device=x.device).sin().view(2, 5, -1)
        changed, training, why = probe.clone(), self.module.training, "it sees later tokens"
        changed[:, -1] += 1
        self.module.eval()
        try:
            for form in ("no mask", "1 is seen", "True is hidden", "True is seen", "-inf is hidden"):
                try:
                    first, second = self._call(probe, form), self._call(changed, form)
                    if first.shape != probe.shape:
                        why = f"it gives {tuple(first.shape)} for an input of {tuple(probe.shape)}"
                    elif torch.allclose(first[:, :-1], second[:, :-1], atol=1e-5) and first.isfinite().all():
                        return form
                except Exception as error:  # it is somebody's own code: another form may be the one that it takes
                    why = f"{type(error).__name__}: {error}"
        finally:
            self.module.train(training)
        raise HeadwiseError(f"{self.name} cannot be the attention of a GPT: {why}")


class _Config:
    """Sizes for a class that takes one config: `config.n_embd` is what its name means."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes

    def __getattr__(self, name: str) -> Any:
        value = _meaning(name, self._sizes)
        return False if value is None and "bias" in name else value

    __getitem__ = __getattr__


def _meaning(name: str, sizes: dict[str, Any]) -> Any:
    return next((sizes[size] for pattern, size in MEANINGS if re.search(pattern, name.lower())), None)


def _arguments(kind: type, sizes: dict[str, Any]) -> dict[str, Any]:
    """Values for the parameters of a class, by their names; a default that is no size stays."""
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value, default = _meaning(name, sizes), parameter.default
        if re.fullmatch(r"config|cfg|args|params", name.lower()):
            value = _Config(sizes)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if value is None and default is parameter.empty:
            raise HeadwiseError(f"{kind.__name__} wants {name}=, whose meaning is not known; give it a default")
        if value is not None and (default is parameter.empty or type(default) in (int, float, bool)):
            arguments[name] = value
    return arguments
