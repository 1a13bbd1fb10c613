"""Every nn.MultiheadAttention of a model becomes a layer of ours that answers the same call."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from headwise.errors import HeadwiseError
from headwise.layer.convert import converted
from headwise.layer.layer import MultiHeadAttention
from headwise.masks import Allowed, Bias, Causal, Mask, all_of
from headwise.rungs.tensor import trace
from headwise.table import amount

ROUNDS = 5  # of each model, in turn, of which the median counts: a round choice
Name = TypeVar("Name", bound=Hashable)
Answer = tuple[Tensor, Tensor | None]  # the output, and the weights if they were asked for


class TorchAttention(nn.Module):
    """A `MultiHeadAttention`, as `.layer`, that is called as nn.MultiheadAttention is and has its attributes.

    A query that may attend to nothing gives 0, with weights of 0; torch gives NaN. Weights are those before dropout.
    """

    in_proj_bias = None  # so that nn.TransformerEncoderLayer calls this module, and not a kernel with its weights
    # Read before `in_proj_bias` where nn.TransformerEncoder is built of such a layer: without it that fails.
    _qkv_same_embed_dim = False

    def __init__(self, layer: MultiHeadAttention, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first
        self.embed_dim, self.num_heads, self.head_dim = layer.spec.d_in, layer.spec.n_heads, layer.spec.head_dim

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
        mask = self._mask(key_padding_mask, attn_mask, is_causal)
        if not need_weights:
            out: Tensor = self.layer(*sources, mask=mask)
            return out.transpose(0, 1) if tokens_first else out, None
        out, call = self.layer.attended(*sources, mask=mask)
        out = out.transpose(0, 1) if tokens_first else out
        maps = trace(call.q, call.k, call.v, call.options).weights  # the steps of the call again, (B,H,T,S)
        maps = maps.mean(1) if average_attn_weights else maps
        maps = maps[0] if is_one_document else maps
        return out, maps.to(out.dtype)

    def _mask(self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool) -> Mask | None:
        masks: list[Mask] = []
        if is_causal:
            masks.append(Causal(offset=0))  # torch counts from the first key, also where there are more keys
        # torch's layers pass a causal mask and the flag: where both say the same, Causal alone is the faster one.
        # Code that is traced cannot look at the numbers of a mask: there both are kept, which is right, too.
        is_told = is_causal and not torch.compiler.is_compiling()
        if attn_mask is not None and not (is_told and _is_causal(attn_mask)):
            if attn_mask.ndim == 3:  # (B*H,T,S)
                attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
            masks.append(_theirs(attn_mask))
        if padding is not None:  # (B,S), or (S,) of one document
            masks.append(_theirs(padding[..., None, None, :]))
        return all_of(masks)


def _theirs(mask: Tensor) -> Mask:
    """torch's masks as ours: in its bools True may not be attended to, its numbers are added as ours are."""
    return Allowed(~mask) if mask.dtype == torch.bool else Bias(mask)


def _is_causal(mask: Tensor) -> bool:
    """Does it say the same as Causal, as bools or as numbers?"""
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)  # keys after the query
    causal = later if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(later, -math.inf)
    return torch.equal(mask, causal)


@dataclass(frozen=True)
class Replaced:
    """A copy of a model whose nn.MultiheadAttention are layers of ours.

    The last three attributes are None where nothing was measured.

    Attributes:
        model: the copy; the model that was passed is as it was
        layers: the path of each module that was replaced -> its layer
        differences: and the largest difference between the two on random texts
        difference: largest absolute difference of both models' outputs on `inputs`
        seconds: of a forward pass on `inputs`: before and after, each the median of five, measured in turn
        peak: bytes of the tensors that live at once during it: before and after
    """

    model: nn.Module
    layers: dict[str, MultiHeadAttention]
    differences: dict[str, float]
    difference: float | None = None
    seconds: tuple[float, float] | None = None
    peak: tuple[int, int] | None = None

    def __str__(self) -> str:
        worst = max(self.differences.values())
        lines = [
            f"{len(self.layers)} nn.MultiheadAttention replaced, each within {worst:.2g}: {', '.join(self.layers)}"
        ]
        if self.seconds is not None and self.peak is not None:
            before, after = map(amount, self.peak)
            times = f"{1000 * self.seconds[0]:.3g} ms -> {1000 * self.seconds[1]:.3g} ms"
            lines.append(f"the model within {self.difference:.2g}; forward {times}, peak {before} -> {after}")
        return "\n".join(lines)


