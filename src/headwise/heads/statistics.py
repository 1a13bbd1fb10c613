"""What each head of one call does, exactly, in memory that does not grow with T x S.

The weights are computed a block of queries at a time, small enough to stay in the processor's cache, and every number
is taken from a block before the next one is made: there the passes over a block cost little beside the dot products.
Measured on two cores, 12 heads of 64, T=4096: all of this takes about one and a half times the fused attention call.

With p_ij the weight that query i gives key j, and sums over the keys j:

    entropy     -sum p log p, in nats                          Clark et al. 2019 (arXiv 1906.04341), section 3
    confidence  max p                                          Voita et al. 2019 (arXiv 1905.09418), section 4
    distance    sum p (i - j) / sum p, in positions            spread: the root of the variance around it
    mass        sum of p over a set of keys: itself, the first key, the key k before, the next one, earlier copies of
                the token, what came after those copies (induction), keys marked by the caller
    norm        length of what the head adds to the residual stream, |W_O,h out|
    received    sum of p over the queries, for each key
    thumbnail   mean of p over blocks of queries x keys

A sink takes its share of the softmax and is no key: the p of a row then sum to less than 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.masks import BroadcastGrid, resolve
from headwise.records import Call
from headwise.rungs.tensor import as_tensor
from headwise.spec import Options, resolve_kv_index

BLOCK = 2**19  # weights of a block; of 2^17 to 2^20 the fastest for T=1024 and T=4096
ROWS = 32  # queries of a block at least: below, the matrix product does not pay
THUMBNAIL = 32  # blocks of queries and of keys in a thumbnail
FORBIDDEN = -1e30  # the score of a key that may not be attended; finite, so that 0 * score is 0


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


class Measured(NamedTuple):
    """The statistics of one call on one document; n rows that are real and in which some head may attend something.

    A head that may attend nothing in such a row has zeros there, as its weights are.
    """

    rows: dict[str, Tensor]  # name -> (H,n) float32
    places: Tensor  # (n,) the numbers of those rows among the T queries
    argmax: Tensor  # (H,n) the key with the largest weight
    received: Tensor  # (H,S)
    thumbnail: Tensor  # (H,b,b), b = THUMBNAIL, or fewer where there are fewer rows or keys
    first_key: Tensor  # (H,b) the part of the thumbnail's first column that the first key alone accounts for
    mean_out: Tensor  # (H,E) mean of the head's output over those rows


def measure(
    call: Call, b: int, document: Document, offsets: Sequence[int] = (1,), w_o: Tensor | None = None
) -> Measured:
    """All statistics of document `b` of a call.

    offsets  distances k >= 0 whose mass is wanted, "offset_1" and so on; 0 is the token itself
    w_o      R factors of each head's block of W_O, (H,E,E), from `output_factors`; without it there is no "norm"
    """
    H, T = call.q.shape[1:3]
    S = call.k.shape[2]
    device = call.q.device
    threads = torch.get_num_threads() if device.type == "cpu" and H * T * S >= BLOCK else 1
    layout = _Layout.of(document, T, S, device)
    passes = [_Pass(part, b, document, layout, tuple(offsets)) for part in _split_heads(call, threads)]
    _run_all(passes)
    places = torch.nonzero(torch.stack([one.real for one in passes]).any(0))[:, 0]
    sums = torch.cat([one.sums for one in passes])
    rows = {name: torch.cat([one.rows[name][:, places] for one in passes]) for name in passes[0].rows}
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        out_hte = call.out[b].to(passes[0].dtype)[:, places]
        if w_o is not None:
            rows["norm"] = torch.linalg.vector_norm(out_hte @ w_o.to(out_hte.dtype).mT, dim=-1)
        thumbnail, first_key = layout.thumbnail(sums)
        return Measured(
            rows=rows,
            places=places,
            argmax=torch.cat([one.argmax[:, places] for one in passes]),
            received=sums.sum(1),
            thumbnail=thumbnail,
            first_key=first_key,
            mean_out=out_hte.mean(1) if len(places) else out_hte.new_zeros(H, out_hte.shape[2]),
        )


@torch.no_grad()
def top_keys(call: Call, b: int, rows: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k keys with the largest weights of chosen queries, largest first: keys and weights, (H,n,k) each.

    Where a query may attend fewer than k keys, the rest have weight 0.
    """
    found_keys, found_weights = [], []
    for keys, weights in _weights_of(call, b, rows):
        values, places = weights.topk(min(k, weights.shape[2]), dim=-1)
        gap = min(k, call.k.shape[2]) - places.shape[2]
        found_keys.append(F.pad(places + keys.start, (0, gap)))
        found_weights.append(F.pad(values, (0, gap)))
    return torch.cat(found_keys, 1), torch.cat(found_weights, 1)


