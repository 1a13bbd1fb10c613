"""The user's text as documents: one part to align, choose heads and heal by, another, held out, to measure on.

A run of headwise trained on lines gets a document a line. Any other text is one stream, cut into documents of `tokens`
tokens, each in the frame that the model expects, such as [CLS] and [SEP]. The last tenth is held out, as in training;
every second held-out document follows the healing, the others measure what came of it. Documents of one batch have
equal length: nothing is padded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import MOST_TEXT, read_text, text_path
from headwise.gpt import verbs
from headwise.gpt.data import HELD_OUT_SHARE
from headwise.gpt.run import Settings, read_run
from headwise.heads.texts import exists
from headwise.models.lineage import run_of
from headwise.models.open import Folder, TextTokens, unknown_characters, unknown_note
from headwise.sources import Sources

LONGEST = 1024  # tokens of a document, where neither the model nor the user sets a lower bound
AT_ONCE = 4096  # tokens, at most, of a batch that is only read
LOGITS = 2**26  # numbers, at most, in the logits of such a batch
STATISTICS = 50_000  # tokens, at most, that alignment and importance read
GLANCE = 5_000
EVALUATION = 20_000  # tokens, at most, that one measurement reads

# One stream (N,), documents (B,T), or documents one by one.
Ids = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]
Parts = tuple[Sequence[Tensor], Sequence[Tensor]]  # documents to calibrate on, documents held out


@dataclass(frozen=True)
class Calibration:
    """Documents as ids, each (T,), in the order of the text."""

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    length: int  # tokens of a document, at most
    vocab_size: int
    built_in: bool = False  # is it the verb corpus, and no text of the user's?
    about: str = ""  # what a reader of any number on it must know

    @property
    def digest(self) -> str:
        return hashlib.sha256(torch.cat([*self.train, *self.held_out]).numpy().tobytes()).hexdigest()

    @property
    def statistics(self) -> list[Tensor]:
        """Batches (B,T) for alignment and importance."""
        return self._batches(spread(self.train, STATISTICS))

    @property
    def glance(self) -> list[Tensor]:
        """Held-out batches that follow a healing: others than `evaluation`, for the best weights are chosen on them."""
        return self._batches(spread(self.held_out[1::2] or self.held_out, GLANCE))

    @property
    def evaluation(self) -> list[Tensor]:
        """Held-out batches (B,T) to measure on."""
        return self._batches(spread(self.held_out[::2], EVALUATION))

    def _batches(self, documents: Sequence[Tensor]) -> list[Tensor]:
        return batches(documents, at_once=min(AT_ONCE, LOGITS // self.vocab_size))


def read_calibration(text: Path | str | Ids | None, folder: Folder, tokens: int | None = None) -> Calibration:
    """The documents of a text file, a text or its ids; None takes what a run of headwise was trained on.

    Raises HeadwiseError for a text that is too short for its parts, and for ids that the model does not know.
    """
    if tokens is not None and tokens < 2:
        raise HeadwiseError(f"tokens={tokens} must be at least 2: a token, and the one that follows it")
    if tokens is not None and folder.context is not None and tokens > folder.context:
        raise HeadwiseError(f"tokens={tokens} exceeds the model's context of {folder.context}")
    length = tokens or min(folder.context or LONGEST, LONGEST)
    name, seed = "the text", 0
    if isinstance(text, Path) or (isinstance(text, str) and (exists(Path(text)) or not any(map(str.isspace, text)))):
        name = str(text_path(text))
        text = read_text(name)
    elif text is None:
        settings = _settings(folder)
        seed, name = settings.seed, "the text of the run"
        sources = Sources(settings.paths, settings.field)
        if sources.size > MOST_TEXT:
            raise HeadwiseError(
                f"{name} has {sources.size:,} bytes, and {MOST_TEXT:,} are read here; pass a part of it"
            )
        text = "".join(sources.stream()) if settings.paths else None
    about = ""
    if isinstance(text, str):
        parts = _text_parts(text, name, folder, length)
        about = _about(text, folder, parts)
    elif text is None:
        corpus = verbs.corpus(seed)
        parts = _lines(corpus.train_lines, folder, length), _lines(corpus.held_out_lines, folder, length)
    else:
        parts = _id_parts(text, length)
    train, held_out = (tuple(ids for ids in part if len(ids) > 1) for part in parts)
    if not train or not held_out:
        by_lines = folder.family == "headwise" and folder.tokens is not None and folder.tokens.frame[0]
        lined = " (a line each)" if by_lines else ""
        raise HeadwiseError(
            f"{name} is too short: of documents of 2 to {length} tokens{lined} it makes {len(train)} to calibrate on "
            f"and {len(held_out)} to measure on; each part needs one"
        )
    largest, vocab_size = max(int(ids.max()) for ids in (*train, *held_out)), folder.vocab_size
    if vocab_size is not None and largest >= vocab_size:
        raise HeadwiseError(
            f"{name} has the token id {largest} and the model knows {vocab_size} tokens: they do not belong together"
        )
    return Calibration(train, held_out, length, vocab_size or largest + 1, text is None, about)


def _about(text: str, folder: Folder, parts: Parts) -> str:
    """What is unknown to the tokenizer; the text is read again only where something is."""
    tokens = folder.tokens
    if (
        tokens is None
        or tokens.unknown is None
        or not any((ids == tokens.unknown).any() for part in parts for ids in part)
    ):
        return ""
    return unknown_note(tokens, unknown_characters(tokens, text, tokens.encode(text)), len(text))


def _settings(folder: Folder) -> Settings:
    path = run_of(folder.path)
    run = None if path is None else read_run(path)
    if run is None:
        raise HeadwiseError(f"{folder.path} does not say what it was trained on; pass a text with --text")
    return Settings(**run["settings"])


def _text_parts(text: str, name: str, folder: Folder, length: int) -> Parts:
    """The documents of a text, the last tenth of its lines or tokens apart."""
    tokens = _tokenizer(folder, name)
    opening, closing = tokens.frame
    if folder.family == "headwise" and opening:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        cut = int(len(lines) * (1 - HELD_OUT_SHARE))
        return _lines(lines[:cut], folder, length), _lines(lines[cut:], folder, length)
    body = length - len(opening) - len(closing)
    if body < 1:
        raise HeadwiseError(f"tokens={length} leaves no room for a text beside the {length - body} of the frame")
    before, after = torch.tensor(opening, dtype=torch.long), torch.tensor(closing, dtype=torch.long)
    train, held_out = _cut(torch.tensor(tokens.encode(text), dtype=torch.long), body)
    return [torch.cat([before, ids, after]) for ids in train], [torch.cat([before, ids, after]) for ids in held_out]


def _id_parts(ids: Ids, length: int) -> Parts:
    """One stream of ids (N,) is cut into documents; documents (B,T), or one by one, stay what they are."""
    if not isinstance(ids, Sequence) or (ids and isinstance(ids[0], int)):
        ids = torch.as_tensor(ids).long().cpu()
        if ids.ndim == 1:
            return _cut(ids, length)
    documents = [torch.as_tensor(document).long().cpu() for document in ids]
    longest = max(map(len, documents), default=0)
    if longest > length:
        raise HeadwiseError(f"a document of {longest} ids exceeds the {length} that the model is to read at a time")
    cut = int(len(documents) * (1 - HELD_OUT_SHARE))
    return documents[:cut], documents[cut:]


def _cut(ids: Tensor, length: int) -> Parts:
    """A stream (N,) as documents side by side, the last tenth apart."""
    cut = int(len(ids) * (1 - HELD_OUT_SHARE))
    return torch.split(ids[:cut], length), torch.split(ids[cut:], length)


def _lines(lines: Sequence[str], folder: Folder, length: int) -> list[Tensor]:
    """A document a line, between boundaries."""
    tokens = _tokenizer(folder, "its text")
    boundary = tokens.frame[0]
    return [torch.tensor([*boundary, *tokens.encode(line), *boundary])[:length] for line in lines]


def _tokenizer(folder: Folder, name: str) -> TextTokens:
    if folder.tokens is None:
        raise HeadwiseError(
            f"{folder.path} has no tokenizer to read {name} with; put tokenizer.json beside the model, or pass ids"
        )
    return folder.tokens


def spread(documents: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Documents of about `limit` tokens together, spread evenly over the text; all of them where there are fewer."""
    total = sum(map(len, documents))
    if total <= limit:
        return list(documents)
    wanted = max(1, len(documents) * limit // total)
    return [documents[n * len(documents) // wanted] for n in range(wanted)]


def batches(documents: Sequence[Tensor], size: int | None = None, at_once: int = AT_ONCE) -> list[Tensor]:
    """Documents of equal length side by side, (B,T), `size` of them or as many as `at_once` tokens."""
    by_length: dict[int, list[Tensor]] = {}
    for document in documents:
        by_length.setdefault(len(document), []).append(document)
    stacked = []
    for length, same in sorted(by_length.items(), reverse=True):
        n = size or max(1, at_once // length)
        stacked += [torch.stack(same[start : start + n]) for start in range(0, len(same), n)]
    return stacked
