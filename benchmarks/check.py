"""What `headwise check` says of every case of the tests, and of every pair of bugs: the table of docs/check.md."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "checker")]

import numpy as np  # noqa: E402
from casebook import changed_lines, judge, line_of, versions  # noqa: E402

from headwise.checker.bugs import catalogue, changes_of  # noqa: E402
from headwise.checker.form import Masks, Weights, compute  # noqa: E402
from headwise.checker.reading import Reading  # noqa: E402
from headwise.checker.search import Case, Search, close  # noqa: E402

PAGE = ROOT / "docs" / "check.md"
AT_A_STOP = ("raises", "length-fixed")  # whose line is that of the error


RNG = np.random.default_rng(0)
DRAWN = {role: RNG.normal(size=(30, 30)) * 0.25 for role in "qkvo"}
BIASES = {role: RNG.normal(size=30) * 0.4 for role in "qkvo"}
LAYER = Weights(5, 5, DRAWN, BIASES)
Q, K, V = (RNG.normal(size=(3, 7, 30)) for _ in range(3))


def pairs_of_bugs() -> Iterator[tuple[tuple[str, str], Case]]:
    """Two bugs at once in the correct form's own style, where neither hides the other."""
    masks, paired = Masks(causal=True), []
    for bug in catalogue().values():
        if not bug.id.startswith(("group", "padding", "mask-head", "rope", "alibi")):
            paired += [(bug.id, change) for change in itertools.islice(changes_of(bug, {}, [-1.0]), 1)]
    with np.errstate(all="ignore"):
        for (a, first), (b, second) in itertools.combinations(paired, 2):
            changes = ({**first, **second}, first, second)
            both, *alone = (compute(LAYER, (Q, K, V), masks, change).out for change in changes)
            hidden = any(out.shape == both.shape and close(both, out) for out in alone)
            if "norm-missing" in (a, b) and (a + b).count("mask"):  # without a softmax, 0 is what forbids
                continue
            if not set(first) & set(second) and np.isfinite(both).any() and not hidden:
                yield (a, b), Case("plain", (Q, K, V), masks, {"": both})


def bugs_of(case: Case) -> set[str]:
    return set(Search([0.0, 1e-9, -1.0], 60).explain([Reading(LAYER)], [case]).bugs)


def outcome(bugs: set[str], right: bool | None, named: set[str]) -> str:
    if not bugs:
        return "correct, found right" if right else "false alarms"
    if right is not False:
        return "missed"
    return "found and named" if named == bugs else "found and not named"


def run(runs: int) -> dict[str, Any]:
    """Verdicts do not change from run to run: one is enough."""
    cases = list(versions())
    with ProcessPoolExecutor() as pool:
        verdicts = list(pool.map(judge, cases, chunksize=8))
        explanations = list(pool.map(bugs_of, [case for _, case in pairs_of_bugs()], chunksize=8))
    single: Counter[str] = Counter()
    for version, verdict in zip(cases, verdicts, strict=True):
        single[outcome(set(version.bugs), verdict.right, set(verdict.bugs))] += 1
    pairs: Counter[str] = Counter()
    for (pair, _), named in zip(pairs_of_bugs(), explanations, strict=True):
        pairs[outcome(set(pair), False, named)] += 1
    counts = {
        f"{len({version.style for version in cases})} styles": single,
        "all pairs of bugs, in one style": pairs,
        "**all**": single + pairs,
    }
    columns = ("found and named", "found and not named", "missed", "correct, found right", "false alarms")
    lines = [f"| cases | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for style, count in counts.items():
        lines.append(f"| {style} | {' | '.join(str(count[column]) for column in columns)} |")
    named = [(version, bug) for version in cases for bug in version.bugs if bug not in AT_A_STOP]
    hits = sum(line_of(version, bug) in changed_lines(version) for version, bug in named)
    told = f"The line that is named is one that the bug changed in {hits} of {len(named)} cases."
    lines += ["", told + " In most of the others the bug is", "something left out, which no line holds."]
    text = PAGE.read_text(encoding="utf-8")
    block = "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*?<!-- end -->", lambda _: block, text, flags=re.S), encoding="utf-8")
    return {"table": "\n".join(lines)}
