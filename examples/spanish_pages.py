"""The Spanish of the pages that commands write: docs/heads.es.md and docs/check.es.md.

    python examples/spanish_pages.py

Each is made of the English page as it stands, sentence by sentence, so that no figure can differ: `spanish.toml` pairs
what the English page says with its Spanish, and `{a}` in both is whatever stands there. Sentences that the library says
in two languages itself come from `words.toml`. A sentence without Spanish stops it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from headwise.words import table

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PAGES = ("heads", "check")
SECTIONS = ("sentence", "job", "role")  # of words.toml, whose sentences stand on the pages
SLOT = re.compile(r"\{(\w*)(?::[^{}|]*)?\}")
NUMBERS = ("count", "width", "low", "high", "number")  # slots that take a number alone
LONG = ("where", "each")  # slots that take several sentences
PLAIN = re.compile(r"[^A-Za-z]*|-+|:?-+:?|`[^`]*`")  # numbers and names, which are the same in every language
KEPT = re.compile(
    r"L\d\.H\d|[\w.]+-[\w.-]+|gpt\d|(GQA|MHA|MQA)( / MHA)?|ms|batch|AMD \w+|Linux|[\d.]+\+cpu|d_\w+|1/sqrt\(\w+\)"
)

Pattern = tuple[re.Pattern[str], str]


@cache
def phrases() -> dict[str, Any]:
    """`texts` in pairs, `words` that stand inside what a slot took, `comments` of code."""
    return tomllib.loads((HERE / "spanish.toml").read_text(encoding="utf-8"))


def pattern(english: str, spanish: str) -> Pattern:
    """What an English sentence looks like with any values, and the Spanish with a place for each."""
    parts, done, seen = "", 0, set[str]()
    for slot in SLOT.finditer(english):
        name = slot[1]
        value = r"[-+.,\d]+" if name in NUMBERS else ".+?" if name in LONG else r"(?:(?!\. [A-Z]).)+?"
        parts += re.escape(english[done : slot.start()]) + (f"(?P={name})" if name in seen else f"(?P<{name}>{value})")
        seen.add(name)
        done = slot.end()
    return re.compile(parts + re.escape(english[done:])), SLOT.sub(r"{\1}", spanish)


@cache
def patterns() -> list[Pattern]:
    pairs = [(pair["en"], pair["es"]) for pair in phrases()["texts"]]
    pairs += [(text["en"], text["es"]) for key, text in table().items() if key.split(".")[0] in SECTIONS]
    pairs.sort(key=lambda pair: -len(SLOT.sub("", pair[0])))  # the one that says most comes first
    return [pattern(*pair) for pair in pairs if "|" not in pair[0]]


def spanish(english: str) -> str:
    """A sentence, a cell or a heading in Spanish. Raises ValueError where it has none."""
    text = english.replace("\\_", "_").strip()
    said = whole(text)
    if said is None and text.startswith("**") and text.endswith("**"):
        inner = whole(text.strip("*"))
        said = None if inner is None else f"**{inner}**"
    if said is None:
        raise ValueError(f"examples/spanish.toml has no Spanish for: {text}")
    return said.replace("_", "\\_") if "\\_" in english else said


def whole(text: str) -> str | None:
    if PLAIN.fullmatch(text) or KEPT.fullmatch(text):
        return text
    for sought, answer in patterns():
        if match := sought.fullmatch(text):
            values = match.groupdict()
            return answer.format(
                **{name: values[name] if name == "command" else inside(values[name]) for name in values}
            )
    return None


def inside(value: str) -> str:
    """What stood in a slot: a sentence of its own, or figures with some words between them."""
    if (said := whole(value)) is not None:
        return said
    for english, answer in phrases()["words"].items():
        value = re.sub(english, answer, value)
    return value


def sentences(line: str) -> str:
    """A line of several sentences: as a whole, else one after the other."""
    try:
        return spanish(line)
    except ValueError:
        parts = re.split(r"(?<=[.)]) (?=[A-Z])", line)
        if len(parts) == 1:
            raise
    for end in range(len(parts) - 1, 0, -1):
        first = " ".join(parts[:end])
        if (said := whole(first.replace("\\_", "_"))) is not None:
            said = said.replace("_", "\\_") if "\\_" in line else said
            return f"{said} {sentences(' '.join(parts[end:]))}"
    raise ValueError(f"examples/spanish.toml has no Spanish for: {line}")


def cells(line: str, say: Callable[[str], str]) -> str:
    return "| " + " | ".join(say(cell) if cell.strip() else "" for cell in line.strip().strip("|").split(" | ")) + " |"


def block(text: str) -> str:
    """A paragraph, a heading, a list, a table or a picture."""
    if text.startswith(("```", "<!--")):
        return text
    if text.startswith("|"):
        say = style if text.startswith("| style |") else sentences
        return "\n".join(line if set(line) <= set("|-: ") else cells(line, say) for line in text.splitlines())
    if text.startswith("- "):
        return "\n".join(item(line) for line in re.split(r"\n(?=- )", text))
    if heading := re.fullmatch(r"(#+ )(.+)", text):
        return heading[1] + spanish(heading[2])
    if picture := re.fullmatch(r"!\[(.+)\]\((.+)\)", text):
        return f"![{spanish(picture[1])}]({picture[2]})"
    return wrapped(sentences(" ".join(text.splitlines())))


def style(cell: str) -> str:
    """A cell of the table of styles, whose names are those of files."""
    try:
        return spanish(cell)
    except ValueError:
        return cell


def item(text: str) -> str:
    line = " ".join(part.strip() for part in text.removeprefix("- ").splitlines())
    if "\n" in text:
        return wrapped("- " + sentences(line)).replace("\n", "\n  ")
    if claim := re.fullmatch(r"\*\*(.+?)\*\* (.+)", line):
        return f"- **{spanish(claim[1])}** {sentences(claim[2])}"
    if named := re.fullmatch(r"\*\*(.+?)\*\*: (.+)\.", line):
        return f"- **{spanish(named[1])}**: {sentences(named[2])}."
    return "- " + sentences(line)


def wrapped(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def blocks(page: str) -> Iterator[str]:
    """The blocks of a page, code as one block each; the marks around a table stay with nothing of it."""
    for part in re.split(r"(^```.*?^```$|^<!--.*?-->$)", page, flags=re.DOTALL | re.MULTILINE):
        if part.startswith(("```", "<!--")):
            yield part
        else:
            yield from filter(None, (each.strip("\n") for each in part.split("\n\n")))


def spanish_page(name: str) -> str:
    """The Spanish of docs/NAME.md as it stands."""
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    comments = dict(phrases().get("comments", {}))
    parts = [block(text) for text in blocks(page)]
    for english, answer in comments.items():
        parts = [part.replace(english, answer) if part.startswith("```") else part for part in parts]
    parts.insert(1, f"*[In English]({name}.md)*")
    text = "\n\n".join(parts) + "\n"
    for linked in PAGES:
        text = text.replace(f"]({linked}.md)", f"]({linked}.es.md)") if linked != name else text
    return text.replace("-->\n\n|", "-->\n|").replace("|\n\n<!--", "|\n<!--")


def main() -> None:
    for name in PAGES:
        path = DOCS / f"{name}.es.md"
        path.write_text(spanish_page(name), encoding="utf-8")
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
