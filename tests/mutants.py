"""make mutants: break the code in one small place after the other, and count how often the tests notice.

    python tests/mutants.py --mutants 300 --seed 17      # a sample; the same seed draws the same one from the same code
    python tests/mutants.py --only masks.py:312          # all mutants of a line, or of a file

The changes are those of cosmic-ray: another operator, another comparison, a number one more or one less, a condition
turned round, a loop that runs no time, a decorator left out. What can change no result is not tried: annotations and
their aliases, what a `raise` says, f-strings, `__repr__`, what only a type checker reads, `strict=` of a zip, a cache
left out.

A mutant meets the tests that reach its statement (which are found with coverage and kept in build/mutants), the
quickest first, until one fails or they have taken BUDGET seconds. Tests marked slow stay out, so that the share that is
caught is a lower bound. A mutant that takes several times as long as the tests, or too much memory, counts as caught.

Each is tried in a copy of the tree and in a process of its own, forked from one that has imported the large libraries.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md")
SOURCES = ("rungs/*.py", "masks.py", "heads/statistics.py", "heads/patching.py", "reshape/align.py")
SOURCES += ("models/reading.py",)
TESTS = (
    "rungs/test_*.py", "test_masks.py", "layer/test_cache.py", "layer/test_explain.py", "layer/test_planned_cache.py",
    "layer/test_relative_bias.py", "layer/test_rope*.py", "heads/test_causes.py", "heads/test_kinds.py",
    "heads/test_reading.py", "heads/test_statistics.py", "heads/test_watch.py", "models/test_hf.py",
    "reshape/test_alignment.py", "reshape/test_share.py",
)  # fmt: skip
BUDGET = 30.0  # seconds of tests that a mutant meets at most
MEMORY = 12 * 2**30  # bytes of address space
WARM = ("torch", "transformers", "numpy", "safetensors", "tokenizers")  # imported before the forks, never a mutant
# Of each operator what it may become: the nearest there is, for a product instead of a shift fails anywhere.
NEAREST = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift", "RShift_LShift"),
)
COMPARED = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")
OPERATORS = (
    *(f"ReplaceBinaryOperator_{change}" for change in NEAREST),
    *(f"ReplaceComparisonOperator_{change}" for change in (*COMPARED, "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceUnaryOperator_{change}" for change in ("USub_UAdd", "Delete_Not")),
    *("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("NumberReplacer", "ExceptionReplacer", "RemoveDecorator", "ZeroIterationForLoop"),
)
NO_OPERATOR = {"parameters", "dictorsetmaker", "arglist"}  # where a star is no product
TYPES = ("if TYPE_CHECKING:", "class Grid(Protocol):")  # what only a type checker reads
NO_RESULT = {"cache", "overload", "abstractmethod"}  # decorators without which every result is the same

SHARED = "shared"  # what a fixture of a whole file reaches

Place = tuple[int, int]  # line and column
Span = tuple[Place, Place]


@dataclass(frozen=True)
class Mutant:
    path: Path  # from the root of the tree
    line: int
    operator: str
    occurrence: int  # of what the operator can change in the file

    @property
    def address(self) -> str:
        return f"{self.path}:{self.line}"

    def code(self) -> str | None:
        """The whole file, changed; None where that is no Python."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        source = (ROOT / self.path).read_text(encoding="utf-8")
        code = mutate_code(source, get_operator(f"core/{self.operator}")(), self.occurrence)
        try:
            compile(code, self.path, "exec")
        except SyntaxError:
            return None
        return str(code)

    def __str__(self) -> str:
        lines = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        changed = (self.code() or "").splitlines()
        if len(lines) != len(changed):  # a decorator is gone, and its line
            return f"{self.address}  without {lines[self.line - 1].strip()}"
        was, becomes = next((a, b) for a, b in zip(lines, changed, strict=False) if a != b)
        return f"{self.address}  {was.strip()}  ->  {becomes.strip()}"


