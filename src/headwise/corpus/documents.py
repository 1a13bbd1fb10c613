"""Texts as documents of ids that fit a model: files and folders of text, a text given in full, or ids.

Everything that reads a text for a model that is there goes through `read_documents` or `encoded`; what a model is
trained on is read in `training`. A text is read once, and its documents of ids lie in memory (`Text`).

Of some texts it is known what belongs together (`Relations`): of the verb corpus, of a file, of a bench. A relation is
a set of pairs of spans of tokens, those that look and those that they should look at: a verb and its pronoun, a noun
and its determiner, a bracket and the one that it closes.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.corpus import verbs
from headwise.corpus.tokens import (
    LARGEST_ID,
    Ids,
    Reader,
    TextTokens,
    require_tokens,
    unknown_note,
)
from headwise.errors import HeadwiseError
from headwise.files import Sources, contents, packaged, pieces, read_json, read_text
from headwise.words import Note

# tokens that run together at most; a round choice: more take more memory, few are slower a token
BATCH = 4096
RARE = 0.1  # the rarest tenth of a document's keys are its rare tokens; a round choice


@dataclass
class Text:
    """Documents as ids, and what is known about their tokens."""

    documents: Sequence[Ids]
    shown: Callable[[Ids], tuple[str, ...]]  # ids as a reader should see them
    specials: frozenset[int] = frozenset()  # ids that stand for no text
    # ids before and after each document
    frame: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    # the files, or what else the text is from, as a reader should see them
    sources: tuple[str, ...] = ()
    note: str = ""  # what a reader of the loss on this text must know
    # losses count what comes behind the first token of this id; None: everything
    scored_after: int | None = None
    # what comes after a document where losses count its end as well
    end: tuple[int, ...] = ()
    # what is known to belong together, in documents of their own
    relations: Relations | None = None
    about: tuple[str, ...] = ()  # what a reader of any number on it must know
    example: Ids | None = None  # a document to look at, that of a run

    def __post_init__(self) -> None:
        # in one nothing is predicted
        self.documents = [ids for ids in self.documents if len(ids) > 1]
        if not self.documents:
            raise HeadwiseError(
                "the text has no document of two tokens or more; pass a longer one"
            )
        self.counts = Counter(itertools.chain.from_iterable(self.documents))
        # Besides the special tokens what has no letter and no digit: commas, brackets, line ends.
        self._delimiters = {*self.specials}
        for i, text in zip(self.counts, self.shown([*self.counts]), strict=True):
            if not any(map(str.isalnum, text)):
                self._delimiters.add(i)

    def marks(self, ids: Tensor) -> dict[str, Tensor]:
        """The delimiters and the rare tokens among the keys (S,) of a document, as two masks (S,).

        Rare are those that the text has no oftener than the tenth of the document's keys that it has least often.
        """
        row = ids.tolist()
        # heads that look at nothing rest on the first token; the statistic "first" counts that
        delimiter = [False, *(i in self._delimiters for i in row[1:])]
        words = [self.counts[i] for i in row if i not in self.specials]
        most = torch.tensor(words).float().quantile(RARE).item() if words else 0
        rare = [i not in self.specials and self.counts[i] <= most for i in row]
        return {"delimiter": torch.tensor(delimiter), "rare": torch.tensor(rare)}


def text_of(
    reader: Reader, documents: Sequence[Ids], sources: Sequence[str] = ()
) -> Text:
    """Documents of ids, with what the reader's tokenizer knows of them; without one an id is shown as its number."""
    tokens = reader.tokens
    if tokens is None:
        return Text(documents, lambda ids: tuple(map(str, ids)), sources=tuple(sources))
    return Text(documents, tokens.shown, tokens.specials, tokens.frame, tuple(sources))


