"""The check of a layer that reads a text step by step through a cache: the whole text must give the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headwise.teach.probe import Subject, pick, still_dropout, to_kind
from headwise.teach.reading import arrays_of

STEPS = ((3, 1, 2, 1), (3, 1, 1, 1, 1), (1,) * 7)


def cache_bug(
    subject: Subject, x: Any, whole: Any, namespace: Mapping[str, Any], code: str
) -> tuple[str | None, float] | None:
    """The bug of a layer's cache and the largest difference from the whole text; None where it has no cache.

    x  (B,T,C); `whole` (B,T,C) is what the layer gives for it at once; `code` is its own
    """
    names = inspect.signature(subject.call).parameters
    cache = next((n for n in names if re.search(r"cache|past", n) and not n.startswith("use")), None)
    use = next((n for n in names if re.fullmatch(r"use_?(kv_?)?cache", n)), None)
    if not any(name and len(re.findall(rf"\b{name}\b", code)) > 1 for name in (cache, use)):
        return None  # there is none, or a parameter that the code leaves aside
    worst: tuple[str | None, float] | None = None
    for steps in STEPS:
        for first in _empty_caches(cache, namespace):
            try:
                out, held = _step_by_step(subject, x, steps, cache, use, first)
            except Exception:  # this way of starting or of cutting was a guess
                continue
            gap = float(np.nan_to_num(np.abs(out - whole), nan=np.inf).max())
            mixed = _out_of_order(held, x, subject, cache, use, first)
            if gap < 1e-3 and not mixed:
                return "", gap
            worst = worst or ("cache-order" if mixed else "cache-offset", gap)
    return worst


def _empty_caches(cache: str | None, namespace: Mapping[str, Any]) -> Iterator[Any]:
    """What a first call may get for its cache, as functions that make one."""
    yield lambda: None
    for value in namespace.values():
        if cache and isinstance(value, type) and "cache" in value.__name__.lower():
            yield value
    if cache:
        yield dict
        yield list


def _step_by_step(
    subject: Subject, x: Any, steps: tuple[int, ...], cache: str | None, use: str | None, first: Any
) -> tuple[Any, list[Any]]:
    """Output (B,T,C) of the pieces joined, and the arrays that the cache holds at the end."""
    _reset(subject.module)
    state, outs, start, result = first(), [], 0, None
    for n in steps:
        piece = x[:, start : start + n]
        arguments = {subject.inputs[0]: to_kind(piece, subject.kind), **subject.fixed}
        if cache:
            arguments[cache] = state
        if use:
            arguments[use] = True
        parameters = inspect.signature(subject.call).parameters
        arguments |= {
            name: start for name in parameters if re.fullmatch(r"(start|offset)_?(pos)?|pos(ition)?_offset", name)
        }
        with still_dropout(subject.seen, False, n), np.errstate(all="ignore"):
            result = subject.call(**arguments)
        out = pick(result, (*piece.shape[:2], x.shape[2]))
        if out is None:
            raise ValueError("no output")
        outs.append(out)
        if isinstance(result, tuple) and len(result) > 1:
            later = [r for r in result[1:] if r is not None]
            state = later[-1] if len(later) == 1 or not hasattr(later[-1], "shape") else tuple(later)
        start += n
    names = {**vars(subject.module), **getattr(subject.module, "_buffers", {})}
    inside = {name: value for name, value in names.items() if re.search("cache|past", name)}
    held = [array.value for place in (state, inside) for array in arrays_of(place) if array.value.ndim >= 3]
    _reset(subject.module)
    return np.concatenate(outs, 1), held


def _out_of_order(held: list[Any], x: Any, subject: Subject, cache: str | None, use: str | None, first: Any) -> bool:
    """Do the held keys stand in another order than those of the whole text, held at once?"""
    try:
        _, whole = _step_by_step(subject, x, (x.shape[1],), cache, use, first)
    except Exception:  # a cache that takes single tokens alone
        return False
    total = x.shape[1]
    for a, b in zip(held, whole, strict=False):
        if a.shape == b.shape and total in a.shape:
            axis = a.shape.index(total)
            first_rows, rows = (np.moveaxis(y, axis, 0).reshape(total, -1) for y in (a, b))
            if not np.allclose(first_rows, rows, atol=1e-3):
                ordered, whole_ordered = (y[np.lexsort(np.round(y.T, 3))] for y in (first_rows, rows))
                return bool(np.allclose(ordered, whole_ordered, atol=1e-2))
    return False


def _reset(module: Any) -> None:
    for name in dir(module):
        if re.match(r"(reset|clear|empty)_?\w*", name) and callable(getattr(module, name)):
            getattr(module, name)()
            return
    for name, value in list(getattr(module, "__dict__", {}).items()):
        if re.search("cache|past", name) and hasattr(value, "shape"):
            setattr(module, name, None)
