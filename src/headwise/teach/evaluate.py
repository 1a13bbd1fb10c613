"""The learner's side: run a file and evaluate calls on it, in a process of its own. Started by `marking`.

The time, the memory and what the process may touch are limited by `sandbox`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.teach.sandbox import alone


def plain(value: Any) -> Any:
    """Numbers and lists of what a call gave; the name of its type where it is neither."""
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else type(value).__name__


def outcome(code: str | Mapping[str, Any], name: str, setup: str, calls: Sequence[str]) -> dict[str, Any]:
    """What the calls give: `values`, and where one fails `call`, `error` and `line`.

    code  the text of a file, or the names that it has defined
    """
    values: list[Any] = []
    call = ""
    try:
        module: dict[str, Any] = {"__name__": "exercise", "__file__": name} if isinstance(code, str) else {**code}
        if isinstance(code, str):
            exec(compile(code, name, "exec"), module)
        inputs: dict[str, Any] = {}
        exec(compile(setup, "setup", "exec"), inputs)
        for call in calls:
            kept = {key: _copied(value) for key, value in inputs.items()}
            values.append(plain(eval(call, {**module, **kept})))
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}".removesuffix(": ")
        return {"values": values, "call": call, "error": text, "line": line}
    return {"values": values}


def _copied(value: Any) -> Any:
    """A copy, so that code which writes into its input spoils nothing; modules and functions as they are."""
    with contextlib.suppress(TypeError):
        return copy.deepcopy(value)
    return value


def main() -> None:
    """In the process of its own: what the calls give, of the variants first, which are ours, then of the learner."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    codes = {**job["variants"], job["name"]: job["source"]}
    alone(
        job,
        job["variants"][""],
        lambda: {name: outcome(code, name, job["setup"], job["calls"]) for name, code in codes.items()},
    )


if __name__ == "__main__":
    main()
