"""Texts of any size, read in pieces: files and folders, packed or not, and records that have the text in a field."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

from headwise.errors import HeadwiseError
from headwise.files import MOST_TEXT, check_file

PIECE = 2**20  # bytes
TAIL = 2**16  # characters at the end of a piece, where the next one may begin
PLAIN = (".txt", ".md", ".rst", ".text")
RECORDS = (".jsonl", ".ndjson", ".parquet")
PACKED = (".gz", ".zst")
FIELD = "text"

# Where a tokenizer that splits a text before it merges splits anyway: after a line end, else before a space.
ENDS = (re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def no_progress(stage: str, done: int, total: int) -> None:
    """Nobody waits."""


class Sources:
    """The documents of files and folders, in pieces.

    A plain file is one document. In `.jsonl` and `.parquet` each record is one, whose text is in `field`. All but
    `.parquet` may be packed (`.gz`, `.zst`). Of a folder the files of these kinds are taken, in the order of their
    names. Raises HeadwiseError for what is not there, is damaged, no UTF-8, lacks the field, or holds no text at all.
    """

    def __init__(self, paths: Sequence[Path], field: str | None = None, progress: Progress = no_progress) -> None:
        self.files = [file for path in paths for file in (_files_of(path) if path.is_dir() else [path])]
        for file in self.files:
            check_file(file)
        if field is not None and not any(_kind(file) in RECORDS for file in self.files):
            raise HeadwiseError(f"--field {field} is of .jsonl and .parquet files, and {paths[0]} is a plain text")
        self.field, self._progress = field or FIELD, progress
        self.size = sum(file.stat().st_size for file in self.files)
        self.position = 0  # bytes of the files that have been read
        self.name = paths[0].name + f" and {len(paths) - 1} more" * (len(paths) > 1)

    def digest(self) -> str:
        """SHA-256 of what the files hold, as it lies on the disk."""
        digests = []
        for file in self.files:
            with file.open("rb") as opened:
                digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Name and piece; pieces that follow one another under one name are a document."""
        blank, before = True, 0
        for file in self.files:
            with _reading(file), file.open("rb", buffering=0) as raw:
                for name, piece in _documents(file, raw, self.field):
                    blank = blank and not piece.strip()
                    megabytes, self.position = self.position >> 20, before + raw.tell()
                    if self.position >> 20 > megabytes:
                        self._progress("MB of text read", self.position >> 20, self.size >> 20)
                    yield name, piece
            before += file.stat().st_size
        if blank:
            raise HeadwiseError(f"{', '.join(map(str, self.files[:3]))} is empty, or holds nothing but white space")

    def lines(self) -> Iterator[str]:
        """Each record, and each line of a plain file, without white space around it; blank ones are left out."""
        plain = {str(file) for file in self.files if _kind(file) not in RECORDS}
        for name, parts in groupby(self, itemgetter(0)):
            texts = (piece for _, piece in parts)
            yield from (line for text in (_lines(texts, name) if name in plain else texts) if (line := text.strip()))


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix in PACKED else path.name).suffix


def _files_of(folder: Path) -> list[Path]:
    kinds = (*PLAIN, *RECORDS)
    files = sorted(file for file in folder.rglob("*") if _kind(file) in kinds and file.is_file())
    if not files:
        raise HeadwiseError(f"{folder} holds no text files ({', '.join((*kinds, *PACKED))})")
    return files


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What goes wrong while a file is unpacked or parsed, in one line."""
    try:
        yield
    except HeadwiseError:
        raise
    except ModuleNotFoundError as error:
        raise HeadwiseError(f"{path} needs {error.name}: pip install 'headwise[tables]'") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: also what pyarrow raises
        raise HeadwiseError(f"{path} is damaged or cut short: {error}") from None


def _documents(path: Path, raw: BinaryIO, field: str) -> Iterator[tuple[str, str]]:
    if _kind(path) == ".parquet":
        yield from _rows(path, raw, field)
        return
    if path.suffix == ".gz":
        raw = cast(BinaryIO, gzip.open(raw))
    elif path.suffix == ".zst":
        import pyarrow

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
    decoded = _decoded(path, raw)
    if _kind(path) not in RECORDS:
        yield from ((str(path), piece) for piece in _pieces(decoded))
        return
    for number, line in enumerate(_lines(decoded, str(path), "\n"), 1):
        name = f"{path}, line {number}"
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise HeadwiseError(f"{name} is no JSON: {error}") from None
        if record is not None or line.strip():
            yield name, _text(record, field, name)


def _rows(path: Path, raw: BinaryIO, field: str) -> Iterator[tuple[str, str]]:
    import pyarrow
    from pyarrow import parquet

    if path.suffix in PACKED:
        raise HeadwiseError(f"{path} is packed, and a .parquet file packs itself; unpack it")
    table = parquet.ParquetFile(pyarrow.PythonFile(raw), pre_buffer=False, buffer_size=PIECE)
    names = table.schema_arrow.names
    if field not in names:
        raise _no_field(path, field, names)
    values = (x for batch in table.iter_batches(64, columns=[field]) for x in batch.column(0).to_pylist())
    for number, value in enumerate(values, 1):
        name = f"{path}, row {number}"
        yield name, _text({field: value}, field, name)


def _text(record: Any, field: str, name: str) -> str:
    """The text of a record."""
    if not isinstance(record, dict):
        raise HeadwiseError(f"{name} is no record with fields, such as {{\"{field}\": ...}}")
    if field not in record:
        raise _no_field(name, field, record)
    text = record[field]
    if not isinstance(text, str):
        raise HeadwiseError(f"{name}: its field {field!r} is {text!r:.40}, and no text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HeadwiseError(f"{name}: its text has half of a surrogate pair, which is no character") from None
    return text


def _no_field(name: object, field: str, fields: Iterable[str]) -> HeadwiseError:
    return HeadwiseError(f"{name} has no field {field!r}; it has {', '.join(fields) or 'none'} (--field)")


def _decoded(path: Path, file: BinaryIO) -> Iterator[str]:
    """UTF-8 without a byte order mark, with line ends as \\n."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    n_bytes, data = 0, b"?"
    while data:
        data = file.read(PIECE)
        n_bytes += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = n_bytes - len(error.object) + error.start
            raise HeadwiseError(f"{path} is not UTF-8: byte {place} is 0x{error.object[error.start]:02x}") from None
        yield text


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text, in pieces that begin where a tokenizer splits a text anyway."""
    rest = ""
    for text in texts:
        if len(rest) > PIECE:
            end = _end(rest)
            yield rest[:end]
            rest = rest[end:]
        rest += text
    if rest:
        yield rest


def _end(text: str) -> int:
    for pattern in ENDS:
        if ends := [match.end() for match in pattern.finditer(text, max(0, len(text) - TAIL))]:
            return ends[-1]
    return len(text)


def _lines(texts: Iterable[str], name: str, newline: str | None = None) -> Iterator[str]:
    """Lines that end at any line end that Unicode knows, or at this one."""
    rest = ""
    for text in texts:
        rest += text
        *lines, rest = rest.split(newline) if newline else rest.splitlines(keepends=True) or [""]
        yield from lines
        if len(rest) > MOST_TEXT:
            raise HeadwiseError(f"{name} has a line of over {MOST_TEXT:,} characters, the most that are read")
    if rest:
        yield rest
