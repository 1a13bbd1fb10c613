"""The mask algebra: who may look at whom, written once for every rung.

A mask answers two questions about query i, key j, head h and document b: may i look at j, and what is added to the
score. The answers are written with ordinary operators on indices, and a `Grid` supplies those: whole numbers on the
plain rung, broadcastable index arrays on the others. So one line, `j <= i + offset`, is the loop and the vector form.

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
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

from headwise.errors import HeadwiseError
from headwise.shapes import check_even, flat, kind_of, shape_of


class Grid(Protocol):
    """One rung's view of all (b, h, i, j): numbers, or arrays that broadcast to (B, H, T, S)."""

    B: int
    H: int
    T: int
    S: int

    @property
    def i(self) -> Any:
        """Query position, 0 to T-1."""

    @property
    def j(self) -> Any:
        """Key position, 0 to S-1."""

    def pick(self, values: Any, axes: str) -> Any:
        """`values`, whose axes are named by letters of "bhts", at this grid's place or broadcast along it.

        With the axes "bhts" the values may leave out leading axes and have length 1 where they broadcast.
        """

    def read(self, values: Any) -> Iterable[Any]:
        """The numbers of `values`, for a check; none where they cannot be known yet."""


class BroadcastGrid:
    """The grid as index arrays that broadcast to (B, H, T, S), for NumPy and torch alike.

    `array` turns values into the rung's array, `arange` makes its indices. `keys`, `queries` and `documents` restrict
    the grid to a range of each; B, H, T, S stay the lengths of the whole call.
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
        self._part = {"b": documents, "h": slice(None), "t": queries, "s": keys}
        self.i = arange(self.T).reshape(self.T, 1)[queries]
        self.j = arange(self.S)[keys]

    def read(self, values: Any) -> Iterable[Any]:
        return flat(values) if self._known(values) else ()

    def pick(self, values: Any, axes: str) -> Any:
        array = self._array(values)
        if array.ndim:
            named = axes[-array.ndim :]
            whole = {"b": self.B, "h": self.H, "t": self.T, "s": self.S}
            # What broadcasts has length 1; the whole of an axis, 1 included, is cut to the part at hand.
            cut = tuple(
                self._part[a] if n == whole[a] else slice(None) for a, n in zip(named, array.shape, strict=True)
            )
            array = array[cut]
        if axes == "bhts":
            return array
        return array.reshape([array.shape[axes.index(axis)] if axis in axes else 1 for axis in "bhts"])


class Mask:
    """Base of all masks. `a & b` allows what both allow and adds up their biases."""

    def check(self, grid: Grid) -> None:
        """Raise HeadwiseError when the mask does not fit this call's sizes. Each rung calls it once."""

    def allowed(self, grid: Grid) -> Any:
        """Bool on the grid, True = may attend; None when every pair may."""
        return None

    def bias(self, grid: Grid) -> Any:
        """Float on the grid, added to the scores after the softcap; None when there is nothing to add."""
        return None

    def parts(self) -> tuple[Mask, ...]:
        """The masks that are joined by `&`, flattened."""
        return (self,)

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        """The mask of a layer that has only those of its `n_heads` heads, in that order."""
        return self

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise bare_mask_error(other)
        return Both(self.parts() + other.parts())

    def __rand__(self, other: object) -> Mask:
        raise bare_mask_error(other)

    __array_ufunc__ = None  # so that `array & mask` asks __rand__, in NumPy and, below, in torch

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        return NotImplemented


def bare_mask_error(mask: object) -> HeadwiseError:
    """What to raise where an array stands for a mask: the two polarities in the field contradict each other."""
    return HeadwiseError(
        f"mask is a bare {type(mask).__name__}, and its meaning is ambiguous; wrap it: "
        f"Allowed(array) for bool with True = may attend, Bias(array) for float added to the scores"
    )


