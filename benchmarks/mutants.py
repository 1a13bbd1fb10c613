"""How many small changes of right code `check` finds: a sign, an axis, an index, a scale, an order, an offset.

    python benchmarks/mutants.py [COUNT]

A mutant that gives the numbers of the right code in every case that was tried is equal to it, and is not counted.
"""

from __future__ import annotations

import ast
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "checker")]

from casebook import Version, judge, loaded, versions  # noqa: E402

from headwise.checker.contract import Options, Target  # noqa: E402
from headwise.checker.examine import Examiner  # noqa: E402
from headwise.checker.source import kind_of  # noqa: E402

OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, Any]]:
    """Places of a tree: a node, one of its fields, and what the field becomes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            yield node, "op", OTHER[type(node.op)]()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node, "left", ast.BinOp(node.left, ast.Mult(), ast.Constant(2.0))
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 4:
            yield node, "value", node.value + 1
        if isinstance(node, ast.Call) and len(node.args) > 1:
            yield node, "args", [node.args[1], node.args[0], *node.args[2:]]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, "op", ast.UAdd()


def mutants(version: Version, count: int, rng: random.Random) -> Iterator[tuple[Version, int]]:
    """Some mutants of right code, each with the line that was changed."""
    lines = version.text.splitlines()
    places = [(n, f, v) for n, f, v in changes(ast.parse(version.text)) if hasattr(n, "lineno")]
    for node, field, value in rng.sample(places, min(count, len(places))):
        before = ast.unparse(node)
        kept = getattr(node, field)
        setattr(node, field, value)
        after = ast.unparse(ast.fix_missing_locations(node))
        setattr(node, field, kept)
        line = lines[node.lineno - 1]  # type: ignore[attr-defined]
        if line.count(before) == 1 and before != after:
            changed = [*lines]
            changed[node.lineno - 1] = line.replace(before, f"({after})")  # type: ignore[attr-defined]
            yield Version(version.style, node.lineno, (), "\n".join(changed) + "\n"), node.lineno  # type: ignore[attr-defined]


def numbers(version: Version) -> list[Any]:
    """What comes out of every case of its first trial. Raises what the code raises, and LookupError without a trial."""
    module, name, source = loaded(version)
    kind = kind_of(source.definitions.get(name)) or "layer"
    target = Target(vars(module)[name], name, kind, source, Options(), vars(module))
    examiner = Examiner(target)
    for built in examiner.builds():
        for trial in examiner.trials(built):
            return [out for *_, outputs in examiner.cases(trial, False) for out in outputs.values()]
    raise LookupError(f"{version.style}: nothing was tried")


def outcome(right: list[Any], mutant: Version, line: int) -> str:
    """equal, missed, named, placed (on the changed line), found (without name or line), or stopped: it does not run."""
    try:
        theirs = numbers(mutant)
    except Exception:  # a mutant may raise anything; the right code may not, and is run outside
        return "does not run"
    same = len(theirs) == len(right) and all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-4, equal_nan=True)
        for a, b in zip(theirs, right, strict=True)
    )
    if same:
        return "equal"
    verdict = judge(mutant)
    if verdict.right:
        return f"missed {mutant.style}:{line}"
    if verdict.right is None:
        return "not checked"
    if any(finding.line == line for finding in verdict.findings):
        return "found, on its line"
    return "found and named" if "unknown" not in verdict.bugs else "found"


def main(count: int) -> None:
    rng = random.Random(0)
    styles = [v for v in versions() if not v.bugs and not v.style.startswith(("rope", "cache_", "loop"))]
    counts: Counter[str] = Counter()
    for version in styles[:25]:
        right = numbers(version)
        for mutant, line in mutants(version, count // 25, rng):
            name = outcome(right, mutant, line)
            counts[name] += 1
            print(f"{mutant.style}:{line} {name}", file=sys.stderr, flush=True)
    for name, number in counts.most_common():
        print(f"{number:4} {name}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
