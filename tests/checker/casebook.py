"""Learners' code in many styles, and each style with each bug that makes sense there.

`cases/NAME.case` begins with correct code. A block follows for each wrong version: `== bug` (several for several bugs
at once), then texts to take out (`- `) and what stands there instead (`+ `). `unusual/NAME.case` has code that one form
of it alone is like: each of its blocks says behind a colon what the verdict must say, too, and may have no bug.
"""

import difflib
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from headwise.checker.bugs import Verdict
from headwise.checker.contract import Options, Target
from headwise.checker.loops import CALLED, NAME
from headwise.checker.source import Source, candidates, kind_of, run_definitions
from headwise.checker.verdict import check, read_source

FOLDER = Path(__file__).parent


class Version(NamedTuple):
    """One file as a learner might hand it in."""

    style: str
    number: int  # 0 is the correct one
    bugs: tuple[str, ...]
    text: str
    words: str = ""  # of the verdict

    @property
    def label(self) -> str:
        return f"{self.style}.{self.number} {'+'.join(self.bugs) or 'correct'}"


def versions(styles: str = "*", folder: str = "cases") -> Iterator[Version]:
    for path in sorted((FOLDER / folder).glob(f"{styles}.case")):
        code, *blocks = re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.M)
        correct = code.rstrip("\n") + "\n"
        yield Version(path.stem, 0, (), correct)
        for number, block in enumerate(blocks, 1):
            yield _version(path.stem, number, block, correct)


def correct_code(style: str, folder: str = "cases") -> str:
    return next(versions(style, folder)).text


def _version(style: str, number: int, block: str, text: str) -> Version:
    head, *lines = block.splitlines()
    bugs, _, words = head.partition(":")
    changes: list[list[str]] = []
    for line in lines:
        if line.startswith("- "):
            changes.append([line[2:]])
        elif line.startswith("+"):
            changes[-1].append(line[2:])
    for old, *new in changes:
        assert text.count(old) >= 1, f"{style} {head}: {old!r} is not in the file"
        text = text.replace(old, "\n".join(new))
    lines = [line for line in text.splitlines() if line.strip() or not line]
    return Version(style, number, tuple(bugs.split()), "\n".join(lines) + "\n", words.strip())


def changed_lines(version: Version) -> set[int]:
    """Numbers of the lines that a wrong version has and the correct one has not; those beside what was taken out."""
    a, b = correct_code(version.style).splitlines(), version.text.splitlines()
    changes = [codes for codes in difflib.SequenceMatcher(None, a, b, False).get_opcodes() if codes[0] != "equal"]
    return {line for *_, first, last in changes for line in (range(first + 1, last + 1) or (first, first + 1))}


def line_of(version: Version, bug: str) -> int | None:
    """The line at which a check would point."""
    source = read_source(version.text)
    name = NAME if source.numbers_of_lines else next(iter(candidates(source)))
    return Target(None, name, "layer", source, Options()).finding(bug, "").line


def loaded(version: Version) -> tuple[types.ModuleType, str, Source]:
    """The file, run in this process; the name that the command would choose in it, and its text."""
    import linecache

    source = read_source(version.text)
    names = [NAME] if source.numbers_of_lines else list(candidates(source))
    assert len(names) == 1, f"{version.label}: candidates {names}"
    module = types.ModuleType(f"learner_{version.style}_{version.number}")
    path = f"<{module.__name__}>"
    module.__file__ = path
    linecache.cache[path] = (len(source.text), None, source.text.splitlines(keepends=True), path)
    sys.modules[module.__name__] = module
    vars(module).update(CALLED if source.numbers_of_lines else {})
    run_definitions(replace(source, path=path), names[0], vars(module))
    return module, names[0], replace(source, path=path)


def judge(version: Version, seconds: float = 120) -> Verdict:
    """The verdict in this process, on what the command would choose in the file.

    seconds  of the clock, on a machine that others use as well
    """
    module, name, _ = loaded(version)
    return check(vars(module)[name], seconds=seconds)


def targets(styles: str = "*") -> Iterator[Target]:
    """The right attention modules of torch among the cases, as the check has them before it builds them."""
    for version in versions(styles):
        if version.bugs or "Module" not in version.text:
            continue
        module, name, source = loaded(version)
        thing = vars(module)[name]
        if isinstance(thing, type) and kind_of(source.definitions[name]) not in ("rotary", "cache"):
            yield Target(thing, name, "layer", source, Options(), vars(module))
