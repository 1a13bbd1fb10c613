"""Calls of a learner's object: inputs in its own kind of array, dropout watched and held still."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.teach.arguments import HEAD_DIM, TOKENS, UnfilledError, value_of

_END = r"(_?(new|in|input|states?|heads?|x))?\w?$"
QUERY, KEY, VALUE = (
    re.compile(rf"^_*(x_?)?({words}){_END}", re.I)
    for words in ("q|query|queries|consultas?", "k|keys?|claves?", "v|values?|val|valor(es)?")
)
FREE = re.compile(
    r"cache|past|pos|start|offset|cos|sin|freq|training|train|need|return|output|causal|drop|scale|layer|use_", re.I
)


@dataclass
class Seen:
    """What the calls of dropout got."""

    in_eval: bool = False
    on_scores: bool = False


@contextmanager
def still_dropout(seen: Seen, training: bool, tokens: int) -> Iterator[None]:
    """Within this block torch's dropout changes nothing, and `seen` learns where it was called."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    from unittest.mock import patch

    functional = torch.nn.functional
    attend = functional.scaled_dot_product_attention

    def dropout(x: Any, p: float = 0.5, active: bool = True, inplace: bool = False, **other: Any) -> Any:
        active = other.get("training", active)
        if active and p > 0:
            seen.in_eval |= not training
            square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] == tokens
            seen.on_scores |= square and bool((x < -1e-6).any())
        return x

    def fused(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        p = kwargs.pop("dropout_p", 0.0)
        if len(arguments) > 4:
            p, arguments[4] = arguments[4], 0.0
        seen.in_eval |= p > 0 and not training
        return attend(*arguments, **kwargs)

    with patch.multiple(functional, dropout=dropout, scaled_dot_product_attention=fused):
        yield


def kind_of_arrays(target: Any, code: str) -> str:
    """torch, numpy or lists: what the object computes with."""
    if hasattr(target, "named_parameters"):
        return "torch"
    if re.search(r"\btorch\b|\bf\.softmax", code):
        return "torch"
    arrays = any(isinstance(value, np.ndarray) for value in getattr(target, "__dict__", {}).values())
    return "numpy" if arrays or not code or re.search(r"\bnp\b|\bnumpy\b", code) else "lists"


def to_kind(x: Any, kind: str) -> Any:
    if kind == "torch":
        import torch

        x = np.ascontiguousarray(x)
        return torch.from_numpy(x.astype(np.float32) if x.dtype.kind == "f" else x)
    return x if kind == "numpy" else x.tolist()


def to_array(value: Any) -> Any:
    """A result as a NumPy array of float64; None for what is none."""
    if hasattr(value, "detach"):
        return value.detach().cpu().double().numpy()
    try:
        return np.array(value, dtype=float)
    except (ValueError, TypeError):
        return None


def pick(result: Any, shape: tuple[int, ...]) -> Any:
    """That array of a result which has the axes of an output; the width may be another. None where there is none."""
    values = list(result.values()) if isinstance(result, dict) else result
    values = vars(result).values() if hasattr(result, "__dataclass_fields__") else values
    if isinstance(values, tuple) or (isinstance(values, list) and isinstance(result, dict)):
        picked = [p for value in values if (p := pick(value, shape)) is not None]
        exact = [p for p in picked if p.shape == shape]
        return (exact or picked or [None])[0]
    array = to_array(values)
    return array if array is not None and array.ndim == len(shape) and array.shape[:-1] == shape[:-1] else None


@dataclass
class Subject:
    """Something of a learner's that attends, ready to be called.

    inputs   names of the parameters that take data: one (x), two (x, context) or three (q, k, v), in our order
    rank     axes of an input: 4 (B,H,T,d), 3 (B,T,C) or 2 (T,C); of lower ranks the documents go in one by one
    """

    call: Callable[..., Any]
    kind: str
    inputs: tuple[str, ...]
    mask: str | None = None
    mask_required: bool = False
    rank: int = 3
    fixed: dict[str, Any] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    module: Any = None

    def __call__(self, inputs: tuple[Any, ...], mask: Any = None, extra: Mapping[str, Any] | None = None) -> Any:
        """Output (B,T,C) or (B,H,T,e) as float64, whatever the rank that the learner's code takes."""
        lead = inputs[0].ndim - self.rank
        if lead <= 0:
            return self._call_once(inputs, mask, extra)
        axes = inputs[0].shape[:lead]
        rows = []
        for index in np.ndindex(*axes):
            own_mask = mask
            if mask is not None and mask.ndim > 2:
                own_mask = mask[index[0]].reshape(mask.shape[-2:])
            places = (index, index, index) if self.rank > 1 else (index, index[:-1], index[:-1])
            if self.rank == 1 and own_mask is not None:
                own_mask = own_mask[index[-1]]
            rows.append(self._call_once(tuple(x[i] for x, i in zip(inputs, places, strict=True)), own_mask, extra))
        stacked = np.array(rows)
        return stacked.reshape(*axes, *stacked.shape[1:])

    def _call_once(self, inputs: tuple[Any, ...], mask: Any, extra: Mapping[str, Any] | None) -> Any:
        arguments = {name: to_kind(x, self.kind) for name, x in zip(self.inputs, inputs, strict=False)}
        if mask is not None and self.mask:
            arguments[self.mask] = to_kind(mask, self.kind)
        training = bool(getattr(self.module, "training", False))
        gradients = sys.modules["torch"].no_grad() if self.kind == "torch" else nullcontext()
        with still_dropout(self.seen, training, inputs[1].shape[-2]), np.errstate(all="ignore"), gradients:
            result = self.call(**arguments, **self.fixed, **(extra or {}))
        out = pick(result, inputs[0].shape)
        if out is None:
            shapes = [
                getattr(to_array(value), "shape", None) for value in (result if isinstance(result, tuple) else [result])
            ]
            raise ValueError(f"the result has shape {shapes[0]}, input {inputs[0].shape}")
        return out


def _angles(name: str) -> Any:
    """The tables of rotary positions that a layer wants to be given, for the sizes of the check."""
    angles = np.outer(np.arange(TOKENS), 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    kind = "torch" if "torch" in sys.modules else "numpy"
    if name == "freqs_cis":
        turns = np.exp(1j * angles).astype(np.complex64)
        return sys.modules["torch"].from_numpy(turns) if kind == "torch" else turns
    cos, sin = (to_kind(f(np.concatenate([angles, angles], 1)), kind) for f in (np.cos, np.sin))
    return {"cos": cos, "sin": sin}.get(name, (cos, sin))


def read_call(
    call: Callable[..., Any], sizes: Mapping[str, Any]
) -> tuple[tuple[str, ...], str | None, bool, dict[str, Any]]:
    """Names of the inputs, of the mask, whether it is required, and what else must be passed."""
    parameters = {
        name: p for name, p in inspect.signature(call).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name != "self"
    }  # fmt: skip
    mask = next((n for n in parameters if "mask" in n.lower()), None)
    rest = [n for n in parameters if n != mask]
    triple = [next((n for n in rest if p.match(n)), None) for p in (QUERY, KEY, VALUE)]
    if all(triple):
        inputs = tuple(n for n in triple if n)
    else:
        required = [n for n in rest if parameters[n].default is inspect.Parameter.empty and not FREE.search(n)]
        inputs = tuple(required[:1] or rest[:1])
        second = [n for n in required[1:] if re.search(r"context|memory|enc|kv|cross|y|other|source|key|x_?2|x2", n)]
        inputs += tuple(second[:1])
    fixed: dict[str, Any] = {}
    for name, p in parameters.items():
        if re.fullmatch(r"(is_)?train(ing)?", name):
            fixed[name] = False
        elif re.fullmatch(r"(is_?)?causal", name.lower()):
            fixed[name] = True
        elif name in sizes:
            fixed[name] = sizes[name]
        elif p.default is p.empty and name not in (*inputs, mask):
            if re.fullmatch(r"position_embeddings|cos|sin|freqs_cis", name):
                fixed[name] = _angles(name)
                continue
            try:
                fixed[name] = value_of(name, sizes)
            except KeyError:
                raise UnfilledError(
                    f"the call wants {name!r}, and its name does not tell what it is; pass --args {name}=VALUE"
                ) from None
    required_mask = mask is not None and parameters[mask].default is inspect.Parameter.empty
    return inputs, mask, required_mask, fixed
