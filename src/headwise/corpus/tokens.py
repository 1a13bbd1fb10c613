"""Text to token ids and back. The file format is that of the `tokenizers` library, which is imported only here."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tokenizers import (
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from headwise.errors import HeadwiseError
from headwise.files import read_text
from headwise.words import Note

LARGEST_ID = 10**7  # of a token: far above any vocabulary
Ids = Sequence[int]  # tokens of a text, by their numbers
_ANY = r"[\s\S]"  # any character; "." would leave out the line end
# How a file writes the way to split that `Tokens.characters` sets: its kind is told by it.
_CHARACTERS = {
    "type": "Split",
    "pattern": {"Regex": _ANY},
    "behavior": "Isolated",
    "invert": False,
}
# The English pronoun, a word by itself, after all letters became small ones. The page reads it as JavaScript's, too.
SMALL_I = r"(?<!\p{L})i(?!\p{L})"
# How alike a word must be to one that is missing, 0 to 1, to be offered; a round choice.
NEAR = 0.5
# In training it stands before the first and after the last token of a document. A text that is read has none behind:
# it may go on there.
BOUNDARY = "<|end|>"
BLANK = "___"  # the place to fill, at the end of a prompt
ELLIPSIS = re.compile(r"(?<!\S)(…|\.{3})\s*$")  # the same among words


class TextTokens(ABC):
    """What a text needs to become ids, and ids to be read: ours, of a model's folder, or of somebody's own."""

    # ids that the model expects before and after every document: [CLS] and [SEP]
    frame: tuple[list[int], list[int]] = ([], [])
    specials: frozenset[int] = frozenset()  # ids that stand for no text
    # the id that stands for what the vocabulary lacks; None where there is none
    unknown: int | None = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the frame. Raises HeadwiseError naming what the vocabulary lacks."""

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """The text of ids; what stands between documents leaves no trace."""

    def places(self, text: str) -> list[tuple[int, int]]:
        """For each id of `encode` the characters [start, end) of the text that it stands for."""
        raise HeadwiseError(
            f"{type(self._tokenizer).__name__} does not say where its tokens stand, and relations need that"
        )

    def prompt(self, text: str) -> list[int]:
        """Ids that a model continues: the text after what the model expects before every document."""
        return self.frame[0] + self.encode(text)

    def shown(self, ids: Ids) -> tuple[str, ...]:
        """Each id as a reader should see it, one by one."""
        return tuple(self.decode([i]) for i in ids)


class OwnTokens(TextTokens):
    """A tokenizer of somebody's own, or of tiktoken: anything with `encode` and `decode`."""

    def __init__(self, source: Any) -> None:
        if not (hasattr(source, "encode") and hasattr(source, "decode")):
            raise HeadwiseError(
                f"tokenizer={source!r:.60} has no encode and decode; pass an object with both"
            )
        super().__init__(source)

    def __len__(self) -> int:
        names = "n_vocab", "vocab_size"
        sizes = (getattr(self._tokenizer, name, None) for name in names)
        return next(filter(None, sizes), None) or len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        try:
            return [int(i) for i in self._tokenizer.encode(text)]
        except (KeyError, ValueError) as error:  # a character that it does not know
            raise HeadwiseError(f"the tokenizer cannot encode it: {error!r}") from None

    def decode(self, ids: Ids) -> str:
        return str(self._tokenizer.decode(list(ids)))


class Reader(Protocol):
    """What decides how a text becomes documents; `Folder` of `models/open.py`, a package to the right, is one."""

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> TextTokens | None: ...

    @property
    def context(self) -> int | None:
        """Most tokens of a document; None where there is no bound."""

    @property
    def vocab_size(self) -> int | None: ...


def require_tokens(reader: Reader) -> TextTokens:
    """The tokenizer of a model."""
    if reader.tokens is None:
        raise HeadwiseError(
            f"{reader.name} has no tokenizer; pass token ids, or put tokenizer.json beside the model"
        )
    return reader.tokens