def span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def without_result(tree: ast.Module) -> Iterator[ast.AST]:
    """The parts of a file that change no result: see the top."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript):
            yield node.value  # the alias of a type
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.JoinedStr):
            yield node
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            yield node  # of zip: a guard that correct code never meets
        elif isinstance(node, ast.If | ast.ClassDef) and ast.unparse(node).startswith(TYPES):
            yield node
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator): decorator for decorator in node.decorator_list}
            if node.name == "__repr__" or "overload" in decorators:
                yield node
            yield from (decorator for name, decorator in decorators.items() if name in NO_RESULT)
            if node.returns is not None:
                yield node.returns


def mutants_of(source: str, path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    spans = [span(node) for node in without_result(ast.parse(source))]
    nodes = [*ast_nodes(get_ast(source))]
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [(place, node) for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, ((start, _), node) in enumerate(places):
            hidden = any(first <= start < last for first, last in spans)
            is_star = name.startswith("ReplaceBinary") and node.parent.type in NO_OPERATOR
            is_kept = name == "RemoveDecorator" and any(word in node.get_code() for word in NO_RESULT)
            if not (hidden or is_star or is_kept):
                yield Mutant(path, start[0], name, occurrence)


def statement_lines(tree: ast.Module, line: int) -> range:
    """The lines that run when the statement at this line does; of what runs at import, all that it is there for."""
    inside: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in whole_lines(node)]
    whole = range(1, (tree.body[-1].end_lineno or 1) + 1)
    if not inside:
        return whole
    innermost = min(inside, key=lambda node: len(whole_lines(node)))
    functions = [node for node in inside if isinstance(node, ast.FunctionDef)]
    if functions and innermost not in functions:
        body = getattr(innermost, "body", None)
        return range(innermost.lineno, body[0].lineno) if body else whole_lines(innermost)
    holders = [node for node in inside if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return min(map(whole_lines, holders), key=len) if holders else whole


def whole_lines(node: Any) -> range:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, node.end_lineno + 1)


class Chosen:
    """Runs the tests that are named, in that order, and no other."""

    def __init__(self, names: list[str]) -> None:
        self.order = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda x: self.order[x.nodeid])


class Recorder:
    """Notes how long each test takes, whether it passes, and which lines it reaches."""

    def __init__(self, root: Path, files: list[Path]) -> None:
        from coverage import Coverage

        self.root, self.seconds = root, defaultdict[str, float](float)
        self.failed: set[str] = set()
        self.coverage = Coverage(data_file=None, config_file=False, include=[str(path) for path in files])
        self.coverage.start()
        self.test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test = item.nodeid
        self.coverage.switch_context(self.test)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a fixture of many tests reaches, each of them does."""
        if fixturedef.scope != "function":
            self.coverage.switch_context(SHARED)
        try:
            return (yield)
        finally:
            self.coverage.switch_context(self.test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def result(self) -> dict[str, Any]:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            str(Path(path).relative_to(self.root)): data.contexts_by_lineno(path) for path in data.measured_files()
        }
        modules = [name for name in sys.modules if name.partition(".")[0] in WARM]
        seconds = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        return {"seconds": seconds, "failed": [*self.failed], "lines": lines, "modules": modules}


def run_pytest(files: list[str], plugin: Any, *options: str) -> int:
    quick = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not browser and not gpu"]
    warm = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that the first process has imported
    return int(pytest.main([*files, *quick, *warm, *options], plugins=[plugin]))


