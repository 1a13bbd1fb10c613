"""What a command refuses at once: by the names of files and what config.json says, before torch is imported.

What it writes takes the place of nothing that it reads, of no file of a model, and of no other output. Files are
compared by what the system says of them, so that a link, a hard link or another spelling is no way around.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.corpus.sources import Sources, contents, exists, files_of
from headwise.errors import HeadwiseError
from headwise.families import check_folder, families, is_own, read_config
from headwise.files import STDIN, is_stream, read_json
from headwise.models.lineage import require_run
from headwise.words import refusal

if TYPE_CHECKING:
    from headwise.cost.shape import ModelShape

AT_ONCE = 2**24  # bytes of texts that are read through before anything else


def check_model(folder: Path, dtype: str = "auto") -> None:
    """Refuse what is no model folder, and a number format that no model runs in.

    What of a run is not in order its reader says, which takes no time either.
    """
    if not is_own(folder):
        check_folder(folder)
    if dtype != "auto":
        from headwise.cost.pricing import computed_in  # a sixth of what `headwise --help` would import

        computed_in(dtype)


def check_texts(folder: Path, texts: Sequence[str | Path] | None, field: str | None = None) -> None:
    """Refuse texts that cannot be read; and no text at all, where no run says what the model was trained on."""
    if not texts:
        require_run(folder)
        return
    paths, _ = contents([str(text) for text in texts if str(text) != STDIN])
    sources = Sources(paths, field)
    if sources.size <= AT_ONCE and paths and paths[0].suffix.lower() != ".wav":
        list(sources)  # says what is blank, damaged or no UTF-8


def check_one_count(folder: Path) -> None:
    """Refuse a family whose config has one number for query heads and key/value heads."""
    if is_own(folder):
        return
    # Of such a family the number of query heads and that of the groups are one field.
    family = families("reshape").get(str(read_config(folder).get("model_type")))
    if family is not None and family.n_kv_heads is None:
        raise refusal("one_count", family=family.name)


def shape_of(folder: Path) -> ModelShape | None:
    """The sizes in a folder's config.json; None where they cannot be told exactly: the model itself is then asked."""
    from headwise.cost import read_shape  # a sixth of what `headwise --help` would import

    try:
        return read_shape(folder)[1]
    except HeadwiseError:
        return None


def context_in(shape: ModelShape | None) -> int | None:
    """The longest text of a decoder. What others read at a time their modules say, not their config alone."""
    return shape.positions if shape is not None and shape.generates and not shape.two_sided else None


RUN, RECORD = "run.json", "headwise.json"  # which say what a model was made of
MODEL = "config.json", RUN  # one of them lies in every folder of a model
# Files that no model has, and the option that writes them.
WRITTEN = {".html": "--html", ".png": "--out", ".csv": "--out", ".parquet": "--out"}


def check_apart(
    files: Sequence[tuple[str, Path]], folders: Mapping[str, tuple[Path, str]], inputs: Iterable[Path]
) -> None:
    """Raise HeadwiseError, before any work, for an output that would take the place of something else.

    files    what is written, with the names of the options
    folders  what is filled, and a pattern of all names that may lie there
    """
    for option, (folder, pattern) in folders.items():
        _check_folder(option, folder, pattern)
    # A file by its identity, and what it is: read, or written by an option that came before.
    read = {_identity(file): file for path in inputs for file in _read(path)}
    written: dict[tuple[int, int, str], str] = {}
    places = [_identity(folder) for folder, _ in folders.values()]
    filled = [(option, folder) for option, (folder, _) in folders.items()]
    for option, path in [*files, *filled]:
        if is_stream(path):
            continue
        file = _identity(path)
        parent = Path(os.path.realpath(path)).parent
        if file in read:
            raise refusal("taken_read", option=option, path=path, file=read[file])
        if file in written:
            raise refusal("taken_twice", option=option, path=path, other=written[file])
        written[file] = option
        # A page or a table may lie beside the weights that it is about, a folder that is filled inside another.
        belongs = option == WRITTEN.get(path.suffix) or option in folders
        if not belongs and (_identity(parent) in places or _holds_model(parent)):
            raise refusal("among_model", option=option, path=path, parent=parent)


def _check_folder(option: str, folder: Path, pattern: str) -> None:
    """Refuse a folder with anything that the work does not make itself; pages, tables and hidden files harm nobody."""
    if not folder.is_dir():
        return
    for name in sorted(path.name for path in folder.iterdir()):
        if not (name.startswith(".") or Path(name).suffix in WRITTEN or re.fullmatch(pattern, name)):
            raise refusal("folder_holds", option=option, folder=folder, name=name)


def _identity(path: Path) -> tuple[int, int, str]:
    """The same for all names of a file. Of one that is not there yet: its place, and its name in whatever case."""
    path = Path(os.path.realpath(path))
    there = next(each for each in (path, *path.parents) if exists(each))
    status = there.stat()
    return status.st_dev, status.st_ino, str(path.relative_to(there)).casefold()


def _holds_model(folder: Path) -> bool:
    """Is it the folder of a model?"""
    return any(exists(folder / name) for name in MODEL)


def _read(path: Path) -> Iterator[Path]:
    """The files that an input stands for, and the texts on which a model of it was trained."""
    yield from _files(path)
    if _holds_model(path):
        for text in _texts(path):
            yield from _files(text)


def _files(path: Path) -> list[Path]:
    """A file itself; of a model's folder its files, but for pages and tables; of any other folder its texts."""
    if not path.is_dir():
        return [path]
    if _holds_model(path):
        return [file for file in path.iterdir() if file.suffix not in WRITTEN]
    with suppress(HeadwiseError):  # said when it is read
        return files_of(path)
    return []


def _texts(model: Path) -> list[Path]:
    """Those that the run of a model names, or the runs that it comes from. What is damaged is said when it is read."""
    runs, texts = [model], list[Path]()
    with suppress(HeadwiseError, KeyError, TypeError):
        runs += [model / each["folder"] for each in read_json(model / RECORD)["ancestors"]]
    for run in runs:
        with suppress(HeadwiseError, KeyError, TypeError):
            names = read_json(run / RUN)["settings"]["text"]
            texts += [Path(name) for name in ([names] if isinstance(names, str) else names)]
    return [text for text in texts if exists(text)]
