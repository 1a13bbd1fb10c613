"""The user's text as documents: one part to align, choose heads and heal by, another, held out, to measure on.

A model that puts a boundary between documents (a run of headwise trained on lines) gets a document a line. Any other
text is one stream, cut into documents of `tokens` tokens side by side, each in the frame that the model expects, such
as [CLS] and [SEP]. The last tenth is held out, as in training, so that what a run of headwise has not seen of its own
text stays unseen. Every second held-out document serves to follow the healing and to choose its best weights, the
others to measure what came of it; where there is but one, it does both. Documents of one batch have equal length:
nothing is padded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.files import read_text, text_path
from headwise.gpt import verbs
from headwise.gpt.data import HELD_OUT_SHARE
from headwise.gpt.run import Settings, read_run
from headwise.models.lineage import run_of
from headwise.models.open import Folder, TextTokens

LONGEST = 1024  # tokens of a document, where neither the model nor the user sets a lower bound
AT_ONCE = 4096  # tokens, at most, of a batch that is only read
LOGITS = 2**26  # numbers, at most, in the logits of such a batch
STATISTICS = 50_000  # tokens, at most, that alignment and importance read
GLANCE = 5_000
EVALUATION = 20_000  # tokens, at most, that one measurement reads


@dataclass(frozen=True)
class Calibration:
    """Documents as ids, each (T,), in the order of the text."""

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    path: Path | None  # the text; None for the built-in verb corpus
    digest: str | None  # SHA-256 of it
    length: int  # tokens of a document, at most
    vocab_size: int

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


def read_calibration(path: Path | None, folder: Folder, tokens: int | None = None) -> Calibration:
    """The documents of a text file, or, without one, of what a run of headwise was trained on.

    Raises HeadwiseError for a text that is empty or too short for its parts.
    """
    path = _text_of_run(folder.path) if path is None else text_path(path)
    text = None if path is None else read_text(path)
    if folder.tokens is None:
        raise HeadwiseError(f"{folder.path} has no tokenizer to read {path} with; put tokenizer.json beside the model")
    length = _document_length(folder, tokens)
    if text is None:
        corpus = verbs.corpus(_settings(folder.path).seed)
        parts = [_lines(lines, folder.tokens, length) for lines in (corpus.train_lines, corpus.held_out_lines)]
    elif folder.family == "headwise" and folder.tokens.frame[0]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        cut = int(len(lines) * (1 - HELD_OUT_SHARE))
        parts = [_lines(some, folder.tokens, length) for some in (lines[:cut], lines[cut:])]
    else:
        parts = _stream(text, folder.tokens, length)
    train, held_out = (tuple(x for x in part if len(x) > 1) for part in parts)
    if not train or not held_out:
        raise HeadwiseError(
            f"{path} is too short: of documents of 2 to {length} tokens it makes {len(train)} to calibrate on and "
            f"{len(held_out)} to measure on; each part needs one"
        )
    largest, vocab_size = max(int(x.max()) for x in (*train, *held_out)), folder.vocab_size
    if vocab_size is not None and largest >= vocab_size:
        raise HeadwiseError(
            f"the tokenizer gives id {largest} and the model knows {vocab_size} tokens: they do not belong together"
        )
    digest = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    return Calibration(train, held_out, path, digest, length, vocab_size or largest + 1)


def _document_length(folder: Folder, tokens: int | None) -> int:
    """Tokens of a document: what the user says, within what the model takes."""
    if tokens is not None and tokens < 2:
        raise HeadwiseError(f"tokens={tokens} must be at least 2: a token, and the one that follows it")
    if tokens is not None and folder.context is not None and tokens > folder.context:
        raise HeadwiseError(f"tokens={tokens} exceeds the model's context of {folder.context}")
    return tokens or min(folder.context or LONGEST, LONGEST)


def _text_of_run(folder: Path) -> Path | None:
    """The text that a run, or the run that a model comes from, was trained on; None for the built-in verb corpus."""
    text = _settings(folder).text
    return None if text is None else Path(text)


def _settings(folder: Path) -> Settings:
    run = run_of(folder)
    found = None if run is None else read_run(run)
    if found is None:
        raise HeadwiseError(f"{folder} does not say what it was trained on; pass a text with --text")
    return Settings(**found["settings"])


def _lines(lines: Sequence[str], tokens: TextTokens, length: int) -> list[Tensor]:
    """A document a line, between boundaries."""
    boundary = tokens.frame[0]
    return [torch.tensor([*boundary, *tokens.encode(line), *boundary])[:length] for line in lines]


def _stream(text: str, tokens: TextTokens, length: int) -> list[list[Tensor]]:
    """Documents side by side, the last tenth of the text apart."""
    opening, closing = tokens.frame
    ids = torch.tensor(tokens.encode(text))
    cut, body = int(len(ids) * (1 - HELD_OUT_SHARE)), length - len(opening) - len(closing)
    if body < 1:
        raise HeadwiseError(f"tokens={length} leaves no room for a text beside the {length - body} of the frame")
    return [[_framed(x, opening, closing) for x in torch.split(some, body)] for some in (ids[:cut], ids[cut:])]


def _framed(ids: Tensor, opening: list[int], closing: list[int]) -> Tensor:
    return torch.cat([torch.tensor(opening, dtype=ids.dtype), ids, torch.tensor(closing, dtype=ids.dtype)])


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
    found = []
    for length, same in sorted(by_length.items(), reverse=True):
        n = size or max(1, at_once // length)
        found += [torch.stack(same[start : start + n]) for start in range(0, len(same), n)]
    return found
