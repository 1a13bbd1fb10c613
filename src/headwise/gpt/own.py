"""A class of one's own as the attention of the GPT: how it is built, and how it is called."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError

# What courses and libraries call the sizes that a class is built with.
SPELLINGS = {
    "d_model": "d_model d_in d_out dim emb_dim embed_dim embed_size hidden_size n_embd width",
    "n_heads": "n_heads n_head num_heads num_attention_heads nhead heads h",
    "n_kv_heads": "n_kv_heads num_kv_heads num_kv_groups num_key_value_heads",
    "head_dim": "head_dim head_size d_head d_k d_v",
    "context": "context context_length block_size max_len max_seq_len seq_len",
    "dropout": "dropout",
    "causal": "causal is_causal",
}
MEANINGS = {name: size for size, names in SPELLINGS.items() for name in names.split()}
# by the name that a config has for it; of this process alone
_classes: dict[str, type[nn.Module]] = {}


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
    if not path.is_file():
        raise HeadwiseError(
            f"attention={place!r} names no class in a file; pass FILE:CLASS, such as attention.py:Mine"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = getattr(module, name, None)
    register(kind)
    _classes[f"{path}:{name}"] = kind  # type: ignore[assignment]  # `register` has refused what is no class
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
        self.name, self.is_checked = name, False
        self.module = _classes[name](**_arguments(_classes[name], sizes))

    def forward(self, x: Tensor, cache: InputCache | None = None) -> Tensor:
        if not self.is_checked and x.shape[1] > 1:
            self._check(x[:1].detach())
            self.is_checked = True
        return self._call(x if cache is None else cache.join(x))[:, -x.shape[1] :]

    def _call(self, x: Tensor) -> Tensor:
        """Each input that the class asks for is x; a mask (T,T) is True where a token may be attended."""
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        arguments = {}
        for name, parameter in inspect.signature(self.module.forward).parameters.items():
            if "mask" in name:
                arguments[name] = visible
            elif (
                parameter.default is parameter.empty
                and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            ):
                arguments[name] = x
        result = self.module(**arguments)
        return result[0] if isinstance(result, tuple | list) else result

    @torch.no_grad()
    def _check(self, x: Tensor) -> None:
        """Refuse what gives another shape than its input, or sees later tokens."""
        changed, training, wrong = x.clone(), self.module.training, ""
        changed[:, -1] += 1
        self.module.eval()
        try:
            first, second = self._call(x), self._call(changed)
            if first.shape != x.shape:
                wrong = f"it gives {tuple(first.shape)} for an input of {tuple(x.shape)}"
            elif not torch.allclose(first[:, :-1], second[:, :-1], atol=1e-5):
                wrong = (
                    "it sees later tokens; mask them, or take a mask= of which True may be attended"
                )
        except Exception as error:  # it is somebody's own code
            wrong = f"{type(error).__name__}: {error}"
        self.module.train(training)
        if wrong:
            raise HeadwiseError(f"{self.name} cannot be the attention of a GPT: {wrong}")


def _arguments(kind: type, sizes: dict[str, Any]) -> dict[str, Any]:
    """Values for the parameters of a class, by their names; of others the default stays."""
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in MEANINGS:
            arguments[name] = sizes[MEANINGS[name]]
        # no *args, no **kwargs
        elif parameter.default is parameter.empty and "VAR" not in parameter.kind.name:
            raise HeadwiseError(
                f"{kind.__name__} wants {name}=, whose meaning is not known; pass a class that says it: class Mine("
                f"{kind.__name__}): def __init__(self, d_model, n_heads): super().__init__(...)"
            )
    return arguments
