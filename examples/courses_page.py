"""Write docs/courses.md and docs/courses.es.md: each thing that five courses teach, the line to paste, and its output.

    python examples/courses_page.py

The things stand in examples/courses.txt, in both languages; what a line of Python prints, and a verdict of the
report on claims, are looked up here. A test runs every line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"en": ROOT / "docs" / "courses.md", "es": ROOT / "docs" / "courses.es.md"}
KINDS = ("py", "sh", "claim", "see", "no")
VERDICTS = {
    "holds": "se cumple",
    "does not hold": "no se cumple",
    "depends": "depende",
    "not run here": "no se ejecuta aquí",
}
INTRODUCTION = {
    "en": """# The courses, thing by thing

*[En español](courses.es.md)*

Written by `python examples/courses_page.py` from `examples/courses.txt`; a test runs every line.

headwise grew from five pages of courses. For each there is a page that walks through it: {pages}.

Below is every thing that they teach, the line to paste, after those above it, and what it prints: {here} of {total}
are here; of the others it is said why not. [The report on claims](../studies/claims.md) judges what they claim; the
[glossary](glossary.md) has the terms, [learn](learn.md) the exercises of `headwise learn`.
""",
    "es": """# Los cursos, cosa por cosa

*[In English](courses.md)*

Escrito por `python examples/courses_page.py` a partir de `examples/courses.txt`; una prueba ejecuta cada línea.

headwise creció a partir de cinco páginas de cursos. Para cada una hay una página que la recorre: {pages}.

Abajo está cada cosa que enseñan, la línea para pegar, tras las de arriba, y lo que imprime: {here} de {total} están
aquí; de las otras se dice por qué no. [Un informe](../studies/claims.md), en inglés, juzga lo que afirman; el
[glosario](glossary.md) tiene los términos, [aprender](learn.es.md) los ejercicios de `headwise learn`.
""",
}
COLUMNS = {"en": "| | thing | paste | it gives |", "es": "| | cosa | pegar | da |"}


@dataclass
class Thing:
    """One row: what a page teaches, and what shows it here."""

    number: str
    words: dict[str, str]
    kind: str = ""  # one of KINDS
    line: str = ""
    gives: dict[str, str] = field(default_factory=dict)  # in words, of a command, a picture, and what is not here


@dataclass
class Course:
    page: str  # the page that walks through it, "course-chapter"
    title: dict[str, str]
    setup: str = ""
    things: list[Thing] = field(default_factory=list)


def markdown_text(text: str) -> str:
    """A text in one line, with signs escaped that Markdown would take for markup; backticks stay."""
    for sign in ("\\", "|", "*", "<", "_"):  # the backslash first, as the others bring more of it
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def both(words: str) -> dict[str, str]:
    english, _, spanish = words.partition(" | ")
    return {"en": english.strip(), "es": (spanish or english).strip()}


def courses() -> list[Course]:
    result: list[Course] = []
    for line in Path(__file__).with_name("courses.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            _, page, words = line.split(" ", 2)
            result.append(Course(page, both(words)))
        elif line.startswith((">>> ", "... ")):
            result[-1].setup += line[4:] + "\n"
        elif found := re.fullmatch(r"  (\w+) ?(.*)", line):
            result[-1].things[-1].kind, result[-1].things[-1].line = found[1], found[2]
        elif line.startswith("  = "):
            result[-1].things[-1].gives = both(line[4:])
        elif line.strip():
            number, words = line.split(" ", 1)
            result[-1].things.append(Thing(number, both(words)))
    return result


def printed(code: str, names: dict[str, Any]) -> str:
    """What a session shows after this line: the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "courses.txt", "exec"), names)
    return "" if last is None else repr(eval(compile(ast.Expression(last.value), "courses.txt", "eval"), names))


def verdict(start: str) -> str:
    claims = (ROOT / "studies" / "claims.md").read_text(encoding="utf-8")
    row = next(row for row in claims.splitlines() if row.startswith(f"| {start}") and row.count(" | ") == 2)
    return row.split(" | ")[1]


def rows(course: Course) -> Iterator[tuple[Thing, dict[str, str]]]:
    """Each thing with what its line gives, in both languages."""
    names: dict[str, Any] = {"__name__": "__courses__"}
    exec(compile(course.setup, f"{course.page}, setup", "exec"), names)
    for thing in course.things:
        if thing.kind == "py":
            yield thing, dict.fromkeys(("en", "es"), f"`{printed(thing.line, names)}`")
        elif thing.kind == "claim":
            judged = verdict(thing.line)
            yield thing, {"en": f"**{judged}**", "es": f"**{VERDICTS[judged]}**"}
        else:
            yield thing, thing.gives or {"en": "", "es": ""}


def cell(thing: Thing, language: str) -> str:
    if thing.kind == "claim":
        return "[report](../studies/claims.md)" if language == "en" else "[informe](../studies/claims.md) (en inglés)"
    if thing.kind == "see":
        line = thing.line.replace(".en.", f".{language}.")
        translated = line.replace(".md", ".es.md")
        in_english = ""
        if language == "es" and (ROOT / "docs" / translated).exists():
            line = translated
        elif language == "es" and ".md" in line and not line.startswith("glossary"):
            in_english = " (en inglés)"
        return f"[{line.rpartition('/')[2]}]({line}){in_english}"
    return {"no": "-"}.get(thing.kind, f"`{thing.line}`")


def page_of(course: Course, language: str) -> str:
    return course.page + {"en": ".md", "es": ".es.md"}[language]


def pages() -> dict[str, str]:
    """Both pages by language."""
    found = courses()
    made = [(course, list(rows(course))) for course in found]
    things = [thing for course in found for thing in course.things]
    missing = sum(thing.kind == "no" for thing in things)
    result = {}
    for language, introduction in INTRODUCTION.items():
        links = ", ".join(f"[{course.title[language]}]({page_of(course, language)})" for course in found)
        text = introduction.format(pages=links, total=len(things), here=len(things) - missing)
        for course, shown in made:
            text += f"\n## [{course.title[language]}]({page_of(course, language)})\n\n"
            text += f"```python\n{course.setup}```\n\n{COLUMNS[language]}\n| --- | --- | --- | --- |\n"
            for thing, gives in shown:
                words = markdown_text(thing.words[language])
                text += f"| {thing.number} | {words} | {cell(thing, language)} | {gives[language]} |\n"
        result[language] = text
    return result


def main() -> None:
    for language, text in pages().items():
        PAGES[language].write_text(text, encoding="utf-8")
    print(f"wrote {' and '.join(str(path.relative_to(ROOT)) for path in PAGES.values())}")


if __name__ == "__main__":
    main()
