"""A survey is the mean over documents of what `watch` sees, with the effects beside it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import refuses, refuses_table
from helpers import watch_call

from headwise.corpus.documents import Text
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.statistics import all_statistics
from headwise.heads.survey import copying, survey, vocabulary_product
from headwise.heads.table import Survey
from headwise.intervals import interval_of
from headwise.models.open import open_folder
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
    return survey(model, text)


def test_documents_of_any_collection(model: GPT) -> None:
    ids = [[4, 5, 6, 7], [5, 6, 7, 9, 11]]
    plain = survey(model, ids, ablate="none")
    for texts in (iter(ids), dict(enumerate(ids)).values(), pd.Series(ids, index=[5, 7])):
        found = survey(model, texts, ablate="none")
        assert found["L1.H2"].entropy == plain["L1.H2"].entropy


def test_scores_are_means_over_documents(model: GPT, text: Text, found: Survey) -> None:
    names = ("entropy", "confidence", "distance", "spread", "self", "previous", "first", "same_token", "norm")
    one_by_one: dict[str, list[float]] = {name: [] for name in names}
    for ids in text.documents:
        seen = watch_call(model, torch.tensor([list(ids)]))
        for name in names:
            one_by_one[name].append(getattr(seen["L1.H4"], name))
    profile = next(profile for profile in found.profiles if profile.name == "L1.H4")
    for name in names:
        expected, score = interval_of(one_by_one[name]), profile.scores[name]
        assert (score.mean, score.low, score.n) == pytest.approx((expected.mean, expected.low, 5), abs=2e-6)


def test_facts_of_a_survey(found: Survey, text: Text, model: GPT) -> None:
    assert (found.n_documents, found.n_tokens, found.longest) == (5, 143, 41)
    assert found.passage == 31 and len(found.tokens) == 31
    assert [profile.name for profile in found.profiles] == [f"L{n}.H{h}" for n in range(2) for h in range(6)]
    assert set(found.statistics) == set(all_statistics()) - {"sink", "gate"}
    ids = torch.tensor([3, 7, 36, 2, 9, 9])
    marks = text.marks(ids)
    assert marks["delimiter"].tolist() == [False, False, True, True, False, False]  # the first token is left out
    assert not marks["rare"][2]  # a special token is not rare, however seldom
    refuses(lambda: Text([[3], []], shown), "no document of two tokens")
    found = survey(model, text, controls=False, ablate="none")
    assert found.untrained is None and found.ablated is None and found.loss is None
    assert all(profile.ablation is None and profile.importance is not None for profile in found.profiles)


def test_the_passage_holds_the_top_keys_of_the_first_document(model: GPT, text: Text, found: Survey) -> None:
    seen = watch_call(model, torch.tensor([list(text.documents[0])]), maps=True)
    for profile in found.profiles:
        weights = seen[profile.name].map
        assert profile.top_weights == pytest.approx(-np.sort(-weights)[:, :8], abs=1e-6)
        real = profile.top_weights > 0
        kept = np.take_along_axis(weights, profile.top_keys, 1)
        assert kept[real] == pytest.approx(profile.top_weights[real], abs=1e-6)
    assert np.allclose(found.profiles[3].shares.sum(1), 1, atol=1e-5)  # 31 tokens: each cell is one weight
    assert np.allclose(found.profiles[3].received * 31, found.profiles[3].shares.sum(0), atol=1e-5)


@pytest.mark.slow
def test_a_survey_leaves_the_state_alone_and_counts(model: GPT, text: Text, found: Survey) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = survey(model, text, ablate="none", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert survey(model, text, ablate="none", seed=1).untrained == one.untrained
    assert survey(model, text, ablate="none", seed=2).untrained != one.untrained
    heard: dict[str, tuple[int, int]] = {}

    def hear(what: str, done: int, total: int) -> None:
        heard[what] = done, total

    survey(model, text, progress=hear)
    assert set(heard) == {"running the model", "repeated tokens", "untrained control", "importance", "ablation"}
    assert all(done == total for done, total in heard.values())
    # The importance of a head is a gradient, which that mode would not have.
    with torch.inference_mode():
        again = survey(model, text)
    # Where numbers lie in memory decides in which order torch sums them: rounding of float32, some thousand terms.
    assert [h.importance for h in again.profiles] == pytest.approx([h.importance for h in found.profiles], rel=1e-5)


def test_too_few_tokens_to_repeat(model: GPT) -> None:
    found = survey(model, Text([[1, 2, 1, 2, 1]], shown), controls=False, ablate="none")
    assert "duplicate" not in found.profiles[0].scores
    assert any("too few different tokens" in note for note in found.notes)
    assert found.profiles[0].scores["entropy"].high == math.inf  # one document


def test_copying_is_the_eigenvalue_ratio_of_the_whole_product(model: GPT) -> None:
    values = copying(sites_of(model)[1], vocabulary_product(model))
    for value, head in zip(values, model.blocks[1].attention.heads, strict=True):
        w_e, w_u = (w.detach().double() for w in (model.token_embedding.weight, model.lm_head.weight))
        whole = w_u @ head.wo.detach().double() @ head.wv.detach().double() @ w_e.T  # (V,V)
        eigenvalues = torch.linalg.eigvals(whole)
        assert value.mean == pytest.approx(float(eigenvalues.sum().real / eigenvalues.abs().sum()), abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of ours, with a tokenizer of characters."""
    tokens = Tokens.characters("abcdefgh ,.", boundary=True)
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("models") / "letters"
    save_model(path, GPT(GPTConfig(vocab_size=len(tokens), context=CONTEXT, n_layers=1, n_heads=3, d_model=12)), tokens)
    return path


