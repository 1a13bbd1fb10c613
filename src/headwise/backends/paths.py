"""Which way a call goes on the torch backend, decided from sizes, options and what masks say of themselves."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import NamedTuple

from headwise.masks import Grid, Mask, Rectangle
from headwise.spec import Options, Sizes, is_adjacent

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
APART = "fused apart"  # a kernel call for each document, over its own keys
GROUPED = "grouped decode"  # one query folded over its group, so that K and V are read once a group
NAMES = (EXPLICIT, FUSED, CAUSAL, MASKED, BLOCKS, APART, GROUPED)


class Path(NamedTuple):
    """The chosen way, and what the mask has become on it."""

    name: str
    first: int  # the keys that some query sees begin here; K and V are cut to them
    last: int  # and end before here
    # what is left to forbid of windows and causal bounds within those keys; j counts all keys
    band: Band | None
    rest: tuple[Mask, ...]  # the other masks
    documents: tuple[Documents, ...] = ()  # of `APART`

    @property
    def keys(self) -> slice:
        return slice(self.first, self.last)

    @property
    def block(self) -> tuple[int, int]:
        """Queries of one of the `BLOCKS`, and the keys that it reads."""
        assert self.band is not None
        return _block(*self.band)

    def pairs(self, B: int, T: int) -> int:
        """Pairs of a query and a key that are multiplied in one head of all documents, those that a mask hides too."""
        if self.name == APART:
            return sum(group.pairs for group in self.documents)
        if self.name == BLOCKS:
            block, width = self.block
            return B * -(-T // block) * block * width
        # The kernel skips the upper triangle only with its causal flag.
        keys = self.last - self.first
        return B * (T * (T + 1) // 2 if self.name == CAUSAL else T * keys)


class Rows(NamedTuple):
    """Neighbouring queries of a document, the range of keys that their document has, and their way over those."""

    n: int
    keys: tuple[int, int]
    path: Path | None  # None: they see nothing


class Documents(NamedTuple):
    """Neighbouring documents that go the same ways."""

    n: int
    rows: list[Rows]

    @property
    def pairs(self) -> int:
        paths = [(rows.path, rows.n) for rows in self.rows]
        return sum(path.pairs(self.n, n) for path, n in paths if path is not None)


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
    if len(rest) == 0 or grid is None or sizes.T == 1:
        return path
    documents = _documents(rest, grid, sizes, low, high, options)
    cost = sum(group.pairs + CALL * len(group.rows) for group in documents)
    # A call that hides pairs takes a little longer than one that has only those that count.
    if documents and 5 * cost < 4 * path.pairs(sizes.B, sizes.T):
        return Path(APART, 0, sizes.S, None, (), documents)
    return path


def _bounds(mask: Mask | None, sizes: Sizes) -> tuple[int, int, tuple[Mask, ...]]:
    """The least and the greatest j - i that the windows of a mask leave, and the other masks.

    Comparisons rather than `min` and `max`, and no infinities: torch.compile traces these sizes as symbols, and learns
    from a comparison a condition that later sizes meet too, instead of making a graph for each size.
    """
    # nothing is forbidden yet
    low, high = 1 - sizes.T, sizes.S - 1
    rest = []
    for part in () if mask is None else mask.parts():
        band = part.band(sizes.T, sizes.S)
        if band is None:
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
        first, last, band = 0, 1, (1, 0)
    # The least j - i: the first of these keys, the last query. The greatest: the last key, the first query.
    elif low <= first - (sizes.T - 1) and high >= last - 1:
        band = None  # all see all
    name = MASKED  # unless nothing is masked, or the kernel's flag says it
    if sizes.T == 1 and why_ungrouped(sizes, options) is None:
        name = GROUPED
    elif band is None and len(rest) == 0:
        name = FUSED
    elif band is not None and len(rest) == 0:
        # Does query i see keys 0 to i, of as many keys as queries? 1 - T is the least j - i: no lower bound.
        is_triangle = (
            band[0] <= 1 - sizes.T and band[1] == 0 and first == 0 and last == sizes.T
        )
        if (
            is_triangle
            and options.sink is None
            and (options.scale is None or options.scale > 0)
        ):
            name = CAUSAL
        elif blocks and 2 * _block(*band)[1] <= last - first:
            name = MASKED if runs_off(band, sizes.T, sizes.S) else BLOCKS
    return Path(name, first, last, band, rest)


def _block(low: int, high: int) -> tuple[int, int]:
    """A quarter of a window of queries, 32 to 512, reads one and a quarter windows of keys: fewer queries waste fewer
    pairs, but the kernel is slower on a few.
    """
    queries = 32 * max(1, min(16, (high - low + 64) // 128))
    return queries, queries + high - low


def _documents(
    masks: tuple[Mask, ...],
    grid: Grid,
    sizes: Sizes,
    low: int,
    high: int,
    options: Options,
) -> tuple[Documents, ...]:
    """The ways of each document by itself; none where a mask is no set of rectangles, or nobody sees anything."""
    of_documents: list[list[Rectangle]] = [[(0, sizes.T, 0, sizes.S)]] * sizes.B
    for mask in masks:
        rectangles = mask.rectangles(grid)
        if rectangles is None:
            return ()
        of_documents = list(map(_common, of_documents, rectangles))
    groups = []
    for rectangles_of_one, same in groupby(of_documents):
        n, rows, row = len(list(same)), [], 0
        for start, stop, first, last in sorted(rectangles_of_one):
            rows.append(Rows(start - row, (first, first), None))  # what lies between
            piece = sizes._replace(B=n, T=stop - start, S=last - first)
            shift = start - first
            for count, path in _strips(piece, low + shift, high + shift, options):
                rows.append(Rows(count, (first, last), path))
            row = stop
        rows.append(Rows(sizes.T - row, (0, 0), None))
        groups.append(Documents(n, [each for each in rows if each.n]))
    is_seen = any(rows.path for group in groups for rows in group.rows)
    return tuple(groups) if is_seen else ()


def _common(ours: list[Rectangle], theirs: list[Rectangle]) -> list[Rectangle]:
    """What lies in a rectangle of both."""
    common = []
    for a, b, c, d in ours:
        for e, f, g, h in theirs:
            if max(a, e) < min(b, f) and max(c, g) < min(d, h):
                common.append((max(a, e), min(b, f), max(c, g), min(d, h)))
    return common


def _strips(
    sizes: Sizes, low: int, high: int, options: Options
) -> list[tuple[int, Path | None]]:
    """Queries of a rectangle from above to below, and the way of each: those that see no key, or all, by themselves.

        k e y s
    q   . . . .   no key yet
    u   x . . .   a triangle of a square
    e   x x . .
    .   x x x x   all keys: padding behind the text, which still may look back
    """
    begin = min(sizes.T, max(0, -high))
    end = max(begin, min(sizes.T, sizes.S - low)) if low <= high else begin
    has_window = low > 1 - sizes.T
    full = end if has_window else max(begin, min(end, sizes.S - high))
    strips: list[tuple[int, Path | None]] = []
    for start, stop in pairwise((0, begin, full, end, sizes.T)):
        n, path = stop - start, None
        if begin <= start < end and n:
            bounds = (
                max(low + start, 1 - n),
                min(high + start, sizes.S - 1),
            )
            path = _within(sizes._replace(T=n), *bounds, (), options)
        strips.append((n, path))
    return strips


def refusals(path: Path, sizes: Sizes, options: Options) -> dict[str, str]:
    """Why each other way was not taken."""
    explicit = why_explicit(sizes, options)
    if explicit:
        return dict.fromkeys((name for name in NAMES if name != path.name), explicit)
    low, high, rest = _bounds(options.mask, sizes)
    whole = _within(sizes, low, high, rest, options)
    masked = whole.band is not None or bool(rest)
    others = ", ".join(sorted({type(part).__name__ for part in rest}))
    # Why the kernel's causal flag does not do; not asked for where it does.
    if not masked:
        no_flag = "nothing is masked"
    elif rest:
        no_flag = f"{others}: the flag says no more than causal"
    elif options.sink is not None:
        no_flag = "a sink is one more key, which the flag would hide"
    elif options.scale is not None and options.scale <= 0:
        no_flag = f"scale={options.scale}: the flag hides keys by -inf before it scales, and that makes NaN"
    else:
        no_flag = "a window, or queries that begin after the first key: what is allowed is no triangle of a square"
    no_window = "no window that is narrow beside the keys, at most two fifths of them"
    grouped = (
        "one query, folded over its group with its mask, reads K and V once a group"
    )
    instead = {
        CAUSAL: "the causal flag says the same without a tensor",
        GROUPED: grouped,
        BLOCKS: "most pairs lie outside of the window: blocks of queries leave them out",
        APART: "most pairs are of two documents, or padding: documents apart leave them out",
    }
    reasons = {
        EXPLICIT: "the fused kernel gives the same answer without holding (B,H,T,S) numbers",
        FUSED: "something is masked"
        if masked
        else "one query, folded over its group, reads K and V once a group",
        CAUSAL: no_flag,
        MASKED: instead[path.name] if masked and path.name in instead else no_flag,
        BLOCKS: f"{others}: blocks know windows alone" if rest else no_window,
        APART: "masks do not tell documents apart, or too little is left out to pay for a call each"
        if rest
        else "no mask tells documents apart",
        GROUPED: why_ungrouped(sizes, options) or "",
    }
    return {name: reasons[name] for name in NAMES if name != path.name}


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


def why_ungrouped(sizes: Sizes, options: Options) -> str | None:
    """Why queries are not folded over their group; None when they are."""
    if sizes.T > 1:
        return f"T={sizes.T} queries: only a single one is folded"
    if sizes.G >= sizes.H:
        return (
            f"{sizes.G} key/value heads for {sizes.H} query heads: there are no groups"
        )
    if options.kv_index is not None and not is_adjacent(
        options.kv_index, sizes.H, sizes.G
    ):
        return "kv_index names no equal, adjacent groups: K and V are picked for each query head"
    return None


def runs_off(band: Band, T: int, S: int) -> bool:
    """Does a row of the band lie wholly outside the keys, so that it may attend nothing?"""
    low, high = band
    # Query i sees keys i + low to i + high: no number at all, or query 0 all before the first key, or query T-1 all
    # after the last one.
    return low > high or high < 0 or T - 1 + low > S - 1
