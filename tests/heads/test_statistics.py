"""Every statistic of a call against its definition on whole maps in double precision, block by block or at once."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dense import block_means, reach, row_statistics, score_statistics
from helpers import (
    MASK_NAMES,
    NO_MASK,
    MaskCase,
    Problem,
    Sizes,
    as_list,
    as_numpy,
    as_tensor,
    draw,
    mask_cases,
    steps,
    to_numpy,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.heads import blocks as block_pass
from headwise.heads.blocks import Measured, measure, output_factors, row_weights, top_keys, uniform
from headwise.heads.documents import Document
from headwise.records import Call
from headwise.spec import Options

N = Sizes(B=2, H=6, G=3, T=7, S=11, D=5, E=3)
EXACT = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "sink": {"sink": True},
    "scale": {"scale": -1.3},
    "kv_index": {"kv_index": [2, 0, 1, 1, 0, 2]},
    "gap": {"kv_index": [0, 0, 0, 2, 2, 2]},  # nobody reads the keys in the middle
    "all": {"softcap": 2.0, "sink": True, "gate": True, "scale": 1.7, "kv_index": [0, 0, 2, 1, 1, 1]},
}
# Numbers, rows and threads: heads are shared out among threads, and masks, sinks and keys must follow them.
BLOCKS = {"one block": (2**19, 32, 1), "a row, a head": (1, 1, 1), "some rows": (40, 3, 2), "some heads": (100, 3, 5)}


def set_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    block, rows, threads = BLOCKS[name]
    for constant, value in (("BLOCK", block), ("ROWS", rows), ("THREADED", 1), ("EVERY", 3)):
        monkeypatch.setattr(block_pass, constant, value)
    torch.set_num_threads(threads)


def dense(problem: Problem) -> Tensor:
    """The weights (B,H,T,S) in double precision, by the backend that keeps them all."""
    return torch.from_numpy(steps("array", problem)["weights"])


def call_of(problem: Problem, dtype: torch.dtype = torch.float64, wrap: Callable[..., Any] = as_tensor) -> Call:
    """What a watcher is handed; q, k, v in that precision."""
    arguments = problem.arguments(as_tensor, wrap)
    q, k, v = (arguments.pop(name).to(dtype) for name in "qkv")
    for name in ("sink", "gate"):
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = wrap(to_numpy(arguments[name]))
    out = hw.attend(q, k, v, **arguments)
    return Call(nn.Identity(), q, k, v, Options(**arguments), out)


def scores_of(problem: Problem) -> list[dict[str, Tensor]]:
    """Of each document what `score_statistics` makes of what the softmax reads."""
    sink = problem.arguments(as_tensor, as_tensor).get("sink")
    return [score_statistics(torch.from_numpy(masked), sink) for masked in steps("array", problem)["masked"]]


def assert_measured(
    found: Measured,
    p_hts: Tensor,
    out_hte: Tensor,
    document: Document,
    w_o: Tensor | None = None,
    tolerance: float = EXACT,
    nats: float | None = None,
    what: str = "",
    scores: dict[str, Tensor] | None = None,
) -> None:
    """Everything in `found` is what the weights (H,T,S) of the document say."""
    H, T, S = p_hts.shape
    real = torch.ones(T, dtype=torch.bool) if document.real_rows is None else document.real_rows
    keys = range(S) if document.real_keys is None else torch.nonzero(document.real_keys)[:, 0].tolist()
    seen = real & (p_hts > 0).any(-1).any(0)
    assert found.places.tolist() == torch.nonzero(seen)[:, 0].tolist(), what
    expected = row_statistics(
        p_hts,
        start=document.start,
        first=keys[0] if len(keys) else 0,
        q_ids=document.q_ids,
        k_ids=document.k_ids,
        marks=document.marks,
    )
    if w_o is not None:
        added = torch.einsum("hte,che->htc", out_hte.double(), w_o.double().unflatten(1, (H, -1)))
        expected["norm"] = added.norm(dim=-1)
    if document.start is not None:  # a sum that rounds across the bound moves it by a key or more: hence two bounds
        bounds = [reach(p_hts, document.start, keys[0] if keys else 0, 0.99 + off) for off in (-tolerance, tolerance)]
        expected["reach"] = bounds[1]
    expected |= scores or {}
    unknown = set() if scores else {"score_max", "lse", "sink", "gate"}
    assert set(found.rows) - unknown - {"gate"} == set(expected), what
    for name, of_rows in found.rows.items():
        if name not in expected:
            continue
        values = expected[name]
        wanted, given, allowance = values[:, seen], of_rows.double(), tolerance
        if name == "reach":  # of each so manieth real row, the last one among them
            taken = torch.isin(found.places, torch.nonzero(real)[:, 0].flip(0)[:: block_pass.EVERY])
            wanted = given.clamp(*(bound[:, seen] for bound in bounds))
            wanted = wanted.nan_to_num().masked_fill(~taken, torch.nan)
        if name in ("entropy", "score_max", "lse") and nats is not None:
            allowance = nats
        elif name == "distance":
            allowance = tolerance * (S + T)
        elif name == "spread":  # compared as variances: see `dense.assert_rows`
            wanted, given, allowance = wanted**2, given**2, 2 * tolerance * (S + T) ** 2
        elif name == "norm":
            allowance = tolerance * max(1.0, float(values.max()))
        np.testing.assert_allclose(given, wanted, rtol=0, atol=allowance, err_msg=f"{name} {what}")
    rows = torch.nonzero(real)[:, 0].tolist()
    received = p_hts[:, rows].sum(1)
    np.testing.assert_allclose(found.received, received, rtol=0, atol=tolerance * max(1, T), err_msg=f"received {what}")
    if rows and keys:
        means, shares, first = block_means(p_hts, rows, keys)
        np.testing.assert_allclose(found.thumbnail, means, rtol=0, atol=tolerance, err_msg=f"thumbnail {what}")
        np.testing.assert_allclose(found.shares, shares, rtol=0, atol=tolerance, err_msg=f"shares {what}")
        np.testing.assert_allclose(found.first_key, first, rtol=0, atol=tolerance, err_msg=f"first_key {what}")
    at_top = p_hts[:, seen].gather(2, found.argmax[..., None])[..., 0]
    np.testing.assert_allclose(at_top, p_hts[:, seen].amax(-1), rtol=0, atol=tolerance, err_msg=f"argmax {what}")


def numbers(found: Measured) -> dict[str, Tensor]:
    """The rows of each statistic; of the reach those of which it is taken: in all others it is NaN."""
    taken = ~found.rows["reach"].isnan().all(0)
    return {name: rows[:, taken] if name == "reach" else rows for name, rows in found.rows.items()}


def document_of(n: Sizes, b: int, seed: int = 0, padding: bool = False, marks: bool = True) -> Document:
    """Few distinct tokens, so that some come again; two overlapping sets of keys, an empty one."""
    generator = torch.Generator().manual_seed(seed + b)
    k_ids = torch.randint(0, 4, (n.S,), generator=generator)
    q_ids = k_ids[-n.T :] if n.T <= n.S else torch.randint(0, 4, (n.T,), generator=generator)
    found = {
        "some": torch.rand(n.S, generator=generator) < 0.5,
        "most": torch.rand(n.S, generator=generator) < 0.8,
        "none": torch.zeros(n.S, dtype=torch.bool),
    }
    return Document(
        real_rows=torch.rand(n.T, generator=generator) < 0.7 if padding else None,
        real_keys=torch.rand(n.S, generator=generator) < 0.7 if padding else None,
        start=n.S - n.T,
        q_ids=q_ids,
        k_ids=k_ids,
        marks=found if marks else {},
    )


def check(problem: Problem, wrap: Any = as_tensor, padding: bool = False, tolerance: float = EXACT) -> None:
    """All documents of a problem, in double precision."""
    n = problem.sizes
    call, p, threads = call_of(problem, wrap=wrap), dense(problem), torch.get_num_threads()
    scores = scores_of(problem)
    for b in range(n.B):
        document = document_of(n, b, padding=padding)
        found = measure(call, b, document)
        assert torch.get_num_threads() == threads
        what = f"document {b}"
        np.testing.assert_allclose(row_weights(call, b, range(n.T)), p[b], rtol=0, atol=tolerance, err_msg=what)
        keys, weights = top_keys(call, b, [n.T - 1, 0], 4)
        assert torch.equal(weights, row_weights(call, b, [n.T - 1, 0]).gather(2, keys))
        assert_measured(found, p[b], call.out[b], document, tolerance=tolerance, what=what, scores=scores[b])
        for only in (["score_max"], ["lse", "confidence"], ["previous"]):
            part = measure(call, b, document, only=only).rows
            assert set(part) == set(only)
            for name, rows in part.items():
                torch.testing.assert_close(rows, found.rows[name], rtol=0, atol=EXACT, equal_nan=True)
        if call.options.gate is not None:
            gate = torch.as_tensor(call.options.gate, dtype=torch.float64)
            assert torch.equal(found.rows["gate"], gate[:, None].expand(n.H, len(found.places)))


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_masks(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_blocks(monkeypatch, "a row, a head")
    check(draw(N, 1, mask))
    set_blocks(monkeypatch, "some heads")
    check(draw(N, 2, mask, **OPTIONS["all"]), padding=True)


@pytest.mark.parametrize("wrap", [as_list, as_numpy, as_tensor])
@pytest.mark.parametrize("mask", ["causal offsets", "lengths", "segments", "allowed", "bias", "alibi slopes"])
def test_masks_and_sinks_in_every_form(mask: str, wrap: Any) -> None:
    """Lists keep Python's double precision, as in `attend`."""
    check(draw(N, 4, mask, sink=True), wrap=wrap)


