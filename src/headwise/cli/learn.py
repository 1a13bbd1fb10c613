"""`headwise learn`."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Exit

from headwise.cli.app import COURSE, asked_language, command, language, out, print_json, speak, wants_json
from headwise.cli.check import show_heads, tell_unheld
from headwise.cli.train import free_folder
from headwise.errors import HeadwiseError
from headwise.words import refusal

if TYPE_CHECKING:
    from headwise.teach.course import Course
    from headwise.teach.exercises import Exercise

TRAINED = 11  # the number of the exercise whose class --train lets learn the verbs
LOOK = 0.3  # seconds between two looks at a file that is watched


@command()
def learn(
    folder: Path | None = None,
    watch: bool = False,
    reset: int | None = None,
    solution: int | None = None,
    notebook: bool = False,
    train: bool = False,
    steps: int | None = None,
) -> None:
    """Learn attention in 18 small exercises, in English or Spanish.

    The first call makes the exercises. Each later one checks your work, names the bug, gives a hint and opens the next.
    Exit code 1 says that an exercise is not right yet.
    """
    modes = {"--watch": watch, "--reset": reset, "--solution": solution, "--notebook": notebook, "--train": train}
    modes |= {"--steps": None if train else steps, "--json": watch and wants_json()}  # where they do not belong
    chosen = [option for option, value in modes.items() if value is not None and value is not False]
    if len(chosen) > 1 or "--steps" in chosen:
        raise refusal("not_together", value=", ".join(chosen))
    course, exercise, new = _open(folder, solution if reset is None else reset)
    speak(course.language)
    if not (new or notebook) and exercise is None:  # else no file of the learner runs
        tell_unheld(course.language)
    if reset is not None and exercise is not None:
        backup, path = str(course.reset(exercise)), str(course.path(exercise))
        _tell(course, "reset", {"exercise": reset, "file": path, "backup": backup})
    elif solution is not None and exercise is not None:
        code = exercise.code(course.language).rstrip("\n")
        if wants_json():
            print_json("solution", {"exercise": solution, "solution": code})
        else:
            out.print(code)
    elif notebook:
        from headwise.teach.notebook import write_notebooks

        place = course.folder / "notebooks"
        paths = [str(path) for path in write_notebooks(place, course.language)]
        _tell(course, "notebooks", {"folder": str(place), "count": len(paths), "notebooks": paths})
    elif train:
        _train(course, steps)
    elif watch:
        _watch(course)
    else:
        document = _step(course, new, quiet=wants_json())
        if wants_json():
            print_json("learn", document)
        if document["status"] not in ("new", "done"):  # done: what was marked is right, and the next may be open
            raise Exit(1)


def _open(folder: Path | None, number: int | None) -> tuple[Course, Exercise | None, bool]:
    """The course, the exercise that was named, and is the course new? Inside its folder no name is needed."""
    from headwise.teach.course import PROGRESS, open_course
    from headwise.teach.exercises import exercises, find_exercise

    exercise = None if number is None else find_exercise(number, language())
    inside = Path(PROGRESS).exists() and Path(exercises()[0].file).exists()
    place = folder or (Path() if inside else COURSE)
    of_new = None if (place / PROGRESS).exists() else language()  # a course that is there keeps its own
    course, new = open_course(place, asked_language() or of_new)
    return course, exercise, new


def _tell(course: Course, kind: str, document: dict[str, Any]) -> None:
    """A document as JSON of its kind, or in the phrase of that key."""
    if wants_json():
        print_json(kind, document)
    else:
        out.print(course.words[kind].format(**document))


def _command(course: Course, *options: str) -> str:
    folder = [] if course.folder in (COURSE, Path()) else [str(course.folder)]
    return shlex.join(["headwise", "learn", *folder, *options])


def _step(course: Course, new: bool, quiet: bool = False, asked: bool = True) -> dict[str, Any]:
    """Mark from the current exercise on, as far as they are right, and open the next; what a program should know."""
    from headwise.teach.course import told
    from headwise.teach.exercises import exercises

    marked: list[dict[str, Any]] = []

    def say(text: str) -> None:
        if not quiet:
            out.print(text)

    if new:
        say(course.words["welcome"].format(count=len(exercises()), folder=course.folder) + "\n")
    while not new and (exercise := course.current):
        verdict = course.mark(exercise, asked)
        if marked and verdict.status == "open":
            break  # it has just been opened
        due = course.hint(exercise)
        lines = told(exercise, verdict, course.language, due, str(course.path(exercise)), _command(course))
        hint = exercise.hint(course.language, due, verdict.evidence) if due else None
        marked.append(
            {"exercise": exercise.number, "file": str(course.path(exercise)), **asdict(verdict), "hint": hint}
        )
        say("\n".join(lines) + "\n")
        if verdict.status != "passed":
            return _document(course, marked, verdict.status)
    if (exercise := course.current) is None:
        say(course.words["all_done"].format(count=len(exercises()), command=_command(course, "--train")))
        return _document(course, marked, "done")
    if not new:
        say(course.words["next"].format(title=exercise.heading(course.language)))
    say(course.words["how"].format(file=course.path(exercise), command=_command(course)))
    return _document(course, marked, "new" if new else "done")


def _document(course: Course, marked: list[dict[str, Any]], status: str) -> dict[str, Any]:
    following = course.current
    return {
        "folder": str(course.folder),
        "language": course.language,
        "status": status,
        "marked": marked,
        "passed": course.passed,
        "next": None if following is None else str(course.path(following)),
    }


def _watch(course: Course) -> None:
    """Mark at each save, until all are right or Ctrl-C."""
    if course.current is None:
        _step(course, new=False)  # which says so
        return
    out.print(course.words["watching"].format(folder=course.folder))
    seen: bytes | None = None
    while (exercise := course.current) is not None:
        content = _content(course, exercise)
        if content is None or content == seen:
            time.sleep(LOOK)
            continue
        seen = content
        _step(course, new=False, asked=False)
        out.print("")
        if course.current is not exercise and course.current is not None:  # the next is marked once it is saved
            seen = _content(course, course.current)


def _content(course: Course, exercise: Exercise) -> bytes | None:
    """What its file holds; None where it is not there, as between the two steps in which some editors save."""
    with suppress(FileNotFoundError):
        return course.path(exercise).read_bytes()
    return None


def _train(course: Course, steps: int | None) -> None:
    """Let the class of exercise 11 learn, and report its heads."""
    from headwise.teach.check import check, read_target
    from headwise.teach.exercises import find_exercise
    from headwise.teach.subject import Options

    exercise = find_exercise(TRAINED)
    place = course.place_of_class(exercise)
    if not check(place, causal=exercise.causal, lang=course.language).right:
        raise HeadwiseError(course.words["not_yet"].format(file=course.path(exercise), command=_command(course)))
    target = read_target(place, Options(exercise.causal, lang=course.language))
    document = show_heads(free_folder(course.folder / "model"), target, steps)
    if wants_json():
        print_json("learned", document)
