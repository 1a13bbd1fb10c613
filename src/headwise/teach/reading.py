"""Where a learner's object keeps W_Q, W_K, W_V and W_O, told by names and shapes; and how they can be read.

A `Reading` is one hypothesis on how correct code may use these weights: layouts of heads, orders of a fused matrix, the
side on which a matrix is multiplied, q and k exchanged. Code that any reading reproduces is correct.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.teach.arguments import NAMES
from headwise.teach.form import Weights

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
    n_heads: int | None = None
    n_kv_heads: int | None = None
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
    """The arrays of an object by role.

    mapping  what `--map` says: role -> name of the attribute
    """
    parts = Parts()
    lists: dict[str, list[Array]] = {}
    for array in arrays_of(target):
        names = [part for part in array.path.split(".") if part]
        role = next((r for r, name in mapping.items() if name in names or name == ".".join(names)), None)
        norm = any("norm" in part.lower() or part.lower().startswith("ln") for part in names)
        role = role or role_of(array.path)
        if norm:
            side = re.search(r"\b(q|k)", array.path)
            if side and array.value.ndim == 1:
                parts.gains[side[1]] = array
            continue
        if role is None:
            lists.setdefault(".".join(names[:1]), []).append(array)
            continue
        flat = array.value.ndim == 1 or (array.value.ndim == 2 and _BIAS.search(array.path) is not None)
        (parts.biases if flat else parts.weights).setdefault(role, []).append(array)
    if "q" not in parts.weights and "qkv" not in parts.weights:
        if len(parts.weights.get("o", ())) > 2:  # `linears`, `projections`: a list of them all
            lists["o"] = parts.weights.pop("o") + parts.biases.pop("o", [])
        _numbered(parts, lists)
    return parts


def _numbered(parts: Parts, lists: Mapping[str, list[Array]]) -> None:
    """A list of four Linears without names: W_Q, W_K, W_V, W_O in this order, or the first three of them."""
    for arrays in lists.values():
        matrices = [a for a in arrays if a.value.ndim == 2]
        if len(matrices) in (3, 4):
            for role, matrix in zip("qkvo", matrices, strict=False):
                parts.weights.setdefault(role, []).append(matrix)
            for role, bias in zip("qkvo", [a for a in arrays if a.value.ndim == 1], strict=False):
                parts.biases.setdefault(role, []).append(bias)


def readings(parts: Parts, n_heads: int | None, n_kv_heads: int | None, width: int) -> Iterator[Reading]:
    """Every reading of the weights, the usual ones first. HeadwiseError where W_Q, W_K and W_V are not found."""
    if "q" not in parts.weights and "qkv" not in parts.weights:
        raise HeadwiseError("W_Q was not found among the weights; pass --map q=NAME,k=NAME,v=NAME,o=NAME")
    count = 0
    for fused, side in itertools.product(("blocks", "heads", "features", "kqv", "vqk", "qvk"), ("in-out", "out-in")):
        reading = _read(parts, n_heads, n_kv_heads, width, fused, side)
        if reading is None:
            continue
        if fused != "blocks" and not ({"qkv", "kv"} & set(parts.weights)):
            continue
        if side == "out-in" and not any(_either_side(a, width) for each in parts.weights.values() for a in each):
            continue
        count += 1
        yield reading
    if not count:
        shapes = ", ".join(f"{r} {a[0].value.shape}" for r, a in parts.weights.items())
        raise HeadwiseError(f"the shapes of the weights fit no attention layer: {shapes}; pass --map q=NAME,k=NAME,...")


def _either_side(array: Array, width: int) -> bool:
    return not array.linear and array.value.ndim == 2 and array.value.shape[0] == array.value.shape[1]


def _matrix(array: Array, width: int, n: int, side: str, output: bool) -> Any:
    """(in, out), heads as blocks of the width; `output` for W_O, which reads joined heads."""
    value = array.value
    if value.ndim == 3:  # einsum parameters: axes told apart by their sizes
        h = value.shape.index(n) if n in value.shape else 0
        c = next((i for i, size in enumerate(value.shape) if size == width and i != h), None)
        if c is None:
            return None
        d = 3 - h - c
        moved = value.transpose((h, d, c) if output else (c, h, d))
        return moved.reshape(-1, width) if output else moved.reshape(width, -1)
    if value.ndim != 2:
        return None
    if array.linear:
        return value.T
    if value.shape[0] == value.shape[1]:
        return value if side == "in-out" else value.T
    return value if (value.shape[1] if output else value.shape[0]) == width else value.T


def _read(parts: Parts, H: int | None, G: int | None, width: int, fused: str, side: str) -> Reading | None:
    """One reading, or None where the shapes do not allow it."""
    w, b, structural = parts.weights, parts.biases, []
    listed = max((len(each) for role, each in w.items() if role in "qkv"), default=1)
    H = listed if listed > 1 else H or 1
    G = G or H
    matrices: dict[str, Any] = {"o": None}
    for role, each in w.items():
        n = H if role in "qo" else G
        pieces = [_matrix(a, width, n, side, role == "o") for a in each]
        if any(piece is None for piece in pieces):
            return None
        matrices[role] = pieces[0] if role == "o" else np.concatenate(pieces, 1)
    biases = {role: np.concatenate([a.value.reshape(-1) for a in each]) for role, each in b.items()}
    if len(w.get("o", ())) > 1:
        matrices["o"] = np.concatenate([_matrix(a, width, H, side, True) for a in w["o"]], 0)
    for role in ("qkv", "kv"):
        if role in matrices and not _unfuse(role, matrices, biases, H, G, fused):
            return None
    if not {"q", "k", "v"} <= set(matrices):
        return None
    d = matrices["q"].shape[1] // H
    out, widths = matrices["o"], {matrices[role].shape[1] for role in "qkv"}
    if listed == 1 and H > 1 and out is not None and len(widths) == 1 and out.shape[0] == H * min(widths):
        d, G = min(widths), H
        structural.append("heads-share-projection")
        matrices |= {role: np.tile(matrices[role], (1, H)) for role in "qkv"}
        biases = {role: x if role == "o" else np.tile(x, H) for role, x in biases.items()}
    if d < 1 or matrices["q"].shape[1] % H or matrices["k"].shape[1] % d:
        return None
    G = matrices["k"].shape[1] // d
    if H % G or matrices["v"].shape[1] % G:
        return None
    if parts.same_head:
        structural.append("heads-share-projection")
    gains = {role: a.value for role, a in parts.gains.items() if a.value.shape == (d,)}
    settings = {"qk_norm": "rms"} if gains else {}
    return Reading(Weights(H, G, matrices, biases, gains), settings, tuple(structural))


def _unfuse(role: str, matrices: dict[str, Any], biases: dict[str, Any], H: int, G: int, fused: str) -> bool:
    """Take W_QKV, or W_KV, apart: "blocks" q | k | v, "heads" (h, 3, d), "features" (h, d, 3), or other orders."""
    whole, bias = matrices.pop(role), biases.pop(role, None)
    names = "qkv" if role == "qkv" else "kv"
    if fused in ("kqv", "vqk", "qvk"):
        names = fused if role == "qkv" else "vk"
    n, parts = whole.shape[1], len(names)

    def cut(x: Any) -> list[Any]:
        if fused in ("heads", "features"):
            d = n // parts // H
            axes = x.reshape(-1, H, parts, d) if fused == "heads" else x.reshape(-1, H, d, parts).swapaxes(2, 3)
            return [axes[:, :, i].reshape(-1, H * d) for i in range(parts)]
        if role == "qkv" and n % (H + 2 * G) == 0 and G != H:
            d = n // (H + 2 * G)
            return np.split(x.reshape(-1, n), [H * d, (H + G) * d], 1)
        return np.split(x.reshape(-1, n), parts, 1)

    if n % parts and (role != "qkv" or n % (H + 2 * G)):
        return False
    if fused in ("heads", "features") and (G != H or n % (parts * H)):
        return False
    matrices.update(zip(names, cut(whole), strict=True))
    if bias is not None:
        biases.update({name: piece.reshape(-1) for name, piece in zip(names, cut(bias), strict=True)})
    return True


def styles(reading: Reading, rotary: bool, themes: list[float]) -> Iterator[Reading]:
    """The readings of the same weights in every layout and, where the code turns queries and keys, every rotation."""
    interleaved = {f"split_{role}": "interleaved" for role in "qkv"} | {"join": "interleaved"}
    exchanged = {"q_from": "k", "k_from": "q"}
    same = reading.weights.n_heads == reading.weights.n_kv_heads
    ropes = [{"rope": (turn, turn, base)} for base in themes for turn in ("half", "interleaved")] if rotary else [{}]
    norms = [{"qk_norm": kind} for kind in ("rms", "layer")] if reading.weights.gains else [{}]
    for rope, norm in itertools.product(ropes, norms):
        for layout in ({}, interleaved) if reading.weights.n_heads > 1 else ({},):
            for swap in ({}, exchanged) if same else ({},):
                settings = {**reading.settings, **rope, **norm, **layout, **swap}
                yield Reading(reading.weights, settings, reading.structural)
