"""`headwise learn`, `check` and `bugs`: what the teacher says, in the terminal."""

from __future__ import annotations

import ast
import os
import re
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Exit, Option

from headwise.cli.app import (
    COURSE,
    UNITS,
    Count,
    File,
    Folder,
    SomeCount,
    asked_language,
    check_outputs,
    command,
    err,
    in_options,
    named_path,
    needs_torch,
    print_json,
    screen,
    speak,
    units_kept_in,
    wants_json,
)
from headwise.errors import HeadwiseError
from headwise.files import write_whole
from headwise.records import head_name
from headwise.table import Markup, Table, escaped, picture
from headwise.teach.bugs import Verdict, words
from headwise.words import Facts, refusal

if TYPE_CHECKING:
    from headwise.teach.bugs import Bug
    from headwise.teach.course import Course
    from headwise.teach.exercises import Exercise
    from headwise.teach.study import Shown


@command()
def check(
    target: Annotated[str, Argument(metavar="FILE[:NAME]")],
    causal: bool | None = None,  # None: guessed, and said
    args: str = "",
    mapping: Annotated[str, Option("--map")] = "",
    seconds: float = 20.0,
) -> None:
    """Name the bugs in your own attention.

    It is a class or a function, in torch, NumPy or plain Python. The same weights go through a correct form, and every
    known bug is tried on it: the one that gives your numbers is yours. The file runs in a process of its own, with a
    limit of time and memory. Exit code 0: right, 1: wrong, 2: it could not be checked.
    """
    from headwise.teach.check import check as checked

    lang = screen.lang
    pairs, names = _values(args, lang), _pairs(mapping, lang)
    verdict = _in_options(checked(target, causal=causal, args=pairs, mapping=names, lang=lang, seconds=seconds))
    if wants_json():
        print_json("check", verdict.to_json())
    else:
        screen.print(str(verdict))
    raise typer.Exit(verdict.exit_code)


def _in_options(verdict: Verdict) -> Verdict:
    """The verdict with options where it names arguments: `causal=True` becomes `--causal`.

    The same of `others`, the verdicts on the other attentions of the file.
    """
    checked, not_checked = (tuple(map(in_options, texts)) for texts in (verdict.checked, verdict.not_checked))
    others = tuple(map(_in_options, verdict.others))
    return replace(verdict, checked=checked, not_checked=not_checked, others=others)


def _pairs(text: str, lang: str) -> dict[str, str]:
    """What --map says, "q=a, k=b" as {"q": "a", "k": "b"}."""
    pairs = {}
    for part in filter(str.strip, text.split(",")):
        name, _, value = map(str.strip, part.partition("="))
        if not (name and value) or name in pairs:  # "q", "=a"; "q=a, q=b"
            raise HeadwiseError(words(lang)["no_pair"].format(option="--map", text=text))
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
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
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


LOOK = 0.3  # seconds between two looks at a file that is watched; with more the verdict comes later after a save


@command()
def learn(
    folder: Annotated[Path | None, Argument(parser=named_path, metavar="[FOLDER]")] = None,
    watch: bool = False,
    solution: Annotated[int | None, Option(metavar="N")] = None,
) -> None:
    """Learn attention in 18 small exercises, in English or Spanish.

    The first call makes the exercises. Each later one checks your work, names the bug, gives a hint and opens the next.
    Exit code 1 says that an exercise is not right yet.
    """
    if watch and (solution is not None or wants_json()):
        other = "--json" if solution is None else "--solution"
        raise HeadwiseError(f"--watch and {other} do not go together; pass one of them")
    course, exercise, new = _open(folder, solution)
    speak(course.language)
    if exercise is not None:
        code = exercise.code(course.language).rstrip("\n")
        if wants_json():
            print_json("solution", {"exercise": solution, "solution": code})
        else:
            screen.print(code)
    elif watch:
        _watch(course)
    else:
        document = _step(course, new)
        if wants_json():
            print_json("learn", document)
        # new: nothing was marked; done: all marked is right; else the last one marked is open, wrong or failed.
        if document["status"] not in ("new", "done"):
            raise Exit(1)


