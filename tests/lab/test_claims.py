"""The ledger: counts against hand measured, verdicts against their rules, and the committed page against both."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every
from comparisons import all_comparisons, ledger

import headwise as hw
from headwise.lab import claims
from headwise.lab.claims import (
    ELSEWHERE,
    Times,
    counted_flops,
    flops_with_heads,
    heads_of_models,
    judged,
    machine,
    parameters_with_heads,
    run_claims,
    split_heads,
)
from headwise.lab.results import DEPENDS, FAILS, HOLDS, NOT_RUN, ArmResult, Claim
from headwise.teach.bugs import bug_named, catalogue
from headwise.teach.study import shown

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

from study_pages import bugs_page, claims_page  # noqa: E402

PAGE = ROOT / "docs" / "claims.md"


def times_of(**milliseconds: float) -> Callable[..., Times]:
    """A clock that gives these times for the ways that begin with these words."""

    def in_turn(ways: dict[str, object], rounds: int) -> Times:
        return {name: [1e-3 * milliseconds[name.replace(", ", "_").split()[0]]] * rounds for name in ways}

    return in_turn


def test_what_is_counted() -> None:
    claim, table = split_heads()
    assert table.rows == (("4 heads of 4", 16, 768), ("1 head of 16", 16, 768), ("4 heads of 16", 64, 3072))
    assert claim.verdict == FAILS and "16 multiplications against 64, a factor of 4;" in claim.measured
    claim, table = parameters_with_heads()
    assert [row[2] for row in table.rows] == [3, 4, 4, 3]
    assert claim.verdict == DEPENDS
    claim, table = heads_of_models()
    assert ("MiniLM-L6", 22713216, 12, "4 to 8") in table.rows and ("gpt2", 124439808, 12, "8 to 16") in table.rows
    assert claim.verdict == DEPENDS and claim.measured.endswith("8 have so many; not MiniLM-L6 with 12.")


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_counted_flops_are_the_formula(heads: int) -> None:
    layer = hw.MultiHeadAttention(30, heads, mask=hw.Causal())
    assert counted_flops(layer, 7) == {"linear": 2 * 7 * 4 * 30 * 30, "attention": 2 * 2 * 7 * 7 * 30}


@pytest.mark.parametrize(("growth", "verdict"), [(16.0, DEPENDS), (1.0, HOLDS)])
def test_products_are_equal_and_the_softmax_decides(
    growth: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "in_turn", times_of(**{"1": 1.0, "2": 1.0, "4": 1.0, "8": 1.0, "16": growth}))
    claim, table = flops_with_heads(width=48, tokens=11, rounds=1)
    assert claim.verdict == verdict and f"{growth:.1f} times as long" in claim.measured
    assert len({row[1] for row in table.rows}) == 1 and [row[2] for row in table.rows][-1] == 16 * 11**2 / 1e6


def test_products(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(5))
    monkeypatch.setattr(claims, "counted_flops", lambda *given: {"linear": next(counts), "attention": 0})
    assert flops_with_heads(width=48, tokens=5, rounds=1)[0].verdict == FAILS
    heads, _, lookups, *_ = all_comparisons(heads=(0.5, 0.3, 0.2))
    four = lookups.arms[2]
    larger = ArmResult(four.name, "", four.parameters + 1, four.scores, None)
    told = claims.several_heads(heads, type(lookups)(**{**vars(lookups), "arms": (*lookups.arms[:2], larger)}))
    assert told.verdict == HOLDS and told.measured.count("4 heads") == 1
    comparisons = []
    for one in all_comparisons(heads=(0.5, 0.3, 0.2)):
        last = one.arms[-1]
        failed = ArmResult(last.name, "", last.parameters, {}, "diverged at step 3")
        comparisons.append(type(one)(**{**vars(one), "arms": (*one.arms[:-1], failed)}))
    found = judged(tuple(comparisons))
    assert [verdict_of(word, found) for word in ("Several", "Quality", "specialise")] == [DEPENDS, DEPENDS, FAILS]
    assert "4 heads diverged" in found[0].measured
    claim, _ = claims.price_of_sharing(all_comparisons(sharing=(0.5, 0.6, 0.8))[1])
    assert "GQA less MHA +0.100 ± 0.025, MQA less GQA +0.200 ± 0.000." in claim.measured


@pytest.mark.parametrize(("wrapper", "verdict"), [((2.0, 2.0), HOLDS), ((2.0, 0.5), DEPENDS), ((1.0, 0.5), FAILS)])
def test_the_class_must_be_faster_at_every_size(
    wrapper: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = iter(wrapper)
    monkeypatch.setattr(
        claims, "in_turn", lambda ways, rounds: times_of(stacked=next(each), vectorised=1.0, fused=0.4)(ways, rounds)
    )
    claim, table = claims.course_forms([claims.LayerSize(1, 5, 6, 2), claims.LayerSize(1, 7, 6, 3)], rounds=1)
    assert claim.verdict == verdict and "2.5 to 2.5 times the speed" in claim.measured
    assert [row[4] for row in table.rows] == pytest.approx(list(wrapper))


def test_the_timed_forms_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[torch.Tensor] = []

    def run(ways: dict[str, Callable[[], torch.Tensor]], rounds: int) -> Times:
        with torch.no_grad():
            outputs.extend(way() for way in ways.values())
        return {name: [1.0] for name in ways}

    monkeypatch.setattr(claims, "in_turn", run)
    claims.course_forms([claims.LayerSize(2, 11, 30, 5)], rounds=1)
    assert len(outputs) == 3
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])


def test_the_printed_wrapper_is_weighed_and_timed_beside_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "in_turn", times_of(wrapper=7.0, vectorised=2.0))
    claim, table = claims.printed_wrapper([claims.LayerSize(1, 5, 6, 3)], rounds=1)
    weights, of_class = 3 * 3 * 6 * 6, 3 * 6 * 6 + 6 * 6 + 6
    assert table.rows == (
        ("(1,5,6), 3 heads, wrapper as printed", weights, 18, pytest.approx(7.0)),
        ("(1,5,6), 3 heads, vectorised class", of_class, 6, pytest.approx(2.0)),
    )
    assert claim.verdict == FAILS
    assert (
        f"{weights} weights against {of_class}, an output 18 wide against 6, and 3.50 times the time" in claim.measured
    )


@pytest.mark.parametrize(
    ("repeated", "shared", "verdict"), [(0.5, 0.5, HOLDS), (2.0, 0.5, DEPENDS), (2.0, 0.95, FAILS)]
)
def test_decoding_depends_on_the_repeat(
    repeated: float, shared: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = times_of(MHA=1.0, GQA=shared, MQA=shared, GQA_repeated=repeated, MQA_repeated=repeated)
    monkeypatch.setattr(claims, "in_turn", clock)
    claim, table = claims.decoding([13], rounds=1)
    assert claim.verdict == verdict and f"GQA {1 / shared:.2f}, GQA, repeated {1 / repeated:.2f}" in claim.measured
    assert len(table.rows) == 5


def test_repeated_or_not_a_decode_step_is_one_function() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 6, 1, 5), torch.randn(2, 1, 2, 11, 5)
    torch.testing.assert_close(claims._repeated(q, k, v), hw.attend(q, k, v, mask=hw.Causal()))


def verdict_of(word: str, found: tuple[Claim, ...]) -> str:
    return next(claim.verdict for claim in found if word in claim.claim)


JUDGED = tomllib.loads(Path(__file__).with_name("judged.toml").read_text(encoding="utf-8"))["rows"]


@every("scores, word, verdict, measured", JUDGED)
def test_a_claim_is_judged_by_what_was_measured(scores: dict[str, Any], word: str, verdict: str, measured: str) -> None:
    claim = next(claim for claim in judged(all_comparisons(**scores)) if word in claim.claim)
    assert claim.verdict == verdict and measured in claim.measured


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(claims, "compare", lambda *given: all_comparisons())
    monkeypatch.setattr(claims, "COUNTED", {"split heads": split_heads})
    return run_claims(tmp_path, "headwise compare claims")


def test_the_ledger_has_what_was_counted_judged_and_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(tmp_path, monkeypatch)
    assert [claim.verdict for claim in found.claims] == [
        FAILS, DEPENDS, HOLDS, HOLDS, FAILS, HOLDS, FAILS, *[NOT_RUN] * len(ELSEWHERE),
    ]  # fmt: skip
    assert found.machine == machine() and found.machine["torch"] == torch.__version__
    assert found.seeds == (0, 1, 2, 3, 4) and found.wall_seconds >= 0


def test_the_page_says_all_and_escapes_it() -> None:
    hostile = Claim("a | b <script> *c* W_O", "one\ntwo", HOLDS, "a_rule")
    page = claims_page(ledger((hostile,), all_comparisons()))
    assert "| a \\| b \\<script> \\*c\\* W\\_O | holds | one two |" in page
    assert "Measured by `headwise compare claims`, written by" in page and "- cores: 2" in page
    assert "| this | 12,345 | 0.0123 |" in page and "| that | 7 | 1,234 |" in page
    assert "`headwise compare sharing`. On made-up data, 7 steps, seeds 0 to 2." in page
    assert "Took 1.5 minutes, and 2.5 minutes of processor time." in page


def test_the_committed_page_is_the_output_of_its_command() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith("# What is claimed, and what is so\n\nMeasured by `headwise compare claims`, written by")
    assert "Seeds 0 to 4." in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    verdicts = {
        row[0][2:].replace("\\_", "_"): row[1]
        for row in rows
        if len(row) == 3 and row[1] in (HOLDS, FAILS, DEPENDS, NOT_RUN)
    }
    counted = [split_heads()[0], parameters_with_heads()[0], heads_of_models()[0]]
    ours = [*counted, *judged(all_comparisons()), *ELSEWHERE]
    for claim in ours:
        assert claim.claim in verdicts, claim.claim
    assert len(verdicts) == len(ours) + 4  # FLOPs, the forms of the course, its wrapper as printed, decoding
    for claim in (*counted, *ELSEWHERE):  # these do not depend on the machine
        assert verdicts[claim.claim] == claim.verdict
        assert claims_page(ledger((claim,), ())).split("| --- | --- | --- |\n")[1].splitlines()[0] in page


def test_the_page_of_the_bugs_is_the_output_of_its_script() -> None:
    entries = [shown(bug_named(bug), None) for bug in catalogue() if bug_named(bug).untrained]
    lines = bugs_page(entries).splitlines()
    page = (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8").splitlines()
    assert len(entries) > 3 and lines[:7] == page[:7]  # the heading and the rule; figures come after it
    for line in lines[10:]:
        assert line in page
