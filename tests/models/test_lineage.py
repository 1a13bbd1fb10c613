"""Which models a reshaped one comes from: records, chains of them, digests of weights."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from cases import refuses

from headwise.models.lineage import ancestors, digest, run_of


def folder(path: Path, weights: bytes, source: Path | None = None) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(weights)
    if source is not None:
        record = {"ancestors": [asdict(found) for found in ancestors(source, path)]}
        (path / "headwise.json").write_text(json.dumps(record))
    return path


@pytest.fixture
def family(tmp_path: Path) -> dict[str, Path]:
    """A run, a child of it, and a grandchild."""
    parent = folder(tmp_path / "parent", b"1")
    (parent / "run.json").write_text("{}")
    child = folder(tmp_path / "child", b"2", parent)
    return {"parent": parent, "child": child, "grandchild": folder(tmp_path / "grandchild", b"3", child)}


def test_a_model_knows_all_that_it_comes_from(family: dict[str, Path], tmp_path: Path) -> None:
    found = ancestors(family["grandchild"], tmp_path / "next")
    assert [each.folder for each in found] == ["../grandchild", "../child", "../parent"]
    assert [each.digest for each in found] == [digest(family[name]) for name in ("grandchild", "child", "parent")]
    assert ancestors(family["parent"], None)[0].folder == str(family["parent"])
    assert run_of(family["parent"]) == family["parent"]
    run = run_of(family["grandchild"])
    assert run is not None and run.resolve() == family["parent"]


def test_models_are_known_by_their_weights(family: dict[str, Path], tmp_path: Path) -> None:
    (family["parent"] / "model.safetensors").write_bytes(b"5")
    assert run_of(family["child"]) is None
    path = folder(tmp_path / "one", b"1")
    (path / "state.safetensors").write_bytes(b"not the model")
    whole = digest(path)
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    assert digest(path) == whole
    (path / "model-00002-of-00002.safetensors").write_bytes(b"2")
    assert digest(path) != whole


def test_a_damaged_record_is_named(family: dict[str, Path]) -> None:
    for text in ("{", "[]", "{}", '{"ancestors": [{"folder": "x"}]}', '{"ancestors": 3}'):
        (family["child"] / "headwise.json").write_text(text)
        refuses(lambda: run_of(family["child"]), r"headwise\.json is damaged: it does not say where")
