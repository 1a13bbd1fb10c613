"""`watch`: what every head did while a model ran, exactly, in memory that does not grow with T x S."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.documents import Document, Marker, listening, share_note, some_rows
from headwise.heads.measure import measure, output_factors, row_weights, top_keys
from headwise.heads.seen import Seen
from headwise.heads.statistics import all_statistics
from headwise.models.open import described
from headwise.models.sites import Site, missing, sites_of
from headwise.records import Call

MAP = 2**20  # weights of a head whose whole map is kept on request


@contextmanager
def watch(
    model: nn.Module,
    *,
    offsets: Sequence[int] = (1,),
    marks: Mapping[str, Sequence[int]] | None = None,
    top_rows: Sequence[int] = (),
    top_k: int = 5,
    maps: bool | Sequence[int] = False,
    rows: float | None = None,
    seed: int = 0,
) -> Iterator[Seen]:
    """Note what every head does while `model` runs inside this block.

        with hw.watch(model) as seen:
            model(ids)
        seen["L3.H5"].entropy          # mean over all real rows, in nats
        seen["L3.H5"].rows.entropy     # (n,) one number a row

    `model` is a GPT of ours, any module with `headwise.MultiHeadAttention` inside, or a model of transformers that goes
    through its attention interface; others are refused by name. Its own functions make its output; where our reading of
    them does not give the same, HeadwiseError says so. `seen.notes` lists what has no map. Heads are
    named `L3.H5`; in encoder-decoder models `encoder.L3.H5`, `cross.L3.H5`. Calls in other threads are not counted.

    offsets   distances k whose mass is noted: seen["L3.H5"]["offset_2"]; that of 1 is `previous`, always there
    marks     named sets of token ids whose mass is noted, such as {"delimiter": [11, 13]}: seen["L3.H5"]["delimiter"]
    top_rows  queries whose `top_k` most attended keys are noted, under `.top`
    maps      also keep each head's map (T,S), `.map`, of the last call's last document, or the rows listed: up to 2^20
    rows      a share of the rows, such as 0.125, one drawn by `seed` of each 8: seen["L3.H5"].interval("entropy")

    Statistics: `headwise.heads.statistics`. Rows are counted over all calls and documents; padding is left out.
    """
    _check(offsets, marks or {})
    shown = folder.tokens.shown if (folder := described(model)) and folder.tokens is not None else None
    seen = Seen([head for site in sites_of(model) for head in site.heads], shown, missing(model))
    seen.note(share_note(rows, seed))
    factors = Factors()

    def note(site: Site, call: Call, documents: Sequence[Document]) -> None:
        T = call.q.shape[2]
        seen.note(call.note)
        tops = [row for row in top_rows if -T <= row < T]
        for b, document in enumerate(some_rows(each, T, rows, seed) for each in documents):
            seen.add(site, measure(call, b, document, offsets, factors.of(site, call), top=False), document)
            if maps is not False:
                seen.add_maps(site, _maps(call, b, maps))
            if tops:
                seen.add_top(site, tops, *top_keys(call, b, [row % T for row in tops], top_k))

    with listening(model, note, _marker(marks) if marks else None):
        yield seen


def _marker(marks: Mapping[str, Sequence[int]]) -> Marker:
    """What says where the marked tokens stand among the keys (S,)."""
    sets = {name: torch.tensor(list(tokens)) for name, tokens in marks.items()}
    return lambda ids: {name: torch.isin(ids, tokens.to(ids.device)) for name, tokens in sets.items()}


def _maps(call: Call, b: int, maps: bool | Sequence[int]) -> Tensor:
    T, S = call.q.shape[2], call.k.shape[2]
    rows = range(T) if isinstance(maps, bool) else [row % T for row in maps if -T <= row < T]
    if len(rows) * S > MAP:
        raise HeadwiseError(
            f"maps={maps!r} keeps up to {MAP:,} weights a head, and here {len(rows):,} tokens look at {S:,}, "
            f"{len(rows) * S:,} weights; watch a shorter text, list some rows (maps=[-1]), or leave maps out: the "
            f"statistics are exact at any length"
        )
    return row_weights(call, b, rows)


def _check(offsets: Sequence[int], marks: Mapping[str, Sequence[int]]) -> None:
    if not isinstance(offsets, Sequence) or any(type(k) is not int or k < 1 for k in offsets):
        raise HeadwiseError(f"offsets={offsets!r} must be distances of at least 1, such as (1, 2)")
    table = all_statistics()
    taken = [name for name in marks if name in table and name not in table[name].needs]
    if taken:
        raise HeadwiseError(
            f"marks={taken[0]!r}: there is a statistic of that name; choose another for the set of keys"
        )


class Factors:
    """`output_factors` of each site, computed anew only when its W_O has changed."""

    def __init__(self) -> None:
        self._known: dict[Site, tuple[tuple[int, int], Tensor]] = {}

    def of(self, site: Site, call: Call) -> Tensor | None:
        w_o = site.w_o
        if w_o is None or not call.at_w_o or w_o.shape[1] % site.n_heads:
            return None
        state = w_o.data_ptr(), 0 if w_o.is_inference() else w_o._version
        if site not in self._known or self._known[site][0] != state:
            self._known[site] = state, output_factors(w_o, site.n_heads)
        return self._known[site][1]
