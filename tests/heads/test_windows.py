"""How far heads look: the blocked pass against whole maps, planted heads that look things up, and the plan chosen."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from cases import every, refuses, refuses_table
from invoking import Invoke

import headwise as hw
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.heads import blocks
from headwise.heads.documents import Document
from headwise.heads.windows import distances
from headwise.plan import DUO_HEADS, SHARES, SINKS, Windows
from headwise.records import Call
from headwise.rungs.tensor import trace
from headwise.spec import Options
from headwise.view.page import windows_html

RETRIEVING = {"L1.KV0", "L2.KV1", "L2.KV2"}
T = 101
MASKS: dict[str, Any] = {
    "causal": Options(hw.Causal()),
    "window": Options(hw.Window(41, 0)),
    "sink, softcap": Options(hw.Causal(), softcap=3.0, sink=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 7.0])),
    "bias": Options(hw.Causal() & hw.Alibi()),
}


@every("name, block", [(name, block) for name in MASKS for block in (2**19, 701)])
def test_masses_and_distances_are_those_of_the_whole_map(
    monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)  # the map whole, or in parts of some queries and heads
    monkeypatch.setattr(blocks, "THREADED", 1)
    monkeypatch.setattr(blocks, "ROWS", 32 if block > T * T else 5)
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, n, T, 7, generator=generator) * 2 for n in (6, 2))
    options = MASKS[name]
    call = Call(None, q, k, k, options, torch.zeros_like(q), False, 0)
    real = torch.arange(T) >= 3 if name == "bias" else None  # rows that do not count
    sizes = [1, 16, 43, T]
    marks = {"image": torch.arange(T) == 5}
    outside, reached = distances(call, 0, Document(real_rows=real, marks=marks), sizes)
    p = trace(q, k, k, options).weights[0].double()
    p = p if real is None else p[:, real]
    i = (torch.arange(T) if real is None else torch.arange(T)[real])[:, None]
    j = torch.arange(T)
    for a, s in enumerate(SINKS):
        for b, w in enumerate(sizes):
            exact = (p * ((i - j >= w) & (j >= s))).sum((1, 2)) / len(i)
            torch.testing.assert_close(outside[:, a, b], exact, atol=2e-6, rtol=1e-5)
    within = torch.stack([(p * (i - j <= d)).sum((1, 2)) for d in range(T)], 1)
    for a, share in enumerate(SHARES):
        for h in range(6):
            d = int(reached[h, a])
            assert within[h, d] >= share * within[h, -1] - 1e-4
            assert d == 0 or within[h, d - 1] < share * within[h, -1] + 1e-4


@pytest.fixture(scope="module")
def model() -> hw.GPT:
    return planted.retrieval_model(RETRIEVING)


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    return torch.randint(37, (5, 131), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def reach(model: hw.GPT, documents: list[list[int]]) -> Windows:
    return hw.windows(model, documents)


def test_heads_retrieve_by_their_lift(reach: Windows, documents: list[list[int]]) -> None:
    assert {name for name in reach if reach[name].retrieves} == RETRIEVING
    assert reach.needle_found == 1.0
    assert all((reach[name].needle.mean > 0.9) == (name in RETRIEVING) for name in reach)
    for tolerance in (1e-6, 0.01, 1.0):
        plan = reach.plan(tolerance)
        full = {f"L{n}.KV{g}" for n, layer in enumerate(plan.keep) for g, keep in enumerate(layer) if keep is None}
        assert full == RETRIEVING
    assert reach.windows == (16, 32, 64, 128, 131)
    assert reach["L0.KV0"].reached[2].mean == 1.0  # it looks one token back
    without = hw.windows(planted.retrieval_model(set()), documents)
    assert without.needle_found is not None and without.needle_found < 0.5
    assert not any(without[name].retrieves for name in without)
    assert any("needles" in note for note in without.notes)
    # Whatever the weight: what counts is the same head, at the same distance, where the answer does not stand.
    weak = hw.windows(planted.retrieval_model(RETRIEVING, pull=0.95), documents)
    assert {name for name in weak if weak[name].retrieves} == RETRIEVING
    assert all(0.01 < weak[name].needle.mean < 0.1 and weak[name].lift.low > 1 for name in RETRIEVING)
    torch.manual_seed(3)
    noise = planted.retrieval_model(set())
    for parameter in noise.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape))
    strewn = hw.windows(noise, documents)
    assert max(strewn[name].needle.mean for name in strewn) > 0.01  # by chance; they are not sure of it
    assert not any(strewn[name].retrieves for name in strewn)
    shape = {"vocab_size": 37, "context": 131, "n_layers": 1, "n_heads": 6, "d_model": 36, "init_std": 0.4}
    torch.manual_seed(0)
    grouped = hw.GPT(hw.GPTConfig(**shape, n_kv_heads=2)).eval()  # type: ignore[arg-type]
    state = grouped.state_dict()
    for name in ("k", "v"):
        key = f"blocks.0.attention.{name}_proj.weight"
        state[key] = state[key].view(2, 6, 36).repeat_interleave(3, 0).flatten(0, 1)
    alone = hw.GPT(hw.GPTConfig(**shape)).eval()  # type: ignore[arg-type]
    alone.load_state_dict(state)
    few = documents[:1]
    shared, single = hw.windows(grouped, few), hw.windows(alone, few)
    for g in range(2):
        group = [single[f"L0.KV{h}"] for h in range(3 * g, 3 * g + 3)]
        for s, masses in enumerate(shared[f"L0.KV{g}"].outside):
            for w, mass in enumerate(masses):
                assert mass.mean == pytest.approx(max(head.outside[s][w].mean for head in group), abs=1e-6)
        assert shared[f"L0.KV{g}"].needle.mean >= max(head.needle.mean for head in group) - 1e-6  # the best at each


def test_a_plan_takes_the_smallest_windows_or_fits_a_share(reach: Windows) -> None:
    interval = reach["L0.KV0"].needle
    masses = [replace(interval, mean=mass) for mass in (0.5, 0.2, 0.05, 0.01, 0.0)]
    heads = []
    for n, head in enumerate(reach.heads):
        outside = tuple(tuple(replace(x, mean=x.mean * (n + 1) / 9) for x in masses) for _ in SINKS)
        heads.append(replace(head, outside=outside, needle=replace(interval, mean=0.0)))
    wide = replace(reach, heads=tuple(heads))
    keep = wide.plan(tolerance=0.05, sinks=1).keep
    assert [keep[0][0], keep[2][2]] == [hw.Keep(1, 32), hw.Keep(1, 64)]
    assert wide.plan(tolerance=0.0).keep[2] == (None,) * 3  # the longest window is no window
    shares = [wide.plan(cache=share).share(131) for share in (0.2, 0.5, 0.9, 1.0)]
    assert all(got <= share for got, share in zip(shares, (0.2, 0.5, 0.9, 1.0), strict=True))
    assert shares == sorted(shares) and shares[2] > 0.5
    refuses_table("reach", {"plan": wide.plan, "short": replace(wide, longest=7, windows=(7,))})


def test_what_has_no_room_for_a_needle_or_predicts_nothing_says_so(model: hw.GPT) -> None:
    short = hw.windows(model, [[1, 2, 3, 4, 5, 6, 7]])
    assert short.needle_found is None and "no room for a needle" in short.notes[0]
    assert short.windows == (7,) and math.isnan(short["L0.KV0"].needle.mean)
    assert short.document()["heads"][0]["needle"]["mean"] is None
    refuses(lambda: short["L7.KV0"], r"L7\.KV0")
    refuses(lambda: hw.windows(torch.nn.Linear(2, 3), [[1, 2]]), "does not predict the next token")


def test_the_command_writes_what_it_measured(
    invoke: Invoke, model: hw.GPT, documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.heads.survey.PATIENCE", 0)  # so that a forecast is told
    tokens = Tokens.words([" ".join(f"w{n:02}" for n in range(36))])
    save_model(tmp_path / "run", model, tokens)
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"w{max(0, n - 1):02}" for ids in documents for n in ids))
    command = ["windows", tmp_path / "run", "--text", book, "--tokens", 131, "--documents", 3]
    options = {"html": "--html", "csv": "--out", "png": "--out", "json": "--plan"}
    files = {name: tmp_path / f"x.{name}" for name in options}
    named = [word for name, path in files.items() for word in (options[name], path)]
    done = invoke(*command, *named, "--cache", 0.6, "--json")
    document = json.loads(done.out)
    assert f"min: {(3 + 8) * 131:,} tokens at" in done.err and "--documents" in done.err
    assert {head["name"] for head in document["heads"] if head["needle"]["mean"] > 0.1} == RETRIEVING
    plan = hw.Plan.read(files["json"])
    assert document["share"] == plan.share(131) <= 0.6
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [row["name"] for row in rows] == [head["name"] for head in document["heads"]]
    assert float(rows[1]["outside_s4_w64_high"]) == pytest.approx(document["heads"][1]["outside"][2][2]["high"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "connect-src" not in files["html"].read_text() and "Peso fuera de una ventana" in files["html"].read_text()
    shown = invoke(*command, "--sinks", 0, "--plan", tmp_path / "duo", "--cache", 0.6)
    assert (
        hw.Plan.read(tmp_path / "duo").n_layers == plan.n_layers
        and "1.0\t" in (tmp_path / "duo" / DUO_HEADS).read_text()
    )
    assert "L2.KV1" in shown.out and "retrieves" in shown.out and "outside 16" in shown.out


def test_the_page_escapes_names(reach: Windows) -> None:
    page = windows_html(replace(reach, model="<img src=x>", heads=reach.heads[:1]))
    assert "<img" not in page
