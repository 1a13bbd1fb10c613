"""The exercises, two files for each, read into records; and their marking.

`01_softmax.py` is the solution, whose lines that end in `#?` are what the learner writes: the blank has `...` in their
place. `01_softmax.toml` has the words, and the bugs: a bug is the solution with some text replaced.

Every known bug of an exercise, and every two of them, is run as a variant of the solution. The one that reproduces the
learner's numbers is the learner's bug. Where a line of the solution makes all numbers right, the bug stands in the line
that it replaces.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, combinations_with_replacement, product, takewhile
from pathlib import Path
from typing import Any

from headwise.checker.bugs import catalogue, plainly, speaker, words
from headwise.checker.repair import WORDS
from headwise.checker.sandbox import alone, require_torch, run_apart
from headwise.checker.search import close
from headwise.errors import HeadwiseError
from headwise.files import packaged, read_toml
from headwise.words import LANGUAGES, Facts

BLANK = re.compile(r"^\s*\.\.\.\s*(#.*)?$")  # a line that the learner must replace
WIDTH = 88  # columns of the text of an exercise
SECONDS = 30  # of the learner's process, the import of torch included
# The name of a class in the course of `courses.from_scratch` -> in its book, which the exercises use.
COURSE_NAMES = {
    "MultiHeadAttn": "MultiHeadAttention",
    "MultiHeadedAttentionWrapper": "MultiHeadAttentionWrapper",
}
SHOWN = 60  # characters of a value or call, at most
# seconds of the search for a line that makes a file right; a round choice
REPAIRING = 20.0


@dataclass(frozen=True)
class Exercise:
    """One exercise: `01_softmax` is number 1. The texts are those of the file, by their language."""

    number: int
    name: str
    solution: str  # with `#?`, in English
    # expressions that must give the same with the learner's code as with the solution
    calls: tuple[str, ...]
    answer: str  # to the question: a, b or c
    # language -> title, text, question, reveal, hints; notes: of the solution in English, and what they are here
    texts: dict[str, Facts]
    setup: str = ""  # code that makes the inputs, run before the calls
    figure: str | None = None
    checked: str | None = None  # class or function that `headwise.check` reads
    causal: bool = True  # ought it to be causal by itself?
    # Each has an id, `replace` (pairs of texts: of the solution, and what stands there with the bug) and a sentence
    # for each language.
    bugs: tuple[Facts, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.py"

    def code(self, language: str = "en", solved: bool = True) -> str:
        """The code of the file, whole, or with its blanks."""
        code = self.solution
        for note, translated in self.texts[language].get("notes", {}).items():
            code = code.replace(note, translated)
        if solved:
            return re.sub(r" *#\?$", "", code, flags=re.MULTILINE)
        # Lines with `#?` that follow one another become one blank, as far in as the first of them.
        blank = rf"\1...  # {speaker(language)('fill')}\n"
        return re.sub(
            r"^( *)[^\n]*#\?\n(?:[^\n]*#\?\n)*", blank, code, flags=re.MULTILINE
        )

    def heading(self, language: str) -> str:
        say = speaker(language)
        title = self.texts[language]["title"]
        return say("exercise", number=self.number, count=len(exercises()), title=title)

    def source(self, language: str) -> str:
        """The file that a learner gets: text, question, code."""
        text = self.texts[language]
        say = speaker(language)
        parts = [self.heading(language), wrapped(text["text"])]
        if self.figure:
            parts.append(say("picture", figure=self.figure_file(language)))
        parts += [say("question"), wrapped(text["question"])]
        head = "\n\n".join(parts)
        return f'"""{head}\n"""\n\nanswer = ""  # {say("choose")}\n\n\n{self.code(language, solved=False)}'

    def variants(self) -> dict[str, str]:
        """The solution with each bug, by its place in `bugs`, then with each two of them."""
        places = range(len(self.bugs))
        variants = {}
        for chosen in (*combinations(places, 1), *combinations(places, 2)):
            code = self.code()
            for place in chosen:
                # Where the first of two has changed this text, nothing is left to replace.
                for before, after in self.bugs[place]["replace"]:
                    code = code.replace(before, after)
            variants[" ".join(map(str, chosen))] = code
        return variants

    def written(self, source: str) -> list[tuple[int, str]]:
        """The lines of a file that are not handed out, in any language, and their numbers."""
        blanks = "\n".join(map(self.source, LANGUAGES)).splitlines()
        handed_out = {line.strip() for line in blanks}
        lines = enumerate(source.splitlines(), 1)
        return [
            (number, line) for number, line in lines if line.strip() not in handed_out
        ]

    def hint(self, language: str, step: int, function: str) -> str:
        """The hint of that number, from 1; where several functions are written, on the one at fault.

        The last one is what the solution has in the place of the blank.
        """
        hints = self.texts[language]["hints"]
        if function not in hints:
            function = next(iter(hints))
        if step <= len(hints[function]):
            return str(hints[function][step - 1])
        top = rf"^(?:def|class) {function}\b.*\n"
        code = re.split(top, self.solution, flags=re.M)[1]
        here = takewhile(lambda line: line[:1] in ("", " "), code.splitlines())
        lines = [
            line.removesuffix("#?").rstrip() for line in here if line.endswith("#?")
        ]
        return textwrap.dedent("\n".join(lines))

    def function_at(self, source: str, line: int | None, call: str = "") -> str:
        """The function or class at fault: that of a line of the file, else the first one that a call names."""
        top = r"^(?:def|class) (\w+)"
        above = "\n".join(source.splitlines()[: line or 0])
        names = re.findall(top, self.solution, re.M)
        called = [name for name in re.findall(r"\w+", call) if name in names]
        name = ["", *called[:1], *re.findall(top, above, re.M)][-1]
        return COURSE_NAMES.get(name, name)

    def figure_file(self, language: str) -> str:
        return f"figures/{self.figure}.{language}.svg"


def wrapped(text: str) -> str:
    """Paragraphs filled to the width of the file; indented lines stay as they are."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(
        part if part.startswith(" ") else textwrap.fill(part, WIDTH) for part in parts
    )


