"""The exact attention map of every head of a model on one short text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.model.gpt import GPT
from headwise.model.layer import Call, MultiHeadAttention
from headwise.records import HeadMap, HeadMaps
from headwise.rungs.tensor import trace

LONGEST = 400  # tokens; every head keeps a T x T map


@contextmanager
def observe(layer: MultiHeadAttention, watcher: Callable[[Call], Tensor | None]) -> Iterator[None]:
    """Hand every call of a layer's attention to `watcher` inside this block; what it returns replaces the output."""
    layer.watchers.append(watcher)
    try:
        yield
    finally:
        layer.watchers.remove(watcher)


@torch.no_grad()
def head_maps(model: GPT, ids: Sequence[int], tokens: Sequence[str], name: str) -> HeadMaps:
    """Run a model on the ids (T,) and keep the weights (T,T) of each head; `tokens` are the ids as text.

    Raises HeadwiseError for an empty text, one that exceeds the model's context, or one of over 400 tokens.
    """
    if not ids:
        raise HeadwiseError("the text has no tokens; pass one with --text")
    longest = min(LONGEST, model.config.context)
    if len(ids) > longest:
        why = "the model's context" if longest == model.config.context else "the most that whole maps are drawn for"
        raise HeadwiseError(f"the text has {len(ids)} tokens, and {why} is {longest}; pass a shorter one")
    found: list[HeadMap] = []

    def keep(number: int) -> Callable[[Call], None]:
        def watcher(call: Call) -> None:
            weights_hts = trace(call.q, call.k, call.v, call.options).weights[0].float().cpu().numpy()
            found.extend(HeadMap(number, head, weights) for head, weights in enumerate(weights_hts))

        return watcher

    with ExitStack() as stack:
        for number, layer in enumerate(attention_layers(model)):
            stack.enter_context(observe(layer, keep(number)))
        training = model.training
        stack.callback(model.train, training)
        model.eval()(torch.tensor([list(ids)]))
    return HeadMaps(name, tuple(tokens), tuple(found))


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """The attention layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