def _open(folder: Path | None, number: int | None) -> tuple[Course, Exercise | None, bool]:
    """The course in a folder, made there if need be; the exercise of that number, if any; and is the course new?

    Without a folder: the current one where it is a course itself, else COURSE.
    """
    from headwise.teach.course import PROGRESS, open_course
    from headwise.teach.exercises import exercises, find_exercise

    exercise = None if number is None else find_exercise(number, screen.lang)
    # The first exercise must lie there, too: other programs also write a progress.json.
    inside = Path(PROGRESS).exists() and Path(exercises()[0].file).exists()
    place = folder or (Path() if inside else COURSE)
    of_new = None if (place / PROGRESS).exists() else screen.lang  # None: a course that is there keeps its language
    course, new = open_course(place, asked_language() or of_new)
    return course, exercise, new


def _command(course: Course) -> str:
    """What to type to go on with a course: `headwise learn FOLDER`."""
    folder = [] if course.folder in (COURSE, Path()) else [str(course.folder)]  # `_open` finds these two by itself
    return shlex.join(["headwise", "learn", *folder])


def _step(course: Course, new: bool, asked: bool = True) -> Facts:
    """Mark from the current exercise on, as far as they are right, and open the next; gives what --json prints.

    new    the course was just made: nothing is marked
    asked  the learner ran the command; not where a file was saved under --watch, for a blank then counts as no try
    """
    from headwise.teach.course import told
    from headwise.teach.exercises import exercises

    marked: list[Facts] = []

    def say(text: str) -> None:
        if not wants_json():
            screen.print(text)

    def document(status: str) -> Facts:
        """Where the course stands once all that can be marked is marked."""
        following = None if course.current is None else course.path(course.current)
        state = {"folder": course.folder, "language": course.language, "status": status, "marked": marked}
        return state | {"passed": course.passed, "next": following}

    if new:
        say(course.words["welcome"].format(count=len(exercises()), folder=course.folder) + "\n")
    while not new and (exercise := course.current):  # `mark` moves it on where the exercise is right
        verdict = course.mark(exercise, asked)
        if marked and verdict.status == "open":
            break  # the learner has just come to this one by the one before: its blanks are no failure
        due, file = course.hint(exercise), course.path(exercise)  # the number of the hint; 0 for none
        hint = exercise.hint(course.language, due, verdict.evidence) if due else None
        marked.append({"exercise": exercise.number, "file": file, **asdict(verdict), "hint": hint})
        say("\n".join(told(exercise, verdict, course.language, due, str(file), _command(course))) + "\n")
        if verdict.status != "passed":
            return document(verdict.status)
    if (exercise := course.current) is None:
        say(course.words["all_done"].format(count=len(exercises())))
        return document("done")
    if not new:
        say(course.words["next"].format(title=exercise.heading(course.language)))
    say(course.words["how"].format(file=course.path(exercise), command=_command(course)))
    return document("new" if new else "done")


def _watch(course: Course) -> None:
    """Mark at each save, until all are right or Ctrl-C."""
    if course.current is None:
        _step(course, new=False)  # says that all are done
        return
    screen.print(course.words["watching"].format(folder=course.folder))
    seen: bytes | None = None  # what the file held when it was marked
    while (exercise := course.current) is not None:
        content = _content(course, exercise)
        if content is None or content == seen:
            time.sleep(LOOK)
            continue
        seen = content
        _step(course, new=False, asked=False)
        screen.print("")
        if course.current is not exercise and course.current is not None:  # the next is marked once it is saved
            seen = _content(course, course.current)


def _content(course: Course, exercise: Exercise) -> bytes | None:
    """What its file holds; None where it is not there, as between the two steps in which some editors save."""
    with suppress(FileNotFoundError):
        return course.path(exercise).read_bytes()
    return None


FOLDER = Path("runs") / "bugs"  # keeps the trained units where --out says nothing


