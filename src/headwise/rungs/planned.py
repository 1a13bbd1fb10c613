"""A cache in which each key/value head keeps what a plan says of it. Heads that keep the same share one fused call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.masks import Causal, Part, Streaming
from headwise.plan import Keep, Kept
from headwise.rungs.cache import KVCache
from headwise.rungs.tensor import attend
from headwise.shapes import shape_of
from headwise.spec import Options, check_per_head, resolve_kv_index

CHUNK = 1024  # queries of a prompt at a time, beside the keys that they see: no map of the whole text is made


class PlannedCache(KVCache):
    """What `KVCache(plan=...)` makes. A streaming head sees what it keeps; every head is causal."""

    plan: tuple[Kept, ...]

    def __init__(self, *sizes: Any, **named: Any) -> None:
        super().__init__(*sizes, **named)
        self._kinds = [
            ([g for g, other in enumerate(self.plan) if other == kept], KVCache() if kept is None else _Stream(kept))
            for kept in dict.fromkeys(self.plan)
        ]

    @property
    def kept(self) -> int:
        raise HeadwiseError("the heads of a cache with a plan keep different numbers of tokens; ask plan or nbytes")

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for _, cache in self._kinds)

    @property
    def batch(self) -> int | None:
        return self._kinds[0][1].batch

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise HeadwiseError("a cache with a plan has no keys for all heads to look at; use attend(q, k, v, options)")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        H, G = q.shape[1], k.shape[1]
        if len(self.plan) != G:
            raise HeadwiseError(f"the cache has a plan for {len(self.plan)} key/value heads, and the layer has {G}")
        if options.gate is not None:
            check_per_head("gate", shape_of(options.gate), H)
        index = resolve_kv_index(H, G, options.kv_index)
        mask = Causal() if options.mask is None else Causal() & options.mask
        parts, order = [], list[int]()
        for heads, cache in self._kinds:
            readers = [h for h in range(H) if index[h] in heads]
            sink, gate = (None if x is None else x[readers] for x in (options.sink, options.gate))  # type: ignore[call-overload]
            places = [heads.index(index[h]) for h in readers]
            part = options._replace(mask=mask.for_heads(readers, H), sink=sink, gate=gate, kv_index=places)
            parts.append(cache.attend(q[:, readers], k[:, heads], v[:, heads], part))
            order += readers
        return torch.cat(parts, 1)[:, sorted(range(H), key=order.__getitem__)]

    def take(self, layer: int | None = None, context: Tensor | None = None, values: Tensor | None = None) -> None:
        super().take(layer)
        for _, cache in self._kinds:
            cache.take()
        self.length = self._kinds[0][1].length

    def crop(self, length: int) -> None:
        for _, cache in sorted(self._kinds, key=lambda kind: kind[1]._most):  # the first to drop rows refuses first
            cache.crop(length)
        self.length = length

    def reorder(self, index: Tensor) -> None:
        self.reorders += 1
        for _, cache in self._kinds:
            cache.reorder(index)


class _Stream(KVCache):
    """What heads of one kind hold: the first rows at their places, and the last ones in a ring behind them."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._sinks, self._last, self._most = keep.sinks, keep.window, keep.sinks + keep.window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        n, T = self.length, q.shape[2]
        assert options.mask is not None
        causal = all(part.band(T, n + T) == (None, n) for part in options.mask.parts())
        grows = torch.is_grad_enabled() or any(view.requires_grad for view in self._views())
        if T == 1 and causal and not grows:
            return attend(q, *self._step(k, v), options._replace(mask=None))
        held = self._views() or (k[:, :, :0], v[:, :, :0])
        keys, values = (torch.cat(pair, 2) for pair in zip(held, (k, v), strict=True))
        row = {p: row for row, p in enumerate([*self._by_slot(n), *range(n, n + T)])}
        later = [row[p] for p in self._by_slot(n + T)]
        self._offered = (keys[:, :, later], values[:, :, later]), 0, len(later), T
        parts = []
        for start in range(0, max(T, 1), CHUNK):
            stop = min(start + CHUNK, T)
            seen = self._seen(n + start, n + stop)
            mask = (options.mask & Streaming(self._sinks, self._last)).for_queries(slice(start, stop), T)
            rows = [row[p] for p in seen]
            chunk = q[:, :, start:stop], keys[:, :, rows], values[:, :, rows]
            parts.append(attend(*chunk, options._replace(mask=Part(mask, "s", seen, n + T))))
        return torch.cat(parts, 2)

    def _step(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All that one more token sees; it has taken the place of the one that it pushes out."""
        rows = min(self.length + 1, self._most)
        if not self._buffers or self._buffers[0].shape[2] < rows:
            self._make_room(self._views(), (k, v))
        slot = self._slot(self.length)
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, slot] = new[:, :, 0]
        self._offered = self._buffers, 0, rows, 1
        keys, values = (buffer[:, :, :rows] for buffer in self._buffers)
        return keys, values

    def _slot(self, position: int) -> int:
        return position if position < self._sinks else self._sinks + (position - self._sinks) % self._last

    def _seen(self, first: int, stop: int) -> list[int]:
        """The tokens that queries at `first` up to `stop` see."""
        return [*range(min(self._sinks, stop)), *range(max(self._sinks, first - self._last + 1), stop)]

    def _by_slot(self, length: int) -> list[int]:
        """The tokens that are held after that many."""
        return sorted(self._seen(length - 1, length), key=self._slot)
