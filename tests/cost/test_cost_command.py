"""`headwise cost` as a user runs it: the answer, one JSON document, one clear line on bad input, little loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from invoking import Invoke, Outcome
from real_models import GEMMA, T5

from headwise.cost import PRESETS, TABLE

TWO = ("llama-2-70b", "--context", "4096", "--dtype", "bf16")


def refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err.startswith("headwise: ") and outcome.err.count("\n") == 1, outcome.err
    for word in words:
        assert word in outcome.err


def test_llama_2_70b_keeps_327680_bytes_a_token(invoke: Invoke) -> None:
    outcome = invoke("cost", *TWO)
    assert (outcome.code, outcome.err) == (0, "")
    line = next(line for line in outcome.out.splitlines() if "cache of one token" in line)
    assert line.split()[4:] == ["327,680", "bytes", "320", "KiB"]
    assert "68,976,648,192" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_is_one_document_with_everything(invoke: Invoke) -> None:
    limits = ("--gpu-memory", "160GB", "--bandwidth", "2TB/s", "--batch", "3")
    outcome = invoke("cost", *TWO, *limits, "--json", "--variants", "--choose")
    assert (outcome.code, outcome.err) == (0, "")
    bill = json.loads(outcome.out)
    assert bill["cache"]["bytes_per_token"] == 327_680
    assert bill["setting"]["batch"] == 3 and bill["setting"]["gpu_memory"] == 160 * 10**9
    assert len(bill["layers"]) == 80
    assert [row["name"] for row in bill["variants"] if row["present"]] == ["GQA-8"]
    assert bill["choice"]["n_kv_heads"] == 8
    alone = json.loads(invoke("cost", *TWO, "--json").out)
    assert alone["variants"] is None and alone["choice"] is None and alone["memory"] is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints(invoke: Invoke, name: str) -> None:
    encoder = name.startswith("bert")
    more = () if encoder else ("--variants", "--gpu-memory", "3TB", "--bandwidth", "900GB/s", "--batch", "2")
    outcome = invoke("cost", name, "--choose", *more)
    assert (outcome.code, outcome.err) == (0, "")
    tables, _, rules = outcome.out.partition("Rules of thumb, not measurements")
    assert max(len(line) for line in tables.splitlines() if line.startswith(" ")) <= 80
    assert "Source: Vaswani et al. 2017" in rules
    assert ("it keeps no cache" in outcome.out) == encoder
    assert ("speed at most" in outcome.out) != encoder


def test_folders_windows_and_encoders(invoke: Invoke, tmp_path: Path) -> None:
    for name, config in {"gemma2": GEMMA, "t5": T5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name, **config}))
    gemma = invoke("cost", tmp_path / "gemma2", "--context", "60").out
    assert "the same beyond the windows" in gemma and "L0, L2, ... L6: 4" in gemma
    assert "note: context 60 is beyond the 59 positions" in gemma
    t5 = invoke("cost", tmp_path / "t5", "--context", "7", "--source", "11").out
    assert "context 7, source 11" in t5 and "cross: query heads" in t5 and "cache of the sources" in t5


def test_a_preset_says_what_its_config_cannot(invoke: Invoke) -> None:
    assert "note: GPT-3 bands every other layer" in invoke("cost", "gpt3").out
    assert "note: the weights fit in the memory" in invoke("cost", "bert-base", "--gpu-memory", "1GB").out


def test_the_table_of_the_courses(invoke: Invoke) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in invoke("cost", "--table").out.splitlines() if line.strip()}
    assert rows["bert-base"] == ["768", "12", "64", "12", "MHA", "12", "none"]
    assert rows["bert-large"] == ["1,024", "16", "64", "16", "MHA", "24", "none"]
    assert rows["gpt2"] == ["768", "12", "64", "12", "MHA", "12", "36,864"]
    assert rows["gpt3"] == ["12,288", "96", "128", "96", "MHA", "96", "4,718,592"]
    assert rows["llama-2-70b"] == ["8,192", "64", "128", "8", "GQA", "80", "327,680"]
    assert rows["mistral-7b"] == ["4,096", "32", "128", "8", "GQA", "32", "4,096", "131,072"]
    assert rows["palm-540b"] == ["18,432", "48", "256", "1", "MQA", "118", "120,832"]
    assert rows["falcon-7b"] == ["4,544", "71", "64", "1", "MQA", "32", "8,192"]
    models = json.loads(invoke("cost", "--table", "--json", "--dtype", "fp8").out)["models"]
    assert [model["model"] for model in models] == list(TABLE)
    assert models[0]["d_model"] == 768 and models[4]["cache_bytes_per_token"] == 163_840
    refused(invoke("cost", "gpt2", "--table"), "leave out MODEL")
    refused(invoke("cost"), "no model is named")


def test_width_and_variant_are_said(invoke: Invoke) -> None:
    assert "80 layers, width 8,192, 64 heads of 128, 8 key/value (GQA)" in invoke("cost", *TWO).out
    document = json.loads(invoke("cost", "deepseek-v3", "--json").out)
    assert document["d_model"] == 7168 and document["layers"][0]["attention"]["variant"] == "MLA"


def test_help_has_an_example(invoke: Invoke) -> None:
    outcome = invoke("cost", "--help")
    assert outcome.code == 0
    assert "Example: headwise cost" in outcome.out
    assert "--gpu-memory" in outcome.out and "--variants" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), ("no preset 'nosuch'", "there are bert-base")),
        (("lama-2-70b",), ("did you mean llama-2-70b",)),
        (("no/such/folder",), ("no/such/folder does not exist",)),
        ((*TWO[:1], "--context", "-3"), ("--context -3 is outside 1 to", "number of tokens")),
        ((*TWO[:1], "--context", "0"), ("--context 0",)),
        ((*TWO[:1], "--context", "9" * 40), ("--context 999",)),
        ((*TWO[:1], "--context", "many"), ("--context",)),
        ((*TWO[:1], "--batch", "0"), ("--batch 0 is outside 1 to", "number of texts")),
        ((*TWO[:1], "--source", "5"), ("--source 5 needs an encoder with a decoder",)),
        ((*TWO[:1], "--dtype", "bf17"), ("no number format 'bf17'", "did you mean bf16")),
        ((*TWO[:1], "--cache-dtype", "octal"), ("no number format 'octal'",)),
        ((*TWO[:1], "--gpu-memory", "24 bananas"), ("--gpu-memory '24 bananas' is no size", "24GiB")),
        ((*TWO[:1], "--gpu-memory", "24 kg"), ("--gpu-memory '24 kg' is no size",)),
        ((*TWO[:1], "--gpu-memory", "24"), ("--gpu-memory 24 is no size",)),
        ((*TWO[:1], "--gpu-memory", "-24GiB"), ("--gpu-memory -24GiB",)),
        ((*TWO[:1], "--gpu-memory", "0GiB"), ("--gpu-memory 0GiB is outside",)),
        ((*TWO[:1], "--gpu-memory", "nanGiB"), ("--gpu-memory nanGiB",)),
        ((*TWO[:1], "--gpu-memory", "99999999999PB"), ("is outside 1 B to",)),
        ((*TWO[:1], "--gpu-memory", "24GiB"), ("less than the weights alone", "137,953,296,384 bytes", "--dtype")),
        ((*TWO[:1], "--bandwidth", "900GB"), ("--bandwidth 900GB is no size", "900GB/s")),
        ((*TWO[:1], "--bandwidth", "0GB/s"), ("--bandwidth 0GB/s is outside",)),
        (
            ("bert-base", "--bandwidth", "1TB/s"),
            ("--bandwidth 1TB/s is about decoding", "bert encoder writes nothing"),
        ),
        (("bert-base", "--cache-dtype", "fp8"), ("--cache-dtype fp8 is about decoding",)),
        (("bert-base", "--gpu-memory", "100MB"), ("less than the weights alone",)),
        (("bert-base", "--variants"), ("a bert encoder keeps none",)),
    ],
)
def test_bad_input_gets_one_line(invoke: Invoke, arguments: tuple[str, ...], message: tuple[str, ...]) -> None:
    refused(invoke("cost", *arguments), *message)


def test_bad_files_get_one_line(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    refused(invoke("cost", tmp_path), "holds no config.json")
    path.write_bytes(b"\xff\xfe")
    refused(invoke("cost", path), "is not UTF-8")
    path.write_text(json.dumps({"model_type": "mamba", "hidden_size": 64}))
    refused(invoke("cost", path), str(path), "model_type='mamba' is not one that can be priced exactly", "did you mean")
    whisper = {"model_type": "whisper", "d_model": 30, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 5, "decoder_attention_heads": 3}
    path.write_text(json.dumps(whisper | heads))
    refused(invoke("cost", path, "--source", "7"), "--source 7: whisper always reads 1500")


def test_the_command_loads_no_heavy_library() -> None:
    """What takes long to import; with them the answer could not come within 0.3 s."""
    code = (
        "import sys\nfrom headwise import cli\nsys.argv = ['headwise', 'cost', 'gpt2', '--variants', '--choose']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("loaded: []\n")
