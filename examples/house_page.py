"""Write docs/house.md: every file of the package with the first line of its docstring, package by package."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "headwise"
ROOMS = (
    "",
    "cost",
    "backends",
    "layer",
    "corpus",
    "gpt",
    "courses",
    "models",
    "heads",
    "reshape",
    "checker",
    "learn",
    "view",
    "cli",
)
INTRODUCTION = """# Every file

Written by `python examples/house_page.py` from the first lines of the files. `CONTRIBUTING.md` says which file to open
for which change. A module imports from its own package and from packages to its left; a test checks this.

`spec, masks ... -> backends -> layer -> corpus -> gpt -> courses -> models -> heads -> reshape -> teach -> view -> cli`
"""

BASE = "Data and tools of all packages. These files import no package; `__init__.py` is `import headwise`."


def page() -> str:
    return INTRODUCTION + "".join(map(section, ROOMS))


def section(room: str) -> str:
    """The table of one package; that of "" is the top, whose files serve all packages."""
    folder = SOURCE / room
    files = sorted(folder.rglob("*.py") if room else folder.glob("*.py"))
    apart = (folder / "__init__.py", folder / "__main__.py")  # a docstring that stands above the table, and a line
    files = [path for path in files if path not in apart or defines(path)]
    rows = [f"| `{path.relative_to(folder)}` | {first_line(path)} |" for path in files]
    title, about = (f"{room}/", first_line(folder / "__init__.py")) if room else ("The top of the package", BASE)
    return "\n".join(["", f"## {title}", "", about, "", "| file | what it holds |", "| --- | --- |", *rows, ""])


def defines(path: Path) -> bool:
    """Does it hold more than a docstring and imports?"""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body)


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n", 1)[0]


if __name__ == "__main__":
    (ROOT / "docs" / "house.md").write_text(page(), encoding="utf-8")
