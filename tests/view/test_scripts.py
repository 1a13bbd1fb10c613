"""The scripts of a page share one scope."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import headwise.view
from headwise.view.film import SCRIPTS as FILM
from headwise.view.page.walk import SCRIPTS as WALK
from headwise.view.report import SCRIPTS as REPORT

PAGES = {
    "report": (*REPORT, *FILM),
    "walk": tuple(f"page/{name}.js" for name in WALK),
    "live": (*FILM, "live.js"),
    "why": ("why.js",),
    "windows": ("windows.js",),
    "compare": ("compare.js",),
}
ROOM = Path(headwise.view.__file__).parent


def repeated(script: str) -> list[str]:
    """Names that are declared twice at the top of a script, of which the last would win without a word."""
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", script, re.MULTILINE)
    return [name for name, count in Counter(names).items() if count > 1]


def test_no_page_declares_a_name_twice() -> None:
    for page, scripts in PAGES.items():
        present = [ROOM / name for name in ("page/base.js", *scripts) if (ROOM / name).exists()]
        assert repeated("".join(path.read_text(encoding="utf-8") for path in present)) == [], page
    assert repeated("function a() {}\nconst b = 1;\n  function b() {}\nasync function a() {}\n") == ["a"]


def test_every_script_is_of_a_page() -> None:
    used = {name for scripts in PAGES.values() for name in scripts} | {"page/base.js"}
    assert {path.relative_to(ROOM).as_posix() for path in ROOM.rglob("*.js")} <= used
