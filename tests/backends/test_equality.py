"""The loop backend is the definition. The others equal it in every record, for every option."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import every, read_table
from helpers import (
    MASK_NAMES,
    NATIVE,
    NO_MASK,
    NOBODY,
    PATHS,
    RECORDS,
    TORCH_PATHS,
    Problem,
    Sizes,
    as_list,
    as_numpy,
    as_tensor,
    assert_paths_agree,
    assert_same,
    draw,
    mask_cases,
    output,
    steps,
    to_numpy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw

# No two axes have the same length (only MHA's h = g must), and E is once wider, once narrower than D.
SHAPES = {
    "MHA": Sizes(B=2, H=3, G=3, T=5, S=7, D=11, E=13),
    "GQA": Sizes(B=3, H=10, G=2, T=5, S=7, D=13, E=11),
    "MQA": Sizes(B=2, H=3, G=1, T=7, S=5, D=13, E=11),
    "square": Sizes(B=3, H=4, G=2, T=5, S=5, D=7, E=11),
    "one query": Sizes(B=3, H=10, G=2, T=1, S=7, D=11, E=5),
    "one key": Sizes(B=2, H=6, G=3, T=5, S=1, D=7, E=11),
    "one number": Sizes(1, 1, 1, 1, 1, 1, 1),
}
SMALL = Sizes(B=2, H=6, G=3, T=5, S=7, D=1, E=1)
TABLES = read_table("options")
OPTIONS, NARROW = TABLES["options"], TABLES["narrow"]
one_path = every("path", PATHS)


@every("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", SHAPES.values(), ids=SHAPES)
def test_every_option_on_every_shape(n: Sizes, options: dict) -> None:
    assert_paths_agree(draw(n, **options))


def test_every_argument_has_an_option() -> None:
    """That each changes the answer show `test_by_hand` and the steps of a trace; dropout: layer/test_matrix.py."""
    tried = {name for options in OPTIONS.values() for name in options} | {"mask", "kv_index", "dropout"}
    assert set(inspect.signature(hw.attend).parameters) == {"q", "k", "v"} | tried


@every("mask", MASK_NAMES)
@pytest.mark.parametrize("n", SHAPES.values(), ids=SHAPES)
def test_every_mask_on_every_shape(n: Sizes, mask: str) -> None:
    assert_paths_agree(draw(n, mask=mask))


@pytest.mark.parametrize(("H", "G", "kv_index"), TABLES["grouped"])
@every("mask", ["causal", "allowed per head", "bias", "lengths"])
def test_any_map_of_query_heads_to_key_value_heads(H: int, G: int, kv_index: list[int], mask: str) -> None:
    n = Sizes(B=2, H=H, G=G, T=5, S=7, D=3, E=11)
    assert_paths_agree(draw(n, mask=mask, kv_index=kv_index, sink=True, gate=True))


@one_path
@every("mask", MASK_NAMES)
def test_mask_data_in_any_container(mask: str, path: str) -> None:
    problem = draw(SMALL, mask=mask)
    expected = steps("plain", problem)
    wraps = [as_list, as_numpy] + [as_tensor] * (path in TORCH_PATHS)
    for wrap in wraps:
        for name, record in steps(path, problem, wrap).items():
            assert_same(record, expected[name], f"{name} with {wrap.__name__}")


@st.composite
def problems(choose: st.DrawFn) -> Problem:
    """Any call: sizes, up to three masks joined, every option on or off."""
    G, r = choose(st.integers(1, 3)), choose(st.integers(1, 3))
    sides = st.sampled_from([1, 2, 3, 5, 7])
    n = Sizes(choose(st.integers(1, 2)), G * r, G, choose(sides), choose(sides), choose(sides), choose(sides))
    seed = choose(st.integers(0, 999))
    cases = mask_cases(n, seed)
    mask = NO_MASK
    for name in choose(st.lists(st.sampled_from(MASK_NAMES), max_size=3)):
        mask = cases[name] if mask is NO_MASK else mask & cases[name]
    maybe = st.booleans()
    options: dict = {
        "scale": choose(st.none() | st.floats(0.01, 3)),
        "softcap": choose(st.none() | st.floats(0.1, 30)),
        "sink": choose(maybe) or None,
        "gate": choose(maybe) or None,
        "kv_index": choose(st.none() | st.lists(st.integers(0, G - 1), min_size=G * r, max_size=G * r)),
    }
    return draw(n, seed, mask, **options)


@pytest.mark.slow
@settings(max_examples=150)
@given(problems())
def test_any_problem(problem: Problem) -> None:
    assert_paths_agree(problem)


@one_path
def test_by_hand(path: str) -> None:
    # Six heads on two key/value heads read 0 0 0 1 1 1: with one key the output is that head's value.
    problem = Problem(np.ones((1, 6, 1, 1)), np.ones((1, 2, 1, 1)), np.array([[[[10.0]], [[20.0]]]]))
    assert output(path, problem).ravel().tolist() == [10, 10, 10, 20, 20, 20]
    # Scores ln 3 and 0 give weights 3/4 and 1/4.
    problem = Problem(np.ones((1, 1, 1, 1)), np.array([[[[math.log(3)], [0.0]]]]), np.array([[[[4.0], [8.0]]]]))
    assert_same(output(path, problem), [[[[5.0]]]], path)
    # With D = 4 a dot product of 2 ln 3 counts as ln 3.
    k = np.zeros((1, 1, 2, 4))
    k[..., 0, :2] = math.log(3)
    problem = Problem(np.ones((1, 1, 1, 4)), k, np.array([[[[4.0], [8.0]]]]))
    assert_same(output(path, problem), [[[[5.0]]]], path)
    # A sink of ln 4 beside powers 3 and 1 takes half, and gives nothing; the gate then doubles.
    k, v = np.array([[[[math.log(3)], [0.0]]]]), np.array([[[[4.0], [8.0]]]])
    problem = Problem(np.ones((1, 1, 1, 1)), k, v, options={"sink": np.array([math.log(4)]), "gate": np.array([2.0])})
    assert_same(output(path, problem), [[[[5.0]]]], path)
    # Scores 10 and -10 capped to c tanh(10/c), then 100 added to the second: it wins. Capped after, it could not.
    case = replace(NO_MASK, build=lambda wrap: hw.Bias(wrap(np.array([0.0, 100.0]))))
    problem = Problem(np.ones((1, 1, 1, 1)), np.array([[[[10.0], [-10.0]]]]), np.array([[[[0.0], [1.0]]]]), case)
    cap = 2 * math.tanh(5)
    expected = 1 / (1 + math.exp(2 * cap - 100))
    assert_same(output(path, problem.with_options(softcap=2.0)), [[[[expected]]]], path)


def test_trace_holds_the_steps_in_order() -> None:
    """scores -> capped -> masked -> weights -> out, each made of the one before."""
    problem = draw(SHAPES["MHA"], mask="bias that forbids", softcap=0.9, sink=True, gate=True, scale=0.4)
    for path in ("plain", "array", "explicit"):
        t, may = steps(path, problem), problem.mask.allowed(problem.sizes)
        assert_same(t["scores"], 0.4 * problem.q @ problem.k.swapaxes(-1, -2), f"scores on {path}")
        assert_same(t["capped"], 0.9 * np.tanh(t["scores"] / 0.9), f"capped on {path}")
        bias = problem.mask.bias(problem.sizes)
        assert_same(t["masked"], np.where(may, t["capped"] + bias, -np.inf), f"masked on {path}")
        live = may.any(-1)
        denominator = np.exp(t["masked"]).sum(-1) + np.exp(problem.options["sink"])[None, :, None]
        assert_same(t["lse"][live], np.log(denominator)[live], f"lse on {path}")
        assert_same(t["weights"][live], np.exp(t["masked"] - t["lse"][..., None])[live], f"weights on {path}")
        assert_same(t["out"], t["weights"] @ problem.v * problem.options["gate"][:, None, None], f"out on {path}")


EMPTY_ROWS: dict[str, Callable[[Sizes], hw.Mask]] = {
    "causal with more queries than keys": lambda n: hw.Causal(),
    "causal before the first key": lambda n: hw.Causal(offset=-3),
    "one length of zero": lambda n: hw.Lengths([0] + [2] * (n.B - 1)),
    "segments that never meet": lambda n: hw.Segments([[1] * n.T] * n.B, [[2] * n.S] * n.B),
    "one head allowed nothing": lambda n: hw.Allowed([[[h != 1]] for h in range(n.H)]),
    "a bias of -inf on one row": lambda n: hw.Bias([[-math.inf if i == 1 else 0.0] for i in range(n.T)]),
    **{name: (lambda n, build=build: build()) for name, build in NOBODY.items()},  # type: ignore[misc]
}


@one_path
@every("sink", [None, True], ids=["bare", "sink"])
@every("T", [5, 13])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_row_that_may_attend_nothing(name: str, T: int, sink: bool | None, path: str) -> None:
    n = Sizes(B=2, H=6, G=3, T=T, S=7, D=3, E=5)
    mask = EMPTY_ROWS[name](n)
    problem = replace(draw(n, sink=sink, gate=True), mask=replace(NO_MASK, build=lambda wrap: mask))
    empty = np.isneginf(steps("plain", problem)["masked"]).all(-1)
    t = steps(path, problem)
    assert empty.any() or (name.startswith("causal with more") and T <= n.S)
    assert not t["out"][empty].any()
    assert np.isfinite(t["out"]).all()
    if path != "fused":
        assert not t["weights"][empty].any()
        assert np.isneginf(t["lse"][empty]).all()
        assert np.isfinite(t["lse"][~empty]).all()


@one_path
def test_numbers_at_the_edge(path: str) -> None:
    problem = draw(SHAPES["MHA"], scale=1e4, sink=True)
    assert_same(output(path, problem), output("plain", problem), path)
    assert np.isfinite(output(path, problem)).all()
    problem = draw(Sizes(1, 6, 3, 5, 7, 3, 2), mask="causal", sink=True)
    arguments = problem.arguments(as_list)
    bare = hw.trace(**{name: x[0] if name in "qkv" else x for name, x in arguments.items()})
    whole = steps("plain", problem)
    for name, record in whole.items():
        assert_same(getattr(bare, name), record[0], name)


@every("path", PATHS[1:])
@every("mask", [None, hw.Causal(), hw.Window(1, 1)])
@every("axis", ["B", "T", "S"])
def test_an_axis_of_length_zero(axis: str, mask: hw.Mask | None, path: str) -> None:
    """Nothing in, nothing out; and without keys every row is one that may attend nothing."""
    n = Sizes(2, 6, 3, 5, 7, 11, 13)._replace(**{axis: 0})
    problem = replace(draw(n, sink=True), mask=replace(NO_MASK, build=lambda wrap: mask))
    out = output(path, problem)
    assert out.shape == (n.B, n.H, n.T, n.E)
    assert not out.any()


@pytest.mark.parametrize("path", PATHS[1:])
def test_arrays_need_not_be_contiguous(path: str) -> None:
    """Heads that come out of a projection lie (B,T,H,D) in memory."""
    for n in SHAPES.values():
        problem = draw(n, mask="causal", sink=True)
        arguments = problem.arguments(NATIVE[path])
        for name in "qkv":
            x = arguments[name].swapaxes(1, 2)
            arguments[name] = (x.copy() if path == "array" else x.contiguous()).swapaxes(1, 2)
        out = hw.attend(**arguments) if path != "explicit" else hw.trace(**arguments).out
        assert_same(to_numpy(out), output("plain", problem), path)


def naive(problem: Problem, dtype: torch.dtype, order: np.ndarray) -> torch.Tensor:
    """Textbook attention, every step in `dtype`, with the keys taken in another order: the yardstick for rounding."""
    n, o = problem.sizes, problem.options
    q, k, v = (torch.tensor(x).to(dtype) for x in (problem.q, problem.k[:, :, order], problem.v[:, :, order]))
    k, v = k[:, problem.kv_index], v[:, problem.kv_index]
    scores = q @ k.transpose(-1, -2) * (o.get("scale") or n.D**-0.5)
    if cap := o.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores + torch.tensor(problem.mask.bias(n)[..., order]).to(dtype)
    scores = scores.masked_fill(torch.tensor(~problem.mask.allowed(n)[..., order]), -math.inf)
    if "sink" in o:
        column = torch.tensor(o["sink"]).to(dtype)[None, :, None, None].expand(n.B, -1, n.T, 1)
        scores, v = torch.cat([scores, column], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    out = torch.softmax(scores, -1) @ v
    return out * torch.tensor(o["gate"]).to(dtype)[:, None, None] if "gate" in o else out


@every("path", PATHS[1:])
@every("T", [19, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every("options", NARROW.values(), ids=NARROW)
def test_narrow_numbers_err_at_most_twice_the_textbook(options: dict, dtype: torch.dtype, T: int, path: str) -> None:
    if path == "array" and dtype == torch.bfloat16:
        return  # NumPy has no such numbers
    n = Sizes(B=2, H=6, G=3, T=T, S=23, D=13, E=17)
    rounded = draw(n, **options)
    # Both sides get inputs that are already rounded, so that only the arithmetic is compared.
    q, k, v = (torch.tensor(x).to(dtype).double().numpy() for x in (rounded.q, rounded.k, rounded.v))
    problem = replace(rounded, q=q, k=k, v=v)
    live = problem.mask.allowed(n).any(-1)
    exact = output("explicit", problem)

    orders = [np.random.default_rng(seed).permutation(n.S) for seed in range(5)]
    usual = max(np.abs(naive(problem, dtype, order).double().numpy() - exact)[live].max() for order in orders)
    arguments = problem.arguments(as_tensor)
    arguments |= {name: arguments[name].to(dtype) for name in "qkv"}
    if path == "array":
        arguments = problem.arguments(as_numpy)
        arguments |= {name: arguments[name].astype(str(dtype).removeprefix("torch.")) for name in "qkv"}
    if path == "explicit":
        record = hw.trace(**arguments)
        out, wide = record.out, torch.promote_types(dtype, torch.float32)
        assert {getattr(record, name).dtype for name in RECORDS if name != "out"} == {wide}
    else:
        out = hw.attend(**arguments)
    assert out.dtype == arguments["q"].dtype
    floor = torch.finfo(dtype).eps * np.abs(exact).max()  # the result itself is rounded once
    assert np.abs(to_numpy(out) - exact).max() <= 2 * usual + floor


@pytest.mark.parametrize("path", TORCH_PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sink_keeps_its_bits_beside_half_precision(dtype: torch.dtype, path: str) -> None:
    """Scores of 0 and values of 1 leave S / (S + exp(sink)). A sink rounded to bfloat16 would miss that by percents."""
    q, k, v = torch.zeros(1, 12, 5, 11, dtype=dtype), torch.zeros(1, 3, 7, 11, dtype=dtype), torch.ones(1, 3, 7, 2)
    sink = np.linspace(3.03, 6.97, 12)
    run = hw.attend if path == "fused" else lambda *args, **options: hw.trace(*args, **options).out
    out = to_numpy(run(q, k, v.to(dtype), sink=sink.tolist()))
    # The weights and the result are each rounded once, by half an eps at most.
    np.testing.assert_allclose(out[0, :, 0, 0], 7 / (7 + np.exp(sink)), rtol=torch.finfo(dtype).eps)
