"""The mask algebra: who may look at whom, written once for every backend.

A mask answers two questions about query i, key j, head h and document b: may i look at j, and what is added to the
score. The answers are written with ordinary operators on indices, and a `Grid` supplies those: whole numbers on the
loop backend, broadcastable index arrays on the others. So one line, `j <= i + offset`, is the loop and the vector form.

    Causal()  T=3, S=5, offset = S - T = 2      Window(1, 0)          Causal() & Lengths([4])
              1 1 1 0 0                         0 1 1 0 0             1 1 1 0 0
              1 1 1 1 0                         0 0 1 1 0             1 1 1 1 0
              1 1 1 1 1                         0 0 0 1 1             1 1 1 1 0

Rows are queries, columns are keys, 1 = may attend.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import reduce
from itertools import compress, islice, pairwise
from typing import Any, Protocol

from headwise.errors import HeadwiseError
from headwise.shapes import check_even, flat, kind_of, shape_of


class Grid(Protocol):
    """One backend's view of all (b, h, i, j): numbers, or arrays that broadcast to (B, H, T, S)."""

    B: int
    H: int
    T: int
    S: int

    i: Any  # query position, 0 to T-1
    j: Any  # key position, 0 to S-1

    def pick(self, values: Any, axes: str) -> Any:
        """`values`, whose axes are named by letters of "bhts", at this grid's place or broadcast along it.

        With the axes "bhts" the values may leave out leading axes and have length 1 where they broadcast.
        """

    def read(self, values: Any) -> Iterable[Any]:
        """The numbers of `values`, for a check; none where they cannot be known yet."""


class BroadcastGrid:
    """The grid as index arrays that broadcast to (B, H, T, S), for NumPy and torch alike.

    `array` turns values into the backend's array, `arange` makes its indices, `known` says whether numbers can be
    looked at: not those of a tensor that torch traces. `keys`, `queries` and `documents` restrict the grid to a range
    of each; B, H, T, S stay the lengths of the whole call.
    """

    def __init__(
        self,
        lengths: tuple[int, int, int, int],
        array: Callable[[Any], Any],
        arange: Callable[[int], Any],
        keys: slice = slice(None),
        known: Callable[[Any], bool] = lambda values: True,
        queries: slice = slice(None),
        documents: slice = slice(None),
    ) -> None:
        self._known = known
        self.B, self.H, self.T, self.S = lengths
        self._array = array
        self._parts = documents, slice(None), queries, keys
        self.i = arange(self.T).reshape(self.T, 1)[queries]
        self.j = arange(self.S)[keys]

    def of_keys(self, keys: slice) -> BroadcastGrid:
        """The same grid over some of the keys alone."""
        part = copy(self)
        part._parts = (*self._parts[:3], keys)
        part.j = self.j[keys]
        return part

    def read(self, values: Any) -> Iterable[Any]:
        return flat(values) if self._known(values) else ()

    def pick(self, values: Any, axes: str) -> Any:
        array = self._array(values)
        # Leading axes may be left out: values of two axes have the last two letters.
        letters = axes[len(axes) - array.ndim :]
        full = dict(zip("bhts", (self.B, self.H, self.T, self.S), strict=True))
        parts = dict(zip("bhts", self._parts, strict=True))
        # What broadcasts has length 1; the whole of an axis, 1 included, is cut to the part at hand.
        cuts = []
        for axis, n in zip(letters, array.shape, strict=True):
            cuts.append(parts[axis] if n == full[axis] else slice(None))
        array = array[tuple(cuts)]
        if axes == "bhts":
            return array
        # An axis that the values have not gets length 1: (B,S) of "bs" -> (B,1,1,S).
        lengths = dict(zip(letters, array.shape, strict=True))
        return array.reshape([lengths.get(axis, 1) for axis in "bhts"])


