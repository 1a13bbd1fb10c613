"""Which head was which: records of reshaped models, chains of them, and models that share an ancestor."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from cases import refuses
from surveys import survey_of

from headwise.models.lineage import ancestors, counterparts, digest


def folder(path: Path, weights: bytes, source: Path | None = None, origins: list[list[int]] | None = None) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    if source is not None and origins is not None:
        record = {"ancestors": [asdict(found) for found in ancestors(source, origins, path)]}
        (path / "headwise.json").write_text(json.dumps(record))
    return path


@pytest.fixture
def family(tmp_path: Path) -> dict[str, Path]:
    """A parent of two layers of three heads; a child, turned round; a grandchild without a head; a sibling."""
    parent = folder(tmp_path / "parent", b"1")
    child = folder(tmp_path / "child", b"2", parent, [[2, 0, 1], [0, 2, 1]])
    grandchild = folder(tmp_path / "grandchild", b"3", child, [[0, 2], [1, 2]])
    sibling = folder(tmp_path / "sibling", b"4", parent, [[1, 2], [0, 1]])
    return {"parent": parent, "child": child, "grandchild": grandchild, "sibling": sibling}


def test_heads_are_followed_to_the_first_parent_and_back(family: dict[str, Path]) -> None:
    child = {"L0.H0": "L0.H2", "L0.H1": "L0.H0", "L0.H2": "L0.H1", "L1.H0": "L1.H0", "L1.H1": "L1.H2", "L1.H2": "L1.H1"}
    assert counterparts(family["child"], family["parent"]) == child
    assert counterparts(family["parent"], family["child"]) == {old: new for new, old in child.items()}
    assert counterparts(family["grandchild"], family["child"]) == {
        "L0.H0": "L0.H0", "L0.H1": "L0.H2", "L1.H0": "L1.H1", "L1.H1": "L1.H2",
    }  # fmt: skip
    assert counterparts(family["grandchild"], family["parent"]) == {
        "L0.H0": "L0.H2", "L0.H1": "L0.H1", "L1.H0": "L1.H2", "L1.H1": "L1.H1",
    }  # fmt: skip


def test_models_are_known_by_their_weights(family: dict[str, Path], tmp_path: Path) -> None:
    assert counterparts(family["grandchild"], family["sibling"]) == {
        "L0.H0": "L0.H1",
        "L0.H1": "L0.H0",
        "L1.H1": "L1.H1",
    }
    before = counterparts(family["child"], family["parent"])
    moved = family["parent"].rename(tmp_path / "elsewhere")
    assert counterparts(family["child"], moved) == before
    (moved / "model.safetensors").write_bytes(b"5")
    assert counterparts(family["child"], moved) is None
    stranger = folder(tmp_path / "stranger", b"7")
    assert counterparts(stranger, family["child"]) is None
    assert counterparts(stranger, family["parent"]) is None
    assert counterparts(family["child"], family["child"]) is None  # the names are the same anyway
    path = folder(tmp_path / "one", b"1")
    (path / "state.safetensors").write_bytes(b"not the model")
    whole = digest(path)
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    assert digest(path) == whole
    (path / "model-00002-of-00002.safetensors").write_bytes(b"2")
    assert digest(path) != whole


def test_a_damaged_record_is_named(family: dict[str, Path]) -> None:
    said = r"headwise\.json is damaged: it does not say where"
    for origins in ([[0, 1]], [[0, 3], [0, 1]]):  # of other heads
        refuses(partial(ancestors, family["child"], origins, None), said)
    for text in ("{", "[]", "{}", '{"ancestors": [{"folder": "x"}]}', '{"ancestors": 3}'):
        (family["child"] / "headwise.json").write_text(text)
        refuses(partial(counterparts, family["child"], family["parent"]), said)


def test_a_survey_takes_the_names_of_the_heads_it_is_compared_with() -> None:
    survey = survey_of(1, 3)
    found = survey.renamed({"L0.H0": "L0.H2", "L0.H1": "L0.H1"})
    assert [(p.name, p.was) for p in found.profiles] == [
        ("L0.H0 (gone)", "L0.H0"),
        ("L0.H1", "L0.H1"),
        ("L0.H0", "L0.H2"),
    ]
    assert found.profiles[2].scores == survey.profiles[2].scores
