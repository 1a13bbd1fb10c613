"""Torch's native path of its encoder, where that gives something else than the Python code, which is what can be read.

In evaluation without gradients torch runs a whole `nn.TransformerEncoderLayer` as one fused call, and watching leaves
that path. These hooks make the Python code answer as the fused call does, but for rounding:

    an encoder packs its documents    what it gives at padding is 0
    a mask of numbers                 every number but 0 hides a key
    a row that may attend nothing     is NaN
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NATIVE = nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention
ENCODER = inspect.signature(nn.TransformerEncoder.forward)
LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)
ATTENTION = inspect.signature(nn.MultiheadAttention.forward)
Owned = Callable[[Any], bool]  # is a hook one of ours?


def as_native(modules: Iterable[nn.Module], owned: Owned) -> Iterator[tuple[Any, Any]]:
    """The hooks of all that has a native path in a model: how each is registered, and what it does."""
    encoders: list[Any] = []
    for module in modules:
        if type(module).forward is nn.MultiheadAttention.forward:
            yield module.register_forward_hook, _after_attention
        elif type(module).forward is nn.TransformerEncoderLayer.forward:
            yield module.register_forward_pre_hook, partial(_before_layer, owned)
            yield module.register_forward_hook, partial(_after_layer, owned)
        elif type(module).forward is nn.TransformerEncoder.forward:
            encoders.append(module)
    for encoder in encoders:  # behind their layers: 0 takes the place of NaN
        padding: list[Tensor] = []  # of the call that runs, (B,T)
        yield encoder.register_forward_pre_hook, partial(_before_encoder, padding)
        yield encoder.layers[-1].register_forward_hook, partial(_after_last, padding)


def _arguments(
    signature: inspect.Signature, module: nn.Module, args: Any, keywords: Any
) -> dict[str, Any]:
    bound = signature.bind(module, *args, **keywords)
    bound.apply_defaults()
    return bound.arguments


def _is_fast(module: nn.Module, x: Tensor) -> bool:
    """What the encoder, its layers and their attention all ask before they take the native path."""
    wants_slopes = torch.is_grad_enabled() and any(
        y.requires_grad for y in (x, *module.parameters())
    )
    enabled = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return enabled and not module.training and x.ndim == 3 and not x.is_nested and not wants_slopes


def _is_fast_attention(module: Any, x: Tensor) -> bool:
    packed = module.batch_first and module._qkv_same_embed_dim and module.in_proj_bias is not None
    return (
        packed
        and module.num_heads % 2 == 0
        and module.bias_k is None
        and not module.add_zero_attn
        and _is_fast(module, x)
    )


def _is_fast_layer(layer: Any, owned: Owned, x: Tensor) -> bool:
    hooks = [
        hook
        for module in layer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    is_plain = (
        layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
        and all(map(owned, hooks))
    )
    attention = layer.self_attn
    is_torchs = isinstance(attention, nn.MultiheadAttention)
    return bool(is_plain and is_torchs and _is_fast_attention(attention, x) and _is_fast(layer, x))


def _before_layer(owned: Owned, layer: nn.Module, args: Any, keywords: Any) -> Any:
    arguments = _arguments(LAYER, layer, args, keywords)
    if not _is_fast_layer(layer, owned, arguments["src"]):
        return None
    for name in ("src_mask", "src_key_padding_mask"):
        if arguments[name] is not None:
            arguments[name] = arguments[name].bool()
    del arguments["self"]
    return (arguments.pop("src"),), arguments


def _after_layer(owned: Owned, layer: Any, args: Any, keywords: Any, out: Tensor) -> Tensor | None:
    arguments = _arguments(LAYER, layer, args, keywords)
    if not _is_fast_layer(layer, owned, arguments["src"]):
        return None
    blind = _blind(
        layer.self_attn, arguments["src"], arguments["src_mask"], arguments["src_key_padding_mask"]
    )
    return None if blind is None else out.masked_fill(blind[..., None], torch.nan)


def _after_attention(attention: Any, args: Any, keywords: Any, out: tuple[Tensor, Any]) -> Any:
    arguments = _arguments(ATTENTION, attention, args, keywords)
    x, masks = arguments["query"], [arguments["attn_mask"], arguments["key_padding_mask"]]
    is_self = x is arguments["key"] and x is arguments["value"]
    has_numbers = any(mask is not None and mask.is_floating_point() for mask in masks)
    if not is_self or has_numbers or not _is_fast_attention(attention, x):
        return None
    blind = _blind(attention, x, *masks)
    return None if blind is None else (out[0].masked_fill(blind[..., None], torch.nan), *out[1:])


def _blind(
    attention: nn.MultiheadAttention, x: Tensor, mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """The queries (B,T) of which some head may attend nothing; None where there are none."""
    B, T, _ = x.shape
    hidden = torch.zeros(1, 1, 1, T, dtype=torch.bool, device=x.device)
    if mask is not None:
        hidden = hidden | mask.bool().view(-1, attention.num_heads if mask.ndim == 3 else 1, T, T)
    if padding is not None:
        hidden = hidden | padding.bool()[:, None, None]
    blind = hidden.all(-1).any(1).expand(B, T)
    return blind if blind.any() else None


def _before_encoder(padding: list[Tensor], encoder: Any, args: Any, keywords: Any) -> None:
    arguments = _arguments(ENCODER, encoder, args, keywords)
    padding.clear()
    x, hidden = arguments["src"], arguments["src_key_padding_mask"]
    if hidden is None or arguments["mask"] is not None or not encoder.use_nested_tensor:
        return
    if _is_fast(encoder.layers[0], x) and torch._nested_tensor_from_mask_left_aligned(
        x, ~hidden.bool()
    ):
        padding.append(hidden.bool())


def _after_last(
    padding: list[Tensor], layer: nn.Module, args: Any, keywords: Any, out: Tensor
) -> Tensor | None:
    return out.masked_fill(padding.pop()[..., None], 0) if padding else None