Band = tuple[int | None, int | None]  # low <= j - i <= high; None: open on that side
# queries from, to; keys from, to; ends are not in
Rectangle = tuple[int, int, int, int]
Rectangles = list[list[Rectangle]]  # of each document
# of a mask that compares positions, see `Shifted`; B numbers may be an array
Offset = int | Sequence[int] | Any


class Mask:
    """Base of all masks. `a & b` allows what both allow and adds up their biases.

    A mask of your own needs `allowed` or `bias`. The other methods answer what backends, layers, caches and statistics
    must know; their defaults are safe for any mask, and a better answer saves work, or lifts a refusal.
    """

    alike = False  # is it the same for all heads? A class says so; nothing finds it out

    def check(self, grid: Grid) -> None:
        """Raise HeadwiseError when the mask does not fit this call's sizes. Each backend calls it once."""

    def allowed(self, grid: Grid) -> Any:
        """Bool on the grid, True = may attend; None when every pair may."""
        return None

    def bias(self, grid: Grid) -> Any:
        """Float on the grid, added to the scores after the softcap; None when there is nothing to add."""
        return None

    def parts(self) -> tuple[Mask, ...]:
        """The masks that are joined by `&`, flattened."""
        return (self,)

    def band(self, T: int, S: int) -> Band | None:
        """The bounds on j - i, where they are all that the mask says: alike for documents and heads, and no bias."""
        return None

    def rectangles(self, grid: Grid) -> Rectangles | None:
        """Of each document the rectangles inside which all may attend and outside which nobody, where that is all that
        the mask says. No two of a document share a query or a key. None, too, where the grid cannot read numbers.
        """
        return None

    def bias_may_forbid(self) -> bool:
        """Can the bias be -inf? Then a key that nobody may attend is never read, as if `allowed` had forbidden it."""
        return True

    def counts_from_first(self) -> bool:
        """Does it count positions from the first key? A rolling cache, which drops that key, cannot serve it.

        Not the opposite of `aligned`, which is about queries: a mask that is an array is neither.
        """
        return True

    def aligned(self) -> bool | None:
        """Do queries stand at the end of the keys, or where an offset puts them? None: neither is known."""
        return None

    def real_length(self, b: int) -> int | None:
        """How many tokens of document b are real, where the mask knows; the rest are padding."""
        return None

    def packed(self) -> Any:
        """Ids (B,T) of the packed documents that the queries belong to, where the mask knows."""
        return None

    def rows(self, start: int, end: int, first: int, is_causal: bool) -> Mask:
        """The mask of a whole text for a call of its queries `start` to `end`, with keys `first` to `end`.

        is_causal  another mask forbids all later keys
        """
        # what is aligned stands at the end of the keys by itself
        if not start or self.aligned():
            return self
        return Part(self, "t", range(start, end), end)

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        """The mask of a call that has only those of its `n_heads` heads, in that order."""
        return self if self.alike else Part(self, "h", heads, n_heads)

    def without_bias(self) -> Mask:
        """The mask that allows the same and adds nothing."""
        return WithoutBias(self)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise bare_mask_error(other)
        return Both(self.parts() + other.parts())

    def __rand__(self, other: object) -> Mask:
        raise bare_mask_error(other)


def bare_mask_error(mask: object) -> HeadwiseError:
    """What to raise where an array stands for a mask: the two polarities in the field contradict each other."""
    message = (
        f"mask is a bare {type(mask).__name__}, and its meaning is ambiguous; wrap it: "
        f"Allowed(array) for bool with True = may attend, Bias(array) for float added to the scores"
    )
    if isinstance(mask, str | bool):
        message = f"mask={mask!r} is no mask; pass an object, such as hw.Causal() where a query sees no later key"
    if "bool" in str(getattr(mask, "dtype", "")):  # "bool" of NumPy, "torch.bool"
        message += (
            "; True forbids in nn.MultiheadAttention (pass Allowed(~array)), "
            "allows in scaled_dot_product_attention"
        )
    return HeadwiseError(message)