QUICK: dict[str, Any] = {"controls": False, "ablate": "none"}


def test_a_survey_of_a_folder_and_of_its_model_are_one(folder: Path, tmp_path: Path) -> None:
    """Texts in every form; the tokenizer comes from the folder, or is passed."""
    content = "abc, cab. head"
    (tmp_path / "text.txt").write_text(content)
    whole = survey(folder, content, **QUICK)
    assert (whole.model, whole.n_documents, whole.tokens[1:4]) == ("letters", 1, ("a", "b", "c"))
    opened = open_folder(folder)
    assert opened.tokens is not None
    bare = GPT(opened.model.config)
    bare.load_state_dict(opened.model.state_dict())
    framed = [*opened.tokens.frame[0], *opened.tokens.encode(content), *opened.tokens.frame[1]]
    same = [
        survey(str(folder), tmp_path / "text.txt", **QUICK),
        survey(opened.model, [content], **QUICK),
        survey(opened.model, [framed], **QUICK),
        survey(bare, content, tokenizer=opened.tokens, **QUICK),
        survey(bare, [torch.tensor(framed)], **QUICK),
        survey(bare, torch.tensor(framed), **QUICK),
        survey(bare, torch.tensor([framed]), **QUICK),
    ]
    for found in same:
        assert found["L0.H2"].entropy == whole["L0.H2"].entropy
    assert [found.model for found in same] == ["letters"] * 3 + ["GPT"] * 4
    assert same[-1].tokens[1:4] == tuple(str(i) for i in framed[1:4])
    assert survey(folder, "abc " * 9, tokens=7, documents=4, **QUICK).n_documents == 4


def test_what_a_survey_refuses(folder: Path) -> None:
    refuses_table("survey", globals() | {"folder": folder})


def test_a_survey_is_a_mapping_and_shows_itself(found: Survey) -> None:
    assert list(found) == [profile.name for profile in found.profiles] and len(found) == 12
    head = found["L1.H4"]
    assert head.entropy == head["entropy"] == head.scores["entropy"] and head.entropy.n == 5
    with pytest.raises(KeyError, match=r"no head 'L1\.H44'; did you mean L1\.H4"):
        _ = found["L1.H44"]
    with pytest.raises(AttributeError, match="there is no statistic 'norm' of this head"):
        _ = replace(head, scores={}).norm
    assert "12 heads" in repr(found)
    assert repr(replace(head, roles=("induction", "self"), ablation=interval_of([0.25]))) == (
        f"L1.H4(entropy={head.entropy.mean:.4g}; roles: induction, self; loss without it +0.25)"
    )
