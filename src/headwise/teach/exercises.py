"""The exercises: data files, one for each, read into records.

A solution is the code itself. Lines that end in `#?` are what the learner writes: the blank has `...` in their
place. `<0>`, `<1>` and so on stand for the notes of the language. A bug is a solution with some text replaced.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any

from headwise.errors import HeadwiseError, unknown
from headwise.teach.catalogue import LANGUAGES

BLANK = re.compile(r"^\s*\.\.\.\s*(#.*)?$")  # a line that the learner must replace
WIDTH = 88  # columns of the text of an exercise


@dataclass(frozen=True)
class Exercise:
    """One exercise: `01_softmax` is number 1. The texts are those of the file, by their language."""

    number: int
    name: str
    solution: str  # with `#?` and notes
    calls: tuple[str, ...]  # expressions that must give the same with the learner's code as with the solution
    answer: str  # to the question: a, b or c
    texts: dict[str, dict[str, Any]]  # language -> title, text, question, reveal, hints, notes
    setup: str = ""  # code that makes the inputs, run before the calls
    figure: str | None = None
    name_of_class: str | None = None  # that `headwise.check` reads as a whole
    causal: bool = True  # ought that class to be causal by itself?
    bugs: tuple[dict[str, Any], ...] = ()  # id, replace (pairs of texts), and a sentence for each language

    @property
    def file(self) -> str:
        return f"{self.name}.py"

    def code(self, language: str = "en", solved: bool = True) -> str:
        """The code of the file, whole, or with its blanks."""
        code = self.solution
        for index, note in enumerate(self.texts[language]["notes"]):
            code = code.replace(f"<{index}>", note)
        if solved:
            return re.sub(r" *#\?$", "", code, flags=re.MULTILINE)
        blank = rf"\1...  # {WORDS[language]['fill']}\n"
        return re.sub(r"^( *)[^\n]*#\?\n(?:[^\n]*#\?\n)*", blank, code, flags=re.MULTILINE)

    def heading(self, language: str) -> str:
        words, title = WORDS[language]["exercise"], self.texts[language]["title"]
        return words.format(number=self.number, count=len(exercises()), title=title)

    def source(self, language: str, solved: bool = False, answer: str = "") -> str:
        """The file that a learner gets: text, question, code."""
        text, words = self.texts[language], WORDS[language]
        parts = [self.heading(language)]
        parts += [wrapped(text["text"])]
        parts += [words["picture"].format(figure=self.figure_file(language))] if self.figure else []
        parts += [f"{words['question']}\n\n{wrapped(text['question'])}"]
        head = "\n\n".join(parts)
        return f'"""{head}\n"""\n\nanswer = "{answer}"  # {words["choose"]}\n\n\n{self.code(language, solved)}'

    def variants(self) -> dict[str, str]:
        """The solution with each bug, by its place in `bugs`, then with each two that do not touch the same text."""
        singles = {str(place): replaced(self.code(), bug["replace"]) for place, bug in enumerate(self.bugs)}
        pairs = {f"{a} {b}": replaced(singles[a], self.bugs[int(b)]["replace"]) for a, b in combinations(singles, 2)}
        return {name: variant for name, variant in (singles | pairs).items() if variant is not None}

    def bugs_of(self, variant: str) -> list[dict[str, Any]]:
        """The bugs of a variant."""
        return [self.bugs[int(place)] for place in variant.split()]

    def figure_file(self, language: str) -> str:
        return f"figures/{self.figure}.{language}.svg"


def replaced(code: str | None, pairs: list[list[str]]) -> str | None:
    """The code with each first text of a pair replaced by the second; None where one of them is not there."""
    for before, after in pairs:
        if code is None or before not in code:
            return None
        code = code.replace(before, after)
    return code


def wrapped(text: str) -> str:
    """Paragraphs filled to the width of the file; indented lines stay as they are."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, WIDTH) for part in parts)


def room(*names: str) -> Any:
    """A file of this room."""
    return resources.files("headwise.teach").joinpath(*names)


WORDS: dict[str, dict[str, str]] = tomllib.loads(room("words.toml").read_text(encoding="utf-8"))


@cache
def exercises() -> tuple[Exercise, ...]:
    """All exercises in their order."""
    files = sorted(room("exercises").iterdir(), key=lambda file: file.name)
    return tuple(_read(file) for file in files if file.name.endswith(".toml"))


def _read(file: Any) -> Exercise:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    name = file.name.removesuffix(".toml")
    texts = {language: data.pop(language) for language in LANGUAGES}
    return Exercise(int(name[:2]), name, texts=texts, **data)


def find_exercise(number: int) -> Exercise:
    """The exercise of that number, from 1."""
    if not 1 <= number <= len(exercises()):
        raise HeadwiseError(f"there is no exercise {number}; they are 1 to {len(exercises())}")
    return exercises()[number - 1]


def check_language(language: str) -> str:
    if language not in LANGUAGES:
        raise unknown(f"no language {language!r}", language, LANGUAGES)
    return language