@st.composite
def problems(draw_one: Any) -> tuple[Problem, dict[str, Any]]:
    """A call with any sizes, masks and options, and how it is cut into blocks."""
    size = st.integers(1, 13)
    n = Sizes(*(draw_one(st.integers(1, top)) for top in (2, 6, 4)), *(draw_one(size) for _ in range(4)))
    kv_index = draw_one(st.lists(st.integers(0, n.G - 1), min_size=n.H, max_size=n.H))
    seed = draw_one(st.integers(0, 2**16))
    cases = mask_cases(n, seed)
    case: MaskCase = NO_MASK
    names = draw_one(st.lists(st.sampled_from(MASK_NAMES), max_size=2, unique=True))
    if names:
        case = cases[names[0]] if len(names) == 1 else cases[names[0]] & cases[names[1]]
    options: dict[str, Any] = {"kv_index": kv_index}
    if draw_one(st.booleans()):
        options["softcap"] = draw_one(st.floats(0.3, 30))
    if draw_one(st.booleans()):
        options["scale"] = draw_one(st.floats(-3, 3))
    options["sink"] = True if draw_one(st.booleans()) else None
    how = {
        "block": draw_one(st.sampled_from([1, 17, 60, 2**19])),
        "rows": draw_one(st.sampled_from([1, 2, 5, 32])),
        "threads": draw_one(st.sampled_from([1, 1, 2, 3])),
        "padding": draw_one(st.booleans()),
        "seed": seed,
        "cross": draw_one(st.booleans()),
    }
    return draw(n, seed, case, **options), how


