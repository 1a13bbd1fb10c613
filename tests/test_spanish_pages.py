"""The Spanish pages say what the English ones say: the same figures and commands, and nothing in English between."""

import re
import tomllib
from pathlib import Path

import pytest
from invoking import Invoke

from headwise.cli import app

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = re.compile(r"\b(the|with|and|which|are|of|that|without)\b")
TITLES = re.compile(r"`[^`]*`|\*\[In English\]\(.*?\)\*|```.*?```", re.DOTALL)


def names_of_commands() -> list[str]:
    return [command.name or command.callback.__name__ for command in app.app.registered_commands]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import spanish_pages

    return spanish_pages


@pytest.mark.parametrize("name", ["heads", "check"])
def test_a_page_is_made_of_the_english_one(name: str, pages: object) -> None:
    written = pages.spanish_page(name)  # type: ignore[attr-defined]
    assert (ROOT / "docs" / f"{name}.es.md").read_text("utf-8") == written, "run examples/spanish_pages.py"
    english = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert figures(written) == figures(english)
    assert not ENGLISH.search(TITLES.sub("", written))


def test_a_spanish_page_leads_to_spanish_pages() -> None:
    docs = ROOT / "docs"
    for page in [ROOT / "README.es.md", *docs.glob("*.es.md")]:
        text = re.sub(r"\[In English\]\(.*?\)", "", page.read_text("utf-8"))
        links = re.findall(r"\]\((?:docs/)?([\w-]+)\.md\b", text)
        assert [name for name in links if (docs / f"{name}.es.md").exists()] == [], page.name


def figures(page: str) -> list[str]:
    return sorted(re.findall(r"\d[\d.,]*\d|\d", page.replace(".es.md", ".md")))


def test_a_sentence_without_spanish_is_named(pages: object) -> None:
    with pytest.raises(ValueError, match="no Spanish for: Nobody has put this into words"):
        pages.spanish("Nobody has put this into words.")  # type: ignore[attr-defined]
    half = "Heads specialise by role. Nobody has put this into words."
    with pytest.raises(ValueError, match="no Spanish for"):
        pages.sentences(half)  # type: ignore[attr-defined]


def test_the_readme_in_spanish_runs_the_same_and_has_the_same_figures() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "README.es.md")]
    code = [re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for text in texts]
    english, spanish = ([re.sub(r"#.*|[ \t]+$", "", block, flags=re.MULTILINE) for block in blocks] for blocks in code)
    assert [re.sub(r"\s+\n", "\n", block) for block in spanish] == [re.sub(r"\s+\n", "\n", block) for block in english]
    rows = [re.findall(r"^\|.*\|$", text, re.MULTILINE) for text in texts]
    assert [figures(row) for row in rows[1]] == [figures(row) for row in rows[0]]
    heads = [re.findall(r"L\d\.H\d|\b0\.\d\d\b|`\w+`", text.split("## ")[0]) for text in texts]
    assert set(heads[1]) >= {figure for figure in heads[0] if re.match(r"L\d|0\.", figure)}
    assert len(texts[1].splitlines()) < 110


@pytest.mark.parametrize("command", ["", *names_of_commands()])
def test_help_is_spanish(command: str, invoke: Invoke) -> None:
    screen = invoke(*command.split(), "--help", "--lang", "es")
    assert screen.code == 0 and screen.out.startswith("Uso: headwise") and screen.err == ""
    assert not ENGLISH.search(screen.out.partition("Ejemplo:")[0]), ENGLISH.search(screen.out)
    assert "..." not in screen.out.partition("Aprender")[2]  # each door's lines are whole sentences


REFUSED = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text(encoding="utf-8"))["spanish"]["lines"]


def test_what_a_beginner_is_refused_is_spanish(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "es_MX.UTF-8")
    (tmp_path / "mlp.txt").write_text("class MLP:\n    pass\n")
    for line in REFUSED:
        refused = invoke(*line.split())
        assert (refused.code, refused.out) == (2, ""), line
        told = refused.err.replace(str(tmp_path), "")
        assert told.startswith("headwise: ") and not ENGLISH.search(told), told