@dataclass(frozen=True)
class Both(Mask):
    """All of several masks at once; made by `&`."""

    masks: tuple[Mask, ...]

    def check(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.check(grid)

    def allowed(self, grid: Grid) -> Any:
        answers = [one for mask in self.masks if (one := mask.allowed(grid)) is not None]
        return reduce(operator.and_, answers) if answers else None

    def bias(self, grid: Grid) -> Any:
        answers = [one for mask in self.masks if (one := mask.bias(grid)) is not None]
        return reduce(operator.add, answers) if answers else None

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        return Both(tuple(mask.for_heads(heads, n_heads) for mask in self.masks))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.masks))


class Shifted(Mask):
    """A mask that compares positions. Its `offset` is the key position at which query 0 stands.

    None means S - T (aligned at the end, as with a cache); a whole number holds for all documents; B numbers give
    each document its own.
    """

    offset: int | Sequence[int] | Any

    def check(self, grid: Grid) -> None:
        if self.offset is not None and shape_of(self.offset) != ():
            if kind_of(self.offset) != "int":
                raise HeadwiseError(f"{type(self).__name__} offset={self.offset} must hold whole numbers")
            check_axes(f"{type(self).__name__} offset", shape_of(self.offset), "b", grid)

    @property
    def by_document(self) -> bool:
        """Does each document have an offset of its own? (Asked of the offset itself: a traced T or S is no int.)"""
        return not (self.offset is None or isinstance(self.offset, int)) and shape_of(self.offset) != ()

    def shift(self, T: int, S: int) -> int | Any:
        """The offset with None resolved; a whole number, or B of them."""
        if self.offset is None:
            return S - T
        return self.offset if self.by_document else self._whole()

    def _whole(self) -> int:
        try:
            return operator.index(self.offset)  # type: ignore[arg-type]  # what is no whole number is caught
        except TypeError:
            raise HeadwiseError(f"{type(self).__name__} offset={self.offset} must be a whole number") from None

    def centre(self, grid: Grid) -> Any:
        """The key position at which each query stands."""
        shift = self.shift(grid.T, grid.S)
        return grid.i + (grid.pick(shift, "b") if self.by_document else shift)


@dataclass(frozen=True)
class Window(Shifted):
    """Query i sees keys i+offset-left to i+offset+right; None = open on that side. Offset as in `Shifted`."""

    left: int | None
    right: int | None
    offset: int | Sequence[int] | Any = None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and value < 0:
                raise HeadwiseError(f"Window {name}={value} is negative; pass 0 or more, or None for an open side")

    def allowed(self, grid: Grid) -> Any:
        centre, result = self.centre(grid), None
        if self.right is not None:
            result = grid.j <= centre + self.right
        if self.left is not None:
            after = grid.j >= centre - self.left
            result = after if result is None else result & after
        return result


@dataclass(frozen=True)
class Causal(Window):
    """Query i sees keys j <= i + offset: itself and what came before. Offset as in `Shifted`."""

    left: int | None = field(default=None, init=False, repr=False)
    right: int | None = field(default=0, init=False, repr=False)
    offset: int | Sequence[int] | Any = None


@dataclass(frozen=True)
class Lengths(Mask):
    """Document b has lengths[b] real keys; the rest are padding. `lengths` is (B,)."""

    lengths: Sequence[int] | Any

    def check(self, grid: Grid) -> None:
        check_axes("Lengths", check_even("Lengths", self.lengths), "b", grid)
        for length in grid.read(self.lengths):
            if not 0 <= length <= grid.S:
                raise HeadwiseError(f"Lengths has {length}; with S={grid.S} keys a length lies in 0 to {grid.S}")

    def allowed(self, grid: Grid) -> Any:
        return grid.j < grid.pick(self.lengths, "b")


@dataclass(frozen=True)
class Segments(Mask):
    """Packed documents: a query sees the keys that carry its own id. `q_ids` is (B,T), `kv_ids` is (B,S)."""

    q_ids: Sequence[Sequence[int]] | Any
    kv_ids: Sequence[Sequence[int]] | Any

    def check(self, grid: Grid) -> None:
        check_axes("Segments q_ids", check_even("Segments q_ids", self.q_ids), "bt", grid)
        check_axes("Segments kv_ids", check_even("Segments kv_ids", self.kv_ids), "bs", grid)

    def allowed(self, grid: Grid) -> Any:
        return grid.pick(self.q_ids, "bt") == grid.pick(self.kv_ids, "bs")