@pytest.mark.slow
@given(problems())
def test_any_call(drawn: tuple[Problem, dict[str, Any]]) -> None:
    problem, how = drawn
    n = problem.sizes
    call, p = call_of(problem), dense(problem)
    w_o = torch.from_numpy(np.random.default_rng(how["seed"]).normal(size=(7, n.H * n.E)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_pass, "BLOCK", how["block"])
        patch.setattr(block_pass, "ROWS", how["rows"])
        patch.setattr(block_pass, "THREADED", 1)
        torch.set_num_threads(how["threads"])
        for b in range(n.B):
            document = document_of(n, b, how["seed"], padding=how["padding"])
            if how["cross"]:
                document = Document(document.real_rows, document.real_keys, None, q_ids=document.q_ids)
            found = measure(call, b, document, output_factors(w_o.float(), n.H))
            norm = found.rows.pop("norm")
            assert_measured(found, p[b], call.out[b], document, what=f"document {b}")
            expected = torch.einsum("hte,che->htc", call.out[b], w_o.unflatten(1, (n.H, -1))).norm(dim=-1)
            np.testing.assert_allclose(norm, expected[:, found.places], rtol=1e-5, atol=1e-5)


def test_starts_and_norms() -> None:
    # A static cache: queries stand in the middle of the keys, and what lies behind them is room.
    problem = draw(N, 8, MaskCase(lambda wrap: hw.Causal(offset=2), lambda b, h, i, j: j <= i + 2))
    call, p = call_of(problem), dense(problem)
    for start in (2, 0, 4):
        document = document_of(N, 0)
        document = Document(start=start, q_ids=document.q_ids, k_ids=document.k_ids)
        assert_measured(measure(call, 0, document), p[0], call.out[0], document)
    assert "norm" not in measure(call_of(draw(N, 19)), 0, Document()).rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window both", "lengths", "segments", "alibi", "bias"])
def test_narrow_numbers(mask: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-5 of the definition, the entropy within 1e-4 nats; q and k are the same numbers on both sides.

    In half precision, too: there q and k are what they are, and all that follows is in float32.
    """
    n = Sizes(B=1, H=3, G=3, T=37, S=61, D=17, E=5)
    set_blocks(monkeypatch, "some heads")
    problem = rounded(draw(n, 9, mask, sink=True, softcap=3.0), dtype)
    call, document = call_of(problem, dtype), document_of(n, 0)
    w_o = torch.randn(23, n.H * n.E, generator=torch.Generator().manual_seed(1))
    found = measure(call, 0, document, output_factors(w_o, n.H))
    assert all(part.dtype == torch.float32 for part in found.rows.values())
    assert_measured(found, dense(problem)[0], call.out[0], document, w_o, tolerance=1e-5, nats=1e-4)


def rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem whose q and k are numbers of that precision; sinks and biases in float32."""
    q, k, v = (torch.from_numpy(x).to(dtype).double().numpy() for x in (problem.q, problem.k, problem.v))
    return Problem(q, k, v, problem.mask, problem.options)


@pytest.mark.parametrize("T", [61, 131, 1031])
def test_a_head_at_one_place_keeps_its_digits_wherever_in_a_run_of_keys_that_is(T: int) -> None:
    """Weight p on the token before, 1-p on the token itself: the spread is sqrt(p (1-p)), 0 for p = 0.

    The scores are about 1e4 here, so that p is known to 1e4 * 2^-24 of itself, and the root to half of that.
    """
    turn = torch.arange(T) * 2.4
    k = torch.stack([turn.cos(), turn.sin()], 1)[None, None]
    for scale, rtol in ((1e4, 0.0), (3.0, 1e-3)):
        allowed = torch.arange(T)[:, None] - torch.arange(T)
        call = Call(nn.Identity(), k, k, k, Options(hw.Allowed((allowed >= 0) & (allowed <= 1)), scale=scale), k)
        p = 1 / (1 + math.exp(scale * (1 - math.cos(2.4)))) if scale < 100 else 0.0
        spread = measure(call, 0, Document()).rows["spread"][0, 1:]
        np.testing.assert_allclose(spread, math.sqrt(p * (1 - p)), rtol=rtol, atol=1e-4 * T / 1031)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_scores_of_any_size(size: float) -> None:
    """No overflow, and an entropy that is never below zero by more than rounding."""
    problem = rounded(draw(N, 11, "causal", scale=size), torch.float32)
    call, document = call_of(problem, torch.float32), document_of(N, 0)
    # The scores themselves are rounded: 3 products of 5 in float32, times the scale.
    slack = 8 * 2**-24 * size * float(np.abs(problem.q).max() * np.abs(problem.k).max()) * N.D
    found = measure(call, 0, document)
    assert all(values.isfinite().all() for values in numbers(found).values())
    assert (found.rows["entropy"] >= -1e-6).all()
    if slack < 0.01:
        assert_measured(found, dense(problem)[0], call.out[0], document, tolerance=slack, nats=10 * slack)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_whose_bias_is_the_lowest_number_is_even(dtype: torch.dtype, causal: bool) -> None:
    """As `attend` has it: such a bias forbids nothing, and beside other keys its own get nothing."""
    bias = torch.zeros(N.T, N.T, dtype=dtype)
    bias[3], bias[5, 2] = torch.finfo(dtype).min, torch.finfo(dtype).min
    mask = hw.Bias(bias) & hw.Causal() if causal else hw.Bias(bias)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, N.H, N.T, N.D, generator=generator, dtype=dtype)
    steps = hw.trace(q, k, k, mask=mask)
    call, document = Call(nn.Identity(), q, k, k, Options(mask), steps.out), Document()
    assert_measured(measure(call, 0, document), steps.weights[0].double(), steps.out[0], document, tolerance=1e-5)
    torch.testing.assert_close(row_weights(call, 0, range(N.T)), steps.weights[0], rtol=0, atol=1e-6)
    even = 4 if causal else N.T
    torch.testing.assert_close(steps.weights[:, :, 3, :even], torch.full((1, N.H, even), 1 / even, dtype=dtype))


def test_the_entropy_of_one_key_is_no_minus_zero() -> None:
    q = torch.eye(5)[None, None]
    for mask in (None, hw.Causal()):
        call = Call(nn.Identity(), q, q, q, Options(mask, scale=1e4), q)
        assert measure(call, 0, Document()).rows["entropy"].signbit().any().item() is False


@pytest.mark.parametrize(("T", "S"), [(263, 2_689), (131, 8_209)])
def test_copies_in_a_long_document_are_counted_pair_by_pair(T: int, S: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, T, 3, generator=generator), torch.randn(1, 1, S, 3, generator=generator)
    ids = torch.randint(0, S // 10, (S,), generator=generator)  # each comes about ten times
    document = Document(start=S - T, q_ids=ids[-T:], k_ids=ids)
    steps = hw.trace(q, k, k, mask=hw.Causal())
    wanted = row_statistics(steps.weights[0], start=S - T, q_ids=ids[-T:], k_ids=ids)
    rows = measure(Call(nn.Identity(), q, k, k, Options(hw.Causal()), steps.out), 0, document).rows
    for name in ("same_token", "after_same"):
        assert (wanted[name] > 0).float().mean() > 0.9
        np.testing.assert_allclose(rows[name], wanted[name], rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, -100.0, 60.0, 100.0, 1e4, math.inf])
def test_sinks_of_any_size(sink: float) -> None:
    """Far above the scores the heads see nothing, far below it is as if there were none; NaN is never right."""
    problem = draw(N, 12, "causal", sink=np.full(N.H, sink))
    for dtype in (torch.float64, torch.float32):
        call = call_of(rounded(problem, dtype), dtype)
        found = measure(call, 0, document_of(N, 0))
        for name, values in numbers(found).items():
            assert values.isfinite().all(), f"{name} in {dtype}"
        p = dense(rounded(problem, dtype))[0].nan_to_num()  # beside an infinite sink there is nothing
        np.testing.assert_allclose(found.rows["entropy"], torch.special.entr(p).sum(-1), rtol=0, atol=1e-4)
        np.testing.assert_allclose(found.rows["confidence"], p.amax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_keys_that_nobody_may_attend_are_never_read(poison: float) -> None:
    problem = draw(N, 15, "lengths")
    lengths = N.S - 3
    problem = Problem(
        problem.q, problem.k, problem.v, MaskCase(lambda w: hw.Lengths([lengths] * 2), lambda b, h, i, j: j < lengths)
    )
    call, document = call_of(problem), document_of(N, 0)
    k, v = call.k.clone(), call.v.clone()
    k[:, :, lengths:], v[:, :, lengths:] = poison, poison
    for options in (call.options, call.options._replace(softcap=2.0)):
        clean, dirty = (measure(one._replace(options=options), 0, document) for one in (call, call._replace(k=k, v=v)))
        for name, values in numbers(clean).items():
            assert torch.equal(numbers(dirty)[name], values), name
        assert torch.equal(dirty.received, clean.received) and torch.equal(dirty.thumbnail, clean.thumbnail)


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_the_control_spreads_evenly_over_what_the_mask_allows(mask: str) -> None:
    """A bias is no part of it, but what a bias of -inf forbids stays forbidden. Masks per head: those of head 0."""
    problem = draw(N, 21, mask, **OPTIONS["all"])
    may = torch.from_numpy(problem.mask.allowed(N))[:, :1].double()
    p = torch.where(may.any(-1, keepdim=True), may / may.sum(-1, keepdim=True).clamp(min=1), 0)
    call = uniform(call_of(problem))
    for b in range(N.B):
        document = document_of(N, b)
        assert_measured(measure(call, b, document), p[b], call.out[b], document)
