"""The scripts of a page are ES modules that `view/page.py` puts together into one scope."""

import re
from pathlib import Path

import headwise.view
from headwise.view.page import module_script, modules

ENTRIES = ("report.js", "look.js", "walk.js", "why.js")
FOLDER = Path(headwise.view.__file__).parent / "page"
LINES = 4448


def circle(texts: dict[str, str]) -> list[str]:
    """Modules that import one another in a circle, from the first back to it; none where there is no circle."""

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        for target in re.findall(r"^import [^;]*?'\./(\w+\.js)';", texts[name], re.MULTILINE):
            if ring := follow(target, [*path, name]):
                return ring
        return []

    for name in texts:
        if ring := follow(name, []):
            return ring
    return []


def test_scripts() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
    assert circle(texts) == []
    assert circle({"a.js": "import { b } from './b.js';", "b.js": "import './a.js';"}) == ["a.js", "b.js", "a.js"]
    assert {name for entry in ENTRIES for name in modules(entry)} == set(texts)
    assert sum(len(text.splitlines()) for text in texts.values()) <= LINES
    assert [path for path in FOLDER.parents[1].rglob("*.js") if path.parent != FOLDER] == []
    for entry in ENTRIES:
        script, names = module_script(entry), list(modules(entry))
        assert names[0] == "base.js" and names[-1] == entry
        assert not re.search(r"^(import|export)\b", script, re.MULTILINE), entry
        # All share one scope: what a module takes it imports, and no name stands for two things.
        declared = re.findall(r"^(?:async )?(?:function\*?|const|let) (\w+)", script, re.MULTILINE)
        assert sorted(declared) == sorted(set(declared)), entry
        for name in names:
            for taken, target in re.findall(r"^import \{([^}]*)\} from '\./(\w+\.js)';", texts[name], re.MULTILINE):
                for taking in re.split(r",\s*", taken.strip()):
                    assert re.search(rf"^export .*\b{taking}\b", texts[target], re.MULTILINE), (name, taking)
                    assert len(re.findall(rf"\b{taking}\b", texts[name])) > 1, f"{name} has no use for {taking}"
