"""An extension of griffe, for `make docs`: the comments behind the fields of a record, in the reference."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """The comment behind each field of a dataclass, as an entry of its docstring."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        labels = {str(decorator.value) for decorator in cls.decorators}
        known = cls.docstring
        if known is None or "Attributes:" in known.value or not any("dataclass" in label for label in labels):
            return
        fields = list(self._fields(cls))
        if fields:
            known.value = "\n".join([inspect.cleandoc(known.value), "", "Attributes:", *fields])

    @staticmethod
    def _fields(cls: griffe.Class) -> Iterator[str]:
        for name, member in cls.attributes.items():
            if name.isupper():  # a constant
                continue
            line = (cls.lines_collection[cls.filepath][member.lineno - 1] if member.lineno else "").strip()
            if match := re.match(rf"{name}: .*?  # (.+)$", line):
                yield f"    {name}: {match[1]}"
