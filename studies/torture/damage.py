"""Ways to damage a file: its bytes, the header of its tensors, a value of its JSON."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    *(0, -1, 1, 2**31, 2**63, 10**9, 10**12, 10**30, 1.5, 1e308, float("nan"), float("-inf"), True, None),
    *("", "x", "\x1b[31mred\x07", "../../x", "\ud800", "\u202e", "a" * 10_000, "NaN", "0"),
    *([], {}, [[[]]], {"a": {"b": []}}, [None], [1, "x"], [-1], {"": None}),
]
PLACES = ["../stopped/model.safetensors", "/dev/zero", "/etc/hostname", "model.bin", "", "..", "a/b.safetensors"]
PLACES += ["config.json", "./model-00001-of-00002.safetensors", "nothing.safetensors", "x" * 5000, "\x00", "\x1b[2J"]


def _flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _swap(data: bytes, rng: random.Random) -> bytes:
    size = max(1, len(data) // 9)
    a, b = sorted(rng.randrange(max(1, len(data) - size)) for _ in range(2))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 7, 300))) + data[place:]


def _lines(data: bytes, rng: random.Random) -> bytes:
    """Lines that are gone, doubled or in another order."""
    lines = data.splitlines(keepends=True)
    place = rng.randrange(len(lines) or 1)
    how = rng.choice(("gone", "doubled", "shuffled"))
    if how == "shuffled":
        rng.shuffle(lines)
        return b"".join(lines)
    return b"".join(lines[:place] + lines[place : place + 1] * (2 * (how == "doubled")) + lines[place + 1 :])


def _huge_header(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((2**63, 2**40, 2**31, 10**8, 3)).to_bytes(8, "little") + data[8:]


def _header(data: bytes, rng: random.Random) -> bytes:
    """Another type, shape, place or name of a tensor; or other metadata."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = [name for name in header if name != "__metadata__"]
    tensor, other = rng.choice(names), rng.choice(names)
    kind = rng.choice(("swap", "dtype", "shape", "place", "name", "gone", "metadata"))
    if kind == "swap":
        header[tensor], header[other] = header[other], header[tensor]
    elif kind == "dtype":
        header[tensor]["dtype"] = rng.choice(("F16", "I32", "BF16", "F8_E5M2", "BOOL", "F64", "X9"))
    elif kind == "shape":
        header[tensor]["shape"] = rng.choice(([], [0], [10**12], [-1, -5], header[tensor]["shape"][::-1], "x"))
    elif kind == "place":
        header[tensor]["data_offsets"] = rng.choice(([0, 0], [0, 10**12], [5, 3], header[other]["data_offsets"]))
    elif kind == "name":
        header["\x1b[31m" + tensor] = header.pop(tensor)
    elif kind == "gone":
        del header[tensor]
    else:
        known = header.get("__metadata__") or {}
        values = ({}, None, {**known, "key": "x"}, {**known, "step": "-1"}, {"sha256": "x"}, {"format": 1}, [])
        header["__metadata__"] = rng.choice((*values, {name: "x" for name in known if name != "sha256"}))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[start:]


def _numbers(data: bytes, rng: random.Random) -> bytes:
    """Numbers that are none, too large, or of another weight."""
    start = 8 + int.from_bytes(data[:8], "little")
    place = start + 4 * rng.randrange(max(1, (len(data) - start) // 4))
    words = b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", b"\0\0\0\0"
    return data[:place] + rng.choice(words) + data[place + 4 :]


def _json(data: bytes, rng: random.Random, values: list[Any] = VALUES) -> bytes:
    """One value of a JSON document, or of one of its lines, replaced, removed or renamed."""
    lines = data.decode().splitlines()
    many = len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in lines)
    chosen = rng.randrange(len(lines)) if many else 0
    document = json.loads(lines[chosen] if many else data)
    places: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        places += ((node, key) for key in keys)
        todo += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = rng.choice(places)
    kind = rng.choice(("value", "value", "value", "gone", "more"))
    if kind == "gone":
        del node[key]
    elif kind == "more" and isinstance(node, dict):
        node[rng.choice(("more", "\x1b[2J", "", "auto_map", "_attn_implementation"))] = rng.choice(values)
    else:
        node[key] = rng.choice(values)
    text = json.dumps(document if rng.random() < 0.95 else rng.choice(values))
    return ("\n".join([*lines[:chosen], text, *lines[chosen + 1 :]]) + "\n" if many else text).encode()


Damage = Callable[[bytes, random.Random], bytes]
BYTES: dict[str, Damage] = {
    "flipped bits": _flip,
    "a cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "swapped blocks": _swap,
    "inserted bytes": _insert,
    "zeros": lambda data, rng: data[: (at := rng.randrange(len(data) + 1))] + bytes(len(data) - at),
    "other lines": _lines,
    "deep JSON": lambda data, rng: rng.choice((b"[", b'{"a":')) * 100_000,
    "nothing": lambda data, rng: b"",
}
TENSORS: dict[str, Damage] = {"a huge header": _huge_header, "another header": _header, "other numbers": _numbers}
OBJECTS: dict[str, Damage] = {"another value": _json}
PATHS: dict[str, Damage] = {"another path": lambda data, rng: _json(data, rng, PLACES)}


def ways(path: Path) -> dict[str, Damage]:
    """What may befall a file of this kind; what is particular to it as often as all else."""
    kind = TENSORS if path.suffix == ".safetensors" else OBJECTS if path.suffix in (".json", ".jsonl", ".ipynb") else {}
    return kind | (PATHS if path.name.endswith(".index.json") else {})
