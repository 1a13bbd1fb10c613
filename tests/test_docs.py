"""The pages keep their word: their code runs, and gives the numbers that stand there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ("multi-head-attention.md", "multi-head-attention.es.md")


@pytest.mark.parametrize(("name", "examples"), [(CHAPTERS[0], 30), (CHAPTERS[1], 30), ("sharing.md", 25)])
def test_a_chapter_s_numbers_are_computed(name: str, examples: int) -> None:
    result = doctest.testfile(str(ROOT / "docs" / name), module_relative=False)
    assert result.attempted >= examples
    assert result.failed == 0


def test_both_chapters_run_the_same_code() -> None:
    def code(name: str) -> list[str]:
        lines = re.findall(r"^(?:>>>|\.\.\.).*", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
        return [re.sub(r'#.*|f".*"', "", line).rstrip() for line in lines]

    assert code(CHAPTERS[0]) == code(CHAPTERS[1])


def test_the_code_of_the_readme_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(block, names)  # our own page
    assert names["seen"]["L1.H3"].rows.entropy.shape == (509,)
    assert names["out"].shape == names["same"].shape == (2, 6, 7, 16)
    assert names["then"].shape == (1, 1, 96)


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 200
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), link
