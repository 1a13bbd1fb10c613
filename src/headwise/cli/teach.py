"""`headwise learn`, `check` and `ladder`: what the teacher says, in the terminal."""

from __future__ import annotations

import ast
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Exit, Option

from headwise.checker.bugs import Verdict, speaker, words
from headwise.cli.app import (
    COURSE,
    Count,
    call,
    command,
    in_options,
    language,
    named_path,
    needs_torch,
    print_json,
    wants_json,
)
from headwise.errors import HeadwiseError
from headwise.table import Table
from headwise.view import Progress, screen
from headwise.words import Facts

if TYPE_CHECKING:
    from headwise.learn.course import Course
    from headwise.learn.exercises import Exercise


@command()
def check(
    target: Annotated[str | None, Argument(metavar="FILE[:NAME]")] = None,
    causal: bool | None = None,  # None: guessed, and said
    args: str = "",
    mapping: Annotated[str, Option("--map")] = "",
    listed: Annotated[bool, Option("--list")] = False,
    explain: Annotated[str | None, Option(metavar="BUG")] = None,
) -> None:
    """Name the bugs in your own attention.

    It is a class or a function, in torch, NumPy or plain Python. The same weights go through a correct form, and every
    known bug is tried on it: the one that gives your numbers is yours. The file runs in a process of its own, with a
    limit of time and memory. Exit code 0: right, 1: wrong, 2: it could not be checked.

    Args:
        target: A Python file, and what of it to check.
        causal: Ought it to be causal? Default: guessed, and said.
        args: Values for parameters whose names do not tell: 'd_in=48,n_blocks=2'.
        mapping: Where weights are: 'q=W_query,k=W_key,v=W_value,o=proj'.
        listed: Print the bugs that are known.
        explain: Print what is known of one bug: what is wrong, and the fix.

    Example: headwise check attention.py:MultiHeadAttention --causal
    """
    from headwise.checker.verdict import check as checked

    if listed or explain is not None:
        _tell_catalogue(explain)
        return
    lang = language()
    if target is None:
        raise HeadwiseError(words(lang)["no_target"])
    pairs = _values(args, lang)
    names = _pairs(mapping, lang)
    verdict = _in_options(
        checked(target, causal=causal, args=pairs, mapping=names, lang=lang)
    )
    if wants_json():
        print_json("check", verdict.to_json())
    else:
        screen.print(str(verdict))
    raise typer.Exit(verdict.exit_code)


def _tell_catalogue(explain: str | None) -> None:
    """The table of all known bugs; with the id of one, all that is known of it."""
    from headwise.checker.bugs import bug_named, catalogue

    lang = language()
    bugs = list(catalogue().values()) if explain is None else [bug_named(explain)]
    if wants_json():
        print_json(
            "bugs", {"bugs": [{"id": bug.id, **bug.texts[lang]} for bug in bugs]}
        )
    elif explain is None:
        headings = words(lang)["bug_id"], words(lang)["bug_name"]
        Table(headings, [(bug.id, bug.name(lang)) for bug in bugs]).print(
            screen, left=(0, 1)
        )
    else:
        (bug,), phrases = bugs, words(lang)
        screen.print(f"{bug.name(lang)} ({bug.id})")
        screen.print(f"  {bug.text('wrong', lang)}")
        screen.print(f"  {phrases['fix']}: {bug.text('fix', lang)}")


def _in_options(verdict: Verdict) -> Verdict:
    """The verdict with options where it names arguments: `causal=True` becomes `--causal`.

    The same of `others`, the verdicts on the other attentions of the file.
    """
    return replace(
        verdict,
        checked=tuple(map(in_options, verdict.checked)),
        not_checked=tuple(map(in_options, verdict.not_checked)),
        others=tuple(map(_in_options, verdict.others)),
    )


def _pairs(text: str, lang: str) -> dict[str, str]:
    """What --map says, "q=a, k=b" as {"q": "a", "k": "b"}."""
    pairs = {}
    for part in filter(str.strip, text.split(",")):
        name, _, value = map(str.strip, part.partition("="))
        if not (name and value) or name in pairs:  # "q", "=a"; "q=a, q=b"
            raise HeadwiseError(
                words(lang)["no_pair"].format(option="--map", text=text)
            )
        pairs[name] = value
    return pairs


def _values(text: str, lang: str) -> dict[str, Any]:
    """What --args says, "n=8, shape=(2, 3)" as {"n": 8, "shape": (2, 3)}: it is read like the arguments of a call."""
    no_pair = HeadwiseError(words(lang)["no_pair"].format(option="--args", text=text))
    try:
        call = ast.parse(f"_({text})", mode="eval").body
    except SyntaxError:
        raise no_pair from None
    # "n=1) + (2" is no call, "n=1)(m=2" calls what a call gives, and "8" has no name.
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.args
    ):
        raise no_pair
    values = {}
    for each in call.keywords:
        if each.arg is None or each.arg in values:  # "**names"; "n=8, n=4"
            raise no_pair
        try:
            values[each.arg] = ast.literal_eval(each.value)
        except (ValueError, TypeError):  # a name, "n=m"; a list as a key, "n={[1]: 2}"
            facts = {"name": each.arg, "text": ast.unparse(each.value)}
            raise HeadwiseError(words(lang)["no_value"].format(**facts)) from None
    return values