def unknown_note(
    tokens: TextTokens | None, documents: Iterable[Ids]
) -> tuple[str, ...]:
    """The note that some tokens stand for what the tokenizer does not know, in a tuple; () where none does."""
    ids = [*itertools.chain.from_iterable(documents)]
    if tokens is None or tokens.unknown not in ids:
        return ()
    sign = repr(tokens.shown([tokens.unknown])[0])
    unknown = f"{ids.count(tokens.unknown):,}"
    total = f"{len(ids):,}"
    return (Note.of("note.unknown", sign=sign, unknown=unknown, tokens=total),)


@contextmanager
def tokenising() -> Iterator[None]:
    """What the library raises within this block, bare Exceptions, becomes a HeadwiseError."""
    try:
        yield
    except Exception as error:
        raise HeadwiseError(f"cannot tokenise: {error}") from None


class Tokens(TextTokens):
    """A tokenizer with a fixed vocabulary: characters, words, or any `tokenizer.json`; the one passed in is changed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()  # what a file says of batches would cut texts short
        tokenizer.encode_special_tokens = (
            True  # a boundary typed by the user is ordinary text
        )
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.boundary: int | None = self.vocabulary.get(BOUNDARY)
        before = [] if self.boundary is None else [self.boundary]
        self.frame = (before, [])
        self.specials = frozenset(before)
        _prepare_for_others(tokenizer, self.vocabulary)
        layout = json.loads(tokenizer.to_str())
        model = layout["model"]
        splits = layout["pre_tokenizer"]
        self._by_character = splits == _CHARACTERS and layout["normalizer"] is None
        is_level = model["type"] == "WordLevel"
        self._by_word = is_level and '"WhitespaceSplit"' in json.dumps(splits)
        # The token of what is unknown, by its text; a Unigram model has its number.
        unknown = self.vocabulary.get(model.get("unk_token"), model.get("unk_id"))
        # None, too, where `encode` refuses what is unknown: among characters, and where the boundary stands for it.
        if self._by_character or unknown == self.boundary:
            unknown = None
        self.unknown = unknown

    @classmethod
    def characters(cls, text: str, boundary: bool) -> Tokens:
        """Every distinct character of `text`, sorted; with `boundary`, one more token between documents."""
        tokenizer = _word_level(sorted(set(text)), boundary)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_ANY), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return cls(tokenizer)

    @classmethod
    def words(cls, lines: Iterable[str]) -> Tokens:
        """Every distinct word between spaces, sorted, and the boundary; capitals are read as small letters, but for I.

        Where a comma or a full stop is a word and part of no other, it needs no space before it: `I work, you work.`
        is six words.
        """
        small = [normalizers.Lowercase(), normalizers.Replace(Regex(SMALL_I), "I")]
        normalizer = normalizers.Sequence(small)
        seen = set(normalizer.normalize_str(" ".join(lines)).split())
        tokenizer = _word_level(sorted(seen), boundary=True)
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # not where there is "1,000", which would be split
        joined = "".join(seen - {",", "."})
        marks = [mark for mark in ",." if mark in seen and mark not in joined]
        if marks:
            split = pre_tokenizers.Split(Regex(f"[{''.join(marks)}]"), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), split]
            )
        return cls(tokenizer)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokens:
        """A `tokenizer.json`."""
        layout = read_text(path)
        try:
            tokenizer = Tokenizer.from_str(layout)
        except Exception as error:  # the library raises bare Exceptions
            raise HeadwiseError(
                f"{path} is no tokenizer file of the tokenizers library: {error}"
            ) from None
        if not tokenizer.get_vocab_size():
            raise HeadwiseError(f"{path} is a tokenizer without a token")
        return cls(tokenizer)

    # the rows that a model's embedding needs: a vocabulary may leave ids out
    def __len__(self) -> int:
        return max(self.vocabulary.values(), default=-1) + 1

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return str(self._tokenizer.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without boundaries. Raises HeadwiseError naming what is not in the vocabulary."""
        if self._by_character:  # the library gives the same, slower
            try:
                return [self.vocabulary[c] for c in text]
            except KeyError:
                raise self._unknown(text, "characters") from None
        ids = list(self._read(text).ids)
        # which stands for the unknown, or was typed
        if self._by_word and self.boundary in ids:
            raise self._unknown(self._words(text), "words")
        return ids

    def places(self, text: str) -> list[tuple[int, int]]:
        """For each id of `encode` the characters [start, end) of the text that it stands for."""
        return list(self._read(text).offsets)

    def _read(self, text: str) -> Encoding:
        with tokenising():
            return self._tokenizer.encode(text, add_special_tokens=False)

    def document(self, text: str) -> list[int]:
        """Ids of a text between two boundaries."""
        if self.boundary is None:
            raise HeadwiseError(
                f"this tokenizer has no {BOUNDARY} token to put between documents"
            )
        return [self.boundary, *self.encode(text), self.boundary]

    def prompt(self, text: str) -> list[int]:
        """Ids that a model continues: the text, after a boundary where the model knows one.

        `___` at the end is the place to fill, unless the vocabulary has such a sign; among words also `...` and `…`.
        """
        if self._by_word:
            text = ELLIPSIS.sub(BLANK, text)
        before, blank, behind = text.partition(BLANK)
        if blank and not any("_" in token for token in self.vocabulary):
            behind = behind.strip("_ .")
            if behind:
                raise HeadwiseError(
                    f"{BLANK} stands before {behind!r}, and the model reads from left to right; put it last"
                )
            text = before
        return super().prompt(text)

    def opening(self) -> list[int]:
        """What a text begins with when nothing is given: the boundary, else a new line, else the first token."""
        return self.prompt("") or [self.vocabulary.get("\n", 0)]

    def decode(self, ids: Ids) -> str:
        """The text of ids; boundaries leave no trace. Others that the file calls special are ordinary tokens here."""
        text = [i for i in ids if i != self.boundary]
        return str(self._tokenizer.decode(text, skip_special_tokens=False))

    def shown(self, ids: Ids) -> tuple[str, ...]:
        """Each id as a reader should see it, one by one."""
        return tuple(BOUNDARY if i == self.boundary else self.decode([i]) for i in ids)

    def _words(self, text: str) -> list[str]:
        # of a file: it may write all in small letters, say
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        split = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [word for word, _ in split]

    def _unknown(self, units: Iterable[str], kind: str) -> HeadwiseError:
        """What to raise for a text whose characters or words the vocabulary lacks in part."""
        known = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        if BOUNDARY in known:
            known.remove(BOUNDARY)
        missing = sorted({*units} - {*known})[:5]  # of more, five say enough
        near = []
        for unit in missing:  # no character is near another
            near += difflib.get_close_matches(unit, known, n=1, cutoff=NEAR)
        # repr, no quotes: a line end shows as \n
        listed = " ".join(repr(token)[1:-1] for token in near or known[:40])
        what = "the nearest that it knows" if near else f"it knows {len(known)}"
        return HeadwiseError(
            f"the model has not seen the {kind} {', '.join(map(repr, missing))}; {what}: {listed}"
        )


def _word_level(distinct: Sequence[str], boundary: bool) -> Tokenizer:
    """A vocabulary of whole tokens, numbered in order, the boundary last."""
    tokens = [*distinct, BOUNDARY][: len(distinct) + boundary]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}))
    if boundary:
        tokenizer.add_special_tokens([BOUNDARY])
    return tokenizer


def _prepare_for_others(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> None:
    """Set what other programs need that read the `tokenizer.json` of a run: a boundary before texts, and an unknown.

    They put the boundary there by the post-processor. A further token for the unknown would have no row in the
    model's embedding: in a vocabulary of whole tokens the boundary stands for it, without one the space, else the
    first token.
    """
    frame, specials = "$A", []  # $A is the text, in the templates of the library
    if BOUNDARY in vocabulary:
        frame = f"{BOUNDARY} $A"
        specials = [(BOUNDARY, vocabulary[BOUNDARY])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=specials
    )
    if (
        isinstance(tokenizer.model, models.WordLevel)
        and tokenizer.model.unk_token not in vocabulary
    ):
        first = min(vocabulary, key=vocabulary.__getitem__, default="")
        offered = filter(vocabulary.__contains__, (BOUNDARY, " "))
        tokenizer.model.unk_token = next(offered, first)
