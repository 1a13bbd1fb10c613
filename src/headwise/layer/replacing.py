"""Every nn.MultiheadAttention of a model becomes a layer of ours that answers the same call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.backends.torch_ import trace
from headwise.errors import HeadwiseError
from headwise.layer.convert import converted, parts
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Allowed, Bias, Causal, Mask, all_of

Answer = tuple[Tensor, Tensor | None]  # the output, and the weights if they were asked for


class TorchAttention(nn.Module):
    """A `MultiHeadAttention`, as `.layer`, that is called as nn.MultiheadAttention is and has its attributes.

    A query that may attend to nothing gives 0, with weights of 0; torch gives NaN. Weights are those before dropout.
    """

    # so that nn.TransformerEncoderLayer calls this module, and not a kernel with its weights
    in_proj_bias = None
    # Read before `in_proj_bias` where nn.TransformerEncoder is built of such a layer: without it that fails.
    _qkv_same_embed_dim = False

    def __init__(self, layer: MultiHeadAttention, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first
        self.embed_dim, self.num_heads, self.head_dim = (
            layer.spec.d_in,
            layer.spec.n_heads,
            layer.spec.head_dim,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Answer:
        """Masks mean what they mean in torch: True may not be attended to, numbers are added to the scores."""
        is_one_document = query.ndim == 2
        tokens_first = not is_one_document and not self.batch_first
        # Self attention by one source, as three would be cross attention to the layer.
        sources = [query] if key is query and value is query else [query, key, value]
        if tokens_first:
            sources = [source.transpose(0, 1) for source in sources]
        out, call = self.layer.attended(
            *sources, mask=self._mask(key_padding_mask, attn_mask, is_causal)
        )
        out = out.transpose(0, 1) if tokens_first else out
        if not need_weights:
            return out, None
        # the steps of the call again, (B,H,T,S)
        maps = trace(call.q, call.k, call.v, call.options).weights
        maps = maps.mean(1) if average_attn_weights else maps
        return out, (maps[0] if is_one_document else maps).to(out.dtype)

    def _mask(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> Mask | None:
        masks: list[Mask] = []
        if is_causal:
            # torch counts from the first key, also where there are more keys
            masks.append(Causal(offset=0))
        if attn_mask is not None and attn_mask.ndim == 3:  # (B*H,T,S)
            attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
        # torch's layers pass a causal mask and the flag: where both say the same, Causal alone is the faster one.
        # Code that is traced cannot look at the numbers of a mask: there both are kept, which is right, too.
        if is_causal and attn_mask is not None and not torch.compiler.is_compiling():
            later = torch.ones_like(attn_mask, dtype=torch.bool).triu(1)
            says_more = attn_mask if attn_mask.dtype == torch.bool else attn_mask != 0
            attn_mask = attn_mask if says_more[~later].any() else None
        if padding is not None:  # (B,S), or (S,) of one document
            padding = padding[..., None, None, :]
        for hidden in (attn_mask, padding):  # in bools of torch True may not be attended to
            if hidden is not None:
                masks.append(Allowed(~hidden) if hidden.dtype == torch.bool else Bias(hidden))
        return all_of(masks)


@dataclass(frozen=True)
class Replaced:
    """A copy of a model whose nn.MultiheadAttention are layers of ours.

    Attributes:
        model: the copy; the model that was passed is as it was
        layers: the path of each module that was replaced -> its layer
        differences: and the largest difference between the two on random texts
        difference: largest absolute difference of both models' outputs on `inputs`; None without them
    """

    model: nn.Module
    layers: dict[str, MultiHeadAttention]
    differences: dict[str, float]
    difference: float | None = None

    def __str__(self) -> str:
        worst = max(self.differences.values())
        line = f"{len(self.layers)} nn.MultiheadAttention replaced, each within {worst:.2g}: {', '.join(self.layers)}"
        return (
            line if self.difference is None else f"{line}\nthe model within {self.difference:.2g}"
        )


def replace(model: nn.Module, inputs: Tensor | Sequence[Any] | None = None) -> Replaced:
    """A copy of a model in which a `MultiHeadAttention` answers where an nn.MultiheadAttention did, with certificates.

        done = hw.replace(model)                     # layers, and how far each is from what it replaces
        done = hw.replace(model, inputs=(src, tgt))  # also how far both models are apart on these
        with hw.watch(done.model) as seen: done.model(src, tgt)

    The call stays: query, key, value, key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal, with
    batch_first or without. In evaluation nn.TransformerEncoder has a kernel of its own, which is not used any more:
    with padding it gives 0 where the copy gives a number for the padded token.

    Args:
        model: any torch module; it is left alone
        inputs: what it is called with, to compare both models on it

    Raises:
        HeadwiseError: with the name of every module that cannot be replaced, and then nothing is.
    """
    layers, differences, refused = {}, {}, []
    ours: dict[int, Any] = {}  # by the id of a module what stands for it in the copy
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        path = name or "the model itself"
        try:
            if type(module) is not nn.MultiheadAttention:
                raise HeadwiseError(
                    f"it is a {type(module).__name__}, whose forward may be another"
                )
            hooks = (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            )
            if any(hooks):
                raise HeadwiseError("it has hooks, which would be lost; remove them first")
            layers[path], differences[path] = converted(module)
        except HeadwiseError as error:
            refused.append(f"{path}: {error}")
            continue
        # what is not trained there is not trained here
        for part, (_, parameter) in parts(module).items():
            layers[path].get_parameter(part).requires_grad_(parameter.requires_grad)
        ours[id(module)] = TorchAttention(layers[path], module.batch_first).train(module.training)
    if refused:
        raise HeadwiseError(
            f"{len(refused)} of {len(refused) + len(layers)} cannot be replaced. {' '.join(refused)}"
        )
    if not layers:
        raise HeadwiseError(
            f"{type(model).__name__} has no nn.MultiheadAttention inside; from_torch takes a course's class"
        )
    copied = copy.deepcopy(model, ours)  # which takes what is in `ours` for a copy that it has made
    for module in copied.modules():
        if isinstance(module, nn.TransformerEncoder):
            # which hands the weights of its first layer to a kernel
            module.use_nested_tensor = False
    difference = None
    if inputs is not None:
        difference = _difference(model, copied, (inputs,) if isinstance(inputs, Tensor) else inputs)
    return Replaced(copied, layers, differences, difference)


def _difference(model: nn.Module, ours: nn.Module, inputs: Sequence[Any]) -> float:
    if model.training:
        raise HeadwiseError(
            "inputs= compares both models, and dropout makes them differ; call model.eval() first"
        )
    largest = 0.0
    with torch.no_grad():
        # The tensors of whatever they give, tuples or dicts; of a mask and of ids, too, floats say whether they differ.
        for x, y in zip(*(tree_leaves(run(*inputs)) for run in (model, ours)), strict=True):
            if isinstance(x, Tensor) and x.numel():
                wide = torch.promote_types(x.dtype, torch.float32)
                largest = max(largest, float((x.to(wide) - y.to(wide)).abs().max()))
    return largest
