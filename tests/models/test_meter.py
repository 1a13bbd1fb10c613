"""`headwise cost --measure`: what a price comes to here, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_device
from small_models import tiny
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.corpus.tokens import Tokens
from headwise.gpt.checkpoint import save_model
from headwise.memory import Room
from headwise.models import meter

FIELDS: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 22, "num_attention_heads": 11, "num_key_value_heads": 11,
    "head_dim": 2, "intermediate_size": 23, "num_hidden_layers": 3, "max_position_embeddings": 41, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "SIDE", 37)
    monkeypatch.setattr(meter, "RUNS", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers with its weights."""
    path = tmp_path_factory.mktemp("meter") / "llama"
    LlamaForCausalLM(LlamaConfig(**FIELDS)).save_pretrained(path)
    return path


def measure(invoke: Any, *arguments: object) -> dict[str, Any]:
    code, out, err = invoke("cost", *arguments, "--measure", "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_a_folder_is_measured_beside_its_price(invoke: Any, folder: Path) -> None:
    document = measure(invoke, folder, "--context", 17, "--batch", 2)
    took = document["measured"]
    assert (took["streamed"], took["dtype"], took["device"]) == (False, "float32", "cpu")
    assert took["runs"] == 3 and took["steps"] == 10 and took["threads"] == torch.get_num_threads()
    assert took["cache_bytes"] == document["cache"]["total_bytes"]
    assert took["prefill_flops_per_second"] == pytest.approx(
        document["prefill"]["total_flops"] / took["prefill_seconds"]
    )
    least = max(
        document["prefill"]["total_flops"] / took["machine_flops_per_second"],
        document["decode"]["weight_bytes"] / took["machine_bytes_per_second"],
    )
    assert took["prefill_share"] == pytest.approx(least / took["prefill_seconds"])
    assert took["tokens_per_second"] == pytest.approx(2 / took["decode_seconds"])
    moved = document["decode"]["weight_bytes"] + document["decode"]["cache_bytes"]
    assert took["decode_bytes_per_second"] == pytest.approx(moved / took["decode_seconds"])
    assert took["peak_bytes"] > document["weight_bytes"]
    given = measure(invoke, folder, "--context", 3, "--bandwidth", "1GB/s")["measured"]
    assert given["machine_bytes_per_second"] == 1e9 and given["steps"] == 1
    alone = measure(invoke, folder, "--context", 1)["measured"]
    assert (alone["steps"], alone["decode_seconds"], alone["cache_bytes"]) == (0, None, None)


def test_folders_runs_and_devices(invoke: Any, folder: Path, tmp_path: Path) -> None:
    code, out, err = invoke("cost", folder, "--measure", "--stream", "--dtype", "bf16", "--context", 13)
    assert code == 0 and "layer by layer: " in err and "decode " not in out.split("Measured here")[1]
    assert "weights read layer by layer, bfloat16 on cpu" in " ".join(out.split())
    save_model(tmp_path, tiny("course"), Tokens.characters("abcdefghijklmnopqr", boundary=True))
    document = measure(invoke, tmp_path)
    assert document["setting"]["context"] == 11
    assert document["measured"]["cache_bytes"] == document["cache"]["total_bytes"]
    toy_device.register()
    for more in ((), ("--stream",)):
        took = measure(invoke, folder, "--context", 11, "--device", "toy", *more)["measured"]
        assert took["device"].startswith("toy") and took["peak_bytes"] is None and took["prefill_seconds"] > 0


def test_what_takes_more_memory_than_there_is_is_refused(
    invoke: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "free_on", lambda device: Room(10**6, "cgroup"))
    code, _, err = invoke("cost", folder, "--measure", "--context", "41", "--batch", "64")
    assert code == 2 and "of cache and what 2,624 tokens fill take about" in err and "--batch 1 with --context " in err
    fits = re.search(r"--context ([\d]+)", err)
    assert fits and "are free (cgroup)" in err
    assert measure(invoke, folder, "--context", min(int(fits[1]), 41))["measured"]["steps"] == 10
