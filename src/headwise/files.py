"""Files appear whole or not at all, and are read as what they should be; texts of files and of folders of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader, a crash or a full disk never sees half of it.

    The bytes go to a temporary file in the same folder, are synced to the disk, and take the final name in one
    atomic rename. On any failure the earlier file is untouched and the temporary one is removed. A symbolic link stays
    a link: the file that it names is replaced. A pipe, a device and standard output (/dev/stdout) are written to and
    never replaced. One thread of a process writes a path at a time.
    """
    data = data.encode() if isinstance(data, str) else data
    if is_stream(path):
        with Path(path).open("wb") as stream:
            stream.write(data)
        return
    # through links: a rename onto one would replace the link
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def is_stream(path: str | Path) -> bool:
    """Is it something to write to rather than to replace: a pipe, a device, an open file of this process?"""
    path = Path(path)
    # By name: standard output may lead to a file, as in `headwise ... > out.txt`, and is written to all the same.
    is_open = path.is_relative_to("/proc") or path.is_relative_to("/dev/fd")
    if is_open or str(path) in ("/dev/stdout", "/dev/stderr"):
        return True
    try:
        return path.exists() and not (path.is_file() or path.is_dir())
    except OSError:  # it may not be looked at; whoever opens it is told so
        return False


def sync_folder(folder: Path) -> None:
    """The names in a folder reach the disk: a rename that only memory knows is lost when the power fails."""
    # Where a folder cannot be opened or synced, as on Windows, the system decides when.
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# texts that come with the package: a little book, and a list of first names
PACKAGED = ("tale", "names")


def text_path(name: str | Path) -> Path:
    """The text file `name`. Where no such file exists, `tale` and `names` are the texts that come with the package."""
    path = Path(name)
    is_packaged = str(name) in PACKAGED and not path.exists()
    return packaged(f"data/{name}.txt") if is_packaged else path


def packaged(name: str) -> Path:
    """Where a file that comes with the package lies, such as `data/tale.txt`."""
    return Path(__file__).parent / name


