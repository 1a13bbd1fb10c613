"""How a model's residual stream adds up: what each module read and gave in one run, and what attention writes there."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.models.ask import hooked, logits
from headwise.models.sites import Site, attach
from headwise.models.stacks import Layer, layers_of
from headwise.records import Call

CLOSE = 1e-4  # relative: what is read must agree with what the model computes


class Row(NamedTuple):
    """A module's input and output at the last position, float64."""

    read: Tensor
    gave: Tensor


@dataclass(frozen=True)
class Run:
    layers: list[Layer]
    rows: dict[nn.Module, Row]
    calls: dict[str, Call]  # of each layer's attention, "L0"
    norm: nn.Module | None  # the last one
    normed: Tensor  # (C,) what the output matrix reads
    logits: Tensor  # (V,)


def read_run(model: nn.Module, ids: Tensor) -> Run:
    """One forward pass; of each module that takes part, what it read and gave at the last position."""
    rows: dict[nn.Module, Row] = {}
    calls: dict[str, Call] = {}
    layers = layers_of(model)
    wanted = {module for layer in layers for module in (layer.block, layer.projection, *layer.block.children())}
    wanted.update(layers[-1].around)

    def keep(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], gave: Any) -> None:
        first = args[0] if args else keywords.get("hidden_states")
        result = gave[0] if isinstance(gave, tuple) else gave
        if all(isinstance(x, Tensor) and x.ndim in (2, 3) and x.is_floating_point() for x in (first, result)):
            tensors: Any = first, result
            rows[module] = Row(*(x.flatten(0, -2)[-1].double() for x in tensors))

    def remember(site: Site, call: Call) -> None:
        calls[site.name] = call

    handlers = {layer.site: partial(remember, layer.site) for layer in layers}
    with ExitStack() as stack:
        stack.enter_context(attach(handlers, model))
        handles = (module.register_forward_hook(keep, with_kwargs=True) for module in wanted)
        stack.enter_context(hooked(handles))
        answer = logits(model, ids, last=True)[0, -1].double()
    last = rows[layers[-1].block].gave
    norm = next((module for module in layers[-1].around if module in rows and same(rows[module].read, last)), None)
    return Run(layers, rows, calls, norm, last if norm is None else rows[norm].gave, answer)


def same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and float((x - y).norm()) <= CLOSE * float(x.norm() + y.norm() + 1e-30)


@dataclass(frozen=True)
class Frozen:
    """A norm as the linear map that it was at one position: y = factor * (x - mean x) + bias."""

    factor: Tensor  # (C,)
    bias: Tensor  # (C,)
    centres: bool

    @classmethod
    def of(cls, norm: nn.Module, row: Row) -> Frozen:
        x, like = row.read, next(norm.parameters(), None)
        probe = x.to(torch.float32 if like is None else like.dtype)
        probe = probe.to("cpu" if like is None else like.device)
        centres = same(norm(probe + probe.abs().mean()).double(), row.gave)  # adding a constant changes nothing
        bias = norm(torch.zeros_like(probe)).double()
        x = x - x.mean() if centres else x
        return cls(torch.where(x == 0, 0, (row.gave - bias) / torch.where(x == 0, 1, x)), bias, centres)

    def back(self, direction: Tensor) -> Tensor:
        """u with u.x = direction.(y - bias)"""
        u = self.factor * direction
        return u - u.mean() if self.centres else u


@dataclass(frozen=True)
class Writer:
    """Whose output, times a factor, an attention adds to the residual stream: W_O, or a norm after it."""

    module: nn.Module
    factor: float


def writer_of(model: nn.Module, layer: Layer, rows: dict[nn.Module, Row]) -> Writer:
    """The writer of a layer, found by what it must explain: what the next module reads, or the layer's output.

    Raises HeadwiseError where nothing explains them.
    """
    gave = rows[layer.projection].gave
    children = [child for child in layer.block.children() if child in rows]
    norms = (child for child in children if same(rows[child].read, gave) and not same(rows[child].gave, gave))
    factor = getattr(layer.block, "residual_multiplier", 1.0)  # Granite
    before, after = rows[layer.block]
    for writer in (
        Writer(layer.projection, 1.0),
        *(Writer(norm, 1.0) for norm in norms),
        Writer(layer.projection, factor),
    ):
        sums = before + writer.factor * rows[writer.module].gave
        others = [child for child in children if rows[child].gave.shape == sums.shape]
        if any(same(rows[child].read, sums) or same(sums + rows[child].gave, after) for child in others):
            return writer
    raise HeadwiseError(
        f"{type(model).__name__}: it is not known how the attention of {layer.site.name} enters the residual stream"
    )