@torch.no_grad()
def row_weights(call: Call, b: int, rows: Sequence[int]) -> Tensor:
    """The weights of chosen queries over all keys, (H,n,S): for a few rows of a long text."""
    S = call.k.shape[2]
    return torch.cat([F.pad(w, (keys.start, S - keys.start - w.shape[2])) for keys, w in _weights_of(call, b, rows)], 1)


def _weights_of(call: Call, b: int, rows: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Neighbouring rows together: the keys that they may see and the weights (H,t,s)."""
    nothing = Document()
    one = _Pass(call, b, nothing, _Layout.of(nothing, call.q.shape[2], call.k.shape[2], call.q.device), ())
    with torch.autocast(call.q.device.type, enabled=False):
        yield from map(one.weights, _runs(rows))


def _runs(rows: Sequence[int], longest: int = ROWS) -> Iterator[slice]:
    """Rows as slices, neighbours together."""
    start = previous = None
    for row in [*rows, None]:
        if start is not None and previous is not None and (row != previous + 1 or row - start >= longest):
            yield slice(start, previous + 1)
            start = None
        start = row if start is None else start
        previous = row


def output_factors(w_o: Tensor, n_heads: int) -> Tensor:
    """For each head the R (E,E) of a QR factorisation of its block of W_O: |R out| is |W_O,h out|. w_o is (C, H*E)."""
    C, width = w_o.shape
    blocks_hce = w_o.detach().to(torch.promote_types(w_o.dtype, torch.float32))
    blocks_hce = blocks_hce.reshape(C, n_heads, width // n_heads).transpose(0, 1)
    factors: Tensor = torch.linalg.qr(blocks_hce, mode="r").R
    return factors


class _Layout(NamedTuple):
    """Where the blocks of the thumbnail lie among T queries and S keys."""

    row_block: Tensor  # (T,) number of the block, -1 for what is not real
    key_block: Tensor  # (S,)
    n_rows: int
    n_keys: int
    first: int | None  # the key of the first token

    @classmethod
    def of(cls, document: Document, T: int, S: int, device: torch.device) -> _Layout:
        def places(real: Tensor | None, length: int) -> Tensor:
            at = torch.arange(length, device=device)
            return at if real is None else at[real.to(device)]

        rows, keys = places(document.real_rows, T), places(document.real_keys, S)
        n_rows, n_keys = min(THUMBNAIL, len(rows)), min(THUMBNAIL, len(keys))
        first = document.first
        if first == -1:
            first = int(keys[0]) if n_keys else 0
        return cls(_blocks(rows, n_rows, T), _blocks(keys, n_keys, S), n_rows, n_keys, first)

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


class _Pass:
    """One pass over the weights of a document, block by block, for some of its heads."""

    def __init__(self, call: Call, b: int, document: Document, layout: _Layout, offsets: tuple[int, ...]) -> None:
        self.call, self.b, self.document, self.layout, self.offsets = call, b, document, layout, offsets
        self.H, self.T = call.q.shape[1:3]
        self.G, self.S = call.k.shape[1:3]
        self.device = call.q.device
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        options: Options = call.options
        self.scale = 1 / math.sqrt(call.q.shape[3]) if options.scale is None else float(options.scale)
        self.sink = None if options.sink is None else as_tensor(options.sink, self.device).to(self.dtype)
        self.index = resolve_kv_index(self.H, self.G, options.kv_index)
        self.masks = () if options.mask is None else options.mask.parts()
        self.j = torch.arange(self.S, device=self.device, dtype=self.dtype)
        self.real = torch.zeros(self.T, dtype=torch.bool, device=self.device)
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        self.rows = {name: zeros(self.H, self.T) for name in self._names()}
        self.argmax = torch.zeros(self.H, self.T, dtype=torch.long, device=self.device)
        self.sums = zeros(self.H, layout.n_rows, self.S)

    def _names(self) -> list[str]:
        document = self.document
        names = ["entropy", "confidence", "first"]
        if document.start is not None:
            names += ["distance", "spread", "self", "next", *(f"offset_{k}" for k in self.offsets)]
        if document.k_ids is not None and document.q_ids is not None and document.start is not None:
            names += ["same_token", "induction"]
        return names + list(document.marks or {})

    def run(self, inference: bool) -> None:
        """All blocks. A thread begins with torch's default modes, so those that matter are set here."""
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for rows in self._row_blocks():
                self._block(rows)

    def _row_blocks(self) -> Iterator[slice]:
        heads = max(1, min(self.H, BLOCK // max(1, self.S * ROWS)))
        self.heads = _whole_groups(heads, self.index)
        rows = max(ROWS, BLOCK // max(1, self.S * self.heads))
        for start in range(0, self.T, rows):
            yield slice(start, min(start + rows, self.T))

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
        allowed, bias = resolve(self.masks, self._grid(rows, keys), torch.where, torch.finfo(self.dtype).min)
        allowed = None if allowed is None else _four(allowed)[0]
        return keys, allowed, None if bias is None else _four(bias)[0].to(self.dtype)

    def _block(self, rows: slice) -> None:
        """All heads of a block of queries."""
        wanted = self.document.real_rows
        real = None if wanted is None else wanted[rows].to(self.device)
        if real is not None and not real.any():
            return
        keys, allowed, bias = self._mask(rows)
        copies = self._copies(rows, keys)
        for start in range(0, self.H, self.heads):
            heads = slice(start, min(start + self.heads, self.H))
            scores = self._scores(heads, rows, keys, _of(bias, heads), _of(allowed, heads))
            self._take(scores, heads, rows, keys, real, copies)

    def _keys(self, rows: slice) -> slice:
        """The keys that windows and causal bounds leave to a block of queries."""
        low, high = 0, self.S
        for mask in self.masks:
            first, last = mask.band(self.T, self.S) or (None, None)
            if first is not None:
                low = max(low, rows.start + first)
            if last is not None:
                high = min(high, rows.stop + last)
        return slice(low, high) if low < high else slice(0, 1)

    def _grid(self, rows: slice, keys: slice) -> BroadcastGrid:
        return BroadcastGrid(
            (self.call.q.shape[0], self.H, self.T, self.S),
            array=lambda values: as_tensor(values, self.device),
            arange=lambda n: torch.arange(n, device=self.device),
            keys=keys,
            queries=rows,
            documents=slice(self.b, self.b + 1),
        )

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

    def _take(
        self,
        scores: Tensor,
        heads: slice,
        rows: slice,
        keys: slice,
        real: Tensor | None,
        copies: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Every number that a block of scores (h,t,s) gives."""
        top, where = scores.max(-1)
        seen = top > FORBIDDEN / 2
        if real is not None:
            seen = seen & real
        self.real[rows] |= seen.any(0)
        self.argmax[heads, rows] = where + keys.start
        shifted = scores.sub_(top[..., None])
        e = shifted.exp()
        # p = e * share, and log p = shifted - height
        if self.sink is None:
            total = e.sum(-1)
            share, height = 1 / total, total.log()
        else:  # one more term of the denominator, which may tower over all keys
            highest = torch.maximum(top, self.sink[heads, None])
            lowered = (top - highest).exp()
            total = e.sum(-1) * lowered + (self.sink[heads, None] - highest).exp()
            share, height = lowered / total, total.log() + highest - top
        share = torch.where(seen, share, 0)
        mass = e.sum(-1) * share

        def put(name: str, values: Tensor) -> None:
            self.rows[name][heads, rows] = values

        put("entropy", mass * height - shifted.mul_(e).sum(-1) * share)
        put("confidence", share)
        first = self.layout.first
        if first is not None and keys.start <= first < keys.stop:
            put("first", e[..., first - keys.start] * share)
        if self.document.start is not None:
            self._distances(e, shifted, share, mass, rows, keys, put)
        if copies is not None:
            put("same_token", torch.mul(e, copies[0], out=shifted).sum(-1) * share)
            put("induction", torch.mul(e, copies[1], out=shifted).sum(-1) * share)
        for name, mark in (self.document.marks or {}).items():
            put(name, e @ mark[keys].to(self.device, self.dtype) * share)
        self._columns(e, share, heads, rows, keys)

    def _distances(
        self,
        e: Tensor,
        room: Tensor,
        share: Tensor,
        mass: Tensor,
        rows: slice,
        keys: slice,
        put: Callable[[str, Tensor], None],
    ) -> None:
        """Distance, its spread and the masses at fixed offsets; `room` is overwritten."""
        assert self.document.start is not None
        at = torch.arange(rows.start, rows.stop, device=self.device) + self.document.start
        # Positions count from the first key of the block: small numbers keep their digits.
        j = self.j[keys] - keys.start
        weight = torch.where(mass > 0, share / mass, 0)
        centre = e @ j * weight
        put("distance", torch.where(mass > 0, at - keys.start - centre, 0))
        # Around the mean, not as a difference of squares, which would lose the digits of a narrow head far away.
        around = torch.sub(j, centre[..., None], out=room)
        put("spread", (around.square_().mul_(e).sum(-1) * weight).sqrt())
        for name, k in (("self", 0), ("next", -1), *((f"offset_{k}", k) for k in self.offsets)):
            put(name, self._diagonal(e, int(at[0]) - k - keys.start) * share)

    @staticmethod
    def _diagonal(e: Tensor, offset: int) -> Tensor:
        """e[..., r, r + offset], and 0 where there is no such key; (h,t)."""
        h, t, s = e.shape
        result = e.new_zeros(h, t)
        if -t < offset < s:
            found = e.diagonal(offset, 1, 2)
            first = max(0, -offset)
            result[:, first : first + found.shape[1]] = found
        return result

    def _copies(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor] | None:
        """For a block, 1 at earlier keys with the query's token, and 1 at the keys right after those."""
        document = self.document
        if document.k_ids is None or document.q_ids is None or document.start is None:
            return None
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


def _split_heads(call: Call, count: int) -> list[Call]:
    """The call as up to `count` calls of some of its heads each, in order."""
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
        parts.append(
            call._replace(
                q=call.q[:, first:last],
                k=call.k[:, low:high],
                v=call.v[:, low:high],
                options=options,
                out=call.out[:, first:last],
            )
        )
    return parts


def _run_all(passes: Sequence[_Pass]) -> None:
    """Each pass in a thread of its own, on one core: they meet once at the end, not after every small operation."""
    inference = torch.is_inference_mode_enabled()
    if len(passes) == 1:
        passes[0].run(inference)
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(passes), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(partial(_Pass.run, inference=inference), passes))
    finally:
        torch.set_num_threads(threads)


def _blocks(places: Tensor, count: int, length: int) -> Tensor:
    """For each of `length` positions the number of its block among `count` even blocks of `places`; -1 elsewhere."""
    result = torch.full((length,), -1, device=places.device)
    if count:
        result[places] = torch.arange(len(places), device=places.device) * count // len(places)
    return result


def _whole_groups(heads: int, index: Sequence[int]) -> int:
    """At most that many heads, in whole groups of heads that read the same keys where such a group fits."""
    size = next((n for n, g in enumerate(index) if g != index[0]), len(index))
    return heads // size * size if heads >= size else heads


def _four(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))


def _of(x: Tensor | None, heads: slice) -> Tensor | None:
    """Some heads of (H|1, t, s)."""
    return x if x is None or x.shape[0] == 1 else x[heads]


def uniform(call: Call) -> Call:
    """The call of one head that spreads its attention evenly over what the mask allows: the control of every number."""
    B, _, T, _ = call.q.shape
    S = call.k.shape[2]
    mask = call.options.mask
    if mask is not None:
        mask = mask.for_heads([0], call.q.shape[1]).without_bias()
    zeros = call.q.new_zeros
    return call._replace(
        q=zeros(B, 1, T, 1), k=zeros(B, 1, S, 1), v=zeros(B, 1, S, 1), options=Options(mask), out=zeros(B, 1, T, 1)
    )
