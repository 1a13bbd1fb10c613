"""The ladder: every rung is the same function, a wrong one is found out and gets no time, and the tables say so."""

import functools
import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import every, refuses_table, rows

from headwise import memory
from headwise.lab import ladder as study
from headwise.lab.ladder import RUNGS, Certificate, Rung, certificate_sizes, draw_leaves, run_ladder
from headwise.records import Ladder, LadderRung, LadderSizes
from headwise.view import Screen
from headwise.view.lab import print_ladder

NAMES = [
    "plain", "plain GQA", "stacked heads", "course class", "NumPy loop", "NumPy batched", "NumPy einsum",
    "NumPy attend", "torch explicit", "torch fused", "torch.nn", "cached decode",
]  # fmt: skip
INNER = {"q", "k", "v", "heads", "joined", "output"}
ALL = INNER | {"scores", "weights"}
HANDED_OUT = {"torch fused": INNER, "cached decode": INNER, "torch.nn": {"weights", "output"}}
LEAVES = {"W_Q", "W_K", "W_V", "W_O", "x"}

MHA = {"width": 35, "heads": 5, "tokens": 11, "batch": 2}  # heads of 7
GQA = {"width": 30, "heads": 6, "kv_heads": 2, "tokens": 7, "batch": 3}  # heads of 5
MQA = {"width": 15, "heads": 5, "kv_heads": 1, "tokens": 7, "batch": 2}


@functools.cache
def ladder_of(**sizes: int) -> Ladder:
    return run_ladder(**sizes, repeats=1)


def rung_of(ladder: Ladder, name: str) -> LadderRung:
    return next(rung for rung in ladder.rungs if rung.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [MHA, GQA, MQA, {"width": 3, "heads": 1, "tokens": 1}], ids=["mha", "gqa", "mqa", "one"]
)
def test_every_rung_is_the_same_function(sizes: dict[str, int]) -> None:
    ladder = ladder_of(**sizes)
    assert ladder.agrees and ladder.certified == ladder.sizes and ladder.note is None
    assert [rung.name for rung in ladder.rungs] == NAMES
    shared = sizes.get("kv_heads", sizes["heads"]) != sizes["heads"]
    for rung in ladder.rungs:
        if shared and rung.name == "torch.nn":
            assert rung.refused == f"it cannot share {sizes['kv_heads']} key/value heads among {sizes['heads']} heads"
            assert not rung.agrees and rung.ms is None and rung.not_timed == rung.refused
            continue
        assert rung.agrees and rung.refused is None and rung.not_timed is None, rung
        assert set(rung.differences) == HANDED_OUT.get(rung.name, ALL)
        assert rung.dtype == ("float64" if rung.name.startswith("plain") else "float32")
        # Far inside what is allowed: sums of some dozen numbers near 1.
        assert all(far is not None and far < 1e-13 for far in rung.differences.values())
        assert rung.timed_difference is not None and rung.timed_difference < 1e-5
        if rung.name.startswith("NumPy"):
            assert rung.gradients is None
        else:
            assert rung.gradients is not None and set(rung.gradients) == LEAVES
            assert all(far is not None and far < 1e-12 for far in rung.gradients.values())
        assert rung.ms is not None and rung.ms > 0 and rung.repeats == 1
        assert rung.peak_bytes is not None and rung.peak_bytes > 0


@pytest.mark.slow
def test_rungs_differ_and_have_their_form() -> None:
    # Different arithmetic leaves different roundings.
    assert len({str((rung.differences, rung.gradients, rung.timed_difference)) for rung in ladder_of(**GQA).rungs}) > 4
    course, plain = (rung_of(ladder_of(**GQA), name) for name in ("course class", "torch fused"))
    assert plain.parameters == 2 * 30 * 30 + 2 * 30 * 10
    assert course.parameters == 4 * 30 * 30  # keys and values are copied for each head


def spoiled(name: str, change: Callable[[Any], Any], step: str = "", title: str = "spoiled") -> Rung:
    """A rung of the ladder whose result, or one stage that it hands out, `change` spoils."""
    rung = next(rung for rung in RUNGS if rung.name == name)

    def prepare(sizes: LadderSizes, leaves: Any) -> Any:
        forward = rung.prepare(sizes, leaves)

        def called(x: Any, keep: Any) -> Any:
            out = forward(x, keep)
            if step and keep is not None:
                keep[step] = change(keep[step])
            return out if step else change(out)

        return called

    return replace(rung, name=title, prepare=prepare)


class WrongSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * 1.001


