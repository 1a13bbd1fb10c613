"""The exercises as notebooks, and their check, which runs in the notebook itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.files import write_whole
from headwise.table import escaped
from headwise.teach.bugs import speaker
from headwise.teach.course import HINTS, told
from headwise.teach.exercises import Exercise, choice, exercises, find_exercise, mark_names

# Tries that failed, of this notebook, by the number of the exercise. A notebook that is started again begins anew.
_tries: dict[int, int] = {}


class Told:
    """A verdict as a notebook shows it."""

    def __init__(self, lines: list[str], passed: bool) -> None:
        self.lines, self.passed = lines, passed

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        first, *rest = map(escaped, self.lines)
        sign = "\u2713" if self.passed else "\u2717"  # a check mark, a cross
        return f"<p><strong>{sign} {first}</strong></p>" + "".join(f"<p>{line}</p>" for line in rest)


def check(number: int, names: Mapping[str, Any], language: str = "en") -> Told:
    """Mark exercise `number` by the names of a notebook, `globals()`; each try that fails brings the next hint."""
    exercise = find_exercise(number)
    verdict = mark_names(exercise, names, choice(names.get("answer")), language)
    if verdict.status != "passed":
        was_tried = verdict.status != "open"  # that is an exercise which is not filled in yet
        _tries[number] = _tries.get(number, 0) + was_tried  # a bool counts as 0 or 1
    step = min(_tries.get(number, 0), HINTS)
    # The command with which the last hint shows the solution.
    lines = told(exercise, verdict, language, step, f"{exercise.name}.ipynb", "headwise learn")
    return Told(lines, verdict.status == "passed")


def write_notebooks(folder: Path, language: str) -> list[Path]:
    """A notebook for each exercise, in a folder beside the figures; one that is there already stays as it is.

    Returns the paths of all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for exercise in exercises():
        path = folder / f"{exercise.name}.ipynb"
        paths.append(path)
        if not path.exists():
            write_whole(path, json.dumps(notebook(exercise, language), indent=1, ensure_ascii=False) + "\n")
    return paths


def notebook(exercise: Exercise, language: str, solved: bool = False) -> dict[str, Any]:
    """The notebook of an exercise, in Jupyter's format 4.5: text, question, answer, blank, check.

    solved  with the answer and the whole code in it
    """
    texts, say = exercise.texts[language], speaker(language)
    text = f"# {exercise.heading(language)}\n\n{texts['text'].strip()}"
    if exercise.figure:
        text += f"\n\n![{texts['title']}](../{exercise.figure_file(language)})"
    question = f"**{say('question')}**\n\n{texts['question'].strip()}"
    guess = exercise.answer if solved else ""
    marking = f'from headwise.teach.notebook import check\n\ncheck({exercise.number}, globals(), "{language}")'
    cells = [
        _cell("markdown", text),
        _cell("markdown", question),
        _cell("code", f'answer = "{guess}"  # {say("choose")}'),
        _cell("code", exercise.code(language, solved).rstrip()),
        _cell("code", marking),
    ]
    if exercise.name_of_class:  # a class that `headwise.check` can read: it is asked, too
        engine = (
            f'import headwise as hw\n\nhw.check({exercise.name_of_class}, causal={exercise.causal}, lang="{language}")'
        )
        cells += [_cell("markdown", say("notebook_engine")), _cell("code", engine)]
    # The format wants ids that are unique within a notebook.
    cells = [{**cell, "id": f"cell-{exercise.number}-{place}"} for place, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _cell(kind: str, source: str) -> dict[str, Any]:
    run: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}  # None: not run yet
    return {"cell_type": kind, "metadata": {}, "source": source, **run}