@dataclass(frozen=True)
class Both(Mask):
    """All of several masks at once; made by `&`.

    Callers ask its `parts()` for `band`, `aligned` and the like; of the whole these keep their safe defaults.
    """

    masks: tuple[Mask, ...]

    def check(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.check(grid)

    def allowed(self, grid: Grid) -> Any:
        return _joined(operator.and_, [mask.allowed(grid) for mask in self.masks])

    def bias(self, grid: Grid) -> Any:
        return _joined(operator.add, [mask.bias(grid) for mask in self.masks])

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def real_length(self, b: int) -> int | None:
        lengths = [mask.real_length(b) for mask in self.masks]
        return min((length for length in lengths if length is not None), default=None)

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        return Both(tuple(mask.for_heads(heads, n_heads) for mask in self.masks))

    def without_bias(self) -> Mask:
        return Both(tuple(mask.without_bias() for mask in self.masks))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.masks))


def _joined(join: Callable[[Any, Any], Any], answers: Iterable[Any]) -> Any:
    """All answers that are not None, joined; None where there is none."""
    answers = [answer for answer in answers if answer is not None]
    return reduce(join, answers) if answers else None


def all_of(masks: Iterable[Mask | None]) -> Mask | None:
    """Those that are masks, joined by `&`; None where there is none."""
    return _joined(operator.and_, masks)


def bounds(mask: Mask | None) -> Band:
    """The least and the largest j - i that the bands in a mask allow; None: as far as keys go.

    Asked of one query and one key, T = S = 1: there a query stands at its own key, and j - i is a plain distance.
    """
    parts = mask.parts() if mask else ()
    bands = [part.band(1, 1) or (None, None) for part in parts]
    lows = [low for low, _ in bands if low is not None]
    highs = [high for _, high in bands if high is not None]
    return max(lows, default=None), min(highs, default=None)


