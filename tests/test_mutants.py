"""What `make mutants` tries and where: its own parts, without a campaign."""

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


def test_the_files_that_it_names_are_there() -> None:
    for folder, patterns in (("src/headwise", mutants.SOURCES), ("tests", mutants.TESTS)):
        for pattern in patterns:
            assert list((mutants.ROOT / folder).glob(pattern)), pattern
