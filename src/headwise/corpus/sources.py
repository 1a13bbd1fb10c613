"""Texts of any size, read in pieces: files and folders, packed or not, and records that have the text in a field."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO

from headwise.errors import HeadwiseError
from headwise.files import MOST_TEXT, STDIN, check_file, read_text, text_path

PIECE = 2**20  # characters of a plain text that are read at a time; a round choice, for what memory holds easily
MOST_PACKING = 100  # times that a large column of a Parquet file may grow when unpacked; text grows 3 to 10 times
# The kinds of file, by the ends of their names; "a.jsonl.gz" is one of records that is packed.
PLAIN, RECORDS, PACKED = (".txt", ".md", ".rst", ".text"), (".jsonl", ".ndjson", ".parquet"), (".gz", ".zst")
KINDS = (*PLAIN, *RECORDS)  # packed or not

Progress = Callable[[str, int, int], None]  # ("MB of text read", 3, 17): what is done, how much of it, of how much


class Sources:
    """The documents of files and folders, in pieces. `name` says which, such as "a.txt and 2 more".

    A plain file is one document. In `.jsonl` and `.parquet` each record is one, whose text is in `field`. All may be
    packed (`.gz`, `.zst`) but `.parquet`, which packs itself. Of a folder the files of these kinds are taken, in the
    order of their names. Raises HeadwiseError for what is not there, damaged, no UTF-8, blank or without the field.
    """

    def __init__(self, paths: Sequence[Path], field: str | None = None, progress: Progress | None = None) -> None:
        self.files = [file for path in paths for file in (files_of(path) if path.is_dir() else [path])]
        self.size = sum(map(check_file, self.files))  # bytes
        if field is not None and not any(_kind(file) in RECORDS for file in self.files):
            raise HeadwiseError(f"field={field} is a field of .jsonl and .parquet files, and there is none of them")
        self.field, self._progress = field or "text", progress
        names = [path.name for path in paths[:1]]
        if len(paths) > 1:
            names.append(f"{len(paths) - 1} more")
        self.name = " and ".join(names)

    def key(self, *options: Any) -> str:
        """A name for the tokens that come of these files with these options: a SHA-256 of all bytes and options.

        The kinds of the files count as well: the same bytes are another text where each line is a record.
        """
        whole = sha256(json.dumps([self.field, *map(_kind, self.files), *options]).encode())
        for file in self.files:
            with file.open("rb") as opened:
                whole.update(file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def __iter__(self) -> Iterator[tuple[tuple[int, str], str]]:
        """Key and piece; a document is the pieces that follow one another with one key.

        A key is the number of the file and the name of its document: the same file may stand there twice.
        """
        # Was all so far white space; bytes of the files before this one; the last progress that was told. No files are
        # not blank: all texts may have been typed.
        blank, before, megabytes = bool(self.files), 0, 0
        for number, file in enumerate(self.files):
            with file.open("rb", buffering=0) as raw:  # without a buffer, so that tell() says what was really read
                try:
                    for name, piece in _documents(file, raw, self.field):
                        blank = blank and not piece.strip()
                        if self._progress and (before + raw.tell()) >> 20 > megabytes:
                            megabytes = (before + raw.tell()) >> 20
                            self._progress("MB of text read", megabytes, self.size >> 20)
                        yield (number, name), piece
                except HeadwiseError:  # of a record; it is a ValueError, which is caught below
                    raise
                except ModuleNotFoundError as error:
                    raise HeadwiseError(f"{file} needs {error.name}: pip install 'headwise[tables]'") from None
                except UnicodeDecodeError as error:
                    value = f"{error.object[error.start]:02x}"
                    if file.suffix in (*PACKED, ".parquet"):  # where it stands there, nobody can look up
                        raise HeadwiseError(f"{file} is not UTF-8: a byte is 0x{value}") from None
                    start = raw.tell() - len(error.object) + error.start  # error.object: the bytes read last
                    raise HeadwiseError(f"{file} is not UTF-8: byte {start} is 0x{value}") from None
                except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: of pyarrow
                    raise HeadwiseError(f"{file} is damaged or cut short: {error}") from None
            before += file.stat().st_size
        if blank:
            raise HeadwiseError(
                f"{', '.join(map(str, self.files[:3]))} is empty, or holds nothing but white space"
            )  # a folder may have thousands

    def stream(self) -> Iterator[str]:
        """One text of all documents, in pieces, with a line end between them."""
        before, last = None, "\n"  # the key, and the text, of the piece before
        for key, piece in self:
            if key != before and not last.endswith("\n"):
                yield "\n"
            before, last = key, piece or last  # a record may be empty
            yield piece

    def lines(self) -> Iterator[str]:
        """Each record, and each line of a plain file, without white space around it; blank ones are left out."""
        for (number, _), piece in self:
            is_record = _kind(self.files[number]) in RECORDS
            yield from filter(None, map(str.strip, [piece] if is_record else piece.splitlines()))


def contents(sources: Sequence[str]) -> tuple[list[Path], list[tuple[str, str]]]:
    """The files and folders among the sources; and the texts that are given in full, as (name, text).

    Raises HeadwiseError for a blank source, and for one that looks like the name of a file that is not there.
    """
    paths = []
    typed = []
    for source in sources:
        if not source.strip():
            raise HeadwiseError("the text is empty; pass a file, a folder or some words")
        path = text_path(source)
        if source == STDIN:
            typed.append(("standard input", read_text(source)))
        elif exists(path):
            paths.append(path)
        elif re.fullmatch(r"[\w./~-]+", source) and (_kind(path) in KINDS or "/" in source):  # no spaces: no text
            raise HeadwiseError(f"there is no file {source}")
        else:
            typed.append((f"text {len(typed) + 1}" if typed else "the text", source))  # mostly there is only one
    return paths, typed


def exists(path: Path) -> bool:
    """Is there such a file or folder? Whole texts, which are no names, are none."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is too long, or too strange, to be a name
        return False


