"""The user's text as documents: one part to align, choose heads and heal by, another, held out, to measure on.

A run of headwise trained on lines gets a document a line. Any other text is one stream, cut into documents of `tokens`
tokens, each in the frame that the model expects, such as [CLS] and [SEP]. The last tenth is held out, as in training;
every second held-out document follows the healing, the others measure what came of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headwise.corpus import documents as corpus
from headwise.corpus import verbs
from headwise.corpus.documents import cut, encoded
from headwise.corpus.sources import Sources, exists
from headwise.corpus.tokens import require_tokens, unknown_note
from headwise.corpus.training import HELD_OUT_SHARE
from headwise.errors import HeadwiseError
from headwise.families import require_run
from headwise.files import read_text, text_path
from headwise.gpt.presets import find_preset
from headwise.gpt.run import read_run
from headwise.models.open import Folder
from headwise.reshape.arguments import check_tokens
from headwise.shapes import shape_of

# tokens of a document, at most, where the user names no number: a round choice, more take more memory
LONGEST = 1024
LOGITS = 2**26  # numbers, at most, in the logits of a batch that is only read: 256 MiB in float32
# Round choices: with more tokens a number is surer, and the reading takes longer.
STATISTICS = 50_000  # tokens, at most, that alignment and importance read
GLANCE = 5_000  # tokens, at most, that an evaluation of a healing reads
EVALUATION = 20_000  # tokens, at most, that one measurement reads

# One stream (N,), documents (B,T), or documents one by one.
Ids = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


@dataclass(frozen=True)
class Calibration:
    """Documents as ids, each (T,), in the order of the text.

    The child is made and healed on `train`; `held_out` follows the healing and measures.
    """

    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    length: int  # tokens of a document, at most
    vocab_size: int
    # documents that any pass over them reads, but healing reads all of `train`
    most: int | None = None
    built_in: bool = False  # is it the verb corpus, and no text of the user's?
    about: tuple[str, ...] = ()  # what a reader of any number on it must know

    @property
    def statistics(self) -> list[Tensor]:
        """Batches (B,T) for alignment and importance."""
        return self._batches(self.train, STATISTICS)

    @property
    def glance(self) -> list[Tensor]:
        """Held-out batches that follow a healing: others than `evaluation`, for the best weights are chosen on them."""
        # a single document has to serve both
        return self._batches(self.held_out[1::2] or self.held_out, GLANCE)

    @property
    def evaluation(self) -> list[Tensor]:
        """Held-out batches (B,T) to measure on."""
        return self._batches(self.held_out[::2], EVALUATION)

    def _batches(self, documents: Sequence[Tensor], limit: int) -> list[Tensor]:
        # `most` are the tokens of one batch: each has logits over the whole vocabulary.
        return batches(
            spread(documents, limit, self.most), most=min(corpus.BATCH, LOGITS // self.vocab_size)
        )


def read_calibration(
    text: Path | str | Ids | None,
    folder: Folder,
    tokens: int | None = None,
    most: int | None = None,
) -> Calibration:
    """The documents of a text file, a text or its ids; None takes what a run of headwise was trained on.

    Args:
        text: a path, a text, a stream of ids (N,), or documents of ids
        folder: the model, with its tokenizer
        tokens: of a document; default: the model's context, at most LONGEST
        most: documents that a measurement reads; default: as many as its limit of tokens allows

    Raises HeadwiseError for a text that is too short for its parts, and for ids that the model does not know.
    """
    check_tokens(tokens, folder.context)
    if most is not None and most < 1:
        raise HeadwiseError(f"documents={most} must be at least 1: something has to be measured on")
    length = tokens or min(folder.context or LONGEST, LONGEST)
    # `frame`: ids that the model expects before a text, and after it. A run of lines has a boundary there.
    by_lines = (
        folder.family == "headwise" and folder.tokens is not None and bool(folder.tokens.frame[0])
    )
    # `name` is what an error calls the text. `encoded` counts its characters in `facts`, and those without a token.
    name, facts = "the text", Counter[str]()
    # What is read: a text, or lines to learn from and held-out ones, or ids.
    lines: Sequence[Sequence[str]] | None = None
    # A string without a space that names no file is taken for a misspelled path: `read_text` refuses it by that name.
    if isinstance(text, Path) or (
        isinstance(text, str) and (exists(Path(text)) or not any(map(str.isspace, text)))
    ):
        name = str(text_path(text))
        text = read_text(name)
    elif text is None:
        # None for a folder that is no run, which `require_run` refuses
        run = read_run(require_run(folder.path))
        assert run is not None
        settings, name = run.settings, "the text of the run"
        if settings.paths:
            text = Sources(settings.paths).text()
        else:  # a run without files learned from the verb corpus, drawn by its seed
            built_in = verbs.corpus(settings.seed, core=find_preset(settings.preset).core)
            lines = built_in.train_lines, built_in.held_out_lines
    is_built_in = lines is not None  # until here a text has no lines, and only the verb corpus has
    if isinstance(text, str) and by_lines:
        lines = _split([line.strip() for line in text.splitlines() if line.strip()])
    # Its documents as ids in two parts, the last tenth apart.
    parts: Sequence[Sequence[Any]]
    if lines is not None:
        edge = require_tokens(folder).frame[0]  # the boundary, on both sides of a line
        # A longer line loses its end, as in training.
        parts = [
            [[*edge, *encoded(folder, line, facts), *edge][:length] for line in part]
            for part in lines
        ]
    elif isinstance(text, str):
        before, after = require_tokens(folder).frame
        body = length - len(before) - len(after)
        if body < 1:
            raise HeadwiseError(
                f"tokens={length} leaves no room for a text beside the {length - body} of the frame"
            )
        stream = encoded(folder, text, facts)
        parts = [
            [[*before, *ids, *after] for ids in cut([piece], body)] for piece in _split(stream)
        ]
    else:
        assert text is not None  # without one a run has given a text or lines
        parts = _id_parts(text, length)
    # Documents of a single token are left out: it predicts nothing.
    train, held_out = (tuple(_whole(ids, 1) for ids in part if len(ids) > 1) for part in parts)
    if not train or not held_out:
        raise HeadwiseError(
            f"{name} is too short: of documents of 2 to {length} tokens{' (a line each)' * by_lines} it makes "
            f"{len(train)} to calibrate on and {len(held_out)} to measure on; each part needs one"
        )
    # Ids may come from another tokenizer.
    smallest, largest = (int(bound) for bound in torch.cat([*train, *held_out]).aminmax())
    if smallest < 0 or (folder.vocab_size is not None and largest >= folder.vocab_size):
        raise HeadwiseError(
            f"{name} has the token id {min(smallest, 0) or largest} and the model knows "
            f"{folder.vocab_size or 'no negative'} tokens: they do not belong together"
        )
    about = unknown_note(folder.tokens, facts["unknown"], facts["characters"])
    return Calibration(
        train, held_out, length, folder.vocab_size or largest + 1, most, is_built_in, about
    )


def _split(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Documents or ids, the last tenth apart."""
    end = int(len(items) * (1 - HELD_OUT_SHARE))  # the same cut as in training
    return items[:end], items[end:]


