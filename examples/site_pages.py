"""Hooks of mkdocs, for `make docs`: pages of commands and studies, formulas, the look of the reports, a search."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "headwise"
STYLE = SOURCE / "view" / "page" / "base.css"  # paper, serif and colours of the reports
COMMAND = "command.md"
STUDIES = ROOT / "studies"
SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"^\$\$(.+)\$\$$", re.MULTILINE)
LINK = re.compile(r"\]\((?!http|#|/)([^)]+)\)")
# What comes out of a command, where that is a picture; other sections of docs/command.md show what is printed.
PICTURES = {
    "train": ("report-sentence.png", "The report of a run: the model is inside it"),
    "look": ("look.png", "The heads of Gemma 3 270M, which runs behind the page"),
    "heads": ("report-heads.png", "Two heads side by side in the report"),
}


def on_config(config: Any) -> Any:
    """Give each command its place among the pages."""
    config.nav.append({"Commands": [{name: f"command/{name}.md"} for name in sections()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the style of the reports, a page for each command, and the studies."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "base.css", content=STYLE.read_text(encoding="utf-8")))
    for name in sections():
        files.append(File.generated(config, f"command/{name}.md", content=command_page(name)))
    for path in STUDIES.glob("*.md"):
        content = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        files.append(File.generated(config, f"studies/{path.name}", content=content))
    for path in (STUDIES / "figures").iterdir():
        files.append(File.generated(config, f"studies/figures/{path.name}", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Formulas as MathML, which browsers set without a script; of the page of all commands what leads to each."""
    if page.file.src_uri == COMMAND:
        markdown = SECTION.sub(lambda match: f"## {match[1]}\n\n{briefly(match[1])}\n\n", markdown)
    return FORMULA.sub(lambda match: formula(match[1]), markdown.replace("](../studies/", "](studies/"))


def on_page_content(html: str, **_: Any) -> str:
    """Wide tables scroll by themselves, and so does code, which keys can reach."""
    html = re.sub(r"(<table\b.*?</table>)", r'<div class="table" tabindex="0">\1</div>', html, flags=re.DOTALL)
    return html.replace("<pre>", '<pre tabindex="0">')


def on_post_build(config: Any) -> None:
    """The index of the search, for a page that was opened from a disk, and which may load scripts alone."""
    folder = Path(config["site_dir"]) / "search"
    entries = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))["docs"]
    (folder / "pages.js").write_text(index_script(entries), encoding="utf-8")


def index_script(entries: Iterable[Mapping[str, str]]) -> str:
    """The sections of all pages, under the names of their pages; an entry without # is a page as a whole."""
    titles: dict[str, str] = {}
    rows = []
    for entry in entries:
        page, _, section = entry["location"].partition("#")
        if not section:
            titles[page] = entry["title"]
            continue
        if page == "command/" + entry["title"].removeprefix("headwise ") + ".html":  # the head of a command's page
            titles[page] = entry["title"]
        name = titles[page] if entry["title"] == titles[page] else f"{titles[page]}: {entry['title']}"
        rows.append({"address": entry["location"], "name": name, "text": " ".join(entry["text"].split()) + " "})
    prepare = (
        "for (const page of PAGES) { page.title = page.name.toLowerCase(); page.words = page.text.toLowerCase(); }"
    )
    return f"window.PAGES = {json.dumps(rows, ensure_ascii=False)};\n{prepare}\n"


def sections() -> dict[str, str]:
    """What docs/command.md says of each command."""
    return dict(SECTION.findall((ROOT / "docs" / COMMAND).read_text(encoding="utf-8")))


def commands() -> dict[str, Any]:
    """The commands as the command line knows them."""
    import typer

    from headwise.cli.run import app

    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def briefly(name: str) -> str:
    """A command in a sentence, with the way to its page."""
    return f"{commands()[name].help.splitlines()[0]} [All of it](command/{name}.md)."


def command_page(name: str) -> str:
    """A page of one command: what comes out, what docs/command.md says of it, and all of its options."""
    known = commands()[name]
    pieces = [f"# headwise {name}", known.help.splitlines()[0]]
    if name in PICTURES:
        path, caption = PICTURES[name]
        pieces += [f"![{caption}](../{path})"]
    pieces.append(LINK.sub(r"](../\1)", sections()[name].strip()))
    rows = [f"| {option_names(each)} | {option_help(each)} |" for each in known.params if each.name != "help"]
    pieces += ["## Options", "\n".join(["| option | what it says |", "| --- | --- |", *rows])]
    pieces.append(
        "`--json` and `--debug` go with every command; `python examples/schema_page.py` writes what the JSON holds."
    )
    return "\n\n".join(pieces) + "\n"


def option_names(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def option_help(option: Any) -> str:
    text = " ".join((option.help or "").split()).replace("|", "\\|")
    default = option.default
    shown = default is not None and not option.is_flag and option.param_type_name == "option" and not callable(default)
    return f"{text} Default: {default}." if shown and "efault" not in text else text


def formula(latex: str) -> str:
    from latex2mathml.converter import convert

    return f'<div class="formula" tabindex="0">{convert(latex, display="block")}</div>'