@dataclass(frozen=True)
class Allowed(Mask):
    """`array` is bool, True = MAY attend, broadcastable to (B,H,T,S)."""

    array: Any

    def __post_init__(self) -> None:
        if kind_of(self.array) != "bool":
            raise HeadwiseError(
                "Allowed takes bool values, True = may attend, and got numbers; "
                "pass Bias(array) to add them to the scores"
            )

    def check(self, grid: Grid) -> None:
        check_broadcast("Allowed", check_even("Allowed", self.array), grid)

    def allowed(self, grid: Grid) -> Any:
        return grid.pick(self.array, "bhts")

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        return Allowed(_of_heads(self.array, heads))


@dataclass(frozen=True)
class Bias(Mask):
    """`array` is float, added to the scores, broadcastable to (B,H,T,S). A bias of -inf forbids."""

    array: Any

    def __post_init__(self) -> None:
        if kind_of(self.array) != "float":
            raise HeadwiseError(
                "Bias takes float values that are added to the scores, and got bool or whole numbers; "
                "pass Allowed(array) for True = may attend"
            )

    def check(self, grid: Grid) -> None:
        check_broadcast("Bias", check_even("Bias", self.array), grid)

    def bias(self, grid: Grid) -> Any:
        return grid.pick(self.array, "bhts")

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        return Bias(_of_heads(self.array, heads))


@dataclass(frozen=True)
class Alibi(Shifted):
    """Attention with linear biases (Press et al. 2021, arXiv 2108.12409): -slope_h * |i + offset - j|.

    `slopes` is (H,); None takes the paper's geometric sequence. It only biases: join it with Causal() to forbid.
    Offset as in `Shifted`.
    """

    slopes: Sequence[float] | Any = None
    offset: int | Sequence[int] | Any = None

    def check(self, grid: Grid) -> None:
        super().check(grid)
        if self.slopes is not None:
            check_axes("Alibi slopes", shape_of(self.slopes), "h", grid)

    def for_heads(self, heads: Sequence[int], n_heads: int) -> Mask:
        slopes = alibi_slopes(n_heads) if self.slopes is None else list(flat(self.slopes))
        return Alibi([slopes[h] for h in heads], self.offset)

    def bias(self, grid: Grid) -> Any:
        slopes = alibi_slopes(grid.H) if self.slopes is None else self.slopes
        return -grid.pick(slopes, "h") * abs(self.centre(grid) - grid.j)


def _of_heads(array: Any, heads: Sequence[int]) -> Any:
    """The rows of those heads of something that broadcasts to (B,H,T,S); the whole of it where heads share it."""
    shape = shape_of(array)
    if len(shape) < 3 or shape[-3] == 1:
        return array
    if not isinstance(array, list | tuple):
        return array[..., list(heads), :, :]
    return [array[h] for h in heads] if len(shape) == 3 else [[document[h] for h in heads] for document in array]


def alibi_slopes(n_heads: int) -> list[float]:
    """The paper's slopes 2^(-8/n), 2^(-16/n), ...; between powers of two every other one of the next power's.

    Press et al. 2021, section 3 and the authors' note on head counts that are no power of two.
    """
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


def check_axes(name: str, shape: tuple[int, ...], axes: str, grid: Grid) -> None:
    """`shape` must be exactly the grid's lengths of the named axes."""
    lengths = {"b": grid.B, "h": grid.H, "t": grid.T, "s": grid.S}
    expected = tuple(lengths[axis] for axis in axes)
    if shape != expected:
        letters = ",".join(axes).upper()
        raise HeadwiseError(f"{name} has shape {shape}; this call needs ({letters}) = {expected}")


def check_broadcast(name: str, shape: tuple[int, ...], grid: Grid) -> None:
    """`shape` must broadcast to (B,H,T,S), aligned at the last axis."""
    full = (grid.B, grid.H, grid.T, grid.S)
    if len(shape) > 4 or any(n != 1 and n != m for n, m in zip(shape[::-1], full[::-1], strict=False)):
        raise HeadwiseError(f"{name} has shape {shape}, which does not broadcast to (B,H,T,S) = {full}")
