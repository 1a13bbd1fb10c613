"""The HeadVis tree: the public shape of every file, and numbers that are those of the maps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import refuses
from jsonschema import Draft202012Validator

import headwise as hw
from headwise.corpus.documents import Text
from headwise.gpt.gpt import GPT
from headwise.heads import blocks
from headwise.heads.headvis import check_headvis, write_headvis
from headwise.heads.survey import survey

# The shape that the public pipeline of HeadVis documents.
SHAPE = json.loads(Path(__file__).with_name("headvis.schema.json").read_text(encoding="utf-8"))


def fits(value: Any, kind: str) -> None:
    """It has all fields of that kind of file, and no others."""
    Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SHAPE["$defs"]}).validate(value)


@pytest.fixture(scope="module")
def text(model: GPT) -> Text:
    generator = torch.Generator().manual_seed(1)
    documents = [
        torch.randint(model.config.vocab_size, (11 + n % 13,), generator=generator).tolist() for n in range(47)
    ]
    return Text(documents, lambda ids: tuple(f"t{i}" for i in ids))


@pytest.mark.slow
def test_the_tree_has_the_public_shape_and_the_models_weights(
    model: GPT, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ROWS", 5)
    made = survey(model, text, controls=False, ablate="none")
    write_headvis(tmp_path / "tree", model, text, made)
    tree = {path.relative_to(tmp_path / "tree").as_posix(): path for path in (tmp_path / "tree").rglob("*.json")}
    data = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in tree.items()}
    assert list(tmp_path.iterdir()) == [tmp_path / "tree"]
    assert data.pop("server_config.json") == data.pop("attributions/manifest.json") == {}
    config, scatter = data.pop("config.json"), data.pop("scatter_data.json")
    fits(config, "config")
    fits(scatter, "scatter")
    assert all(set(row) == {"layer", "head", *config["metrics"]} for row in scatter)
    assert [[row["layer"], row["head"]] for row in scatter] == config["heads"]
    assert scatter[4]["pattern_entropy"] == pytest.approx(made["L1.H1"].entropy.mean, abs=1e-4)
    assert set(data) == {f"heads/L{layer}H{head}.json" for layer, head in config["heads"]}
    for head in data.values():
        fits(head, "head")
        shown = {band: sum(each["interval"] == band for each in head["sequences"]) for band in range(1, 11)}
        assert shown == {**dict.fromkeys(range(1, 10), 3), 10: 5}  # of 47 documents 4 or 5 stand in each band
        assert head["histogram"]["bin_values"] and sum(head["histogram"]["bin_values"]) == 47
        histogram = head["qk_distance_histogram"]
        assert len(histogram["bin_edges"]) == len(histogram["bin_values"]) + 1
    for each in data["heads/L1H2.json"]["sequences"]:
        check_sequence(model, text, each)


def check_sequence(model: GPT, text: Text, sequence: dict[str, Any]) -> None:
    """Its sparse rows are the 8 largest weights of each row, those of 0.005 and more."""
    ids = text.documents[sequence["sequence_id"]]
    with hw.watch(model, maps=True) as seen, torch.no_grad():
        model(torch.tensor([ids]))
    p = seen["L1.H2"].map
    T = sequence["seq_len"]
    assert sequence["tokens"] == [f"t{i}" for i in ids] and len(ids) == T
    kept = np.zeros((T, T))
    for row in range(T):
        keys = np.argsort(-p[row])[:8]
        kept[row, keys] = np.where(p[row, keys] >= 0.005, p[row, keys], 0)
    dense = np.zeros(T * T)
    dense[sequence["attention_indices"]] = sequence["attention_values"]
    assert dense.reshape(T, T) == pytest.approx(kept, abs=6e-5)
    assert sequence["max_activation"] == pytest.approx(p[1:, 1:].max(), abs=6e-5)


def test_what_the_tree_refuses(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refuses(lambda: check_headvis(tmp_path / "full"), "there already and not empty")
    refuses(lambda: check_headvis(tmp_path / "no/where"), "does not exist; make it first")