def read_documents(
    reader: Reader,
    sources: Sequence[str],
    tokens: int | None = None,
    most: int | None = None,
) -> Text:
    """Texts as documents that fit the model. A source is a file, a folder, or, where there is none, a text itself.

    tokens  cut every text into documents of this many tokens; None cuts those that are longer than the model takes
    most    stop after this many documents; None takes all

    `about` says what was cut, and what is unknown. Raises HeadwiseError when a text has no tokens, or holds what the
    vocabulary lacks and has no token for.
    """
    before, after = require_tokens(reader).frame
    in_frame = len(before) + len(after)
    context = reader.context
    if tokens is not None and context is not None and tokens > context:
        raise HeadwiseError(
            f"tokens={tokens} exceeds what {reader.name} takes at a time, {context}"
        )
    room = tokens or context or sys.maxsize
    if room < in_frame + 2:  # a token, and the one that follows it
        raise HeadwiseError(
            f"tokens {room} leaves no room for text; pass {in_frame + 2} or more"
        )
    paths, typed = contents(sources)

    def parts() -> Iterator[tuple[int, list[int]]]:
        """What the texts are cut into, each part with its number within its text."""
        for whole in itertools.chain(Sources(paths), typed):
            ids_of_pieces = (encoded(reader, piece) for piece in pieces(whole))
            yield from enumerate(cut(ids_of_pieces, room - in_frame))

    documents = []
    n_cut = 0
    for number, ids in itertools.islice(parts(), most):
        n_cut += number == 1
        documents.append([*before, *ids, *after])
    text = text_of(reader, documents, sources)
    if n_cut and tokens is None:  # with `tokens` it was asked for
        limits = {"context": f"{context:,}", "model": reader.name}
        text.about = (Note.of("note.cut", count=n_cut, **limits),)
    text.about += unknown_note(reader.tokens, documents)
    return text


def encoded(reader: Reader, text: str) -> list[int]:
    """The ids of a text, without the frame."""
    ids = require_tokens(reader).encode(text)
    if reader.vocab_size is not None and max(ids, default=0) >= reader.vocab_size:
        raise HeadwiseError(
            f"the tokenizer of {reader.name} has the token id {max(ids)} and the model knows {reader.vocab_size} "
            f"tokens: they do not belong together"
        )
    return ids


def cut(pieces: Iterable[Ids], size: int) -> Iterator[list[int]]:
    """The ids of all pieces, one after another, in new pieces of `size`; the last may be shorter."""
    rest: list[int] = []
    for piece in pieces:
        rest += piece
        whole = len(rest) // size * size
        for start in range(0, whole, size):
            yield rest[start : start + size]
        del rest[:whole]
    if rest:
        yield rest