def _whole(ids: Any, axes: int) -> Tensor:
    """Ids as int64 on the processor. HeadwiseError for what holds none, or has more axes."""
    # torch raises each of them for what it cannot read
    with suppress(TypeError, ValueError, RuntimeError):
        read = torch.as_tensor(ids)
        if 1 <= read.ndim <= axes and not read.is_floating_point():
            return read.long().cpu()
    shown = " ".join(repr(ids).split())  # an array's has several lines
    raise HeadwiseError(
        f"{shown:.60} is neither a text nor its ids, whole numbers (N,), or documents of them"
    )


def _id_parts(ids: Ids, length: int) -> Sequence[Sequence[Any]]:
    """One stream of ids (N,) is cut into documents; documents (B,T), or one by one, stay what they are."""
    # an array, or a list of ids
    if not isinstance(ids, Sequence) or (ids and shape_of(ids[0]) == ()):
        ids = _whole(ids, 2)
        if ids.ndim == 1:
            return [torch.split(part, length) for part in _split(ids)]  # type: ignore[arg-type]
    longest = max(map(len, ids), default=0)
    if longest > length:
        raise HeadwiseError(
            f"a document of {longest} ids exceeds the {length} that the model is to read at a time"
        )
    return _split(ids)  # type: ignore[arg-type]


def spread(documents: Sequence[Tensor], limit: int, most: int | None = None) -> list[Tensor]:
    """Documents of about `limit` tokens together, at most so many, spread evenly over the text; or all of them."""
    total, n = sum(map(len, documents)), len(documents)
    # as many of mean length as the limit holds
    wanted = n if total <= limit else max(1, n * limit // total)
    wanted = min(wanted, most or wanted)
    return [documents[i * n // wanted] for i in range(wanted)]


def n_tokens(batches: Iterable[Tensor]) -> int:
    return sum(ids.numel() for ids in batches)


def batches(
    documents: Sequence[Tensor], size: int | None = None, most: int | None = None
) -> list[Tensor]:
    """Documents of equal length side by side, (B,T), the longest first.

    size  documents of a batch, at most; without it `most`, its tokens, decide
    """
    return list(corpus.batches(sorted(documents, key=len, reverse=True), most, size))
