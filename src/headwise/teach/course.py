"""A learner's folder: exercise files, figures, and `progress.json`. What the learner wrote is never written over.

A file that is still exactly as it was made is nobody's work: it may be made again, in another language.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import read_bytes, read_json, read_text, write_whole
from headwise.teach.catalogue import LANGUAGES, UNKNOWN, catalogue
from headwise.teach.check import check
from headwise.teach.exercises import WORDS, Exercise, check_language, exercises, find_exercise, room
from headwise.teach.marking import Mark, mark

PROGRESS = "progress.json"
HINTS = 3


@dataclass
class Course:
    """The exercises in a folder, and how far the learner is."""

    folder: Path
    language: str = "en"
    passed: list[int] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)  # of exercises that are not right yet, by their number

    @property
    def words(self) -> dict[str, str]:
        return WORDS[self.language]

    @property
    def current(self) -> Exercise | None:
        """The first exercise that is not right yet."""
        return next((exercise for exercise in exercises() if exercise.number not in self.passed), None)

    def path(self, exercise: Exercise) -> Path:
        return self.folder / exercise.file

    def save(self) -> None:
        content = {"language": self.language, "passed": sorted(self.passed), "tries": self.tries}
        write_whole(self.folder / PROGRESS, json.dumps(content, indent=2) + "\n")

    def write_files(self) -> None:
        """Every file that is missing, and those that nobody has touched, in the language of the course."""
        for exercise in exercises():
            path, blank = self.path(exercise), exercise.source(self.language)
            if not path.exists() or (read_bytes(path) != blank.encode() and self._untouched(exercise)):
                write_whole(path, blank)
            if exercise.figure:
                picture = self.folder / exercise.figure_file(self.language)
                picture.parent.mkdir(exist_ok=True)
                if not picture.exists():
                    write_whole(picture, room(exercise.figure_file(self.language)).read_bytes())

    def _untouched(self, exercise: Exercise) -> bool:
        """Is the file exactly as it was made, in some language?"""
        made = (exercise.source(language).encode() for language in LANGUAGES)
        return read_bytes(self.path(exercise)) in made

    def mark(self, exercise: Exercise, asked: bool = True) -> Mark:
        """Mark one file and keep what comes of it.

        No try that brings a hint: a file that nobody has touched, and, unless it was `asked` for, one with a blank.
        """
        verdict = mark(exercise, read_text(self.path(exercise)), self.language)
        if verdict.status == "wrong" and not verdict.bugs and exercise.name_of_class:
            verdict = self._named_by_check(exercise, verdict)
        if verdict.status == "passed":
            self.passed = sorted({*self.passed, exercise.number})
            self.tries.pop(str(exercise.number), None)
        else:
            self.passed = [number for number in self.passed if number != exercise.number]
            times = self.tries.get(str(exercise.number))
            counts = verdict.status != "open" or (asked and times is not None and not self._untouched(exercise))
            self.tries[str(exercise.number)] = (times or 0) + counts
        self.save()
        return verdict

    def _named_by_check(self, exercise: Exercise, verdict: Mark) -> Mark:
        """The verdict with the bugs that `headwise.check` finds, which knows more of them, and other styles of code."""
        target = f"{self.path(exercise).resolve()}:{exercise.name_of_class}"
        checked = check(target, causal=exercise.causal, lang=self.language)
        findings = [finding for finding in checked.findings if finding.bug != UNKNOWN]
        if not findings:
            return verdict
        bugs = tuple(finding.bug for finding in findings)
        fix = " ".join(finding.fix for finding in findings)
        return replace(verdict, bugs=bugs, line=findings[0].line, quoted=findings[0].quote, fix=fix)

    def hint(self, exercise: Exercise) -> int:
        """Which hint is due, from 1; 0 for none: the first look at a blank has none."""
        return min(self.tries.get(str(exercise.number), 0), HINTS)

    def reset(self, exercise: Exercise) -> Path:
        """Make a file as it was at first; returns where the learner's version is kept."""
        path = self.path(exercise)
        backups = self.folder / "backup"
        backups.mkdir(exist_ok=True)
        number = 1
        while (backup := backups / f"{exercise.name}-{number}.py").exists():
            number += 1
        write_whole(backup, read_bytes(path) if path.exists() else b"")
        write_whole(path, exercise.source(self.language))
        self.passed = [passed for passed in self.passed if passed != exercise.number]
        self.tries.pop(str(exercise.number), None)
        self.save()
        return backup


def open_course(folder: Path, language: str | None) -> tuple[Course, bool]:
    """The course in a folder, made there if need be; and whether it is new."""
    if language is not None:
        check_language(language)
    if folder.exists() and not folder.is_dir():
        raise HeadwiseError(f"{folder} is a file; pass a folder")
    path = folder / PROGRESS
    new = not path.exists()
    if new and folder.exists() and any(folder.iterdir()):
        raise HeadwiseError(f"{folder} is not empty and holds no exercises; pass another folder")
    course = Course(folder, **({} if new else _read(path)))
    course.language = language or course.language
    folder.mkdir(parents=True, exist_ok=True)
    course.write_files()
    course.save()
    return course, new


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        course = Course(path.parent, **content)
        check_language(course.language)
        for number in [*course.passed, *map(int, course.tries)]:
            find_exercise(number)
        _ = [times + 0 for times in course.tries.values()]
    except (ValueError, TypeError, AttributeError) as error:
        raise HeadwiseError(f"{path} is damaged ({error}); remove it: the exercises stay as they are") from None
    return dict(content)


def told(exercise: Exercise, verdict: Mark, language: str, step: int, file: str, command: str) -> list[str]:
    """What a learner reads of a verdict, line by line; `step` is the number of the hint that is due, 0 for none."""
    words, texts = WORDS[language], exercise.texts[language]
    lines = [words[verdict.status].format(number=exercise.number, title=texts["title"], file=file)]
    if verdict.status == "passed":
        right = "guess_right" if verdict.guess == exercise.answer else "guess_wrong"
        return [*lines, words[right].format(guess=verdict.guess, answer=exercise.answer, reveal=texts["reveal"])]
    lines.append(f"  {verdict.evidence}")
    if verdict.bugs:
        known = [f"{catalogue()[bug].name(language)} ({bug})." for bug in verdict.bugs if bug in catalogue()]
        lines.append(f"  {words['bug'].format(bugs=' '.join([*known, verdict.fix]))}")
    elif verdict.status == "wrong":
        lines.append(f"  {words['unknown_bug']}")
    if verdict.line and verdict.quoted:
        text = words["line" if verdict.status == "wrong" else "error_line"]
        lines.append(f"  {text.format(line=verdict.line, quoted=verdict.quoted)}")
    if step:
        lines.append(f"  {words['hint'].format(step=step, steps=HINTS, hint=texts['hints'][step - 1])}")
    if step == HINTS:
        lines.append(f"  {words['last_hint'].format(command=f'{command} --solution {exercise.number}')}")
    return lines
