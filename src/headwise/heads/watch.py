"""`watch`: what every head did while a model ran, exactly, in memory that does not grow with T x S."""

from __future__ import annotations

import difflib
import html
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.gpt.gpt import GPT
from headwise.heads.statistics import Document, Measured, measure, output_factors, top_keys
from headwise.masks import Lengths
from headwise.models.sites import Site, attach, sites_of
from headwise.records import Call
from headwise.rungs.cache import KVCache

Marker = Callable[[Tensor], Mapping[str, Tensor]]  # ids of the keys (S,) -> named sets of keys, (S,) bool each
Listener = Callable[[Site, Call, Sequence[Document]], Tensor | None]


@contextmanager
def watch(
    model: nn.Module,
    *,
    offsets: Sequence[int] = (1,),
    marks: Mapping[str, Sequence[int]] | None = None,
    top_rows: Sequence[int] = (),
    top_k: int = 5,
) -> Iterator[Seen]:
    """Note what every head does while `model` runs inside this block.

        with hw.watch(model) as seen:
            model(ids)
        seen["L3.H5"].entropy          # mean over all real rows, in nats
        seen["L3.H5"].rows.entropy     # (n,) one number a row

    `model` is a GPT of ours, any module with `headwise.MultiHeadAttention` inside, or a model of transformers that goes
    through its attention interface; others are refused by name. The model computes what it computed before. Heads are
    named `L3.H5`; in encoder-decoder models `encoder.L3.H5`, `decoder.L3.H5`, `cross.L3.H5`.

    offsets   distances k whose mass is noted, as `offset_k`; `previous` is `offset_1`
    marks     named sets of token ids whose mass is noted, such as {"delimiter": [11, 13]}
    top_rows  queries whose `top_k` most attended keys are noted, under `.top`

    Statistics and their sources: `headwise.heads.statistics`. Rows are counted over all calls and documents; padding,
    known from `attention_mask` or from `Lengths`, is left out.
    """
    if not isinstance(offsets, Sequence) or any(type(k) is not int or k < 1 for k in offsets):
        raise HeadwiseError(f"offsets={offsets!r} must be distances of at least 1, such as (1, 2)")
    seen = Seen([site.name for site in sites_of(model)], [head for site in sites_of(model) for head in site.heads])
    factors = Factors()

    def note(site: Site, call: Call, documents: Sequence[Document]) -> None:
        T = call.q.shape[2]
        rows = [row for row in top_rows if -T <= row < T]
        for b, document in enumerate(documents):
            found = measure(call, b, document, sorted({1, *offsets}), factors.of(site))
            seen.add(site, found, top_keys(call, b, [row % T for row in rows], top_k) if rows else None, rows)

    def mark(ids: Tensor) -> Mapping[str, Tensor]:
        return {
            name: torch.isin(ids, torch.tensor(list(wanted), device=ids.device))
            for name, wanted in (marks or {}).items()
        }

    with listening(model, note, mark if marks else None):
        yield seen


class Factors:
    """`output_factors` of each site, computed anew only when its W_O has changed."""

    def __init__(self) -> None:
        self._known: dict[Site, tuple[tuple[int, int], Tensor]] = {}

    def of(self, site: Site) -> Tensor | None:
        w_o = site.w_o
        if w_o is None or w_o.shape[1] % site.n_heads:
            return None
        state = w_o.data_ptr(), 0 if w_o.is_inference() else w_o._version
        if site not in self._known or self._known[site][0] != state:
            self._known[site] = state, output_factors(w_o, site.n_heads)
        return self._known[site][1]


@contextmanager
def listening(model: nn.Module, listener: Listener, marker: Marker | None = None) -> Iterator[None]:
    """Hand every call of every attention of a model to `listener`, with what is known about its documents.

    What the listener returns replaces the heads' output (B,H,T,E).
    """
    sites = sites_of(model)
    readers = _readers(model)

    def handle(site: Site) -> Callable[[Call], Tensor | None]:
        reader = readers.get(site.module)

        def watcher(call: Call) -> Tensor | None:
            cross = call.cross or site.cross
            documents = [_document(call, b, cross, reader, marker) for b in range(call.q.shape[0])]
            return listener(site, call, documents)

        return watcher

    with ExitStack() as stack:
        for reader in set(readers.values()):
            stack.callback(reader.model.register_forward_pre_hook(reader.read, with_kwargs=True).remove)
            stack.callback(reader.model.register_forward_hook(reader.remember, with_kwargs=True).remove)
        stack.enter_context(attach({site: handle(site) for site in sites}, model))
        yield