def resolve(
    masks: Iterable[Mask],
    grid: Grid,
    where: Callable[..., Any],
    narrowed: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """What masks allow and add together on arrays, with -inf taken out of the bias and into what is forbidden.

    As a number -inf would poison the arithmetic. `where` is that of the backend's library; `narrowed` gives an array
    the dtype that the backend computes in, where the most negative numbers may have become -inf.
    """
    allowed = None
    bias = None
    for mask in masks:
        mask_allowed = mask.allowed(grid)
        mask_bias = mask.bias(grid)
        if mask_bias is not None and mask.bias_may_forbid():
            finite = narrowed(mask_bias) != -math.inf
            mask_allowed = _joined(operator.and_, [mask_allowed, finite])
            mask_bias = where(finite, mask_bias, 0)
        allowed = _joined(operator.and_, [allowed, mask_allowed])
        bias = _joined(operator.add, [bias, mask_bias])
    return allowed, bias


@dataclass(frozen=True)
class _Derived(Mask):
    """A mask made of another one, which answers what is not asked anew."""

    mask: Mask

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def band(self, T: int, S: int) -> Band | None:
        return self.mask.band(T, S)

    def bias_may_forbid(self) -> bool:
        return self.mask.bias_may_forbid()

    def counts_from_first(self) -> bool:
        return self.mask.counts_from_first()

    def aligned(self) -> bool | None:
        return self.mask.aligned()

    def real_length(self, b: int) -> int | None:
        return self.mask.real_length(b)


@dataclass(frozen=True)
class WithoutBias(_Derived):
    """What another mask allows, a bias of -inf included; made by `without_bias`."""

    def allowed(self, grid: Grid) -> Any:
        bias = self.mask.bias(grid) if self.mask.bias_may_forbid() else None
        return _joined(
            operator.and_,
            [self.mask.allowed(grid), None if bias is None else bias != -math.inf],
        )


@dataclass(frozen=True)
class Part(_Derived):
    """The mask of a larger call, for those of its heads or queries that this call has.

    axis     "h" or "t"
    numbers  which of them, in the order in which this call has them
    length   how many the larger call has
    """

    axis: str
    numbers: Sequence[int]
    length: int

    def check(self, grid: Grid) -> None:
        self.mask.check(_WholeGrid(grid, self))

    def allowed(self, grid: Grid) -> Any:
        return self.mask.allowed(_WholeGrid(grid, self))

    def bias(self, grid: Grid) -> Any:
        return self.mask.bias(_WholeGrid(grid, self))

    def band(self, T: int, S: int) -> Band | None:
        if self.axis == "h":
            return self.mask.band(T, S)
        band = self.mask.band(self.length, S)
        first = self.first
        # Of queries with gaps between them the distances are not those of their places.
        if band is None or first is None:
            return None
        # Query i of this call is query i + first of the larger one, so here j - i is larger by first.
        low, high = (None if bound is None else bound + first for bound in band)
        return low, high

    @property
    def first(self) -> int | None:
        """The first of the numbers, where each follows on the one before."""
        numbers = list(self.numbers)
        first = numbers[0] if numbers else 0
        return first if numbers == list(range(first, first + len(numbers))) else None


class _WholeGrid:
    """The grid of the larger call of a `Part`, at the places that this call has.

    The mask was made for the larger call: it compares that call's positions, its arrays have that call's lengths, and
    it checks against these. So B, H, T, S, `i` and `j` are here as the larger call has them, while the arrays that
    come out have only the places of this call. For example queries 4 and 5 of a call of 6:

        grid of this call    T = 2, i = 0 1        what the mask sees    T = 6, i = 4 5
    """

    def __init__(self, grid: Grid, part: Part) -> None:
        self._grid = grid
        self._axis = part.axis
        self._length = part.length
        numbers = list(part.numbers)
        first = part.first
        # A slice of an array is a view; picking by a list would copy.
        self._numbers: slice | list[int] = numbers
        if first is not None:
            self._numbers = slice(first, first + len(numbers))
        self.B = grid.B
        self.H = grid.H
        self.T = grid.T
        self.S = grid.S
        self.i = grid.i
        self.j = grid.j
        self.read = grid.read
        if part.axis == "h":
            self.H = part.length
            return
        self.T = part.length
        # Neighbours need only an addition to the numbers 0, 1, ... that this call's queries have; for any others
        # `pick` lays their numbers along the axis of queries.
        self.i = grid.pick(numbers, "t") if first is None else grid.i + first

    def pick(self, values: Any, axes: str) -> Any:
        shape = shape_of(values)
        # Where the part's axis lies in the values, which may leave out leading axes; -1: they do not have it.
        place = axes[len(axes) - len(shape) :].find(self._axis)
        # else its length is 1, and `pick` broadcasts it
        if place >= 0 and shape[place] == self._length:
            values = _taken(values, place, self._numbers)
        return self._grid.pick(values, axes)


def _taken(values: Any, axis: int, numbers: slice | list[int]) -> Any:
    """Some entries along one axis of an array or of nested lists."""
    if not isinstance(values, list | tuple):
        # values[:, :, numbers], with as many colons as axes before it
        return values[(*[slice(None)] * axis, numbers)]
    if axis:
        return [_taken(value, axis - 1, numbers) for value in values]
    return (
        values[numbers] if isinstance(numbers, slice) else [values[n] for n in numbers]
    )


class Shifted(Mask):
    """A mask that compares positions. Its `offset` is the key position at which query 0 stands.

    None means S - T (aligned at the end, as with a cache); a whole number holds for all documents; B numbers give
    each document its own.
    """

    offset: Offset

    def check(self, grid: Grid) -> None:
        if self.by_document:
            if kind_of(self.offset) != "int":
                raise HeadwiseError(
                    f"{type(self).__name__} offset={self.offset} must hold whole numbers"
                )
            check_axes(f"{type(self).__name__} offset", self.offset, "b", grid)

    @property
    def by_document(self) -> bool:
        """Does each document have an offset of its own? (Asked of the offset itself: a traced T or S is no int.)"""
        return shape_of(self.offset) != ()

    def counts_from_first(self) -> bool:
        # without one, positions are counted from the last key
        return self.offset is not None

    def aligned(self) -> bool:
        return self.offset is None

    def shift(self, T: int, S: int) -> int | Any:
        """The offset with None resolved; a whole number, or B of them."""
        if self.offset is None:
            return S - T
        if self.by_document:
            return self.offset
        try:
            return operator.index(self.offset)  # type: ignore[arg-type]  # what is no whole number is caught
        except TypeError:
            raise HeadwiseError(
                f"{type(self).__name__} offset={self.offset} must be a whole number"
            ) from None

    def centre(self, grid: Grid) -> Any:
        """The key position at which each query stands."""
        shift = self.shift(grid.T, grid.S)
        return grid.i + (grid.pick(shift, "b") if self.by_document else shift)


@dataclass(frozen=True)
class Window(Shifted):
    """Query i sees keys i+offset-left to i+offset+right; None = open on that side. Offset as in `Shifted`."""

    left: int | None
    right: Any = ...  # a number of keys, or None
    offset: Offset = None
    alike = True

    def __post_init__(self) -> None:
        # as a number, True would show each query the key after it
        if isinstance(self.offset, bool):
            raise HeadwiseError(
                f"{type(self).__name__} offset={self.offset} is no position; Causal() is causal as it is"
            )
        if self.right is ...:
            raise HeadwiseError(
                f"Window({self.left}) does not say how many keys after the query are seen; pass Window({self.left}, 0) "
                f"for none, or Window({self.left}, None) for all"
            )
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and (isinstance(value, bool) or value < 0):
                raise HeadwiseError(
                    f"Window {name}={value} is no number of keys; pass 0 or more, or None for an open side"
                )

    def allowed(self, grid: Grid) -> Any:
        centre = self.centre(grid)
        right = None if self.right is None else grid.j <= centre + self.right
        left = None if self.left is None else grid.j >= centre - self.left
        # With both sides open there is no answer to join: None, every pair may.
        return _joined(operator.and_, [right, left])

    def band(self, T: int, S: int) -> Band | None:
        if self.by_document:
            return None
        shift = self.shift(T, S)
        low = None if self.left is None else shift - self.left
        return low, (None if self.right is None else shift + self.right)


@dataclass(frozen=True)
class Causal(Window):
    """Query i sees keys j <= i + offset: itself and what came before. Offset as in `Shifted`."""

    # A window without end to the left that stops at the query; `init=False`: Causal(2) is Causal(offset=2).
    left: int | None = field(default=None, init=False, repr=False)
    right: int | None = field(default=0, init=False, repr=False)


@dataclass(frozen=True)
class Lengths(Mask):
    """Document b has lengths[b] real keys; the rest are padding. `lengths` is (B,)."""

    lengths: Sequence[int] | Any
    alike = True

    def check(self, grid: Grid) -> None:
        check_axes("Lengths", self.lengths, "b", grid)
        # not `!= "int"`: the empty list of no documents is "bool"
        if kind_of(self.lengths) == "float":
            raise HeadwiseError(
                f"Lengths has {self.lengths}; a length is a whole number of keys: round it first"
            )
        for length in grid.read(self.lengths):
            if not 0 <= length <= grid.S:
                raise HeadwiseError(
                    f"Lengths has {length}; with S={grid.S} keys a length lies in 0 to {grid.S}"
                )

    def allowed(self, grid: Grid) -> Any:
        return grid.j < grid.pick(self.lengths, "b")

    def rectangles(self, grid: Grid) -> Rectangles | None:
        lengths = grid.read(self.lengths)
        return [[(0, grid.T, 0, int(length))] for length in lengths] or None

    def real_length(self, b: int) -> int | None:
        return int(self.lengths[b])


@dataclass(frozen=True)
class Segments(Mask):
    """Packed documents: a query sees the keys that carry its own id. `q_ids` is (B,T), `kv_ids` is (B,S)."""

    q_ids: Sequence[Sequence[int]] | Any
    kv_ids: Sequence[Sequence[int]] | Any
    alike = True

    def check(self, grid: Grid) -> None:
        check_axes("Segments q_ids", self.q_ids, "bt", grid)
        check_axes("Segments kv_ids", self.kv_ids, "bs", grid)

    def allowed(self, grid: Grid) -> Any:
        return grid.pick(self.q_ids, "bt") == grid.pick(self.kv_ids, "bs")

    def rectangles(self, grid: Grid) -> Rectangles | None:
        of_queries = _runs(grid, self.q_ids, grid.T)
        of_keys = None
        if of_queries is not None:
            is_same = self.kv_ids is self.q_ids
            of_keys = of_queries if is_same else _runs(grid, self.kv_ids, grid.S)
        if of_queries is None or of_keys is None:
            return None
        documents = []
        for queries, keys in zip(of_queries, of_keys, strict=True):
            shared = [name for name in queries if name in keys]
            documents.append([(*queries[name], *keys[name]) for name in shared])
        return documents

    def packed(self) -> Any:
        return self.q_ids

    def counts_from_first(self) -> bool:
        return False


def _runs(
    grid: Grid, values: Any, length: int
) -> list[dict[Any, tuple[int, int]]] | None:
    """Where each value begins and ends in each document; None where one comes again after another, or is not known."""
    numbers = list(grid.read(values))
    documents = []
    for begin in range(0, len(numbers), length):
        row = numbers[begin : begin + length]
        # written for speed: a long text is read at each call
        changes = compress(
            range(1, length), map(operator.ne, row, islice(row, 1, None))
        )
        edges = [0, *changes, length]
        documents.append({row[start]: (start, stop) for start, stop in pairwise(edges)})
        if len(documents[-1]) < len(edges) - 1:
            return None
    return documents or None


@dataclass(frozen=True)
class _OfArray(Mask):
    """A mask that is an array, broadcastable to (B,H,T,S)."""

    array: Any

    def check(self, grid: Grid) -> None:
        name = type(self).__name__
        shape = check_even(name, self.array)
        full = (grid.B, grid.H, grid.T, grid.S)
        # from the last on; leading ones may be left out
        pairs = zip(reversed(shape), reversed(full), strict=False)
        if len(shape) > 4 or any(n not in (1, whole) for n, whole in pairs):
            raise HeadwiseError(
                f"{name} has shape {shape}, which does not broadcast to (B,H,T,S) = {full}"
            )
        # With equal lengths torch's broadcasting would read the first axis as heads, whatever the caller meant.
        if len(shape) == 3 and shape[0] == grid.B == grid.H > 1:
            raise HeadwiseError(
                f"{name} has shape {shape}, and B = H = {grid.B}: it may mean (B,T,S) or (H,T,S); pass four axes, "
                f"(B,1,T,S) or (1,H,T,S)"
            )

    def rows(self, start: int, end: int, first: int, is_causal: bool) -> Mask:
        """Its own rows and columns, of an array that may be longer than the text so far."""
        array = self.array
        later = None
        for axis, cut in ((-2, slice(start, end)), (-1, slice(first, end))):
            shape = shape_of(array)
            if len(shape) < -axis or shape[axis] == 1:
                continue
            if shape[axis] < end:
                raise HeadwiseError(
                    f"the layer's {type(self).__name__} has shape {shape}, and with the cache the text has {end} "
                    f"tokens; make it as long as the longest text"
                )
            if axis == -1:
                later = _taken(array, len(shape) - 1, slice(end, None))
            array = _taken(array, len(shape) + axis, cut)
        if not is_causal and later is not None and self._allows_some(later):
            raise HeadwiseError(
                f"the layer's {type(self).__name__} lets tokens {start} to {end - 1} look at later ones, which the "
                f"cache has not seen; pass all that look at one another in one call"
            )
        return type(self)(array)

    def _allows_some(self, array: Any) -> bool:
        forbidden = False if isinstance(self, Allowed) else -math.inf
        if hasattr(array, "any"):  # lists are read number by number
            return bool((array != forbidden).any())
        return any(x != forbidden for x in flat(array))

    def counts_from_first(self) -> bool:
        return False


@dataclass(frozen=True)
class Allowed(_OfArray):
    """`array` is bool, True = MAY attend, broadcastable to (B,H,T,S)."""

    def __post_init__(self) -> None:
        if kind_of(self.array) != "bool":
            raise HeadwiseError(
                "Allowed takes bool values, True = may attend, and got numbers; pass Bias(array) to add them to the "
                "scores"
            )

    def allowed(self, grid: Grid) -> Any:
        return grid.pick(self.array, "bhts")

    def rectangles(self, grid: Grid) -> Rectangles | None:
        # padding, (B,1,1,S): before the text or behind it
        if shape_of(self.array) != (grid.B, 1, 1, grid.S):
            return None
        documents = _runs(grid, self.array, grid.S)
        if documents is None:
            return None
        return [
            [(0, grid.T, *runs[True])] if True in runs else [] for runs in documents
        ]


@dataclass(frozen=True)
class Bias(_OfArray):
    """`array` is float, added to the scores, broadcastable to (B,H,T,S). A bias of -inf forbids."""

    def __post_init__(self) -> None:
        if kind_of(self.array) != "float":
            raise HeadwiseError(
                "Bias takes float values that are added to the scores, and got bool or whole numbers; pass "
                "Allowed(array) for True = may attend"
            )

    def bias(self, grid: Grid) -> Any:
        return grid.pick(self.array, "bhts")


@dataclass(frozen=True)
class Alibi(Shifted):
    """Attention with linear biases (Press et al. 2021, arXiv 2108.12409): -slope_h * |i + offset - j|.

    `slopes` is (H,); None takes the paper's geometric sequence. It only biases: join it with Causal() to forbid.
    Offset as in `Shifted`.
    """

    slopes: Sequence[float] | Any = None
    offset: Offset = None

    def check(self, grid: Grid) -> None:
        super().check(grid)
        if self.slopes is not None:
            check_axes("Alibi slopes", self.slopes, "h", grid)

    def bias(self, grid: Grid) -> Any:
        slopes = alibi_slopes(grid.H) if self.slopes is None else self.slopes
        return -grid.pick(slopes, "h") * abs(self.centre(grid) - grid.j)

    def bias_may_forbid(self) -> bool:
        return False


def alibi_slopes(n_heads: int) -> list[float]:
    """The paper's slopes 2^(-8/n), 2^(-16/n), ...; between powers of two every other one of the next power's.

    Press et al. 2021, section 3 and the authors' note on head counts that are no power of two.
    """
    # the largest power of two that is not above n_heads
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    # The slopes of 2 * power heads are 2^(-4/power), 2^(-8/power), ...: the first, third, fifth lie between ours.
    between = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    # So 3 heads have 2^-4 and 2^-8, those of 2 heads, and then 2^-2, the first of 4.
    return slopes + between[: n_heads - power]


def check_axes(name: str, values: Any, axes: str, grid: Grid) -> None:
    """`values` must have exactly the grid's lengths of the named axes."""
    shape = check_even(name, values)
    lengths = {"b": grid.B, "h": grid.H, "t": grid.T, "s": grid.S}
    expected = tuple(lengths[axis] for axis in axes)
    if shape != expected:
        letters = ",".join(axes).upper()
        raise HeadwiseError(
            f"{name} has shape {shape}; this call needs ({letters}) = {expected}"
        )
