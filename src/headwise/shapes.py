"""Shapes, numbers and kinds of arrays and of nested lists alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.errors import HeadwiseError


def shape_of(values: Any) -> tuple[int, ...]:
    """The shape of an array, or of nested lists by their first entries; () of a number."""
    if hasattr(values, "shape"):
        return tuple(values.shape)
    if not isinstance(values, list | tuple):
        return ()
    return (len(values), *(shape_of(values[0]) if values else ()))


def check_even(name: str, values: Any) -> tuple[int, ...]:
    """The shape of an array, or of nested lists, all of which are looked at. Raises HeadwiseError, with `name`, for
    lists that are not as regular as an array.
    """
    if not isinstance(values, list | tuple):
        return shape_of(values)
    shapes = {check_even(name, value) for value in values}
    if len(shapes) > 1:
        raise HeadwiseError(
            f"{name} is ragged: rows of shapes {sorted(shapes)} lie side by side; make them equal"
        )
    return (len(values), *(shapes.pop() if shapes else ()))


def flat(values: Any) -> Iterator[Any]:
    """The numbers of an array or of nested lists, one after another."""
    if hasattr(values, "tolist"):  # an array of NumPy or torch
        yield from values.reshape(-1).tolist()
    elif isinstance(values, list | tuple):
        for value in values:
            yield from flat(value)
    else:
        yield values


def kind_of(values: Any) -> str:
    """One of "bool", "float" and "int": the dtype of an array, or what nested lists hold.

    A list that mixes whole numbers and floats is float, and so are scalars that carry gradients. An empty list is
    bool, and any other dtype, such as complex, is int.
    """
    if hasattr(values, "dtype"):
        name = str(values.dtype)
        # "torch.bfloat16" is a float, too
        return "bool" if "bool" in name else "float" if "float" in name else "int"
    # a set: <= asks whether all are among the types named
    kinds = {type(value) for value in flat(values)}
    return "bool" if kinds <= {bool} else "int" if kinds <= {int, bool} else "float"
