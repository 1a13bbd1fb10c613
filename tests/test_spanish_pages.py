"""The Spanish pages say what the English ones say: the same figures and commands, and nothing in English between."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = re.compile(r"\b(the|with|and|which|are|of|that|without)\b")
TITLES = re.compile(r"`[^`]*`|\*\[In English\]\(.*?\)\*|```.*?```", re.DOTALL)


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
