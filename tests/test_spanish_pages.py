"""The Spanish pages lead to one another, and the README in Spanish has the figures and commands of the English one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_spanish_page_leads_to_spanish_pages() -> None:
    docs = ROOT / "docs"
    for page in [ROOT / "README.es.md", *docs.glob("*.es.md")]:
        text = re.sub(r"\[In English\]\(.*?\)", "", page.read_text("utf-8"))
        links = re.findall(r"\]\((?:docs/)?([\w-]+)\.md\b", text)
        assert [name for name in links if (docs / f"{name}.es.md").exists()] == [], page.name


def figures(row: str) -> list[str]:
    return sorted(re.findall(r"\d[\d.,]*\d|\d", row))


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
