"""Facts about a learner's object and its weights that no name tells: counts of heads, folded scales, shared modules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from headwise.teach.arguments import HEAD_DIM
from headwise.teach.reading import Array, Parts


def count_of(
    instance: Any, names: tuple[str, ...], make: Any, sizes: Mapping[str, Any], default: int | None
) -> int | None:
    """A whole number that the object, its config or --args keeps under such a name."""
    places: list[Mapping[str, Any]] = [sizes, vars(instance) if hasattr(instance, "__dict__") else {}]
    places += [vars(v) for n, v in places[1].items() if n in ("config", "cfg") and hasattr(v, "__dict__")]
    places += [vars(m) for m in places[1].get("_modules", {}).values() if m is not None]
    for place in places:
        for key, value in place.items():
            plain = key.lower().strip("_")
            hit = any(plain == n or (len(n) > 2 and plain.startswith(n)) or (len(n) > 5 and n in plain) for n in names)
            if (
                hit
                and type(value) is int
                and ("kv" in plain or "group" in plain or "key_value" in plain) == ("kv_head" in names)
            ):
                return value
    if make is not None and default is not None:
        wanted = inspect.signature(make).parameters
        if any(re.search(r"head|cabeza|^h$|config|cfg", n, re.I) and not re.search("dim|size", n) for n in wanted):
            return default
    return None


def same_modules(instance: Any) -> bool:
    """Does a list of heads hold one module several times?"""
    for child in getattr(instance, "_modules", {}).values():
        if type(child).__name__ == "ModuleList" and len(child) > 1 and len({id(m) for m in child}) == 1:
            return True
    lists = [v for v in vars(instance).values() if isinstance(v, list) and len(v) > 1 and hasattr(v[0], "__dict__")]
    return any(len({id(m) for m in v}) == 1 for v in lists)


def scale_is_folded(parts: Parts) -> bool:
    """Are the drawn weights of queries smaller than those of values by the square root of a head's width?"""
    if not {"q", "k", "v"} <= set(parts.weights):
        return False
    q, k, v = (float(np.std(parts.weights[role][0].value)) for role in "qkv")
    return v > 0 and any(0.85 < abs(x / v) * HEAD_DIM**0.5 < 1.18 for x in (q, k, q * k / v if v else q))


def renew(arrays: list[Array], rng: np.random.Generator) -> None:
    """New numbers for all weights: biases that start at 0 would hide, and small weights make every row alike."""
    for array in arrays:
        shape = array.value.shape
        spread = 0.4 if len(shape) < 2 else 1.2 / max(shape[-1] if array.linear else shape[-2], 1) ** 0.5
        numbers = rng.normal(size=shape) * spread + ("norm" in array.path.lower())
        if isinstance(array.holder, np.ndarray):
            if array.holder.flags.writeable:
                array.holder[...] = numbers
        elif hasattr(array.holder, "detach"):
            import torch

            with torch.no_grad():
                array.holder.copy_(torch.from_numpy(numbers))
