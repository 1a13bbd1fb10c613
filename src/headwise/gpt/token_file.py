"""Documents of token ids in a file that is mapped into memory: a corpus takes no more of it than what is read just now.

    ids      2 bytes each for a vocabulary of up to 65,536 tokens, else 4; then zeros up to a multiple of 8
    ends     8 bytes each: 0, and of every document the number of ids up to its end
    facts    JSON: the numbers of ids, of documents and of bytes an id, and what the maker adds
    8 bytes  the length of the facts
    digest   32 bytes, the SHA-256 of all before

That of a large text is made once, and kept in the folder that HEADWISE_CACHE names, ~/.cache/headwise by default.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headwise.errors import HeadwiseError
from headwise.files import remove_unfinished, sync_folder

if sys.platform != "win32":
    import fcntl

HELD = 2**20  # ids between two looks at the disk; and those read before their pages are given back
DIGEST = 32  # bytes

Ints = npt.NDArray[np.int64]
Documents = Iterable[Iterable[Sequence[int]]]  # each in pieces
Make = Callable[[BinaryIO, Path], None]  # writes a file; the folder is that in which it lies


class TokenFile(Sequence[list[int]]):
    """The documents of such a file, which may be closed meanwhile. Raises HeadwiseError for one that is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        size, digest, self._held = file.seek(0, os.SEEK_END), hashlib.sha256(), 0
        file.seek(0)
        for start in range(0, size - DIGEST, HELD):
            digest.update(file.read(min(HELD, size - DIGEST - start)))
        if size < DIGEST or file.read() != digest.digest():
            raise HeadwiseError("a file of tokens is damaged: its contents are not those that were written to it")
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = size - DIGEST - 8
        self.facts = json.loads(self._map[end - int.from_bytes(self._map[end : end + 8], "little") : end])
        n_ids, n_documents, width = (self.facts[name] for name in ("ids", "documents", "width"))
        self._ids = np.frombuffer(self._map, f"u{width}", n_ids)
        self._ends = np.frombuffer(self._map, "i8", n_documents + 1, n_ids * width + -n_ids * width % 8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        start, length = self.spans(range(len(self))[number])
        return self.take(slice(start, start + length)).tolist()

    @property
    def n_ids(self) -> int:
        return len(self._ids)

    def spans(self, numbers: npt.ArrayLike) -> tuple[Ints, Ints]:
        """Of documents the places of their first ids in the whole file, and their lengths."""
        places = np.asarray(numbers)
        return self._ends[places], self._ends[places + 1] - self._ends[places]

    def take(self, places: Ints | slice) -> Ints:
        """The ids at these places of the whole file, in the shape of the places."""
        ids = self._ids[places].astype(np.int64)
        self._held += ids.size
        if self._held > HELD and hasattr(mmap, "MADV_DONTNEED"):  # else pages that were read count as ours for ever
            self._map.madvise(mmap.MADV_DONTNEED)
            self._held = 0
        return ids

    def counts(self) -> dict[int, int]:
        """How often each id comes."""
        counts = np.zeros(0, np.int64)
        for start in range(0, self.n_ids, HELD):
            more = np.bincount(self.take(slice(start, start + HELD)), minlength=counts.size)
            more[: counts.size] += counts
            counts = more
        return {int(i): int(counts[i]) for i in counts.nonzero()[0]}


def write_tokens(
    file: BinaryIO, documents: Documents, vocab_size: int, facts: dict[str, Any], look: Callable[[int], None]
) -> None:
    """Write documents of ids below `vocab_size`, and facts that they may have added to on the way.

    look  hears from time to time how many bytes there are
    """
    digest, width, count, n_documents = hashlib.sha256(), 2 if vocab_size <= 2**16 else 4, 0, 0

    def add(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    with tempfile.TemporaryFile() as ends:  # they may be many, too
        ends.write(bytes(8))
        for n_documents, pieces in enumerate(documents, 1):  # noqa: B007, the last one counts
            for ids in pieces:
                add(np.array(ids, f"u{width}").tobytes())
                if (count + len(ids)) // HELD > count // HELD:
                    look((count + len(ids)) * width)
                count += len(ids)
            ends.write(count.to_bytes(8, "little"))
        add(bytes(-count * width % 8))
        ends.seek(0)
        while data := ends.read(HELD):
            add(data)
    text = json.dumps({**facts, "ids": count, "documents": n_documents, "width": width}).encode()
    add(text + len(text).to_bytes(8, "little"))
    file.write(digest.digest())
    file.flush()


def temporary_tokens(documents: Documents, vocab_size: int) -> TokenFile:
    """Documents of ids below `vocab_size` in a file without a name."""
    return made_tokens(lambda file, _: write_tokens(file, documents, vocab_size, {}, lambda size: None))


def made_tokens(make: Make) -> TokenFile:
    """What `make` writes into a file without a name, which the system takes back with the object."""
    with tempfile.TemporaryFile() as file:
        make(file, Path(tempfile.gettempdir()))
        return TokenFile(file)


def kept_tokens(key: str, make: Make) -> TokenFile:
    """The file that is kept under this key, which says all that determines it; made where there is none, or a damaged one.

    Of several processes that ask for it at once one makes it, and the others wait.
    """
    folder = Path(os.environ.get("HEADWISE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headwise")
    path = folder.expanduser() / f"{key}.tokens"
    with _alone(path):
        if path.exists():
            with suppress(HeadwiseError), path.open("rb") as file:
                return TokenFile(file)
        remove_unfinished(path.parent, [path.name])
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                make(file, path.parent)
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
        with path.open("rb") as file:
            return TokenFile(file)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise HeadwiseError(
            f"the tokens of a large text are kept in {path.parent}, and nothing can be written there "
            f"({error.strerror}); name another folder with HEADWISE_CACHE"
        ) from None
    with lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_room(folder: Path, size: int, share: float) -> None:
    """Refuse to go on with a file of so many bytes, a share of the whole, where the rest will not fit on the disk."""
    rest, free = int(size / share) - size, shutil.disk_usage(folder).free
    if rest > free:
        raise HeadwiseError(
            f"the tokens of this text take about {size + rest:,} bytes, and {folder} has {size + free:,} for them; "
            f"make room, or name another folder with HEADWISE_CACHE"
        )
