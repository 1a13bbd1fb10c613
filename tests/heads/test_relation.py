"""Relations and retrieval on a model that is built to have them."""

from __future__ import annotations

import pytest
import torch
from test_roles import RARE, V, documents, hand_made

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.relation import relation, retrieval
from headwise.heads.texts import Text


def test_a_relation_is_found_in_the_head_that_follows_it() -> None:
    texts = documents()
    pairs = [[(i, ids.index(token)) for i, token in enumerate(ids) if ids.index(token) < i][:7] for ids in texts]
    # The first copy of a token is the only earlier one for most of these.
    single = [[(i, j) for i, j in some if ids[:i].count(ids[i]) == 1] for ids, some in zip(texts, pairs, strict=True)]
    found = relation(hand_made(), texts, single)
    assert found["L0.H2"].accuracy == 1.0
    assert found["L0.H2"].mass.mean > 0.95
    assert [name for name, score in found.items() if score.earned] == ["L0.H2"]


def test_a_fixed_offset_is_no_relation() -> None:
    texts = documents()
    found = relation(hand_made(), texts, [[(i, i - 1) for i in range(1, 61)] for _ in texts])
    assert found["L0.H0"].accuracy == 1.0
    assert (found["L0.H0"].offset, found["L0.H0"].offset_accuracy) == (1, 1.0)
    assert not any(score.earned for score in found.values())  # no head can beat an offset that is always right


def test_the_mass_is_the_weight() -> None:
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=31, context=23, n_layers=2, n_heads=3, d_model=42, init_std=0.5))
    ids = torch.randint(31, (23,)).tolist()
    pairs = [(3, 1), (4, 4), (17, 2), (5, 0)]
    found = relation(model, [ids], [pairs])
    with hw.watch(model, top_rows=range(23), top_k=23) as seen, torch.no_grad():
        model(torch.tensor([ids]))
    for name, score in found.items():
        rows = {row: dict(keys) for row, keys in seen.top[name].items()}
        assert score.mass.mean == pytest.approx(sum(rows[q][k] for q, k in pairs) / 4, abs=1e-6)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [([], "0 lists of pairs for 1 documents"), ([[]], "no pair"), ([[(61, 0)]], "61 tokens, and a pair names")],
)
def test_pairs_that_do_not_fit(pairs: list[list[tuple[int, int]]], said: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=said):
        relation(hand_made(), documents(1), pairs)


def copier() -> GPT:
    """So few tokens that what is written often stands where a head looks."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=3, context=29, n_layers=1, n_heads=2, d_model=28, init_std=0.5)).eval()


def test_retrieval_counts_what_is_fetched() -> None:
    model = copier()
    ids = torch.randint(3, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    found = retrieval(model, ids, (2, 9), steps=5)
    text, fetched = list(ids), {"L0.H0": set(), "L0.H1": set()}
    for _ in range(5):  # the definition, with whole maps
        x = torch.tensor([text])
        calls: list = []
        model.blocks[0].attention.watchers.append(calls.append)
        with torch.no_grad():
            written = int(model(x)[0, -1].argmax())
        model.blocks[0].attention.watchers.clear()
        call = calls[0]
        weights = hw.trace(call.q, call.k, call.v, **call.options._asdict()).weights[0, :, -1]
        for h in range(2):
            key = int(weights[h].argmax())
            if 2 <= key < 9 and text[key] == written:
                fetched[f"L0.H{h}"].add(key)
        text.append(written)
    assert max(found.values()) > 0
    assert found == {name: len(keys) / 7 for name, keys in fetched.items()}


def test_a_needle_outside_the_text() -> None:
    with pytest.raises(hw.HeadwiseError, match="does not lie in a text of 13 tokens"):
        retrieval(copier(), [1] * 13, (9, 14), 3)


def test_the_helpers_cover_the_vocabulary() -> None:
    assert max(max(ids) for ids in documents()) < V
    assert RARE == 5 and Text(documents(), lambda ids: tuple(map(str, ids))).counts.total() == 11 * 61
