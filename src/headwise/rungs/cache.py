"""The key/value cache: what earlier tokens said, kept so that it need not be computed again."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from headwise.errors import HeadwiseError


class KVCache:
    """Keys (B,G,S,D) and values (B,G,S,E) of the tokens seen so far, for one layer and one batch.

    KVCache()               grows with the text, by doubling: an append costs O(1) per token on average
    KVCache(max_length=n)   takes its room once, for n tokens; one more is an error
    KVCache(window=w)       rolls: keeps the latest w tokens, all that a layer with a Window of left <= w looks at

    A cache changes speed, never the answer: `layer(x, cache=cache)` on the next tokens equals the last rows of `layer`
    on all of them. In cross attention it holds the context's keys and values, which are computed once.
    While gradients are recorded, keys and values are joined anew at each append, so that gradients flow through the
    cache; generate under `torch.no_grad()`.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None) -> None:
        for name, value in (("max_length", max_length), ("window", window)):
            if value is not None and value < 1:
                raise HeadwiseError(f"{name}={value} must be at least 1")
        if max_length is not None and window is not None:
            raise HeadwiseError(f"max_length={max_length} and window={window}: a cache is static or rolls; pass one")
        self.max_length, self.window = max_length, window
        self.length = 0  # tokens seen
        self.reorders = 0  # times that documents have changed places
        self._stores = _Store(max_length, window), _Store(max_length, window)
        self._layer: int | None = None
        self._context: weakref.ref[Tensor] | None = None  # what the keys of a cross attention were made of
        self._values: weakref.ref[Tensor] | None = None  # and the values; the same tensor, unless told otherwise

    def __repr__(self) -> str:
        kind = (
            f"max_length={self.max_length}, " if self.max_length else f"window={self.window}, " if self.window else ""
        )
        return f"KVCache({kind}length={self.length}, bytes={self.nbytes})"

    @property
    def kept(self) -> int:
        """Tokens whose keys and values are held; fewer than `length` once a rolling cache has dropped some."""
        return self._stores[0].held

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held; the room that waits for more is not counted."""
        return sum(view.numel() * view.element_size() for store in self._stores if (view := store.view()) is not None)

    @property
    def holds_context(self) -> bool:
        """Does it hold the keys of a cross attention's context?"""
        return self._context is not None

    def check_layer(self, layer: int) -> None:
        """A cache serves the layer, known by a number of its own, that first filled it; another one is an error."""
        if self._layer not in (None, layer):
            raise HeadwiseError(
                f"this cache belongs to layer number {self._layer} and was passed to number {layer}; "
                f"use one cache for each layer"
            )

    @property
    def batch(self) -> int | None:
        """Documents whose keys are held; None while there are none."""
        view = self._stores[0].view()
        return None if view is None else view.shape[0]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B,G,T,D) and values (B,G,T,E); returns what the new tokens may look at, themselves at the end."""
        offered = self.offer(k, v)
        self.take()
        return offered

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What `append` would return; the cache counts the new tokens only after `take`."""
        for name, store, new in (("keys", self._stores[0], k), ("values", self._stores[1], v)):
            store.check(name, new)
        self.check_room(k.shape[2])
        return self._stores[0].offer(k), self._stores[1].offer(v)

    def check_room(self, n_new: int) -> None:
        """Raise HeadwiseError where a static cache cannot take that many more tokens."""
        total = self.length + n_new
        if self.max_length is not None and total > self.max_length:
            raise HeadwiseError(
                f"the cache has max_length={self.max_length} and holds {self.length}; {n_new} more make {total}; "
                f"pass a larger max_length, or crop it"
            )

    def take(self, layer: int | None = None, context: Tensor | None = None, values: Tensor | None = None) -> None:
        """Count what was offered; with a `context` it is that one's keys and values, for all calls to come."""
        self._layer = self._layer if layer is None else layer
        if self.holds_context:
            return
        if context is not None:
            self._context, self._values = weakref.ref(context), weakref.ref(context if values is None else values)
        self.length += self._stores[0].take()
        self._stores[1].take()

    def held(self, context: Tensor | None, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The context's keys and values. Both arguments may be left out, or must be the tensors they came from."""
        passed = (None, None) if context is None else (context, context if values is None else values)
        for name, source, tensor in zip(("keys", "values"), (self._context, self._values), passed, strict=True):
            if tensor is not None and (source is None or source() is not tensor):
                raise HeadwiseError(
                    f"the cache holds the {name} of another context tensor; use a new KVCache for this one"
                )
        k, v = (store.view() for store in self._stores)
        assert k is not None and v is not None
        return k, v

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, as speculative decoding does with a rejected draft."""
        if not 0 <= length <= self.length:
            raise HeadwiseError(f"cannot crop to {length} tokens; the cache has seen {self.length}")
        if self.kept < self.length and length < self.length:
            raise HeadwiseError(
                f"cannot crop to {length} of {self.length} tokens: the cache rolls and keeps {self.kept}, "
                f"and what the earlier ones looked at is gone; crop before the window is full, or use a growing cache"
            )
        for store in self._stores:
            store.drop(self.length - length)
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was, as beam search does; `index` (B',) may repeat and leave out rows."""
        self.reorders += 1
        for store in self._stores:
            store.reorder(index)


class _Store:
    """One tensor (B,G,S,width) that grows along S: positions begin to end of a buffer."""

    def __init__(self, max_length: int | None, window: int | None) -> None:
        self.max_length, self.window = max_length, window
        self.buffer: Tensor | None = None
        self.begin = self.end = 0
        self._offered: tuple[Tensor, int, int] | None = None

    @property
    def held(self) -> int:
        return self.end - self.begin

    def view(self) -> Tensor | None:
        return None if self.buffer is None else self.buffer[:, :, self.begin : self.end]

    def offer(self, new: Tensor) -> Tensor:
        """The held and the new; both are kept only after `take`."""
        old = self.view()
        if torch.is_grad_enabled() or (old is not None and old.requires_grad):
            # Backward may need what it was given, so nothing is written in place.
            joined = new if old is None else torch.cat([old, new], 2)
            self._offered = joined, 0, joined.shape[2]
            return joined
        end = self.end + new.shape[2]
        if self.buffer is None or end > self.buffer.shape[2]:
            end = self._make_room(old, new)
        assert self.buffer is not None
        self.buffer[:, :, self.end : end] = new
        self._offered = self.buffer, self.begin, end
        return self.buffer[:, :, self.begin : end]

    def take(self) -> int:
        """Keep what was offered; returns the number of new tokens."""
        if self._offered is None:
            return 0
        held = self.held
        self.buffer, self.begin, self.end = self._offered
        self._offered = None
        n_new = self.held - held
        if self.window is not None:
            self.begin = max(self.begin, self.end - self.window)
        return n_new

    def _make_room(self, old: Tensor | None, new: Tensor) -> int:
        """A buffer with the old at its beginning and place for the new; returns where the new will end."""
        held, total = self.held, self.held + new.shape[2]
        room = self.max_length or max(total, 2 * (self.window or held))
        self.buffer = new.new_empty(*new.shape[:2], room, new.shape[3])
        if old is not None:
            self.buffer[:, :, :held] = old
        self.begin, self.end = 0, held
        return total

    def check(self, name: str, new: Tensor) -> None:
        if self.buffer is None:
            return
        ours, theirs = ((x.shape[0], x.shape[1], x.shape[3]) for x in (self.buffer, new))
        if ours != theirs:
            raise HeadwiseError(
                f"the cache holds {name} of (batch, heads, width) = {ours}, and these are {theirs}; "
                f"use one cache for each layer and batch"
            )
        if (self.buffer.dtype, self.buffer.device) != (new.dtype, new.device):
            raise HeadwiseError(
                f"the cache holds {name} in {self.buffer.dtype} on {self.buffer.device}, "
                f"not {new.dtype} on {new.device}"
            )

    def drop(self, count: int) -> None:
        self.end -= count

    def reorder(self, index: Tensor) -> None:
        view = self.view()
        if view is not None:
            self.buffer = view[index.to(view.device)]
            self.begin, self.end = 0, view.shape[2]
            if self.max_length is not None and not view.requires_grad:
                self._make_room(self.buffer, self.buffer[:, :, :0])
