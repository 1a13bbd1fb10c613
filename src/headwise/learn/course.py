"""A learner's folder: exercise files, figures, and `progress.json`. What the learner wrote is never lost.

A file that is still exactly as it was made is nobody's work: it may be made again, in another language.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwise.checker.bugs import UNKNOWN, Say, catalogue, speaker, words
from headwise.checker.verdict import check
from headwise.errors import HeadwiseError
from headwise.files import (
    packaged,
    read_bytes,
    read_json,
    read_text,
    write_json,
    write_whole,
)
from headwise.learn.exercises import (
    COURSE_NAMES,
    Exercise,
    Mark,
    exercises,
    find_exercise,
    mark,
)
from headwise.words import LANGUAGES

PROGRESS = "progress.json"
HINTS = (
    3  # of every exercise, as its data file has them; each is shown after another try
)


@dataclass
class Course:
    """The exercises in a folder, and how far the learner is."""

    folder: Path
    language: str = "en"
    passed: list[int] = field(default_factory=list)
    # of exercises that are not right yet; JSON keys are texts
    tries: dict[str, int] = field(default_factory=dict)

    @property
    def current(self) -> Exercise | None:
        """The first exercise that is not right yet."""
        left = (each for each in exercises() if each.number not in self.passed)
        return next(left, None)

    def path(self, exercise: Exercise) -> Path:
        return self.folder / exercise.file

    def save(self) -> None:
        content = {
            name: value for name, value in vars(self).items() if name != "folder"
        }
        write_json(self.folder / PROGRESS, content)

    def write_files(self) -> None:
        """Every file that is missing, and those that nobody has touched, in the language of the course."""
        for exercise in exercises():
            path = self.path(exercise)
            blank = exercise.source(self.language)
            # An untouched file in another language is written anew.
            if not path.exists() or (
                read_bytes(path) != blank.encode() and self._untouched(exercise)
            ):
                write_whole(path, blank)
            if exercise.figure:
                name = exercise.figure_file(self.language)
                picture = self.folder / name
                picture.parent.mkdir(exist_ok=True)
                if not picture.exists():
                    write_whole(picture, packaged(f"learn/{name}").read_bytes())

    def _untouched(self, exercise: Exercise) -> bool:
        """Is the file exactly as it was made, in some language?"""
        made = (exercise.source(language).encode() for language in LANGUAGES)
        return read_bytes(self.path(exercise)) in made

    def mark(self, exercise: Exercise) -> Mark:
        """Mark one file and keep what comes of it.

        Each try brings the next hint. A file that nobody has touched is no try, nor is one in which the question alone
        is open.
        """
        verdict = mark(exercise, read_text(self.path(exercise)), self.language)
        if verdict.status == "wrong" and not verdict.bugs and exercise.checked:
            verdict = self._named_by_check(exercise, verdict)
        key = str(exercise.number)
        passed = {*self.passed} - {exercise.number}
        times = self.tries.pop(key, 0)
        if verdict.status == "passed":
            passed.add(exercise.number)
        else:
            is_open = verdict.status == "open"
            # what is open without a line is the question alone
            is_idle = is_open and (not verdict.line or self._untouched(exercise))
            self.tries[key] = times + (not is_idle)
        self.passed = sorted(passed)
        self.save()
        return verdict

    def _named_by_check(self, exercise: Exercise, verdict: Mark) -> Mark:
        """The verdict with the bugs that `headwise.check` finds, which knows more of them, and other styles of code.

        The same verdict where it finds none.
        """
        path = self.path(exercise).resolve()
        name = exercise.checked
        for theirs, ours in COURSE_NAMES.items():
            if ours == name and f"class {theirs}" in read_text(path):
                name = theirs
        checked = check(f"{path}:{name}", causal=exercise.causal, lang=self.language)
        findings = [each for each in checked.findings if each.bug != UNKNOWN]
        if not findings:
            return verdict
        if not verdict.line:
            line = findings[0].line
            verdict = replace(verdict, line=line, quoted=findings[0].quote)
        fix = " ".join([*(each.fix for each in findings), verdict.fix]).strip()
        return replace(verdict, bugs=tuple(each.bug for each in findings), fix=fix)

    def hint(self, exercise: Exercise) -> int:
        """Which hint is due, from 1; 0 for none: the first look at a blank has none."""
        return min(self.tries.get(str(exercise.number), 0), HINTS)


def open_course(folder: Path, language: str | None) -> tuple[Course, bool]:
    """The course in a folder, made there if need be; and whether it is new."""
    # the course's own language, which counts where none is given, is not read yet
    say = speaker(language or "en")
    if folder.exists() and not folder.is_dir():
        raise HeadwiseError(say("course_is_file", folder=folder))
    path = folder / PROGRESS
    new = not path.exists()
    # What a first call that was killed has left is an exercise, or a name that begins with a dot.
    visible = {entry.name for entry in folder.glob("[!.]*")}
    if new and visible and visible.isdisjoint(each.file for each in exercises()):
        raise HeadwiseError(say("no_course", folder=folder))
    course = Course(folder) if new else _read(path, say)
    course.language = language or course.language
    folder.mkdir(parents=True, exist_ok=True)
    course.write_files()
    course.save()
    return course, new


def _read(path: Path, say: Say) -> Course:
    # Each line raises an error where the file was written by hand, and wrongly; a HeadwiseError is a ValueError.
    try:
        course = Course(path.parent, **read_json(path))
        words(course.language)
        # `+` takes a list alone
        for number in course.passed + list(map(int, course.tries)):
            find_exercise(number)
        list(map(operator.index, course.tries.values()))
    except (ValueError, TypeError, AttributeError) as error:
        raise HeadwiseError(say("damaged", path=path, error=error)) from None
    return course


def told(
    exercise: Exercise, verdict: Mark, language: str, due: int, file: str, command: str
) -> list[str]:
    """What a learner reads of a verdict, line by line.

    due      number of the hint that is due, from 1; 0 for none
    file     name of the learner's file or notebook
    command  the command line that shows the solution, but for the options
    """
    say = speaker(language)
    texts = exercise.texts[language]
    first = say(verdict.status, number=exercise.number, title=texts["title"], file=file)
    if verdict.status == "passed":
        answer = exercise.answer
        key = "guess_right" if verdict.guess == answer else "guess_wrong"
        line = say(key, guess=verdict.guess, answer=answer, reveal=texts["reveal"])
        return [first, line]
    lines = [verdict.evidence]
    if verdict.fix:
        # Ids of an exercise's own bugs are not in the catalogue: their sentence alone is shown, which is the fix.
        names = [
            f"{catalogue()[bug].name(language)} ({bug})."
            for bug in verdict.bugs
            if bug in catalogue()
        ]
        lines.append(say("bug", text=" ".join([*names, verdict.fix])))
    elif verdict.status == "wrong":
        lines.append(say("unknown_bug"))
    if verdict.quoted:
        key = "likely_line" if verdict.status == "wrong" else "error_line"
        lines.append(say(key, line=verdict.line, quoted=verdict.quoted))
    if verdict.status == "open" and not verdict.line:
        due = 0  # only the question is open, on which there are no hints
    if due:
        hint = exercise.hint(language, due, verdict.function)
        hint = (due == HINTS and verdict.right) or hint
        hint = hint.replace("\n", "\n      ")
        lines.append(say("hint", step=due, steps=HINTS, hint=hint))
    if due == HINTS:  # the last: the command that shows the solution is offered
        lines.append(say("last_hint", command=command, number=exercise.number))
    return [first, *(f"  {line}" for line in lines)]
