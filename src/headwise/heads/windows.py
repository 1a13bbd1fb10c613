"""`windows`: how far back every key/value head looks, exactly, at any length, and whether it finds a needle.

A needle is a few random tokens planted in a text and begun again at its end: a head that looks things up finds what
followed. All numbers are of key/value heads, since a cache drops keys for all heads of a group together: the query
head that looks farthest counts.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.corpus.documents import Text
from headwise.corpus.tokens import TextTokens
from headwise.gpt.presets import check_seed
from headwise.heads.blocks import Pass, Strip, Sums, row_weights, run
from headwise.heads.documents import Document, listening, run_documents
from headwise.heads.survey import Progress
from headwise.heads.survey import forecast as reading_time
from headwise.heads.tally import Running
from headwise.heads.texts import Texts, read_texts
from headwise.models import ask
from headwise.models.open import folder_of, open_model
from headwise.models.sites import Site
from headwise.plan import SHARES, SINKS, KVReach, Windows
from headwise.records import Call, parse_head
from headwise.rungs.tensor import widest
from headwise.spec import resolve_kv_index
from headwise.words import Note

# Round choices.
SMALLEST = 16  # the smallest window that is measured, in tokens
NEEDLES = 8  # of a corpus, each planted at another depth: more make the intervals narrower, and take longer
NEEDLE = 8  # tokens of one
# A model that completes less than this fraction of the needles looks up too little to tell its heads by them: a note
# says so.
FEW = 0.5

# Site -> "outside", "reached" (see `distances`), "needle", "lift" (see `_find_needles`) -> its key/value heads.
Gathered = dict[str, dict[str, Running]]


def windows(
    model: nn.Module | str | Path,
    texts: Texts | Text | None = None,
    *,
    tokenizer: TextTokens | Any = None,
    tokens: int | None = None,
    documents: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Windows:
    """How far back every key/value head looks: `hw.windows("runs/book")["L3.KV1"].reached`.

    The mass outside the first s and last w tokens, for several s and w; the distances within which half of the mass,
    or nearly all of it, lies; and the mass on what continues a needle: random tokens, planted in the text and begun
    again at its end. The arguments are those of `survey`; `seed` draws the needles. Memory grows with the length of a
    text, not with its square.

    Raises:
        HeadwiseError: for a model that does not predict the next token, or a text that does not fit.
    """
    check_seed(seed)
    folder = folder_of(open_model(model), tokenizer)
    progress = progress or (lambda *counts: None)  # called with the name of a stage, what is done, and all
    ask.require_next(folder.model)
    text = read_texts(folder, texts, tokens, documents)
    longest = max(map(len, text.documents))
    sizes, window = [], SMALLEST  # 16, 32, 64, ..., and the longest document, which is the window that sees all
    while window < longest:
        sizes.append(window)
        window *= 2
    sizes.append(longest)
    seen: Gathered = defaultdict(lambda: defaultdict(Running))

    def take(number: int, site: Site, call: Call, b: int, document: Document) -> None:
        outside, reached = distances(call, b, document, sizes)
        # A text without a needle says nothing of one: `Running` leaves NaNs out. They make room for the heads, also
        # where no needle can be planted.
        unknown = torch.full((call.q.shape[1],), math.nan)
        _add(seen, site, call, outside=outside, reached=reached, needle=unknown, lift=unknown)

    run_documents(folder.model, text.documents, take, progress=partial(progress, "running the model"))
    share = _find_needles(folder.model, plant_needles(text, longest, seed), seen, partial(progress, "needles"))
    if share is None:
        about_needles = Note.of("note.no_needles", longest=longest)
    else:
        about_needles = Note.of("note.few_needles" if share < FEW else "note.needles", share=f"{share:.0%}")
    return Windows(
        model=folder.name,
        texts=text.sources,
        n_documents=len(text.documents),
        n_tokens=sum(map(len, text.documents)),
        longest=longest,
        windows=tuple(sizes),
        heads=tuple(reach for site, values in seen.items() for reach in _heads(site, values, len(sizes))),
        needle_found=share,
        notes=(*filter(None, [text.note, *text.about]), about_needles),  # an empty line is none
    )


def forecast(model: nn.Module, text: Text) -> str:
    """How long `windows` takes for a text, needles and all, in a line; nothing where that is seconds."""
    longest = max(text.documents, key=len)

    def listener(site: Site, call: Call, documents: Sequence[Document]) -> None:
        distances(call, 0, documents[0], [SMALLEST])  # takes as long with one window as with all

    documents = [*text.documents, *[longest] * NEEDLES]  # a text with a needle is as long as the longest document
    return reading_time(model, documents, reading=lambda model: listening(model, listener))


class _Distances(Pass):
    """A pass over the weights, block by block, that sums them up by distance, and keeps those on the first keys.

    It replaces what `Pass` does with each block: `totals` is what the blocks are added to, `_add` adds one.
    """

    def __init__(self, call: Call, b: int, document: Document) -> None:
        document = replace(document, marks=None)  # sums over marked keys would stand before the three that are kept
        super().__init__(call, b, document)
        # No statistics are asked for, nor the weights at chosen offsets before the query.
        self.formulas, self.offsets = {}, []
        # Less to add up: of the sums `distances` needs none but "share", "total" and "shifted", which stand first. Of
        # the near keys the first stays, with or without offsets: every block writes its weight.
        self.names, self.sums = self.names[:3], self.sums[:3]
        self.near = self.near[..., :1]
        self.start = document.start or 0  # the key at which query 0 stands, behind those of a cache
        # (H,T,first) the weights of each query on the first keys, as many as the most sinks that are asked for.
        self.early = torch.zeros(self.H, self.T, max(SINKS), dtype=self.dtype, device=self.device)

    def totals(self) -> Tensor:
        """(H,n) the weights by distance: column n has the keys that lie n tokens back."""
        return torch.zeros(self.H, self.T + self.start, dtype=widest(self.device), device=self.device)

    def _add(self, totals: Tensor, e: Tensor, share: Tensor, heads: slice, strip: Strip) -> None:
        """Sum up the diagonals of a block: on each of them query and key are equally far from each other.

        The weights are e (h,t,s) times share (h,t), of t queries and the s keys that they may see. The queries are
        neighbours: documents that run by themselves have no padding.
        """
        h, t, s = e.shape
        keys, width = strip.keys, s + t
        # Each row of the block is written behind t zeros, so that it is `width` long. The same numbers are then read as
        # rows of width + 1: each begins one place further left in its row, and a column is a diagonal of the block. Two
        # queries a and b with three keys, where a dot is a zero:
        #
        #     written  . . a0 a1 a2     read  . . a0 a1 a2 .
        #              . . b0 b1 b2           . b0 b1 b2 . .
        #              . .
        #
        # The column of a1 is that of b2, one key further on for a query one further on.
        skewed = e.new_zeros(h, t * (width + 1))
        p = skewed[:, : t * width].view(h, t, width)[..., t:]  # (h,t,s) the places of the block there
        torch.mul(e, share[..., None], out=p)  # the weights
        diagonals = skewed.view(h, t, width + 1).sum(1)
        # The first column holds nothing, the second the largest distance, and the last is of no key again: it lies one
        # further on than the last key. Flipped, the distances ascend.
        by_distance = diagonals[:, 1:].flip(1).to(widest(self.device))
        nearest = int(strip.at[0]) - s  # the first of these distances; `at` counts from the first key of the block
        # Below 0 a key stands behind its query: a model that predicts the next token gives it no weight, so these are
        # left out.
        ahead = max(0, -nearest)
        totals[heads, max(0, nearest) : nearest + width] += by_distance[:, ahead:]
        if keys.start < max(SINKS):  # the block begins early enough to have some of the first keys
            last = min(keys.stop, max(SINKS))
            self.early[heads, strip.queries, keys.start : last] = p[..., : last - keys.start]


@torch.no_grad()
def distances(call: Call, b: int, document: Document, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How far each query head looks in document `b` of a call, in two tables.

    First, (H, sinks, windows), the mass outside the first tokens, as many as each of SINKS, and the last ones, as
    many as each of `sizes`: a mean over queries. The window of a query counts its own token: w = 1 is that token alone.
    Second, (H, shares), the distances within which each part of SHARES of the mass lies.
    """
    work = _Distances(call, b, document)
    behind = run(work).cpu().double()  # (H,N) by distance
    early = work.early.cpu().double()  # (H,T,first) by query
    n_rows = max(1, int(Sums(work).seen.any(0).sum()))  # queries that may see a key, in some head
    length = behind.shape[1]
    query, key = torch.arange(early.shape[1]), torch.arange(early.shape[2])
    distance = work.start + query[:, None] - key  # below 0, of a key behind its query: the weight there is 0
    # (H,N,first) The weights on each of the first keys by their distance; then on the first 0, 1, 2, ... keys together.
    on_first = early.new_zeros(len(early), length, early.shape[2])
    on_first.scatter_add_(1, distance.clamp(min=0).expand_as(early), early)
    # The zeros that are put before them are those of no key, for 0 sinks.
    on_sinks = F.pad(on_first.cumsum(2), (1, 0))[..., list(SINKS)]
    lost = behind[..., None] - on_sinks  # (H,N,sinks) what is not on them, by distance
    # (H,N+1,sinks) At n all that lies n or more tokens back, summed from the end; at N, for the largest window, 0.
    farther = F.pad(lost.flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
    outside = farther[:, [min(window, length) for window in sizes]]  # (H,windows,sinks)
    within = behind.cumsum(1)  # (H,N) at n all that lies n or fewer tokens back
    shares = within[:, -1:] * torch.tensor(SHARES, dtype=within.dtype)
    # What rounding alone leaves below a share has reached it. 1e-12 is a round choice: of some thousand queries the
    # rounding of a sum stays below it, and a weight that counts lies far above.
    reached = torch.searchsorted(within, shares - 1e-12).clamp(max=length - 1)
    return outside.mT.clamp(min=0) / n_rows, reached.double()  # rounding may leave a difference below 0


def plant_needles(text: Text, longest: int, seed: int) -> list[tuple[list[int], int, int]]:
    """Documents with a needle: their ids, where the needle begins, and its last token, which the end asks for.

    A needle is NEEDLE tokens of the text, no two alike, that stand nowhere else in the document. All but its last one
    come again at the end. `longest` is the length of each document in tokens; where it is too short there are none.
    """
    before, _ = text.frame  # what a document begins with, such as [BOS]
    candidates = sorted(set(text.counts) - text.specials)
    room = longest - len(before) - 2 * NEEDLE + 1  # beside the needle, and the needle without its last token at the end
    # Too short for a needle to be searched in; or without enough other tokens to fill the text with, for without any
    # `islice` below would never end. As many as a needle has are asked for, a round choice.
    if room < NEEDLE or len(candidates) < 2 * NEEDLE:
        return []
    generator = torch.Generator().manual_seed(seed)
    planted = []
    documents = itertools.cycle(text.documents)  # each haystack begins with the next one that no other has begun
    for n in range(NEEDLES):
        tokens = itertools.chain.from_iterable(documents)  # endless: `documents` begins again after the last one
        needle = [candidates[i] for i in torch.randperm(len(candidates), generator=generator)[:NEEDLE]]
        others = (i for i in tokens if i not in needle and i not in text.specials)
        hay = list(itertools.islice(others, room))
        depth = n * room // NEEDLES  # from 0, the beginning of the text, in even steps to near its end
        question, answer = needle[:-1], needle[-1]
        ids = [*before, *hay[:depth], *needle, *hay[depth:], *question]
        planted.append((ids, len(before) + depth, answer))
    return planted


def _find_needles(
    model: nn.Module,
    planted: Sequence[tuple[list[int], int, int]],
    seen: Gathered,
    progress: Callable[[int, int], None],
) -> float | None:
    """Note how the tokens that begin a needle again look at what follows them in it; the share that is completed.

    "needle" is a head's weight on the answers, a mean over these tokens. "lift" is the natural log of that over its
    control, the rest of the needle: the same head, at nearly the same distance, where the answer does not stand.
    """
    right = 0  # needles that the model completes
    device = next(model.parameters()).device

    def note(place: int, length: int, site: Site, call: Call, documents: Sequence[Document]) -> None:
        # The last rows, in which all tokens of the needle but its last stand again; `place` is where it was planted.
        weights = row_weights(call, 0, range(length - NEEDLE + 1, length)).cpu().double()
        n = NEEDLE - 1  # tokens of a needle that are followed by another of it
        # (H,n,n) The keys are the tokens of the needle from its second on: the answer to row i is key i.
        at_needle = weights[..., place + 1 : place + NEEDLE]
        answers = at_needle.diagonal(dim1=1, dim2=2).sum(1)  # over the n rows
        others = (at_needle.sum((1, 2)) - answers) / (n - 1)  # each row's mean over the keys that are not its answer
        # n rows of even attention would give a key n / length. Added on both sides, it lets weights far below it count
        # as none.
        lift = ((answers + n / length) / (others + n / length)).log()
        _add(seen, site, call, needle=answers / n, lift=lift)  # (H,) each

    for n, (ids, place, last) in enumerate(planted):
        with torch.no_grad(), listening(model, partial(note, place, len(ids))), ask.evaluating(model):
            row = ask.logits(model, torch.tensor([ids], device=device), last=True)[0, -1]  # (V,)
        right += int(row.argmax()) == last
        progress(n + 1, len(planted))
    return right / len(planted) if planted else None


def _add(seen: Gathered, site: Site, call: Call, **of_heads: Tensor) -> None:
    """Add numbers of the query heads (H,...), of which the largest of each key/value head counts, (G,...).

    A key must be kept for the head of a group that looks farthest.
    """
    H, G = call.q.shape[1], call.k.shape[1]
    index = torch.tensor(resolve_kv_index(H, G, call.options.kv_index))  # (H,) of each head its key/value head
    for name, values in of_heads.items():
        seen[site.name][name].add(torch.stack([values[index == g].amax(0) for g in range(G)]).numpy())


def _heads(site: str, values: dict[str, Running], n_windows: int) -> list[KVReach]:
    # The key/value heads of a site, from what `_add` has gathered: each number with its interval over documents.
    layer = parse_head(f"{site}.H0")[1]  # the number in the name of the site, as any of its heads has it
    heads = []
    for g in range(len(values["outside"].mean)):
        outside = []
        for s in range(len(SINKS)):
            outside.append(tuple(values["outside"].interval(g, s, w).of_fraction() for w in range(n_windows)))
        reached = tuple(values["reached"].interval(g, n) for n in range(len(SHARES)))
        needle, lift = values["needle"].interval(g).of_fraction(), values["lift"].interval(g)
        heads.append(KVReach(f"{site}.KV{g}", layer, g, tuple(outside), reached, needle, lift))
    return heads
