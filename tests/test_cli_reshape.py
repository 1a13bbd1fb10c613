"""`headwise share` and `headwise prune`: what they promise on good input, and one clear line, nothing lost, on bad."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import rows
from invoking import Invoke, assert_refused, contents, interrupted, start
from small_models import prose

from headwise.gpt.checkpoint import load_model
from headwise.gpt.run import Settings, run_training
from headwise.models.hf import load_folder
from headwise.reshape import job

SHAPE = {"n_layers": 2, "n_heads": 6, "head_dim": 4, "d_model": 24, "d_ff": 29, "context": 17}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(prose(250))
    return path


def trained(folder: Path, text: Path, preset: str, steps: int = 2, **shape: int) -> Path:
    settings = Settings(preset=preset, text=(str(text),), steps=steps, shape={**SHAPE, **shape})
    run_training(folder, settings, lambda progress: None, resume=False, n_samples=0)
    return folder


@pytest.fixture(scope="module")
def original(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run") / "words", text, "llama", steps=40, n_kv_heads=6)


@pytest.fixture
def run(original: Path) -> Iterator[Path]:
    """A trained run of 2 layers of 6 heads, whose files must be the same after the test."""
    before = contents(original)
    yield original
    assert contents(original) == before


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of something else."""
    monkeypatch.setattr(job, "verify", lambda *arguments: "not verified")


def test_share_writes_a_folder_that_transformers_reads(run: Path, text: Path, tmp_path: Path, invoke: Invoke) -> None:
    out = tmp_path / "shared"
    code, printed, err = invoke(
        "share", run, "--kv-heads", 2, "--text", text, "--groups", "best", "--out", out, "--json"
    )
    assert code == 0, err
    document = json.loads(printed)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "headwise.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [out]
    assert document["verified"].startswith(f"transformers {transformers.__version__}, largest difference")
    saved = json.loads((out / "headwise.json").read_text())
    assert {"schema": "headwise-reshaped-1", **saved} == document and saved["details"]["groups"] == "best"
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2

    damage = document["damage"]
    assert damage["cache_bytes"]["before"] == 3 * damage["cache_bytes"]["after"]
    assert damage["kl"] > 0 and damage["loss"]["after"] > 0
    model, tokens = load_model(out)
    assert damage["parameters"]["after"] == model.n_parameters
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert len(tokens) == model.config.vocab_size


def test_a_child_has_its_parents_text(run: Path, text: Path, invoke: Invoke, tmp_path: Path, unverified: None) -> None:
    shared, pruned = tmp_path / "shared", tmp_path / "pruned"
    printed = invoke("share", run, "--kv-heads", 3, "--out", shared).out
    for words in rows("shown_damage"):
        assert words in printed
    outcome = invoke("prune", shared, "--heads", "L0.H1,L1.H3", "--out", pruned)
    assert outcome.code == 0 and "gone: L0.H1, L1.H3" in outcome.out, outcome.err
    given = ("--documents", 7, "--ablate", "none", "--json")
    code, printed, err = invoke("heads", pruned, *given)
    assert code == 0, err
    found = json.loads(printed)
    silent = "Silent heads, whose output is zero whatever they look at: L0.H1, L1.H3."
    assert found["texts"] == ["what the run held out"] and silent in found["notes"]
    moved = tmp_path / "elsewhere" / "pruned"
    moved.parent.mkdir()
    pruned.rename(moved)
    assert_refused(invoke("heads", moved, "--json"), "nor made from one that can be found")
    assert_refused(invoke("share", moved, "--kv-heads", 1, "--json"), "is no run of headwise, nor made from one")


def test_a_model_without_a_form_is_written_in_our_layout(text: Path, invoke: Invoke, tmp_path: Path) -> None:
    run = trained(tmp_path / "microgpt", text, "microgpt")
    code, printed, err = invoke("share", run, "--kv-heads", 3, "--text", text, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert json.loads(printed)["verified"].startswith("headwise, largest difference")
    assert load_model(tmp_path / "out")[0].config.n_kv_heads == 3


def test_ctrl_c_while_writing_leaves_nothing(run: Path, text: Path, invoke: Invoke, tmp_path: Path) -> None:
    for moment in ("write_folder", "verify", "write_whole"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "verify", lambda *arguments: "not verified")
            patch.setattr(job, moment, interrupted)
            outcome = invoke("share", run, "--kv-heads", 2, "--text", text, "--out", tmp_path / "out", "--json")
        assert (outcome.code, outcome.out) == (130, "")
        assert outcome.err.splitlines()[-1] == "headwise: interrupted; no file was written"
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_healing_and_writes_the_model(run: Path, text: Path, tmp_path: Path, unverified: None) -> None:
    given = ("share", run, "--kv-heads", 2, "--text", text, "--heal", 60, "--out", tmp_path / "out")
    with start(*given, stdout=subprocess.DEVNULL) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("step 6/60"):
                break
        child.send_signal(signal.SIGINT)
        words = child.stderr.read()
    assert child.returncode == 0
    assert re.search(r"healing stopped after step \d+; the best weights so far are kept", words)
    record = json.loads((tmp_path / "out" / "headwise.json").read_text())
    assert 6 <= record["details"]["healing"]["steps_made"] < 60
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_prune_takes_heads_out_of_weights(run: Path, text: Path, invoke: Any, tmp_path: Path, unverified: None) -> None:
    out = tmp_path / "out"
    outcome = invoke("prune", run, "--keep", 0.67, "--uniform", "--text", text, "--out", out, "--heal", 4, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert not document["details"]["zeroed"] and len(document["details"]["heads"]) == 4
    assert load_model(out)[0].config.n_heads == 4
    assert document["notes"][0].startswith("ranked by importance on ")
    assert document["damage"]["cache_bytes"]["after"] * 3 == document["damage"]["cache_bytes"]["before"] * 2
    assert document["healed"]["kl"] < document["damage"]["kl"]


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_half_precision_mistral_is_shared_healed_and_read_back(
    has_bfloat16: bool, original: Path, text: Path, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the format of the source, whatever the processor computes in."""
    import transformers as tf

    monkeypatch.setattr("headwise.models.open.has_bfloat16", lambda: has_bfloat16)
    torch.manual_seed(0)
    source, out = tmp_path / "mistral", tmp_path / "out"
    _, tokens = load_model(original)
    config = tf.MistralConfig(
        vocab_size=len(tokens), hidden_size=22, intermediate_size=29, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=6, max_position_embeddings=19, sliding_window=7, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tf.MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(original / name, source / name)
    before = contents(source)
    given = ("--kv-heads", 2, "--text", text, "--heal", 3, "--out", out, "--json")
    outcome = invoke("share", source, *given)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["verified"].startswith("transformers ")
    per_token = 2 * 2 * 4 * 6 * 2 * 6 / 19  # of a text of 19 tokens 6 are held beside the one that is read
    assert document["damage"]["cache_bytes"] == pytest.approx({"before": per_token, "after": per_token / 2})
    monkeypatch.undo()
    model: Any = load_folder(out)
    assert model.dtype == torch.bfloat16
    assert (model.config.num_key_value_heads, model.config.sliding_window) == (2, 7)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    half = invoke("prune", out, "--heads", "L0.H1", "--text", text, "--dtype", "fp16", "--out", tmp_path / "half")
    assert half.code == 0 and load_folder(tmp_path / "half").dtype == torch.float16, half.err
    assert contents(source) == before
