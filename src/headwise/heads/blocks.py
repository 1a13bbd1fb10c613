"""All statistics of one call on one document, exactly, in memory that does not grow with T x S.

The weights are made a block of queries at a time. A block is small enough to stay near the processor, and every number
is taken from it before the next one is made: there the passes over a block cost little beside the dot products.

         keys 0 to S-1                   a block: up to ROWS queries, the keys that one of them may see (causal bounds
        +-------------------------+      and windows cut off the rest), and as many heads as fit into BLOCK weights;
        |                         |      of long rows fewer queries, so that one head fits
      t |  block.keys  |          |      width: its keys in whole runs of RUN, FORBIDDEN where there is no key
        |              |          |
        +-------------------------+      buffers[0]  (h,t,width)  scores, in bits; less the largest of the row; times e
        queries                          buffers[1]  (h,t,width)  e = 2^(score - the largest of the row)

    scores  ->  sums  (names,H,n)  largest: of the row, in bits. With only LARGEST statistics asked for that is all
    e  ->  sums    (names,H,n)   total = sum e; share = 1 / (total and the sink's): the weight is p = e share; with only
                                 OF_ROWS statistics asked for that is all. shifted = sum e (score - largest);
                                 places = sum e (place of the key); squares = sum e (its distance from the mean
                                 place)^2; "on" a marked set; reach, which is no sum: see `_reach`
       ->  chosen  (kinds,H,n)   sum e over a few keys of each query: the first one, those that stand at the OFFSETS,
                                 earlier copies of the query's token, and the keys right after those
       ->  argmax  (H,n)         the key with the largest weight
       ->  totals  (H,b,S)       sum p over each of the b blocks of queries of a thumbnail

When all blocks are done, the formulas of `headwise.heads.statistics` read the sums, which tests/heads/dense.py defines
on whole maps. Where a model makes its weights itself a call has them, and a block begins with e. Beside the
formulas each head has

    received    sum of p over the queries, for each key
    thumbnail   mean of p over blocks of queries x keys
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.backends.torch_ import as_tensor, trace
from headwise.heads.documents import Document, part_of, resolved
from headwise.heads.statistics import formulas
from headwise.masks import Allowed
from headwise.models.sites import Site, loaded
from headwise.records import Call
from headwise.spec import Options, resolve_kv_index

# weights of a block; twice as many where threads of Python wait for each other's lock between two operations
BLOCK = 2**20
# weights of a call; from here on each thread has its own blocks: see `run`
THREADED = 2**27
# queries of a product at most: far fewer, and packing the keys takes longer than multiplying them
ROWS = 256
# neighbouring keys, which are summed up together: see `powers`
RUN = 64
# blocks of queries and of keys in a thumbnail, at most
THUMBNAIL = 32
# keys; from here on the product is faster where each feature's keys lie side by side
LONG = 8192
# scores are in bits: MKL's exp takes 100 times as long below -87, exp2 does not
LOG2E = 1 / math.log(2)
# The score of a key that may not be attended. It is finite, so that 0 * score is 0; and half of the least float32, so
# that it stays finite when the largest score of the row is subtracted.
FORBIDDEN = -(2.0**127)
# the least bias of a key that may be attended: it stays above FORBIDDEN, and counts when alone
LOWEST = -(2.0**126)
# Statistics that need less than all of a block: the largest score of each row, or also the sum of its weights.
LARGEST = frozenset({"score_max", "gate", "norm"})
OF_ROWS = LARGEST | {"lse", "sink", "confidence"}
# those that read scores, which a call that has its weights lacks
SCORED = frozenset({"score_max", "lse", "sink"})
# the distances of the keys that these tell of
OFFSETS = {"next": -1, "self": 0, "previous": 1}
# of the weight lies farther back than the reach of a head
FAR = 0.01
# the reach is taken of each so manieth row, the last one among them: of all it takes a sixth of the time
EVERY = 16


Sums = Mapping[str, Tensor]  # of each row, by the names of a pass


class Block(NamedTuple):
    """A block of t queries and s keys: what its heads share. Keys are counted from the first that a query may see.

    A row is a query that is measured; m sets of keys are marked.
    """

    rows: slice  # which of all rows
    keys: slice  # those that they may see, among S
    # every query may see all keys before this one: there nothing is looked up
    masked_from: int
    # (H,t,s - masked_from) whole numbers as wide as scores, -1 or all bits where a key of those from there on may not
    # be attended, else 0; None: nothing is looked up
    forbidden: Tensor | None
    bias: Tensor | None  # (H,t,s) what the mask adds to scores, in bits
    at: Tensor  # (t,) the keys at which the queries stand
    first: int  # the place of the first key; it may lie outside
    # (n,) the chosen keys, query * width + key, a place in the block of a head; and where each counts, kind * t + query
    pairs: Tensor
    counted: Tensor
    marks: Tensor  # (m,width) 1 where a key is in a marked set
    blocks: slice  # those of the thumbnail in which a query lies, b of them

    @property
    def n_keys(self) -> int:
        return self.keys.stop - self.keys.start


class Pass:
    """One pass over the weights of document b of a call, block by block; n rows are measured.

    The other arguments are those of `measure`.
    """

    def __init__(
        self,
        call: Call,
        b: int,
        document: Document,
        w_o: Tensor | None = None,
        only: Collection[str] = (),
        reach: bool = True,
    ) -> None:
        self.call = call
        self.b = b
        self.document = document
        _, self.H, self.T, width = call.q.shape
        self.S = call.n_keys
        self.device = call.q.device
        # In float32 at least: sums of many weights in half precision would lose their digits.
        numbers = call.q if call.weights is None else call.weights
        self.dtype = torch.promote_types(numbers.dtype, torch.float32)
        # whole numbers of that width, and the bits that FORBIDDEN lacks as one of them
        self.whole = torch.int64 if self.dtype == torch.float64 else torch.int32
        forbidden = torch.tensor(FORBIDDEN, dtype=self.dtype).view(self.whole)
        self.lacking = -1 - int(forbidden)
        # the largest score of a query that may attend nothing; a weight has no score below that of the least number
        self.lowest = FORBIDDEN
        if call.weights is not None:
            self.lowest = 1 + math.log2(torch.finfo(self.dtype).tiny)
        self.w_o = None if w_o is None else w_o.to(self.dtype)
        # of queries without features every score is 0
        scale = call.options.scale
        self.scale = 1 / math.sqrt(max(1, width)) if scale is None else scale
        self._read_options(call.options)
        self._place(document)
        self._ask(only, reach)
        n = len(self.picked)
        # What the blocks fill in.
        self.at = self.zeros(n)
        self.sums = self.zeros(len(self.names), self.H, n)
        self.chosen = self.zeros(len(self.kinds), self.H, n)
        self.argmax = torch.zeros(self.H, n, dtype=torch.long, device=self.device)

    def _read_options(self, options: Options) -> None:
        """What the scores are made of: keys, sink and masks."""
        self.sink = None
        if options.sink is not None:
            # what a sink of +inf becomes: times LOG2E it is still finite
            most = torch.finfo(self.dtype).max / 2
            sink = as_tensor(options.sink, self.device).to(self.dtype)
            self.sink = sink.clamp(max=most) * LOG2E
        self.masks = () if options.mask is None else options.mask.parts()
        # (G,S,D), each head's keys one after another, since every block reads them: a projection leaves the heads of a
        # token side by side. Where heads do not share them evenly, neighbour by neighbour, each head has its own.
        keys = self.call.k[self.b].to(self.dtype)
        index = list(resolve_kv_index(self.H, len(keys), options.kv_index))
        self.group = max(1, self.H // len(keys))  # heads that read the same keys
        if index != [h // self.group for h in range(self.H)]:
            keys = keys[index]
            self.group = 1
        self.keys = keys.mT.contiguous().mT if self.S > LONG else keys.contiguous()

    def _place(self, document: Document) -> None:
        """Where the queries and the keys stand in their text, and what is known of them."""
        # What is not real, padding, is never read: NaN may stand there.
        # (n,) the queries that are measured
        self.picked = _places(document.real_rows, self.T, self.device)
        # (n,) the block of the thumbnail in which each of them is, and (b,n) 1 where it is
        self.row_block = _even_blocks(self.picked)
        blocks = torch.arange(min(THUMBNAIL, len(self.picked)), device=self.device)
        self.member = (self.row_block == blocks[:, None]).to(self.dtype)
        self.real_keys = _places(document.real_keys, self.S, self.device)
        self.first = document.first  # the key of the first token; None where it is gone
        if document.first == -1:  # the first real key
            self.first = int(self.real_keys[0]) if len(self.real_keys) else 0
        self.marks = list(document.marks)
        self.marked = self.zeros(len(self.marks), self.S)  # (m,S)
        for row, mark in zip(self.marked, document.marks.values(), strict=True):
            row.copy_(mark)

    def _ask(self, only: Collection[str], reach: bool) -> None:
        """What is asked for: the formulas, and the names of the sums that they read."""
        document = self.document
        self.formulas = formulas(self.marks, only)
        if self.call.weights is not None:  # there are no scores
            for name in SCORED & self.formulas.keys():
                del self.formulas[name]
        self.is_whole = not only or not self.formulas.keys() <= OF_ROWS
        self.names = ["largest", "total", "share"]
        if only and self.formulas.keys() <= LARGEST:
            self.names = ["largest"]
        elif self.is_whole:
            # Marked sets come first: `_measure` writes them into the first rows, in one product.
            marks = [f"on {name}" for name in self.marks]
            self.names = [*marks, *self.names, "shifted", "places", "squares"]
            if reach and document.start is not None:
                self.names.append("reach")
        # (3,RUN) 1, the distance of a key from the middle of its run, and its square: times e and summed over a run
        # they give its weight and its first two moments.
        steps = torch.arange(RUN, dtype=self.dtype, device=self.device)
        self.powers = torch.stack([(steps - (RUN - 1) / 2) ** k for k in (0, 1, 2)])
        self.kinds = ["first"]
        if document.start is not None:
            self.kinds += OFFSETS
        # (S+1,) the token right before each key, and the last one
        self.before = None
        is_asked = not self.formulas.keys().isdisjoint({"same_token", "after_same"})
        is_text = document.start is not None and document.q_ids is not None
        if is_asked and is_text and document.k_ids is not None:
            k_ids = document.k_ids.to(self.device, torch.int32)
            self.before = F.pad(k_ids, (1, 0), value=document.before)
            self.kinds += ["same", "after"]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def run(self, thread: int, n_threads: int, inference: bool) -> Tensor:
        """Go over the blocks that are this thread's, and return its `totals`; all other sums go into the pass.

        A thread begins with torch's default modes, so those that matter are set here.
        """
        n = len(self.at)
        with (
            torch.inference_mode(inference),
            torch.no_grad(),
            torch.autocast(self.device.type, enabled=False),
        ):
            width = _whole_runs(max(1, self.S))
            most = BLOCK * min(2, n_threads)  # weights of a block
            # The same buffers for every block: they stay in the cache, and no page is asked for anew.
            buffers = self.empty(2, max(most, width))
            # what each key receives, (H,b,S), b as in the thumbnail
            totals = self.zeros(self.H, len(self.member), self.S)
            step = max(1, min(ROWS, most // width))
            for i, start in enumerate(range(0, n, step)):
                # Dealt out there and back, 0 1 2 2 1 0: a causal block is longer than the one before it, and so each
                # thread has as much to do.
                if i % (2 * n_threads) in (thread, 2 * n_threads - 1 - thread):
                    self._block(slice(start, min(start + step, n)), buffers, totals)
        return totals

    def pictures(self, sums: Tensor) -> tuple[Tensor, ...]:
        """`Measured.received` to `first_key`, of the `totals` (H,b,S) of all threads together."""
        key_block = _even_blocks(self.real_keys)
        n_blocks = min(THUMBNAIL, len(key_block))
        inside = sums.new_zeros(self.S, n_blocks)  # 1 where a key is in a block
        inside[self.real_keys, key_block] = 1
        # queries in each block
        rows = torch.bincount(self.row_block, minlength=sums.shape[1])
        shares = sums @ inside / rows[:, None]
        first_key = sums.new_zeros(sums.shape[:2])
        if n_blocks and self.first is not None:
            first_key = sums[..., self.first] / rows
        return sums.sum(1), shares / inside.sum(0), shares, first_key

    def _block(self, rows: slice, buffers: Tensor, totals: Tensor) -> None:
        """All heads of a block of queries, as many at a time as fit."""
        block = self._shared(rows)
        self.at[rows] = block.at
        t = len(block.at)
        width = block.marks.shape[1]
        # (H,t,D), scaled, so that scores are in bits
        q = self.call.q[self.b, :, self.picked[rows]].to(self.dtype)
        q = (q * (self.scale * LOG2E)).contiguous()
        fit = max(1, min(self.H, buffers.shape[1] // (t * width)))
        # whole groups of heads that read the same keys, or parts that divide one
        group = self.group
        n_heads = max(n for n in range(1, fit + 1) if 0 in (n % group, group % n))
        for start in range(0, self.H, n_heads):
            heads = slice(start, min(start + n_heads, self.H))
            h = heads.stop - start
            buffer = buffers[0, : h * t * width].view(h, t, width)
            self._scores(block, heads, q, buffer)
            self._measure(block, heads, buffer, buffers[1], totals)

    def _measure(
        self, block: Block, heads: slice, scores: Tensor, buffer: Tensor, totals: Tensor
    ) -> None:
        """Take every sum of some heads of a block from their scores (h,t,width), which are used up.

        Between two large operations a small one takes as long as a tenth of them, so that what is done to the sums
        waits for all blocks: see `finish`.
        """
        h, t, width = scores.shape
        if block.bias is not None:
            # of all keys: a mask that adds something has no band
            scores[..., : block.n_keys].add_(block.bias[heads])
        if block.forbidden is not None:
            # FORBIDDEN, whatever stands there, NaN too: all bits, less those that it lacks. Torch's masked_fill_ takes
            # four times as long, three times as long as the exponents.
            mask = block.forbidden[heads]
            hidden = scores[..., block.masked_from : block.n_keys].view(mask.dtype)
            hidden.bitwise_or_(mask).add_(mask, alpha=self.lacking)
        e = buffer[: scores.numel()].view(scores.shape)
        sums = self.empty(len(self.names), h * t)
        into = dict(zip(self.names, sums.unbind(), strict=True))
        flat = e.view(-1, width)
        top_run, peak = self._sum(block, heads, scores.view(-1, width), flat, into)
        if self.is_whole:
            torch.mm(block.marks, flat.mT, out=sums[: len(block.marks)])
            chosen = self.zeros(h, len(self.kinds) * t)
            picked = e.view(h, -1).index_select(1, block.pairs)
            chosen.scatter_add_(1, block.counted.expand(h, -1), picked)
            chosen = chosen.view(h, -1, t).transpose(0, 1)
            self.chosen[:, heads, block.rows] = chosen
            place = peak.max(-1).indices  # an argmax takes twice as long
            place += top_run * RUN + block.keys.start
            self.argmax[heads, block.rows] = place.view(h, t)
            if "reach" in into:
                self._reach(block, e, into)
            # what each key receives from each block of the thumbnail's queries; weights are e * share
            member = self.member[block.blocks, block.rows]
            received = member * into["share"].view(h, 1, t)
            of_keys = torch.bmm(received, e[..., : block.n_keys])
            totals[heads, block.blocks, block.keys] += of_keys
        self.sums[:, heads, block.rows] = sums.view(-1, h, t)

    def _sum(
        self,
        block: Block,
        heads: slice,
        scores: Tensor,
        e: Tensor,
        into: Sums,
    ) -> tuple[Tensor, Tensor]:
        """Fill e, (n,width), with 2^(score - the largest), and `into` with its sums, (n,) each; the scores are lost.

        Gives the run in which the largest score of each row stands, (n,), and what e is there, (n,RUN).
        """
        # (n,runs,RUN), a view: it changes with the scores
        runs = scores.view(len(scores), -1, RUN)
        # First of each run, then of the runs: a maximum with its place over all keys takes as long as two products.
        largest, top_run = runs.amax(-1).max(-1)
        into["largest"].copy_(largest)
        if len(self.names) == 1:
            return top_run, largest
        torch.exp2(scores.sub_(largest[:, None]), out=e)
        # (3,n,runs), the weight of each run and its moments: see `powers`. Their few rows come first in the product:
        # with e first it takes three to five times as long.
        powers = torch.mm(self.powers, e.view(-1, RUN).mT).view(-1, *runs.shape[:2])
        total = torch.sum(powers[0], -1, out=into["total"])
        if self.call.weights is not None:
            torch.exp2(largest, out=into["share"])  # its rows need not add up to 1
        elif self.sink is None:
            torch.reciprocal(total, out=into["share"])
        # one more term of the denominator; both are lowered by the larger logit, so that none overflows
        else:
            sink = self.sink[heads].repeat_interleave(len(block.at))
            highest = torch.maximum(largest, sink)
            lowered = (largest - highest).exp2()
            whole = total * lowered + (sink - highest).exp2()
            torch.div(lowered, whole, out=into["share"])
        # A query may see no key at all: then all its scores are the lowest, and each e is 1. It cannot be where there
        # are keys that every query may see.
        if not block.masked_from:
            into["share"].masked_fill_(largest <= self.lowest, 0)
        if not self.is_whole:
            return top_run, largest
        torch.sum(scores.mul_(e), -1, out=into["shifted"])
        # of each row, among all runs
        first_runs = torch.arange(len(top_run), device=self.device) * runs.shape[1]
        peak = e.view(-1, RUN).index_select(0, first_runs + top_run)
        self._moments(powers, top_run, peak, into)
        return top_run, peak

    def _moments(
        self, powers: Tensor, top_run: Tensor, peak: Tensor, into: Sums
    ) -> None:
        """The sums of the place of a key, and of its squared distance from the mean place.

        Around the mean, not as a difference of squares: a narrow head far away would lose its digits. Of a run whose
        middle lies f off the mean: sum e (x + f)^2 = f^2 sum e + 2 f sum e x + sum e x^2. In the run of the peak that
        would be such a difference again, so it is summed key by key.
        """
        weight, moment, second_moment = powers
        steps = torch.arange(weight.shape[1], dtype=self.dtype, device=self.device)
        middle = steps * RUN + (RUN - 1) / 2
        places = torch.sum(moment + middle * weight, -1, out=into["places"])
        from_centre = middle - (places / into["total"])[:, None]
        squares = (from_centre * weight).add_(moment, alpha=2)
        squares = squares.mul_(from_centre).add_(second_moment)
        place = top_run[:, None]
        # (n,RUN) how far the keys of that run lie off
        key_off = self.powers[1] + from_centre.gather(1, place)
        at_peak = key_off.square_().mul_(peak).sum(-1, keepdim=True)
        torch.sum(squares.scatter_(1, place, at_peak), -1, out=into["squares"])

    def _reach(self, block: Block, e: Tensor, into: Sums) -> None:
        """How many of the latest keys hold all but FAR of a row's weight, beside the first key; else NaN."""
        h, t, width = e.shape
        every = slice((len(self.at) - 1 - block.rows.start) % EVERY, None, EVERY)
        beside = e[:, every] * (torch.arange(width, device=self.device) != block.first)
        total, share = (into[x].view(h, t)[:, every] for x in ("total", "share"))
        # oldest first
        dropped = (beside.cumsum(-1) <= FAR * total[..., None]).sum(-1)
        reach = (block.at[every] + 1 - dropped).clamp(min=0) * (share > 0)
        into["reach"].fill_(math.nan).view(h, t)[:, every] = reach

    def _shared(self, rows: slice) -> Block:
        """What the heads share in a block of queries."""
        queries = self.picked[rows]
        keys, masked_from = self._keys(queries)
        masked = slice(masked_from, keys.stop)
        allowed, bias = resolved(self.call, self.b, queries, masked)
        if allowed is not None:
            allowed = -(~allowed).to(self.whole).expand(self.H, -1, -1)
        if bias is not None:
            bias = (bias * LOG2E).clamp_(min=LOWEST).expand(self.H, -1, -1)
        at = queries + (self.document.start or 0) - keys.start
        n_keys = keys.stop - keys.start
        width = _whole_runs(n_keys)
        # below 0: it has left the keys
        first = -1 if self.first is None else self.first - keys.start
        blocks = self.row_block[rows]
        pairs, counted = self._pairs(queries, at, keys, width, first)
        return Block(
            rows=rows,
            keys=keys,
            masked_from=masked_from - keys.start,
            forbidden=allowed,
            bias=bias,
            at=at.to(self.dtype),
            first=first,
            pairs=pairs,
            counted=counted,
            marks=F.pad(self.marked[:, keys], (0, width - n_keys)),
            blocks=slice(int(blocks[0]), int(blocks[-1]) + 1),
        )

    def _keys(self, queries: Tensor) -> tuple[slice, int]:
        """The keys that windows and causal bounds leave to some queries, and `masked_from`, among all S."""
        first = int(queries[0])
        last = int(queries[-1])
        low = 0
        high = self.S
        # of weights that a model makes itself nothing is known
        masked_from = self.S if self.call.weights is None else 0
        for mask in self.masks:
            # the bounds on key - query; None: no such bound
            left, right = mask.band(self.T, self.S) or (None, None)
            if left is not None:
                low = max(low, first + left)
            if right is not None:
                high = min(high, last + 1 + right)
            # What a causal mask lets the first query see, all of them may; of any other mask nothing is known.
            if left is not None or right is None:
                masked_from = 0
            else:
                masked_from = min(masked_from, first + 1 + right)
        # where there is none, a forbidden one stands for it
        keys = slice(low, high) if low < high else slice(0, 1)
        return keys, min(max(keys.start, masked_from), keys.stop)

    def _scores(self, block: Block, heads: slice, q: Tensor, buffer: Tensor) -> None:
        """Fill the buffer (h,t,width) with scores in bits, FORBIDDEN behind the keys; masks are still to come.

        Of a call that has its weights, their logarithms; a model's own softmax may give NaN to a query that may attend
        nothing.
        """
        keys = block.keys
        n_keys = block.n_keys
        weights = self.call.weights
        scores = buffer[..., :n_keys]
        if weights is not None:
            scores.copy_(weights[self.b, heads, self.picked[block.rows], keys])
            buffer[..., n_keys:] = 0
            # log2 takes twenty times as long at 0, and p log p of this one is 0, too
            buffer.nan_to_num_(0).clamp_(min=torch.finfo(self.dtype).tiny).log2_()
            return
        groups = slice(heads.start // self.group, 1 + (heads.stop - 1) // self.group)
        k = self.keys[groups, keys]
        buffer[..., n_keys:] = FORBIDDEN
        # The queries of a group follow one another in one product, which reads the keys of the group once.
        by_group = buffer.view(len(k), -1, buffer.shape[-1])[..., :n_keys]
        torch.bmm(q[heads].view(len(k), -1, q.shape[-1]), k.mT, out=by_group)
        if self.call.options.softcap is not None:
            cap = self.call.options.softcap * LOG2E
            scores.div_(cap).tanh_().mul_(cap)

    def _pairs(
        self, queries: Tensor, at: Tensor, keys: slice, width: int, first: int
    ) -> tuple[Tensor, Tensor]:
        """`Block.pairs` and `counted`, in the order of `kinds`."""
        t = len(at)
        n_keys = keys.stop - keys.start
        row = torch.arange(t, device=self.device)
        places = [torch.full_like(at, first)]
        rows = [row]
        if "self" in self.kinds:
            places += [at - offset for offset in OFFSETS.values()]
            rows += [row] * len(OFFSETS)
        q_ids = self.document.q_ids
        if self.before is not None and q_ids is not None:
            tokens = q_ids.to(self.device, torch.int32)[queries]
            # A key is right after a copy where the token before it is the query's, and it is the query's own place or
            # an earlier one. The place behind all keys counts as well: the copy is the last key.
            behind = torch.arange(n_keys + 1, dtype=torch.int32, device=self.device)
            follows = tokens[:, None] == self.before[keys.start : keys.stop + 1]
            follows &= behind <= at.to(torch.int32)[:, None]
            row, after = follows.nonzero(as_tuple=True)
            places += [after - 1, after]
            rows += [row, row]
        counted = [kind * t + row for kind, row in enumerate(rows)]
        place = torch.cat(places)
        inside = (place >= 0) & (place < n_keys)
        pairs = torch.cat(rows) * width + place
        return pairs[inside], torch.cat(counted)[inside]

    # What the formulas read when all blocks are done, for all rows at once: (H,n) each.

    def finish(self) -> None:
        """Weights come of e by `share`: what is read of them all."""
        self.by_name = dict(zip(self.names, self.sums, strict=True))
        self.by_name |= zip(self.kinds, self.chosen, strict=True)
        self.seen = self.by_name["largest"] > self.lowest  # may it attend anything?

    @property
    def share(self) -> Tensor:
        """The largest weight of each row: there e is 1."""
        return self.by_name["share"]

    @property
    def mass(self) -> Tensor:
        return self.by_name["total"] * self.share  # of all keys together

    @property
    def log_sum(self) -> Tensor:
        """log p = shifted - log_sum, in bits. `0 -` instead of a minus: of a weight of 1 it gives 0.0, and no -0.0."""
        return torch.where(self.share > 0, 0 - self.share.log2(), 0)

    @property
    def score_max(self) -> Tensor:
        return torch.where(self.seen, self.by_name["largest"] / LOG2E, math.nan)

    @property
    def _lse(self) -> Tensor:
        """In bits, sink included."""
        lse = self.by_name["largest"] + self.by_name["total"].log2()
        return lse if self.sink is None else torch.logaddexp2(lse, self.sink[:, None])

    @property
    def lse(self) -> Tensor:
        return torch.where(self.seen, self._lse / LOG2E, math.nan)

    @property
    def sink_weight(self) -> Tensor | None:
        if self.sink is None:
            return None
        return torch.where(self.seen, (self.sink[:, None] - self._lse).exp2(), 0)

    @property
    def gate(self) -> Tensor | None:
        """What W_O reads over what attention gave, mean over the width; None where no gate alone lies between.

        A gate multiplies each number by none below 0. Nothing else that families do there, such as a rotation or a
        difference of heads, leaves all signs as they are; a norm is told by its module.
        """
        call = self.call
        if call.options.gate is not None:
            of_heads = as_tensor(call.options.gate, self.device).to(self.dtype)
            return of_heads[:, None].expand(self.H, len(self.picked))
        before = call.before_gate
        if before is None or before.shape != call.out.shape:
            return None
        after = self.out
        before = before[self.b, :, self.picked].to(self.dtype)
        ratio = after / before
        if torch.equal(after, before) or (ratio < 0).any() or ratio.isinf().any():
            return None
        return torch.where(self.seen, ratio.nanmean(-1), math.nan)

    def total(self, name: str) -> Any:
        """A sum over the weights, or what else the pass has under this name; None where it has nothing."""
        if name in self.by_name:
            return self.by_name[name] * self.share
        return getattr(self, name) if hasattr(type(self), name) else None

    def placed(self, values: Tensor) -> Tensor | None:
        """These numbers of the places of keys, where places are known; 0 of a row that attends nothing."""
        known = self.document.start is not None
        return torch.where(self.mass > 0, values, 0) if known else None

    @property
    def distance(self) -> Tensor | None:
        return self.placed(self.at - self.by_name["places"] / self.by_name["total"])

    @property
    def spread(self) -> Tensor | None:
        variance = self.by_name["squares"].clamp(min=0) / self.by_name["total"]
        return self.placed(variance.sqrt())

    @property
    def added(self) -> Tensor | None:
        if self.w_o is None:
            return None
        return torch.linalg.vector_norm(self.out @ self.w_o.mT, dim=-1)

    @property
    def out(self) -> Tensor:
        """What the heads give, (H,n,E)."""
        out = self.call.out[self.b]
        # all of them are not copied
        is_all = len(self.picked) == self.T
        return (out if is_all else out[:, self.picked]).to(self.dtype)


def run(work: Pass) -> Tensor:
    """Go over all blocks of a pass; returns its `totals`. Of a long document each thread of Python has some blocks.

    Such a thread runs on one core, and they meet once, at the end: where another program takes a core, torch's own
    threads wait for it in every small operation, and 4,096 tokens take five times as long. Short documents have too few
    blocks, and are torch's own.
    """
    inference = torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    is_large = work.H * len(work.at) * work.S >= THREADED
    if threads == 1 or work.device.type != "cpu" or not is_large:
        return work.run(0, 1, inference)
    try:
        with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
            jobs = [
                pool.submit(work.run, n, threads, inference) for n in range(threads)
            ]
            return torch.stack([job.result() for job in jobs]).sum(0)
    finally:  # the number that a thread sets is also that of all threads which begin later
        torch.set_num_threads(threads)


class Measured(NamedTuple):
    """The statistics of one call on one document; n rows that are real and in which some head may attend something.

    A head that may attend nothing in such a row has zeros there, as its weights are.
    """

    # name -> (H,n) float32; "reach" is NaN but for each EVERY-th row
    rows: dict[str, Tensor]
    places: Tensor  # (n,) the numbers of those rows among the T queries
    # (H,n) the key with the largest weight; 0 where it was not looked for
    argmax: Tensor
    received: Tensor  # (H,S) sum of the weights that each key receives
    # (H,b,b) their means over blocks; b = THUMBNAIL, or fewer where there are fewer rows or keys
    thumbnail: Tensor
    # (H,b,b) what fraction of its attention a block of queries gives to each block of keys
    shares: Tensor
    first_key: (
        Tensor  # (H,b) what of the first column of `shares` goes to the first key
    )


def measure(
    call: Call,
    b: int,
    document: Document,
    w_o: Tensor | None = None,
    only: Collection[str] = (),
    reach: bool = True,
) -> Measured:
    """All statistics of document `b` of a call.

    w_o      R factors of each head's block of W_O, (H,E,E), from `output_factors`; without it there is no "norm"
    reach    also take the reach, which costs time
    """
    work = Pass(call, b, document, w_o, only, reach)
    by_block = run(work)
    with torch.no_grad(), torch.autocast(work.device.type, enabled=False):
        work.finish()
        seen = work.seen.any(0)
        rows = {}
        for name, x in work.formulas.items():
            of_rows = work.total(x) if isinstance(x, str) else x(work)
            if of_rows is not None:
                rows[name] = of_rows[:, seen]
        nothing = (by_block[..., :0],) * 4
        pictures = work.pictures(by_block) if work.is_whole else nothing
        return Measured(rows, work.picked[seen], work.argmax[:, seen], *pictures)


def top_keys(call: Call, b: int, rows: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k keys with the largest weights of chosen queries, largest first: keys and weights, (H,n,k) each.

    Where a query may attend fewer than k keys, the rest have weight 0.
    """
    weights, keys = row_weights(call, b, rows).topk(min(k, call.n_keys), dim=-1)
    return keys, weights


def row_weights(call: Call, b: int, rows: Sequence[int]) -> Tensor:
    """The weights of chosen queries over all keys, (H,n,S), in float32 or wider: for a few rows of a long text."""
    part = part_of(call, b, rows)
    if part.weights is not None:
        wide = torch.promote_types(part.weights.dtype, torch.float32)
        return part.weights[0].to(wide).nan_to_num(0)
    with torch.autocast(call.q.device.type, enabled=False):
        # the values change no weight
        options = part.options._replace(gate=None)
        return trace(part.q, part.k, part.k[..., :1], options).weights[0]


def as_numpy(values: Tensor) -> NDArray[np.float32]:
    return values.detach().float().cpu().numpy()


def uniform(call: Call) -> Call:
    """The call of one head that spreads its attention evenly over what the mask allows: the control of every number.

    Where the model made the weights itself, that is what some head of the document looks at.
    """
    B, _, T, _ = call.q.shape
    S = call.n_keys
    mask = call.options.mask
    if call.weights is not None:
        mask = Allowed((call.weights > 0).any(1, keepdim=True))
    if mask is not None:
        # one control a layer: where masks differ, the first
        mask = mask.for_heads([0], call.q.shape[1]).without_bias()
    queries = call.q.new_zeros(B, 1, T, 1)
    keys = call.q.new_zeros(B, 1, S, 1)
    call = call._replace(q=queries, k=keys, v=keys, options=Options(mask), out=queries)
    return call._replace(weights=None, before_gate=None)


def output_factors(w_o: Tensor, n_heads: int) -> Tensor:
    """For each head the R (E,E) of a QR factorisation of its block of W_O: |R out| is |W_O,h out|. w_o is (C, H*E).

    So the length of what a head adds to the residual stream takes E^2 multiplications a row, and not C E.
    """
    C, width = w_o.shape
    parts_hce = w_o.detach().to(torch.promote_types(w_o.dtype, torch.float32))
    parts_hce = parts_hce.reshape(C, n_heads, width // n_heads).transpose(0, 1)
    return torch.linalg.qr(parts_hce, mode="r").R


# of the module of each site what its W_O was, and its factors
_factors: WeakKeyDictionary[nn.Module, tuple[object, Tensor]] = WeakKeyDictionary()


def factors_of(site: Site, call: Call) -> Tensor | None:
    """`output_factors` of a site, computed anew only when its W_O has changed."""
    w_o = site.w_o
    # Without W_O, or where `out` is not what it reads, nobody knows what a head adds.
    if w_o is None or not call.at_w_o or w_o.shape[1] % site.n_heads:
        return None
    with loaded(*filter(None, [site.module, site.projection])):
        here = site.w_o
        assert here is not None
        # Sums of columns tell of every change, also to `.data`, which torch does not count. Rows count unlike, for
        # plain sums stay where rows change against others.
        wide = torch.promote_types(here.dtype, torch.float32)
        rows = torch.linspace(1, 2, len(here)).to(here)
        sums = (here.detach() * rows[:, None]).sum(0, dtype=wide).tolist()
        is_now = here.device, here.dtype, sums
        was, factors = _factors.get(site.module, (None, here))
        if was != is_now:
            factors = output_factors(here, site.n_heads)
            _factors[site.module] = is_now, factors
    return factors


def _places(is_real: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The places, of `length`, that are real."""
    if is_real is None:
        return torch.arange(length, device=device)
    return is_real.to(device).nonzero()[:, 0]


def _even_blocks(places: Tensor) -> Tensor:
    """For each of these places the number of its block of the thumbnail: neighbours, as many in each."""
    n = len(places)
    return torch.arange(n, device=places.device) * min(THUMBNAIL, n) // max(1, n)


def _whole_runs(keys: int) -> int:
    """So many keys, and as many more as fill the last run: rounded up to a multiple of RUN."""
    return -(-keys // RUN) * RUN
