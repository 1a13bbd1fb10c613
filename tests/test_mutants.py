"""What `make mutants` tries and where: its own parts, without a campaign."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest

SOURCE = """
Pair = int | str
LIMIT = 7

class Shape:
    rows: int | None = 3

    def area(self, scale: int = 2) -> int | float:
        if scale < 1:
            raise ValueError(f"{scale - 1} is below {2 - 1}")
        total = [
            self.rows * LIMIT
            for _ in range(scale)
        ]
        return sum(a + b for a, b in zip(total, total, strict=True))

    def __repr__(self) -> str:
        return "Shape" * 2
"""


def test_what_changes_no_result_is_not_tried() -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed; make test installs it")
    tried = [(mutant.line, mutant.operator) for mutant in mutants.mutants_of(SOURCE, Path("shape.py"))]
    lines = {line for line, _ in tried}
    assert lines == {3, 6, 8, 9, 12, 15}
    assert {name for line, name in tried if line == 9} == {
        "AddNot", "NumberReplacer", "ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_Lt_GtE",
    }  # fmt: skip
    assert {name for line, name in tried if line in (6, 8)} == {"NumberReplacer"}


def test_a_mutant_meets_what_reaches_its_statement() -> None:
    tree = ast.parse(SOURCE)
    assert mutants.statement_lines(tree, 9) == range(9, 10)  # the condition, not what it guards
    assert mutants.statement_lines(tree, 12) == range(11, 15)  # the statement of many lines
    assert mutants.statement_lines(tree, 8) == range(8, 16)  # a default: whatever calls the function
    assert mutants.statement_lines(tree, 6) == range(5, 19)  # a field: whatever uses the class
    assert mutants.statement_lines(tree, 3) == range(1, 19)


def test_only_what_is_called_is_changed_in_memory() -> None:
    def changed(was: str, becomes: str) -> list[str] | None:
        codes = [compile(text, "shape.py", "exec") for text in (SOURCE, SOURCE.replace(was, becomes))]
        pairs = mutants.function_pairs(*codes)
        return None if pairs is None else [old.co_name for old, _ in pairs]

    assert changed("a + b", "a - b") == ["area"]
    assert changed('"Shape" * 2', '"Shape" * 3') == ["__repr__"]
    for was, becomes in (("LIMIT = 7", "LIMIT = 8"), ("None = 3", "None = 4"), ("scale: int = 2", "scale: int = 3")):
        assert changed(was, becomes) is None, was


def test_the_files_that_it_names_are_there() -> None:
    for folder, patterns in (("src/headwise", mutants.SOURCES), ("tests", mutants.TESTS)):
        for pattern in patterns:
            assert list((mutants.ROOT / folder).glob(pattern)), pattern
