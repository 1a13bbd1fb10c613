"""Masks written outside the package: every backend, path and statistic honours them, and protects what they forbid."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NO_MASK, PATHS, MaskCase, Problem, Sizes, assert_same, draw, output, poisoned

import headwise as hw
from headwise.heads import blocks

SEEN = Sizes(B=2, H=6, G=3, T=5, S=7, D=3, E=11)
DECODE = SEEN._replace(T=1)  # on the fused path one query is folded over its group


@dataclass(frozen=True)
class Penalty(hw.Mask):
    """Adds a number for each head, query and key. Some are -inf."""

    table: Any  # (H,T,S)

    def bias(self, grid: Any) -> Any:
        return grid.pick(self.table, "hts")


@dataclass(frozen=True)
class Strided(hw.Mask):
    """A query sees every third key, counted from the first one, and none that lies more than three ahead."""

    def allowed(self, grid: Any) -> Any:
        return (grid.j % 3 == 0) & (grid.j <= grid.i + 3)


@dataclass(frozen=True)
class Begins(hw.Mask):
    """In each document the keys begin at a place of its own."""

    starts: Any  # (B,)

    def allowed(self, grid: Any) -> Any:
        return grid.j >= grid.pick(self.starts, "b")


def cases(n: Sizes) -> dict[str, MaskCase]:
    table = np.random.default_rng(5).normal(size=(n.H, n.T, n.S))
    table[..., 2] = -math.inf
    table[1, :, 4] = -math.inf
    starts = np.array([1, 4])
    return {
        "a bias of -inf": MaskCase(
            lambda wrap: Penalty(wrap(table)),
            lambda b, h, i, j: table[h, i, j] > -math.inf,
            lambda b, h, i, j: max(table[h, i, j], -1e300),
        ),
        "allowed": MaskCase(lambda wrap: Strided(), lambda b, h, i, j: j % 3 == 0 and j <= i + 3),
        "by document": MaskCase(lambda wrap: Begins(wrap(starts)), lambda b, h, i, j: j >= starts[b]),
        "a bias of -inf beside a window": MaskCase(
            lambda wrap: Penalty(wrap(table)) & hw.Window(3, 1),
            lambda b, h, i, j: table[h, i, j] > -math.inf and -3 <= j - i - (n.S - n.T) <= 1,
            lambda b, h, i, j: max(table[h, i, j], -1e300),
        ),
    }


every_mask = pytest.mark.parametrize("mask", cases(SEEN))
every_size = pytest.mark.parametrize("n", [SEEN, DECODE], ids=["T=5", "T=1"])
OPTIONS: dict[str, dict[str, Any]] = {"bare": {}, "sink": {"sink": True}, "softcap": {"softcap": 0.9}}


def definition(problem: Problem) -> np.ndarray:
    """The loop backend, with a table in the place of the mask."""
    n, case = problem.sizes, problem.mask
    bias = np.where(case.allowed(n), case.bias(n), 0)
    table = replace(NO_MASK, build=lambda wrap: hw.Allowed(wrap(case.allowed(n))) & hw.Bias(wrap(bias)))
    return output("plain", replace(problem, mask=table))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_size
@every_mask
def test_a_mask_of_ones_own_is_honoured(mask: str, n: Sizes, options: dict[str, Any], path: str) -> None:
    problem = draw(n, mask=cases(n)[mask], **options)
    expected = definition(problem)
    assert_same(output(path, problem), expected, path)
    assert_same(output(path, poisoned(problem)), expected, f"{path} with NaN in dead keys")


@every_mask
@pytest.mark.parametrize("threads", [1, 2])
def test_statistics_of_a_layer_do_not_see_dead_keys(mask: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads split the heads, and blocks the queries: the mask is asked for parts of the call."""
    monkeypatch.setattr(blocks, "BLOCK", 40)
    monkeypatch.setattr(blocks, "THREADED", 1)
    torch.set_num_threads(threads)
    layer = hw.MultiHeadAttention(13, 6, n_kv_heads=3, head_dim=5, d_context=11).double()
    x, memory = (torch.randn(2, n, width, dtype=torch.float64) for n, width in ((5, 13), (7, 11)))
    case = cases(SEEN)[mask]
    dead = ~torch.tensor(case.allowed(SEEN)).any(1).any(1)  # (B,S)
    assert dead.any()

    def watched(context: torch.Tensor) -> hw.Trace:
        with hw.watch(torch.nn.ModuleList([layer])) as seen, torch.no_grad():
            layer(x, context=context, mask=case.build(torch.tensor))
        return seen

    clean, other_keys = watched(memory), watched(memory.masked_fill(dead[..., None], math.nan))
    weights = weights_of(layer, x, memory, case)
    for h in range(6):
        head, other = clean[f"L0.H{h}"].rows, other_keys[f"L0.H{h}"].rows
        for name in ("entropy", "confidence", "norm"):
            np.testing.assert_allclose(other[name], head[name], rtol=1e-12, atol=1e-12, err_msg=name)
        live = case.allowed(SEEN).any((1, 3))  # (B,T) rows that some head may use
        entropy = torch.special.entr(weights[:, h]).sum(-1)[torch.tensor(live)]
        np.testing.assert_allclose(head["entropy"], entropy, rtol=1e-6, atol=1e-6)  # rows are float32


def weights_of(layer: hw.MultiHeadAttention, x: torch.Tensor, memory: torch.Tensor, case: MaskCase) -> torch.Tensor:
    """(B,H,T,S), by a table in the place of the mask."""
    q, k, v = (
        y.unflatten(-1, (n, 5)).transpose(1, 2)
        for y, n in ((layer.q_proj(x), 6), (layer.k_proj(memory), 3), (layer.v_proj(memory), 3))
    )
    allowed = torch.tensor(case.allowed(SEEN))
    bias = torch.tensor(case.bias(SEEN)).where(allowed, 0)
    with torch.no_grad():
        return hw.trace(q, k, v, mask=hw.Allowed(allowed) & hw.Bias(bias)).weights


def test_a_mask_of_a_layer_counts_the_queries_of_the_whole_text() -> None:
    layer, x, cache = hw.MultiHeadAttention(12, 2, mask=Strided() & hw.Causal()), torch.randn(1, 7, 12), hw.KVCache()
    torch.testing.assert_close(torch.cat([layer(part, cache=cache) for part in x.split(3, 1)], 1), layer(x))


def test_a_rolling_cache_refuses_a_mask_that_may_count_from_the_first_key() -> None:
    layer = hw.MultiHeadAttention(13, 1, mask=hw.Window(2, 0))
    with pytest.raises(hw.HeadwiseError, match=r"Strided\(\) with a cache of window=3: it counts from the first key"):
        layer(torch.zeros(1, 5, 13), mask=Strided(), cache=hw.KVCache(window=3))
