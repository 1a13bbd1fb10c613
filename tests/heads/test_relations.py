"""Relations and retrieval on a model that is built to have them; relations of a file, of the verb corpus."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses_table
from planted import documents, hand_made

from headwise.backends.torch_ import trace
from headwise.corpus import verbs
from headwise.corpus.documents import Labelled, Relations, read_relations, verb_relations
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import verb_corpus
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.documents import no_progress
from headwise.heads.relations import described, follow
from headwise.heads.survey import survey
from headwise.models.open import Folder


def labelled(texts: list[list[int]], pairs: list[list[tuple[int, int]]]) -> Relations:
    some = [[((query,), (key,)) for query, key in of_text] for of_text in pairs]
    return Relations([Labelled(ids, {"mine": each}) for ids, each in zip(texts, some, strict=True)])


def numbers(ids: Any) -> list[str]:
    return [str(i) for i in ids]


def copies() -> Relations:
    """From the second copy of a token to the first."""
    texts = documents()
    first = [[(i, ids.index(token)) for i, token in enumerate(ids) if ids[:i].count(token) == 1][:7] for ids in texts]
    return labelled(texts, first)


def test_a_relation_is_a_role_of_the_head_that_follows_it() -> None:
    found = survey(hand_made(), documents(), relations=copies(), ablate="none")
    score = found["L0.H2"].relations["mine"]
    assert score.accuracy.mean == 1.0 and score.mass.mean > 0.95
    assert [head.name for head in found.profiles if "mine" in head.roles] == ["L0.H2"]
    assert (found["L0.H2"]["mine"], found["L0.H2"].uniform["mine"]) == (score.mass, score.even)
    assert score.untrained == found.untrained["mine"] < 0.5  # type: ignore[index]
    relation = found.relations[0]
    assert (relation.name, relation.n_documents, relation.n_pairs) == ("mine", 11, 77)
    assert found.statistics["mine"] == "mass on the right tokens: mine"


def test_a_head_that_looks_back_wherever_it_stands_has_no_role() -> None:
    texts = documents()
    relations = labelled(texts, [[(i, i - 1) for i in range(1, 61, 3)] for _ in texts])
    score = follow(hand_made(), relations, numbers, no_progress)["mine"]["L0.H0"]
    assert score.accuracy.mean == 1.0 and score.elsewhere == pytest.approx(score.mass.mean, abs=0.02)
    found = survey(hand_made(), texts, relations=relations, ablate="none")
    assert [head.name for head in found.profiles if "mine" in head.roles] == []


def test_every_number_is_that_of_the_whole_map() -> None:
    """Spans of several tokens, a document without pairs; the map comes from the backend."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=31, context=23, n_layers=2, n_heads=3, d_model=42, init_std=0.5))
    texts = [torch.randint(31, (n,)).tolist() for n in (23, 19, 11)]
    a, b = [((3, 4), (1,)), ((17,), (2, 5, 6))], [((9,), (8,)), ((7,), (9,))]
    documents = [Labelled(*each) for each in zip(texts, ({"a": a}, {"b": b}, {}), strict=True)]
    found = follow(model, Relations(documents), numbers, no_progress)
    for layer, block in enumerate(model.blocks):
        for name, text, pairs in (("a", texts[0], a), ("b", texts[1], b)):
            calls: list[Any] = []
            block.attention.watchers.append(calls.append)
            with torch.no_grad():
                model(torch.tensor([text]))
            block.attention.watchers.clear()
            maps = trace(calls[0].q, calls[0].k, calls[0].v, calls[0].options).weights[0].double()
            looking = {query for queries, _ in pairs for query in queries}
            for h, p in enumerate(maps):
                score = found[name][f"L{layer}.H{h}"]
                mass = [sum(float(p[q, k]) for q in qs for k in ks) / len(qs) for qs, ks in pairs]
                right = [sum(int(p[q].argmax()) in ks for q in qs) / len(qs) for qs, ks in pairs]
                even = [sum(sum(k <= q for k in ks) / (q + 1) for q in qs) / len(qs) for qs, ks in pairs]
                assert score.mass.mean == pytest.approx(sum(mass) / 2, abs=1e-6)
                assert score.accuracy.mean == pytest.approx(sum(right) / 2)
                assert score.even == pytest.approx(sum(even) / 2, abs=1e-6)
                assert score.elsewhere == pytest.approx(sum(elsewhere(p, *e, looking) for e in pairs) / 2, abs=1e-6)
                best = max(mass)  # in the first document, and in the only one that has the pair
                assert score.example[2] == pytest.approx(best, abs=1e-6)
                assert math.isnan(score.untrained)


def elsewhere(p: torch.Tensor, queries: tuple[int, ...], keys: tuple[int, ...], looking: set[int]) -> float:
    """The mean over other rows of their weights at the distances of a pair."""
    values = [
        sum(float(p[row, row - q + k]) for k in keys)
        for q in queries
        for row in range(len(p))
        if row not in looking and all(0 <= row - q + k < len(p) for k in keys)
    ]
    return sum(values) / len(values)


def test_the_verb_corpus_knows_what_decides() -> None:
    assert verbs.related("he will write = él escribirá") == {
        "person": [(3, 0)],
        "translation": [(4, 2)],
        "tense": [(4, 1)],
    }
    assert verbs.related("yo abro , tú abres , él abre") == {"earlier verb": [(3, 1), (6, 4)]}
    assert verbs.related("I work = yo trabajo") == {"person": [(2, 0)], "translation": [(3, 1)]}
    corpus = verb_corpus(0, 32)
    relations = verb_relations(corpus.tokens, [cell.line for cell in corpus.cells])
    sizes = {relation.name: (relation.n_documents, relation.n_pairs) for relation in described(relations)}
    assert sizes == {"person": (36, 36), "translation": (36, 36), "tense": (26, 26), "earlier verb": (120, 240)}


@pytest.fixture
def letters() -> Folder:
    tokens = Tokens.characters("abcdefgh ", boundary=True)
    model = GPT(GPTConfig(vocab_size=len(tokens), context=13, n_layers=1, n_heads=3, d_model=12))
    return Folder(Path("letters"), model, tokens, 13, "headwise", len(tokens))


def test_relations_of_a_file(letters: Folder, tmp_path: Path) -> None:
    spans = [("abc", "h"), ([0, 3], [4, 5])]
    pairs = [{"name": "x", "from": start, "to": end} for start, end in spans]
    other = {"text": "abc", "pairs": [{"name": "y", "from": [2, 3], "to": [0, 2]}]}
    content = {"documents": [{"text": "abc hd", "pairs": pairs}, other], "relations": {"x": "why"}}
    (tmp_path / "r.json").write_text(json.dumps(content))
    found = read_relations(letters, tmp_path / "r.json")
    assert found.meanings == {"x": "why", "y": "y"}
    assert found.documents[0].pairs == {"x": [((1, 2, 3), (5,))] * 2}  # a boundary stands before the text
    assert found.documents[1].pairs == {"y": [((3,), (1, 2))]}


def one(pair: Any = None, **document: Any) -> dict[str, Any]:
    pair = {"name": "x", "from": "a", "to": "b"} | (pair or {})
    return {"documents": [{"text": "ab cab h", "pairs": [pair]} | document]}


def test_files_that_do_not_fit(letters: Folder, tmp_path: Path) -> None:
    def read(content: Any, **known: Any) -> None:
        (tmp_path / "r.json").write_text(content if isinstance(content, str) else json.dumps(content))
        described(read_relations(replace(letters, **known), tmp_path / "r.json"))

    refuses_table("relations", globals() | {"read": read})
