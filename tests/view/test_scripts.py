"""The scripts of a page are ES modules that `view/page.py` puts together into one scope."""

import re
from collections import Counter
from pathlib import Path

import headwise.view
from headwise.view.page import module_script, modules

ENTRIES = ("report_start.js", "look.js", "page/walk.js", "why.js")
ROOM = Path(headwise.view.__file__).parent
DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (.+)", re.MULTILINE)
IMPORTED = re.compile(r"^import \{([^}]*)\} from '([\w./]+)';$", re.MULTILINE)
EXPORTED = re.compile(
    r"^export (?:async )?(?:function\*?|const|let|class) (\w+)(?: = [^,(;\n]+, (\w+) =)?", re.MULTILINE
)
NO_CODE = re.compile(r"/\*(?s:.*?)\*/|//[^\n]*|'(?:\\.|[^'\\\n])*'")
SEAMS = ("page/base.js", "page/model.js", "report_state.js")


def declared(text: str) -> list[str]:
    """Names that are declared at the top of a module."""
    return [re.match(r"\w+", rest)[0] for rest in DECLARED.findall(text) if re.match(r"\w+", rest)]  # type: ignore[index]


def imported(text: str) -> set[str]:
    return {name.strip() for names, _ in IMPORTED.findall(text) for name in names.split(",") if name.strip()}


def exported(text: str) -> set[str]:
    return {name for names in EXPORTED.findall(text) for name in names if name}


def used(text: str) -> set[str]:
    """Names in the code of a module, those of properties, of keys of objects and of data-attributes left out."""
    code = NO_CODE.sub("", IMPORTED.sub("", text))
    return set(re.findall(r"(?<![\w.$-])([A-Za-z_]\w*)\b(?!\s*:(?!:)|-\w)", code))


def local(text: str) -> set[str]:
    """Names that a module declares anywhere for itself: functions, parameters, variables, alone or in a pattern."""
    code = NO_CODE.sub("", IMPORTED.sub("", text))
    places = re.findall(
        r"function\*? (\w+)|\(([^()]*)\) (?:=>|\{)|(\w+) =>|[,{\s](\w+) =(?!=)|[\[{]([\w, ]+)[\]}]+ (?:=(?!=)|of)", code
    )
    return {name for groups in places for group in groups for name in re.findall(r"\w+", group)}


def troubles(texts: dict[str, str]) -> list[str]:
    """What a page's modules have wrong: names declared twice, not exported, imported for nothing, or not imported."""
    lines: list[str] = []
    homes = Counter(name for text in texts.values() for name in declared(text))
    lines += [f"{name} is declared {count} times" for name, count in homes.items() if count > 1]
    shared = {name for text in texts.values() for name in exported(text)}
    for file, text in texts.items():
        for names, target in IMPORTED.findall(text):
            home = (Path(file).parent / target).as_posix()
            home = re.sub(r"[\w]+/\.\./", "", home)
            for name in filter(None, map(str.strip, names.split(","))):
                if name not in exported(texts[home]):
                    lines.append(f"{file} imports {name}, which {home} does not export")
                if not re.search(rf"\b{name}\b", IMPORTED.sub("", text)):
                    lines.append(f"{file} imports {name} for nothing")
        missing = (used(text) & shared) - set(declared(text)) - imported(text) - local(text)
        lines += [f"{file} uses {name} and does not import it" for name in sorted(missing)]
    return lines


def test_modules_import_what_they_take() -> None:
    for entry in ENTRIES:
        assert troubles(modules(entry)) == [], entry
    assert troubles({"a.js": "export function a() { return b; }\n", "b.js": "export const b = 1;\n"}) == [
        "a.js uses b and does not import it"
    ]
    wrong = {
        "a.js": "import { b, c } from './b.js';\nconst a = b;\n",
        "b.js": "export const b = 1;\nconst a = 2, c = 3;\n",
    }
    assert troubles(wrong) == [
        "a is declared 2 times",
        "a.js imports c, which b.js does not export",
        "a.js imports c for nothing",
    ]


def test_scripts() -> None:
    for entry in ENTRIES:
        script = module_script(entry)
        assert "function byId" in script and not re.search(r"^(import|export)\b", script, re.MULTILINE), entry
    names = list(modules("report_start.js"))
    assert names[0] == "page/base.js" and names[-1] == "report_start.js"
    reached = {name for entry in ENTRIES for name in modules(entry)}
    assert {path.relative_to(ROOM).as_posix() for path in ROOM.rglob("*.js")} == reached
    # What many modules take from one says the types of its parameters.
    for file in SEAMS:
        text = (ROOM / file).read_text(encoding="utf-8")
        typed = {name: types for types, name in re.findall(r"(@(?:(?!\*/).)*)\*/\nexport \w+ (\w+)", text, re.DOTALL)}
        for name, parameters in re.findall(r"^export function (\w+)\(([^)]*)", text, re.MULTILINE):
            assert name in typed and (not parameters or "@param" in typed[name]), f"{file}: {name}"
