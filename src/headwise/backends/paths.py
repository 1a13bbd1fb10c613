"""Which way a call goes on the torch backend, decided from sizes and options alone; no tensor is touched here."""

from __future__ import annotations

from typing import NamedTuple

from headwise.masks import Mask
from headwise.spec import Options, Sizes, is_adjacent

Band = tuple[int, int]  # low <= j - i <= high

# The kernel carries a sink as sink / scale, which overflows as the scale nears 0. A round choice far below scales in
# use, such as 1/sqrt(128): a smaller one lets more sinks overflow, a larger one sends more calls the explicit way.
SMALLEST_SCALE = 1e-3

# The ways. The kernel is torch's scaled_dot_product_attention, which holds no map of all scores.
EXPLICIT = "explicit"  # every step spelled out; holds (B,H,T,S) numbers
FUSED = "fused"  # one kernel call, no mask
CAUSAL = "fused causal"  # one kernel call, with its causal flag
MASKED = "fused masked"  # one kernel call, with a mask tensor
GROUPED = "grouped decode"  # one query folded over its group, so that K and V are read once a group


class Path(NamedTuple):
    """The chosen way, and what the mask has become on it."""

    name: str
    first: int  # the keys that some query sees begin here; K and V are cut to them
    last: int  # and end before here
    # what is left to forbid of windows and causal bounds within those keys; j counts all keys
    band: Band | None
    rest: tuple[Mask, ...]  # the other masks

    @property
    def keys(self) -> slice:
        return slice(self.first, self.last)


def choose(sizes: Sizes, options: Options) -> Path:
    """The way of a call."""
    first, last, band, rest = _split(options.mask, sizes)
    if why_explicit(sizes, options):
        # It reads all keys, and each mask by itself.
        return Path(
            EXPLICIT,
            0,
            sizes.S,
            None,
            () if options.mask is None else options.mask.parts(),
        )
    name = MASKED  # unless nothing is masked, or the kernel's flag says it
    if sizes.T == 1 and why_ungrouped(sizes, options) is None:
        name = GROUPED
    elif band is None and len(rest) == 0:
        name = FUSED
    elif band is not None and len(rest) == 0 and options.sink is None:
        # Does query i see keys 0 to i, of as many keys as queries? 1 - T is the least j - i: no lower bound.
        is_triangle = (
            band[0] <= 1 - sizes.T and band[1] == 0 and first == 0 and last == sizes.T
        )
        if is_triangle and (options.scale is None or options.scale > 0):
            name = CAUSAL
    return Path(name, first, last, band, rest)


def refusals(path: Path, sizes: Sizes, options: Options) -> dict[str, str]:
    """Why each other way was not taken."""
    names = (EXPLICIT, FUSED, CAUSAL, MASKED, GROUPED)
    explicit = why_explicit(sizes, options)
    if explicit:
        return dict.fromkeys((name for name in names if name != path.name), explicit)
    masked = path.band is not None or bool(path.rest)
    # Why the kernel's causal flag does not do; not asked for where it does.
    if not masked:
        no_flag = "nothing is masked"
    elif path.rest:
        no_flag = f"{', '.join(sorted({type(part).__name__ for part in path.rest}))}: the flag says no more than causal"
    elif options.sink is not None:
        no_flag = "a sink is one more key, which the flag would hide"
    elif options.scale is not None and options.scale <= 0:
        no_flag = f"scale={options.scale}: the flag hides keys by -inf before it scales, and that makes NaN"
    else:
        no_flag = "a window, or queries that begin after the first key: what is allowed is no triangle of a square"
    reasons = {
        EXPLICIT: "the fused kernel gives the same answer without holding (B,H,T,S) numbers",
        FUSED: "something is masked"
        if masked
        else "one query, folded over its group, reads K and V once a group",
        CAUSAL: no_flag,
        MASKED: "the causal flag says the same without a tensor"
        if path.name == CAUSAL
        else "nothing is masked",
        GROUPED: why_ungrouped(sizes, options) or "",
    }
    if path.name == GROUPED and masked:
        reasons[MASKED] = (
            "one query, folded over its group with its mask, reads K and V once a group"
        )
    return {name: reasons[name] for name in names if name != path.name}


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


def runs_off(band: Band, sizes: Sizes) -> bool:
    """Does a row of the band lie wholly outside the keys, so that it may attend nothing?"""
    low, high = band
    # Query i sees keys i + low to i + high: no number at all, or query 0 all before the first key, or query T-1 all
    # after the last one.
    return low > high or high < 0 or sizes.T - 1 + low > sizes.S - 1


def _split(
    mask: Mask | None, sizes: Sizes
) -> tuple[int, int, Band | None, tuple[Mask, ...]]:
    """The windows of a mask, as the range of keys that some query sees and the band left in it; the other masks.

    Comparisons rather than `min` and `max`, and no infinities: torch.compile traces these sizes as symbols, and learns
    from a comparison a condition that later sizes meet too, instead of making a graph for each size.
    """
    # the least and the greatest j - i: nothing is forbidden yet
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
    first = low if low > 0 else 0  # query 0 sees keys from 0 + low on
    # the last query sees keys up to T - 1 + high
    last = sizes.T + high if sizes.T + high < sizes.S else sizes.S
    # no query sees any key: key 0 stays, with a band that no j - i meets, as a kernel wants a key
    if first >= last:
        return 0, 1, (1, 0), tuple(rest)
    # The least j - i: the first of these keys, the last query. The greatest: the last key, the first query.
    all_see_all = low <= first - (sizes.T - 1) and high >= last - 1
    return first, last, None if all_see_all else (low, high), tuple(rest)
