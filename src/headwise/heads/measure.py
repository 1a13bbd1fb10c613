"""All statistics of one call on one document, exactly, in memory that does not grow with T x S.

Formulas: `headwise.heads.statistics`. Beside them there are, for each head,

    received    sum of p over the queries, for each key
    thumbnail   mean of p over blocks of queries x keys
    mean_out    mean of the head's output
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.heads import blocks
from headwise.heads.blocks import Layout, Pass, Sums
from headwise.heads.documents import Document
from headwise.records import Call
from headwise.rungs.tensor import widest
from headwise.spec import Options


class Measured(NamedTuple):
    """The statistics of one call on one document; n rows that are real and in which some head may attend something.

    A head that may attend nothing in such a row has zeros there, as its weights are.
    """

    rows: dict[str, Tensor]  # name -> (H,n) float32
    places: Tensor  # (n,) the numbers of those rows among the T queries
    argmax: Tensor  # (H,n) the key with the largest weight; 0 where it was not looked for
    received: Tensor  # (H,S)
    thumbnail: Tensor  # (H,b,b), b = THUMBNAIL, or fewer where there are fewer rows or keys
    first_key: Tensor  # (H,b) the part of the thumbnail's first column that the first key alone accounts for
    mean_out: Tensor  # (H,E) mean of the head's output over those rows


def measure(
    call: Call, b: int, document: Document, offsets: Sequence[int] = (), w_o: Tensor | None = None, top: bool = True
) -> Measured:
    """All statistics of document `b` of a call.

    offsets  distances k whose mass is wanted as `offset_k`; that of 1 is `previous`, which is always there
    top      also look for the key with the largest weight, which takes time: `argmax`
    w_o      R factors of each head's block of W_O, (H,E,E), from `output_factors`; without it there is no "norm"
    """
    H, T = call.q.shape[1:3]
    S = call.k.shape[2]
    device = call.q.device
    work = Pass(call, b, document, Layout.of(document, T, S, device), offsets, w_o, top)
    by_block = run(work)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        sums = Sums(work)
        seen = sums.seen.any(0)
        places = torch.nonzero(seen)[:, 0] if work.picked is None else work.picked[seen]
        out_hte = call.out[b, :, slice(None) if len(places) == T else places].to(work.dtype)
        thumbnail, first_key = work.layout.thumbnail(by_block)
        return Measured(
            rows={name: formula(sums)[:, seen] for name, formula in work.formulas.items()},
            places=places,
            argmax=work.argmax[:, seen],
            received=by_block.sum(1),
            thumbnail=thumbnail,
            first_key=first_key,
            mean_out=out_hte.mean(1) if len(places) else out_hte.new_zeros(H, out_hte.shape[2]),
        )


@torch.no_grad()
def top_keys(call: Call, b: int, rows: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """The k keys with the largest weights of chosen queries, largest first: keys and weights, (H,n,k) each.

    Where a query may attend fewer than k keys, the rest have weight 0.
    """
    top, top_weights = [], []
    for keys, weights in _weights_of(call, b, rows):
        values, places = weights.topk(min(k, weights.shape[2]), dim=-1)
        gap = min(k, call.k.shape[2]) - places.shape[2]
        top.append(F.pad(places + keys.start, (0, gap)))
        top_weights.append(F.pad(values, (0, gap)))
    return torch.cat(top, 1), torch.cat(top_weights, 1)


@torch.no_grad()
def row_weights(call: Call, b: int, rows: Sequence[int]) -> Tensor:
    """The weights of chosen queries over all keys, (H,n,S): for a few rows of a long text."""
    S = call.k.shape[2]
    return torch.cat([F.pad(w, (keys.start, S - keys.start - w.shape[2])) for keys, w in _weights_of(call, b, rows)], 1)


def _weights_of(call: Call, b: int, rows: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Neighbouring rows together: the keys that they may see and the weights (H,t,s)."""
    nothing = Document()
    whole = Pass(call, b, nothing, Layout.of(nothing, call.q.shape[2], call.k.shape[2], call.q.device))
    with torch.autocast(call.q.device.type, enabled=False):
        yield from map(whole.weights, _runs(rows))


def _runs(rows: Sequence[int]) -> list[slice]:
    """Rows as slices, neighbours together."""
    runs: list[slice] = []
    for row in rows:
        if runs and row == runs[-1].stop and row - runs[-1].start < blocks.ROWS:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
    return runs


def output_factors(w_o: Tensor, n_heads: int) -> Tensor:
    """For each head the R (E,E) of a QR factorisation of its block of W_O: |R out| is |W_O,h out|. w_o is (C, H*E)."""
    C, width = w_o.shape
    blocks_hce = w_o.detach().to(torch.promote_types(w_o.dtype, torch.float32))
    blocks_hce = blocks_hce.reshape(C, n_heads, width // n_heads).transpose(0, 1)
    factors: Tensor
    if widest(blocks_hce.device) == torch.float64:
        wide = blocks_hce.double()
        factors, failed = torch.linalg.cholesky_ex(wide.mT @ wide, upper=True)
        if not failed.any():  # as for a silent head; else it is such an R, too, in less than half the time
            return factors.to(blocks_hce)
    factors = torch.linalg.qr(blocks_hce, mode="r").R
    return factors


def run(work: Pass) -> Tensor:
    """All blocks. Of a long document each thread of Python has some, which runs on one core.

    They meet once at the end: where another program takes a core, torch's own threads wait for it in every small
    operation, and 4,096 tokens take five times as long. Short documents have too few blocks, and are torch's own.
    """
    inference, large = torch.is_inference_mode_enabled(), work.H * len(work.at) * work.S >= blocks.THREADED
    threads = torch.get_num_threads() if work.device.type == "cpu" and large else 1
    if threads == 1:
        return work.run(0, 1, inference)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.stack(list(pool.map(lambda n: work.run(n, threads, inference), range(threads)))).sum(0)
    finally:
        torch.set_num_threads(threads)


def uniform(call: Call) -> Call:
    """The call of one head that spreads its attention evenly over what the mask allows: the control of every number."""
    B, _, T, _ = call.q.shape
    S = call.k.shape[2]
    mask = call.options.mask
    if mask is not None:
        mask = mask.for_heads([0], call.q.shape[1]).without_bias()
    queries, keys = call.q.new_zeros(B, 1, T, 1), call.q.new_zeros(B, 1, S, 1)
    return call._replace(q=queries, k=keys, v=keys, options=Options(mask), out=queries)
