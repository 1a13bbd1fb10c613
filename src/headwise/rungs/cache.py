"""The key/value cache: what earlier tokens said, kept so that it need not be computed again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.masks import Causal, Part, Streaming
from headwise.plan import HeadPlan, Keep, Plan, layer_keep
from headwise.rungs.tensor import attend
from headwise.shapes import shape_of
from headwise.spec import Options, check_per_head, resolve_kv_index

# Queries of a prompt at a time on heads that stream, beside the keys that they see: a map of the whole text is never
# made. A round choice: more at a time make a larger map, fewer make more calls.
CHUNK = 1024


class Offer(NamedTuple):
    """What a cache will hold once `take` counts its new tokens: rows `begin` to `end` of its buffers."""

    buffers: tuple[Tensor, ...]  # of keys and of values
    begin: int
    end: int
    n_new: int  # tokens that `take` adds to its length


class KVCache:
    """Keys (B,G,S,D) and values (B,G,S,E) of the tokens seen so far, for one layer and one batch.

    Without arguments it grows with the text, by doubling: an append costs O(1) per token on average.

    A cache changes speed, never the answer: `layer(x, cache=cache)` on the next tokens equals the last rows of `layer`
    on all of them. In cross attention it holds the context's keys and values, which are computed once.
    Of a layer with a latent (MLA) it holds latents and rotary keys (B,1,S,latent_dim + rope_dim); values are 0 wide.
    While gradients are recorded, keys and values are joined anew at each append, so that gradients flow through the
    cache; generate under `torch.no_grad()`.

    Args:
        max_length: room for so many tokens, taken once; one more is an error
        window: roll: keep the latest so many tokens, all that a layer with a Window of left <= window looks at
        plan: hold for each key/value head what the plan says, None: all, or Keep(sinks, window); the layer looks at
            that alone: `hw.Plan`, whose `mask` means the same on a whole text
    """

    _most_rows = sys.maxsize  # the most tokens that it ever holds: no bound but for `_Stream`

    # `KVCache(plan=...)` is one name for two classes, as a caller need not know of the second. Python then runs the
    # `__init__` of the class that this returns.
    def __new__(cls, *_: Any, plan: object = None, **__: Any) -> KVCache:
        if plan is None or cls is not KVCache:
            return super().__new__(cls)
        return super().__new__(PlannedCache)

    def __init__(
        self,
        max_length: int | None = None,
        window: int | None = None,
        *,
        plan: Plan | Sequence[HeadPlan | tuple[int, int]] | None = None,
    ) -> None:
        for name, value in (("max_length", max_length), ("window", window)):
            if value is not None and value < 1:
                raise HeadwiseError(f"{name}={value} must be at least 1")
        kinds = {"max_length": max_length, "window": window, "plan": plan}
        passed = [f"{name}={value}" for name, value in kinds.items() if value is not None]
        if len(passed) > 1:
            raise HeadwiseError(f"{' and '.join(passed)}: a cache is static, rolls, or has a plan; pass one")
        self.plan = None if plan is None else layer_keep(plan)  # what each key/value head keeps
        self.max_length, self.window = max_length, window
        self.length = 0  # tokens seen
        self.reorders = 0  # times that documents changed places: who sums up over calls must know
        self._buffers: tuple[Tensor, ...] = ()  # of keys (B,G,room,D) and of values (B,G,room,E), once there are some
        self._begin = self._end = 0  # the rows that are held: tokens before them are dropped, room is behind
        self._offered: Offer | None = None  # until the next `take`
        self._layer: int | None = None  # number of the layer that filled it
        # The tensor that a cross attention's keys were made of. Weak: to recognise it needs no hold on its memory.
        self._context: weakref.ref[Tensor] | None = None
        self._values: weakref.ref[Tensor] | None = None  # and what the values were made of, mostly the same tensor

    def __repr__(self) -> str:
        kinds = {name: getattr(self, name) for name in ("max_length", "window", "plan")}
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

    def _views(self) -> tuple[Tensor, ...]:
        """The keys and the values held; nothing before the first."""
        is_compiled = torch.compiler.is_compiling()  # code that torch.compile traces cannot ask for the mode
        if not is_compiled and not torch.is_inference_mode_enabled() and any(x.is_inference() for x in self._buffers):
            # Buffers made in inference mode may not be written outside of it: copies may.
            self._buffers = tuple(buffer.clone() for buffer in self._buffers)
        return tuple(buffer[:, :, self._begin : self._end] for buffer in self._buffers)

    def _held(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The keys and the values held; before the first, of as many heads and as wide as these new ones, no rows."""
        return self._views() or (k[:, :, :0], v[:, :, :0])

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
        self.check_room(k.shape[2])
        held, n_new = self._views(), k.shape[2]  # `held` is empty before the first token
        if torch.is_grad_enabled() or any(view.requires_grad for view in held):
            # Backward may need what it was given, so nothing is written in place.
            joined = (torch.cat([held[0], k], 2), torch.cat([held[1], v], 2)) if held else (k, v)
            self._offered = Offer(joined, 0, self.kept + n_new, n_new)
            return joined
        if not held or self._end + n_new > self._buffers[0].shape[2]:
            self._move(self._held(k, v), self._room(self.kept + n_new))
        end = self._end + n_new
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, self._end : end] = new
        self._offered = Offer(self._buffers, self._begin, end, n_new)
        keys, values = (buffer[:, :, self._begin : end] for buffer in self._buffers)
        return keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """What new tokens (B,H,T,D) read of what is held and of themselves; the cache counts them after `take`."""
        return attend(q, *self.offer(k, v), options)

    def _room(self, total: int) -> int:
        """Rows of new buffers that must hold `total` tokens, with room for more."""
        if self.max_length is not None:
            return self.max_length  # taken once
        if self.window is not None:
            return max(total, 2 * self.window)  # full after `window` more tokens, and only then the kept ones move
        return min(self._most_rows, max(total, 2 * self.kept))  # doubled, so that n appends move O(n) rows in all

    def _move(self, held: tuple[Tensor, ...], room: int) -> None:
        """New buffers of `room` rows, with what is held at their beginning."""
        kept = held[0].shape[2]
        self._buffers = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in held)
        for buffer, view in zip(self._buffers, held, strict=True):
            buffer[:, :, :kept] = view
        self._begin, self._end = 0, kept

    def check_room(self, n_new: int) -> None:
        """Raise HeadwiseError where a static cache cannot take that many more tokens."""
        total = self.length + n_new
        if self.max_length is not None and total > self.max_length:
            raise HeadwiseError(
                f"the cache has max_length={self.max_length} and holds {self.length}; {n_new} more make {total}; "
                f"pass a larger max_length, or crop it"
            )

    def take(self, layer: int | None = None, context: Tensor | None = None, values: Tensor | None = None) -> None:
        """Count what was offered. With a `context` these are keys and values made of it, for all calls to come.

        Args:
            layer: number of the layer that has filled it, which is then the only one that it serves
            context: what a layer of cross attention made the keys of
            values: what the values were made of, where that is not the context
        """
        self._layer = self._layer if layer is None else layer
        if self.holds_context:
            return  # a context is counted once
        if context is not None:
            self._context, self._values = weakref.ref(context), weakref.ref(context if values is None else values)
        if self._offered is not None:
            self._buffers, self._begin, self._end, n_new = self._offered
            self._offered = None
            self.length += n_new
            if self.window is not None:  # only now: the new tokens themselves may look back a window each
                self._begin = max(self._begin, self._end - self.window)

    def held(self, context: Tensor | None, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The context's keys and values. Both arguments may be left out, or must be the tensors they came from."""
        if context is not None:
            sources = {
                "keys": (self._context, context),
                "values": (self._values, context if values is None else values),
            }
            for name, (source, tensor) in sources.items():
                if source is None or source() is not tensor:
                    raise HeadwiseError(
                        f"the cache holds the {name} of another context tensor; use a new KVCache for this one"
                    )
        k, v = self._views()
        return k, v

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, as speculative decoding does with a rejected draft."""
        if not 0 <= length <= self.length:
            raise HeadwiseError(f"cannot crop to {length} tokens; the cache has seen {self.length}")
        if self.holds_context and length < self.length:
            raise HeadwiseError("a cache of a context stays whole, and cannot be cropped; crop those of self attention")
        if self.kept < self.length and length < self.length:
            raise HeadwiseError(
                f"cannot crop to {length} of {self.length} tokens: the cache rolls and keeps {self.kept}, "
                f"and what the earlier ones looked at is gone; crop before the window is full, or use a growing cache"
            )
        self._end -= self.length - length
        self.length = length

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was, as beam search does; `index` (B',) may repeat and leave out rows."""
        self.reorders += 1
        self._buffers = tuple(view[index.to(view.device)] for view in self._views())  # copies of what is held alone
        self._begin, self._end = 0, self.kept
        has_gradients = any(buffer.requires_grad for buffer in self._buffers)  # then `offer` joins, and wants no room
        if self._buffers and self.max_length is not None and not has_gradients:
            self._move(self._buffers, self.max_length)  # a static cache has its room from the first token on


def _check_fit(name: str, buffer: Tensor, new: Tensor) -> None:
    ours, theirs = ((x.shape[0], x.shape[1], x.shape[3]) for x in (buffer, new))
    if ours != theirs:
        raise HeadwiseError(
            f"the cache holds {name} of (batch, heads, width) = {ours}, and these are {theirs}; "
            f"use one cache for each layer and batch"
        )
    if (buffer.dtype, buffer.device) != (new.dtype, new.device):
        raise HeadwiseError(
            f"the cache holds {name} in {buffer.dtype} on {buffer.device}, not {new.dtype} on {new.device}"
        )


class PlannedCache(KVCache):
    """What `KVCache(plan=...)` makes. A streaming head sees what it keeps; every head is causal."""

    plan: tuple[HeadPlan, ...]

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        # Each kind: the key/value heads that keep the same, and one cache for them together.
        self._kinds: list[tuple[list[int], KVCache]] = []
        for kept in dict.fromkeys(self.plan):  # each once, in the order of the heads
            heads = [g for g, other in enumerate(self.plan) if other == kept]
            self._kinds.append((heads, KVCache() if kept is None else _Stream(kept)))

    @property
    def kept(self) -> int:
        raise HeadwiseError("the heads of a cache with a plan keep different numbers of tokens; ask plan or nbytes")

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for _, cache in self._kinds)

    @property
    def batch(self) -> int | None:
        return self._kinds[0][1].batch  # as in all kinds

    def offer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise HeadwiseError("a cache with a plan has no keys for all heads to look at; use attend(q, k, v, options)")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        H, G = q.shape[1], k.shape[1]
        if len(self.plan) != G:
            raise HeadwiseError(f"the cache has a plan for {len(self.plan)} key/value heads, and the layer has {G}")
        # Checked here, since `[readers]` below takes no more than it needs of too many numbers, and says nothing.
        for name, values in (("sink", options.sink), ("gate", options.gate)):
            if values is not None:
                check_per_head(name, shape_of(values), H)
        index = resolve_kv_index(H, G, options.kv_index)
        mask = Causal() if options.mask is None else Causal() & options.mask
        outs, order = [], list[int]()  # of query heads, those of one kind after those of another
        for heads, cache in self._kinds:
            readers = [h for h in range(H) if index[h] in heads]  # query heads of this kind
            order += readers
            n_readers = len(readers)
            places = [heads.index(index[h]) for h in readers]  # what each reads, counted among `heads`
            if not readers:  # keys that nobody reads are kept, too: head 0 stands in, and what it gives is dropped
                readers, places = [0], [0]
            sink, gate = (None if x is None else torch.as_tensor(x)[readers] for x in (options.sink, options.gate))
            of_kind = options._replace(mask=mask.for_heads(readers, H), sink=sink, gate=gate, kv_index=places)
            outs.append(cache.attend(q[:, readers], k[:, heads], v[:, heads], of_kind)[:, :n_readers])
        back = [order.index(h) for h in range(H)]  # where head h stands in that order
        return torch.cat(outs, 1)[:, back]

    def take(self, layer: int | None = None, context: Tensor | None = None, values: Tensor | None = None) -> None:
        super().take(layer)  # no context: a plan is for self attention
        for _, cache in self._kinds:
            cache.take()
        self.length = self._kinds[0][1].length  # all kinds have seen the same tokens

    def crop(self, length: int) -> None:
        # The shortest first: it is the first that has dropped rows, and refuses before any other is cropped.
        for _, cache in sorted(self._kinds, key=lambda kind: kind[1]._most_rows):
            cache.crop(length)
        self.length = length

    def reorder(self, index: Tensor) -> None:
        self.reorders += 1
        for _, cache in self._kinds:
            cache.reorder(index)


