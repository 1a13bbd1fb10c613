"""Marking: what the learner's code gives beside what the solution gives, and the bug that gives the same wrong numbers.

Every known bug of an exercise, and every two of them, is run as a variant of the solution. The one that reproduces the
learner's numbers is the learner's bug.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from headwise.teach.evaluate import outcome
from headwise.teach.exercises import BLANK, WORDS, Exercise
from headwise.teach.sandbox import run_apart

SECONDS = 30  # of the learner's process, the import of torch included
SHOWN = 60  # characters of a value or call, at most


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


def mark(exercise: Exercise, source: str, language: str) -> Mark:
    """Mark a file, whose text is `source`. It runs in a process of its own, with limits, and never in this one."""
    try:
        guess = guess_of(source)
    except SyntaxError as error:
        quoted = source.splitlines()[(error.lineno or 1) - 1].strip()
        return Mark("failed", None, error.lineno, quoted, evidence=f"SyntaxError: {error.msg}")
    blanks = [number for number, line in enumerate(source.splitlines(), 1) if BLANK.match(line)]
    if blanks or guess is None:
        words = WORDS[language]
        missing = [words["unanswered"]] * (guess is None) + [words["blank"].format(line=line) for line in blanks]
        return Mark("open", guess, blanks[0] if blanks else None, evidence=" ".join(missing))
    job = {
        "name": exercise.file,
        "source": source,
        "setup": exercise.setup,
        "calls": exercise.calls,
        "variants": {"": exercise.code(), **exercise.variants()},
    }
    outcomes = run(job)
    return judge(exercise, source, outcomes, guess, language)


def judge(exercise: Exercise, source: str, outcomes: dict[str, Any], guess: str | None, language: str) -> Mark:
    """The verdict on `outcomes`: the learner's under the file's name, the solution's under "", those of the bugs."""
    learner, right = outcomes.pop(exercise.file), outcomes.pop("", {"values": []})
    values = learner["values"]
    difference = first_difference(exercise, values, right["values"], language)
    if difference is None and "error" not in learner:
        return Mark("passed", guess)
    same = [
        name
        for name, known in outcomes.items()
        if close(values, known["values"]) and known.get("error") == learner.get("error")
    ]
    variant = same[0] if same else ""
    bugs = exercise.bugs_of(variant)
    status, evidence = ("wrong", difference) if difference else ("failed", error_of(learner, language))
    line, quoted = likely_line(exercise, source, variant) if difference else (learner.get("line"), "")
    if line and not difference:
        quoted = "".join(source.splitlines()[line - 1 : line]).strip()
    named = tuple(bug["id"] for bug in bugs)
    return Mark(status, guess, line, quoted, named, evidence, " ".join(bug[language] for bug in bugs))


def error_of(learner: Mapping[str, Any], language: str) -> str:
    """An error of the learner's code, with the call that fails."""
    if "end" in learner:
        return WORDS[language][learner["end"]].format(seconds=SECONDS)
    return f"{shortened(learner['call'])}: {learner['error']}" if learner["call"] else str(learner["error"])


def guess_of(source: str) -> str | None:
    """The value of `answer` in a file, a, b or c; None where it is another or not there. Raises SyntaxError."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "answer" for t in node.targets):
            return choice(node.value.value if isinstance(node.value, ast.Constant) else None)
    return None


def choice(value: object) -> str | None:
    """a, b or c, as people write them; None for anything else."""
    letter = str(value).strip(" ().").lower()
    return letter if letter in ("a", "b", "c") else None


def run(job: dict[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
    """The outcomes of a job of `evaluate`, run in a process of its own."""
    ended = run_apart("headwise.teach.evaluate", job, seconds)
    if ended.answer is None:
        end = "timeout" if ended.code is None else "ended"
        return {job["name"]: {"values": [], "error": "", "end": end}}
    outcomes: dict[str, Any] = json.loads(ended.answer)
    return outcomes


def close(a: Any, b: Any) -> bool:
    """Equal up to rounding in single precision; nan equals nan."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def first_difference(exercise: Exercise, values: list[Any], right: list[Any], language: str) -> str | None:
    """The first number that differs, in words; None where all is close."""
    words = WORDS[language]
    for call, got, wanted in zip(exercise.calls, values, right, strict=False):  # an error ends the learner's early
        if close(got, wanted):
            continue
        if got is None:
            return words["nothing"].format(call=shortened(call))
        shapes = _shape(got), _shape(wanted)
        if shapes[0] != shapes[1]:
            pairs = zip(shapes, (got, wanted), strict=True)
            what = [str(shape) if shape else shortened(str(value)) for shape, value in pairs]
            return words["shape" if all(shapes) else "gives"].format(call=shortened(call), got=what[0], right=what[1])
        path = ""
        while isinstance(got, list):
            index = next(n for n, pair in enumerate(zip(got, wanted, strict=True)) if not close(*pair))
            got, wanted, path = got[index], wanted[index], f"{path}[{index}]"
        numbers = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in (got, wanted)]
        return words["gives"].format(call=shortened(call) + path, got=numbers[0], right=numbers[1])
    return None


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *_shape(value[0])) if isinstance(value, list) and value else ()


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def likely_line(exercise: Exercise, source: str, variant: str) -> tuple[int | None, str]:
    """The line of the file that looks most like what the first bug makes of the solution."""
    if not variant:
        return None, ""
    before = exercise.code().splitlines()
    wrong = [line.strip() for line in exercise.variants()[variant.split()[0]].splitlines() if line not in before]
    candidates = [
        (SequenceMatcher(None, line.strip(), text).ratio(), -number, line.strip())
        for number, line in enumerate(source.splitlines(), 1)
        for text in wrong
        if text != "pass"
    ]
    likeness, number, quoted = max(candidates, default=(0.0, 0, ""))
    return (-number, quoted) if likeness > 0.6 else (None, "")


def mark_names(exercise: Exercise, names: Mapping[str, Any], guess: str | None, language: str) -> Mark:
    """Mark what a notebook has defined, in its own process; see `mark`."""
    if guess is None:
        return Mark("open", evidence=WORDS[language]["unanswered"])
    known = {exercise.file: outcome(names, exercise.file, exercise.setup, exercise.calls)}
    known[""] = outcome(exercise.code(), "", exercise.setup, exercise.calls)
    if not close(known[exercise.file]["values"], known[""]["values"]):
        variants = exercise.variants().items()
        known |= {name: outcome(code, name, exercise.setup, exercise.calls) for name, code in variants}
    return judge(exercise, "", known, guess, language)
