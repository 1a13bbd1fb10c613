"""The texts that heads are measured on: files, words or ids, else what the run that a model comes from held out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from headwise.corpus.documents import (
    Relations,
    Text,
    bench,
    check_ids,
    read_documents,
    read_relations,
    text_of,
    verb_relations,
)
from headwise.corpus.sources import Progress
from headwise.corpus.tokens import require_tokens
from headwise.corpus.verbs import HALF_LINES
from headwise.errors import HeadwiseError
from headwise.families import require_run
from headwise.gpt.run import held_out_documents, read_run
from headwise.models.open import Folder
from headwise.shapes import shape_of
from headwise.words import Note

HELD_OUT = 4096  # tokens of what a run held out, about: a round choice

Texts = str | Path | Sequence[str | Path] | Sequence[Sequence[int]]


def read_texts(
    folder: Folder,
    texts: Texts | Text | None,
    tokens: int | None = None,
    documents: int | None = None,
    progress: Progress | None = None,
    relations: Relations | str | Path | None = None,
) -> Text:
    """The text of a survey, with its relations.

    texts, tokens, documents, relations  as in `headwise.survey`
    progress                             is called while large files are read

    Raises HeadwiseError where the arguments do not go together, or a text does not fit the model.
    """
    for name, value in (("tokens", tokens), ("documents", documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{name} {value} must be at least 1")
    if isinstance(relations, Path):
        relations = read_relations(folder, relations)
    elif isinstance(relations, str):
        relations = bench(folder, relations)
    if texts is None and relations is not None:
        texts = [document.ids for document in relations.documents]
    sources: list[Any] = []
    if texts is not None and not isinstance(texts, Text):
        sources = [texts] if isinstance(texts, str | Path) else list(texts)
    # names of files, and texts
    words = [str(source) for source in sources if isinstance(source, str | Path)]
    # numbers, not documents: the ids of a single one
    if sources and not words and shape_of(sources[0]) == ():
        sources = [sources]
    if isinstance(texts, Text) and (tokens, documents) != (None, None):
        raise HeadwiseError("a Text has its documents already; leave tokens= and documents= out")
    if tokens is not None and not words:
        raise HeadwiseError(f"tokens {tokens} cuts a text into documents; pass a text with it")
    if isinstance(texts, Text):
        text = copy(texts)  # the caller's keeps its relations
    elif texts is None:
        text = held_out(folder, documents)
    elif words and len(words) < len(sources):
        raise HeadwiseError(
            f"{len(words)} of {len(sources)} documents are texts and the others ids; pass either"
        )
    elif words:
        text = read_documents(folder, words, tokens, documents, progress)
    else:
        lists = [[int(i) for i in source] for source in sources[:documents]]
        text = check_ids(folder, {f"document {n}": ids for n, ids in enumerate(lists)})
    text.relations = relations or text.relations
    return text


def held_out(folder: Folder, documents: int | None) -> Text:
    """What the run that a model comes from held out; of a run of verbs with their relations.

    Raises HeadwiseError for a folder that comes from no run.
    """
    origin = require_run(folder.path)
    record = read_run(origin)
    assert record is not None  # `require_run` has found it
    tokens, settings = require_tokens(folder), record.settings
    ids = held_out_documents(origin, HELD_OUT)[:documents]
    text = text_of(folder, ids, [Note.of("source.held_out")])
    if record.example:
        before, after = tokens.frame  # ids that every document begins and ends with
        text.example = [*before, *tokens.encode(record.example), *after]
    if not settings.text:  # the verb corpus, whose lines are like "he works = él trabaja"
        text.note = HALF_LINES
        text.scored_after = tokens.encode("=")[0]  # the answer of a line stands behind it
        text.end = tuple(tokens.frame[0])  # the boundary stands between lines
        # The line that the run's pages show comes first, for False is less than True: examples of relations are taken
        # from the first document. The others stay in their order.
        lines = sorted(map(tokens.decode, ids), key=lambda line: line != record.example)
        text.relations = verb_relations(tokens, lines)
    return text