class _Stream(KVCache):
    """The cache of heads that keep the first `sinks` tokens and the last `window`.

    The first stand in the first rows of its buffers, the last in a ring of rows behind them: a new token takes the row
    of the one that leaves the window. With 1 sink and a window of 3, after tokens 0 to 4: rows 0 4 2 3.
    """

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._sinks, self._window, self._most_rows = keep.sinks, keep.window, keep.sinks + keep.window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        n, T = self.length, q.shape[2]  # tokens before, and new ones
        assert options.mask is not None
        # New query i stands at key n + i, so the band j - i <= n is causality alone; any other part forbids more.
        is_causal = all(part.band(T, n + T) == (None, n) for part in options.mask.parts())
        has_gradients = torch.is_grad_enabled() or any(view.requires_grad for view in self._views())
        if T == 1 and is_causal and not has_gradients:
            # What is held after the step is all that the token may see, so no mask is left to say.
            return attend(q, *self._step(k, v), options._replace(mask=None))
        keys, values = (torch.cat(pair, 2) for pair in zip(self._held(k, v), (k, v), strict=True))
        # Three numbers of one token: its position in the text; its slot, the row of the buffers where it stands between
        # calls (see `_slot`); its row in `keys`, where the held tokens come first, in the order of their slots, then
        # the new ones, in the order of the text.
        row_of = {position: row for row, position in enumerate([*self._by_slot(n), *range(n, n + T)])}
        # The rows of what is held after this call, in the order of the slots that it will have.
        later = [row_of[position] for position in self._by_slot(n + T)]
        self._offered = Offer((keys[:, :, later], values[:, :, later]), 0, len(later), T)
        parts = []
        for start in range(0, max(T, 1), CHUNK):  # once even where there is no query, for the shape of nothing
            stop = min(start + CHUNK, T)
            seen = self._seen(n + start, n + stop)
            # The rows of the mask for these queries; of its columns, one for each token, `Part` takes those seen.
            mask = (options.mask & Streaming(self._sinks, self._window)).for_queries(slice(start, stop), T)
            rows = [row_of[position] for position in seen]
            chunk = q[:, :, start:stop], keys[:, :, rows], values[:, :, rows]
            parts.append(attend(*chunk, options._replace(mask=Part(mask, axis="s", numbers=seen, length=n + T))))
        return torch.cat(parts, 2)

    def _step(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All that one more token sees; it has taken the place of the one that it pushes out.

        It is written before `take`, and a call that fails in between leaves it there. No later query sees the token
        that stood there, so the answers stay the same.
        """
        rows = min(self.length + 1, self._most_rows)  # that are filled after the step
        if not self._buffers or self._buffers[0].shape[2] < rows:
            self._move(self._held(k, v), self._room(rows))
        slot = self._slot(self.length)
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, slot] = new[:, :, 0]
        self._offered = Offer(self._buffers, 0, rows, 1)
        keys, values = (buffer[:, :, :rows] for buffer in self._buffers)
        return keys, values

    def _slot(self, position: int) -> int:
        """The row of the buffers in which the token at a position of the text stands: first sinks, then the ring."""
        return position if position < self._sinks else self._sinks + (position - self._sinks) % self._window

    def _seen(self, first: int, stop: int) -> list[int]:
        """Positions of the tokens that some query from `first` up to, and without, `stop` sees, each once."""
        return [*range(min(self._sinks, stop)), *range(max(self._sinks, first - self._window + 1), stop)]

    def _by_slot(self, length: int) -> list[int]:
        """Positions of the tokens that are held after `length` tokens, in the order of their rows."""
        # They are what the last of these tokens sees.
        return sorted(self._seen(length - 1, length), key=self._slot)
