"""Files appear whole or not at all, and are read as what they should be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from headwise.errors import HeadwiseError


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


def read_text(path: str | Path) -> str:
    """A UTF-8 text, whole, with line ends as \\n. Raises HeadwiseError for anything else."""
    path = Path(path)
    if path.is_dir():
        raise HeadwiseError(f"{path} is a folder; pass a text file")
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise HeadwiseError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise HeadwiseError(f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    if not text.strip():
        raise HeadwiseError(f"{path} is empty, or holds nothing but white space")
    return text
