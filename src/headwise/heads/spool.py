"""Documents of ids on the disk, so that a corpus takes no more memory than one document of it."""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload


class Spool(Sequence[list[int]]):
    """A sequence of documents in a temporary file without a name, which the system takes back with the object."""

    def __init__(self, documents: Iterable[Iterable[int]]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the sequence
        weakref.finalize(self, self._file.close)
        self._ends = array("q", [0])  # in ids
        for document in documents:
            ids = array("i", document)
            self._file.write(ids.tobytes())
            self._ends.append(self._ends[-1] + len(ids))
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def lengths(self) -> list[int]:
        """Ids of each document, without reading it."""
        return [last - first for first, last in itertools.pairwise(self._ends)]

    @overload
    def __getitem__(self, number: int) -> list[int]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[int]]: ...
    def __getitem__(self, number: int | slice) -> list[int] | list[list[int]]:
        if isinstance(number, slice):
            return [self._read(n) for n in range(*number.indices(len(self)))]
        return self._read(range(len(self))[number])

    def __iter__(self) -> Iterator[list[int]]:
        return map(self._read, range(len(self)))

    def _read(self, number: int) -> list[int]:
        ids = array("i")
        first, last = (end * ids.itemsize for end in self._ends[number : number + 2])
        ids.frombytes(os.pread(self._file.fileno(), last - first, first))
        return ids.tolist()


def lengths(documents: Sequence[Sequence[int]]) -> list[int]:
    """Ids of each document."""
    return documents.lengths() if isinstance(documents, Spool) else [len(document) for document in documents]
