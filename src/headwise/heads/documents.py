"""Hand every call of a model's attentions to a listener, with what is known about the documents of the call.

That is their tokens, their padding, and what a cache held before.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_leaves

from headwise.backends.cache import KVCache
from headwise.backends.torch_ import as_tensor
from headwise.corpus.documents import batches
from headwise.corpus.tokens import Ids
from headwise.masks import Allowed, Bias, BroadcastGrid, all_of, resolve
from headwise.models.ask import adapter_of, cache_in, evaluating, run_body
from headwise.models.hook import Hook, attach, hooked
from headwise.models.sites import Site, sites_of
from headwise.records import Call

# tokens of a batch at most: at the width of GPT-2 small twice as many run 12 % slower
TOGETHER = 2048
# queries whose keys are looked up at a time, so that memory does not grow with T x S: a round choice
AT_ONCE = 256
# Arguments by which models of transformers take an image, a film or a sound.
OTHERS = {
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "audio_values",
}

# An image or a sound takes places in a text, where the ids hold a token that stands for it. The fields of a config
# that have the number of this token; families call it differently.
SPANS = {
    "image": ("image_token_id", "image_token_index", "video_token_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}

# arguments by which a model is given its tokens
READ = {"ids", "input_ids", "inputs_embeds"}
# names of a layer's first argument; no model that reads ids has such a one
LAYER_INPUTS = {"hidden_states", "x"}
# the arrays of a call with an axis of queries behind its heads
OF_QUERIES = ("q", "out", "weights", "before_gate")
# Two notes on a call whose distances are not known; a table shows them.
PIECES = "it attends within windows or chunks: their keys are not the whole text, and there are no distances"
UNPLACED = "its keys are pooled, or joined with others, and not the positions of one text: there are no distances"

# ids of the keys (S,) -> named sets of keys, (S,) bool each
Marker = Callable[[Tensor], Mapping[str, Tensor]]
Listener = Callable[[Site, Call, Sequence["Document"]], Tensor | None]
Progress = Callable[[int, int], None]  # steps done, and of all


def no_progress(done: int, total: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Document:
    """What is known about one document of a call besides its queries, keys and values.

    All of it describes the S keys and T queries that the call has, those of a cache included.
    """

    # (T,) bool, the queries that are measured: no padding; None: all
    real_rows: Tensor | None = None
    # (S,) bool, keys that are no padding; None: all. It tells the first token, and what the thumbnail shows. It hides
    # no key from a query: that is up to the call's mask.
    real_keys: Tensor | None = None
    # the key at which query 0 stands; None where queries and keys are two sequences
    start: int | None = 0
    q_ids: Tensor | None = None  # (T,) tokens of the queries
    k_ids: Tensor | None = None  # (S,) tokens of the keys
    # name -> (S,) bool, sets of keys whose mass is wanted
    marks: dict[str, Tensor] = field(default_factory=dict)
    # the token right before the first key, where a window has let it go; -1 for none
    before: int = -1
    # the key of the text's first token; -1: the first real one; None: it has left the cache
    first: int | None = -1
    # the first tokens of documents that are packed in this row, and read each alone
    starts: Ids = (0,)


def part_of(call: Call, b: int, rows: Sequence[int], keys: slice = slice(None)) -> Call:
    """The call of document b alone, with these of its queries and keys."""
    queries = list(rows)
    kinds = zip((Allowed, Bias), resolved(call, b, queries, keys), strict=True)
    mask = all_of([kind(x) for kind, x in kinds if x is not None])
    parts: dict[str, Any] = {"options": call.options._replace(mask=mask)}
    for names, places in ((OF_QUERIES, queries), (("k", "v"), keys)):
        for name in names:
            whole = getattr(call, name)
            parts[name] = whole if whole is None else whole[b : b + 1, :, places]
    if call.weights is not None:
        parts["weights"] = parts["weights"][..., keys]
    return call._replace(**parts)


def unpacked(
    call: Call, b: int, document: Document
) -> Iterator[tuple[Call, int, Document]]:
    """The documents that are packed in row b, each as a call of its own, its place there, and what is known of it."""
    if len(document.starts) == 1:
        yield call, b, document
        return
    for start, end in itertools.pairwise((*document.starts, call.n_queries)):
        keys = slice(start, end)
        ids = document.q_ids
        marks = {name: mark[keys] for name, mark in document.marks.items()}
        # queries and keys are one sequence here
        ids = None if ids is None else ids[keys]
        of_part = Document(q_ids=ids, k_ids=ids, marks=marks)
        yield part_of(call, b, range(start, end), keys), 0, of_part


@contextmanager
def listening(
    model: nn.Module,
    listener: Listener,
    marker: Marker | None = None,
    sites: Sequence[Site] | None = None,
) -> Iterator[None]:
    """Inside this block every call of these attentions, default all, goes to `listener` with its documents.

    What the listener returns replaces the call's `out`; None leaves it. `marker` names sets of keys by their tokens.
    """
    sites = sites_of(model) if sites is None else sites
    readers = _Readers()
    # a site whose number of heads is only seen in its first call -> the same with it
    counted: dict[Site, Site] = {}

    def watcher(site: Site, call: Call) -> Tensor | None:
        reader = readers.running[-1] if readers.running else _Reader()
        # the same object in each call, as listeners keep their results by site
        if not site.n_heads:
            site = counted.setdefault(site, replace(site, n_heads=call.out.shape[1]))
        # An empty `out`: the call could not be read. In code that calls functions of torch itself (`free`) a batch of
        # another size than the model was given is one of windows or chunks of its texts. As in cross attention, there
        # are no distances.
        told = ""
        if site.free and len(call.out) and len(call.out) not in readers.sizes:
            told = PIECES
            call = call._replace(cross=True)
            reader = _Reader()
        cross = call.cross or site.cross
        documents = [
            _document(call, b, cross, reader, marker) for b in range(len(call.q))
        ]
        if not cross and len(call.out) and documents[0].start is None:
            told = UNPLACED
        if told:  # the first line of a note begins with the site
            before = f"{call.note};" if call.note else f"{site.name}:"
            call = call._replace(note=f"{before} {told}")
        return listener(site, call, documents)

    hooks = readers.hooks(model, {site.module for site in sites if site.free})
    with hooked(hooks, with_kwargs=True), attach(sites, watcher):
        yield


def run_documents(
    model: nn.Module,
    documents: Sequence[Ids],
    take: Callable[[int, Site, Call, int, Document], None],
    marker: Marker | None = None,
    progress: Progress = no_progress,
) -> None:
    """Run documents of ids through the model and hand each, in every call of a site, to `take`.

    Neighbours of equal length run together.

    take      is called with the number of the document, the site, the call, the document's place in the batch of the
              call, and what is known of it
    marker    see `listening`
    progress  is called with the tokens that have run and those to run
    """
    if not documents:
        return  # `attach` raises where no head is reached
    done, total = 0, sum(map(len, documents))  # tokens
    number = 0  # of the first document of the batch that runs

    def listener(site: Site, call: Call, described: Sequence[Document]) -> None:
        for b, document in enumerate(described):
            take(number + b, site, call, b, document)

    with torch.no_grad(), listening(model, listener, marker), evaluating(model):
        # before the first batch, so that its time is seen to be the model's
        progress(0, total)
        for ids in batches(documents, TOGETHER):
            run_body(model, ids)
            number += len(ids)
            done += ids.numel()
            progress(done, total)


class _Readers:
    """What the models inside a model are given while they run, the innermost last.

    A tower that reads pixels or sound has a sequence of its own: neither the ids nor the padding of a text are its.
    A layer that is handed the ids beside its hidden states (DeepSeek-V4) reads nothing: when it runs, the layers before
    it have filled the cache.
    """

    def __init__(self) -> None:
        self.running: list[_Reader] = []
        self.depth = 0  # of the modules that are in a call, one within the other
        # How many documents the outermost of them is given, as far as its inputs tell: one of these. Of a torch module
        # that people wrote it is not known which axis of an input is the batch, the first or the second.
        self.sizes: set[int] = set()

    def hooks(self, model: nn.Module, free: set[nn.Module]) -> Iterator[Hook]:
        for module in model.modules():
            # names of what it is called with
            names = list(inspect.signature(module.forward).parameters)
            reader = None
            if READ.intersection(names) and not LAYER_INPUTS.intersection(names[:1]):
                reader = _Reader(module, names)
            elif module is model and adapter_of(model) is not None:
                reader = _Reader(module, names, first_has_ids=True)
            elif OTHERS.intersection(names):
                reader = _Reader()  # one that knows nothing
            # a caller may run any module around an attention that is free
            elif free.isdisjoint(module.modules()):
                continue
            yield module.register_forward_pre_hook, partial(self._enter, reader)
            after = partial(module.register_forward_hook, always_call=True)
            yield after, partial(self._leave, reader)

    def _enter(self, reader: _Reader | None, module: nn.Module, *call: Any) -> None:
        if not self.depth:  # what is inside may be given pieces of the texts
            self.sizes = set()
            for x in tree_leaves(call):
                if isinstance(x, Tensor) and x.ndim:
                    # Of four axes, an image's, only the first can be the batch; else it may be the second, after T.
                    self.sizes.update(x.shape[: 1 if x.ndim > 3 else 2])
                    # (T,) or (T,C): one text without an axis for a batch
                    if x.ndim < 3:
                        self.sizes.add(1)
        self.depth += 1
        if reader is not None:
            args, keywords = call
            around = self.running[-1] if self.running else _Reader()
            reader.read(args, keywords, around)
            self.running.append(reader)

    def _leave(self, reader: _Reader | None, module: nn.Module, *call: Any) -> None:
        self.depth -= 1
        if reader in self.running:
            self.running.remove(reader)
            reader.remember(*call)


@dataclass(eq=False)  # each is itself alone
class _Reader:
    """The tokens and the padding that a model is given, those that its cache holds included: L so far."""

    # None of one that is given no tokens: then all that follows stays empty
    model: nn.Module | None = None
    parameters: Sequence[str] = ()  # names of the arguments of its `forward`
    # a model of one's own, whose first argument are the ids
    first_has_ids: bool = False
    ids: Tensor | None = None  # (B,L); None where one of them is not known
    padding: Tensor | None = None  # (B,L) bool, True = real
    # (B,L) or (1,L), where there is no cache: a document begins where they start anew
    positions: Tensor | None = None
    past: int = 0  # tokens that the cache held before this call
    n_tokens: int | None = None  # tokens of this call, without those of the cache
    # For each layer of a cache of transformers, None where it does not say: the keys that a call of it has, and the
    # number of those that have left its window.
    held: list[tuple[int, int] | None] = field(default_factory=list)
    cache: tuple[Any, ...] = ()  # that of the last call, as `_past` tells it
    # "image": (B,L) bool, places that are no tokens of a text
    spans: dict[str, Tensor] = field(default_factory=dict)

    def read(self, args: Any, kwargs: Any, around: _Reader) -> None:
        """Before a call: what the model is given, and `around`, the model that runs it.

        The ids of a cache are not in it. They are known where all earlier calls were watched: then they were kept here.
        """
        if self.model is None:
            return
        arguments = self._arguments(args, kwargs)
        self.past, cache = _past(arguments)
        # `ids` is the name in our GPT, `input_ids` that in transformers.
        ids = arguments.get("input_ids", arguments.get("ids"))
        if self.first_has_ids:
            ids = arguments.get(self.parameters[0])
        embedded = arguments.get("inputs_embeds")
        known = self.ids
        self.ids = None
        self.spans = {}
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            # By `is`: == would compare the numbers of tensors. Else it ran unwatched, or its documents changed places.
            is_same = cache and self.cache and all(map(is_, cache, self.cache))
            if not self.past:
                self.ids = ids.detach()
            # a cache that was cropped between two calls holds the first tokens alone
            elif known is not None and is_same and self.past <= known.shape[1]:
                self.ids = torch.cat([known[:, : self.past], ids.detach()], 1)
            self._set_spans()
        # The model around may have read the same tokens, and made embeddings of them.
        elif (
            isinstance(embedded, Tensor)
            and around.ids is not None
            and around.ids.shape == (len(embedded), self.past + embedded.shape[1])
        ):
            self.ids = around.ids
            self.spans = around.spans
        sequence = ids if isinstance(ids, Tensor) else embedded  # (B,T) or (B,T,C)
        self.n_tokens = None
        self.held = []
        self.padding = self._real(arguments.get("attention_mask"), around)
        if isinstance(sequence, Tensor):
            self.n_tokens = sequence.shape[1]
            for layer in _layers(cache_in(arguments)):
                sizes = getattr(layer, "get_mask_sizes", None)
                self.held.append(sizes and sizes(self.n_tokens))
            if self.padding is not None:  # that of a static cache is longer
                self.padding = _longer(self.padding, self.past + self.n_tokens)
        positions = arguments.get("position_ids")
        is_known = isinstance(positions, Tensor) and positions.ndim == 2
        self.positions = positions if is_known and not self.past else None

    def remember(self, args: Any, kwargs: Any, output: Any) -> None:
        """After a call: the state of its cache, which it was given, or else has made and gives back."""
        cache = _past(self._arguments(args, kwargs))[1]
        self.cache = cache or _past({"cache": cache_in(output)})[1]

    def held_by(self, layer: Any) -> tuple[int, int] | None:
        """The entry of `held` for the layer of an attention; None where there is no cache, or it does not say."""
        # by it an attention of transformers finds its keys in the cache
        number = getattr(layer, "layer_idx", -1)
        if isinstance(number, int) and 0 <= number < len(self.held):
            return self.held[number]
        return None

    def places(self, call: Call) -> bool:
        """Is it known where the keys of a call of self attention stand in the text of its queries?"""
        S = call.n_keys
        held = self.held_by(call.layer)
        if held is not None and call.past is None:
            return held[0] == S
        # Ours says where; or they are the latest of all tokens so far; or it reads another layer's keys.
        is_latest = call.n_queries <= S <= self.past + call.n_queries
        others = [n_keys for n_keys, _ in filter(None, self.held)]
        return call.past is not None or is_latest or S in others

    def _set_spans(self) -> None:
        """Note the places that an image or a sound fills, and give each an id of its own.

        The token that stands for an image stands at each of its places: they would be taken for copies of one token.
        """
        config = getattr(self.model, "config", None)
        for name, fields in SPANS.items():
            values = [getattr(config, field, None) for field in fields]
            numbers = [n for n in values if isinstance(n, int)]
            if self.ids is None or not numbers:
                continue
            span = torch.isin(self.ids, self.ids.new_tensor(numbers))
            if span.any():
                self.spans[name] = span
                # -2, -3, ...: no two alike, and no id; -1 stands for no token.
                unlike = -2 - torch.arange(self.ids.shape[1], device=self.ids.device)
                self.ids = torch.where(span, unlike, self.ids)

    def _arguments(self, args: Any, kwargs: Any) -> dict[str, Any]:
        return dict(zip(self.parameters, args, strict=False)) | kwargs

    def _real(self, mask: Any, around: _Reader) -> Tensor | None:
        """Which of the tokens so far are real, (B,L) bool or None for all, by the `attention_mask` of a call.

        That is the padding (B,L), or a map of who may look at whom (B,heads,T,S), or, where transformers generates, a
        dict with such a map for each kind of layer.
        """
        if isinstance(mask, Mapping):  # padding is the same in all of them
            mask = next((x for x in mask.values() if x is not None), None)
        if hasattr(mask, "mask_mod"):  # a BlockMask of flex attention
            B, H, T, S = mask.shape
            here = str(mask.kv_num_blocks.device)
            mask = flex_attention.create_mask(mask.mask_mod, B, H, T, S, device=here)
        if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
            return self.padding if self.past else None  # that of the last call holds on
        if mask.ndim == 2:
            return mask.detach().bool()
        # the map does not tell it: a window may hide early tokens, which are real, from these queries
        if self.past:
            # the model around was given the padding itself; else what was known holds on
            is_told = around.past == self.past and around.padding is not None
            return around.padding if is_told else self.padding
        may = mask.detach()
        # what is added to scores: about the least number there is forbids
        if may.dtype != torch.bool:
            may = may > torch.finfo(may.dtype).min / 2
        # Without a cache every real token is seen by some query, by itself at least. Of the S keys the first T are
        # tokens; a static cache has empty room behind them.
        return may.any(1).any(1)[:, : mask.shape[2]]


def _past(arguments: Any) -> tuple[int, tuple[Any, ...]]:
    """Tokens that the cache of a call holds now; and two objects by which an untouched cache is known again.

    They are the cache and what becomes another object when its documents change places: for ours a count, for one of
    transformers the keys of the first layer, which is also another tensor once tokens were added.
    """
    caches = arguments.get("caches")
    if caches and isinstance(caches[0], KVCache):
        return int(caches[0].length), (caches[0], caches[0].reorders)
    cache = cache_in(arguments)
    if not hasattr(cache, "get_seq_length"):
        return 0, ()
    keys = [getattr(layer, "keys", None) for layer in _layers(cache)[:1]]
    return int(cache.get_seq_length()), (cache, *keys)


def _layers(cache: Any) -> Sequence[Any]:
    # The cache of an encoder-decoder has one for self attention inside.
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or ()


def _document(
    call: Call, b: int, cross: bool, reader: _Reader, marker: Marker | None
) -> Document:
    """What is known about document b of a call.

    What the model around was given need not be about these queries and keys: a model may pool its tokens, add some, or
    look from an image at a text. So lengths are compared before it is believed, and else the call's own mask tells.
    """
    T = call.n_queries
    S = call.n_keys
    padding = _row(reader.padding, b)
    ids = _row(reader.ids, b)
    # Is what the model around was given, of no model or of other tokens than these queries? It may have added some, or
    # have pooled them.
    is_other = reader.n_tokens != T
    if cross:  # queries of one sequence, keys of another
        keys = _attended(call, b) if call.past is None else None
        if padding is not None and is_other:
            # It may be that of the keys: the places of an image look at a text (BridgeTower). A mask of a layer of ours
            # may hide keys for other reasons.
            if keys is None and len(padding) == S:
                keys = padding
            padding = None
        rows = None if padding is None else padding[-T:]
        return Document(rows, keys, start=None)
    past = reader.past if call.past is None else call.past
    # Then what some query may attend tells what is real. With a past, shorter padding is that of the first tokens.
    if is_other and not past:
        padding = _attended(call, b) if T == S else None
    # tokens so far; a cache with a window holds fewer keys, a static one has room for more
    length = past + T
    gone = max(0, length - S)  # tokens that have left a window
    rows = keys = q_ids = k_ids = None  # as the fields of `Document` have them
    # the number of the first real token among all so far; and see `Document`
    first = 0
    before = -1
    if padding is not None:
        real = _longer(padding[None], length)[0]
        rows = real[-T:]
        keys = _fit(real, S, False)
        first = int(real.int().argmax()) if real.any() else 0  # the first True
    # `Lengths` hides keys that are padding: these queries are it, too
    elif T == S and call.options.mask is not None:
        n_real = call.options.mask.real_length(b)
        rows = keys = None if n_real is None else torch.arange(T) < n_real
    start: int | None = past - gone
    # where the keys stand is not known: S tells nothing, but the cache may tell `gone`
    if not reader.places(call):
        _, gone = reader.held_by(call.layer) or (0, 0)
        keys = _attended(call, b)
        start = None
        ids = None
    # a model of one's own may have a cache that is not seen
    if ids is not None and len(ids) == length and (T == S or not reader.first_has_ids):
        q_ids = ids[-T:]
        k_ids = _fit(ids, S, -1)
        before = int(ids[gone - 1]) if gone else -1
    marks: dict[str, Tensor] = {}
    if k_ids is not None:
        marks = {name: _fit(span[b], S, False) for name, span in reader.spans.items()}
        marks |= marker(k_ids) if marker else {}
    seen_first = first - gone if first >= gone else None
    starts = [0]
    if start == 0 and not past and T == S and (rows is None or rows.all()):
        starts = _starts(call, b, reader)
    return Document(
        real_rows=rows,
        real_keys=keys,
        start=start,
        q_ids=q_ids,
        k_ids=k_ids,
        marks=marks,
        before=before,
        first=seen_first,
        starts=starts,
    )


def _row(values: Tensor | None, b: int) -> Tensor | None:
    # A call may have more documents than the model was given, such as windows of them.
    return None if values is None or len(values) <= b else values[b]


def _starts(call: Call, b: int, reader: _Reader) -> list[int]:
    """The first tokens of documents that are packed in row b: none of them sees what comes before it."""
    T = call.n_queries
    of_rows = None
    mask = call.options.mask
    if reader.positions is not None and reader.positions.shape[1] == T:
        of_rows = reader.positions.cpu() - torch.arange(T)
    for part in () if mask is None else mask.parts():
        ids = part.packed()
        if ids is not None:
            of_rows = torch.as_tensor(ids).cpu()
    if of_rows is None:
        return [0]
    changes = of_rows[b if len(of_rows) > 1 else 0].diff().nonzero()[:, 0]
    starts = [0, *(changes + 1).tolist()]
    for start, end in itertools.pairwise((*starts, T)):
        others = torch.ones(T, dtype=torch.bool, device=call.q.device)
        others[start:end] = False
        seen = _seen(call, b, [start, end - 1])
        if seen is None or (seen & others).any():
            return [0]  # they are not kept apart
    return starts


def _attended(call: Call, b: int) -> Tensor | None:
    """Keys (S,) of document b that some query may attend: the others are padding. None where all are real."""
    real = None  # without a query, as of x[:, :0], no key is seen at all
    # the last queries see most
    for end in range(call.n_queries, 0, -AT_ONCE):
        seen = _seen(call, b, range(max(0, end - AT_ONCE), end))
        if seen is None:
            return None
        # one column stands for all where they are alike
        keys = seen.any(0).any(0).expand(call.n_keys)
        real = keys if real is None else real | keys
        if real.all():
            return None
    return real


def _seen(call: Call, b: int, rows: Sequence[int]) -> Tensor | None:
    """What these rows of document b may attend, (1 or H, 1 or rows, 1 or S) bool; None: everything."""
    if call.weights is not None:
        return call.weights[b][:, list(rows)] > 0
    return resolved(call, b, list(rows))[0]


def resolved(
    call: Call, b: int, queries: Any, keys: slice = slice(None)
) -> tuple[Tensor | None, Tensor | None]:
    """What the mask of a call allows some queries of document b, and adds; (1 or H, 1 or t, 1 or s) each or None."""
    if call.options.mask is None:
        return None, None
    grid = BroadcastGrid(
        (*call.q.shape[:3], call.n_keys),
        array=partial(as_tensor, device=call.q.device),
        arange=partial(torch.arange, device=call.q.device),
        keys=keys,
        queries=queries,
        documents=slice(b, b + 1),
    )
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    masks = call.options.mask.parts()
    allowed, bias = resolve(masks, grid, torch.where, lambda x: x.to(dtype))
    # with axes in front until there are four
    if allowed is not None:
        allowed = allowed[(None,) * (4 - allowed.ndim)][0]
    if bias is not None:
        bias = bias.to(dtype)[(None,) * (4 - bias.ndim)][0]
    return allowed, bias


def _longer(real: Tensor, length: int) -> Tensor:
    """The padding (B,length) of so many tokens: those behind `real` are real."""
    more = real.new_ones(len(real), max(0, length - real.shape[1]))
    return torch.cat([real, more], 1)[:, :length]


def _fit(values: Tensor, length: int, filler: Any) -> Tensor:
    """The values of `length` keys: those of a window are the latest tokens; a static cache has empty room behind."""
    empty = values.new_full((max(0, length - len(values)),), filler)
    return torch.cat([values[max(0, len(values) - length) :], empty])
