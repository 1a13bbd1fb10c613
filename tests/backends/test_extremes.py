"""Numbers at the edge: scales that are not positive, sinks and offsets out of range, NaN in a query."""

import math

import numpy as np
import pytest
import torch
from cases import every
from helpers import NATIVE, PATHS, TORCH_PATHS, Problem, Sizes, assert_same, draw, output, to_numpy

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
