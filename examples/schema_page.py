"""Writes docs/schema.json: what the JSON of every command holds, out of the records that the commands print.

A field's type is its annotation, and its meaning the comment behind it; what a command adds to a record stands here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from headwise.checker.bugs import Finding, Verdict
from headwise.cost import Price, Variant
from headwise.courses.ladder import Ladder
from headwise.heads.align import Alignment
from headwise.heads.table import Story, Survey
from headwise.learn.exercises import Mark
from headwise.models.verify import Verified
from headwise.records import HeadSteps
from headwise.reshape.job import Reshaped

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schema.json"
VERSION = 1
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ABOUT = (
    "What `headwise COMMAND --json` prints. The field `schema` of a document names its entry under $defs: "
    "headwise-why-1 is why. The number rises when a field goes or changes its meaning; fields may be added. A number "
    "that was not measured, or is not finite, is null. The headwise.json beside a reshaped model is reshaped, without "
    "`schema`."
)
# Where annotations name what is imported for type checkers alone.
NAMES = {"np": np, "NDArray": NDArray, "nn": torch.nn, "Tensor": torch.Tensor, "Sequence": Sequence}


class Optional:
    """A field that may be left out."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


TRAINED: dict[str, Any] = {
    "run": str,
    "report": str,
    "held_out_loss": float,
    "baseline_loss": float,
    "baseline": str | None,
    "cells_right": {"model": int, "ngram": int, "all": int, None: None},
    "facts": dict[str, str],
    "samples": list[str],
}
LINK = {"html": str | None}
TEXTS = {"id": str, "name": str, "wrong": str, "fix": str}
MODEL = {"model": str, "d_model": int, "n_heads": int, "head_dim": int, "n_kv_heads": int, "variant": str}

# For each document the records whose fields it has, and what stands beside them.
DOCUMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "heads": (
        "headwise heads",
        (Survey, {"sentences": dict[str, dict[str, str]], "report": str | None}),
    ),
    "why": ("headwise why", (Story, LINK)),
    "align": ("headwise align", (Alignment, {"alignment_heads": list[list[int]]})),
    "generate": (
        "headwise generate",
        ({"prompt": str, "text": str, "ids": list[int], "n_tokens": int, "tokens_per_second": float},),
    ),
    "train": ("headwise train", (TRAINED,)),
    "verify": ("headwise verify", (Verified, {"right": bool})),
    "look": ("headwise look of a run", ({"run": str, "report": str, "address": str, "opened": bool},)),
    "live": ("headwise look of a model", ({"model": str, "address": str, "opened": bool},)),
    "cost": (
        "headwise cost",
        (Price, {"variants": list[Variant] | None}),
    ),
    "models": (
        "headwise cost without MODEL",
        ({"models": [MODEL | {"window": int | None, "n_layers": int, "cache_bytes_per_token": int}]},),
    ),
    "reshaped": ("headwise share and prune", (Reshaped, {})),
    "trace": ("headwise trace", (HeadSteps, LINK)),
    "ladder": ("headwise ladder", (Ladder,)),
    "check": (
        "headwise check",
        (
            Verdict,
            {"bugs": [Finding]},
            {"others": Optional([(Verdict, {"bugs": [Finding]})])},  # of a file with several attentions
        ),
    ),
    "bugs": ("headwise check --list and --explain", ({"bugs": [TEXTS]},)),
    "learn": (
        "headwise learn",
        (
            {"folder": str, "language": str, "passed": list[int], "next": str | None},
            {"status": Literal["new", "done", "open", "wrong", "failed"]},
            {"marked": [({"exercise": int, "file": str, "hint": str | None}, Mark)]},
        ),
    ),
    "solution": ("headwise learn --solution", ({"exercise": int, "solution": str},)),
}
LEFT_OUT = {"Reshaped": {"model"}, "Verdict": {"findings", "lang", "others"}, "Finding": {"quote"}}


