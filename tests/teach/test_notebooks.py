"""The exercises as notebooks: every one runs from top to bottom with its solution, in one kernel."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from invoking import Invoke
from notebooks import outputs, run_notebook

from headwise.teach.exercises import exercises
from headwise.teach.notebook import check, notebook


@pytest.mark.slow
def test_every_notebook_runs_with_its_solution() -> None:
    parts = [notebook(exercise, ("es", "en")[exercise.number % 2], solved=True) for exercise in exercises()]
    cells = run_notebook({**parts[0], "cells": [cell for part in parts for cell in part["cells"]]})
    marked = [outputs(cell) for cell in cells if "teach.notebook" in cell.source]
    assert len(marked) == len(exercises())
    for exercise, text in zip(exercises(), marked, strict=True):
        said = f"Exercise {exercise.number} is right" if exercise.number % 2 else f"El ejercicio {exercise.number} está"
        assert text.startswith(said), text
    verdicts = [outputs(cell) for cell in cells if "hw.check(" in cell.source]
    assert len(verdicts) == 3 and all("right=True" in text or "right" in text or "bien" in text for text in verdicts)


def test_notebooks_are_written_beside_the_files_and_never_over(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    first = invoke("learn", folder, "--notebook")
    assert first.code == 0 and "18 notebooks" in first.out
    path = folder / "notebooks" / "07_split.ipynb"
    document = json.loads(path.read_text(encoding="utf-8"))
    assert [cell["cell_type"] for cell in document["cells"]] == ["markdown", "markdown", "code", "code", "code"]
    picture = re.search(r"\]\((.+\.svg)\)", document["cells"][0]["source"])
    assert picture and (path.parent / picture[1]).resolve().is_file()
    assert "...  # fill in" in document["cells"][3]["source"]
    path.write_text("mine")
    assert len(json.loads(invoke("learn", folder, "--notebook", "--json").out)["notebooks"]) == 18
    assert path.read_text() == "mine"


def test_a_notebook_is_marked_and_helped() -> None:
    exercise = exercises()[3]
    names: dict[str, Any] = {}
    place = [bug["id"] for bug in exercise.bugs].index("scale-multiplied")
    exec(exercise.variants()[str(place)], names)
    assert "not answered" in repr(check(4, names))
    for step in (1, 2):
        told = check(4, {**names, "answer": " A"}, "en")
        assert not told.passed and "scale-multiplied" in repr(told) and f"Hint {step} of 3" in repr(told)
    assert "<strong>\u2717 Exercise 4" in told._repr_html_()
    exec(exercise.code(), names)
    assert check(4, {**names, "answer": "b"}, "es").passed