def read_ids(reader: Reader, path: Path, most: int | None) -> Text:
    """Documents given as ids: whole numbers separated by spaces or commas, a document a line; the first `most`."""
    documents: list[list[int]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.replace(",", " ").split()
        name = f"{path}, line {number}"
        if words and len(documents) != most:
            try:
                documents.append(list(map(int, words)))
            except ValueError:
                raise HeadwiseError(
                    f"{name}: token ids are whole numbers separated by spaces, a document a line"
                ) from None
            check_ids(reader, name, documents[-1])
    return text_of(reader, documents, [str(path)])


def check_ids(reader: Reader, name: str, ids: Ids) -> None:
    """Raise HeadwiseError for what is no token of the model, and for a document longer than its context."""
    size = reader.vocab_size or LARGEST_ID
    for i in ids:
        if not 0 <= i < size:
            raise HeadwiseError(f"{name}: {i} is no token of a vocabulary of {size:,}")
    if reader.context is not None and len(ids) > reader.context:
        raise HeadwiseError(
            f"{name} has {len(ids):,} tokens and {reader.name} takes {reader.context:,} at a time; "
            f"cut it into several documents"
        )


def batches(
    documents: Iterable[Ids | Tensor], most: int | None = None, size: int | None = None
) -> Iterator[Tensor]:
    """Neighbours of equal length as (B,T) ids, without padding: `size` of them, or up to `most` tokens (BATCH).

    A document of more tokens than that comes alone.
    """
    for length, group in itertools.groupby(documents, key=len):
        while chunk := list(
            itertools.islice(group, size or max(1, (most or BATCH) // length))
        ):
            yield torch.stack([torch.as_tensor(document) for document in chunk])


# What belongs together in a text.

# Name of a bench -> its file, in the form of `read_relations`.
BENCHES = {name: packaged(f"data/{name}.json") for name in ("grammar", "meaning")}
# One-language lines beside the held-out cells: half of those of the core, which any verb model knows; a round choice.
CONJUGATIONS = 120

# Positions of the tokens that look, and of those looked at: ((3,), (1, 2)) where a noun of two tokens is looked at.
Pair = tuple[tuple[int, ...], tuple[int, ...]]
Pairs = dict[str, list[Pair]]  # by the name of their relation


@dataclass(frozen=True)
class Labelled:
    """A document with its pairs, name of the relation -> pairs."""

    ids: list[int]
    pairs: Pairs


@dataclass
class Relations:
    """Labelled documents, and what each relation means, in a line; without a meaning its name stands for it."""

    documents: Sequence[Labelled]
    # name of a relation that has pairs -> meaning
    meanings: dict[str, str] = field(default_factory=dict)
    source: str = "the relations"  # what they come from, as a reader should see it

    def __post_init__(self) -> None:
        used = dict.fromkeys(
            name for document in self.documents for name in document.pairs
        )
        if not used:
            raise HeadwiseError(
                f"{self.source}: there is no pair in {len(self.documents)} documents"
            )
        # those with a meaning come first
        names = [name for name in (*self.meanings, *used) if name in used]
        self.meanings = {name: self.meanings.get(name, name) for name in names}


def verb_relations(tokens: TextTokens, lines: Iterable[str]) -> Relations:
    """Lines of the verb corpus, such as the held-out cells, and conjugations: what decides person, verb and tense."""
    # `related` counts words from 0; `prompt` puts the boundary before them
    shift = len(tokens.frame[0])
    documents = []
    for line in [*lines, *verbs.conjugation_lines(core=True)[:CONJUGATIONS]]:
        pairs: Pairs = {
            name: [((i + shift,), (j + shift,)) for i, j in places]
            for name, places in verbs.related(line).items()
        }
        documents.append(Labelled(tokens.prompt(line), pairs))
    return Relations(documents, verbs.RELATIONS, verbs.NAME)


def read_relations(reader: Reader, source: str | Path) -> Relations:
    """Labelled documents of a JSON file, or the sentences of a bench; docs/watching.md has an example.

    {"documents": [{"text": "The keys are lost.", "pairs": [{"name": "subject", "from": "are", "to": "keys"}]}],
     "relations": {"subject": "from a verb to its subject"}}

    "from" is the span that looks, "to" the one looked at. A span is a piece of the text that stands there once, or
    [start, end), counted in characters.

    The bench "grammar" has 60 sentences in English and 40 in Spanish, "meaning" 40 and 18. A relation of Spanish
    sentences has a Spanish name. What stands later looks back at what stands earlier.

    Raises HeadwiseError that names the document, the pair and what does not fit.
    """
    name = str(source)
    if isinstance(source, str):
        if source not in BENCHES:
            raise HeadwiseError(
                f"there is no bench {source!r}; there is {', '.join(BENCHES)}"
            )
        name = f"the bench {source}"
        source = BENCHES[source]
    content = read_json(source)
    documents = list[Labelled]()
    try:
        meanings = {key: str(x) for key, x in content.get("relations", {}).items()}
        for item in content["documents"]:
            where = f"{name}, document {len(documents)}"
            documents.append(_labelled(reader, where, **item))
    except HeadwiseError:  # a ValueError, which says more
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise HeadwiseError(
            f"{name}, document {len(documents)} has another form than docs/watching.md shows ({error!r})"
        ) from None
    return Relations(documents, meanings, name)


def _labelled(
    reader: Reader, where: str, text: str, pairs: Sequence[dict[str, Any]]
) -> Labelled:
    """A document with its pairs of positions; `where` names it in what is refused."""
    tokens = require_tokens(reader)
    before, after = tokens.frame
    ids = [*before, *tokens.encode(text), *after]
    check_ids(reader, where, ids)
    # what the model expects before a text has none of its characters
    places = [(-1, -1)] * len(before) + tokens.places(text)
    labelled: Pairs = {}
    for n, pair in enumerate(pairs):
        start, end = (
            _positions(pair[key], text, places, f"{where}, pair {n}, {key}")
            for key in ("from", "to")
        )
        labelled.setdefault(str(pair["name"]), []).append((start, end))
    return Labelled(ids, labelled)


def _positions(
    span: Any, text: str, places: Sequence[tuple[int, int]], where: str
) -> tuple[int, ...]:
    """The positions of the tokens of a span, at least one.

    places  for each token its characters in the text
    where   names the span in what is refused
    """
    if isinstance(span, str):
        if text.count(span) != 1:
            raise HeadwiseError(
                f"{where}: {span!r} stands {text.count(span)} times in {text!r}; pass [start, end)"
            )
        span = text.index(span), text.index(span) + len(span)
    start, end = span
    if not 0 <= start < end <= len(text):
        raise HeadwiseError(
            f"{where}: {span!r} must be [start, end) within the {len(text)} characters of the document"
        )
    # All that overlap with it: a token may begin before the span, with a space.
    positions = [n for n, (a, b) in enumerate(places) if a < end and b > start]
    if not positions:
        raise HeadwiseError(f"{where}: no token stands for {text[start:end]!r}")
    return tuple(positions)
