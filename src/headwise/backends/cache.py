"""The key/value cache: what earlier tokens said, kept so that it need not be computed again."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.spec import require_size

Tensors = tuple[Tensor, ...]  # keys, then values; none before the first token


class KVCache:
    """Keys (B,G,S,D) and values (B,G,S,E) of the tokens seen so far, for one layer and one batch.

    Without arguments it grows with the text, by doubling: an append costs O(1) per token on average.

    A cache changes speed, never the answer: `layer(x, cache=cache)` on the next tokens equals the last rows of `layer`
    on all of them. In cross attention it holds the context's keys and values, which are computed once.
    Of a MultiHeadLatentAttention it holds latents and rotary keys (B,1,S,latent_dim + rope_dim); values are 0 wide.
    While gradients are recorded, keys and values are joined anew at each append, so that gradients flow through the
    cache; generate under `torch.no_grad()`.

    It can be copied, pickled and kept in a file: `state_dict()` is all of it, as tensors, for `load_state_dict` of a
    new cache. The copy serves the layer that it is passed to first.

    Args:
        max_length: room for so many tokens, taken once; one more is an error
        window: keep only the latest `window` tokens: enough for a layer with a Window of left <= window
    """

    def __init__(
        self, max_length: int | None = None, window: int | None = None
    ) -> None:
        for name, value in (("max_length", max_length), ("window", window)):
            if value is not None:
                require_size(name, value)
        if max_length and window:
            raise HeadwiseError(
                f"max_length={max_length} and window={window}: a cache is static, or rolls; pass one"
            )
        self.max_length = max_length
        self.window = window
        self.length = 0  # tokens seen
        # how often documents changed places, for callers that add up over calls
        self.reorders = 0
        # of keys (B,G,room,D) and of values (B,G,room,E), once there are some
        self._buffers: Tensors = ()
        # the rows that are held: tokens before them are dropped, room is behind
        self._begin = self._end = 0
        # what it will hold once `take` counts the new tokens: buffers, their rows from and to, and how many are new
        self._offered: tuple[Tensors, int, int, int] | None = None
        self._layer: int | None = None  # number of the layer that filled it
        self.holds_context = False  # has it the keys of a cross attention's context?
        # what those keys and values were made of, mostly one tensor
        self._sources: Sequence[Tensor | None] = ()

    def __repr__(self) -> str:
        kinds = {"max_length": self.max_length, "window": self.window}
        kind = "".join(f"{name}={value}, " for name, value in kinds.items() if value)
        return f"KVCache({kind}length={self.length}, bytes={self.nbytes})"

    @property
    def kept(self) -> int:
        """Tokens whose keys and values are held; fewer than `length` once a rolling cache has dropped some."""
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held; the room that waits for more is not counted."""
        return sum(view.numel() * view.element_size() for view in self._views())

    def _views(self) -> Tensors:
        """The keys and the values held; nothing before the first."""
        return tuple(buffer[:, :, self._begin : self._end] for buffer in self._buffers)

    def check_layer(self, layer: int) -> None:
        """A cache serves the layer, known by a number of its own, that first filled it; another one is an error.

        A copy has no number: it serves the layer that it is passed to first.
        """
        if self._layer not in (None, layer):
            raise HeadwiseError(
                "this cache was filled by another layer; use one cache for each layer, such as caches = [hw.KVCache() "
                "for _ in layers], and pass caches[i] to layer i"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """All that it holds, as tensors: for `load_state_dict` of another cache, a file of safetensors, torch.save."""
        keys_and_values = dict(zip(("keys", "values"), self._views(), strict=False))
        state = {name: x.contiguous() for name, x in keys_and_values.items()}
        state["length"] = torch.tensor(self.length)
        state["holds_context"] = torch.tensor(self.holds_context)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> KVCache:
        """Hold what another cache's `state_dict` says, in the place of what was held; returns the cache itself."""
        if not {"length", "holds_context"} <= state.keys():
            raise HeadwiseError(
                f"this is no state of a cache: it has {', '.join(state) or 'nothing'}; pass what state_dict() gave"
            )
        self.__init__(self.max_length, self.window)  # type: ignore[misc]
        if "keys" in state:
            self.check_room(int(state["length"]))
            keys = state["keys"]
            values = state["values"]
            self._move((keys, values), max(keys.shape[2], self.max_length or 0))
        self.length = int(state["length"])
        self.holds_context = bool(state["holds_context"])
        return self

    def __getstate__(self) -> tuple[Any, ...]:
        held = {name: x.detach() for name, x in self.state_dict().items()}
        return self.max_length, self.window, held

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.max_length, self.window, held = state
        self.load_state_dict(held)

    @property
    def batch(self) -> int | None:
        """Documents whose keys are held; None while there are none."""
        return self._buffers[0].shape[0] if self._buffers else None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B,G,T,D) and values (B,G,T,E); returns what the new tokens may look at, themselves at the end."""
        offered = self.offer(k, v)
        self.take()
        return offered

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What `append` would return; the cache counts the new tokens only after `take`.

        Two steps, so that a call that fails in between leaves the cache as it was.
        """
        if self._buffers:
            _check_fit("keys", self._buffers[0], k)
            _check_fit("values", self._buffers[1], v)
        n_new = k.shape[2]
        self.check_room(n_new)
        # before the first token, views of `k` and `v` without rows
        held = self._views() or (k[:, :, :0], v[:, :, :0])
        if torch.is_grad_enabled() or any(view.requires_grad for view in held):
            # Backward may need what it was given, so nothing is written in place.
            keys = torch.cat([held[0], k], 2)
            values = torch.cat([held[1], v], 2)
            self._offered = (keys, values), 0, self.kept + n_new, n_new
            return keys, values
        if not self._buffers or self._end + n_new > self._buffers[0].shape[2]:
            # doubled, so that n appends move O(n) rows in all; of a rolling cache full after `window` more tokens, and
            # only then the kept ones move; of a static one taken once
            most = 2 * (self.window or self.kept)
            self._move(held, self.max_length or max(self.kept + n_new, most))
        end = self._end + n_new
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, self._end : end] = new
        self._offered = self._buffers, self._begin, end, n_new
        keys, values = (buffer[:, :, self._begin : end] for buffer in self._buffers)
        return keys, values

    def _move(self, held: Tensors, room: int) -> None:
        """New buffers of `room` rows, with what is held at their beginning."""
        kept = held[0].shape[2]
        # buffers made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            self._buffers = tuple(
                x.new_empty(*x.shape[:2], room, x.shape[3]) for x in held
            )
        for buffer, view in zip(self._buffers, held, strict=True):
            buffer[:, :, :kept] = view
        self._begin = 0
        self._end = kept

    def check_room(self, n_new: int) -> None:
        """Raise HeadwiseError where a static cache cannot take that many more tokens."""
        total = self.length + n_new
        if self.max_length and total > self.max_length:
            raise HeadwiseError(
                f"the cache has max_length={self.max_length} and holds {self.length}; {n_new} more make {total}; "
                f"pass a larger max_length, or crop it"
            )

    def take(
        self, layer: int | None = None, sources: Sequence[Tensor | None] = (None, None)
    ) -> None:
        """Count what was offered. With `sources` these are of a context, and serve all calls to come.

        Args:
            layer: number of the layer that has filled it, which is then the only one that it serves
            sources: what a layer of cross attention made keys and values of
        """
        if self._layer is None:
            self._layer = layer
        if self.holds_context:
            return  # a context is counted once
        if sources[0] is not None:
            self.holds_context = True
            self._sources = sources
        if self._offered:
            self._buffers, self._begin, self._end, n_new = self._offered
            self._offered = None
            self.length += n_new
            # Old tokens leave only now: each new one may still look back a whole window.
            if self.window:
                self._begin = max(self._begin, self._end - self.window)

    def held(self, sources: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """The context's keys and values. The sources are None, or must be the tensors they came from."""
        same = [ours is x for ours, x in zip(self._sources, sources, strict=False)]
        if sources[0] is not None and same != [True, True]:
            name = "values" if same == [True, False] else "keys"
            raise HeadwiseError(
                f"the cache holds the {name} of another context tensor; use a new KVCache for this one"
            )
        k, v = self._views()
        return k, v

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, as speculative decoding does with a rejected draft."""
        try:
            length = operator.index(length)
        except TypeError:
            raise HeadwiseError(
                f"crop({length!r}): all documents of a cache have one length; pass one whole number"
            ) from None
        if not 0 <= length <= self.length:
            raise HeadwiseError(
                f"cannot crop to {length} tokens; the cache has seen {self.length}"
            )
        if self.holds_context and length < self.length:
            raise HeadwiseError(
                "a cache of a context stays whole, and cannot be cropped; crop those of self attention"
            )
        if self.kept < self.length and length < self.length:
            raise HeadwiseError(
                f"cannot crop to {length} of {self.length} tokens: the cache rolls and keeps {self.kept}, "
                f"and what the earlier ones looked at is gone; crop before the window is full, or use a growing cache"
            )
        self._end -= self.length - length
        self.length = length

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Row b becomes what row index[b] was, as beam search does; `index` (B',) may repeat and leave out rows."""
        index = torch.as_tensor(index)
        self.reorders += 1
        if self._buffers:
            room = self._buffers[0].shape[2]
            rows = (view[index.to(view.device)] for view in self._views())
            self._move(tuple(rows), room)


def _check_fit(name: str, *pair: Tensor) -> None:
    ours, theirs = ((*x.shape[:2], x.shape[3], x.dtype, x.device) for x in pair)
    if ours != theirs:
        raise HeadwiseError(
            f"the cache holds {name} of (batch, heads, width, dtype, device) = {ours}, and these are {theirs}; "
            f"use one cache for each layer and batch"
        )