@command()
def learn(
    folder: Annotated[
        Path | None, Argument(parser=named_path, metavar="[FOLDER]")
    ] = None,
    solution: Annotated[int | None, Option(metavar="N")] = None,
) -> None:
    """Learn attention in 15 small exercises, in English or Spanish.

    The first call makes the exercises. Each later one checks your work, names the bug, gives a hint and opens the next.
    Exit code 1 says that an exercise is not right yet.

    Args:
        folder: Where the exercises are, or will be. Default: learn.
        solution: Print the solution of exercise N.

    Example: headwise learn --lang es, then edit learn/01_softmax.py, then headwise learn
    """
    course, exercise, new = _open(folder, solution)
    call.lang = course.language
    if exercise:
        code = exercise.code(course.language).rstrip("\n")
        if wants_json():
            print_json("solution", {"exercise": solution, "solution": code})
        else:
            screen.print(code)
    else:
        document = _step(course, new)
        if wants_json():
            print_json("learn", document)
        if document["status"] not in ("new", "done"):
            raise Exit(1)


def _open(
    folder: Path | None, number: int | None
) -> tuple[Course, Exercise | None, bool]:
    """The course in a folder, made there if need be; the exercise of that number, if any; and is the course new?

    Without a folder: the current one where it is a course itself, else COURSE.
    """
    from headwise.learn.course import PROGRESS, open_course
    from headwise.learn.exercises import exercises, find_exercise

    exercise = None if number is None else find_exercise(number, language())
    # The first exercise must lie there, too: other programs also write a progress.json.
    inside = Path(PROGRESS).exists() and Path(exercises()[0].file).exists()
    place = folder or (Path() if inside else COURSE)
    # None: a course that is there keeps its language
    of_new = None if (place / PROGRESS).exists() else language()
    course, new = open_course(place, call.lang or of_new)
    return course, exercise, new


def _command(course: Course) -> str:
    """What to type to go on with a course: `headwise learn FOLDER`."""
    # `_open` finds these two by itself
    folder = [] if course.folder in (COURSE, Path()) else [str(course.folder)]
    return shlex.join(["headwise", "learn", *folder])


def _step(course: Course, new: bool) -> Facts:
    """Mark from the current exercise on, as far as they are right, and open the next; gives what --json prints.

    new  the course was just made: nothing is marked
    """
    from headwise.learn.course import told
    from headwise.learn.exercises import exercises

    say = speaker(course.language)
    command = _command(course)
    count = len(exercises())
    marked: list[Facts] = []
    paragraphs = []
    # new: nothing was marked; done: all marked is right; else open, wrong or failed, as the last one marked
    status = "new" if new else "done"
    if new:
        paragraphs.append(say("welcome", count=count, folder=course.folder))
    # `mark` moves it on where the exercise is right
    while status == "done" and (exercise := course.current):
        verdict = course.mark(exercise)
        if marked and verdict.status == "open":
            # the learner has just come to this one by the one before: its blanks are no failure
            break
        # the number of the hint; 0 for none
        due = course.hint(exercise)
        file = course.path(exercise)
        hint = exercise.hint(course.language, due, verdict.function) if due else None
        marked.append(
            {"exercise": exercise.number, "file": file, **asdict(verdict), "hint": hint}
        )
        lines = told(exercise, verdict, course.language, due, str(file), command)
        paragraphs.append("\n".join(lines))
        if verdict.status != "passed":
            status = verdict.status
    exercise = course.current
    following = exercise and course.path(exercise)
    if exercise is None:
        paragraphs.append(say("all_done", count=count))
    elif status in ("new", "done"):
        heading = say("next", title=exercise.heading(course.language))
        how = say("how", file=following, command=command)
        paragraphs.append(how if new else f"{heading}\n{how}")
    if not wants_json():
        screen.print("\n\n".join(paragraphs))
    state = {"folder": course.folder, "language": course.language, "status": status}
    return state | {"marked": marked, "passed": course.passed, "next": following}


@command()
def ladder(width: Count = 64, heads: Count = 4) -> None:
    """Compute one layer in eight ways, compare them, and time them.

    One draw of weights and one text go through plain loops, microgpt's head loop, NumPy, the classes of courses,
    torch's module and our layer. Exit code 1 when one differs by more than rounding explains.

    Args:
        width: Width of the model.
        heads: Query heads.

    Example: headwise ladder --width 96 --heads 6
    """
    with needs_torch():
        from headwise.courses.ladder import run_ladder

    with Progress("computing in eight ways"):
        record = run_ladder(width, heads)
    if wants_json():
        print_json("ladder", vars(record))
    else:
        slowest = max(way.ms for way in record.ways)
        rows = []
        for way in record.ways:
            far = "not finite" if way.difference is None else f"{way.difference:.0g}"
            rows.append((way.name, far, way.ms, f"{slowest / way.ms:,.0f}x"))
        title = (
            f"One causal layer: {record.tokens} tokens, width {width}, {heads} heads"
        )
        note = f"Differences are the largest from the loops; rounding in float32 explains up to {record.tolerance:.0e}."
        Table(("way", "difference", "ms", "speed"), rows, title, note).print(screen)
        screen.say(
            "All eight compute the same."
            if record.agrees
            else "They do NOT compute the same."
        )
    if not record.agrees:
        raise typer.Exit(1)
