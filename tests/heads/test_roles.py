"""Roles: a model whose heads are built by hand to do one job each, and all and only these jobs are found."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from families import TABLES, untrained
from planted import JOBS, WORDS, P, V, documents, hand_made, induction_model, shown
from torch import nn

import headwise as hw
from headwise.corpus.documents import Text
from headwise.heads.statistics import all_statistics
from headwise.heads.survey import survey
from headwise.heads.table import ROLES, Survey
from headwise.intervals import Interval


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
