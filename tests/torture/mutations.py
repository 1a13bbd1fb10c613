"""Every file that a command reads, damaged: one clear line or the same result; never a traceback, a hang, gigabytes."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import FailedError, check_refusal, must, run

TEXT = "the cat sat on the mat and the dog sat on the log . " * 40
VALUES: list[Any] = [
    *(0, -1, 1, 2**31, 10**9, 10**12, 10**30, 1.5, float("nan"), True, None, "", "x", "\x1b[31mred\x07", "../../x"),
    *("a" * 10_000, [], {}, [[[]]], {"a": {"b": []}}),
]


def prepare(base: Path) -> None:
    """A run, a stopped run, a model in the layout of others, and what the commands say of them when all is whole."""
    base.mkdir()
    text = base / "text.txt"
    text.write_text(TEXT)
    size = ("--preset", "llama", "--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 1, "--context", 16)
    must(base, "train", text, *size, "--steps", 5, "--samples", 0, "--out", base / "run")
    shutil.copytree(base / "run", base / "foreign", ignore=shutil.ignore_patterns("run.json", "film*", "report*"))
    config = json.loads((base / "foreign" / "config.json").read_text())
    del config["headwise"]
    (base / "foreign" / "config.json").write_text(json.dumps(config))
    shutil.copytree(base / "run", base / "stopped")
    run_file = base / "stopped" / "run.json"
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "status": "training", "summary": None}))
    (base / "ids").write_text("1 2 3 4\n5 6 7\n")
    for name in COMMANDS:
        (base / f"{name}.expected").write_text(_result(base, base, name)[1])


# What is run on a copy of all of it; the files that it reads; must a result that it gives be the same?
COMMANDS: dict[str, tuple[Callable[[Path], tuple[object, ...]], tuple[str, ...], bool]] = {
    "generate": (
        lambda p: ("generate", p / "run", "--prompt", "the c", "--tokens", 5, "--temperature", 0),
        ("run/config.json", "run/model.safetensors", "run/tokenizer.json", "run/run.json"),
        True,
    ),
    "heads": (
        lambda p: ("heads", p / "run", "--text", "the cat sat", "--json", "--html", p / "page.html"),
        ("run/config.json", "run/model.safetensors", "run/tokenizer.json", "run/run.json"),
        True,
    ),
    "resume": (
        lambda p: ("train", "--resume", "--out", p / "stopped", "--json"),
        ("stopped/metrics.jsonl", "stopped/run.json", "stopped/film.jsonl", "text.txt"),
        False,
    ),
    "foreign": (
        lambda p: ("generate", p / "foreign", "--ids", p / "ids", "--tokens", 3, "--temperature", 0),
        ("foreign/config.json", "foreign/model.safetensors", "foreign/generation_config.json", "ids"),
        False,
    ),
    "tokenizer": (
        lambda p: ("generate", p / "foreign", "--prompt", "the c", "--tokens", 3, "--temperature", 0),
        ("foreign/tokenizer.json", "foreign/tokenizer_config.json"),
        False,
    ),
    "cost": (lambda p: ("cost", p / "foreign", "--json"), ("foreign/config.json",), False),
    "text": (
        lambda p: ("heads", p / "run", "--text", p / "text.txt", "--tokens", 16, "--documents", 2, "--json"),
        ("text.txt",),
        False,
    ),
}


def _result(place: Path, scratch: Path, name: str) -> tuple[int, str, str]:
    code, printed, said = run(scratch, *COMMANDS[name][0](place))
    return code, re.sub(r'"(seconds|html|report|model|run)": [^\n]*', "", printed.replace(str(place), "")), said


def case(seed: int, place: Path, base: Path) -> str:
    """Damage one file that one command reads."""
    rng = random.Random(seed)
    name = rng.choice(sorted(COMMANDS))
    file, strict = rng.choice(COMMANDS[name][1]), COMMANDS[name][2]
    shutil.copytree(base, place / "copy")
    path = place / "copy" / file
    if not path.exists():
        return "absent"
    before = path.read_bytes()
    how = rng.choice([x for x in MUTATIONS if path.suffix in MUTATIONS[x]] or list(BYTES))
    after = (DOCUMENTS | BYTES)[how](before, rng)
    path.write_bytes(after)
    code, printed, said = _result(place / "copy", place, name)
    if code == 0:
        same = printed == (base / f"{name}.expected").read_text()
        if strict and not same and after != before:
            raise FailedError(f"{name} gives another result, unsaid, after {how} in {file}")
        return f"{name}: {'same' if same else 'other'} result"
    try:
        check_refusal(code, said)
    except FailedError as error:
        raise FailedError(f"{name} after {how} in {file}: {error}") from None
    return f"{name}: refused"


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


def _huge_header(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((2**63, 2**40, 2**31, 10**8, 3)).to_bytes(8, "little") + data[8:]


def _header(data: bytes, rng: random.Random) -> bytes:
    """Another type, shape, place or name of a tensor."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    kind = rng.choice(("swap", "dtype", "shape", "place", "name"))
    if kind == "swap":
        header[one], header[other] = header[other], header[one]
    elif kind == "dtype":
        header[one]["dtype"] = rng.choice(("F16", "I32", "BF16", "F8_E5M2", "BOOL", "F64", "X9"))
    elif kind == "shape":
        header[one]["shape"] = rng.choice(([], [0], [10**12], [-1, -5], header[one]["shape"][::-1], "x"))
    elif kind == "place":
        header[one]["data_offsets"] = rng.choice(([0, 0], [0, 10**12], [5, 3], header[other]["data_offsets"]))
    else:
        header["\x1b[31m" + one] = header.pop(one)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[start:]


def _json(data: bytes, rng: random.Random) -> bytes:
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
        node[rng.choice(("more", "\x1b[2J", ""))] = rng.choice(VALUES)
    else:
        node[key] = rng.choice(VALUES)
    text = json.dumps(document)
    return ("\n".join([*lines[:chosen], text, *lines[chosen + 1 :]]) + "\n" if many else text).encode()


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": _flip,
    "a cut": lambda data, rng: data[: rng.randrange(len(data) + 1)],
    "swapped blocks": _swap,
    "inserted bytes": _insert,
    "zeros": lambda data, rng: data[: (at := rng.randrange(len(data) + 1))] + bytes(len(data) - at),
    "deep JSON": lambda data, rng: rng.choice((b"[", b'{"a":')) * 100_000,
}
DOCUMENTS = {"a huge header": _huge_header, "another header": _header, "another value": _json}
ANY = (".json", ".jsonl", ".safetensors", ".txt", "")
MUTATIONS: dict[str, tuple[str, ...]] = dict.fromkeys(BYTES, ANY)
MUTATIONS |= dict.fromkeys(("a huge header", "another header"), (".safetensors",))
MUTATIONS |= {"another value": (".json", ".jsonl")}
