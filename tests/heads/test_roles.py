"""Roles: a model whose heads are built by hand to do one job each, and are found; a corpus in constant memory."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import refuses
from families import TABLES, untrained
from helpers import watch_call
from planted import JOBS, WORDS, P, V, documents, hand_made, induction_model, shown
from small_models import assert_same, noisy, normal
from torch import nn

import headwise as hw
from headwise.corpus.documents import Text
from headwise.gpt.gpt import GPT
from headwise.heads.statistics import all_statistics
from headwise.heads.survey import EXAMPLES, survey
from headwise.heads.table import ROLES, Survey
from headwise.intervals import Interval
from headwise.table import Table


@pytest.fixture(scope="module")
def found() -> Survey:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return survey(hand_made(), Text(documents(), shown))


def test_controls_and_effects_stand_beside_the_scores(found: Survey) -> None:
    assert {profile.name: profile.roles for profile in found.profiles} == JOBS
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(WORDS, (17,), generator=generator).tolist() for _ in range(11)]
    earned = {profile.name: profile.roles for profile in survey(induction_model(), texts, ablate="none").profiles}
    assert {h: r for h, r in earned.items() if r} == {"L0.H1": ("previous token",), "L1.H0": ("induction", "copying")}
    assert {role.name for role in found.roles} == {name for names in JOBS.values() for name in names}
    for role in found.roles:  # one name, one number
        assert role.score == role.name.replace(" ", "_") or role.name.replace(" ", "_") not in all_statistics()
    assert found.untrained is not None
    assert 0 < found.untrained["previous"] < 0.4
    score = found.profiles[3].scores["delimiter"]
    assert score.n == 11
    assert score.low < score.mean < score.high
    assert all(profile.importance is None and profile.ablation is None for profile in found.profiles)
    assert any("HandMade does not predict the next token" in note for note in found.notes)


UNTRAINED: dict[str, Any] = {
    **{name: partial(untrained, name, "roles") for name in TABLES["roles"]},
    "ours": lambda: hw.GPT(hw.GPTConfig(vocab_size=V, context=P, n_layers=2, n_heads=3, d_model=36)),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", UNTRAINED)
def test_no_untrained_head_has_a_role(family: str) -> None:
    for seed in (1, 2):  # the control has seed 0
        torch.manual_seed(seed)
        model: nn.Module = UNTRAINED[family]().eval()
        result = survey(model, Text(documents(5, 41), shown), ablate="none")
        assert not any(profile.roles for profile in result.profiles), (seed, result)
        assert {role.name for role in result.roles} >= {"previous token", "induction", "copying", "rare token"}


def test_the_even_control_knows_the_window_of_its_layer_and_the_tokens_of_its_document() -> None:
    windows = (None, 3, None)
    model = hw.GPT(hw.GPTConfig(vocab_size=V, context=P, n_layers=3, n_heads=3, d_model=36)).eval()
    model.blocks[1].attention.spec = model.blocks[1].attention.spec.replace(mask=hw.Window(2, 0))
    result = survey(model, [[5] * 9, list(range(9))], ablate="none", controls=False)
    for layer, window in enumerate(windows):
        seen = [min(i + 1, window or 9) for i in range(9)]
        even = result[f"L{layer}.H0"].uniform
        assert even["entropy"] == pytest.approx(sum(map(math.log, seen)) / 9, abs=1e-5)
        assert even["same_token"] == pytest.approx(sum((n - 1) / n for n in seen) / 9 / 2, abs=1e-5)  # in one of two


RULE = ROLES[0]
SURE = Interval(0.7, 0.6, 0.8, 5)


@pytest.mark.parametrize(
    ("score", "uniform", "untrained", "earned"),
    [
        (SURE, 0.1, 0.1, True),
        (Interval(0.39, 0.38, 0.40, 5), 0.1, 0.1, False),  # below the threshold
        (SURE, 0.65, 0.1, False),  # the interval reaches down to even attention
        (SURE, 0.1, 0.65, False),  # or to an untrained head
        (SURE, 0.1, None, True),  # no such control
        (Interval(0.7, -math.inf, math.inf, 1), 0.1, 0.1, False),  # one document says nothing sure
        (Interval(math.nan, math.nan, math.nan, 0), 0.1, 0.1, False),
    ],
)
def test_the_rule(score: Interval, uniform: float, untrained: float | None, earned: bool) -> None:
    other = {} if untrained is None else {RULE.score: untrained}
    assert RULE.earned({RULE.score: score}, {RULE.score: uniform}, other) is earned


VOCABULARY = 29


@pytest.fixture(scope="module")
def surveyed(model: GPT, text: Text) -> Survey:
    return survey(model, text, controls=False, ablate="none")


def test_what_is_gleaned_is_what_the_maps_say(model: GPT, text: Text, surveyed: Survey) -> None:
    """The best row of each document."""
    for layer in range(2):
        best: list[list[tuple[float, int, int, int]]] = [[], [], []]
        for number, ids in enumerate(text.documents):
            seen = watch_call(model, torch.tensor([ids]), maps=True)
            for h in range(3):
                p = seen[f"L{layer}.H{h}"].map
                rows = []
                for row, key in enumerate(p.argmax(1).tolist()):
                    if key not in (0, row):
                        rows.append((float(p[row, key]), number, row, key))
                best[h] += [max(rows)] if rows else []
        for h in range(3):
            head = surveyed[f"L{layer}.H{h}"]
            expected = sorted(best[h], reverse=True)[:EXAMPLES]
            got = [(example.weight, example.document, example.row, example.key) for example in head.examples]
            assert [each[1:] for each in got] == [each[1:] for each in expected]
            assert [each[0] for each in got] == pytest.approx([each[0] for each in expected], abs=1e-6)
            first = head.examples[0]
            assert first.looks == f"t{text.documents[first.document][first.row]}"


def test_frames(surveyed: Survey, model: GPT, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = surveyed.to_frame()
    assert list(heads.name) == list(surveyed)
    row = heads[heads.name == "L1.H2"].iloc[0]
    score = surveyed["L1.H2"].entropy
    assert (row.entropy, row.entropy_low, row.entropy_high) == (score.mean, score.low, score.high)
    assert heads.isna().ablation.all() and row.roles == "; ".join(surveyed["L1.H2"].roles)
    assert f"{score.mean:.3f}" in surveyed.text() and "roles" in surveyed.text() and "<table>" in surveyed._repr_html_()
    table = Table.of(surveyed.records()).csv().splitlines()
    assert table[0].split(",") == list(heads.columns) and len(table) == 7
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    refuses(lambda: surveyed.to_frame(), "needs pandas: pip install")


def test_whole_maps_on_request(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(2))
    seen = watch_call(model, ids, maps=True)
    head = seen["L1.H1"]
    assert head.map.shape == (2, 13, 13) and head.map.sum(2) == pytest.approx(np.ones((2, 13)), abs=1e-6)
    for one, alone in zip(head.map, ids, strict=True):  # of each document, as it is by itself
        assert one == pytest.approx(watch_call(model, alone[None], maps=True)["L1.H1"].map, abs=1e-6)
    monkeypatch.setattr("headwise.heads.watch.MOST_WEIGHTS", 168)
    said = r"up to 168 weights a head, and here 13 tokens look at 13, 169 weights; .* list some rows \(maps=\[-1\]\)"
    with pytest.raises(hw.HeadwiseError, match=said), hw.watch(model, maps=True), torch.no_grad():
        model(ids)
    with hw.watch(model, maps=[7, 50]) as seen, torch.no_grad():
        model(ids)
        model(ids[:, :1])  # has no row 7: the map is that of the call before
    assert seen["L1.H1"].map == pytest.approx(head.map[:, 7:8], abs=1e-6) and seen["L1.H1"].n_rows == 28


def test_maps_of_a_batch_are_in_the_graph() -> None:
    """Their gradients are those of the dense formula, and NumPy reads them as an array."""
    layer, x = noisy(3, mask=hw.Causal(), n_kv_heads=1, q_bias=True), normal(2, 13, 31)
    with hw.watch(layer, maps=True) as seen:
        layer(x)
    maps = seen["L0.H2"].map
    q = F.linear(x, layer.q_proj.weight, layer.q_proj.bias)[..., 20:]
    scores = q @ F.linear(x, layer.k_proj.weight).mT / 10**0.5
    dense = scores.masked_fill(torch.ones(13, 13).triu(1) > 0, -torch.inf).softmax(-1)
    assert np.asarray(maps) == pytest.approx(dense.detach().numpy(), abs=1e-6)
    wanted = [layer.q_proj.weight, layer.q_proj.bias, layer.k_proj.weight]
    factors = normal(2, 13, 13, seed=5)
    ours, theirs = (torch.autograd.grad((factors * each).sum(), wanted) for each in (maps, dense))
    for got, expected in zip(ours, theirs, strict=True):
        assert_same(got.as_subclass(torch.Tensor), expected)
    layer.requires_grad_(False)
    with hw.watch(layer, maps=True) as seen:
        layer(x[:1])
    assert isinstance(seen["L0.H2"].map, np.ndarray) and seen["L0.H2"].map.shape == (13, 13)
