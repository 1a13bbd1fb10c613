"""Documents of token ids in a file that is mapped into memory: a corpus takes no more of it than what is read just now.

    ids      2 bytes each for a vocabulary of up to 65,536 tokens, else 4; then zeros up to a multiple of 8
    ends     8 bytes each: 0, and of every document the number of ids up to its end
    facts    JSON: the numbers of ids, of documents and of bytes an id, and what the maker adds
    8 bytes  the length of the facts
    digest   32 bytes, the SHA-256 of all before

That of a large text is made once, and kept in the folder that HEADWISE_CACHE names, ~/.cache/headwise by default.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headwise.errors import HeadwiseError
from headwise.files import check_file, remove_unfinished, write_whole

if sys.platform != "win32":
    import fcntl

READ = 2**20  # bytes at a time
DIGEST = 32  # bytes

Ints = npt.NDArray[np.int64]
Contents = tuple[
    Iterable[Iterable[Sequence[int] | Ints]], int, dict[str, Any]
]  # documents in pieces, vocabulary, facts


class TokenFile(Sequence[list[int]]):
    """The documents of such a file, which may be closed meanwhile. Raises HeadwiseError for one that is damaged."""

    def __init__(self, file: BinaryIO) -> None:
        size, digest = file.seek(0, os.SEEK_END), sha256()
        file.seek(0)
        for start in range(0, size - DIGEST, READ):
            digest.update(file.read(min(READ, size - DIGEST - start)))
        if file.read() != digest.digest():
            raise HeadwiseError("a file of tokens is damaged: its contents are not those that were written to it")
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = size - DIGEST - 8
        self.facts = json.loads(self._map[end - int.from_bytes(self._map[end : end + 8], "little") : end])
        self.n_ids, n_documents, width = (self.facts[name] for name in ("ids", "documents", "width"))
        self._ids = np.frombuffer(self._map, f"u{width}", self.n_ids)
        self._ends = np.frombuffer(self._map, "i8", n_documents + 1, self.n_ids * width + -self.n_ids * width % 8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        (start,), (length,) = self.spans([range(len(self))[number]])
        return self.take(slice(start, start + length)).tolist()

    def spans(self, numbers: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Of documents the places of their first ids in the whole file, and their lengths."""
        places = np.asarray(numbers, np.int64)
        return self._ends[places], self._ends[places + 1] - self._ends[places]

    def take(self, places: Ints | slice) -> Ints:
        """The ids at these places of the whole file, in the shape of the places."""
        ids = self._ids[places].astype(np.int64)
        if hasattr(mmap, "MADV_DONTNEED"):  # else pages that were read count as ours for ever
            self._map.madvise(mmap.MADV_DONTNEED)
        return ids


def token_file(make: Callable[[], Contents], key: str = "", size: int = 0) -> TokenFile:
    """What `make` gives, in a file without a name; with a key that determines it, in one that is kept and found again.

    size  bytes, about: where the disk has no room for them, that is said before the work
    """
    if not key:
        with tempfile.TemporaryFile() as file:
            file.writelines(_bytes(make()))
            return TokenFile(file)
    folder = Path(os.environ.get("HEADWISE_CACHE", "~/.cache/headwise")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.tokens"
    for kept_file in filter(Path.exists, (path, path.with_suffix(".lock"))):
        check_file(kept_file)
    with path.with_suffix(".lock").open("w") as lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one makes it, and the others wait
        with suppress(FileNotFoundError, HeadwiseError), path.open("rb") as kept:
            return TokenFile(kept)
        remove_unfinished(folder, [path.name])
        if size > (free := shutil.disk_usage(folder).free):
            raise HeadwiseError(
                f"the tokens of this text take about {size:,} bytes, and {folder} has {free:,} free; make room, or "
                f"name another folder with HEADWISE_CACHE"
            )
        write_whole(path, _bytes(make()))
        with path.open("rb") as made:
            return TokenFile(made)


def _bytes(contents: Contents) -> Iterator[bytes]:
    """Those of a file. What gives the documents may add to the facts on the way."""
    documents, vocab_size, facts = contents
    width, count, n_documents, digest = 2 if vocab_size <= 2**16 else 4, 0, 0, sha256()
    with tempfile.TemporaryFile() as ends:  # they may be many, too
        ends.write(bytes(8))
        for pieces in documents:
            for ids in pieces:
                yield (data := np.array(ids, f"u{width}").tobytes())
                digest.update(data)
                count += len(ids)
            ends.write(count.to_bytes(8, sys.byteorder))
            n_documents += 1
        ends.seek(0)
        for data in itertools.chain([bytes(-count * width % 8)], iter(lambda: ends.read(READ), b"")):
            yield data
            digest.update(data)
    text = json.dumps({**facts, "ids": count, "documents": n_documents, "width": width}).encode()
    text += len(text).to_bytes(8, "little")
    digest.update(text)
    yield text + digest.digest()
