"""What a command refuses at once: by the names of files and what config.json says, before torch is imported.

What it writes takes the place of nothing that it reads, of no file of a model, and of no other output. Files are
compared by what the system says of them, so that a link, a hard link or another spelling is no way around.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.corpus.sources import Sources, contents, exists, files_of
from headwise.errors import HeadwiseError
from headwise.families import RUN, check_folder, families, is_own, read_config, require_run
from headwise.files import STDIN, is_stream, read_json

if TYPE_CHECKING:
    from headwise.cost.shape import ModelShape

# bytes of texts, at most, that are read through at first: some hundredths of a second
AT_ONCE = 2**24


def check_model(folder: Path, dtype: str = "auto") -> None:
    """Refuse what is no model folder, and a number format that no model runs in.

    A folder of ours is not looked into: what is wrong in it is said by what reads it, which is quick, too.
    """
    if not is_own(folder):
        check_folder(folder)
    if dtype != "auto":
        # Imported here: at the top of the file it would be a sixth of all that `headwise --help` imports.
        from headwise.cost.pricing import computed_in

        computed_in(dtype)  # raises HeadwiseError


def check_texts(folder: Path, texts: Sequence[str | Path] | None) -> None:
    """Refuse texts that cannot be read; and no text at all, where no run says what the model was trained on."""
    if not texts:
        require_run(folder)
        return
    # A text that is given in full (`_`) needs no check. Standard input can be read only once, and is read later.
    paths, _ = contents([str(text) for text in texts if str(text) != STDIN])
    sources = Sources(paths)  # raises HeadwiseError for what is not there
    if sources.size <= AT_ONCE:
        # reads them all, and raises HeadwiseError for what is blank, damaged or no UTF-8
        list(sources)


def check_one_count(folder: Path) -> None:
    """Refuse a family whose config has one number for query heads and key/value heads."""
    if is_own(folder):  # our config has both numbers
        return
    # None: no family that is reshaped, which `check_reshapable` refuses, or a model of pictures and text.
    family = families("reshape").get(str(read_config(folder).get("model_type")))
    # its record names no field for key/value heads
    if family is not None and family.n_kv_heads is None:
        raise HeadwiseError(
            f"{family.name}'s config has no num_key_value_heads, so what shares its heads' keys and values "
            "cannot be written; share a Llama-type model, or remove heads with `headwise prune`"
        )


def shape_of(folder: Path) -> ModelShape | None:
    """The sizes in a folder's config.json; None where they cannot be told exactly: the model itself is then asked."""
    from headwise.cost import read_shape  # here, as in `check_model`

    try:
        return read_shape(folder)[1]
    except HeadwiseError:
        return None


def context_in(shape: ModelShape | None) -> int | None:
    """The longest text of a decoder, in tokens. None for others: their config alone does not say what they read."""
    return shape.positions if shape is not None and shape.generates else None


# Kinds of files that belong to no model, and the option that writes them: they may lie in its folder.
WRITTEN = {".html": "--html", ".csv": "--out"}


def check_apart(files: Iterable[tuple[str, Path]], inputs: Iterable[Path]) -> None:
    """Raise HeadwiseError, before any work, for an output that would take the place of something else.

    files   the option and the path of each file that is written: ("--html", Path("a.html"))
    inputs  files and folders that are read
    """
    read = [file for path in inputs for file in _files(path)]
    written = list[tuple[str, Path]]()
    for option, path in files:
        if is_stream(path):  # a pipe or a device: what is written there replaces nothing
            continue
        for file in read:
            if _is_same(path, file):
                raise HeadwiseError(f"{option} {path} is {file}, which is read; pass another name")
        for other, earlier in written:
            if _is_same(path, earlier):
                raise HeadwiseError(f"{option} {path} is {other}, too; pass another name")
        written.append((option, path))
        parent = Path(os.path.realpath(path)).parent
        # A page or a table may lie beside the weights that it is about; other files may not.
        if option != WRITTEN.get(path.suffix) and _holds_model(parent):
            raise HeadwiseError(
                f"{option} {path} lies among the files of {parent}; pass a file elsewhere"
            )


def _is_same(path: Path, other: Path) -> bool:
    """Do two names mean one file, through links, too? Some disks take A.html and a.html for one."""
    if exists(path) and exists(other):
        return path.samefile(other)
    return os.path.realpath(path).casefold() == os.path.realpath(other).casefold()


def _holds_model(folder: Path) -> bool:
    return exists(folder / "config.json") or exists(folder / RUN)


def _files(path: Path) -> list[Path]:
    """A file itself; of a model's folder its files and the texts it was trained on; of any other folder its texts."""
    if not path.is_dir():
        return [path]
    if _holds_model(path):
        return [*(file for file in path.iterdir() if file.suffix not in WRITTEN), *_texts(path)]
    with suppress(HeadwiseError):  # no text in it: what reads the folder says so
        return files_of(path)
    return []


def _texts(model: Path) -> list[Path]:
    """The texts on which a model was trained, as its run says."""
    # Suppressed: there is no run, or a damaged one, which is said when it is read.
    with suppress(HeadwiseError, KeyError, TypeError):
        return list(map(Path, read_json(require_run(model) / RUN)["settings"]["text"]))
    return []