def forked(work: Callable[[], int], seconds: float, output: str = "output.txt") -> int:
    """The exit code of some work in a process of its own, which may take so many seconds of the processor."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.setsid()
        code = 70
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + 10 * seconds + 60  # for what waits for ever, on a machine that others use
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < until:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


class Tests:
    """The tests that reach each line, and how long they take."""

    def __init__(self, root: Path, sources: list[Path]) -> None:
        self.root, self.sources = root, [root / source for source in sources]
        self.code = b"".join(path.read_bytes() for path in self.sources)
        self.files = sorted({path for pattern in TESTS for path in (root / "tests").glob(pattern)})
        self.seconds: dict[str, float] = {}
        self.reach: dict[tuple[str, int], set[str]] = defaultdict(set)
        for path in self.files:
            self.record(path)

    def record(self, path: Path) -> None:
        """Run a file of tests once, unless the notes of it are there."""
        digest = hashlib.sha256(self.code + path.read_bytes()).hexdigest()[:16]
        notes = ROOT / "build" / "mutants" / f"{path.stem}-{digest}.json"
        notes.parent.mkdir(parents=True, exist_ok=True)

        def work() -> int:
            recorder = Recorder(self.root, self.sources)
            code = run_pytest([str(path)], recorder)
            if code in (0, 1):
                notes.write_text(json.dumps(recorder.result()))
            return code

        if not notes.exists() and (code := forked(work, 600)) not in (0, 1):
            sys.exit(f"{Path('output.txt').read_text()}\npytest ended with {code} on {path}")
        result = json.loads(notes.read_text())
        for name in result["modules"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if result["failed"]:
            print(f"left out, for they do not pass here: {', '.join(result['failed'])}", flush=True)
        self.seconds |= result["seconds"]
        for source, lines in result["lines"].items():
            for line, names in lines.items():
                place = source, int(line)
                self.reach[place] |= set(result["seconds"]) if SHARED in names else {*names} - {"", *result["failed"]}

    def of(self, mutant: Mutant) -> list[str]:
        """The tests for a mutant, the quickest first, as far as the budget goes."""
        tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
        names = self.reaching(mutant.path, statement_lines(tree, mutant.line))
        names = names or self.reaching(mutant.path, statement_lines(tree, 0))  # a constant of a class or file
        chosen: list[str] = []
        spent = 0.0
        for name in sorted(names, key=lambda name: self.seconds[name]):
            spent += self.seconds[name]
            if chosen and spent > BUDGET:
                break
            chosen.append(name)
        return chosen

    def reaching(self, path: Path, lines: range) -> set[str]:
        return set().union(*(self.reach[str(path), line] for line in lines))

    def limit(self, mutant: Mutant) -> float:
        """Seconds of the processor after which it does not end."""
        return 4 * sum(self.seconds[name] for name in self.of(mutant)) + 20

    def catch(self, mutant: Mutant, number: int) -> bool:
        """Does one of them fail where the file is this mutant?"""
        names = self.of(mutant)
        if not names:
            return False
        files = sorted({name.partition("::")[0] for name in names})
        path = self.root / mutant.path
        path.write_text(mutant.code() or "", encoding="utf-8")
        os.utime(path, (number, number))  # a time of its own: what Python has compiled of the file is told by it
        try:
            return forked(lambda: run_pytest(files, Chosen(names), "-x"), self.limit(mutant)) != 0
        finally:
            shutil.copy2(ROOT / mutant.path, path)


def prepared(root: Path) -> None:
    """Copy the tree to a folder, and import there what every fork needs."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(ROOT / name, root / name)
    os.chdir(root)
    sys.path[:0] = [str(root / "src"), str(root / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    importlib.import_module("torch").set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=300, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9 % 10**9)
    parser.add_argument("--only", action="append", default=[], help="those whose FILE:LINE has this in it, all of them")
    given = parser.parse_args()
    home = ROOT / "src" / "headwise"
    sources = [path.relative_to(ROOT) for pattern in SOURCES for path in sorted(home.glob(pattern))]
    mutants = [mutant for path in sources for mutant in mutants_of((ROOT / path).read_text(encoding="utf-8"), path)]
    there = len(mutants)
    random.Random(given.seed).shuffle(mutants)
    if given.only:
        mutants = [mutant for mutant in mutants if any(text in f"{mutant.address} " for text in given.only)]
    wanted = len(mutants) if given.only else given.mutants
    print(f"seed {given.seed}: {min(wanted, there)} of {there:,} mutants of {len(sources)} files", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        prepared(Path(temporary).resolve())
        tests = Tests(Path(temporary).resolve(), sources)
        print(f"{len(tests.seconds):,} tests, run once in {time.monotonic() - began:.0f} s; what survives:", flush=True)
        chosen = list(itertools.islice((mutant for mutant in mutants if mutant.code() is not None), wanted))
        survivors = tried(tests, chosen)
        os.chdir(ROOT)
    caught = len(chosen) - len(survivors)
    print(f"{len(chosen)} mutants tried, {caught} caught, {100 * caught / max(1, len(chosen)):.1f} %")
    print(f"in {(time.monotonic() - began) / 60:.0f} minutes, seed {given.seed}; {len(survivors)} survived:")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.path, mutant.line)):
        print(f"  {mutant}")


def tried(tests: Tests, mutants: list[Mutant]) -> list[Mutant]:
    """Those that survive."""
    survivors = []
    for number, mutant in enumerate(mutants, 1):
        if not tests.catch(mutant, number):
            print(f"  {number}: {mutant}", flush=True)
            survivors.append(mutant)
    return survivors


if __name__ == "__main__":
    main()
