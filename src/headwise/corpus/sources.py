"""The texts of UTF-8 files, and of folders of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.files import STDIN, check_file, read_text, text_path

# characters of a text that become ids at a time; a round choice, for what memory holds easily
PIECE = 2**20
KINDS = (".txt", ".md", ".rst", ".text")  # of the files that are taken of a folder

# ("passes", 3, 17): what is done, how much of it, of how much
Progress = Callable[[str, int, int], None]


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
        texts = [text for text in self if text]
        ended = [text if text.endswith("\n") else f"{text}\n" for text in texts[:-1]]
        return "".join([*ended, texts[-1]])


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