@cache
def read_toml(name: str) -> dict[str, Any]:
    """A TOML file that comes with the package, by its path in it; each is read once."""
    return tomllib.loads(packaged(name).read_text(encoding="utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON document, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


STDIN = "-"  # as the name of a text: standard input
TEXT = "text.txt"  # where the folder of a run keeps what came from standard input


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file. What may never end, a pipe or a device, is not opened."""
    check_file(Path(path))
    return Path(path).read_bytes()


def check_file(path: Path) -> int:
    """The size in bytes of a regular file. Raises HeadwiseError for what is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise HeadwiseError(f"{path} does not exist") from None
    except OSError as error:
        raise HeadwiseError(f"{path} cannot be read: {error.strerror}") from None
    if path.is_dir():
        raise HeadwiseError(f"{path} is a folder; pass a file")
    if not path.is_file():
        raise HeadwiseError(
            f"{path} is a pipe or a device; pass a file, or for a text {STDIN} and standard input"
        )
    return status.st_size


def require_empty(folder: Path) -> None:
    """Refuse a folder to be filled that holds something, and a file of its name."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise HeadwiseError(f"{folder} exists and is not empty; pass another folder")


def read_text(path: str | Path, blank: bool = False) -> str:
    """A UTF-8 text, whole, with line ends as \\n and no byte order mark; `-` is standard input. `blank`: may it be?

    Raises HeadwiseError for anything else.
    """
    if str(path) == STDIN:
        # a service may have closed it
        path = "standard input"
        data = sys.stdin.buffer.read() if sys.stdin else b""
    elif Path(path).is_dir():
        raise HeadwiseError(f"{path} is a folder; pass a text file")
    else:
        data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadwiseError(
            f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not blank and not text.strip():
        raise HeadwiseError(f"{path} is empty, or holds nothing but white space")
    return text


def read_json(path: str | Path) -> Any:
    """A JSON document in UTF-8. Raises HeadwiseError for anything else, and for one nested too deep to be read."""
    data = read_bytes(path)
    try:
        # without the byte order mark, if there is one
        return json.loads(data.decode("utf-8-sig"))
    # ValueError: also a number of more digits than Python reads
    except (ValueError, RecursionError) as error:
        raise HeadwiseError(f"{path} is no JSON: {error}") from None


def free_memory() -> int:
    """Bytes that may still be taken: what the machine has free, or less where a control group has a limit."""
    with contextlib.suppress(
        OSError, ValueError, IndexError
    ):  # only Linux has this file
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        available = 1024 * int(text.split("MemAvailable:")[1].split()[0])
        group = Path("/sys/fs/cgroup")
        # no group, or one without a limit, whose `memory.max` is "max"
        with contextlib.suppress(OSError, ValueError):
            most = int((group / "memory.max").read_text(encoding="utf-8"))
            used = int((group / "memory.current").read_text(encoding="utf-8"))
            available = min(available, max(0, most - used))
        return available
    return sys.maxsize  # nobody knows: no bound


# The texts of files and of folders of them.


# characters of a text that become ids at a time; a round choice, for what memory holds easily
PIECE = 2**20
KINDS = (".txt", ".md", ".rst", ".text")  # of the files that are taken of a folder


class Sources:
    """The texts of files and folders, each read once. `name` says which, such as "a.txt and 2 more".

    Of a folder the files of KINDS are taken, in the order of their names. Raises HeadwiseError for what is not there,
    no UTF-8 or blank.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: list[Path] = []
        for path in paths:
            self.files += files_of(path) if path.is_dir() else [path]
        self.size = sum(map(check_file, self.files))  # bytes
        self.name = paths[0].name if paths else ""
        if len(paths) > 1:
            self.name += f" and {len(paths) - 1} more"

    def __iter__(self) -> Iterator[str]:
        """The text of each file."""
        has_text = not self.files  # without files all texts may have been typed
        for file in self.files:
            text = read_text(file, blank=True)
            has_text |= bool(text.strip())
            yield text
        if not has_text:  # a folder may have thousands
            names = ", ".join(map(str, self.files[:3]))
            raise HeadwiseError(f"{names} is empty, or holds nothing but white space")

    def text(self) -> str:
        """One text of all, with a line end between two."""
        *others, last = filter(None, self)
        return "\n".join([*(text.removesuffix("\n") for text in others), last])


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of PIECE characters and up to the end of a line, if it is near."""
    stream = io.StringIO(text, newline="")
    while piece := stream.read(PIECE) + stream.readline(PIECE):
        yield piece


def contents(sources: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files and folders among the sources; and the texts that are given in full.

    Raises HeadwiseError for a blank source, and for one that looks like the name of a file that is not there.
    """
    paths = []
    typed = []
    for source in sources:
        if not source.strip():
            raise HeadwiseError(
                "the text is empty; pass a file, a folder or some words"
            )
        path = text_path(source)
        if source == STDIN:
            typed.append(read_text(source))
        elif exists(path):
            paths.append(path)
        # no spaces: no text
        elif re.fullmatch(r"[\w./~-]*(/[\w.~-]*|\.(txt|md|rst|text))", source):
            raise HeadwiseError(f"there is no file {source}")
        else:
            typed.append(source)
    return paths, typed


def exists(path: Path) -> bool:
    """Is there such a file or folder? Whole texts, which are no names, are none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        # a text that is too long, or too strange, to be a name
        return False


def files_of(folder: Path) -> list[Path]:
    """The texts in a folder and the folders in it, in the order of their names."""
    files = sorted(
        file for file in folder.rglob("*") if file.suffix in KINDS and file.is_file()
    )
    if not files:
        raise HeadwiseError(f"{folder} holds no text files ({', '.join(KINDS)})")
    return files
