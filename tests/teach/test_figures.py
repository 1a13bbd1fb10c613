"""The figures: made by their script, the same in both places, and readable; and the alignment that a model learns."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from headwise.corpus import verbs
from headwise.teach.exercises import exercises

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import alignment
    import figures

    return figures, alignment


def test_the_figures_are_what_the_script_makes(examples: Any) -> None:
    figures, _ = examples
    made = figures.pictures()
    assert len(made) == 18
    for name, picture in made.items():
        for folder in figures.PLACES:
            assert (folder / name).read_text(encoding="utf-8") == picture, f"{name}: run python examples/figures.py"
        root = ElementTree.fromstring(picture)
        texts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
        assert root.get("role") == "img" and len(texts["title"]) > 5 and len(texts["desc"]) > 40
        assert "prefers-color-scheme: dark" in picture and not re.search(r"href|url\(|<script", picture)
        width = float(root.get("width", 0))
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(text.get("x", -1)) <= width
    used = {exercise.figure_file(language) for exercise in exercises() if exercise.figure for language in ("en", "es")}
    assert used == {f"figures/{name}" for name in made}


@pytest.mark.slow
def test_cross_attention_learns_an_alignment(examples: Any) -> None:
    _, alignment = examples
    assert alignment.right_place(verbs.Cell("write", "future", "he")) == [0, 2]
    assert alignment.right_place(verbs.Cell("write", "perfect", "I")) == [0, 1, 2]
    pairs = alignment.Pairs(verbs.cells(core=True))
    _, even = alignment.controls(pairs)
    with torch.random.fork_rng(devices=[]):
        model, source, target = alignment.trained(pairs, seed=0, steps=80)
    mean, added = alignment.cross_maps(model, source, target)
    assert mean.shape == added.shape == (360, target.shape[1], source.shape[1])
    assert alignment.accuracy(added, pairs.cells) > even + 0.15
    lengths = (source != alignment.PAD).sum(1)
    assert all(float(mean[n, :, int(length) :].abs().sum()) == 0 for n, length in enumerate(lengths))
    assert alignment.figure("es", pairs, added).count("<rect") > 15
