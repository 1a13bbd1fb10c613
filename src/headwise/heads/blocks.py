"""The weights of a call, a block of queries at a time, and what a formula of `heads.statistics` reads of a block.

A block is small enough to stay in the processor's cache, and every number is taken from it before the next one is
made: there the passes over a block cost little beside the dot products. Measured on two cores, 12 heads of 64, T=4096:
all statistics take about one and a half times the fused attention call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.heads.documents import Document
from headwise.heads.statistics import IDS, POSITIONS, TOP, W_O, formulas
from headwise.masks import BroadcastGrid, resolve
from headwise.records import Call
from headwise.rungs.tensor import as_tensor
from headwise.spec import Options, resolve_kv_index

BLOCK = 2**19  # weights of a block; of 2^17 to 2^20 the fastest for T=1024 and T=4096
ROWS = 32  # queries of a block at least: below, the matrix product does not pay
THUMBNAIL = 32  # blocks of queries and of keys in a thumbnail
FORBIDDEN = -1e30  # the score of a key that may not be attended; finite, so that 0 * score is 0


class Layout(NamedTuple):
    """Where the blocks of the thumbnail lie among T queries and S keys."""

    row_block: Tensor  # (T,) number of the block, -1 for what is not real
    key_block: Tensor  # (S,)
    n_rows: int
    n_keys: int
    first: int | None  # the key of the first token

    @classmethod
    def of(cls, document: Document, T: int, S: int, device: torch.device) -> Layout:
        row_block, n_rows = _blocks(document.real_rows, T, device)
        key_block, n_keys = _blocks(document.real_keys, S, device)
        first = document.first
        if first == -1:
            first = int((key_block == 0).int().argmax())
        return cls(row_block, key_block, n_rows, n_keys, first)

    def thumbnail(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Means over blocks of queries x keys, and the share of the first key in the first column."""
        inside = torch.nonzero(self.key_block >= 0)[:, 0]
        result = sums.new_zeros(sums.shape[0], self.n_rows, self.n_keys)
        result.index_add_(2, self.key_block[inside], sums[..., inside])
        rows = torch.bincount(self.row_block[self.row_block >= 0], minlength=self.n_rows)
        keys = torch.bincount(self.key_block[inside], minlength=self.n_keys)
        area = rows[:, None] * keys
        if not self.n_keys or self.first is None:
            return result / area.clamp(min=1), sums.new_zeros(sums.shape[:2])
        return result / area, sums[..., self.first] / area[:, 0]


