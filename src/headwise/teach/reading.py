"""Where a learner's object keeps W_Q, W_K, W_V and W_O, told by names and shapes; and how they can be read.

A `Reading` is one hypothesis on how correct code may use these weights: layouts of heads, orders of a fused matrix, the
side on which a matrix is multiplied, q and k exchanged. Code that any reading reproduces is correct.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.teach.bugs import UncheckedError
from headwise.teach.form import Weights
from headwise.teach.subject import HEAD_DIM, HEADS, NAMES, VALUES, WIDTH, Target

ROLES = {
    role: re.compile(f"{NAMES['weights']['stem']}(?:{NAMES['weights'][role]}){NAMES['weights']['tail']}")
    for role in ("qkv", "kv", "q", "k", "v", "o")
}
_BIAS = re.compile(r"(^|_|\.)b(ias)?(_|$|\.)|^b[qkvo]$|bias|sesgo", re.I)


@dataclass(frozen=True)
class Array:
    """One array of the object: where it is, its numbers, and whether it is `weight` of a Linear, (out, in)."""

    path: str
    value: Any
    linear: bool = False
    holder: Any = None  # the tensor or array itself, to write new numbers into


@dataclass(frozen=True)
class Parts:
    """The arrays of a layer by role: each role has one matrix, or one for each head."""

    weights: dict[str, list[Array]] = field(default_factory=dict)
    biases: dict[str, list[Array]] = field(default_factory=dict)
    gains: dict[str, Array] = field(default_factory=dict)
    same_head: bool = False  # one module stands in the list of heads several times


@dataclass(frozen=True)
class Reading:
    """Weights in our convention, and settings that correct code of this style has."""

    weights: Weights
    settings: Mapping[str, Any] = field(default_factory=dict)
    structural: tuple[str, ...] = ()  # bugs that the shapes alone show


def arrays_of(target: Any) -> list[Array]:
    """Every array of floats that an object holds, in the order in which it was made."""
    arrays: list[Array] = []
    seen: set[int] = set()

    def visit(value: Any, path: str, depth: int, linear: bool) -> None:
        if depth > 6 or id(value) in seen:
            return
        seen.add(id(value))
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            if value.is_floating_point():
                arrays.append(Array(path, value.detach().cpu().double().numpy(), linear, value))
        elif isinstance(value, np.ndarray):
            if value.dtype.kind == "f":
                arrays.append(Array(path, value, False, value))
        elif isinstance(value, list | tuple) and _is_matrix(value):
            arrays.append(Array(path, np.array(value, dtype=float), False, value))
        else:
            layer = hasattr(value, "in_features") and hasattr(value, "out_features")
            for name, item in _children(value):
                visit(item, f"{path}.{name}", depth + 1, layer and name == "weight")

    visit(target, "", 0, False)
    return arrays


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds, by name; of a torch module no buffers, which hold masks and tables."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    if hasattr(value, "named_parameters"):
        public = [n for n in vars(value) if not n.startswith("_") and n not in ("training", "config", "cfg")]
        return {**value._parameters, **value._modules, **{n: vars(value)[n] for n in public}}.items()
    return vars(value).items() if hasattr(value, "__dict__") and not hasattr(value, "__code__") else ()


def _is_matrix(value: Any) -> bool:
    try:
        return bool(value) and not hasattr(value[0], "detach") and np.array(value, dtype=float).ndim >= 2
    except (ValueError, TypeError, RuntimeError):
        return False


def role_of(path: str) -> str | None:
    """q, k, v, o, qkv or kv, by the last part of a path that names a role."""
    for part in reversed([part for part in path.split(".") if part and not part.isdigit()]):
        plain = re.sub(r"[^a-z]", "", part.lower())
        for role, pattern in ROLES.items():
            if pattern.match(plain) and plain not in ("weight", "weights", "bias", "b", "w", "attn", "attention"):
                return role
    return None


def parts_of(target: Any, mapping: Mapping[str, str]) -> Parts:
    """The arrays of an object by role; `mapping` has the names of attributes whose role no name tells."""
    parts = Parts(same_head=_is_one_module(target))
    for array in arrays_of(target):
        names = [part for part in array.path.split(".") if part]
        if any("norm" in part.lower() or part.lower().startswith("ln") for part in names):
            side = re.search(r"\b(q|k)", array.path)
            if side and array.value.ndim == 1:
                parts.gains[side[1]] = array
            continue
        named = (role for role, name in mapping.items() if name in names or name == ".".join(names))
        role = next(named, None) or role_of(array.path)
        if role is not None:
            flat = array.value.ndim == 1 or (array.value.ndim == 2 and _BIAS.search(array.path) is not None)
            (parts.biases if flat else parts.weights).setdefault(role, []).append(array)
    if len(parts.weights.get("o", ())) in (3, 4) and not {"q", "qkv"} & set(parts.weights):
        # `linears`, `projections`: a list without names, W_Q, W_K, W_V, W_O in this order, or the first three of them
        for arrays in (parts.weights, parts.biases):
            arrays.update({role: [array] for role, array in zip("qkvo", arrays.pop("o", []), strict=False)})
    return parts


def readings(parts: Parts, n_heads: int | None, n_kv_heads: int | None, width: int) -> Iterator[Reading]:
    """Every reading of the weights, the usual ones first. UncheckedError where none fits."""
    fused = {"qkv", "kv"} & set(parts.weights)
    square = any(_is_square(array) for arrays in parts.weights.values() for array in arrays)
    count = 0
    orders = ("blocks", "heads", "features", "kqv", "vqk", "qvk") if fused else ("blocks",)
    for order, side in itertools.product(orders, ("in-out", "out-in") if square else ("in-out",)):
        try:
            reading = _read(parts, n_heads, n_kv_heads, width, order, side)
        except (ValueError, KeyError, IndexError):  # the shapes do not allow it
            continue
        count += 1
        yield reading
    if not count:
        shapes = ", ".join(f"{role} {arrays[0].value.shape}" for role, arrays in parts.weights.items())
        raise UncheckedError("no_fit", shapes=shapes)


def _is_square(array: Array) -> bool:
    """Do the shapes leave open on which side it is multiplied?"""
    return not array.linear and array.value.ndim == 2 and array.value.shape[0] == array.value.shape[1]


def _matrix(array: Array, width: int, n: int, side: str, output: bool) -> Any:
    """(in, out), heads as blocks of the width; `output` for W_O, which reads joined heads."""
    value = array.value
    if value.ndim == 3:  # einsum parameters: axes told apart by their sizes
        h = value.shape.index(n) if n in value.shape else 0
        axes = [i for i, size in enumerate(value.shape) if size == width and i != h]
        c, d = axes[0], 3 - h - axes[0]
        moved = value.transpose((h, d, c) if output else (c, h, d))
        return moved.reshape(-1, width) if output else moved.reshape(width, -1)
    if array.linear or (_is_square(array) and side == "out-in"):
        return value.T
    return value if value.shape[output] == width else value.T


def _read(parts: Parts, H: int | None, G: int | None, width: int, order: str, side: str) -> Reading:
    """One reading; ValueError, KeyError or IndexError where the shapes do not allow it."""
    w, structural = parts.weights, []
    listed = max((len(arrays) for role, arrays in w.items() if role in "qkv"), default=1)
    H = listed if listed > 1 else H or 1
    G = G or H
    matrices: dict[str, Any] = {"o": None}
    for role, arrays in w.items():
        pieces = [_matrix(array, width, H if role in "qo" else G, side, role == "o") for array in arrays]
        matrices[role] = pieces[0] if role == "o" else np.concatenate(pieces, 1)
    biases = {role: np.concatenate([a.value.reshape(-1) for a in arrays]) for role, arrays in parts.biases.items()}
    for fused in {"qkv", "kv"} & set(matrices):
        _unfuse(fused, matrices, biases, H, G, order)
    d = matrices["q"].shape[1] // H
    out, widths = matrices["o"], {matrices[role].shape[1] for role in "qkv"}
    shared = parts.same_head if out is None else out.shape[0] == H * min(widths)
    if listed == 1 and H > 1 and len(widths) == 1 and shared:
        d = min(widths)
        structural.append("heads-share-projection")
        matrices |= {role: np.tile(matrices[role], (1, H)) for role in "qkv"}
        biases = {role: x if role == "o" else np.tile(x, H) for role, x in biases.items()}
    if parts.same_head:
        structural.append("heads-share-projection")
    G = matrices["k"].shape[1] // max(d, 1)
    if not G or matrices["q"].shape[1] % H or matrices["k"].shape[1] % d or H % G or matrices["v"].shape[1] % G:
        raise ValueError("heads of other widths")
    gains = {role: a.value for role, a in parts.gains.items() if a.value.shape == (d,)}
    settings = {"qk_norm": "rms"} if gains else {}
    return Reading(Weights(H, G, matrices, biases, gains), settings, tuple(structural))


def _unfuse(fused: str, matrices: dict[str, Any], biases: dict[str, Any], H: int, G: int, order: str) -> None:
    """Take W_QKV, or W_KV, apart: "blocks" q | k | v, "heads" (h, 3, d), "features" (h, d, 3), or other orders."""
    whole = matrices.pop(fused)
    names = fused
    if order in ("kqv", "vqk", "qvk"):
        names = order if fused == "qkv" else "vk"
    shares, parts = ([H, G, G] if fused == "qkv" else [1, 1]), len(names)
    unit, d = whole.shape[1] // sum(shares), whole.shape[1] // parts // H
    if whole.shape[1] % sum(shares) or (order != "blocks" and G != H):
        raise ValueError("no whole heads")

    def cut(x: Any) -> list[Any]:
        if order in ("heads", "features"):
            axes = x.reshape(-1, H, parts, d) if order == "heads" else x.reshape(-1, H, d, parts).swapaxes(2, 3)
            return [axes[:, :, i].reshape(-1, H * d) for i in range(parts)]
        return np.split(x.reshape(-1, unit * sum(shares)), unit * np.cumsum(shares)[:-1], 1)

    matrices.update(zip(names, cut(whole), strict=True))
    if fused in biases:
        pieces = [piece.reshape(-1) for piece in cut(biases.pop(fused))]
        biases.update(zip(names, pieces, strict=True))


def styles(reading: Reading, bases: Sequence[float]) -> Iterator[Reading]:
    """The readings of the same weights in every layout, and in every rotation with one of these bases."""
    interleaved = {f"split_{role}": "interleaved" for role in "qkv"} | {"join": "interleaved"}
    exchanged = {"q_from": "k", "k_from": "q"}
    weights = reading.weights
    ropes: list[dict[str, Any]] = [{"rope": (turn, turn, base)} for base in bases for turn in ("half", "interleaved")]
    norms = [{"qk_norm": kind} for kind in ("rms", "layer")]
    choices: list[list[dict[str, Any]]] = [
        ropes or [{}],
        norms if weights.gains else [{}],
        [{}, interleaved] if weights.n_heads > 1 else [{}],
        [{}, exchanged] if weights.n_heads == weights.n_kv_heads else [{}],
    ]
    for rope, norm, layout, swap in itertools.product(*choices):
        settings = {**reading.settings, **rope, **norm, **layout, **swap}
        yield Reading(weights, settings, reading.structural)


# What no name tells: counts of heads, folded scales, shared modules.


def count_of(instance: Any, names: tuple[str, ...], sizes: Mapping[str, Any]) -> int | None:
    """A whole number that `sizes`, the object, its config or a module of it keeps under such a name."""
    kept = vars(instance) if hasattr(instance, "__dict__") else {}
    configs = [vars(value) for name, value in kept.items() if name in ("config", "cfg") and hasattr(value, "__dict__")]
    modules = [vars(module) for module in kept.get("_modules", {}).values() if module is not None]
    for place in (sizes, kept, *configs, *modules):
        for key, value in place.items():
            plain = key.lower().strip("_")
            # Short names must be whole, longer ones may begin a name, the longest may stand anywhere in it.
            hit = any(plain == n or (len(n) > 2 and plain.startswith(n)) or (len(n) > 5 and n in plain) for n in names)
            of_groups = re.search("kv|group|key_value", plain) is not None
            if hit and type(value) is int and of_groups == ("kv_head" in names) and key not in VALUES:
                return value
    return None


def heads_of(instance: Any, target: Target) -> tuple[int | None, int | None]:
    """How many heads of queries, and of keys and values, as far as anything tells."""
    sizes = target.options.args
    heads = count_of(instance, ("n_head", "num_head", "heads", "h", "n_h", "n_cabezas"), sizes)
    if heads is None:
        wanted = inspect.signature(target.thing).parameters
        takes = [name for name in wanted if re.search(r"head|cabeza|^h$|config|cfg", name, re.I)]
        heads = sizes.get("HEADS", HEADS) if any(not re.search("dim|size", name) for name in takes) else None
    return heads, count_of(instance, ("kv_head", "kv_group", "n_group", "num_group", "key_value_heads"), sizes)


def width_of(parts: Parts, sizes: Mapping[str, Any]) -> int:
    """Width of the input, from the matrix of queries. UncheckedError where there is none."""
    arrays = parts.weights.get("q") or parts.weights.get("qkv")
    if not arrays:
        raise UncheckedError("no_weights")
    shape = arrays[0].value.shape
    if arrays[0].linear:
        return int(shape[1])
    usual: int = sizes.get("WIDTH", WIDTH)
    return usual if usual in shape else int(max(shape))


def _is_one_module(instance: Any) -> bool:
    """Does a list of heads hold one module several times?"""
    kept = getattr(instance, "__dict__", {})
    for heads in (*kept.get("_modules", {}).values(), *kept.values()):
        listed = isinstance(heads, list) or type(heads).__name__ == "ModuleList"
        if listed and len(heads) > 1 and hasattr(heads[0], "__dict__") and len(set(map(id, heads))) == 1:
            return True
    return False


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