@cache
def exercises() -> tuple[Exercise, ...]:
    """All exercises in their order."""
    read = []
    for file in sorted(packaged("learn/exercises").glob("*.toml")):
        data = read_toml(f"learn/exercises/{file.name}")
        solution = file.with_suffix(".py").read_text(encoding="utf-8")
        texts = {language: data.pop(language) for language in LANGUAGES}
        data["bugs"] = [_worded(bug) for bug in data["bugs"]]
        read.append(
            Exercise(int(file.stem[:2]), file.stem, solution, texts=texts, **data)
        )
    return tuple(read)


def _worded(bug: Facts) -> Facts:
    """A bug with its sentences: where the file has none of its own, those of the catalogue."""
    known = catalogue().get(bug["id"])
    if known is None or LANGUAGES[0] in bug:
        return bug
    parts = ("wrong", "fix")
    return bug | {
        lang: " ".join(known.text(p, lang) for p in parts) for lang in LANGUAGES
    }


def find_exercise(number: int, language: str = "en") -> Exercise:
    """The exercise of that number, from 1."""
    if not 1 <= number <= len(exercises()):
        raise HeadwiseError(
            speaker(language)("no_exercise", number=number, count=len(exercises()))
        )
    return exercises()[number - 1]


# Marking.


@dataclass(frozen=True)
class Mark:
    """What is so in one file. `status` is passed, open (something is still to do), wrong, or failed (not checked)."""

    status: str
    guess: str | None = None  # the answer to the question; None where there is none yet
    line: int | None = None
    quoted: str = ""
    bugs: tuple[str, ...] = ()
    evidence: str = ""
    fix: str = ""
    function: str = ""  # that is at fault, or still blank
    right: str = ""  # what the solution has in place of the bugs