def replace(model: nn.Module, inputs: Tensor | Sequence[Any] | None = None) -> Replaced:
    """A copy of a model in which a `MultiHeadAttention` answers where an nn.MultiheadAttention did, with certificates.

        done = hw.replace(model)                     # layers, and how far each is from what it replaces
        done = hw.replace(model, inputs=(src, tgt))  # also what both models give and take on these arguments
        with hw.watch(done.model) as seen: done.model(src, tgt)

    The call stays: query, key, value, key_padding_mask, attn_mask, need_weights, average_attn_weights, is_causal, with
    batch_first or without. In evaluation nn.TransformerEncoder has a kernel of its own, which is not used any more:
    with padding it gives 0 where the copy gives a number for the padded token.

    Args:
        model: any torch module; it is left alone
        inputs: what it is called with, to measure both models on it

    Raises:
        HeadwiseError: with the name of every module that cannot be replaced, and then nothing is.
    """
    layers, differences, refused = {}, {}, []
    for path, module in _attentions(model):  # all of them before any is replaced, so that the error names all
        try:
            if type(module) is not nn.MultiheadAttention:
                raise HeadwiseError(f"it is a {type(module).__name__}, whose forward may be another")
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                raise HeadwiseError("it has hooks, which would be lost; remove them first")
            layers[path], differences[path] = converted(module)
        except HeadwiseError as error:
            refused.append(f"{path}: {error}")
    if refused:
        raise HeadwiseError(f"{len(refused)} of {len(refused) + len(layers)} cannot be replaced. {' '.join(refused)}")
    if not layers:
        raise HeadwiseError(
            f"{type(model).__name__} has no nn.MultiheadAttention inside; from_torch takes a course's class"
        )
    done = Replaced(_with(copy.deepcopy(model), layers), layers, differences)
    return done if inputs is None else _measured(model, done, (inputs,) if isinstance(inputs, Tensor) else inputs)


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    """Each with its path, once where it stands at two places."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield path or "the model itself", module


def _with(model: nn.Module, layers: dict[str, MultiHeadAttention]) -> nn.Module:
    """The model with these layers; a module that stands at two places is replaced at both."""
    ours: dict[nn.Module, TorchAttention] = {}
    # `model` is a copy, but of the same modules at the same paths as the one that `layers` was made of.
    for path, module in _attentions(model):
        ours[module] = TorchAttention(layers[path], module.batch_first).train(module.training)
        _freeze(module, layers[path])
    for parent in list(model.modules()):
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False  # which hands the weights of its first layer to a kernel
        for name, child in parent._modules.items():
            if child in ours:
                parent._modules[name] = ours[child]
    return ours.get(model, model)  # the model itself may be an attention


def _freeze(module: nn.MultiheadAttention, layer: Any) -> None:
    """What is not trained there is not trained here."""
    for name in "qkv":
        theirs = getattr(module, f"{name}_proj_weight") if module.in_proj_weight is None else module.in_proj_weight
        linear = getattr(layer, f"{name}_proj")
        linear.weight.requires_grad_(theirs.requires_grad)
        if module.in_proj_bias is not None:
            linear.bias.requires_grad_(module.in_proj_bias.requires_grad)
    for ours, theirs in zip(layer.o_proj.parameters(), module.out_proj.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)


def _measured(model: nn.Module, done: Replaced, inputs: Sequence[Any]) -> Replaced:
    """With the difference of the whole models, their time and their memory."""
    if model.training:
        raise HeadwiseError("inputs= compares both models, and dropout makes them differ; call model.eval() first")
    ours = done.model
    with torch.no_grad():
        # The tensors of whatever they give, tuples or dicts; of a mask and of ids, too, floats say whether they differ.
        difference = 0.0
        for x, y in zip(*(tree_leaves(run(*inputs)) for run in (model, ours)), strict=True):
            if isinstance(x, Tensor) and x.numel():
                wide = torch.promote_types(x.dtype, torch.float32)
                difference = max(difference, float((x.to(wide) - y.to(wide)).abs().max()))
    calls = [partial(_awaited, run, inputs) for run in (model, ours)]
    # `in_turn` wants names: 0 is the model as it was, 1 the copy. It and `peak_of` turn gradients off themselves.
    before_seconds, after_seconds = map(statistics.median, in_turn(dict(enumerate(calls)), ROUNDS).values())
    before_peak, after_peak = map(peak_of, calls)
    return dataclasses.replace(
        done, difference=difference, seconds=(before_seconds, after_seconds), peak=(before_peak, after_peak)
    )


def _awaited(model: nn.Module, inputs: Sequence[Any]) -> None:
    """A forward pass to its end: a GPU answers before it is done."""
    for x in tree_leaves(model(*inputs)):
        if isinstance(x, Tensor) and x.is_cuda:
            torch.cuda.synchronize(x.device)


@torch.no_grad()
def in_turn(
    calls: Mapping[Name, Callable[[], object]], rounds: int, longest: float = math.inf
) -> dict[Name, list[float]]:
    """Seconds of each call in each round, after one round that warms up and does not count.

    Every round runs all calls, so that a slow moment of the machine is shared. Each round begins with another call, so
    that none is always the first. Calls on a device must wait for it themselves. Forward passes are compared: no call
    keeps what slopes would need.

    longest  seconds for one call in all rounds. A slow call runs in fewer rounds; where not even one fits, its only
             time is that of the round that warms up
    """
    first = {name: timeit(call, number=1) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    names = deque(calls)
    for n in range(1, rounds + 1):
        for name in names:
            if n * first[name] <= longest:  # would n rounds fit, each as long as the one that warmed up?
                times[name].append(timeit(calls[name], number=1))
        names.rotate(-1)  # a b c -> b c a
    return {name: taken or [first[name]] for name, taken in times.items()}


@torch.no_grad()
def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that a call has of torch's allocator at a time, beyond what was taken before it."""
    # Above every level of the log of Kineto, torch's profiler, which else writes lines to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as profiled:
        call()
    held = peak = 0
    # The raw events, in the order of time: `profiled.events()` has one sum for all that an operator takes and frees.
    for event in profiled.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()  # below 0 where a tensor is freed
            peak = max(peak, held)
    return peak
