"""Documents for a survey: files and folders of text, a text given in full, or ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.files import read_text, text_path
from headwise.heads.survey import Text
from headwise.models.open import Folder

SUFFIXES = (".txt", ".md", ".rst", ".text")  # what is read from a folder


def read_documents(folder: Folder, sources: Sequence[str], tokens: int | None, most: int | None) -> Text:
    """Texts as documents that fit the model. A source is a file, a folder, or, where there is none, a text itself.

    tokens   cut every text into documents of this many tokens; None takes each whole
    most     stop after this many documents; None takes all

    Raises HeadwiseError when a text is longer than the model takes (and offers `--tokens`), has no tokens, or holds
    what the vocabulary lacks.
    """
    tokenizer = folder.tokens
    if tokenizer is None:
        raise HeadwiseError(f"{folder.path} has no tokenizer; pass token ids with --ids FILE")
    frame = tokenizer.frame
    room = _room(folder, tokens)
    documents: list[list[int]] = []
    for name, text in _texts(sources):
        ids = tokenizer.encode(text)
        whole = len(ids) + len(frame[0]) + len(frame[1])
        if tokens is None and folder.context is not None and whole > folder.context:
            raise HeadwiseError(
                f"{name} has {whole:,} tokens and {folder.name} takes {folder.context:,} at a time; pass "
                f"--tokens {folder.context} to cut it into documents"
            )
        size = room if tokens is not None else max(1, len(ids))
        for start in range(0, len(ids), size):
            documents.append([*frame[0], *ids[start : start + size], *frame[1]])
            if len(documents) == most:
                return _text(folder, documents, sources)
    return _text(folder, documents, sources)


def read_ids(folder: Folder, path: Path, most: int | None) -> Text:
    """Documents given as ids: whole numbers separated by spaces or commas, a document a line."""
    documents = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            ids = [int(word) for word in line.replace(",", " ").split()]
        except ValueError:
            raise HeadwiseError(
                f"{path}, line {number}: token ids are whole numbers separated by spaces, a document a line"
            ) from None
        wrong = [i for i in ids if i < 0 or (folder.vocab_size is not None and i >= folder.vocab_size)]
        if wrong:
            raise HeadwiseError(f"{path}, line {number}: {wrong[0]} is no token of a vocabulary of {folder.vocab_size}")
        if folder.context is not None and len(ids) > folder.context:
            raise HeadwiseError(
                f"{path}, line {number} has {len(ids):,} tokens and {folder.name} takes {folder.context:,} at a time; "
                f"cut it into several lines"
            )
        if ids:
            documents.append(ids)
    return _text(folder, documents[:most], [str(path)])


def _room(folder: Folder, tokens: int | None) -> int:
    """Tokens of text in a document, without the frame."""
    if tokens is None:
        return 0
    assert folder.tokens is not None
    around = sum(map(len, folder.tokens.frame))
    if folder.context is not None and tokens > folder.context:
        raise HeadwiseError(f"--tokens {tokens} exceeds what {folder.name} takes at a time, {folder.context}")
    if tokens < around + 2:
        raise HeadwiseError(f"--tokens {tokens} leaves no room for text; pass {around + 2} or more")
    return tokens - around


def _texts(sources: Sequence[str]) -> list[tuple[str, str]]:
    """Name and content of every text."""
    found: list[tuple[str, str]] = []
    for source in sources:
        if not source.strip():
            raise HeadwiseError("the text is empty; pass a file, a folder or some words with --text")
        path = text_path(source)
        if _exists(path) and path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not files:
                raise HeadwiseError(f"{path} holds no text files ({', '.join(SUFFIXES)})")
            found += [(str(file), read_text(file)) for file in files]
        elif _exists(path):
            found.append((source, read_text(path)))
        elif re.fullmatch(r"[\w./~-]+", source) and (path.suffix in SUFFIXES or "/" in source):
            raise HeadwiseError(f"there is no file {source}")
        else:
            found.append(("the text", source))
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is too long, or too strange, to be a name
        return False


def _text(folder: Folder, documents: list[list[int]], sources: Sequence[str]) -> Text:
    if not any(documents):
        raise HeadwiseError(f"there are no tokens in {', '.join(sources) or 'the text'}")
    tokenizer = folder.tokens
    if tokenizer is None:
        return Text(documents, lambda ids: tuple(map(str, ids)), sources=tuple(sources))
    return Text(documents, tokenizer.shown, tokenizer.specials, tokenizer.frame, tuple(sources))