def mark(exercise: Exercise, source: str, language: str) -> Mark:
    """Mark a file, whose text is `source`. It runs in a process of its own, with limits, and never in this one."""
    say = speaker(language)
    try:
        answer = answer_of(source)
    except SyntaxError as error:
        # a null byte is an error without a line
        quoted = source.splitlines()[(error.lineno or 1) - 1].strip()
        evidence = plainly(f"{type(error).__name__}: {error.msg}", language)
        return Mark("failed", None, error.lineno, quoted, evidence=evidence)
    guess = choice(answer)
    lines = enumerate(source.splitlines(), 1)
    blanks = [number for number, line in lines if BLANK.match(line)]
    missing = [say("blank", line=number) for number in blanks]
    if guess is None:
        key = "which_letter" if answer else "unanswered"
        missing = [say(key, answer=answer, letter=say("letters")), *missing]
    if missing:
        first = next(iter(blanks), None)
        evidence = " ".join(missing)
        function = exercise.function_at(source, first)
        return Mark("open", guess, first, evidence=evidence, function=function)
    return judge(exercise, source, guess, language)


def judge(exercise: Exercise, source: str, guess: str | None, language: str) -> Mark:
    """The verdict on a file without blanks: its calls beside those of the solution and of the bugs, then its repair."""
    say = speaker(language)
    solution = exercise.code()
    require_torch(exercise.file, solution)
    job = {
        "name": exercise.file,
        "source": source,
        "setup": exercise.setup,
        "calls": exercise.calls,
        "variants": {"": solution, **exercise.variants()},
    }
    outcomes = run(job)
    # Where the process ended early, there is nothing of the solution.
    learner = outcomes.pop(exercise.file)
    wanted = outcomes.pop("", {"values": []})
    error = learner.get("error")
    line = None
    mended = {}
    call, difference = first_difference(
        exercise, learner["values"], wanted["values"], language
    )
    if not difference and error is None:
        return Mark("passed", guess)
    # single bugs come before two together
    alike = (
        name
        for name, wrong in outcomes.items()
        if wrong.get("error") == error and close(learner["values"], wrong["values"])
    )
    bugs = [exercise.bugs[int(place)] for place in next(alike, "").split()]
    ids = tuple(bug["id"] for bug in bugs)
    fix = " ".join(bug[language] for bug in bugs)
    status = "wrong"
    evidence = difference or plainly(str(error), language)
    if not difference:
        status = "failed"
        line = learner.get("line")
        if call := learner.get("call", ""):
            evidence = f"{shortened(call)}: {evidence}"
    function = exercise.function_at(source, line, call)
    if "end" in learner:
        evidence = say(learner["end"], seconds=SECONDS)
    else:
        calls = [text for text in exercise.calls if function in text]
        question = {
            **job,
            "calls": calls or exercise.calls,
            "lines": exercise.written(source),
            "right": [line for _, line in exercise.written(solution)],
        }
        mended = run(question, REPAIRING)
        line = mended.get("line", line)
    quoted = source.splitlines()[line - 1].strip() if line else ""
    right = mended.get("right", "").strip()
    # Of a line that is an edit of theirs, not of one of the solution; what is kept nowhere lacks a name, or return.
    is_edit = len(WORDS.findall(right)) == len(WORDS.findall(quoted))
    if right and ((not fix and is_edit) or right.endswith(quoted)):
        fix = say("repair", right=mended["right"])
    return Mark(status, guess, line, quoted, ids, evidence, fix, function, right)


def answer_of(source: str) -> str:
    """What `answer` is in a file, as text; "" where it is not there. Raises SyntaxError."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign([ast.Name("answer")], ast.Constant(answer)):
                return str(answer)
    return ""


def choice(value: object) -> str | None:
    """a, b or c, as people write them; None for anything else."""
    letter = str(value).strip(" ().").lower()  # "(B)." -> "b"
    return letter if letter in {*"abc"} else None


def run(job: Facts, seconds: float = SECONDS) -> Facts:
    """The outcomes of the calls of a job, made in a process of its own."""
    ended = run_apart("headwise.learn.exercises", job, seconds)
    if not ended.answer:
        end = "timeout" if ended.code is None else "ended"
        return {job["name"]: {"values": [], "error": "", "end": end}}
    return dict(json.loads(ended.answer))


def plain(value: Any) -> Any:
    """Numbers and lists of what a call gave; the name of its type where it is neither."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    is_plain = isinstance(value, int | float | str | None)
    return value if is_plain else f"<{type(value).__name__}>"