def unscaled(sizes: LadderSizes, leaves: Any) -> Any:
    """The classic: the division by sqrt(d) forgotten, which is another function though every shape is right."""
    scaled = {**leaves, "W_Q": leaves["W_Q"] * math.sqrt(sizes.d_model // sizes.n_heads)}
    return RUNGS[5].prepare(sizes, scaled)


def with_future(sizes: LadderSizes, leaves: Any) -> Any:
    def forward(x: Any, keep: Any) -> Any:
        d = sizes.d_model // sizes.n_heads
        q, k, v = ((x @ leaves[name].T).unflatten(2, (-1, d)).transpose(1, 2) for name in ("W_Q", "W_K", "W_V"))
        messages = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return messages.transpose(1, 2).flatten(2) @ leaves["W_O"].T

    return forward


WRONG = {
    "no scale": (Rung("spoiled", "array", unscaled), "q, scores, weights, heads, joined, output, timed float32"),
    "not causal": (Rung("spoiled", "tensor", with_future), "output, W_Q, W_K, W_V, W_O, x, timed float32"),
    "a slope": (spoiled("torch fused", WrongSlope.apply), "W_Q, W_K, W_V, W_O, x"),
    "single precision within": (
        spoiled("NumPy batched", lambda out: out.astype(np.float32).astype(out.dtype)),
        "output",
    ),
    "only as timed": (spoiled("torch fused", lambda out: out + 0.01 * (out.dtype == torch.float32)), "timed float32"),
    "not a number": (spoiled("NumPy loop", lambda out: out * np.nan), "output, timed float32"),
    "another shape": (spoiled("NumPy loop", lambda out: out[:, :1]), "output, timed float32"),
    "rows mixed up": (spoiled("NumPy loop", lambda step: step[:, :, ::-1], "heads"), "heads"),
    "groups mixed up": (spoiled("plain GQA", lambda step: [heads[::-1] for heads in step], "k"), "k"),
    "a stage of no numbers": (spoiled("torch explicit", lambda step: None, "weights"), "weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_rung_that_disagrees_gets_no_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rung, where = WRONG[name]
    monkeypatch.setattr(study, "RUNGS", (RUNGS[0], rung))
    ladder = run_ladder(width=18, heads=6, kv_heads=2, tokens=5, batch=2, repeats=1)
    wrong = rung_of(ladder, "spoiled")
    assert not ladder.agrees and not wrong.agrees
    assert wrong.ms is None and wrong.peak_bytes is None and wrong.repeats == 0
    assert wrong.not_timed == f"it disagrees in {where}"
    assert rung_of(ladder, "plain").agrees and rung_of(ladder, "plain").ms is not None
    json.dumps(asdict(ladder), allow_nan=False)  # what is not a number is null


@pytest.mark.parametrize("seed", range(3))
def test_the_tolerance_of_a_format_holds_for_it_and_tells_right_from_wrong(seed: int) -> None:
    sizes = LadderSizes(2, 7, 30, 6, 2)
    certificate = Certificate(sizes, seed)
    single = {name: array.astype(np.float32).astype(np.float64) for name, array in certificate.leaves.items()}
    explicit = RUNGS[8]
    exact = certificate._steps(explicit) | certificate._slopes(explicit)
    certificate.leaves = single
    rounded = certificate._steps(explicit) | certificate._slopes(explicit)
    for name in (*certificate.steps, *LEAVES):
        far = np.abs(exact[name] - rounded[name]).max()
        wide = certificate.tolerances[name] * 2**29 / 2  # what the same rule allows in float32
        assert 0 < far < wide < 0.01 * np.abs(exact[name]).max(), name


@every("asked, certified", rows("certified"))
def test_the_certificate_shrinks_to_what_scalars_can_do(asked: list[int], certified: list[int]) -> None:
    assert certificate_sizes(LadderSizes(*asked)) == LadderSizes(*certified)


@pytest.mark.slow
def test_a_large_size_is_certified_small_and_its_scalar_loops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("plain", "NumPy batched", "torch fused", "torch.nn")
    monkeypatch.setattr(study, "RUNGS", tuple(rung for rung in RUNGS if rung.name in names))
    ladder = run_ladder(width=320, heads=10, tokens=97, batch=2, repeats=3, longest=0.5)
    assert ladder.agrees and ladder.sizes == LadderSizes(2, 97, 320, 10, 10)
    n = ladder.certified
    assert (n.d_model < 320 or n.tokens < 97) and n.d_model % n.n_heads == 0
    assert ladder.note is not None and f"{n.tokens} tokens, width {n.d_model}, {n.n_heads} heads" in ladder.note
    plain = rung_of(ladder, "plain")
    assert plain.agrees and plain.ms is None and plain.not_timed is not None
    assert plain.not_timed.startswith("a call would take about ") and plain.not_timed.endswith("longest=0.5")
    assert rung_of(ladder, "torch fused").ms is not None
    # (B,h,T,T) maps in full against a kernel that never holds them; q, k, v and the result are the rest.
    maps, rest = 2 * 10 * 97 * 97 * 4, 2 * 97 * 320 * 4
    assert rung_of(ladder, "NumPy batched").peak_bytes > maps + 4 * rest  # type: ignore[operator]
    assert 4 * rest <= rung_of(ladder, "torch fused").peak_bytes < maps + 4 * rest  # type: ignore[operator]


def test_slow_rungs_are_called_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says how long each call took: one of 0.4 s is repeated while a second has room, one of 2 s never."""
    calls: list[str] = []
    prices = {"fast": 0.01, "middling": 0.4, "slow": 2.0}

    def rung(name: str) -> Rung:
        def prepare(sizes: LadderSizes, leaves: Any) -> Any:
            forward = RUNGS[5].prepare(sizes, leaves)
            return functools.wraps(forward)(lambda x, keep: calls.append(name) or forward(x, keep))

        return Rung(name, "array", prepare)

    def seconds(call: Any) -> float:
        call()
        return prices.get(calls[-1] if calls else "", 1e-3)

    monkeypatch.setattr(study, "RUNGS", (RUNGS[0], *map(rung, prices)))
    monkeypatch.setattr(memory, "seconds_of", seconds)
    ladder = run_ladder(**MQA, repeats=7, longest=1.0)
    assert {one.name: (one.ms, one.repeats) for one in ladder.rungs[1:]} == {
        "fast": (10.0, 7),
        "middling": (400.0, 2),
        "slow": (2000.0, 1),
    }
    *before, fast, middling, slow = calls  # at last each is called for its peak
    assert [fast, middling, slow] == list(prices)
    assert before[-10:] == ["slow", *["fast", "middling"] * 2, *["fast"] * 5]  # in turn, after one that warms up


def test_memory_is_what_a_call_holds_at_a_time() -> None:
    held, passing = 3 * 2**20, 5 * 2**20

    def torch_call() -> Any:
        torch.empty(passing, dtype=torch.uint8)
        first = torch.empty(held, dtype=torch.uint8)
        return first, torch.empty(held, dtype=torch.uint8)

    def numpy_call() -> Any:
        np.empty(passing, np.uint8)
        first = np.empty(held, np.uint8)
        return first, np.empty(held, np.uint8)

    assert memory.peak_of(torch_call) == 2 * held
    assert 2 * held <= study._python_peak(numpy_call) < 2 * held + 10_000


def test_what_stays_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    told: list[tuple[str, int, int]] = []
    run_ladder(width=6, heads=2, tokens=3, repeats=1, report=lambda *task: told.append(task))
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert [done for _, done, _ in told] == list(range(len(NAMES) + 2))
    assert {total for *_, total in told} == {len(NAMES) + 1}
    assert [task for task, *_ in told[-3:]] == ["certify cached decode", "time all in turn", "done"]
    assert told[0][0] == "certify plain"
    n = LadderSizes(2, 7, 30, 6, 2)
    one, other = draw_leaves(n, 0), draw_leaves(n, 1)
    assert {name: array.shape for name, array in one.items()} == {
        "W_Q": (30, 30), "W_K": (10, 30), "W_V": (10, 30), "W_O": (30, 30), "x": (2, 7, 30),
    }  # fmt: skip
    assert all(np.abs(one[name] - other[name]).max() > 0.1 for name in one)
    assert abs(one["W_Q"].std() * math.sqrt(30) - 1) < 0.1 and abs(one["x"].std() - 1) < 0.1


def test_sizes_that_do_not_fit_are_refused() -> None:
    refuses_table("ladder", globals(), exact=True)


def printed(ladder: Ladder, **options: Any) -> str:
    console = Screen(file=io.StringIO(), **options)
    print_ladder(console, ladder)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def cells(text: str, name: str) -> list[list[str]]:
    """The cells of the rows of a rung, one list for each table."""
    lines = [line.strip() for line in text.splitlines()]
    return [line[len(name) :].split() for line in lines if line.startswith(name + " ") and ":" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"width": 100}, {"width": 80, "soft_wrap": True}, {"width": 80}])
def test_the_tables_are_whole_in_100_columns_and_in_a_pipe(options: dict[str, Any]) -> None:
    text = printed(ladder_of(**GQA), **options)
    assert "\x1b" not in text and "…" not in text
    tables = [line for line in text.splitlines() if "─" in line or line.strip().startswith(tuple(NAMES))]
    assert max(map(len, tables)) <= options["width"] or options.get("soft_wrap")
    fused = rung_of(ladder_of(**GQA), "torch fused")
    values, gradients, costs = cells(text, "torch fused")
    assert values[3:5] == ["-", "-"] and values[-1] == "yes" and values[0] == f"{fused.differences['q']:.0e}"
    assert gradients[-1] == "float32" and gradients[0] == f"{(fused.gradients or {})['W_Q']:.0e}"
    assert costs[0] == "2,400" and float(costs[1].replace(",", "")) == pytest.approx(fused.ms, rel=0.01)
    assert cells(text, "NumPy loop")[1][:5] == ["none"] * 5
    assert cells(text, "torch.nn")[0] == ["-"] * 9
    assert "torch.nn is not timed: it cannot share 2 key/value heads among 6 heads" in text
    assert "Every rung that can run this layer gives the same on this draw" in text


def test_the_tables_name_what_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = spoiled("NumPy loop", lambda out: out * np.nan, title="broken loop")
    monkeypatch.setattr(study, "RUNGS", (RUNGS[0], wrong))
    text = printed(run_ladder(width=6, heads=2, tokens=3, repeats=1), width=100)
    values, _, costs = cells(text, "broken loop")
    assert values[-2:] == ["wrong", "NO"] and costs[1:4] == ["-", "-", "-"]
    assert "broken loop is not timed: it disagrees in output, timed float32" in text
    assert "NOT the same function: broken loop" in text
