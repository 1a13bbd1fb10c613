"""Hand every call of a model's attentions to a listener, with what is known about the documents of the call.

That is their tokens, their padding, and what a cache held before.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError
from headwise.masks import BroadcastGrid, resolve
from headwise.models.ask import evaluating, hooked, run_body
from headwise.models.sites import Site, attach, inside, sites_of
from headwise.models.stream import BATCH, portions, stream_of, sweep, turns
from headwise.records import Call
from headwise.rungs.cache import KVCache
from headwise.rungs.tensor import as_tensor

# What models are given that is no text.
OTHERS = {"pixel_values", "pixel_values_videos", "input_features", "input_values", "audio_values"}

SPANS = {
    "image": ("image_token_id", "image_token_index", "video_token_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}  # and the fields of a config with the number that stands where they are put in

Marker = Callable[[Tensor], Mapping[str, Tensor]]  # ids of the keys (S,) -> named sets of keys, (S,) bool each
Listener = Callable[[Site, Call, Sequence["Document"]], Tensor | None]


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


def share_note(rows: float | None, seed: int) -> str:
    """What a result says of a share of the rows; nothing for all of them. Raises HeadwiseError where it is no share."""
    if rows is None:
        return ""
    if not 0 < rows <= 1:
        raise HeadwiseError(f"rows={rows!r} must be a share of the rows, above 0 and at most 1, such as 0.125")
    return f"Statistics are of {rows:g} of the rows, one drawn from each {1 / rows:.3g} by seed {seed}; each is exact."


def some_rows(document: Document, T: int, share: float | None, seed: int) -> Document:
    """The document with a share of its T rows: cut into stretches of equal length, of each one row is drawn.

    Rows that are spread evenly would fall in step with a text whose pattern has that length.
    """
    if share is None:
        return document
    real = torch.arange(T) if document.real_rows is None else document.real_rows.cpu().nonzero()[:, 0]
    count = math.ceil(len(real) * share)
    edges = torch.arange(count + 1) * len(real) // max(1, count)
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * edges.diff()
    rows = torch.zeros(T, dtype=torch.bool)
    rows[real[edges[:-1] + drawn.long()]] = True
    return replace(document, real_rows=rows)


@contextmanager
def listening(model: nn.Module, listener: Listener, marker: Marker | None = None) -> Iterator[None]:
    """Hand every call of every attention to `listener`; what it returns replaces the heads' output (B,H,T,E)."""
    sites, readers = sites_of(model), _readers(model)

    def watcher(site: Site, call: Call) -> Tensor | None:
        reader = readers.get(site.module) or _Reader(None, ())
        documents = [_document(call, b, call.cross or site.cross, reader, marker) for b in range(call.q.shape[0])]
        return listener(site, call, documents)

    with inside() as here:
        handles = [handle for reader in set(readers.values()) for handle in reader.hooks(here)]
        with hooked(handles), attach({site: partial(watcher, site) for site in sites}, model):
            yield


