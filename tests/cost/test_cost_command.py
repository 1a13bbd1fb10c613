"""`headwise cost` as a user runs it: the answer, one JSON document, one clear line on bad input, little loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from invoking import Invoke, assert_refused
from real_models import GEMMA, TABLES

from headwise.cost import PRESETS, TABLE, price
from headwise.errors import HeadwiseError

TWO = ("llama-2-70b", "--context", "4096", "--dtype", "bf16")


def test_json_is_one_document_with_everything(invoke: Invoke) -> None:
    outcome = invoke("cost", *TWO, "--memory", "160GB", "--batch", "3", "--json", "--variants")
    assert (outcome.code, outcome.err) == (0, "")
    bill = json.loads(outcome.out)
    assert bill["cache"]["bytes_per_token"] == 327_680
    assert bill["setting"]["batch"] == 3 and bill["setting"]["memory"] == 160 * 10**9
    assert len(bill["layers"]) == 80
    assert [row["name"] for row in bill["variants"] if row["present"]] == ["GQA-8"]
    alone = json.loads(invoke("cost", *TWO, "--json").out)
    assert alone["variants"] is None and alone["memory"] is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints(invoke: Invoke, name: str) -> None:
    encoder = name.startswith("bert")
    more = () if encoder else ("--variants", "--memory", "3TB", "--batch", "2")
    outcome = invoke("cost", name, *more)
    assert (outcome.code, outcome.err) == (0, "")
    assert max(len(line) for line in outcome.out.splitlines() if line.startswith(" ")) <= 80
    assert ("an encoder" in outcome.out) == encoder


def test_folders_and_windows(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **GEMMA}))
    gemma = invoke("cost", tmp_path, "--context", "60").out
    assert "the same beyond the windows" in gemma and "L0, L2 and 2 more" in gemma
    assert "note: context 60 is beyond the 59 positions" in gemma


def test_notes_and_widths(invoke: Invoke) -> None:
    assert "note: GPT-3 bands every other layer" in invoke("cost", "gpt3").out
    assert "note: the weights fit in the memory" in invoke("cost", "bert-base", "--memory", "1GB").out
    document = json.loads(invoke("cost", "deepseek-v3", "--json").out)
    assert document["d_model"] == 7168 and document["layers"][0]["variant"] == "MLA"


def test_the_table_of_the_courses(invoke: Invoke) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in invoke("cost").out.splitlines() if line.strip()}
    for name, cells in TABLES["table"].items():
        assert rows[name] == cells
    models = json.loads(invoke("cost", "--json", "--dtype", "fp8").out)["models"]
    assert [model["model"] for model in models] == list(TABLE)
    assert models[0]["d_model"] == 768 and models[4]["cache_bytes_per_token"] == 163_840


def test_bad_files_get_one_line(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "lama", "hidden_size": 64}))
    assert_refused(invoke("cost", path), str(path), "has no model_type 'lama'", "llama")


def test_without_torch_a_family_without_a_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headwise.cost.built", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # as if it were missing
    with pytest.raises(
        HeadwiseError, match=r"of a gpt_neox .* needs torch.*: pip install.*a preset needs nothing: bert-base"
    ):
        price({"model_type": "gpt_neox", "hidden_size": 64})


def test_the_command_loads_no_heavy_library() -> None:
    """What takes long to import: without it a preset is priced in 0.3 s."""
    code = (
        "import sys\nfrom headwise import cli\nsys.argv = ['headwise', 'cost', 'gpt2', '--variants']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.endswith("loaded: []\n")