def _kind(path: Path) -> str:  # "a.jsonl.gz" -> ".jsonl"
    return Path(path.stem if path.suffix in PACKED else path.name).suffix


def files_of(folder: Path) -> list[Path]:
    """The texts in a folder and the folders in it, in the order of their names."""
    files = sorted(file for file in folder.rglob("*") if _kind(file) in KINDS and file.is_file())
    if not files:
        raise HeadwiseError(f"{folder} holds no text files ({', '.join((*KINDS, *PACKED))})")
    return files


def _documents(path: Path, raw: BinaryIO, field: str) -> Iterator[tuple[str, str]]:  # of one file, for `Sources`
    if _kind(path) == ".parquet":
        from pyarrow import PythonFile, parquet  # an optional dependency

        # Without `pre_buffer` the file is read in pieces; with it large parts of it would be in memory. As a
        # dictionary, a text that stands in many rows is unpacked once.
        options = {"pre_buffer": False, "buffer_size": PIECE, "read_dictionary": [field]}
        table = parquet.ParquetFile(PythonFile(raw), **options)
        if field not in table.schema_arrow.names:
            _record(dict.fromkeys(table.schema_arrow.names), field, f"{path}, row 1")  # raises, and names these
        _check_unpacked(path, table.metadata, field)
        batches = table.iter_batches(64, columns=[field])  # rows at a time; few, as a record may be a whole book
        texts = (value.as_py() for batch in batches for value in batch.column(0))  # one by one: a record may be large
        yield from (_record({field: text}, field, f"{path}, row {number}") for number, text in enumerate(texts, 1))
        return
    if path.suffix == ".gz":
        raw = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
    elif path.suffix == ".zst":
        from pyarrow import CompressedInputStream, PythonFile

        raw = CompressedInputStream(PythonFile(raw), "zstd")
    text = io.TextIOWrapper(raw, "utf-8-sig")  # drops a byte order mark, and makes every line end \n
    try:
        if _kind(path) in RECORDS:
            # `readline` gives "" at the end. A line of more than MOST_TEXT would come in two, neither of them JSON.
            lines = enumerate(iter(partial(text.readline, MOST_TEXT), ""), 1)
            yield from (_record(line, field, f"{path}, line {number}") for number, line in lines if line.strip())
        else:
            while piece := text.read(PIECE) + text.readline(PIECE):  # up to the end of a line, if it is near
                yield str(path), piece
    finally:
        text.detach()  # a wrapper closes its file when it goes; the file is its opener's to close


def _check_unpacked(path: Path, metadata: Any, field: str) -> None:
    """Refuse a column that a few bytes unpack to more than memory: what one page of it holds is unpacked at once.

    `metadata` is pyarrow's; it has the sizes of each column in each group of rows.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            packed, size = column.total_compressed_size, column.total_uncompressed_size
            # The path of a column of records is longer: "text.title". Columns that are not read may be of any size.
            if f"{column.path_in_schema}.".startswith(f"{field}.") and size > max(MOST_TEXT, MOST_PACKING * packed):
                raise HeadwiseError(
                    f"{path}: {packed:,} bytes of its column {column.path_in_schema} unpack to {size:,}; at most "
                    f"{MOST_TEXT:,}, or {MOST_PACKING} times as many, are read: write it anew in smaller row groups"
                )


def _record(record: Any, field: str, name: str) -> tuple[str, str]:
    """Name and text of a record: a line of JSON, or a row as a dict. Raises HeadwiseError for one without a text."""
    try:
        fields = json.loads(record) if isinstance(record, str) else record
        fields[field].encode()  # raises for what is no string, and for a string with half of a surrogate pair
        return name, fields[field]
    except KeyError:
        raise HeadwiseError(f"{name} has no field {field!r}; it has {', '.join(fields) or 'none'} (field=)") from None
    except (TypeError, AttributeError, UnicodeEncodeError):  # TypeError: the record itself is a list or a number
        raise HeadwiseError(f"{name} has no text in its field {field!r}: {fields!r:.60}") from None
    except (ValueError, RecursionError) as error:
        raise HeadwiseError(f"{name} is no JSON: {error}") from None
