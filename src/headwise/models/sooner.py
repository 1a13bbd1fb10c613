"""Texts that a model begins by itself, and continues in a form of it that is made once the first token is there.

Nobody waits for the form before the first token. It is a `Decoder` where the model has one; else `Rows`, which is the
model itself with the products of its steps laid out anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.gpt.decode import Decoder, Texts
from headwise.models.ask import Reader, context_of, reader
from headwise.models.stream import stream_of


class Sooner:
    """What begins such texts; they share the form, which `make` makes, None where there is none.

    n_tokens  how many each of them will write at most
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Decoder | None], n_tokens: int) -> None:
        self.model, self.n_tokens, self._make = model, n_tokens, make

    @cached_property
    def form(self) -> Decoder | Rows:
        return self._make(self.model) or Rows(self.model)

    def __call__(self) -> Begun:
        return Begun(self)


class Begun:
    """One of these texts, read piece by piece: ids (1,T) -> logits (V,) of the next token."""

    def __init__(self, begin: Sooner) -> None:
        self._begin, self._ids = begin, list[int]()
        self._reader: Reader | None = None  # of the model; None while the form reads
        self._texts: Texts | None = None  # what the form has read; None while the model reads

    def __call__(self, ids: Tensor) -> Tensor:
        unread, before = ids[0].tolist(), len(self._ids)
        self._ids += unread
        form = self._begin.form if before else None
        if isinstance(form, Decoder) and not form.disturbed():
            if self._texts is None and not self._take_over(form, before):
                unread = self._ids
            assert self._texts is not None
            return self._texts([unread])[0, -1]
        if self._reader is None:  # the prompt, or all there is where somebody begins to watch
            self._reader, self._texts = reader(self._begin.model), None
            return self._reader(ids.new_tensor([self._ids]))
        if not isinstance(form, Rows):
            return self._reader(ids)
        with form:
            return self._reader(ids)

    def _take_over(self, form: Decoder, length: int) -> bool:
        """Go on in the form; does it know the first tokens already, from the keys and values that the model kept?"""
        cached = getattr(self._reader and self._reader.cache, "layers", [])
        self._reader = None
        room = min(context_of(self._begin.model) or sys.maxsize, length + self._begin.n_tokens)
        self._texts = Texts(form, room)
        shape = (1, form.spec.n_kv_heads, length, form.spec.head_dim)
        past: list[tuple[Any, Any]] = []
        for layer in cached:
            pair = getattr(layer, "keys", None), getattr(layer, "values", None)
            if any(not isinstance(x, Tensor) or x.shape != shape for x in pair):
                return False  # a window has dropped some
            past.append(pair)
        if len(past) != len(form.layers):
            return False
        self._texts.take(past)
        return True


class Rows:
    """The products of a model's layers in bfloat16, laid out for one row at a time: inside this block it uses them.

    In a plain product oneDNN lays the whole weight out anew, which takes longer than to multiply one row with it. Laid
    out once it gives the same bits; where a processor gives others, the product stays as it is. It takes the memory of
    the weights again.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        same_bits: dict[tuple[int, ...], bool] = {}  # by shape
        mkldnn: Any = torch.backends.mkldnn
        if not mkldnn.is_available() or stream_of(model) is not None or torch.is_autocast_enabled("cpu"):
            return
        # A compiler would have to begin anew where a module gets another function.
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
            return
        for module in model.modules():
            if type(module) is not nn.Linear or "forward" in vars(module):
                continue
            weight = module.weight
            if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.is_inference():
                continue
            shape = (*weight.shape, module.bias is None)
            if not same_bits.get(shape, True):
                continue
            forward = _laid_out(module)
            if shape not in same_bits:  # one module of each shape is tried
                row = torch.arange(module.in_features).sin().bfloat16()[None]
                same_bits[shape] = torch.equal(forward(row), module(row))
            if same_bits[shape]:
                self._forwards[module] = forward

    def __enter__(self) -> None:
        for module, forward in self._forwards.items():
            vars(module)["forward"] = forward  # before the one of its class; its hooks run as they did

    def __exit__(self, *error: object) -> None:
        for module in self._forwards:
            vars(module).pop("forward", None)  # another thread may have ended first


def _laid_out(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """What the module does, for one row with the weight laid out; for more, or a weight that has changed, as ever."""
    weight, bias = linear.weight, linear.bias
    block, version = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1), weight._version

    def forward(x: Tensor) -> Tensor:
        if x.numel() != linear.in_features or x.dtype != weight.dtype or weight._version != version:
            return F.linear(x, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, block, bias, "none", [], "")

    return forward
