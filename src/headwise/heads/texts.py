"""Documents for a survey: files and folders of text, a text given in full, ids, or what a run held out."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import STDIN, read_bytes, read_text, text_path
from headwise.gpt.data import LARGE
from headwise.gpt.run import held_out_documents, read_run
from headwise.gpt.token_file import TokenFile, token_file
from headwise.gpt.tokens import LARGEST_ID, Tokens
from headwise.gpt.verbs import HALF_LINES
from headwise.heads.labels import Relations, verb_relations
from headwise.markup import plural
from headwise.models.lineage import run_of
from headwise.models.open import COPIED, Folder, unknown_characters, unknown_note
from headwise.sources import PLAIN, Progress, Sources

FORMAT = 2  # of what is kept: a change of how a text becomes documents counts on
HELD_OUT = 4096  # tokens of what a run held out

Texts = str | Path | Sequence[str | Path] | Sequence[Sequence[int]]


@dataclass
class Text:
    """Documents as ids, and what is known about their tokens."""

    documents: Sequence[Sequence[int]]  # at first any iterable; then they lie on the disk
    shown: Callable[[Sequence[int]], tuple[str, ...]]  # ids as a reader should see them
    specials: frozenset[int] = frozenset()  # ids that stand for no text
    frame: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    sources: tuple[str, ...] = ()
    note: str = ""  # what a reader of the loss on this text must know
    scored_after: int | None = None  # losses count what comes behind the first token of this id; None: everything
    end: tuple[int, ...] = ()  # what comes after a document where losses count its end as well
    relations: Relations | None = None  # what is known to belong together, in documents of their own
    about: tuple[str, ...] = ()  # what a reader of any number on it must know

    def __post_init__(self) -> None:
        if not isinstance(self.documents, TokenFile):
            documents = ([ids] for ids in self.documents if len(ids) > 1)
            self.documents = token_file(lambda: (documents, LARGEST_ID, {}))
        if not len(self.documents):
            raise HeadwiseError("the text has no document of two tokens or more; pass a longer one")
        self.counts = Counter(itertools.chain.from_iterable(self.documents))
        ids = list(self.counts)
        marks = {i for i, text in zip(ids, self.shown(ids), strict=True) if not any(map(str.isalnum, text))}
        self.delimiters = torch.tensor(sorted(self.specials | marks), dtype=torch.long)
        self._specials = torch.tensor(sorted(self.specials), dtype=torch.long)
        self._often = torch.zeros(max(self.counts) + 1, dtype=torch.long)
        self._often[ids] = torch.tensor([self.counts[i] for i in ids])

    def marks(self, ids: Tensor) -> dict[str, Tensor]:
        """The delimiters and the rare tokens among the keys (S,) of a document."""
        ids = ids.cpu()
        delimiter = torch.isin(ids, self.delimiters)
        delimiter[:1] = False  # it is the resting place of heads that look at nothing; "first" counts it
        often = self._often[ids]
        plain = ~torch.isin(ids, self._specials)
        limit = often[plain].float().quantile(0.1) if plain.any() else torch.tensor(0.0)
        return {"delimiter": delimiter, "rare": plain & (often <= limit)}


def read_texts(
    folder: Folder,
    texts: Texts | None,
    tokens: int | None = None,
    documents: int | None = None,
    run: Path | None = None,
    unknown: str = "refuse",
    field: str | None = None,
    progress: Progress | None = None,
) -> Text:
    """The documents of a survey; see `headwise.survey`. `run` is whose held-out text is the default.

    unknown  what becomes of characters or words that a vocabulary of those lacks: "refuse" them by name, or "skip"
    field    of the records of .jsonl and .parquet the one that holds the text
    """
    if unknown not in ("refuse", "skip"):
        raise HeadwiseError(f"unknown {unknown!r} is not known; one of refuse, skip")
    for name, value in (("tokens", tokens), ("documents", documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{name} {value} must be at least 1")
    sources = [texts] if isinstance(texts, str | Path) else list(texts or ())
    words = [str(source) for source in sources if isinstance(source, str | Path)]
    if words and len(words) == len(sources):
        return read_documents(folder, words, tokens, documents, unknown, field, progress)
    if words:
        raise HeadwiseError(f"{len(words)} of {len(sources)} documents are texts and the others ids; pass either")
    if tokens is not None:
        raise HeadwiseError(f"tokens {tokens} cuts a text into documents; pass a text with it")
    if texts is None:
        return held_out(folder, run or folder.path, documents)
    ids = [[int(i) for i in source] for source in sources if not isinstance(source, str | Path)]
    return _checked(folder, {f"document {n}": document for n, document in enumerate(ids[:documents])}, [])


def held_out(folder: Folder, run: Path, documents: int | None) -> Text:
    """What a run, or the run that a model comes from, held out."""
    origin = run_of(run)
    record = None if origin is None else read_run(origin)
    if origin is None or record is None:
        raise HeadwiseError(
            f"{run} is no run of headwise, nor made from one that can be found, so it has no text; pass one (--text)"
        )
    if folder.tokens is None:
        raise HeadwiseError(f"{folder.path} has no tokenizer; pass token ids (--ids FILE)")
    settings = record["settings"]
    source = "what the run held out" if settings.get("replay") is None else "what the run learned from"
    ids = held_out_documents(origin, HELD_OUT)[:documents]
    text = text_of(folder, ids, [source])
    if settings["text"] is None:
        text.note, text.scored_after = HALF_LINES, folder.tokens.encode("=")[0]
        text.end = tuple(folder.tokens.frame[0])  # the boundary stands between lines
        lines = sorted(map(folder.tokens.decode, ids), key=lambda line: line != record["example"])
        text.relations = verb_relations(folder.tokens, lines)
    return text


def read_documents(
    folder: Folder,
    sources: Sequence[str],
    tokens: int | None,
    most: int | None,
    unknown: str = "refuse",
    field: str | None = None,
    progress: Progress | None = None,
) -> Text:
    """Texts as documents that fit the model. A source is a file, a folder, or, where there is none, a text itself.

    tokens   cut every text into documents of this many tokens; None cuts those that are longer than the model takes
    most     stop after this many documents; None takes all

    The documents of large files are kept and found again; `about` says what was cut, and what is unknown. Raises
    HeadwiseError when a text has no tokens, or holds what the vocabulary lacks and has no token for.
    """
    tokenizer = folder.tokens
    if tokenizer is None:
        raise HeadwiseError(f"{folder.name} has no tokenizer; pass token ids (--ids FILE), or a tokenizer")
    before, after = tokenizer.frame
    around, context = len(before) + len(after), folder.context
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(f"tokens {tokens} exceeds what {folder.name} takes at a time, {context}")
    room = tokens or context or sys.maxsize
    if room < around + 2:
        raise HeadwiseError(f"tokens {room} leaves no room for text; pass {around + 2} or more")
    paths, typed = _contents(sources)
    files = Sources(paths, field, progress)
    facts = {"cut": 0, "unknown": 0, "characters": 0}

    def documents() -> Iterator[list[int]]:
        for _, pieces in itertools.groupby(itertools.chain(files, typed), itemgetter(0)):
            parts = _cut((_encoded(folder, piece, unknown, facts) for _, piece in pieces), room - around)
            # The second is drawn with the first: a text is cut, too, where no more than its first document is read.
            first = list(itertools.islice(parts, 2))
            facts["cut"] += tokens is None and len(first) == 2
            yield from ([*before, *ids, *after] for ids in itertools.chain(first, parts))

    stored = ([ids] for ids in itertools.islice(documents(), most) if len(ids) > 1)
    key = _key(folder, files, tokens, context, unknown) if most is None and not typed else ""
    read = token_file(lambda: (stored, LARGEST_ID, facts), key, files.size)
    text = text_of(folder, read, sources)
    text.about = _about(folder, read.facts)
    return text


def _encoded(folder: Folder, text: str, unknown: str, facts: dict[str, int]) -> list[int]:
    """The ids of a text; what is unknown of it is counted in `facts`."""
    tokens = folder.tokens
    assert tokens is not None
    known = tokens.known(text) if unknown == "skip" and isinstance(tokens, Tokens) else text
    ids = tokens.encode(known)
    if folder.vocab_size is not None and max(ids, default=0) >= folder.vocab_size:
        raise HeadwiseError(
            f"the tokenizer of {folder.name} has the token id {max(ids)} and the model knows {folder.vocab_size} "
            f"tokens: they do not belong together"
        )
    facts["unknown"] += unknown_characters(tokens, known, ids)
    facts["characters"] += len(known)
    return ids


def _about(folder: Folder, facts: dict[str, int]) -> tuple[str, ...]:
    lines = [unknown_note(folder.tokens, facts["unknown"], facts["characters"])]
    if facts["cut"]:
        lines.insert(
            0,
            f"{plural(facts['cut'], 'text')} longer than the {folder.context:,} tokens that {folder.name} takes at a "
            f"time: cut into documents of {folder.context:,}; --tokens cuts shorter ones.",
        )
    return tuple(filter(None, lines))


def _key(folder: Folder, files: Sources, *options: Any) -> str:
    """What the documents of large files are kept under; nothing where the tokenizer has no files."""
    vocabulary = [read_bytes(folder.path / name).hex() for name in COPIED if (folder.path / name).is_file()]
    return files.key(FORMAT, vocabulary, *options) if vocabulary and files.size >= LARGE else ""


def _cut(pieces: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Ids that come in pieces of any length, in pieces of one size; the last may be shorter."""
    rest: list[int] = []
    for piece in pieces:
        rest += piece
        whole = len(rest) // size * size
        yield from (rest[start : start + size] for start in range(0, whole, size))
        del rest[:whole]
    if rest:
        yield rest


