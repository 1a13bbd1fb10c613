"""Files appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader, a crash or a full disk never sees half of it.

    The bytes go to a temporary file in the same folder, are synced to the disk, and take the final name in one
    atomic rename. On any failure the earlier file is untouched and the temporary one is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
