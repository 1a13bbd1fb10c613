"""Texts in which it is known what belongs together: of the verb corpus, of a file, of a bench.

A relation is a set of pairs of spans of tokens, those that look and those that they should look at: a verb and its
pronoun, a noun and its determiner, a bracket and the one that it closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwise.corpus import verbs
from headwise.corpus.tokens import Reader, TextTokens
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_json

BENCHES = {name: packaged(name, "json") for name in ("grammar", "meaning")}
CONJUGATIONS = 120  # one-language lines of the core, which every verb model knows, beside the held-out cells

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # positions of the tokens that look, and of those looked at


@dataclass(frozen=True)
class Labelled:
    """A document with its pairs, name of the relation -> pairs."""

    ids: list[int]
    pairs: dict[str, list[Pair]]


@dataclass(frozen=True)
class Relations:
    """Labelled documents, and what each relation means, in a line."""

    documents: Sequence[Labelled]
    meanings: dict[str, str] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        used = dict.fromkeys(name for document in self.documents for name in document.pairs)
        if not used:
            source = self.source or "the relations"
            raise HeadwiseError(f"{source}: there is no pair in {len(self.documents)} documents")
        known = {name: meaning for name, meaning in self.meanings.items() if name in used}
        object.__setattr__(self, "meanings", known | {name: name for name in used if name not in known})


def verb_relations(tokens: TextTokens, lines: Iterable[str]) -> Relations:
    """Lines of the verb corpus, such as the held-out cells, and conjugations: what decides person, verb and tense."""
    shift = len(tokens.frame[0])
    documents = []
    for line in [*lines, *verbs.conjugation_lines(core=True)[:CONJUGATIONS]]:
        pairs: dict[str, list[Pair]] = {}
        for name, places in verbs.related(line).items():
            pairs[name] = [((i + shift,), (j + shift,)) for i, j in places]
        documents.append(Labelled(tokens.prompt(line), pairs))
    return Relations(documents, verbs.RELATIONS, verbs.NAME)


def bench(reader: Reader, name: str) -> Relations:
    """Labelled sentences that come with the package, the names of their relations in their language: "grammar", 60 in
    English and 40 in Spanish; "meaning", 40 and 18. What stands later looks back at what stands earlier."""
    if name not in BENCHES:
        raise HeadwiseError(f"there is no bench {name!r}; there is {', '.join(BENCHES)}")
    return replace(read_relations(reader, BENCHES[name]), source=f"the bench {name}")


def read_relations(reader: Reader, path: Path) -> Relations:
    """Labelled documents from a JSON file; docs/watching.md has an example.

    {"documents": [{"text": "The keys are lost.", "pairs": [{"name": "subject", "from": "are", "to": "keys"}]}],
     "relations": {"subject": "from a verb to its subject"}}

    A document is a `text` or `ids`. A span is [start, end), counted in characters of a text and in tokens of ids; with
    `"unit": "tokens"` in tokens of the text too; or it is a piece of the text that stands there once. Raises
    HeadwiseError that names the document, the pair and what does not fit.
    """
    content = read_json(path)
    listed = content.get("documents") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed:
        raise HeadwiseError(f'{path} has no list "documents"; docs/watching.md shows the format')
    meanings = content.get("relations", {})
    if not isinstance(meanings, dict) or not all(isinstance(meaning, str) for meaning in meanings.values()):
        shape = '"relations" must give each name its meaning, as {"subject": "from a verb to it"}'
        raise HeadwiseError(f"{path}: {shape}")
    documents = [_document(reader, item, f"{path}, document {n}") for n, item in enumerate(listed)]
    return Relations(documents, meanings, str(path))


def _document(reader: Reader, item: Any, where: str) -> Labelled:
    if not isinstance(item, Mapping) or ("text" in item) == ("ids" in item):
        raise HeadwiseError(f'{where}: pass either "text" or "ids"')
    # The ids, with what the model expects around a text, and for each the characters of the text that it stands for.
    ids, size = item.get("ids"), reader.vocab_size
    places: list[tuple[int, int]] = []
    if "ids" in item:
        if not (isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < (size or i + 1) for i in ids)):
            raise HeadwiseError(f'{where}: "ids" must be a list of whole numbers, each below the vocabulary of {size}')
    elif reader.tokens is None:
        raise HeadwiseError(f'{where}: {reader.name} has no tokenizer; pass "ids" in place of "text"')
    elif not isinstance(item["text"], str) or not item["text"].strip():
        raise HeadwiseError(f'{where}: "text" must be some words')
    else:
        before, after = reader.tokens.frame
        ids = [*before, *reader.tokens.encode(item["text"]), *after]
        places = [(-1, -1)] * len(before) + reader.tokens.places(item["text"]) + [(-1, -1)] * len(after)
    if reader.context is not None and len(ids) > reader.context:
        raise HeadwiseError(f"{where} has {len(ids)} tokens and {reader.name} takes {reader.context}; shorten it")
    pairs: dict[str, list[Pair]] = {}
    for n, pair in enumerate(item.get("pairs", ())):
        match pair:
            case {"name": str(name), "from": looks, "to": at}:
                place = f"{where}, pair {n}"
                queries = _positions(looks, item, ids, places, f"{place}, from")
                pairs.setdefault(name, []).append((queries, _positions(at, item, ids, places, f"{place}, to")))
            case _:
                raise HeadwiseError(f'{where}, pair {n}: a pair has "name", "from" and "to"')
    return Labelled(ids, pairs)


def _positions(
    span: Any, item: Mapping[str, Any], ids: Sequence[int], places: Sequence[tuple[int, int]], where: str
) -> tuple[int, ...]:
    """The tokens of a span, at least one."""
    text = item.get("text")
    in_tokens = text is None or item.get("unit") == "tokens"
    length = len(ids) if in_tokens or text is None else len(text)
    if isinstance(span, str) and text is not None:
        if text.count(span) != 1 or not span:
            raise HeadwiseError(f"{where}: {span!r} stands {text.count(span)} times in {text!r}; pass [start, end)")
        span, in_tokens = [text.index(span), text.index(span) + len(span)], False
    whole = isinstance(span, list) and len(span) == 2 and all(type(x) is int for x in span)
    if not whole or not 0 <= span[0] < span[1] <= length:
        unit = "tokens" if in_tokens else "characters"
        raise HeadwiseError(f"{where}: {span!r} must be [start, end) within the {length} {unit} of the document")
    if in_tokens:
        return tuple(range(*span))
    positions = tuple(n for n, (start, end) in enumerate(places) if start < span[1] and end > span[0])
    if not positions:
        raise HeadwiseError(f"{where}: no token stands for {str(text)[slice(*span)]!r}")
    return positions