def run(model: nn.Module, ids: Tensor) -> None:
    """A forward pass over ids (B,T), without the projection onto the vocabulary where it can be left out."""
    if isinstance(model, GPT):
        model(ids, last_only=True)
        return
    body: Any = getattr(model, "base_model", model)
    given: dict[str, Any] = {"input_ids": ids}
    if getattr(body.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    if "use_cache" in inspect.signature(body.forward).parameters:
        given["use_cache"] = False
    body(**given)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and afterwards each module in the mode it had."""
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(eq=False)
class _Reader:
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
        given = self._given(args, kwargs)
        if given.get("output_attentions"):
            raise HeadwiseError("output_attentions=True: a watched model keeps no maps; drop it, and read `seen`")
        self.past, cache = _past(given)
        ids = given.get("input_ids", given.get("ids"))
        known = self.ids is not None and self.past <= self.ids.shape[1] and self._same(cache)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            self.ids = None
        elif self.past == 0:
            self.ids = ids.detach()
        elif known and self.ids is not None and self.ids.shape[0] == ids.shape[0]:
            self.ids = torch.cat([self.ids[:, : self.past], ids.detach()], 1)
        else:  # tokens that were not watched, or that have changed places
            self.ids = None
        self.padding = self._real(given.get("attention_mask"))
        self.context_padding = _flat(given.get("encoder_attention_mask"))

    def remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """After a call: the state of its cache."""
        given = self._given(args, kwargs)
        cache = _past(given)[1]
        self.cache = (
            cache if cache is not None else _past({"past_key_values": getattr(output, "past_key_values", None)})[1]
        )

    def _same(self, cache: Any) -> bool:
        return (
            cache is not None and self.cache is not None and all(a is b for a, b in zip(cache, self.cache, strict=True))
        )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}

    def _real(self, mask: Any) -> Tensor | None:
        """Which of the tokens so far are real, (B,L) or None for all; generation may pass whole maps for each layer."""
        if isinstance(mask, Mapping):
            mask = next((one for one in mask.values() if one is not None), None)
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


def _past(given: Mapping[str, Any]) -> tuple[int, tuple[Any, Any] | None]:
    """Tokens that the cache held before a call; and two objects that stay the same while nobody moves its rows."""
    caches = given.get("caches")
    if caches and isinstance(caches[0], KVCache):
        return int(caches[0].length), (caches[0], caches[0].reorders)
    cache = given.get("past_key_values")
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0, None
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) or [None]
    return int(cache.get_seq_length()), (cache, getattr(layers[0], "keys", None))


def _readers(model: nn.Module) -> dict[nn.Module, _Reader]:
    """For each module the reader of the innermost model around it that is given tokens."""
    readers: dict[nn.Module, _Reader] = {}

    def walk(module: nn.Module, reader: _Reader | None) -> None:
        names = list(inspect.signature(module.forward).parameters)
        if {"ids", "input_ids"} & set(names):
            reader = _Reader(module, names)
        if reader is not None:
            readers[module] = reader
        for child in module.children():
            walk(child, reader)

    walk(model, None)
    return readers


def _document(call: Call, b: int, cross: bool, reader: _Reader | None, marker: Marker | None) -> Document:
    """What is known about document b of a call."""
    T, S = call.q.shape[2], call.k.shape[2]
    if cross:
        return _cross_document(call, b, reader)
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


def _cross_document(call: Call, b: int, reader: _Reader | None) -> Document:
    """Queries of one sequence, keys of another: there are no distances."""
    T, S = call.q.shape[2], call.k.shape[2]
    if reader is None:
        return Document(start=None)
    own, context = reader.padding, reader.context_padding
    rows = None if own is None or own.shape[0] <= b else _longer(own[b], reader.past + T)[-T:]
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
    parts = () if call.options.mask is None else call.options.mask.parts()
    for part in parts:
        if isinstance(part, Lengths):
            return torch.arange(call.q.shape[2]) < int(torch.as_tensor(part.lengths)[b])
    return None


class Rows:
    """The numbers of one head row by row, `rows.entropy` or `rows["entropy"]`, (n,) float32 each."""

    def __init__(self, values: dict[str, NDArray[np.float32]]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        name = "offset_1" if name == "previous" else name
        if name not in self._values:
            raise HeadwiseError(f"there is no statistic {name!r} of this head; there are {', '.join(self._values)}")
        return self._values[name]

    def __getattr__(self, name: str) -> NDArray[np.float32]:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except HeadwiseError as error:
            raise AttributeError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


class SeenHead:
    """What one head did: `head.entropy` and so on are means over the rows, `head.rows` has them one by one."""

    def __init__(self, name: str, documents: Sequence[tuple[Measured, int]]) -> None:
        self.name = name
        self._documents = documents  # and the number of this head among those measured
        self.rows = Rows(
            {
                key: np.concatenate([found.rows[key][h].float().cpu().numpy() for found, h in documents])
                for key in documents[0][0].rows
                if all(key in found.rows for found, _ in documents)
            }
        )

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        values = getattr(self.rows, name)
        return float(np.mean(values, dtype=np.float64)) if len(values) else float("nan")

    @property
    def received(self) -> NDArray[np.float32]:
        """What each key received from all queries together, (S,); of the last call's last document."""
        return self._last(lambda found: found.received)

    @property
    def thumbnail(self) -> NDArray[np.float32]:
        """Exact means of the weights over blocks of queries x keys; of the last call's last document."""
        return self._last(lambda found: found.thumbnail)

    @property
    def mean_out(self) -> NDArray[np.float32]:
        """Mean of the head's output over all rows, (E,)."""
        counts = [len(found.places) for found, _ in self._documents]
        means = [found.mean_out[h].float().cpu().numpy() for found, h in self._documents]
        return np.average(means, axis=0, weights=counts if any(counts) else None).astype(np.float32)

    def _last(self, part: Callable[[Measured], Tensor]) -> NDArray[np.float32]:
        found, h = self._documents[-1]
        return part(found)[h].float().cpu().numpy()

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={getattr(self, name):.4g}" for name in ("entropy", "confidence", "first"))
        return f"{self.name}({said}, rows={len(self.rows.entropy)})"


class Seen(Mapping[str, SeenHead]):
    """Every head that ran, by name: `seen["L3.H5"]`."""

    def __init__(self, sites: Sequence[str], heads: Sequence[str]) -> None:
        self._known, self._sites = list(heads), list(sites)
        self._found: dict[str, list[tuple[Measured, int]]] = {}
        self.top: dict[str, dict[int, list[tuple[int, float]]]] = {}  # head -> row -> (key, weight), largest first

    def add(self, site: Site, found: Measured, top: tuple[Tensor, Tensor] | None, rows: Sequence[int]) -> None:
        for h in range(found.received.shape[0]):
            self._found.setdefault(site.head(h), []).append((found, h))
            if top is not None:
                keys, weights = (part[h].tolist() for part in top)
                self.top[site.head(h)] = {
                    row: list(zip(keys[n], weights[n], strict=True)) for n, row in enumerate(rows)
                }

    def __getitem__(self, name: str) -> SeenHead:
        if name in self._found:
            return SeenHead(name, self._found[name])
        if name in self._known:
            raise HeadwiseError(
                f"{name} did not run inside the block; run the model, or the part of it that has {name}"
            )
        raise unknown_head(name, self._known)

    def __iter__(self) -> Iterator[str]:
        if not self._found:
            raise HeadwiseError("no head has run; run the model inside the `with` block")
        return iter([name for name in self._known if name in self._found])

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # this is that method

    def __repr__(self) -> str:
        rows = max((len(documents[0][0].places) for documents in self._found.values()), default=0)
        return f"Seen({len(self)} of {len(self._known)} heads, the first document of {rows} rows)"

    def _repr_html_(self) -> str:
        """A table for notebooks: a head a line, each statistic's mean over the rows."""
        heads = [self[name] for name in self] if self._found else []
        names = list(dict.fromkeys(name for head in heads for name in head.rows))
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in ["head", *names])
        lines = [f"<tr>{cells}</tr>"]
        for head in heads:
            numbers = "".join(f"<td>{getattr(head, n):.3f}</td>" if n in head.rows else "<td></td>" for n in names)
            lines.append(f"<tr><th>{html.escape(head.name)}</th>{numbers}</tr>")
        return f"<table>{''.join(lines)}</table>"


def unknown_head(name: object, known: Sequence[str]) -> HeadwiseError:
    """What to raise for a head that the model does not have."""
    near = difflib.get_close_matches(str(name), known, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(known)}, {known[0]} to {known[-1]}"
    return HeadwiseError(f"no head {name!r}; {hint}")