def read_ids(folder: Folder, path: Path, most: int | None) -> Text:
    """Documents given as ids: whole numbers separated by spaces or commas, a document a line."""
    documents: dict[str, list[int]] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = f"{path}, line {number}"
        try:
            ids = [int(word) for word in line.replace(",", " ").split()]
        except ValueError:
            raise HeadwiseError(f"{name}: token ids are whole numbers separated by spaces, a document a line") from None
        documents |= {name: ids} if ids else {}
    return _checked(folder, dict(itertools.islice(documents.items(), most)), [str(path)])


def _checked(folder: Folder, documents: dict[str, list[int]], sources: Sequence[str]) -> Text:
    """Documents of ids, by their names in errors, that the model takes."""
    for name, ids in documents.items():
        for i in ids:
            if i < 0 or (folder.vocab_size is not None and i >= folder.vocab_size):
                raise HeadwiseError(f"{name}: {i} is no token of a vocabulary of {folder.vocab_size}")
        if folder.context is not None and len(ids) > folder.context:
            raise HeadwiseError(
                f"{name} has {len(ids):,} tokens and {folder.name} takes {folder.context:,} at a time; "
                f"cut it into several documents"
            )
    return text_of(folder, list(documents.values()), sources)


def _contents(sources: Sequence[str]) -> tuple[list[Path], list[tuple[str, str]]]:
    """The files and folders among the sources; and the texts that are given in full, with a name for each."""
    paths: list[Path] = []
    typed: list[tuple[str, str]] = []
    for source in sources:
        if not source.strip():
            raise HeadwiseError("the text is empty; pass a file, a folder or some words")
        path = text_path(source)
        if source == STDIN:
            typed.append(("standard input", read_text(source)))
        elif exists(path):
            paths.append(path)
        elif re.fullmatch(r"[\w./~-]+", source) and (path.suffix in PLAIN or "/" in source):
            raise HeadwiseError(f"there is no file {source}")
        else:
            typed.append((f"text {len(typed) + 1}" if typed else "the text", source))
    return paths, typed


def exists(path: Path) -> bool:
    """Is there such a file or folder? Whole texts, which are no names, are none."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is too long, or too strange, to be a name
        return False


def text_of(folder: Folder, documents: Sequence[Sequence[int]], sources: Sequence[str] = ()) -> Text:
    """Documents of ids, with what the tokenizer of a folder knows of them."""
    if (tokens := folder.tokens) is None:
        return Text(documents, lambda ids: tuple(map(str, ids)), sources=tuple(sources))
    return Text(documents, tokens.shown, tokens.specials, tokens.frame, tuple(sources))
