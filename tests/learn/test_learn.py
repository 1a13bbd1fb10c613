"""`headwise learn`: exercises whose blanks say what is missing, whose solutions pass, and whose bugs have names."""

import json
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cases import every, refuses, rows
from invoking import Invoke

import headwise.learn.exercises as marking
from headwise.checker.bugs import words
from headwise.files import write_whole
from headwise.learn.course import open_course, told
from headwise.learn.exercises import Exercise, answer_of, choice, exercises, find_exercise, mark, outcome
from headwise.words import LANGUAGES

ALL = exercises()
DOT = "    return sum(x * y for x, y in zip(a, b))"


@cache
def known(number: int) -> dict[str, Any]:
    """What the solution and the bugs of an exercise give."""
    exercise = find_exercise(number)
    variants = {"": exercise.code(), **exercise.variants()}
    return {name: outcome(code, name, exercise.setup, exercise.calls) for name, code in variants.items()}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The learner's file runs in this process: what the tests write is harmless, and a process takes a second."""

    def run(job: dict[str, Any], seconds: float = 0) -> dict[str, Any]:
        if "right" in job:  # the search of a repair takes seconds, too
            return {}
        learner = outcome(job["source"], job["name"], job["setup"], job["calls"])
        return {**known(int(job["name"][:2])), job["name"]: learner}

    monkeypatch.setattr(marking, "run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # infinity less infinity is what some bugs are about
        yield


@pytest.fixture
def repairing(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of a repair, in this process too."""
    before = marking.run
    monkeypatch.setattr(marking, "run", lambda job, *_: marking.repair(job) if "right" in job else before(job))


def written(exercise: Exercise, code: str, answer: str = "a", language: str = "en") -> str:
    """The file of an exercise with other code in it."""
    head = exercise.source(language).replace('answer = ""', f'answer = "{answer}"')
    return head.replace(exercise.code(language, solved=False), code)


def solution(exercise: Exercise, language: str = "en", answer: str = "a") -> str:
    return written(exercise, exercise.code(language), answer, language)


def test_the_exercises_are_complete() -> None:
    assert [exercise.number for exercise in ALL] == list(range(1, len(ALL) + 1))
    assert set(words("en")) == set(words("es"))
    for exercise in ALL:
        assert exercise.answer in "abc" and len(exercise.bugs) >= 3, exercise.name
        for language in LANGUAGES:
            texts = exercise.texts[language]
            assert set(texts) - {"notes"} == {"title", "text", "question", "reveal", "hints"}, exercise.name
            for function, hints in texts["hints"].items():  # the third is the solution's own
                assert (
                    len(hints) == 2 and exercise.hint(language, 3, function).split("\n")[0].strip() in exercise.code()
                )
            assert all(exercise.solution.count(note) == 1 for note in texts.get("notes", ())), exercise.name
            assert all(f"{letter})" in texts["question"] for letter in "abc")
            assert all(len(bug[language]) > 15 for bug in exercise.bugs)
            for text in (exercise.source(language), solution(exercise, language)):
                assert not re.search(r"#\?", text), exercise.name
                assert max(map(len, text.splitlines())) <= 130
        assert exercise.texts["en"]["text"] != exercise.texts["es"]["text"]


@every("exercise", ALL, ids=[exercise.name for exercise in ALL])
def test_a_blank_says_what_is_missing_and_a_solution_passes(in_process: None, exercise: Exercise) -> None:
    for language in LANGUAGES:
        blank = exercise.source(language)
        verdict = mark(exercise, blank, language)
        lines = [n for n, line in enumerate(blank.splitlines(), 1) if line.strip().startswith("...")]
        assert verdict.status == "open" and verdict.line == lines[0]
        assert all(str(line) in verdict.evidence for line in lines) and "`answer`" in verdict.evidence
        solved = mark(exercise, solution(exercise, language, "B "), language)
        assert (solved.status, solved.guess) == ("passed", "b"), solved


@every("exercise", ALL, ids=[exercise.name for exercise in ALL])
def test_every_bug_is_named(in_process: None, exercise: Exercise) -> None:
    code = exercise.code()
    for place, bug in enumerate(exercise.bugs):
        source = written(exercise, exercise.variants()[str(place)])
        assert exercise.variants()[str(place)] != code
        verdict = mark(exercise, source, "es")
        assert verdict.bugs == (bug["id"],), (bug["id"], verdict)
        assert verdict.fix == bug["es"] and verdict.evidence


def test_two_bugs_are_named_together_and_unknown_ones_are_not(in_process: None) -> None:
    exercise = find_exercise(7)
    ids = [bug["id"] for bug in exercise.bugs]
    both = exercise.variants()[f"{ids.index('scale-missing')} {ids.index('mask-missing')}"]
    assert mark(exercise, written(exercise, both), "en").bugs == ("scale-missing", "mask-missing")
    odd = exercise.code().replace("math.sqrt(self.d_head)", "1.25")
    verdict = mark(exercise, written(exercise, odd), "en")
    assert (verdict.status, verdict.bugs, verdict.fix) == ("wrong", (), "")
    assert "it must give" in verdict.evidence


def test_the_line_and_the_numbers_are_the_learners(repairing: None) -> None:
    exercise = find_exercise(1)
    far = written(exercise, exercise.code().replace(DOT, "    return sum(a) * sum(b)"))
    assert mark(exercise, far, "en").fix == ""  # the line of the solution is the last hint's
    exercise = find_exercise(2)
    source = written(exercise, exercise.code().replace(" / math.sqrt(len(query))", ""))
    verdict = mark(exercise, source, "en")
    assert verdict.bugs == ("scale-missing",)
    assert verdict.line and source.splitlines()[verdict.line - 1].strip() == verdict.quoted
    assert verdict.quoted == "scores = [dot(query, key) for key in keys]"
    assert re.fullmatch(r"head\(query, keys5, values5\)\[0\]\[0\] gives .+; it must give .+\.", verdict.evidence)
    _, said = marking.first_difference(exercise, [[[1.0], []]], [[[1.0], [2.0]]], "en")
    assert said.endswith("gives a list of 0 ([]); it must give a list of 1 ([2.0]).")
    shape = find_exercise(5)
    verdict = mark(shape, written(shape, shape.code().replace(".transpose(1, 0, 2)\n", "\n", 1)), "en")
    assert "has the shape (5, 3, 2); it must have (3, 5, 2)" in verdict.evidence or verdict.bugs == ("split-not-moved",)


def test_a_course_s_own_class_is_the_answer(in_process: None) -> None:
    """By the name that the course gives it, and with the number type that its code has."""
    for number, ours, theirs in (
        (9, "class MultiHeadAttention", "class MultiHeadAttn"),
        (8, "class MultiHeadAttentionWrapper", "class MultiHeadedAttentionWrapper"),
        (7, "math.sqrt(", "np.sqrt("),
    ):
        exercise = find_exercise(number)
        renamed = exercise.code().replace(ours, theirs)
        assert renamed != exercise.code()
        assert mark(exercise, written(exercise, renamed), "en").status == "passed"


def test_what_is_told_first_and_last(repairing: None) -> None:
    exercise = find_exercise(6)
    silent = written(exercise, exercise.code().replace("return join(heads) @ w_o", "join(heads) @ w_o"))
    verdict = mark(exercise, silent, "en")
    assert verdict.evidence == "output(heads, w_o) gives nothing: is a `return` missing?"
    assert "right as `    return join(heads) @ w_o`" in verdict.fix and verdict.quoted == "join(heads) @ w_o"
    rotary = find_exercise(11)
    halves = written(rotary, rotary.code().replace("np.concatenate([a", "tuple([a").replace("], axis=1)", "])"))
    verdict = mark(rotary, halves, "en")  # a later call fails, since a tuple has no .T
    assert verdict.status == "wrong" and "has the shape (2, 5, 3); it must have (5, 6)" in verdict.evidence
    assert verdict.bugs == ("halves-apart",) and verdict.fix.startswith("Two halves are returned")
    lines = told(rotary, verdict, "en", 0, "f", "c")
    assert "  The bug: Two halves are returned. Put them together: np.concatenate([..., ...], axis=1)." in lines
    outside = solution(exercise, "en", "a") + "\nimport nowhere_at_all\n"
    assert mark(exercise, outside, "en").evidence.startswith("ModuleNotFoundError")


def test_a_hint_is_on_the_function_that_failed(in_process: None, tmp_path: Path) -> None:
    """A blank, a wrong number, or an error: in `softmax` with `dot` right, and the other way round."""
    exercise = find_exercise(1)
    halves = {"dot": "return sum(x * y for x, y in zip(a, b))", "softmax": "return [power / sum(powers)"}
    for name, line in halves.items():
        whole = solution(exercise, "es", "a")
        blank = "\n".join("    ..." if text.strip().startswith(line) else text for text in whole.splitlines())
        broken = whole.replace(line, line.replace("sum(", "summe("))
        wrong = whole.replace(line, line.replace("return ", "return [7] + " if name == "softmax" else "return 7 + "))
        for source, status in ((blank, "open"), (wrong, "wrong"), (broken, "failed")):
            verdict = mark(exercise, source, "es")
            assert (verdict.status, verdict.function) == (status, name), (name, status, verdict)
            assert exercise.hint("es", 1, verdict.function).startswith(name)
    stacked = find_exercise(8)
    verdict = mark(stacked, written(stacked, stacked.code().replace("dim=-1)\n", "dim=1)\n")), "en")
    assert stacked.hint("en", 3, verdict.function) == "return torch.cat([head(x) for head in self.heads], dim=-1)"
    course, _ = open_course(tmp_path, "es")
    (tmp_path / stacked.file).write_text(written(stacked, stacked.code().replace("@ values", "@ keys")), "utf-8")
    verdict = course.mark(stacked)  # values taken from keys: the catalogue's bug
    assert verdict.bugs == ("values-from-keys",) and verdict.function == "CausalAttention"


@every("number, right, wrong, said, line", [
    (2, "[sum(w * value[e] for w, value in zip(weights, values)) for e in range(len(values[0]))]",
     "[[w * x for x in v] for w, v in zip(weights, values)]", "weighted and not added", "out = [[w"),
    (3, "scores = [score if", "[score if", "right as `        scores = [score if", "[score if j"),
    (3, "score if j <= i else -math.inf", "(score)", "Nothing is hidden", "scores = [(score)"),  # not in softmax
    (4, "outs.append(attention(q, k, v))", "outs.append(attention(x, x, x))", "read x itself", "outs.append(att"),
    (4, "outs.append", "outs.extend", "extend adds the tokens", "outs.extend"),
    (4, "q, k, v = matmul(x, w_q[h]), matmul(x, w_k[h]), matmul(x, w_v[h])", "q = matmul(x, w_q[h])\n        k = matmul"
     "(x, w_k[h])\n        v = matmul(x, w_k[h])", "with the matrix of the keys", "v = matmul(x, w_k"),
    (1, "power / sum(powers)", "power / max(powers)", "The largest is 1", "return [power"),
    (2, "w * value[e] for w, value in zip(weights, values)) for e in range(len(values[0]))",
     "w * x for x in value) for w, value in zip(weights, values)", "Add up over the tokens", "out ="),
    (4, "append(attention(q, k, v)", "append(attention(k, q, v)", "Queries and keys are exchanged", "outs.append("),
    (4, "sum((out[t] for out in outs), []) for t in range(len(x))", "sum(r, []) for r in zip(outs)", "zip(*", "join"),
    (4, "w_q[h]", "w_q[0]", "matmul(x, w_q[h]), matmul(x, w_k", "q, k, v = matmul(x, w_q[0])"),
    (4, "[sum((out[t] for out in outs), []) for t in range(len(x))]", "[]\n    for out in outs:\n        joined += out",
     "joined along the tokens", "joined += out"),
    (5, "x.reshape(T, n_heads, width // n_heads).transpose(1, 0, 2)", "x.reshape(n_heads, T, width // n_heads)",
     "split cuts straight", "return x"),
    (6, "join(heads) @ w_o", "join(heads) * w_o", "`*` multiplies number by number", "return join(heads) *"),
    (7, "q @ k.", "q @ v.", "scores = q @ k.", "scores = q @ v."),
    (6, "w_o[h * d : (h + 1) * d]", "w_o[:, h*d:(h+1)*d]", "or by columns of it", "return [heads[h] @ w_o[:"),
    (6, "heads[h] @ w_o[h * d : (h + 1) * d]", "(join(heads) @ w_o)[:, h*d:(h+1)*d]", "cuts the output", "return [("),
])  # fmt: skip
def test_the_line_is_the_learners(repairing: None, number: int, right: str, wrong: str, said: str, line: str) -> None:
    exercise = find_exercise(number)
    code = exercise.code().replace(right, wrong)
    if number == 5:  # of two wrong functions it is the first one's
        code = code.replace("heads.transpose(1, 0, 2)", "heads")
    verdict = mark(exercise, written(exercise, code), "en")
    assert said in verdict.fix and verdict.quoted.startswith(line), verdict
    if verdict.bugs:  # the last hint is the line that was to be written
        is_theirs = verdict.right == "v = matmul(x, w_v[h])"  # of a learner who writes three lines for one
        assert is_theirs or any(right in text for text in verdict.right.splitlines())
        assert verdict.right in told(exercise, verdict, "en", 3, "f", "c")[-2]


def test_hints_are_on_tries(in_process: None, tmp_path: Path) -> None:
    course, _ = open_course(tmp_path, "en")
    exercise = find_exercise(3)
    for wrong, answer, due in (("j < i", "a", 1), ("j < i", "a", 2), ("j <= i", "none", 2), ("j > i", "a", 3)):
        course.path(exercise).write_text(written(exercise, exercise.code().replace("j <= i", wrong), answer), "utf-8")
        course.mark(exercise)
        assert course.hint(exercise) == due, (wrong, answer)
    assert open_course(tmp_path, None)[0].tries == {"3": 3}


def test_words_for_those_who_know_no_types(in_process: None) -> None:
    exercise = find_exercise(1)
    verdict = mark(exercise, solution(exercise, "es", "dos tercios"), "es")
    assert verdict.status == "open" and "es una letra: para «dos tercios» escribe a, b o c." in verdict.evidence
    for line, said in (
        ("return (x * y for x, y in zip(a, b))", "da algo que todavía no se calculó: ponlo entre corchetes"),
        ("return [x * y for x, y in zip(a, b)]", "da una lista de 3 ([4.0, -10.0, 18.0]); debe dar 12."),
        ("return sum", "da algo que no es número ni lista, sino builtin_function"),
        ("return a + 1", "+ une una lista con otra lista, y aquí un lado no es una lista"),
        ("return 1 + None", "dos cosas que no van juntas, como un número y una lista"),
        ("return a[7]", "se pide un lugar más allá del final de una lista (IndexError: list index out of range)"),
    ):
        code = exercise.code().replace("return sum(x * y for x, y in zip(a, b))", line)
        assert said in mark(exercise, written(exercise, code), "es").evidence, line
    matrix = find_exercise(4)  # of plain lists
    code = matrix.code().replace("    return joined", "    return joined[0]")
    assert re.search(r"da una lista de \d+ \(.*debe dar una lista de \d+ listas \(", mark(
        matrix, written(matrix, code), "es").evidence)  # fmt: skip


def test_errors_of_numpy_are_told_in_plain_words_and_of_the_right_function(in_process: None) -> None:
    for number, right, wrong, said in (
        (4, "matmul(x, w_q[h]),", "x @ w_q[h],", "@ multiplies arrays, and these are plain lists"),
        (5, "n_heads, width // n_heads)", "n_heads, width / n_heads)", "a size must be a whole number: divide with //"),
        (5, "transpose(1, 0, 2)\n\n", "transpose(0, 1)\n\n", "transpose names every axis in its new order"),
        (6, "w_o[h * d : (h + 1) * d]", "w_o[:5]", "row of the first has 4 numbers, and the second has 5 rows"),
    ):
        exercise = find_exercise(number)
        verdict = mark(exercise, written(exercise, exercise.code().replace(right, wrong)), "en")
        assert verdict.status == "failed" and said in verdict.evidence and "gufunc" not in verdict.evidence, verdict
    exercise = find_exercise(5)
    slices = "[x[:, h * width // n_heads : (h + 1) * width // n_heads] for h in range(n_heads)]"
    code = exercise.code().replace("x.reshape(T, n_heads, width // n_heads).transpose(1, 0, 2)", slices)
    verdict = mark(exercise, written(exercise, code), "en")
    assert verdict.function == "split" and verdict.fix.startswith("split must return an array"), verdict
    verdict = mark(exercise, solution(exercise, "en", "[[0, 1], [4, 5]]"), "en")  # code that is right, no letter
    assert "type a, b or c" in verdict.evidence and len(told(exercise, verdict, "en", 3, "f", "c")) == 2  # and no hint


@pytest.mark.slow
def test_what_does_not_run_or_nobody_explains(in_process: None, tmp_path: Path) -> None:
    exercise = find_exercise(1)
    broken = solution(exercise, "en", "a").replace("top = max(scores)", "top = maximum(scores)")
    verdict = mark(exercise, broken, "en")
    assert verdict.status == "failed" and "NameError: name 'maximum' is not defined" in verdict.evidence
    assert verdict.evidence.startswith("softmax([2.0") and verdict.quoted.startswith("top = maximum")
    verdict = mark(exercise, 'answer = "a"\ndef f(:\n', "en")
    assert (verdict.status, verdict.line, verdict.quoted) == ("failed", 2, "def f(:")
    assert [answer_of(text) for text in ("x = 1", 'answer = ""', "answer = 1")] == ["", "", "1"]
    assert choice("B)") == "b" and choice("1") is None
    course, _ = open_course(tmp_path, "es")
    exercise = find_exercise(9)
    dropped = "nn.functional.dropout(scores.softmax(-1), 0.5)"
    code = exercise.code().replace("self.dropout(torch.softmax(scores, dim=-1))", dropped)
    (tmp_path / exercise.file).write_text(written(exercise, code, language="en"), encoding="utf-8")
    verdict = course.mark(exercise)
    assert verdict.bugs == ("dropout-in-eval",)
    assert verdict.quoted == "weights = nn.functional.dropout(scores.softmax(-1), 0.5)"


@pytest.mark.slow
def test_a_process_of_its_own_bears_what_a_file_may_do() -> None:
    exercise = find_exercise(1)
    solved = solution(exercise, "en", "a")
    loud = solved + 'print("{}")\nimport sys; sys.stdout.write("[1]")\n'
    assert mark(exercise, loud, "en").status == "passed"
    verdict = mark(exercise, solved.replace("import math", "import math, os\nos._exit(3)"), "en")
    assert verdict.status == "failed" and "ended the process" in verdict.evidence
    job = {"name": exercise.file, "source": "while 1: 1", "setup": "", "calls": [], "lang": "en", "variants": {"": ""}}
    assert marking.run(job, seconds=2)[exercise.file]["end"] == "timeout"


def test_a_path_through_the_course(invoke: Invoke, in_process: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = invoke("learn")
    assert first.code == 0 and "Open learn/01_softmax.py" in first.out
    path, exercise = tmp_path / "learn" / "01_softmax.py", find_exercise(1)
    assert path.read_text() == exercise.source("en")
    assert (tmp_path / "learn" / "figures" / "head.en.svg").exists()
    for lang in ("en", "en", "es", "en"):  # looking costs no hint, in whatever language
        untouched = invoke("learn", "--lang", lang)
        assert untouched.code == 1 and not {"Hint", "Pista"} & set(untouched.out.split())
    assert "is not finished" in untouched.out

    wrong = written(exercise, exercise.variants()["0"], answer="c")
    path.write_text(wrong)
    for step in (1, 2, 3, 3):
        again = invoke("learn")
        assert again.code == 1 and "(norm-missing)" in again.out and f"Hint {step} of 3" in again.out
        assert ("--solution 1" in again.out) is (step == 3)
    assert path.read_text() == wrong

    path.write_text(solution(exercise, "en", "c"))
    passed = invoke("learn")
    assert passed.code == 0 and "You guessed c; it is b." in passed.out and "Open learn/02_head.py" in passed.out
    document = json.loads(invoke("learn", "--json").out)
    assert (document["status"], document["passed"], document["next"]) == ("open", [1], "learn/02_head.py")
    assert document["marked"][0]["exercise"] == 2

    assert invoke("learn", "--solution", 3).out == find_exercise(3).code()
    assert json.loads(invoke("learn", "--solution", 3, "--json").out)["solution"] == find_exercise(3).code().rstrip()
    path.unlink()
    assert invoke("learn").code == 1 and path.read_text() == exercise.source("en")  # what was removed is made anew
    monkeypatch.chdir(tmp_path / "learn")
    assert "02_head.py" in invoke("learn").out  # inside the folder no name is needed


@pytest.mark.slow
def test_the_whole_course_in_spanish(invoke: Invoke, in_process: None, tmp_path: Path) -> None:
    folder = tmp_path / "mi curso"
    assert "Abre" in invoke("learn", folder, "--lang", "es").out
    for exercise in ALL:
        (folder / exercise.file).write_text(solution(exercise, "es", exercise.answer), encoding="utf-8")
    done = invoke("learn", folder)
    assert done.code == 0 and done.out.count("Tu respuesta") == len(ALL)
    assert json.loads(invoke("learn", folder, "--json").out)["status"] == "done"


def test_files_that_nobody_touched_change_their_language(tmp_path: Path) -> None:
    open_course(tmp_path, "en")
    (tmp_path / "02_head.py").write_text("# mine\n")
    open_course(tmp_path, "es")
    assert (tmp_path / "01_softmax.py").read_text(encoding="utf-8") == ALL[0].source("es")
    assert (tmp_path / "02_head.py").read_text() == "# mine\n"
    course, new = open_course(tmp_path, None)
    assert (course.language, new) == ("es", False)
    refuses(lambda: open_course(tmp_path / "02_head.py", None), "is a file; pass a folder")


@every("content,options,said", [*rows("courses"), ({"progress.json": "[" * 100_000}, [], "is damaged")])
def test_bad_input_is_one_clear_line(
    invoke: Invoke, in_process: None, tmp_path: Path, content: dict[str, str], options: list[Any], said: str
) -> None:
    folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    outcome = invoke("learn", folder, *options)
    assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1, outcome
    assert not content or sorted(path.name for path in folder.iterdir()) == sorted(content)


def test_a_first_call_that_was_killed_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before each of its files has its name."""
    whole, killed = tmp_path / "whole", OSError("killed")
    open_course(whole, "es")
    names = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    n_files = sum((whole / name).is_file() for name in names)
    for count in (0, 1, n_files // 2, n_files - 2, n_files - 1):
        folder, left = tmp_path / f"killed-{count}", iter(range(count))

        def write(path: Path, data: bytes | str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                path.with_name(f".{path.name}.tmp").write_bytes(b"half")
                raise killed
            write_whole(path, data)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
            patch.setattr("headwise.learn.course.write_whole", write)
            patch.setattr("headwise.files.write_whole", write)
            open_course(folder, "es")
        course, new = open_course(folder, "es")
        there = sorted(x.relative_to(folder) for x in folder.rglob("*") if not x.name.startswith("."))
        assert new and course.passed == [] and there == names


def test_a_course_without_its_progress_begins_again_and_keeps_what_was_written(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    open_course(folder, "en")
    (folder / "01_softmax.py").write_text("# mine\n")
    (folder / "notes.txt").write_text("mine")
    (folder / "progress.json").write_text("{")
    assert "remove it: the exercises stay as they are" in invoke("learn", folder).err
    (folder / "progress.json").unlink()
    assert invoke("learn", folder).code == 0
    assert (folder / "01_softmax.py").read_text() == "# mine\n" and (folder / "notes.txt").read_text() == "mine"


ROOT = Path(__file__).resolve().parents[2]
FIGURES = {exercise.figure_file(language) for exercise in exercises() if exercise.figure for language in ("en", "es")}


@every("name", sorted(FIGURES))
def test_a_figure_is_readable_and_the_same_on_a_page(name: str) -> None:
    picture, twin = (ROOT / "src" / "headwise" / "learn" / name).read_text(encoding="utf-8"), ROOT / "docs" / name
    assert not twin.exists() or twin.read_text(encoding="utf-8") == picture
    root = ElementTree.fromstring(picture)
    texts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    assert root.get("role") == "img" and len(texts["title"]) > 5 and len(texts["desc"]) > 40
    assert "prefers-color-scheme: dark" in picture and not re.search(r"href|url\(|<script", picture)
    width = float(root.get("width", 0))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.get("x", -1)) <= width
