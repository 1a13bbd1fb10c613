"""The scripts of a page are ES modules that `view/page.py` puts together into one scope."""

import re
from pathlib import Path

import headwise.view
from headwise.view.page import module_script, modules

ENTRIES = ("report_start.js", "look.js", "page/walk.js", "why.js")
FOLDER = Path(headwise.view.__file__).parent
SEAMS = ("page/base.js", "page/model.js", "report_state.js")


def test_scripts() -> None:
    for entry in ENTRIES:
        script = module_script(entry)
        assert "function byId" in script and not re.search(r"^(import|export)\b", script, re.MULTILINE), entry
    names = list(modules("report_start.js"))
    assert names[0] == "page/base.js" and names[-1] == "report_start.js"
    reached = {name for entry in ENTRIES for name in modules(entry)}
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.js")} == reached
    # What many modules take from one says the types of its parameters.
    for file in SEAMS:
        text = (FOLDER / file).read_text(encoding="utf-8")
        typed = {name: types for types, name in re.findall(r"(@(?:(?!\*/).)*)\*/\nexport \w+ (\w+)", text, re.DOTALL)}
        for name, parameters in re.findall(r"^export function (\w+)\(([^)]*)", text, re.MULTILINE):
            assert name in typed and (not parameters or "@param" in typed[name]), f"{file}: {name}"
