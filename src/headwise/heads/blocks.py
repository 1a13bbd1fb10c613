"""All statistics of one call on one document, exactly, in memory that does not grow with T x S.

The weights are made a block of queries at a time. A block is small enough to stay near the processor, and every number
is taken from it before the next one is made: there the passes over a block cost little beside the dot products.

         keys 0 to S-1                   a strip: up to ROWS queries, and the keys that one of them may see;
        +-------------------------+      a causal bound or a window cuts off the rest
        |                         |      width: its keys in whole runs of RUN, FORBIDDEN where there is no key
      t |  strip.keys  |          |      a block: as many heads of it as fit into BLOCK weights
        |              |          |
        +-------------------------+      buffers[0]  (h,t,width)  scores, in bits; less the largest of the row; times e
        queries                          buffers[1]  (h,t,width)  e = 2^(score - the largest of the row)

    e  ->  sums    (names,H,n)   total = sum e; shifted = sum e (score - largest); places = sum e (place of the key);
                                 squares = sum e (its distance from the mean place)^2; "on" a marked set;
                                 share = 1 / (total and the sink's): the weight is p = e share;
                                 reach, which is no sum: see `_reach`
       ->  near    (H,n,1+k)     e of the first key, and of the keys that stand at chosen distances
       ->  copies  (2,H,n)       sum e over earlier copies of the query's token, and over the keys right after those
       ->  argmax  (H,n)         the key with the largest weight
       ->  totals  (H,b,S)       sum p over each of the b blocks of queries of a thumbnail

When all blocks are done, the formulas of `headwise.heads.statistics` read the sums, which tests/heads/dense.py defines
on whole maps. Where a model makes its weights itself a call has them, and a block begins with e. Beside the
formulas each head has

    received    sum of p over the queries, for each key
    thumbnail   mean of p over blocks of queries x keys
    mean_out    mean of the head's output
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.backends.torch_ import as_tensor, widest
from headwise.heads.documents import Document
from headwise.heads.statistics import IDS, POSITIONS, TOP, W_O, formulas
from headwise.masks import Allowed, BroadcastGrid, resolve
from headwise.models.sites import Site, loaded
from headwise.records import Call
from headwise.spec import Options, resolve_kv_index

# weights; twice as many where threads of Python wait for each other's lock between two operations
BLOCK = 2**20
THREADED = (
    2**27
)  # weights of a call; from here on each thread has its own blocks: see `run`
# queries of a product at most: far fewer, and packing the keys takes longer than multiplying them
ROWS = 256
RUN = 64  # neighbouring keys, which are summed up together: see `powers`
THUMBNAIL = 32  # blocks of queries and of keys in a thumbnail, at most
# Pairs are few where there are so many times as many weights: picking them is then faster than a pass over the weights.
FEW = 32
LONG = 8192  # keys; from here on the product is faster where each feature's keys lie side by side
# scores are in bits: MKL's exp takes 100 times as long below -87, exp2 does not
LOG2E = 1 / math.log(2)
# The score of a key that may not be attended. It is finite, so that 0 * score is 0; and half of the least float32, so
# that it stays finite when the largest score of the row is subtracted.
FORBIDDEN = -(2.0**127)
# the least bias of a key that may be attended: it stays above FORBIDDEN, and counts when alone
LOWEST = -(2.0**126)
FAR = 0.01  # of the weight lies farther back than the reach of a head
# the reach is taken of each so manieth row, the last one among them: of all it takes a sixth of the time
EVERY = 16


class Strip(NamedTuple):
    """A block of t queries and s keys: what its heads share. Keys are counted from the first that a query may see.

    A row is a query that is measured; k offsets are asked for, and m sets of keys are marked.
    """

    rows: slice  # which of all rows
    queries: Tensor  # (t,) their numbers among the T queries
    keys: slice  # those that they may see, among S
    # of the block: as many keys in whole runs; the last ones may be none, and have no weight
    width: int
    masked_from: (
        int  # every query may see all keys before this one: there nothing is looked up
    )
    # (H,t,s - masked_from) bool, of the keys from there on; None: nothing is
    forbidden: Tensor | None
    bias: Tensor | None  # (H,t,s) what the mask adds to scores, in bits
    at: Tensor  # (t,) the keys at which the queries stand
    # (t,1+k) the first key and those at the offsets before the query; any key where there is none ...
    near: Tensor
    has_near: Tensor  # (t,1+k) ... and 1 where there is one, else 0
    # Pairs of a query and a key: earlier keys with the query's token, and the keys right after those.
    # (n,) query * width + key, a place in the block of a head, in the order of the queries
    pairs: Tensor
    pair_rows: Tensor  # (n,) the query; plus t where the key is one right after
    # where they are many there are no pairs, but both kinds as 1 and 0, (t,width) each
    dense: tuple[Tensor, ...]
    marks: Tensor  # (m,width) 1 where a key is in a marked set
    q: Tensor  # (H,t,D) scaled, so that scores are in bits
    blocks: slice  # those of the thumbnail in which a query lies, b of them
    member: Tensor  # (b,t) 1 where a query is in such a block

    @property
    def n_keys(self) -> int:
        return self.keys.stop - self.keys.start

    def parts(self, n: int) -> list[tuple[slice, slice, Strip]]:
        """The block, once it has scores, as blocks of n queries: which of them, which of its pairs, what they share.

        Not cut is what only scores are made of, q and the mask, and `pair_rows`, which `_block` reads for all parts.
        """
        t = len(self.at)
        if n >= t:
            return [(slice(0, t), slice(None), self)]
        parts = []
        for start in range(0, t, n):
            rows = slice(start, min(start + n, t))
            # The pairs stand in the order of their queries, of which `pair_rows % t` is the number.
            ends = self.at.new_tensor([rows.start, rows.stop])
            pairs = slice(*torch.searchsorted(self.pair_rows % t, ends).tolist())
            part = self._replace(
                rows=slice(self.rows.start + rows.start, self.rows.start + rows.stop),
                queries=self.queries[rows],
                at=self.at[rows],
                near=self.near[rows],
                has_near=self.has_near[rows],
                pairs=self.pairs[pairs] - start * self.width,
                dense=tuple(is_copy[rows] for is_copy in self.dense),
                member=self.member[:, rows],
            )
            parts.append((rows, pairs, part))
        return parts


class Pass:
    """One pass over the weights of document b of a call, block by block; n rows are measured.

    The other arguments are those of `measure`.
    """

    def __init__(
        self,
        call: Call,
        b: int,
        document: Document,
        offsets: Sequence[int] = (),
        w_o: Tensor | None = None,
        top: bool = False,
    ) -> None:
        self.call, self.b, self.document = call, b, document
        self.H, self.T = call.q.shape[1:3]
        self.S = call.n_keys
        self.device = call.q.device
        # In float32 at least: sums of many weights in half precision would lose their digits.
        self.dtype = torch.promote_types(
            (call.q if call.weights is None else call.weights).dtype, torch.float32
        )
        options: Options = call.options
        width = max(1, call.q.shape[3])  # of queries without features every score is 0
        self.scale = (
            1 / math.sqrt(width) if options.scale is None else float(options.scale)
        )
        self.sink = None
        if options.sink is not None:
            # what a sink of +inf becomes: times LOG2E it is still finite
            most = torch.finfo(self.dtype).max / 2
            self.sink = (
                as_tensor(options.sink, self.device).to(self.dtype).clamp(max=most)
                * LOG2E
            )
        # the key/value head of each head
        self.index = resolve_kv_index(self.H, call.k.shape[1], options.kv_index)
        self.masks = () if options.mask is None else options.mask.parts()
        self.w_o = None if w_o is None else w_o.to(self.dtype)
        self.top = top
        self.marks = {
            name: mark.to(self.device, self.dtype)
            for name, mark in (document.marks or {}).items()
        }
        has_ids = document.q_ids is not None and document.k_ids is not None
        facts = (
            (POSITIONS, document.start is not None),
            (IDS, has_ids),
            (W_O, w_o is not None),
            (TOP, top),
        )
        known = [fact for fact, is_known in facts if is_known]
        self.formulas = formulas(known, offsets, self.marks)
        # "next", "self", "previous"
        self.offsets = [] if document.start is None else sorted({-1, 0, 1, *offsets})
        # What is not real, padding or rows that were not drawn, is never read: NaN may stand there.
        # (n,) the queries that are measured
        self.picked = _places(document.real_rows, self.T, self.device)
        n = len(self.picked)
        # (n,) that of the thumbnail in which each of them is
        self.row_block = _even_blocks(self.picked)
        self.real_keys = _places(document.real_keys, self.S, self.device)
        self.first = document.first  # the key of the first token; None where it is gone
        if document.first == -1:  # the first real key
            self.first = int(self.real_keys[0]) if len(self.real_keys) else 0
        # Of the sums. Marked sets come first: `_block` writes them into the first rows, in one product.
        self.names = [
            *(f"on {name}" for name in self.marks),
            "share",
            "total",
            "shifted",
        ]
        if document.start is not None:
            self.names += ["places", "squares", *(["reach"] if top else [])]
        # (G,S,D), each head's keys one after another, since every block reads them: a projection leaves the heads of a
        # token side by side.
        keys = call.k[b].to(self.dtype)
        self.keys = keys.mT.contiguous().mT if self.S > LONG else keys.contiguous()
        if "same_token" in self.formulas and document.k_ids is not None:
            self.followers = self._followers(
                document.k_ids.to(self.device), document.before
            )
        # (k,RUN) 1, the distance of a key from the middle of its run, and its square: times e and summed over a run
        # they give its weight and its first two moments.
        from_middle = (
            torch.arange(RUN, dtype=self.dtype, device=self.device) - (RUN - 1) / 2
        )
        exponents = (0,) if document.start is None else (0, 1, 2)
        self.powers = torch.stack([from_middle**k for k in exponents])
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        # (m,S)
        self.marked = (
            torch.stack([*self.marks.values()]) if self.marks else zeros(0, self.S)
        )
        # What the blocks fill in.
        self.at = zeros(n)
        self.sums = zeros(len(self.names), self.H, n)
        self.near = zeros(self.H, n, 1 + len(self.offsets))
        self.copies = zeros(2, self.H, n)
        self.argmax = torch.zeros(self.H, n, dtype=torch.long, device=self.device)

    def _followers(self, k_ids: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Places 0 to S by the token before them, then by place: token and place as one number, sorted; the places.

        Each place follows a copy of the token before it, so that the places after the copies of one token lie side by
        side. Both are one number, token * (S + 1) + place: places are 0 to S, so that no two tokens mix.
        """
        tokens = F.pad(k_ids, (1, 0), value=before) * (self.S + 1)
        values, order = (tokens + torch.arange(self.S + 1, device=self.device)).sort()
        return values, order

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
            empty = partial(torch.empty, dtype=self.dtype, device=self.device)
            width = _whole_runs(self.S)
            block = BLOCK * min(2, n_threads)  # weights of a block
            # Half as many stay in the cache of a single core; but what ROWS queries of one head need, they get, up to
            # BLOCK.
            if n_threads == torch.get_num_threads() == 1:
                block = max(BLOCK // 2, min(BLOCK, ROWS * width))
            # The same buffers for every block: they stay in the cache, and no page is asked for anew. The first one
            # holds the scores of a head's whole strip, also where e is made of fewer rows at a time.
            buffers = empty(max(block, min(n, ROWS) * width)), empty(max(block, width))
            totals = self.totals()
            for i, start in enumerate(range(0, n, ROWS)):
                # Dealt out there and back, 0 1 2 2 1 0: a causal block is longer than the one before it, and so each
                # thread has as much to do.
                if i % (2 * n_threads) in (thread, 2 * n_threads - 1 - thread):
                    self._block(
                        self._strip(slice(start, min(start + ROWS, n))), buffers, totals
                    )
        return totals

    def totals(self) -> Tensor:
        """Zeros for what a thread adds up over its blocks: what each key receives, (H,b,S), b as in the thumbnail."""
        return torch.zeros(
            self.H,
            min(THUMBNAIL, len(self.at)),
            self.S,
            dtype=self.dtype,
            device=self.device,
        )

    def _add(
        self, totals: Tensor, e: Tensor, share: Tensor, heads: slice, strip: Strip
    ) -> None:
        """Add what each key receives from each block of the thumbnail's queries; weights are e * share."""
        totals[heads, strip.blocks, strip.keys] += torch.bmm(
            strip.member * share[:, None], e
        )

    def thumbnail(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """`Measured.thumbnail` and `first_key`, of the `totals` (H,b,S) of all threads together."""
        n_blocks = min(THUMBNAIL, len(self.real_keys))
        inside = sums.new_zeros(self.S, n_blocks)  # 1 where a key is in a block
        inside[self.real_keys, _even_blocks(self.real_keys)] = 1
        rows = torch.bincount(
            self.row_block, minlength=sums.shape[1]
        )  # queries in each block
        area = rows[:, None] * inside.sum(0)  # pairs of a query and a key in each block
        is_there = n_blocks and self.first is not None
        first_key = (
            sums[..., self.first] / area[:, 0]
            if is_there
            else sums.new_zeros(sums.shape[:2])
        )
        return sums @ inside / area, first_key

    def weights(self, rows: slice) -> tuple[slice, Tensor]:
        """The keys that some queries may see, and their weights (H,t,s); by a softmax, with no buffer and no sums."""
        if self.call.weights is not None:
            return slice(0, self.S), self.call.weights[self.b, :, rows].to(
                self.dtype
            ).nan_to_num(0)
        strip = self._strip(rows)
        n_keys, shape = strip.n_keys, (self.H, rows.stop - rows.start, strip.width)
        scores = self._scores(
            slice(0, self.H),
            strip,
            torch.empty(shape, dtype=self.dtype, device=self.device),
        )
        logits = scores
        if self.sink is not None:  # one more logit, whose weight is then cut off
            logits = torch.cat(
                [scores, self.sink[:, None, None].expand(*scores.shape[:2], 1)], -1
            )
        weights = (logits / LOG2E).softmax(-1)[..., :n_keys]
        # the softmax of a row where all are would be even, not 0
        is_forbidden = scores[..., :n_keys] <= FORBIDDEN
        return strip.keys, weights.masked_fill(is_forbidden, 0)

    def _block(
        self, strip: Strip, buffers: tuple[Tensor, Tensor], totals: Tensor
    ) -> None:
        """All heads of a block of queries, as many at a time as fit.

        Between two large operations a small one takes as long as a tenth of them, so that what is done to the sums
        waits for all blocks: see `finish`.
        """
        t, s, block = len(strip.at), strip.width, len(buffers[1])
        n_heads = _whole_groups(max(1, min(self.H, block // (t * s))), self.index)
        # one, or several of a single head where not even one fits
        parts = strip.parts(max(1, block // s))
        empty = partial(torch.empty, dtype=self.dtype, device=self.device)
        sums = empty(
            len(self.names), self.H * t
        )  # a column for each head and query, head by head
        near = empty(self.H, *strip.near.shape)
        copied = empty(self.H, len(strip.pairs))
        for start in range(0, self.H, n_heads):
            heads = slice(start, min(start + n_heads, self.H))
            h = heads.stop - start
            column = start * t  # where the sums of the next part stand
            all_scores = self._scores(
                heads, strip, buffers[0][: h * t * s].view(h, t, s)
            )
            for rows, pairs, part in parts:
                scores = all_scores[:, rows]
                n = h * (rows.stop - rows.start)
                e = buffers[1][: n * s].view(scores.shape)
                into = dict(
                    zip(self.names, sums[:, column : column + n].unbind(), strict=True)
                )
                top_run, peak = self._sum(
                    part, heads, scores.view(-1, s), e.view(-1, s), into
                )
                torch.mm(
                    part.marks,
                    e.view(-1, s).mT,
                    out=sums[: len(part.marks), column : column + n],
                )
                torch.gather(e, 2, part.near.expand(h, -1, -1), out=near[heads, rows])
                torch.index_select(
                    e.view(h, -1), 1, part.pairs, out=copied[heads, pairs]
                )
                # the scores are used up: their buffer takes the products
                for i, is_copy in enumerate(part.dense):
                    self.copies[i, heads, part.rows] = torch.mul(
                        e, is_copy, out=scores
                    ).sum(-1)
                if self.top:
                    place = peak.max(-1).indices  # an argmax takes twice as long
                    self.argmax[heads, part.rows] = (
                        place + top_run * RUN + strip.keys.start
                    ).view(h, -1)
                self._add(
                    totals,
                    e[..., : strip.n_keys],
                    into["share"].view(h, -1),
                    heads,
                    part,
                )
                column += n
        self.at[strip.rows] = strip.at
        self.sums[..., strip.rows] = sums.view(-1, self.H, t)
        self.near[:, strip.rows] = near.mul_(strip.has_near)
        if not strip.dense:
            both = torch.zeros(self.H, 2 * t, dtype=self.dtype, device=self.device)
            both.index_add_(1, strip.pair_rows, copied)
            self.copies[..., strip.rows] = both.view(self.H, 2, t).transpose(0, 1)

    def _sum(
        self,
        strip: Strip,
        heads: slice,
        scores: Tensor,
        e: Tensor,
        into: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Fill e, (n,width), with 2^(score - the largest), and `into` with its sums, (n,) each; the scores are lost.

        Gives the run in which the largest score of each row stands, (n,), and what e is there, (n,RUN).
        """
        runs = scores.view(
            len(scores), -1, RUN
        )  # (n,runs,RUN), a view: it changes with the scores
        # First of each run, then of the runs: a maximum with its place over all keys takes as long as two products.
        largest, top_run = runs.amax(-1).max(-1)
        if self.call.weights is None:
            torch.exp2(scores.sub_(largest[:, None]), out=e)
        # `scores` has the weights themselves: e is weight / largest, and its logarithm is wanted
        else:
            # log2 takes twenty times as long at 0, and 0 * log2(tiny) is 0, too
            tiny = torch.finfo(e.dtype).tiny
            torch.div(scores, largest[:, None].clamp(min=tiny), out=e)
            torch.log2(torch.clamp(e, min=tiny, out=scores), out=scores)
        # of each row, among all runs
        first_runs = torch.arange(len(top_run), device=self.device) * runs.shape[1]
        peak = e.view(-1, RUN).index_select(0, first_runs + top_run)
        # (k,n,runs), the weight of each run and its moments: see `powers`. Their few rows come first in the product:
        # with e first it takes three to five times as long.
        powers = torch.mm(self.powers, e.view(-1, RUN).mT).view(-1, *runs.shape[:2])
        total = torch.sum(powers[0], -1, out=into["total"])
        if self.call.weights is not None:
            into["share"].copy_(largest)  # e is weight / largest
        elif self.sink is None:
            torch.reciprocal(total, out=into["share"])
        # one more term of the denominator; both are lowered by the larger logit, so that none overflows
        else:
            sink = self.sink[heads].repeat_interleave(len(strip.at))
            highest = torch.maximum(largest, sink)
            lowered = (largest - highest).exp2()
            torch.div(
                lowered, total * lowered + (sink - highest).exp2(), out=into["share"]
            )
        # A query may see no key at all: then all its scores are FORBIDDEN, and each e is 1. It cannot be where there
        # are keys that every query may see.
        if strip.forbidden is not None and not strip.masked_from:
            nothing = largest <= FORBIDDEN
            into["share"].masked_fill_(nothing, 0)
            total.masked_fill_(nothing, 0)
        torch.sum(scores.mul_(e), -1, out=into["shifted"])
        if "places" in into:
            weight, moment, second_moment = powers
            middle = (
                torch.arange(runs.shape[1], dtype=e.dtype, device=e.device) * RUN
                + (RUN - 1) / 2
            )
            centre = torch.sum(moment + middle * weight, -1, out=into["places"]) / total
            # Around the mean, not as a difference of squares: a narrow head far away would lose its digits. Of a run
            # whose middle lies f off the mean: sum e (x + f)^2 = f^2 sum e + 2 f sum e x + sum e x^2. In the run of
            # the peak that would be such a difference again, so it is summed key by key.
            from_centre = middle - centre[:, None]
            squares = (
                (from_centre * weight)
                .add_(moment, alpha=2)
                .mul_(from_centre)
                .add_(second_moment)
            )
            place = top_run[:, None]
            # (n,RUN) how far the keys of that run lie off
            key_off = self.powers[1] + from_centre.gather(1, place)
            at_peak = key_off.square_().mul_(peak).sum(-1, keepdim=True)
            torch.sum(squares.scatter_(1, place, at_peak), -1, out=into["squares"])
        if "reach" in into:
            into["reach"].copy_(self._reach(strip, e, total))
        return top_run, peak

    def _reach(self, strip: Strip, e: Tensor, total: Tensor) -> Tensor:
        """How many of the latest keys hold all but FAR of a row's weight, beside the first key: (n,), else NaN."""
        t = len(strip.at)
        rows = torch.arange(t, device=self.device)[
            (len(self.at) - 1 - strip.rows.start) % EVERY :: EVERY
        ]
        others = e.view(-1, t, strip.width)[:, rows]
        others[:, torch.arange(len(rows), device=self.device), strip.near[rows, 0]] *= (
            1 - strip.has_near[rows, 0]
        )
        # oldest first
        dropped = (others.cumsum(-1) <= FAR * total.view(-1, t)[:, rows, None]).sum(-1)
        reach = total.new_full((len(others), t), math.nan)
        reach[:, rows] = (strip.at[rows] + 1 - dropped).clamp(min=0)
        return reach.flatten()

    def _strip(self, rows: slice) -> Strip:
        """What the heads share in a block of queries."""
        queries = self.picked[rows]
        keys, masked_from = self._keys(int(queries[0]), int(queries[-1]))
        grid = BroadcastGrid(
            (self.call.q.shape[0], self.H, self.T, self.S),
            array=partial(as_tensor, device=self.device),
            arange=partial(torch.arange, device=self.device),
            keys=slice(masked_from, keys.stop),
            queries=queries,  # type: ignore[arg-type]
            documents=slice(self.b, self.b + 1),
        )
        allowed, bias = resolve(
            self.masks, grid, torch.where, lambda x: x.to(self.dtype)
        )
        at = queries + (self.document.start or 0) - keys.start
        n_keys = keys.stop - keys.start
        width = _whole_runs(n_keys)
        # below 0: `has_near` says that it is not there
        place = -1 if self.first is None else self.first - keys.start
        first_key = at.new_full((len(at), 1), place)
        near = torch.cat([first_key, at[:, None] - at.new_tensor(self.offsets)], 1)
        blocks = self.row_block[rows]
        first, last = int(blocks[0]), int(blocks[-1]) + 1
        pairs, pair_rows, dense = self._copies(queries, at, keys, width)
        return Strip(
            rows=rows,
            queries=queries,
            keys=keys,
            width=width,
            masked_from=masked_from - keys.start,
            forbidden=None if allowed is None else self._by_head(~allowed),
            bias=None
            if bias is None
            else self._by_head((bias.to(self.dtype) * LOG2E).clamp_(min=LOWEST)),
            at=at.to(self.dtype),
            near=near.clamp(0, n_keys - 1),
            has_near=((near >= 0) & (near < n_keys)).to(self.dtype),
            pairs=pairs,
            pair_rows=pair_rows,
            dense=dense,
            marks=F.pad(self.marked[:, keys], (0, width - n_keys)),
            q=(
                self.call.q[self.b, :, queries].to(self.dtype) * (self.scale * LOG2E)
            ).contiguous(),
            blocks=slice(first, last),
            member=(
                blocks == torch.arange(first, last, device=self.device)[:, None]
            ).to(self.dtype),
        )

    def _keys(self, first: int, last: int) -> tuple[slice, int]:
        """The keys that windows and causal bounds leave to queries first to last, and `masked_from`, among all S."""
        low, high, masked_from = 0, self.S, self.S
        for mask in self.masks:
            # the bounds on key - query; None: no such bound
            left, right = mask.band(self.T, self.S) or (None, None)
            if left is not None:
                low = max(low, first + left)
            if right is not None:
                high = min(high, last + 1 + right)
            # What a causal mask lets the first query see, all of them may; of any other mask nothing is known.
            masked_from = (
                0
                if left is not None or right is None
                else min(masked_from, first + 1 + right)
            )
        weights = self.call.weights
        # A call that has its weights names no mask. That it is causal shows in zeros behind the last query's own key;
        # with a cache that key stands further on, and all keys are read, which takes only longer.
        if weights is not None and last + 1 < self.S:
            ahead = weights[self.b, :, first : last + 1, last + 1 :]
            high = last + 1 if float(ahead.amax()) == 0 else high
        # where there is none, a forbidden one stands for it
        keys = slice(low, high) if low < high else slice(0, 1)
        return keys, min(max(keys.start, masked_from), keys.stop)

    def _by_head(self, x: Tensor) -> Tensor:
        """What broadcasts to (1,H,t,s) as (H,t,s); a mask of all heads alike is not copied."""
        with_batch = x[(None,) * (4 - x.ndim)]  # axes in front until there are four
        return with_batch[0].expand(self.H, -1, -1)

    def _scores(self, heads: slice, strip: Strip, buffer: Tensor) -> Tensor:
        """Fill the buffer (h,t,width) with what the softmax reads, in bits; FORBIDDEN where a query may not look.

        Of a call that has its weights, these; a model's own softmax may give NaN to a query that may attend nothing.
        """
        n_keys = strip.n_keys
        if self.call.weights is not None:
            buffer[..., :n_keys] = self.call.weights[
                self.b, heads, strip.queries, strip.keys
            ]
            buffer[..., n_keys:] = 0
            return buffer.nan_to_num_(0)
        q = strip.q[heads]
        h, _, D = q.shape
        read = list(self.index[heads])  # the key/value head of each head
        groups = sorted(set(read))
        if read != [g for g in groups for _ in range(h // len(groups))]:
            groups = read  # no equal, adjacent groups: each head brings its own keys
        span = slice(
            groups[0], groups[-1] + 1
        )  # which makes no copy of the keys, as a list does
        picked: slice | list[int] = (
            span if groups == list(range(span.start, span.stop)) else groups
        )
        k = self.keys[picked, strip.keys]
        scores = buffer[..., :n_keys]
        buffer[..., n_keys:] = FORBIDDEN
        # The queries of a group follow one another in one product, which reads the keys of the group once.
        by_group = buffer.view(len(groups), -1, strip.width)[..., :n_keys]
        torch.bmm(q.view(len(groups), -1, D), k.mT, out=by_group)
        if self.call.options.softcap is not None:
            cap = self.call.options.softcap * LOG2E
            scores = scores.div_(cap).tanh_().mul_(cap)
        if strip.bias is not None:
            # of all keys: a mask that adds something has no band
            scores = scores.add_(strip.bias[heads])
        if strip.forbidden is not None:
            scores[..., strip.masked_from :].masked_fill_(
                strip.forbidden[heads], FORBIDDEN
            )
        return buffer

    def _copies(
        self, queries: Tensor, at: Tensor, keys: slice, width: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """`Strip.pairs`, `pair_rows` and `dense`: where there are copies of the queries' tokens."""
        nothing = at.new_empty(0)
        if "same_token" not in self.formulas or self.document.q_ids is None:
            return nothing, nothing, ()
        values, order = (
            self.followers
        )  # token and place as one number, sorted; the place of each
        tokens = self.document.q_ids.to(self.device)[queries] * (self.S + 1)
        # Of the query's token the places right after its copies, up to the query's own: what they follow is earlier.
        first = torch.searchsorted(values, tokens)
        count = torch.searchsorted(values, tokens + at + keys.start, right=True) - first
        count = count.clamp(min=0)  # a query may stand before all keys of a window
        row = torch.arange(len(tokens), device=self.device).repeat_interleave(count)
        # `row` is the query of each pair. Its pairs lie side by side among the sorted tokens, from `first` on; among
        # all pairs they begin behind those of the queries before it.
        offset = first - (count.cumsum(0) - count)
        place = torch.arange(len(row), device=self.device) + offset[row]
        after = order[place] - keys.start  # the keys right after the copies
        t, s = len(tokens), keys.stop - keys.start
        # the copy, and the key right after
        row, key = torch.stack([row, row], 1), torch.stack([after - 1, after], 1)
        inside = (key >= 0) & (key < s)
        places = row * width + key
        if len(row) * FEW < t * width:
            return (
                places[inside],
                (row + t * torch.arange(2, device=self.device))[inside],
                (),
            )
        zeros = torch.zeros(t * width, dtype=self.dtype, device=self.device)
        dense = []
        for kind in range(2):  # the copies, and the keys right after them
            chosen = places[:, kind][inside[:, kind]]
            dense.append(zeros.index_fill(0, chosen, 1).view(t, width))
        return nothing, nothing, tuple(dense)

    # What the formulas read when all blocks are done, for all rows at once: (H,n) each.

    def finish(self) -> None:
        """Weights come of e by `share`: what is read of them all."""
        self.by_name: dict[str, Tensor] = dict(zip(self.names, self.sums, strict=True))
        self.by_name |= {
            "same": self.copies[0],
            "after": self.copies[1],
            "first": self.near[..., 0],
        }
        self.share = self.by_name["share"]
        self.mass = self.by_name["total"] * self.share  # of all keys together
        self.seen = self.by_name["total"] > 0  # may the query attend anything?
        self.largest = self.share  # the largest weight of each row: there e is 1
        # log p = shifted - log_sum, in bits. `0 -` instead of a minus: of a weight of 1 it gives 0.0, and no -0.0.
        self.log_sum = torch.where(self.share > 0, 0 - self.share.log2(), 0)

    def total(self, name: str) -> Tensor:
        return self.by_name[name] * self.share

    def on(self, name: str) -> Tensor:
        return self.total(f"on {name}")

    @property
    def distance(self) -> Tensor:
        centre = self.by_name["places"] / self.by_name["total"]
        return torch.where(self.mass > 0, self.at - centre, 0)

    @property
    def spread(self) -> Tensor:
        variance = self.by_name["squares"].clamp(min=0) / self.by_name["total"]
        return torch.where(self.mass > 0, variance, 0).sqrt()

    @property
    def reach(self) -> Tensor:
        return torch.where(self.mass > 0, self.by_name["reach"], 0)

    def back(self, k: int) -> Tensor:
        return self.near[..., 1 + self.offsets.index(k)] * self.share

    def top_in(self, name: str) -> Tensor:
        return torch.where(self.mass > 0, self.marks[name][self.argmax], 0)

    @property
    def added(self) -> Tensor:
        assert self.w_o is not None
        return torch.linalg.vector_norm(self.out(self.picked) @ self.w_o.mT, dim=-1)

    def out(self, queries: Tensor) -> Tensor:
        """What the heads give for these queries, (H,n,E)."""
        out = self.call.out[self.b]
        # all of them are not copied
        return (out if len(queries) == self.T else out[:, queries]).to(self.dtype)


def run(work: Pass) -> Tensor:
    """Go over all blocks of a pass; returns its `totals`. Of a long document each thread of Python has some blocks.

    Such a thread runs on one core, and they meet once, at the end: where another program takes a core, torch's own
    threads wait for it in every small operation, and 4,096 tokens take five times as long. Short documents have too few
    blocks, and are torch's own.
    """
    inference, large = (
        torch.is_inference_mode_enabled(),
        work.H * len(work.at) * work.S >= THREADED,
    )
    threads = torch.get_num_threads() if work.device.type == "cpu" and large else 1
    if threads == 1:
        return work.run(0, 1, inference)
    try:
        with ThreadPoolExecutor(
            threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return torch.stack(
                list(
                    pool.map(lambda n: work.run(n, threads, inference), range(threads))
                )
            ).sum(0)
    finally:  # the number that a thread sets is also that of all threads which begin later
        torch.set_num_threads(threads)


class Measured(NamedTuple):
    """The statistics of one call on one document; n rows that are real and in which some head may attend something.

    A head that may attend nothing in such a row has zeros there, as its weights are.
    """

    rows: dict[str, Tensor]  # name -> (H,n) float32; of "reach" each EVERY-th row
    places: Tensor  # (n,) the numbers of those rows among the T queries
    argmax: (
        Tensor  # (H,n) the key with the largest weight; 0 where it was not looked for
    )
    received: Tensor  # (H,S) sum of the weights that each key receives
    # (H,b,b) their means over blocks; b = THUMBNAIL, or fewer where there are fewer rows or keys
    thumbnail: Tensor
    # (H,b) the part of the thumbnail's first column that the first key alone accounts for
    first_key: Tensor
    mean_out: Tensor  # (H,E) mean of the head's output over those rows


def measure(
    call: Call,
    b: int,
    document: Document,
    offsets: Sequence[int] = (),
    w_o: Tensor | None = None,
    top: bool = True,
) -> Measured:
    """All statistics of document `b` of a call.

    offsets  distances k whose mass is wanted as `offset_k`; that of 1 is `previous`, which is always there
    top      also look for the key with the largest weight, which takes time: `argmax`
    w_o      R factors of each head's block of W_O, (H,E,E), from `output_factors`; without it there is no "norm"
    """
    work = Pass(call, b, document, offsets, w_o, top)
    by_block = run(work)
    with torch.no_grad(), torch.autocast(work.device.type, enabled=False):
        work.finish()
        seen = work.seen.any(0)
        places = work.picked[seen]
        out_hne = work.out(places)
        thumbnail, first_key = work.thumbnail(by_block)
        rows = {name: formula(work)[:, seen] for name, formula in work.formulas.items()}
        if "reach" in rows:
            rows["reach"] = rows["reach"][:, ~rows["reach"].isnan().any(0)]
        return Measured(
            rows=rows,
            places=places,
            argmax=work.argmax[:, seen],
            received=by_block.sum(1),
            thumbnail=thumbnail,
            first_key=first_key,
            mean_out=out_hne.mean(1)
            if len(places)
            else out_hne.sum(1),  # of no rows it is 0
        )


@torch.no_grad()
def top_keys(call: Call, b: int, rows: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k keys with the largest weights of chosen queries, largest first: keys and weights, (H,n,k) each.

    Where a query may attend fewer than k keys, the rest have weight 0.
    """
    top, top_weights = [], []
    for keys, weights in _weights_of(call, b, rows):
        values, places = weights.topk(min(k, weights.shape[2]), dim=-1)
        # A mask may leave these queries fewer than k keys: all parts must be equally wide.
        gap = min(k, call.n_keys) - places.shape[2]
        top.append(F.pad(places + keys.start, (0, gap)))
        top_weights.append(F.pad(values, (0, gap)))
    return torch.cat(top, 1), torch.cat(top_weights, 1)


@torch.no_grad()
def row_weights(call: Call, b: int, rows: Sequence[int]) -> Tensor:
    """The weights of chosen queries over all keys, (H,n,S): for a few rows of a long text."""
    S = call.n_keys
    parts = []
    for keys, weights in _weights_of(call, b, rows):
        parts.append(F.pad(weights, (keys.start, S - keys.start - weights.shape[2])))
    return torch.cat(parts, 1)


def _weights_of(
    call: Call, b: int, rows: Sequence[int]
) -> Iterator[tuple[slice, Tensor]]:
    """Neighbouring rows together: the keys that they may see and the weights (H,t,s)."""
    # of every row: what is known of a document changes no weight
    whole_pass = Pass(call, b, Document())
    with torch.autocast(call.q.device.type, enabled=False):
        yield from map(whole_pass.weights, _runs(rows))


def _runs(rows: Sequence[int]) -> list[slice]:
    """Rows as slices, neighbours together, up to ROWS."""
    runs: list[slice] = []
    for row in rows:
        if runs and row == runs[-1].stop and row - runs[-1].start < ROWS:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
    return runs


def uniform(call: Call) -> Call:
    """The call of one head that spreads its attention evenly over what the mask allows: the control of every number.

    Where the model made the weights itself, that is what some head of the document looks at.
    """
    B, _, T, _ = call.q.shape
    S = call.n_keys
    mask = (
        call.options.mask
        if call.weights is None
        else Allowed((call.weights > 0).any(1, keepdim=True))
    )
    if mask is not None:
        # one control a layer: where masks differ, the first
        mask = mask.for_heads([0], call.q.shape[1]).without_bias()
    queries, keys = call.q.new_zeros(B, 1, T, 1), call.q.new_zeros(B, 1, S, 1)
    return call._replace(
        q=queries, k=keys, v=keys, options=Options(mask), out=queries, weights=None
    )


def output_factors(w_o: Tensor, n_heads: int) -> Tensor:
    """For each head the R (E,E) of a QR factorisation of its block of W_O: |R out| is |W_O,h out|. w_o is (C, H*E).

    So the length of what a head adds to the residual stream takes E^2 multiplications a row, and not C E.
    """
    C, width = w_o.shape
    parts_hce = w_o.detach().to(torch.promote_types(w_o.dtype, torch.float32))
    parts_hce = parts_hce.reshape(C, n_heads, width // n_heads).transpose(0, 1)
    # W'W has the squares of all sizes: it needs twice the digits
    if widest(parts_hce.device) == torch.float64:
        wide = parts_hce.double()
        factors, failed = torch.linalg.cholesky_ex(wide.mT @ wide, upper=True)
        # such an R, too, in less than half the time; of a silent head it fails
        if not failed.any():
            return factors.to(parts_hce)
    return torch.linalg.qr(parts_hce, mode="r").R


class Factors:
    """`output_factors` of each site, computed anew only when its W_O has changed."""

    def __init__(self) -> None:
        # Of each site the factors, behind the state that its W_O had when they were computed.
        self._factors: dict[Site, tuple[tuple[int, int], Tensor]] = {}

    def of(self, site: Site, call: Call) -> Tensor | None:
        w_o = site.w_o
        # Without W_O, or where `out` is not what it reads, nobody knows what a head adds.
        if w_o is None or not call.at_w_o or w_o.shape[1] % site.n_heads:
            return None
        # Where it lies, and how often it has changed: torch counts that, but not of a tensor made for inference.
        state = w_o.data_ptr(), 0 if w_o.is_inference() else w_o._version
        known, factors = self._factors.get(site, (None, None))
        if known != state:
            with loaded(*filter(None, [site.module, site.projection])):
                here = site.w_o
                assert here is not None
                factors = output_factors(here, site.n_heads)
            self._factors[site] = state, factors
        return factors


def _places(is_real: Tensor | None, length: int, device: torch.device) -> Tensor:
    """The places, of `length`, that are real."""
    return (
        torch.arange(length, device=device)
        if is_real is None
        else is_real.to(device).nonzero()[:, 0]
    )


def _even_blocks(places: Tensor) -> Tensor:
    """For each of these places the number of its block of the thumbnail: neighbours, as many in each."""
    n = len(places)
    return torch.arange(n, device=places.device) * min(THUMBNAIL, n) // max(1, n)


def _whole_runs(keys: int) -> int:
    """So many keys, and as many more as fill the last run: rounded up to a multiple of RUN."""
    return -(-keys // RUN) * RUN


def _whole_groups(heads: int, index: Sequence[int]) -> int:
    """At most that many heads, in whole groups of heads that read the same keys where such a group fits."""
    size = 1  # of the first group, as of all where they are equal
    while size < len(index) and index[size] == index[0]:
        size += 1
    return heads // size * size if heads >= size else heads