def outcome(code: str, name: str, setup: str, calls: Sequence[str]) -> Facts:
    """What the calls of a file's code give: `values`, and where one fails `call`, `error` and `line`."""
    values = []
    call = ""
    try:
        module = {"__name__": "exercise", "__file__": name}
        exec(compile(code, name, "exec"), module)
        # the calls find a class that has a course's name, too
        for theirs in COURSE_NAMES.keys() & module:
            module.setdefault(COURSE_NAMES[theirs], module[theirs])
        prepared = compile(setup, "setup", "exec")
        for call in calls:
            # fresh inputs for each call, so that code which writes into them spoils nothing
            inputs: Facts = {}
            exec(prepared, inputs)
            values.append(plain(eval(call, {**module, **inputs})))
    except BaseException as error:  # `exit()` too
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == name
        ]
        text = getattr(error, "msg", str(error))
        at = getattr(error, "lineno", None)
        # of an error without a text
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
        return {
            "values": values,
            "call": call,
            "error": text,
            "line": at or (lines[-1] if lines else None),
        }
    return {"values": values}


def first_difference(
    exercise: Exercise, values: list[Any], right: list[Any], language: str
) -> tuple[str, str]:
    """The call whose result differs first, and the first number that does, in words; two empty texts: all is close."""
    arrays = "numpy" in exercise.solution or "torch" in exercise.solution
    # an error ends the learner's early
    for text, got, wanted in zip(exercise.calls, values, right, strict=False):
        if close(got, wanted):
            continue
        call = shortened(text)
        say = speaker(language)
        # Down to the first number that differs, call[0][2], or to a list that ought to be longer, shorter or a number.
        while isinstance(got, list) and isinstance(wanted, list):
            shapes = _shape(got), _shape(wanted)
            if arrays and shapes[0] != shapes[1]:
                return text, say("shape", call=call, got=shapes[0], right=shapes[1])
            if len(got) != len(wanted):
                break
            pairs = enumerate(zip(got, wanted, strict=True))
            index = next(n for n, pair in pairs if not close(*pair))
            got = got[index]
            wanted = wanted[index]
            call = f"{call}[{index}]"
        key = "nothing" if got is None else "gives"
        shown = [_in_words(value, language) for value in (got, wanted)]
        return text, say(key, call=call, got=shown[0], right=shown[1])
    return "", ""


def _in_words(value: Any, language: str) -> str:
    """A number as it is, a list by its length, anything else by what it is."""
    text = f"{value:.4g}" if isinstance(value, float) else shortened(str(value))
    if isinstance(value, list):
        key = "a_list_of_lists" if len(_shape(value)) > 1 else "a_list"
        return speaker(language)(key, count=len(value), values=text)
    if text.startswith("<"):  # from `plain`
        kind = text.strip("<>")
        other = speaker(language)("other_kind", kind=kind)
        return words(language).get(f"kind_{kind}", other)
    return text


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        return ()
    return len(value), *_shape(value[0])


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def repair(job: Facts) -> Facts:
    """The line of the solution that makes all calls right in place of one or some of the learner's.

    The last of these as `line`, and what is `right` there; empty for none.
    """
    rest = job["name"], job["setup"], job["calls"]
    wanted = outcome(job["variants"][""], *rest)["values"]
    numbers = [number for number, _ in job["lines"]]
    stretches = combinations_with_replacement(numbers, 2)
    for (first, last), right in product(stretches, job["right"]):
        lines = job["source"].splitlines()
        lines[first - 1 : last] = [right]
        if close(outcome("\n".join(lines), *rest)["values"], wanted):
            return {"line": last, "right": right}
    return {}


def main() -> None:
    """In the process of its own: what the calls give, of the variants first, which are ours, then of the learner."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # the order counts: what runs first cannot be spoilt
    codes = {**job["variants"], job["name"]: job["source"]}

    def work() -> Facts:
        if "right" in job:
            return repair(job)
        return {
            name: outcome(code, name, job["setup"], job["calls"])
            for name, code in codes.items()
        }

    # the text of the solution says whether torch is wanted
    alone(job, job["variants"][""], work)


if __name__ == "__main__":
    main()