class Pass:
    """One pass over the weights of a document, block by block, for some of its heads."""

    def __init__(
        self,
        call: Call,
        b: int,
        document: Document,
        layout: Layout,
        offsets: Sequence[int] = (),
        w_o: Tensor | None = None,
        top: bool = False,
    ) -> None:
        self.call, self.b, self.document, self.layout = call, b, document, layout
        self.H, self.T = call.q.shape[1:3]
        self.G, self.S = call.k.shape[1:3]
        self.device = call.q.device
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        options: Options = call.options
        self.scale = 1 / math.sqrt(call.q.shape[3]) if options.scale is None else float(options.scale)
        self.sink = None
        if options.sink is not None:  # one of +inf counts as the largest number
            self.sink = as_tensor(options.sink, self.device).to(self.dtype).clamp(max=torch.finfo(self.dtype).max)
        self.index = resolve_kv_index(self.H, self.G, options.kv_index)
        self.masks = () if options.mask is None else options.mask.parts()
        self.w_o = None if w_o is None else w_o.to(self.dtype)
        self.top = top
        self.marks = {name: mark.to(self.device, self.dtype) for name, mark in (document.marks or {}).items()}
        has_ids = document.q_ids is not None and document.k_ids is not None
        known = {POSITIONS: document.start is not None, IDS: has_ids, W_O: w_o is not None, TOP: top}
        self.formulas = formulas([name for name, there in known.items() if there], offsets, self.marks)
        self.j = torch.arange(self.S, device=self.device, dtype=self.dtype)
        self.real = torch.zeros(self.T, dtype=torch.bool, device=self.device)
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.rows = {name: zeros(self.H, self.T) for name in self.formulas}
        self.argmax = torch.zeros(self.H, self.T, dtype=torch.long, device=self.device)
        self.sums = zeros(self.H, layout.n_rows, self.S)

    @cached_property
    def added(self) -> Tensor:
        """(H,T) |W_O,h out|; for all rows at once, since the heads' output is far from the cache."""
        assert self.w_o is not None
        out = self.call.out[self.b].to(self.dtype)
        norms: Tensor = torch.linalg.vector_norm(out @ self.w_o.mT, dim=-1)
        return norms

    def run(self, inference: bool) -> None:
        """All blocks. A thread begins with torch's default modes, so those that matter are set here."""
        heads = _whole_groups(max(1, min(self.H, BLOCK // max(1, self.S * ROWS))), self.index)
        rows = max(ROWS, BLOCK // max(1, self.S * heads))
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for start in range(0, self.T, rows):
                self._block(slice(start, min(start + rows, self.T)), heads)

    def weights(self, rows: slice) -> tuple[slice, Tensor]:
        """The keys that some queries may see, and their weights (H,t,s)."""
        keys, allowed, bias = self._mask(rows)
        scores = self._scores(slice(0, self.H), rows, keys, bias, allowed)
        sink = None if self.sink is None else self.sink[:, None, None].expand(*scores.shape[:2], 1)
        logits = scores if sink is None else torch.cat([scores, sink], -1)
        return keys, logits.softmax(-1)[..., : scores.shape[2]].masked_fill(scores <= FORBIDDEN / 2, 0)

    def _mask(self, rows: slice) -> tuple[slice, Tensor | None, Tensor | None]:
        """The keys that a block of queries may see, and over them what is allowed and what is added, (H|1, t, s)."""
        keys = self._keys(rows)
        grid = BroadcastGrid(
            (self.call.q.shape[0], self.H, self.T, self.S),
            array=lambda values: as_tensor(values, self.device),
            arange=lambda n: torch.arange(n, device=self.device),
            keys=keys,
            queries=rows,
            documents=slice(self.b, self.b + 1),
        )
        allowed, bias = (
            x if x is None else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))[0]
            for x in resolve(self.masks, grid, torch.where, lambda x: x.to(self.dtype))
        )
        return keys, allowed, None if bias is None else bias.to(self.dtype)

    def _block(self, rows: slice, n_heads: int) -> None:
        """All heads of a block of queries, n at a time."""
        wanted = self.document.real_rows
        real = None if wanted is None else wanted[rows].to(self.device)
        if real is not None and not real.any():
            return
        keys, allowed, bias = self._mask(rows)
        copies = self._copies(rows, keys)
        for start in range(0, self.H, n_heads):
            heads = slice(start, min(start + n_heads, self.H))
            scores = self._scores(heads, rows, keys, _of(bias, heads), _of(allowed, heads))
            block = Block(self, scores, heads, rows, keys, real, copies)
            self.real[rows] |= block.seen.any(0)
            if self.top:
                self.argmax[heads, rows] = block.argmax + keys.start
            for name, formula in self.formulas.items():
                self.rows[name][heads, rows] = formula(block)
            self._columns(block.e, block.share, heads, rows, keys)

    def _keys(self, rows: slice) -> slice:
        """The keys that windows and causal bounds leave to a block of queries."""
        low, high = 0, self.S
        for mask in self.masks:
            first, last = mask.band(self.T, self.S) or (None, None)
            low = low if first is None else max(low, rows.start + first)
            high = high if last is None else min(high, rows.stop + last)
        return slice(low, high) if low < high else slice(0, 1)

    def _scores(self, heads: slice, rows: slice, keys: slice, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
        """What the softmax reads, (h,t,s) for a block; FORBIDDEN where a query may not look."""
        q = self.call.q[self.b, heads, rows].to(self.dtype) * self.scale
        if self.document.real_rows is not None:  # what stands in padding, NaN too, must not reach a sum
            q = torch.where(self.document.real_rows[rows, None].to(self.device), q, 0)
        h, t, D = q.shape
        read = self.index[heads]
        groups = sorted(set(read))
        if list(read) != [g for g in groups for _ in range(h // len(groups))]:
            groups = list(read)  # no equal, adjacent groups: each head brings its own keys
        whole = slice(groups[0], groups[-1] + 1)
        picked: slice | list[int] = whole if groups == list(range(whole.start, whole.stop)) else groups
        k = self.call.k[self.b][picked, keys].to(self.dtype)
        scores = torch.bmm(q.reshape(len(groups), -1, D), k.mT).reshape(h, t, -1)  # a group reads its keys once
        if self.call.options.softcap is not None:
            cap = self.call.options.softcap
            scores = scores.div_(cap).tanh_().mul_(cap)
        if bias is not None:
            scores = scores.add_(bias)
        return scores if allowed is None else scores.masked_fill_(~allowed, FORBIDDEN)

    def _copies(self, rows: slice, keys: slice) -> tuple[Tensor, ...]:
        """For a block, 1 at earlier keys with the query's token, and 1 at the keys right after those; where known."""
        document = self.document
        if document.k_ids is None or document.q_ids is None or document.start is None:
            return ()
        k_ids, q_ids = document.k_ids.to(self.device), document.q_ids.to(self.device)
        at = torch.arange(rows.start, rows.stop, device=self.device)[:, None] + document.start
        j = torch.arange(keys.start, keys.stop, device=self.device)
        tokens = q_ids[rows, None]
        same = (tokens == k_ids[keys]) & (j < at)
        before = k_ids.roll(1)
        before[0] = document.before
        after = (tokens == before[keys]) & (j <= at)
        return same.to(self.dtype), after.to(self.dtype)

    def _columns(self, e: Tensor, share: Tensor, heads: slice, rows: slice, keys: slice) -> None:
        """What each key receives from each block of the thumbnail's queries."""
        blocks = self.layout.row_block[rows]
        inside = blocks[blocks >= 0]
        if len(inside):
            first, last = int(inside.min()), int(inside.max()) + 1
            member = blocks == torch.arange(first, last, device=self.device)[:, None]
            self.sums[heads, first:last, keys] += torch.bmm(member * share[:, None], e)


class Block:
    """The weights of h heads for t queries over s neighbouring keys: p = e * share, log p = shifted - log_sum."""

    def __init__(
        self,
        work: Pass,
        scores: Tensor,
        heads: slice,
        rows: slice,
        keys: slice,
        real: Tensor | None,
        copies: tuple[Tensor, ...],
    ) -> None:
        """`scores` (h,t,s) are overwritten; `real` (t,) is False for padding."""
        self._work, self._heads, self._rows, self._keys = work, heads, rows, keys
        self.copies: tuple[Tensor, ...] = copies  # as `_copies` gives them
        top = scores.amax(-1)
        self.seen: Tensor = top > FORBIDDEN / 2  # (h,t) may the query attend anything?
        if real is not None:
            self.seen = self.seen & real
        self._room, self._overwritten = scores.sub_(top[..., None]), False
        self.e = scores.exp()
        total = self.e.sum(-1)
        self.log_sum: Tensor
        if work.sink is None:
            share, self.log_sum = 1 / total, total.log()
        else:  # one more term of the denominator, which may tower over all keys
            sink = work.sink[heads, None]
            highest = torch.maximum(top, sink)
            lowered = (top - highest).exp()
            with_sink = total * lowered + (sink - highest).exp()
            share, self.log_sum = lowered / with_sink, with_sink.log() + highest - top
        self.share = torch.where(self.seen, share, 0)
        self.largest: Tensor = self.share  # (h,t) the largest weight of each row: there e is 1
        self.mass: Tensor = total * self.share  # (h,t) of all keys together
        self.j = work.j[keys] - keys.start  # (s,) keys as numbers; small ones keep their digits

    @cached_property
    def argmax(self) -> Tensor:
        """(h,t) the key with the largest weight, counted from the first of the block. It takes as long as a product."""
        return self.e.max(-1).indices

    @property
    def shifted(self) -> Tensor:
        """(h,t,s) each score less the largest of its row. A third array of this size would not stay in the cache."""
        if self._overwritten:
            torch.log(self.e, out=self._room).clamp_(min=FORBIDDEN)
        return self._room

    def total(self, x: Tensor) -> Tensor:
        """Sum of p x over the keys, (h,t); x is (s,), (t,s) or (h,t,s)."""
        return self._sum(x) * self.share

    def mean(self, x: Tensor) -> Tensor:
        """Mean of x, weighted with p."""
        return self._sum(x) * torch.where(self.mass > 0, self.share / self.mass, 0)

    def _sum(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return self.e @ x
        self._overwritten = True
        return torch.mul(self.e, x, out=self._room).sum(-1)

    @property
    def at(self) -> Tensor:
        """(t,) the keys at which the queries stand."""
        start, first = self._work.document.start or 0, self._keys.start
        shift = start - first
        return torch.arange(self._rows.start + shift, self._rows.stop + shift, device=self.e.device)

    @cached_property
    def centre(self) -> Tensor:
        """(h,t) the mean key."""
        return self.mean(self.j)

    @property
    def from_centre(self) -> Tensor:
        """(h,t,s) how far each key lies behind the mean key; room that is used again, for the formula to overwrite."""
        self._overwritten = True
        return torch.sub(self.j, self.centre[..., None], out=self._room)

    def back(self, k: int) -> Tensor:
        """(h,t) the weight of the key k before the query."""
        h, t, s = self.e.shape
        offset = self._rows.start + (self._work.document.start or 0) - k - self._keys.start
        result = self.e.new_zeros(h, t)
        if -t < offset < s:
            diagonal = self.e.diagonal(offset, 1, 2)
            first = max(0, -offset)
            result[:, first : first + diagonal.shape[1]] = diagonal
        return result * self.share

    @property
    def first(self) -> Tensor:
        """(h,t) the weight of the first token."""
        key = self._work.layout.first
        if key is None or not self._keys.start <= key < self._keys.stop:
            return torch.zeros_like(self.share)
        return self.e[..., key - self._keys.start] * self.share

    def marked(self, name: str) -> Tensor:
        """(s,) 1 at the keys of a marked set."""
        return self._work.marks[name][self._keys]

    def on(self, name: str) -> Tensor:
        """(h,t) the weight of a marked set."""
        return self.total(self.marked(name))

    @property
    def added(self) -> Tensor:
        """(h,t) length of what the head adds to the residual stream."""
        return self._work.added[self._heads, self._rows]


def split_heads(call: Call, count: int) -> list[tuple[slice, Call]]:
    """The call as up to `count` calls of some of its heads each, in order, and which heads those are."""
    H, G = call.q.shape[1], call.k.shape[1]
    index = resolve_kv_index(H, G, call.options.kv_index)
    edges = sorted({_whole_groups(round(H * n / count), index) for n in range(count)} | {H})
    parts = []
    for first, last in itertools.pairwise(edges):
        groups = sorted(set(index[first:last]))
        low, high = groups[0], groups[-1] + 1
        options = call.options._replace(
            mask=None if call.options.mask is None else call.options.mask.for_heads(range(first, last), H),
            sink=None if call.options.sink is None else as_tensor(call.options.sink, call.q.device)[first:last],
            kv_index=tuple(g - low for g in index[first:last]),
        )
        heads, read = slice(first, last), slice(low, high)
        q, k, v, out = call.q[:, heads], call.k[:, read], call.v[:, read], call.out[:, heads]
        parts.append((heads, call._replace(q=q, k=k, v=v, options=options, out=out)))
    return parts


def _blocks(real: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, int]:
    """For each of `length` positions the number of its even block, -1 for what is not real; and the count of blocks."""
    places = torch.arange(length, device=device)
    places = places if real is None else places[real.to(device)]
    count = min(THUMBNAIL, len(places))
    result = torch.full((length,), -1, device=device)
    if count:
        result[places] = torch.arange(len(places), device=device) * count // len(places)
    return result, count


def _whole_groups(heads: int, index: Sequence[int]) -> int:
    """At most that many heads, in whole groups of heads that read the same keys where such a group fits."""
    size = next((n for n, g in enumerate(index) if g != index[0]), len(index))
    return heads // size * size if heads >= size else heads


def _of(x: Tensor | None, heads: slice) -> Tensor | None:
    """Some heads of (H|1, t, s)."""
    return x if x is None or x.shape[0] == 1 else x[heads]
