"""A folder that can be resumed: who asks again for the same work goes on from what is whole there.

    with Kept(folder, ["state.safetensors"], busy="another training is at work there") as kept:
        write_whole(folder / "state.safetensors", ...)      # as often as it likes: a kill leaves the one before
        log = StepLog(folder / "metrics.jsonl", start)      # or line by line

Runs, films, surveys, comparisons, healings and the tokens of large texts are kept so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_bytes, remove_unfinished, take_lock, write_whole

LOCK = "lock"


def digest(document: Any, *more: bytes) -> str:
    """SHA-256 of plain data, whatever the order of its names, and of bytes after it."""
    hashed = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for data in more:
        hashed.update(data)
    return hashed.hexdigest()


class Kept:
    """A folder, made where it is not there, and cleared of what killed processes left half-written.

    names  of the files that are kept there, with * for any text; nothing else is touched
    busy   one process at a time has the folder, and this is what another one is told; None: many may have it
    wait   another one waits instead
    """

    def __init__(
        self,
        folder: Path,
        names: Iterable[str] = (),
        *,
        busy: str | None = None,
        wait: bool = False,
        lock: str = LOCK,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = folder, folder / lock
        is_locked = wait or busy is not None
        self._held = take_lock(self._lock, busy) if is_locked else -1
        self.clear(names, is_locked)

    def clear(self, names: Iterable[str], alone: bool = True) -> None:
        """Remove what killed processes left of these files."""
        remove_unfinished(self.folder, names, alone)

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the folder."""
        if self._held >= 0:
            self._lock.unlink(missing_ok=True)
            os.close(self._held)
            self._held = -1


class StepLog:
    """A file that grows while work goes on: one JSON object a line, each of the step that it names.

    Work that goes on from step `start` finds the lines up to that step in `rows`; later ones, and half a line that a
    kill may have left, are dropped. A `header` is the first line; what stands under another one is dropped, too.
    Raises HeadwiseError for any other line that is damaged.
    """

    def __init__(self, path: Path, start: int, header: dict[str, Any] | None = None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        lines = read_bytes(path).splitlines() if path.exists() else []
        if header is not None:
            lines = lines[1:] if lines[:1] == [json.dumps(header).encode()] else []
        for number, line in enumerate(lines, 1 if header is None else 2):
            try:
                row = json.loads(line.decode("utf-8"))
                if row["step"] <= start:  # a TypeError where it is no number
                    self.rows.append(row)
            except (ValueError, KeyError, TypeError, RecursionError):
                if line is not lines[-1]:
                    raise HeadwiseError(f"{path} is damaged in line {number}; remove that line to resume") from None
        write_whole(path, "".join(json.dumps(row) + "\n" for row in ([header] if header else []) + self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """One more line."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
