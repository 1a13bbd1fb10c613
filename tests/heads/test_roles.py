"""Roles: a model whose heads are built by hand to do one job each, and all and only these jobs are found."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.heads.profiles import ROLES, Survey
from headwise.heads.survey import survey
from headwise.heads.texts import Text
from headwise.intervals import Interval

WORDS, DELIMITERS, RARE = 29, 3, 5  # tokens 0 to 28; the last three of these are delimiters; then five rare words
V, P = WORDS + RARE, 67  # vocabulary, positions
C = V + P + V  # a token, its position, and the token before, which layer 0 writes
SHARP = 40.0

JOBS = {
    "L0.H0": ("previous token",),
    "L0.H1": ("first token",),
    "L0.H2": ("duplicate token",),
    "L0.H3": ("delimiter",),
    "L0.H4": ("self",),
    "L0.H5": ("positional",),
    "L0.H6": (),  # looks at everything alike
    "L1.H0": ("induction",),
    "L1.H1": ("rare token",),
    "L1.H2": (),
    "L1.H3": (),
    "L1.H4": (),
    "L1.H5": (),
    "L1.H6": (),
}


class HandMade(nn.Module):
    """One-hot tokens and positions, two layers of seven heads; with `built=False` its weights are drawn at random."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(P, C)
        self.layers = nn.ModuleList(
            hw.MultiHeadAttention(C, 7, head_dim=V + P + 1, value_dim=V, q_bias=True, mask=hw.Causal())
            for _ in range(2)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def hand_made() -> HandMade:
    model = HandMade(SimpleNamespace(max_position_embeddings=P))
    for parameter in model.parameters():
        parameter.zero_()
    model.tokens.weight[:, :V] = torch.eye(V)
    model.positions.weight[:, V : V + P] = torch.eye(P)
    for layer in model.layers:
        layer.q_proj.weight.mul_(0)
    token, position, before = slice(0, V), slice(V, V + P), slice(V + P, C)
    first, second = model.layers
    scale = SHARP * math.sqrt(V + P + 1)

    def looks(layer: nn.Module, h: int, query: slice | None, key: Tensor) -> None:
        """Head h scores q . k with q the named part of x, or a constant, and k = key @ x, (V+P+1, C)."""
        head = layer.heads[h]
        if query is None:
            layer.q_proj.bias[h * (V + P + 1)] = scale
        else:
            n = query.stop - query.start
            head.wq[torch.arange(n), torch.arange(query.start, query.stop)] = scale
        head.wk.copy_(key)

    def keys(*entries: tuple[int, int]) -> Tensor:
        key = torch.zeros(V + P + 1, C)
        for row, column in entries:
            key[row, column] = 1.0
        return key

    looks(first, 0, position, keys(*((i, V + i - 1) for i in range(1, P))))  # q of position i finds i - 1
    looks(first, 1, None, keys((0, V)))
    twins = torch.zeros(V + P + 1, C)
    twins[:V, token], twins[V : V + P, position] = torch.eye(V), -torch.eye(P)  # alike, but not oneself
    looks(first, 2, slice(0, V + P), twins)
    looks(first, 3, None, keys(*((0, t) for t in range(WORDS - DELIMITERS, WORDS))))
    looks(first, 4, position, keys(*((i, V + i) for i in range(P))))
    looks(first, 5, position, keys(*((i, V + i - 3) for i in range(3, P))))
    looks(second, 0, token, keys(*((t, V + P + t) for t in range(V))))  # keys carry the token before
    looks(second, 1, None, keys(*((0, t) for t in range(WORDS, V))))
    writes = first.heads[0]
    writes.wv[:, token] = torch.eye(V)
    writes.wo[before, :] = torch.eye(V)
    return model


def documents(count: int = 11, length: int = 61) -> list[list[int]]:
    """Words drawn evenly, one in six a delimiter, four rare words a document, and no delimiter first."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        ids = torch.randint(WORDS - DELIMITERS, (length,), generator=generator)
        ids[7::6] = torch.randint(WORDS - DELIMITERS, WORDS, ids[7::6].shape, generator=generator)
        places = torch.randperm(length - 9, generator=generator)[:4] + 5
        ids[places] = torch.randint(WORDS, V, (4,), generator=generator)
        found.append(ids.tolist())
    return found


def shown(ids: Any) -> tuple[str, ...]:
    return tuple("." if WORDS - DELIMITERS <= i < WORDS else f"w{i}" for i in ids)


@pytest.fixture(scope="module")
def found() -> Survey:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return survey(hand_made(), Text(documents(), shown))


def test_all_and_only_the_built_roles_are_found(found: Survey) -> None:
    assert {profile.name: profile.roles for profile in found.profiles} == JOBS


def test_every_role_has_a_head_that_earns_it(found: Survey) -> None:
    assert {role.name for role in found.roles} == {name for names in JOBS.values() for name in names}


def test_controls_stand_beside_the_scores(found: Survey) -> None:
    n = torch.arange(1, 62).double()
    head = found.profiles[6]  # even attention is its own control
    assert head.uniform["entropy"] == pytest.approx(float(n.log().mean()), abs=1e-5)
    assert head.scores["entropy"].mean == pytest.approx(head.uniform["entropy"], abs=1e-4)
    assert head.uniform["first"] == pytest.approx(float((1 / n).mean()), abs=1e-6)
    assert found.untrained is not None
    assert 0 < found.untrained["previous"] < 0.4


def test_intervals_run_over_documents(found: Survey) -> None:
    score = found.profiles[3].scores["delimiter"]
    assert score.n == 11
    assert score.low < score.mean < score.high


def test_without_loss_effects_are_left_out_and_said(found: Survey) -> None:
    assert all(profile.importance is None and profile.ablation is None for profile in found.profiles)
    assert any("HandMade does not predict the next token" in note for note in found.notes)


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
