"""The figures of the exercises: readable, and the same on the pages that show them."""

import re
from pathlib import Path
from xml.etree import ElementTree

from cases import every

from headwise.learn.exercises import exercises

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {exercise.figure_file(language) for exercise in exercises() if exercise.figure for language in ("en", "es")}


@every("name", sorted(FIGURES))
def test_a_figure_is_readable_and_the_same_on_a_page(name: str) -> None:
    picture, twin = (ROOT / "src" / "headwise" / "learn" / name).read_text(encoding="utf-8"), ROOT / "docs" / name
    assert not twin.exists() or twin.read_text(encoding="utf-8") == picture
    root = ElementTree.fromstring(picture)
    texts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    assert root.get("role") == "img" and len(texts["title"]) > 5 and len(texts["desc"]) > 40
    assert "prefers-color-scheme: dark" in picture and not re.search(r"href|url\(|<script", picture)
    width = float(root.get("width", 0))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(text.get("x", -1)) <= width
