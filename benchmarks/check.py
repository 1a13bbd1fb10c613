"""What `headwise check` says of every case of the tests, and of every pair of bugs: the table of docs/check.md."""

from __future__ import annotations

import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "checker")]

from casebook import changed_lines, judge, line_of, versions  # noqa: E402
from test_check import explained as bugs_of  # noqa: E402
from test_check import pairs_of_bugs  # noqa: E402

PAGE = ROOT / "docs" / "check.md"
AT_A_STOP = ("raises", "length-fixed")  # whose line is that of the error


def outcome(bugs: set[str], right: bool | None, named: set[str]) -> str:
    if not bugs:
        return "correct, found right" if right else "false alarms"
    if right is not False:
        return "missed"
    return "found and named" if named == bugs else "found and not named"


def run(runs: int) -> dict[str, Any]:
    """Verdicts do not change from run to run: one is enough."""
    counts: dict[str, Counter[str]] = {}
    cases = list(versions())
    with ProcessPoolExecutor() as pool:
        verdicts = list(pool.map(judge, cases, chunksize=8))
        explanations = list(pool.map(bugs_of, [case for _, case in pairs_of_bugs()], chunksize=8))
    for version, verdict in zip(cases, verdicts, strict=True):
        style = version.style.split("_")[0]  # "loop_numpy" and its kin are one row
        counts.setdefault(style, Counter())[outcome(set(version.bugs), verdict.right, set(verdict.bugs))] += 1
    pairs = counts["all pairs of bugs, in one style"] = Counter()
    for (pair, _), named in zip(pairs_of_bugs(), explanations, strict=True):
        pairs[outcome(set(pair), False, named)] += 1
    columns = ("found and named", "found and not named", "missed", "correct, found right", "false alarms")
    lines = [f"| style | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    total: Counter[str] = sum(counts.values(), Counter())
    for style, count in [*counts.items(), ("**all**", total)]:
        lines.append(f"| {style} | {' | '.join(str(count[column]) for column in columns)} |")
    named = [(version, bug) for version in cases for bug in version.bugs if bug not in AT_A_STOP]
    hits = sum(line_of(version, bug) in changed_lines(version) for version, bug in named)
    told = f"The line that is named is one that the bug changed in {hits} of {len(named)} cases."
    lines += ["", told + " In most of the others the bug is", "something left out, which no line holds."]
    text = PAGE.read_text(encoding="utf-8")
    block = "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*?<!-- end -->", lambda _: block, text, flags=re.S), encoding="utf-8")
    return {"table": "\n".join(lines)}
