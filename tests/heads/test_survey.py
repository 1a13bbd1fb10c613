"""A survey is the mean over documents of what `watch` sees, with the effects beside it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads import effect
from headwise.heads.copying import copying
from headwise.heads.profiles import Survey
from headwise.heads.statistics import all_statistics
from headwise.heads.survey import EFFECTS, Text, fresh_model, survey
from headwise.intervals import interval_of
from headwise.models.sites import sites_of

V, CONTEXT = 37, 41


@pytest.fixture(scope="module")
def model() -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return GPT(
            GPTConfig(vocab_size=V, context=CONTEXT, n_layers=2, n_heads=6, n_kv_heads=2, d_model=60, init_std=0.3)
        )


def shown(ids: Any) -> tuple[str, ...]:
    return tuple("," if i < 5 else f"t{i}" for i in ids)


@pytest.fixture(scope="module")
def text() -> Text:
    generator = torch.Generator().manual_seed(0)
    lengths = (31, 31, 17, 41, 23)
    return Text([torch.randint(V, (n,), generator=generator).tolist() for n in lengths], shown, frozenset({36}))


@pytest.fixture(scope="module")
def found(model: GPT, text: Text) -> Survey:
    return survey(model, text, "small", context=CONTEXT)


def test_scores_are_means_over_documents(model: GPT, text: Text, found: Survey) -> None:
    names = ("entropy", "confidence", "distance", "spread", "self", "previous", "first", "same_token", "norm")
    one_by_one: dict[str, list[float]] = {name: [] for name in names}
    for ids in text.documents:
        with hw.watch(model) as seen, torch.no_grad():
            model(torch.tensor([list(ids)]))
        for name in names:
            one_by_one[name].append(getattr(seen["L1.H4"], name))
    profile = next(profile for profile in found.profiles if profile.name == "L1.H4")
    for name in names:
        expected, score = interval_of(one_by_one[name]), profile.scores[name]
        assert (score.mean, score.low, score.n) == pytest.approx((expected.mean, expected.low, 5), abs=2e-6)


def test_facts(found: Survey, text: Text) -> None:
    assert (found.n_documents, found.n_tokens, found.longest) == (5, 143, 41)
    assert found.passage == 31 and len(found.tokens) == 31
    assert [profile.name for profile in found.profiles] == [f"L{n}.H{h}" for n in range(2) for h in range(6)]
    assert set(found.statistics) == set(all_statistics())


def test_marks(text: Text) -> None:
    ids = torch.tensor([3, 7, 36, 2, 9, 9])
    marks = text.marks(ids)
    assert marks["delimiter"].tolist() == [False, False, True, True, False, False]  # the first token is left out
    assert not marks["rare"][2]  # a special token is not rare, however seldom


def test_the_passage_holds_the_top_keys_of_the_first_document(model: GPT, text: Text, found: Survey) -> None:
    with hw.watch(model, top_rows=range(31), top_k=8) as seen, torch.no_grad():
        model(torch.tensor([list(text.documents[0])]))
    for profile in found.profiles:
        for row, keys in seen.top[profile.name].items():
            kept = dict(zip(profile.top_keys[row].tolist(), profile.top_weights[row].tolist(), strict=True))
            real = {key: weight for key, weight in keys if weight > 0}
            assert {key: kept[key] for key in real} == pytest.approx(real, abs=1e-6)
    assert np.allclose(found.profiles[3].thumbnail.sum(1), 1, atol=1e-5)  # 31 tokens: each cell is one weight
    assert np.allclose(found.profiles[3].received * 31, found.profiles[3].thumbnail.sum(0), atol=1e-5)


def test_effects_are_those_of_the_effect_room(model: GPT, text: Text, found: Survey) -> None:
    batches = [torch.tensor([list(ids)]) for ids in text.documents]
    assert sum(map(len, text.documents)) < EFFECTS
    importance = effect.importance(model, batches)
    for profile in found.profiles:
        assert profile.importance == pytest.approx(importance[profile.name], rel=1e-4)
        with hw.ablate(model, [profile.name]), torch.no_grad():
            losses = [float(effect.next_token_losses(model, ids)[0]) for ids in batches]
        assert profile.ablation is not None and found.loss is not None
        assert profile.ablation.mean == pytest.approx(np.mean(losses) - found.loss, abs=2e-6)


def test_without_controls_and_ablation(model: GPT, text: Text) -> None:
    found = survey(model, text, "small", context=CONTEXT, controls=False, ablate=None)
    assert found.untrained is None and found.ablated is None and found.loss is None
    assert all(profile.ablation is None and profile.importance is not None for profile in found.profiles)


def test_the_random_state_is_left_alone(model: GPT, text: Text) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = survey(model, text, "small", context=CONTEXT, ablate=None, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert survey(model, text, "small", context=CONTEXT, ablate=None, seed=1).untrained == one.untrained
    assert survey(model, text, "small", context=CONTEXT, ablate=None, seed=2).untrained != one.untrained


def test_too_few_tokens_to_repeat(model: GPT) -> None:
    found = survey(model, Text([[1, 2, 1, 2, 1]], shown), "small", context=CONTEXT, controls=False, ablate=None)
    assert "duplicate" not in found.profiles[0].scores
    assert any("too few different tokens" in note for note in found.notes)
    assert found.profiles[0].scores["entropy"].high == math.inf  # one document


def test_progress_ends_at_the_total(model: GPT, text: Text) -> None:
    heard: dict[str, tuple[int, int]] = {}
    survey(model, text, "s", context=CONTEXT, progress=lambda what, done, total: heard.update({what: (done, total)}))
    assert set(heard) == {"reading", "repeated tokens", "untrained control", "importance", "ablation"}
    assert all(done == total for done, total in heard.values())


def test_empty_texts() -> None:
    with pytest.raises(hw.HeadwiseError, match="no document of two tokens"):
        Text([[3], []], shown)


def test_copying_is_the_eigenvalue_ratio_of_the_whole_product(model: GPT) -> None:
    site = sites_of(model)[1]
    values = copying(site, model)
    assert values is not None
    for h, head in enumerate(model.blocks[1].attention.heads):
        w_e, w_u = (w.detach().double() for w in (model.token_embedding.weight, model.lm_head.weight))
        whole = w_u @ head.wo.detach().double() @ head.wv.detach().double() @ w_e.T  # (V,V)
        eigenvalues = torch.linalg.eigvals(whole)
        assert values[h] == pytest.approx(float(eigenvalues.sum().real / eigenvalues.abs().sum()), abs=1e-6)


def test_fresh_model_is_another_of_the_same_kind(model: GPT) -> None:
    fresh = fresh_model(model, 0)
    assert isinstance(fresh, GPT) and fresh.config == model.config
    assert not torch.equal(fresh.lm_head.weight, model.lm_head.weight)
