"""Numbers at the edge, one thing changed at a time, and bad input: an error that says the fact."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses, refuses_table
from helpers import (
    MASK_NAMES,
    NATIVE,
    NOBODY,
    PATHS,
    TORCH_PATHS,
    MaskCase,
    Problem,
    Sizes,
    assert_same,
    dead_keys,
    draw,
    output,
    poisoned,
    steps,
    to_numpy,
)

import headwise as hw

GQA = Sizes(B=2, H=6, G=3, T=5, S=7, D=3, E=11)
one_path = every("path", PATHS)
# Loops take long for many keys, of which the kernel of the CPU thinks otherwise than of few.
CALLS = [(path, T, S) for path in PATHS for T, S in [(1, 1), (1, 7), (5, 7), (7, 7), (1, 37), (37, 37)]]
one_call = every("path, T, S", [call for call in CALLS if call[0] != "plain" or call[2] < 37])


@pytest.mark.parametrize("T", [7, 67], ids=lambda T: f"T={T}")
@pytest.mark.parametrize("scale", [0.0, -1.3, 1.3])
def test_a_square_causal_call_of_any_scale(scale: float, T: int) -> None:
    problem = draw(Sizes(B=1, H=2, G=1, T=T, S=T, D=3, E=3), mask="causal", scale=scale)
    for path in ("fused", "explicit"):
        assert_same(output(path, problem), output("array", problem), path)


@one_call
@every("mask", ["none", "causal", "lengths"])
def test_a_query_that_holds_nan_makes_its_row_nan_and_no_other(T: int, S: int, mask: str, path: str) -> None:
    n = GQA._replace(T=T, S=S)
    problem = draw(n) if mask == "none" else draw(n, mask=mask)
    poisoned = problem.q.copy()
    poisoned[1, 2, T // 2, 0] = math.nan
    out = output(path, Problem(poisoned, problem.k, problem.v, problem.mask))
    expected = output(path, problem)
    live = problem.mask.allowed(n)[1, 2, T // 2].any()
    assert np.isnan(out[1, 2, T // 2]).all() == live
    out[1, 2, T // 2] = expected[1, 2, T // 2]
    assert_same(out, expected, path)


@one_call
@every("mask", ["none", "causal", "lengths"])
@every("all_keys", [False, True])
def test_nan_in_a_key_makes_nan_each_row_that_sees_it(all_keys: bool, T: int, S: int, mask: str, path: str) -> None:
    """On few keys the CPU kernel takes a row of NaN scores for an empty one, and gives 0."""
    n = GQA._replace(T=T, S=S)
    problem = draw(n) if mask == "none" else draw(n, mask=mask)
    poisoned = problem.k.copy()
    where = slice(None) if all_keys else 0
    poisoned[1, 0, where, 0] = math.nan
    out = output(path, Problem(problem.q, poisoned, problem.v, problem.mask))
    sees = np.broadcast_to(problem.mask.allowed(n), (n.B, n.H, T, S))[..., where]
    lost = sees.any(-1) if all_keys else sees.copy()
    lost[0], lost[1, n.H // n.G :] = False, False  # the first key/value head serves the first group alone
    assert (np.isnan(out).all(-1) == lost).all()
    out[lost] = 0
    assert_same(out, np.where(lost[..., None], 0, output(path, problem)), path)


@one_path
@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_an_infinite_sink_takes_everything_or_nothing(mask: str, path: str) -> None:
    sink = np.array([math.inf, -math.inf, 0.5, math.inf, -math.inf, math.nan])
    problem = draw(GQA) if mask == "none" else draw(GQA, mask=mask)
    out = output(path, problem.with_options(sink=sink))
    assert_same(out[:, sink == math.inf], 0 * out[:, sink == math.inf], path)
    assert_same(out[:, sink == -math.inf], output(path, problem)[:, sink == -math.inf], path)
    assert_same(*(np.nan_to_num(x, nan=9) for x in (out, output("plain", problem.with_options(sink=sink)))), path)


@every("large", [7.7, 1e5, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_round_a_sink(dtype: torch.dtype, large: float) -> None:
    x, sink = torch.randn(2, 6, 37, 11).to(dtype), torch.full((6,), large)
    expected = hw.attend(x, x, x, sink=sink)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(hw.attend(x, x, x, sink=sink), expected)


# A scale of 11 lifts what stands for an infinite sink: where that does not leave room for it, the kernel gives NaN.
@every("path", TORCH_PATHS)
@every("scale", [None, 3.0, 11.0, 0.004])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_infinite_sinks_keep_narrow_gradients_finite(dtype: torch.dtype, scale: float | None, path: str) -> None:
    arguments = draw(GQA).arguments(NATIVE[path])
    q, k, v = (arguments[name].to(dtype).requires_grad_() for name in "qkv")
    sink = torch.tensor([math.inf, -math.inf] * 3, requires_grad=True)
    run = hw.attend if path == "fused" else lambda *a, **b: hw.trace(*a, **b).out
    out = run(q, k, v, sink=sink, scale=scale)
    assert not out[:, ::2].any()
    assert out[:, 1::2].ne(0).all()
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, sink))
    sink = torch.tensor([127.0] * 6, requires_grad=True)  # exp of it is no float32, and the last query sees no key
    seen = torch.arange(q.shape[2])[:, None].expand(-1, k.shape[2]) < q.shape[2] - 1
    run(q, k, v, sink=sink, mask=hw.Allowed(seen)).float().sum().backward()
    assert sink.grad is not None and sink.grad.isfinite().all()


@pytest.mark.parametrize("path", TORCH_PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", [3.0, 700.0, 12_345.0, 180_289.536])
def test_a_large_sink_is_weighed_against_scores_as_large(level: float, dtype: torch.dtype, path: str) -> None:
    """Two equal logits share: half of the value 1. Sink over scale reaches 180 million, 2,752 times float16's range.

    There the first part of a sink in float16 leaves 2 times 2^15, which is beyond float16: a second one must take it.
    """
    scale = 0.001
    q = torch.full((1, 1, 1, 1), 3072.0, dtype=dtype)
    k = torch.full((1, 1, 1, 1), level / scale / 3072.0, dtype=dtype)
    score = float(q.double() * k.double() * scale)
    run = hw.attend if path == "fused" else lambda *a, **b: hw.trace(*a, **b).out
    sink = torch.tensor([score], dtype=torch.float32, requires_grad=True)
    out = run(q, k, torch.ones_like(q), sink=sink, scale=scale)
    # The logits are float32 sums of that size: each is off by at most one unit in its last place.
    unit = score * torch.finfo(torch.float32).eps
    assert abs(out.item() - 0.5) <= unit + torch.finfo(dtype).eps
    out.backward(torch.full_like(out, 4096.0))  # as with a scaled loss
    assert sink.grad.item() == pytest.approx(-4096 / 4, rel=2 * unit + 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("sink", [None, [127.0, -127.0]])
def test_a_bias_that_the_dtype_cannot_hold_forbids_its_key(sink: list[float] | None) -> None:
    """What stands there, NaN too, is not read; and a row that is left without keys is 0, whatever its sink."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 3, 5)).astype(np.float32) for _ in range(3))
    v[:, :, 1] = np.nan
    bias = np.zeros((3, 3))
    bias[:, 1] = -1e300
    bias[2] = -1e300
    arrays = hw.attend(q, k, v, mask=hw.Bias(bias), sink=None if sink is None else np.array(sink, np.float32))
    tensors = [torch.from_numpy(x) for x in (q, k, v, bias)]
    expected = hw.attend(*tensors[:3], mask=hw.Bias(tensors[3]), sink=None if sink is None else torch.tensor(sink))
    np.testing.assert_allclose(arrays, expected.numpy(), atol=1e-6)
    assert (arrays[:, :, 2] == 0).all()