@command()
def bugs(
    bug: Annotated[str | None, Argument(metavar="[ID]")] = None,
    seeds: Annotated[int, Option(min=3)] = 3,  # with fewer `study` refuses to tell a bug from chance
    steps: Count = 400,
    out: Folder = FOLDER,
    html: File = None,
    workers: SomeCount = None,
    train: bool = False,
) -> None:
    """List the bugs that learners write, and what training hides.

    Without an ID the catalogue; with one, what that bug is and does. With --train or --html the verb model is trained
    with it and without; after Ctrl-C the same command goes on where it was. `all` trains all.
    """
    from headwise.teach.bugs import bug_named, catalogue

    lang = screen.lang
    if (train and bug is None) or (html is not None and bug in (None, "all")):  # a page shows one bug
        raise refusal("which_bug")
    names = list(catalogue()) if bug in (None, "all") else [bug_named(bug).id]  # which refuses an unknown one
    trains = train or html is not None or bug == "all"
    if trains or out != FOLDER:  # where nothing is trained, what lies in the usual folder is no matter
        check_outputs((), {"--out": (out, UNITS)}, html=html)  # (): no file is read
    if not trains:
        _tell_bugs([bug_named(name) for name in names], bug is None)
        return
    with needs_torch():
        from headwise.teach.study import study
    with units_kept_in(out) as report:
        # os.cpu_count() is None where the system does not tell.
        comparison, shown = study(names, out, seeds, steps, workers or os.cpu_count() or 1, report, lang)
    # A bug that cannot be trained, or whose training fails, has neither a loss nor maps. Only one bug has a page.
    written = None if shown[0].loss is None else html
    if written is not None:
        _write_maps(written, shown[0], steps)
    if wants_json():
        print_json("hidden", {"bugs": shown, "comparison": comparison})
        return
    if len(shown) == 1:
        screen.print(_bug_text(bug_named(shown[0].bug)))
    screen.print("\n".join(f"{entry.bug}: {entry.sentence}" for entry in shown))
    if written is not None:
        screen.tell("tell.written", path=written)


def _tell_bugs(bugs: list[Bug], listed: bool) -> None:
    """The list of bugs, where they are `listed`; else what the one bug is. Standard error then says how to go on."""
    lang = screen.lang
    if wants_json():
        print_json("bugs", {"bugs": [{"id": bug.id, **bug.texts[lang]} for bug in bugs]})
    elif listed:
        screen.print("\n".join(f"{bug.id:<26} {bug.name(lang)}" for bug in bugs))  # the longest id has 25 characters
        err.print("\n" + words(lang)["of_the_list"])
    else:
        (bug,) = bugs
        screen.print(_bug_text(bug))
        # `untrained` says in one word why a bug cannot be trained: "cache" has the phrase `lacks_cache`. "": it can.
        lack = words(lang)[f"lacks_{bug.untrained}"] if bug.untrained else ""
        key, facts = ("untrained", {"why": lack}) if lack else ("to_train", {"bug": bug.id})
        err.print("\n" + words(lang)[key].format(**facts))


def _bug_text(bug: Bug) -> str:
    """What the catalogue says of one bug."""
    texts = (bug.text(what, screen.lang) for what in ("wrong", "symptom", "how", "fix"))
    return "\n  ".join([f"{bug.name(screen.lang)} ({bug.id})", *texts])


def _write_maps(path: Path, shown: Shown, steps: int) -> None:
    """A page with the maps of every head, without a bug and with it, side by side. Both models are trained for it."""
    from headwise.lab.experiments import SHAPE
    from headwise.teach.bugs import bug_named
    from headwise.teach.study import trained_maps
    from headwise.view.page import page

    lang, bug = screen.lang, bug_named(shown.bug)
    right, wrong, tokens = trained_maps(bug.id, steps)
    text = " ".join(tokens)
    rows = []
    for index, pair in enumerate(zip(right, wrong, strict=True)):  # all heads of layer 0, then those of layer 1
        name = head_name(*divmod(index, SHAPE["n_heads"]))
        # 132 pixels are a round choice, about 19 for each of the 7 tokens; the page, 46rem wide, has room for more.
        drawn = (picture(weights.tolist(), f"{name}: {text}", height=132) for weights in pair)
        # The page's security policy forbids styles in an element; bugs.css has the one that is taken out here.
        rows.append((name, *(Markup(re.sub(' style="[^"]*"', "", image)) for image in drawn)))
    told = [bug.text(what, lang) for what in ("wrong", "symptom", "fix")]
    body = f"<main><h1>{escaped(bug.name(lang))}</h1>" + "".join(f"<p>{escaped(line)}</p>" for line in told)
    headings = screen.phrase("bugs.head"), screen.phrase("bugs.correct"), bug.id
    body += f"<p><b>{escaped(shown.sentence)}.</b></p><p>{escaped(text)}</p>{Table(headings, rows).html()}</main>"
    write_whole(path, page("bugs", body, title=bug.name(lang), styles=("bugs.css",), lang=lang))
