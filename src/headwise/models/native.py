"""Torch's native path of its encoder, where that gives something else than the Python code, which is what can be read.

In evaluation without gradients torch runs a whole `nn.TransformerEncoderLayer` as one fused call, and watching leaves
that path. An encoder that packs its documents there gives 0 at padding; so it does here. Masks of numbers are refused:
the fused call reads every number but 0 as "may not". A query that may attend nothing is NaN there, and a number here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError

NATIVE = nn.TransformerEncoder, nn.TransformerEncoderLayer
ENCODER, LAYER = (inspect.signature(kind.forward) for kind in NATIVE)


def as_native(modules: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The hooks of all that has a native path in a model: how each is registered, and what it does."""
    for module in modules:
        if type(module).forward is nn.TransformerEncoderLayer.forward:
            yield module.register_forward_pre_hook, _refuse_numbers
        elif type(module).forward is nn.TransformerEncoder.forward:
            padding: list[Tensor] = []  # of the call that runs, (B,T)
            yield module.register_forward_pre_hook, partial(_before_encoder, padding)
            yield module.layers[-1].register_forward_hook, partial(_after_last, padding)


def _is_fast(module: nn.Module, x: Tensor) -> bool:
    """What the encoder, its layers and their attention all ask before they take the native path."""
    wants_slopes = torch.is_grad_enabled() and any(y.requires_grad for y in (x, *module.parameters()))
    enabled = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return enabled and not module.training and x.ndim == 3 and not x.is_nested and not wants_slopes


def _refuse_numbers(layer: Any, args: Any, keywords: Any) -> None:
    arguments = LAYER.bind(layer, *args, **keywords).arguments
    if not layer.activation_relu_or_gelu or not _is_fast(layer, arguments["src"]):
        return
    for name in ("src_mask", "src_key_padding_mask"):
        mask = arguments.get(name)
        if mask is not None and mask.is_floating_point() and not ((mask == 0) | (mask == -torch.inf)).all():
            raise HeadwiseError(
                f"{name} has numbers beside 0 and -inf, and torch's native path reads every number but 0 as -inf; call "
                f"torch.backends.mha.set_fastpath_enabled(False), and they are added"
            )


def _before_encoder(padding: list[Tensor], encoder: Any, args: Any, keywords: Any) -> None:
    arguments = ENCODER.bind(encoder, *args, **keywords).arguments
    padding.clear()
    x, hidden = arguments["src"], arguments.get("src_key_padding_mask")
    if hidden is None or arguments.get("mask") is not None or not encoder.use_nested_tensor:
        return
    if _is_fast(encoder.layers[0], x) and torch._nested_tensor_from_mask_left_aligned(x, ~hidden.bool()):
        padding.append(hidden.bool())


def _after_last(padding: list[Tensor], layer: nn.Module, args: Any, keywords: Any, out: Tensor) -> Tensor | None:
    return out.masked_fill(padding.pop()[..., None], 0) if padding else None
