"""Which way a call goes on the torch backend, decided from sizes, options and what masks say of themselves."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from headwise.masks import Grid, Mask, Rectangle
from headwise.spec import Options, Sizes

Band = tuple[int, int]  # low <= j - i <= high

# The kernel carries a sink as sink / scale, which overflows as the scale nears 0. A round choice far below scales in
# use, such as 1/sqrt(128): a smaller one lets more sinks overflow, a larger one sends more calls the explicit way.
SMALLEST_SCALE = 1e-3

# Pairs of a query and a key that take about as long as one more kernel call, with backward. Measured for 8 heads of 64.
CALL = 2000

# The ways. The kernel is torch's scaled_dot_product_attention, which holds no map of all scores.
EXPLICIT = "explicit"  # every step spelled out; holds (B,H,T,S) numbers
FUSED = "fused"  # one kernel call, no mask
CAUSAL = "fused causal"  # one kernel call, with its causal flag
MASKED = "fused masked"  # one kernel call, with a mask tensor
BLOCKS = "fused blocks"  # one kernel call: blocks of queries, each over the keys of its window
APART = "fused apart"  # kernel calls for each document, over its own keys
# and when each is not taken
REASONS = {
    EXPLICIT: "the fused kernel gives the same answer without holding (B,H,T,S) numbers",
    FUSED: "it is for calls in which nothing is masked",
    CAUSAL: "its flag is for a triangle of a square: a causal mask alone, as many queries as keys, no sink, a scale "
    "above 0",
    MASKED: "nothing is masked, or another way leaves out what is",
    BLOCKS: "it is for a window alone, at most two fifths as wide as the keys",
    APART: "it is for one mask that tells documents or padding apart, beside causal bounds, where that leaves out "
    "enough to pay for a call each",
}


class Path(NamedTuple):
    """The chosen way, and what the mask has become on it."""

    name: str
    first: int  # the keys that some query sees begin here; K and V are cut to them
    last: int  # and end before here
    # what is left to forbid of windows and causal bounds within those keys; j counts all keys
    band: Band | None
    rest: tuple[Mask, ...]  # the other masks
    # of `APART`: how many neighbouring documents go the same ways, and which
    documents: tuple[tuple[int, list[Rows]], ...] = ()

    @property
    def keys(self) -> slice:
        return slice(self.first, self.last)

    def pairs(self, B: int, T: int) -> int:
        """Pairs of a query and a key that are multiplied in one head of all documents, those that a mask hides too."""
        if self.name == APART:
            return sum(_pairs(self.documents))
        if self.name == BLOCKS and self.band:
            block, width = block_of(*self.band)
            return B * -(-T // block) * block * width
        # The kernel skips the upper triangle only with its causal flag.
        keys = self.last - self.first
        return B * (T * (T + 1) // 2 if self.name == CAUSAL else T * keys)


class Rows(NamedTuple):
    """Neighbouring queries of a document, the range of keys that they are held against, and their way over those."""

    n: int
    keys: tuple[int, int]
    path: Path | None  # None: they see nothing


def choose(
    sizes: Sizes, options: Options, grid: Grid | None = None, blocks: bool = True
) -> Path:
    """The way of a call; without a grid no mask is asked for its numbers, and without `blocks` there are none."""
    if why_explicit(sizes, options):
        # It reads all keys, and each mask by itself.
        masks = () if options.mask is None else options.mask.parts()
        return Path(EXPLICIT, 0, sizes.S, None, masks)
    low, high, rest = _bounds(options.mask, sizes)
    path = _within(sizes, low, high, rest, options, blocks)
    if len(rest) != 1 or grid is None or sizes.T == 1:
        return path
    rectangles = rest[0].rectangles(grid) or []
    documents = tuple(
        (len(list(same)), _rows(of_one, sizes, low, high, options))
        for of_one, same in groupby(rectangles)
    )
    seen = _pairs(documents)
    # A call that hides pairs takes a little longer than one that has only those that count.
    if seen and 5 * (sum(seen) + CALL * len(seen)) < 4 * path.pairs(sizes.B, sizes.T):
        return Path(APART, 0, sizes.S, None, (), documents)
    return path


def _pairs(documents: tuple[tuple[int, list[Rows]], ...]) -> list[int]:
    """Pairs of each call of the kernel."""
    calls = [(n, row) for n, rows in documents for row in rows]
    return [row.path.pairs(n, row.n) for n, row in calls if row.path]


def _bounds(mask: Mask | None, sizes: Sizes) -> tuple[int, int, tuple[Mask, ...]]:
    """The least and the greatest j - i that the windows of a mask leave, and the other masks.

    Comparisons rather than `min` and `max`, and no infinities: torch.compile traces these sizes as symbols, and learns
    from a comparison a condition that later sizes meet too, instead of making a graph for each size.
    """
    # nothing is forbidden yet
    low = 1 - sizes.T
    high = sizes.S - 1
    rest = []
    for part in () if mask is None else mask.parts():
        band = part.band(sizes.T, sizes.S)
        if not band:
            rest.append(part)
            continue
        part_low, part_high = band
        if part_low is not None and part_low > low:
            low = part_low
        if part_high is not None and part_high < high:
            high = part_high
    return low, high, tuple(rest)


def _within(
    sizes: Sizes,
    low: int,
    high: int,
    rest: tuple[Mask, ...],
    options: Options,
    blocks: bool = True,
) -> Path:
    """The way of a call whose queries i see keys i + low to i + high, as far as `rest` lets them."""
    first = low if low > 0 else 0  # query 0 sees keys from 0 + low on
    # the last query sees keys up to T - 1 + high
    last = sizes.T + high if sizes.T + high < sizes.S else sizes.S
    band: Band | None = (low, high)
    # no query sees any key: key 0 stays, with a band that no j - i meets, as a kernel wants a key
    if first >= last:
        first = 0
        last = 1
        band = (1, 0)
    # The least j - i: the first of these keys, the last query. The greatest: the last key, the first query.
    elif low <= first - (sizes.T - 1) and high >= last - 1:
        band = None  # all see all
    name = MASKED  # unless nothing is masked, or the kernel's flag says it
    if not band and len(rest) == 0:
        name = FUSED
    elif band and len(rest) == 0:
        # Does query i see keys 0 to i, of as many keys as queries? 1 - T is the least j - i: no lower bound.
        is_triangle = (
            band[0] <= 1 - sizes.T and band[1] == 0 and first == 0 and last == sizes.T
        )
        # The flag would hide a sink, which is one more key; and it hides by -inf before it scales.
        scales_up = options.scale is None or options.scale > 0
        if is_triangle and options.sink is None and scales_up:
            name = CAUSAL
        elif blocks and 2 * block_of(*band)[1] <= last - first:
            name = MASKED if runs_off(band, sizes.T, sizes.S) else BLOCKS
    return Path(name, first, last, band, rest)


def block_of(low: int, high: int) -> tuple[int, int]:
    """Queries of one of the `BLOCKS`, and the keys that it reads.

    A quarter of a window of queries, 32 to 512, reads one and a quarter windows of keys: fewer queries waste fewer
    pairs, but the kernel is slower on a few.
    """
    queries = 32 * max(1, min(16, (high - low + 64) // 128))
    return queries, queries + high - low


def _rows(
    rectangles: list[Rectangle], sizes: Sizes, low: int, high: int, options: Options
) -> list[Rows]:
    """The queries of one document from above to below: those that see no key, or all of a rectangle, by themselves.

        k e y s
    q   . . . .   no key yet
    u   x . . .   a triangle of a square
    e   x x . .
    .   x x x x   all keys: padding behind the text, which still may look back
    """
    rows = []
    done = 0
    for start, stop, first, last in sorted(rectangles):
        begin = min(stop, max(start, first - high))
        end = min(stop, max(begin, last - low))
        has_window = low > 1 - sizes.T
        full = end if has_window else min(end, max(begin, last - high))
        if full == begin + 1:  # the first of them sees all keys, too
            full = begin
        rows.append(Rows(begin - done, (first, first), None))
        for top, bottom in ((begin, full), (full, end)):
            piece = sizes._replace(B=1, T=bottom - top, S=last - first)
            shift = top - first
            path = _within(piece, low + shift, high + shift, (), options)
            rows.append(Rows(bottom - top, (first, last), path))
        done = end
    rows.append(Rows(sizes.T - done, (0, 0), None))
    return [each for each in rows if each.n]


def why_explicit(sizes: Sizes, options: Options) -> str | None:
    """Why the fused kernel cannot give the answer; None when it can."""
    # its number is not named: torch.compile may take it for a symbol
    if options.softcap is not None:
        return "softcap: the kernel has no step between scores and softmax"
    if (
        options.sink is not None
        and options.scale is not None
        and abs(options.scale) < SMALLEST_SCALE
    ):
        return "sink with a scale near 0: the kernel carries the sink as sink / scale, which overflows"
    # D = 0 is refused before.
    if any(n == 0 for n in (sizes.B, sizes.H, sizes.T, sizes.S, sizes.E)):
        return "an axis is empty: not every kernel takes that"
    return None


def runs_off(band: Band, T: int, S: int) -> bool:
    """Does a row of the band lie wholly outside the keys, so that it may attend nothing?"""
    low, high = band
    # Query i sees keys i + low to i + high: no number at all, or query 0 all before the first key, or query T-1 all
    # after the last one.
    return low > high or high < 0 or T - 1 + low > S - 1