def run_documents(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    take: Callable[[int, Site, Call, int, Document], None],
    marker: Marker | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run documents of ids through the model and hand each to `take`: its number, and that in the call of a site.

    Neighbours of equal length run together. `progress` counts tokens, of a streamed model those of each layer.
    """
    total, done, number = sum(map(len, documents)) * turns(model), 0, 0

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        for b, document in enumerate(described):
            take(number + b, site, call, b, document)

    with torch.no_grad(), listening(model, listener, marker), evaluating(model):
        stream = stream_of(model)
        for start, part in portions(model, documents):
            for turn in sweep(model, list(batches(part, None if stream is None else stream.at_once))):
                for first, ids in turn:
                    number = start + first
                    run_body(model, ids)
                    done += ids.numel()
                    progress(done, total)


def batches(documents: Sequence[Sequence[int]], most: int | None = None) -> Iterator[Tensor]:
    """Neighbours of equal length as (B,T) ids, up to `most` tokens together, default BATCH."""
    for length, group in itertools.groupby(documents, key=len):
        while chunk := list(itertools.islice(group, max(1, (most or BATCH) // length))):
            yield torch.tensor([list(document) for document in chunk])


@dataclass(eq=False)
class _Reader:
    """The tokens and the padding that a model is given, those that its cache holds included."""

    model: nn.Module | None  # None where no model around is given tokens
    parameters: Sequence[str]
    ids: Tensor | None = None  # (B,L)
    padding: Tensor | None = None  # (B,L) bool, True = real
    context_padding: Tensor | None = None  # (B,S) of an encoder's tokens
    past: int = 0
    cache: tuple[Any, Any] | None = None  # what tells whether a cache is the one of the last call, untouched since
    spans: dict[str, Tensor] = field(default_factory=dict)  # "image": (B,L) bool, places that are no tokens of a text
    around: _Reader | None = None  # of the model around, which may have read the ids and made embeddings of them

    def hooks(self, here: Callable[[], bool]) -> list[RemovableHandle]:
        """Read what the model is given, where `here` says so."""
        if self.model is None:
            return []

        # To another thread, which is not inside, torch may call a hook that is just being removed without its keywords.
        def hook(act: Callable[..., None], module: nn.Module, *more: Any) -> None:
            if here() and module is self.model:
                act(*more)

        return [
            self.model.register_forward_pre_hook(partial(hook, self.read), with_kwargs=True),
            self.model.register_forward_hook(partial(hook, self.remember), with_kwargs=True),
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call: what the model is given."""
        arguments = self._arguments(args, kwargs)
        self.past, cache = _past(arguments)
        ids = arguments.get("input_ids", arguments.get("ids"))
        same = cache is not None and self.cache is not None and all(map(is_, cache, self.cache))
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            self.ids = None
        elif self.past == 0:
            self.ids = ids.detach()
        elif same and self.ids is not None and self.past <= self.ids.shape[1] and self.ids.shape[0] == ids.shape[0]:
            self.ids = torch.cat([self.ids[:, : self.past], ids.detach()], 1)
        else:  # tokens that were not watched, or that have changed places
            self.ids = None
        embedded = arguments.get("inputs_embeds")
        if self.ids is None and isinstance(embedded, Tensor) and self.around is not None:
            outer = self.around.ids  # a picture's places among them, whose numbers are no tokens
            if outer is not None and outer.shape == (len(embedded), self.past + embedded.shape[1]):
                self.ids, self.spans = outer, self.around.spans
        else:
            self._set_spans()
        self.padding = self._real(arguments.get("attention_mask"))
        context = arguments.get("encoder_attention_mask")
        self.context_padding = context.detach().bool() if isinstance(context, Tensor) and context.ndim == 2 else None

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a call: the state of its cache."""
        cache = _past(self._arguments(args, kwargs))[1]
        self.cache = cache or _past({"past_key_values": getattr(output, "past_key_values", None)})[1]

    def _set_spans(self) -> None:
        """Places that an image or a sound fills: no two of them hold the same token, whatever number stands there."""
        self.spans = {}
        config = getattr(self.model, "config", None)
        for name, fields in SPANS.items():
            numbers = [n for key in fields if isinstance(n := getattr(config, key, None), int)]
            if self.ids is None or not numbers:
                continue
            span = torch.isin(self.ids, torch.tensor(numbers, device=self.ids.device))
            if span.any():
                self.spans[name] = span
                self.ids = torch.where(span, -2 - torch.arange(self.ids.shape[1], device=self.ids.device), self.ids)

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


def _readers(model: nn.Module) -> dict[nn.Module, _Reader]:
    """For each module the reader of the innermost model around it that is given a sequence.

    A tower that reads pixels or sound has a sequence of its own: neither the ids nor the padding of a text are its.
    """
    readers: dict[nn.Module, _Reader] = {}

    def walk(module: nn.Module, reader: _Reader | None) -> None:
        names = list(inspect.signature(module.forward).parameters)
        if {"ids", "input_ids", "inputs_embeds"} & set(names):
            reader = _Reader(module, names, around=reader)
        elif OTHERS & set(names):
            reader = _Reader(None, ())
        if reader is not None:
            readers[module] = reader
        for child in module.children():
            walk(child, reader)

    walk(model, None)
    return readers


def _document(call: Call, b: int, cross: bool, reader: _Reader, marker: Marker | None) -> Document:
    """What is known about document b of a call."""
    T, S = call.q.shape[2], call.k.shape[2]
    padding, ids = _row(reader.padding, b), _row(reader.ids, b)
    if cross:  # queries of one sequence, keys of another: there are no distances
        context = _row(reader.context_padding, b)
        return Document(
            real_rows=None if padding is None else _longer(padding, reader.past + T)[-T:],
            real_keys=None if context is None or len(context) != S else context,
            start=None,
        )
    past = reader.past if call.past is None else call.past
    if padding is not None and not past and len(padding) < T:
        padding = None  # of another sequence
    length = past + T  # tokens so far; a cache with a window holds fewer keys, a static one has room for more
    gone = max(0, length - S)  # tokens that have left a window
    rows = keys = q_ids = k_ids = None
    first, before = 0, -1
    if reader.model is None and T == S and call.options.mask is not None:
        padding = _attended(call, b)
    if padding is not None:
        real = _longer(padding, length)
        rows, keys = real[-T:], _fit(real, S, False)
        first = int(real.int().argmax()) if real.any() else 0
    elif T == S and call.options.mask is not None:  # in self attention a mask of lengths tells of queries, too
        n_real = call.options.mask.real_length(b)
        rows = keys = None if n_real is None else torch.arange(T) < n_real
    if ids is not None and len(ids) == length:
        q_ids, k_ids = ids[-T:], _fit(ids, S, -1)
        before = int(ids[gone - 1]) if gone else -1
    marks = {} if k_ids is None else {name: _fit(span[b], S, False) for name, span in reader.spans.items()}
    if marker is not None and k_ids is not None:
        marks |= marker(k_ids)
    return Document(
        real_rows=rows,
        real_keys=keys,
        start=past - gone,
        q_ids=q_ids,
        k_ids=k_ids,
        marks=marks or None,
        before=before,
        first=first - gone if first >= gone else None,
    )


def _attended(call: Call, b: int) -> Tensor | None:
    """Keys (S,) of document b that some query may attend: the others are padding. None where all are real."""
    assert call.options.mask is not None
    B, H, T, _ = call.q.shape
    grid = BroadcastGrid(
        (B, H, T, call.k.shape[2]),
        array=lambda values: as_tensor(values, call.q.device),
        arange=lambda n: torch.arange(n, device=call.q.device),
        documents=slice(b, b + 1),
    )
    allowed = resolve(call.options.mask.parts(), grid, torch.where, lambda bias: bias)[0]
    if allowed is None:
        return None
    real: Tensor = allowed.reshape(-1, *allowed.shape[-2:]).any(0).any(0).expand(call.k.shape[2])
    return None if real.all() else real


def _row(values: Tensor | None, b: int) -> Tensor | None:
    return None if values is None or len(values) <= b else values[b]


def _longer(real: Tensor, length: int) -> Tensor:
    """What is known of the first tokens, and True for those after them; the rest of a static mask is cut off."""
    return torch.cat([real, real.new_ones(max(0, length - len(real)))])[:length]


def _fit(values: Tensor, length: int, filler: Any) -> Tensor:
    """The last `length` values, or all of them and a filler behind."""
    return torch.cat([values[max(0, len(values) - length) :], values.new_full((max(0, length - len(values)),), filler)])
