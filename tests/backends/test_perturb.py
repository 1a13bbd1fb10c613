"""Change one thing and look: a forbidden key changes nothing; an allowed one, and every argument, changes something."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases import every
from helpers import (
    MASK_NAMES,
    NOBODY,
    PATHS,
    MaskCase,
    Problem,
    Sizes,
    assert_same,
    dead_keys,
    draw,
    output,
    poisoned,
    steps,
)

import headwise as hw

GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=3, E=11)
one_path = every("path", PATHS)


@one_path
@every(
    "n, options",
    [(GQA, {"softcap": 0.9}), (GQA._replace(S=5), {}), (GQA._replace(T=1), {"sink": True})],
    ids=["T<S, softcap", "T=S", "T=1, sink"],
)
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_a_key_moves_exactly_the_queries_that_may_attend_it(mask: str, n: Sizes, options: dict, path: str) -> None:
    problem = draw(n, mask=mask, **options)
    may, before = problem.mask.allowed(n), output(path, problem)
    for j in range(n.S):
        k, v = problem.k.copy(), problem.v.copy()
        k[:, :, j] += 0.5
        v[:, :, j] += 0.5
        moved = np.abs(output(path, replace(problem, k=k, v=v)) - before).max(-1)
        assert moved[~may[..., j]].max(initial=0) <= 1e-13, f"key {j} is forbidden, and was read"
        assert moved[may[..., j]].min(initial=1) > 1e-9, f"key {j} is allowed, and was not read"


def assert_dead_keys_stay_dead(path: str, problem: Problem) -> None:
    clean, may = steps(path, problem), problem.mask.allowed(problem.sizes)
    for poison in (math.nan, math.inf, -math.inf):
        for name, record in steps(path, poisoned(problem, poison)).items():
            expected = clean[name]
            if name in ("scores", "capped"):  # what stands at a dead key is no score of anybody's
                record, expected = record[may], expected[may]
            assert_same(record, expected, f"{name} on {path} with {poison} in dead keys")


DEADLY = [
    "causal offset 0", "causal offset -2", "causal offset 1", "causal offsets", "window offset", "window offsets",
    "lengths", "segments", "allowed per head", "allowed per key", "bias that forbids",
]  # fmt: skip


@one_path
@every("T, options", [(3, {}), (3, {"sink": True}), (3, {"softcap": 0.9}), (1, {})])
@every("mask", DEADLY)
def test_dead_keys(mask: str, T: int, options: dict, path: str) -> None:
    # Few queries, and two heads a group, so that each of these masks leaves some key to nobody.
    assert_dead_keys_stay_dead(path, draw(Sizes(B=2, H=4, G=2, T=T, S=7, D=5, E=11), 7, mask, **options))


def forbids(heads_and_keys: set[tuple[int, int]], n_heads: int, S: int) -> MaskCase:
    table = np.array([[[(h, j) not in heads_and_keys for j in range(S)]] for h in range(n_heads)])
    return MaskCase(lambda wrap: hw.Allowed(wrap(table)), lambda b, h, i, j: bool(table[h, 0, j]))


@one_path
def test_dead_keys_of_groups(path: str) -> None:
    # Heads 0 and 1 share a key/value head. Both forbid key 2: dead. Head 0 alone forbids key 4: head 1 hears it.
    mask = forbids({(0, 2), (1, 2), (0, 4)}, 4, 7)
    problem = draw(Sizes(B=2, H=4, G=2, T=3, S=7, D=5, E=11), mask=mask)
    dead = dead_keys(problem)
    assert dead[:, 0, 2].all()
    assert dead.sum() == 2
    assert_dead_keys_stay_dead(path, problem)
    k = problem.k.copy()
    k[:, 0, 4] += 1
    moved = np.abs(output(path, replace(problem, k=k)) - output(path, problem)).max((0, 2, 3))
    assert (moved > 1e-9).tolist() == [False, True, False, False]
    # Heads 0 and 3 read key/value head 1, and both forbid key 5.
    mask = forbids({(0, 5), (3, 5), (1, 5)}, 4, 7)
    assert_dead_keys_stay_dead(path, draw(Sizes(B=2, H=4, G=2, T=3, S=7, D=5, E=11), mask=mask, kv_index=[1, 0, 0, 1]))


@one_path
@every("kv_index", [[0, 0, 2, 2, 2, 0], [2] * 6])
def test_a_key_value_head_that_nobody_reads_is_dead(kv_index: list[int], path: str) -> None:
    assert_dead_keys_stay_dead(path, draw(GQA, kv_index=kv_index))


@one_path
@every("sink", [None, True], ids=["bare", "sink"])
@every("build", NOBODY.values(), ids=NOBODY)
def test_when_nobody_may_attend_anything_every_key_is_dead(build: Callable[[], hw.Mask], sink, path: str) -> None:
    mask = MaskCase(lambda wrap: build(), lambda b, h, i, j: False)
    assert_dead_keys_stay_dead(path, draw(GQA._replace(T=3), mask=mask, sink=sink))
