"""What is known about the documents of a call: their tokens, their padding, and what a cache held before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.records import Call
from headwise.rungs.cache import KVCache

Marker = Callable[[Tensor], Mapping[str, Tensor]]  # ids of the keys (S,) -> named sets of keys, (S,) bool each


@dataclass(frozen=True)
class Document:
    """What is known about one document of a call besides its queries, keys and values.

    All of it describes the S keys and T queries that the call has, those of a cache included.
    """

    real_rows: Tensor | None = None  # (T,) bool; None: all are real. Queries that are padding are left out
    real_keys: Tensor | None = None  # (S,) bool, for "first" and the thumbnail; the call's mask forbids, not this
    start: int | None = 0  # the key at which query 0 stands; None where queries and keys are two sequences
    q_ids: Tensor | None = None  # (T,) tokens of the queries
    k_ids: Tensor | None = None  # (S,) tokens of the keys
    marks: dict[str, Tensor] | None = None  # name -> (S,) bool, sets of keys whose mass is wanted
    before: int = -1  # the token right before the first key, where a window has let it go; -1 for none
    first: int | None = -1  # the key of the first token; None where it has left the cache, -1 for the first real one


@dataclass(eq=False)
class Reader:
    """The tokens and the padding that a model is given, those that its cache holds included."""

    model: nn.Module
    parameters: Sequence[str]
    ids: Tensor | None = None  # (B,L)
    padding: Tensor | None = None  # (B,L) bool, True = real
    context_padding: Tensor | None = None  # (B,S) of an encoder's tokens
    past: int = 0
    cache: Any = None  # what tells whether a cache is the one of the last call, untouched since

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call: what the model is given."""
        arguments = self._arguments(args, kwargs)
        if arguments.get("output_attentions"):
            raise HeadwiseError("output_attentions=True: a watched model keeps no maps; drop it, and read `seen`")
        self.past, cache = _past(arguments)
        ids = arguments.get("input_ids", arguments.get("ids"))
        known = self.ids is not None and self.past <= self.ids.shape[1] and self._same(cache)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            self.ids = None
        elif self.past == 0:
            self.ids = ids.detach()
        elif known and self.ids is not None and self.ids.shape[0] == ids.shape[0]:
            self.ids = torch.cat([self.ids[:, : self.past], ids.detach()], 1)
        else:  # tokens that were not watched, or that have changed places
            self.ids = None
        self.padding = self._real(arguments.get("attention_mask"))
        self.context_padding = _flat(arguments.get("encoder_attention_mask"))

    def remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a call: the state of its cache."""
        arguments = self._arguments(args, kwargs)
        cache = _past(arguments)[1]
        self.cache = (
            cache if cache is not None else _past({"past_key_values": getattr(output, "past_key_values", None)})[1]
        )

    def _same(self, cache: Any) -> bool:
        return (
            cache is not None and self.cache is not None and all(a is b for a, b in zip(cache, self.cache, strict=True))
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}

    def _real(self, mask: Any) -> Tensor | None:
        """Which of the tokens so far are real, (B,L) or None for all; generation may pass whole maps for each layer."""
        if isinstance(mask, Mapping):
            mask = next((layer_mask for layer_mask in mask.values() if layer_mask is not None), None)
        if not isinstance(mask, Tensor):
            return self.padding if self.past else None
        if mask.ndim == 2:
            return mask.detach().bool()
        if mask.ndim != 4:
            return None
        if self.past:  # a window may hide the early tokens from these queries: what was known holds on
            return self.padding
        may = mask.detach() if mask.dtype == torch.bool else mask.detach() > torch.finfo(mask.dtype).min / 2
        return may.any(1).any(1)[:, : mask.shape[2]]  # without a cache every real token is seen, by itself at least


def _flat(mask: Any) -> Tensor | None:
    return mask.detach().bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _past(arguments: Mapping[str, Any]) -> tuple[int, tuple[Any, Any] | None]:
    """Tokens that the cache held before a call; and two objects that stay the same while nobody moves its rows."""
    caches = arguments.get("caches")
    if caches and isinstance(caches[0], KVCache):
        return int(caches[0].length), (caches[0], caches[0].reorders)
    cache = arguments.get("past_key_values")
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0, None
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or [None]
    return int(cache.get_seq_length()), (cache, getattr(layers[0], "keys", None))


def readers_of(model: nn.Module) -> dict[nn.Module, Reader]:
    """For each module the reader of the innermost model around it that is given tokens."""
    readers: dict[nn.Module, Reader] = {}

    def walk(module: nn.Module, reader: Reader | None) -> None:
        names = list(inspect.signature(module.forward).parameters)
        if {"ids", "input_ids"} & set(names):
            reader = Reader(module, names)
        if reader is not None:
            readers[module] = reader
        for child in module.children():
            walk(child, reader)

    walk(model, None)
    return readers


def document_of(call: Call, b: int, cross: bool, reader: Reader | None, marker: Marker | None) -> Document:
    """What is known about document b of a call."""
    T, S = call.q.shape[2], call.k.shape[2]
    if cross:
        return _crossdocument_of(call, b, reader)
    past = call.past if call.past is not None else 0 if reader is None else reader.past
    length = past + T  # tokens so far; a cache with a window holds fewer keys, a static one has room for more
    gone = max(0, length - S)  # tokens that have left a window
    rows = keys = q_ids = k_ids = None
    first = 0
    padding = None if reader is None or reader.padding is None else reader.padding[b : b + 1]
    if padding is not None and len(padding):
        real = _longer(padding[0], length)
        rows, keys = real[-T:], _fit(real, S, False)
        first = int(real.int().argmax()) if real.any() else 0
    elif T == S:
        rows = keys = _by_length(call, b)
    ids = None if reader is None else reader.ids
    if ids is not None and ids.shape[0] > b and ids.shape[1] == length:
        q_ids, k_ids = ids[b, -T:], _fit(ids[b], S, -1)
    return Document(
        real_rows=rows,
        real_keys=keys,
        start=past - gone,
        q_ids=q_ids,
        k_ids=k_ids,
        marks=None if marker is None or k_ids is None else dict(marker(k_ids)),
        before=int(ids[b, gone - 1]) if k_ids is not None and ids is not None and gone else -1,
        first=first - gone if first >= gone else None,
    )


def _crossdocument_of(call: Call, b: int, reader: Reader | None) -> Document:
    """Queries of one sequence, keys of another: there are no distances."""
    T, S = call.q.shape[2], call.k.shape[2]
    if reader is None:
        return Document(start=None)
    padding, context = reader.padding, reader.context_padding
    rows = None if padding is None or padding.shape[0] <= b else _longer(padding[b], reader.past + T)[-T:]
    keys = None if context is None or context.shape[0] <= b or context.shape[1] != S else context[b]
    return Document(real_rows=rows, real_keys=keys, start=None)


def _longer(real: Tensor, length: int) -> Tensor:
    """What is known of the first tokens, and True for those after them; the rest of a static mask is cut off."""
    return torch.cat([real, real.new_ones(max(0, length - real.shape[0]))])[:length]


def _fit(values: Tensor, length: int, filler: Any) -> Tensor:
    """The last `length` values, or all of them and a filler behind."""
    if values.shape[0] >= length:
        return values[values.shape[0] - length :]
    return torch.cat([values, values.new_full((length - values.shape[0],), filler)])


def _by_length(call: Call, b: int) -> Tensor | None:
    """In self attention a mask of lengths tells which queries are padding, too."""
    length = None if call.options.mask is None else call.options.mask.real_length(b)
    return None if length is None else torch.arange(call.q.shape[2]) < length