@one_path
def test_the_largest_positions_are_still_exact(path: str) -> None:
    problem = draw(GQA)
    arguments = problem.arguments(NATIVE[path])
    for mask in (hw.Causal(offset=2**60), hw.Window(2**60, 2**60, offset=[5, -5])):
        run = hw.attend if path == "fused" else lambda **a: hw.trace(**a).out
        assert_same(to_numpy(run(**arguments | {"mask": mask})), output("plain", problem), path)


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


N = Sizes(B=2, H=6, G=3, T=5, S=7, D=11, E=13)


def call(path: str, **changes: Any) -> Any:
    """A sound call with something changed; NumPy arrays become the path's own kind."""
    wrap = NATIVE[path]
    is_own = {name: isinstance(x, np.ndarray) and name != "mask" for name, x in changes.items()}
    changes = {name: wrap(x) if is_own[name] else x for name, x in changes.items()}
    arguments = {**draw(N).arguments(wrap), **changes}
    return hw.trace(**arguments) if path == "explicit" else hw.attend(**arguments)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape)


TABLES = [("options", path) for path in PATHS]
TABLES += [("arrays", path) for path in PATHS[1:]] + [("tensors", path) for path in PATHS[2:]] + [("kinds", "")]


@every("table, path", TABLES)
def test_what_does_not_fit(table: str, path: str) -> None:
    refuses_table(table, globals() | {"path": path, "np": np, "torch": torch})


@one_path
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_masks_that_do_not_fit(joined: bool, path: str) -> None:
    def masked(mask: hw.Mask) -> Any:
        return call(path, mask=hw.Window(3, None) & mask if joined else mask)

    refuses_table("masks", globals() | {"masked": masked})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("spoil", ["one row more", "one row less", "one number more", "one number less"])
def test_ragged_lists(spoil: str, name: str) -> None:
    """Lists may differ in length where arrays cannot; the odd one out is neither ignored nor a crash."""
    lists = getattr(draw(N), name).tolist()
    head = lists[1][2]
    if spoil == "one row more":
        head.append(list(head[0]))
    elif spoil == "one row less":
        head.pop()
    elif spoil == "one number more":
        head[1].append(0.0)
    else:
        head[1].pop()
    refuses(lambda: call("plain", **{name: lists}), f"^{name} ")
