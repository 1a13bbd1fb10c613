"""The text of a survey: files, words and ids, or what the run that a model comes from held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.corpus.documents import Text, check_ids, read_documents, text_of
from headwise.corpus.labels import Relations, bench, read_relations, verb_relations
from headwise.corpus.sources import Progress
from headwise.corpus.tokens import require_tokens
from headwise.corpus.verbs import HALF_LINES
from headwise.errors import HeadwiseError
from headwise.gpt.run import held_out_documents, read_run
from headwise.heads.aligned_texts import are_sounds, transcripts
from headwise.models.lineage import require_run
from headwise.models.open import Folder
from headwise.words import Note

HELD_OUT = 4096  # tokens of what a run held out

Texts = str | Path | Sequence[str | Path] | Sequence[Sequence[int]]


def read_texts(
    folder: Folder,
    texts: Texts | Text | None,
    tokens: int | None = None,
    documents: int | None = None,
    run: Path | None = None,
    unknown: str = "refuse",
    field: str | None = None,
    progress: Progress | None = None,
    relations: Relations | str | Path | None = None,
) -> Text:
    """The text of a survey, with its relations; see `headwise.survey`. `run` is whose held-out text is the default."""
    if unknown not in ("refuse", "skip"):
        raise HeadwiseError(f"unknown {unknown!r} is not known; one of refuse, skip")
    for name, value in (("tokens", tokens), ("documents", documents)):
        if value is not None and value < 1:
            raise HeadwiseError(f"{name} {value} must be at least 1")
    if isinstance(relations, Path):
        relations = read_relations(folder, relations)
    elif isinstance(relations, str):
        relations = bench(folder, relations)
    if texts is None and relations is not None:
        texts = [document.ids for document in relations.documents]
    if isinstance(texts, Text):
        texts.relations = relations or texts.relations
        return texts
    sources: Sequence[Any] = [texts] if isinstance(texts, str | Path) else texts or ()
    words = [str(source) for source in sources if isinstance(source, str | Path)]
    if tokens is not None and not words:
        raise HeadwiseError(f"tokens {tokens} cuts a text into documents; pass a text with it")
    if texts is None:
        text = held_out(folder, run or folder.path, documents)
    elif words and len(words) < len(sources):
        raise HeadwiseError(f"{len(words)} of {len(sources)} documents are texts and the others ids; pass either")
    elif are_sounds(words):
        spoken = transcripts(folder, [Path(word) for word in words[:documents]])
        text = text_of(folder, [each.ids for each in spoken], words)
        text.scored_after = text.frame[0][-1]
        wrote = "; ".join(require_tokens(folder).decode(each.ids).strip() for each in spoken)
        text.about = (Note.of("note.heard", text=wrote),)
    elif words:
        text = read_documents(folder, words, tokens, documents, unknown, field, progress)
    else:
        lists = [[int(i) for i in source] for source in sources[:documents]]
        text = check_ids(folder, {f"document {n}": ids for n, ids in enumerate(lists)})
    text.relations = relations or text.relations
    return text


def held_out(folder: Folder, run: Path, documents: int | None) -> Text:
    """What a run, or the run that a model comes from, held out."""
    origin = require_run(run)
    record = read_run(origin)
    assert record is not None
    tokens, settings = require_tokens(folder), record.settings
    source = Note.of("source.held_out" if settings.replay is None else "source.learned_from")
    ids = held_out_documents(origin, HELD_OUT)[:documents]
    text = text_of(folder, ids, [source])
    if settings.text is None:
        text.note = HALF_LINES
        text.scored_after = tokens.encode("=")[0]  # the answer of a line stands behind it
        text.end = tuple(tokens.frame[0])  # the boundary stands between lines
        lines = sorted(map(tokens.decode, ids), key=lambda line: line != record.example)
        text.relations = verb_relations(tokens, lines)
    return text