class Schemas:
    """The records that were met, each written once under $defs."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.names: dict[Any, str] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, of a pattern of types, or of records that are joined."""
        if isinstance(kind, dict):
            return self._of_pattern(kind)
        if isinstance(kind, tuple):
            return self.joined(kind)
        if isinstance(kind, list):
            return {"type": "array", "items": self.of(kind[0])}
        if dataclasses.is_dataclass(kind):
            return self._reference(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self._of_union(arguments)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is tuple and ... not in arguments:
            items = [self.of(each) for each in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin in (tuple, list, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if origin is np.ndarray:
            return {"type": "array"}
        plain = {int: "integer", str: "string", bool: "boolean", NoneType: "null", float: ["number", "null"]}
        return {"type": plain[kind]} if kind in plain else {}

    def _of_pattern(self, pattern: Mapping[Any, Any]) -> dict[str, Any]:
        if str in pattern:  # keys that are names of something
            return {"type": "object", "additionalProperties": self.of(pattern[str])}
        schema = self.joined(({name: kind for name, kind in pattern.items() if name is not None},))
        return {"anyOf": [schema, {"type": "null"}]} if None in pattern else schema

    def _of_union(self, kinds: Sequence[Any]) -> dict[str, Any]:
        schemas = [self.of(kind) for kind in kinds]
        if all(schema.keys() == {"type"} for schema in schemas):
            names = [schema["type"] if isinstance(schema["type"], list) else [schema["type"]] for schema in schemas]
            return {"type": list(dict.fromkeys(name for several in names for name in several))}
        return {"anyOf": schemas}

    def _reference(self, kind: Any) -> dict[str, Any]:
        if kind not in self.names:
            name: str = kind.__name__
            name = f"{kind.__module__.rpartition('.')[2]}.{name}" if name in self.records else name
            self.names[kind] = name
            self.records[name] = {}  # which a record with this name in another file sees
            self.records[name] = self.joined((kind,))
        return {"$ref": f"#/$defs/{self.names[kind]}"}

    def joined(self, parts: Sequence[Any]) -> dict[str, Any]:
        """An object with the fields of all parts; a later one says it better."""
        fields: dict[str, Any] = {}
        required: dict[str, None] = {}
        for part in parts:
            for name, kind in part.items() if isinstance(part, dict) else self._fields(part):
                fields[name] = self.of(kind.kind) if isinstance(kind, Optional) else self.of(kind)
                if not isinstance(kind, Optional):
                    required[name] = None
            if not isinstance(part, dict):
                for name, comment in comments(part).items():
                    if name in fields:
                        fields[name] = {**fields[name], "description": comment}
        return {"type": "object", "required": list(required), "properties": fields}

    def _fields(self, record: Any) -> list[tuple[str, Any]]:
        hints = get_type_hints(record, localns=NAMES)
        left_out = LEFT_OUT.get(record.__name__, set())
        return [(field.name, hints[field.name]) for field in dataclasses.fields(record) if field.name not in left_out]


def comments(record: Any) -> dict[str, str]:
    """What stands behind each field of a record, in its source and that of the classes that it extends."""
    told: dict[str, str] = {}
    for kind in reversed(record.__mro__[:-1]):
        if dataclasses.is_dataclass(kind):
            source = inspect.getsource(kind)
            lines = re.finditer(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE)
            told |= {line[1]: re.sub(r"\b(None|NaN|nan)\b", "null", line[2].strip()) for line in lines}
    return told


def schema() -> dict[str, Any]:
    """The document of docs/schema.json."""
    schemas = Schemas()
    documents: dict[str, Any] = {}
    for name, (about, parts) in DOCUMENTS.items():
        document = schemas.joined(parts)
        document["properties"] = {"schema": {"const": f"headwise-{name}-{VERSION}"}} | document["properties"]
        document["required"].insert(0, "schema")
        documents[name] = {"description": about, **document}
    return {
        "$schema": DIALECT,
        "title": "JSON of headwise",
        "description": ABOUT,
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in DOCUMENTS],
        "$defs": documents | dict(sorted(schemas.records.items())),
    }


if __name__ == "__main__":
    PAGE.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(PAGE)
