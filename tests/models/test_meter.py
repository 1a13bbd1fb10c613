"""`headwise cost --measure`: what a price comes to here, and what is refused before anything is made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_device

from headwise.cost import price
from headwise.gpt.checkpoint import save_model
from headwise.gpt.device import device_named
from headwise.gpt.tokens import Tokens
from headwise.memory import Room
from headwise.models import meter
from headwise.models.hf import drawn

FIELDS = {
    "model_type": "llama", "vocab_size": 31, "hidden_size": 22, "num_attention_heads": 11, "num_key_value_heads": 11,
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
    drawn(FIELDS, torch.float32).save_pretrained(path)
    return path


def measure(invoke: Any, *arguments: object) -> dict[str, Any]:
    code, out, err = invoke("cost", *arguments, "--measure", "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_a_folder_is_measured_beside_its_price(invoke: Any, folder: Path) -> None:
    document = measure(invoke, folder, "--context", 17, "--batch", 2)
    took = document["measured"]
    assert (took["weights"], took["streamed"], took["dtype"], took["device"]) == ("stored", False, "float32", "cpu")
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


def test_a_streamed_folder_is_read_layer_by_layer(invoke: Any, folder: Path) -> None:
    code, out, err = invoke("cost", folder, "--measure", "--stream", "--dtype", "bf16", "--context", 13)
    assert code == 0 and "layer by layer: " in err and "decode " not in out.split("Measured here")[1]
    assert "stored weights read layer by layer, bfloat16 on cpu" in " ".join(out.split())


def test_what_has_no_weights_gets_random_ones(invoke: Any, tmp_path: Path, tiny: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FIELDS))
    took = measure(invoke, path, "--context", 7)["measured"]
    assert took["weights"] == "random" and took["tokens_per_second"] > 0
    run = tmp_path / "run"
    run.mkdir()
    tokens = Tokens.characters("abcdefghijklmnopqr", boundary=True)
    save_model(run, tiny("course"), tokens)
    assert measure(invoke, run)["measured"]["weights"] == "stored"
    (run / "model.safetensors").unlink()
    document = measure(invoke, run)
    assert document["measured"]["weights"] == "random" and document["setting"]["context"] == 11
    assert document["measured"]["cache_bytes"] == document["cache"]["total_bytes"]


def test_on_another_device(invoke: Any, folder: Path) -> None:
    toy_device.register()
    for more in ((), ("--stream",)):
        took = measure(invoke, folder, "--context", 11, "--device", "toy", *more)["measured"]
        assert took["device"].startswith("toy") and took["peak_bytes"] is None and took["prefill_seconds"] > 0


def test_what_cannot_be_measured_is_refused(invoke: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "free_on", lambda device: Room(10**9, "cgroup"))
    plan = folder / "plan.json"
    cases = {
        ("gpt2", "--dtype", "int4"): "one of fp32, bf16, fp16; not int4 with a cache in int4",
        ("gpt2", "--cache-dtype", "fp8"): "with a cache in fp8",
        ("bert-base",): "--measure runs models that predict the next token, and a bert does not",
        ("gpt2", "--stream"): "gpt2 has no weights to read layer by layer; leave out --stream",
        ("llama-3-8b",): "of weights to be made, 64 MiB of cache and what 512 tokens fill take about",
        ("gpt2", "--context", "1024", "--batch", "64"): "954 MiB are free (cgroup); --batch 1 --context ",
        ("gpt2", "--device", "cuda:7"): "device cuda:7 is not on this machine; there is cpu",
        ("gpt2", "--plan", plan): "does not exist",
    }
    monkeypatch.setattr(meter, "open_folder", lambda *all, **more: pytest.fail("made before it was refused"))
    for arguments, message in cases.items():
        code, out, err = invoke("cost", *arguments, "--measure")
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1, (arguments, err)
    monkeypatch.delitem(sys.modules, "headwise.models.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = invoke("cost", "gpt2", "--measure", "--context", 9)
    assert code == 2 and "gpt2 is made by transformers to be measured: pip install 'headwise[hf]'" in err
    code, _, err = invoke("cost", "gpt2", "--stream")
    assert code == 2 and "--stream and --device are about running the model; pass --measure" in err
    fits = int(err_of(price("gpt2", context=1024, batch=64)).rpartition("--context ")[2].split()[0])
    meter._require_room(price("gpt2", context=min(fits, 1024)), device_named("cpu"), price("gpt2").weight_bytes)


def err_of(bill: Any) -> str:
    with pytest.raises(Exception) as refused:
        meter._require_room(bill, device_named("cpu"), bill.weight_bytes)
    return str(refused.value)
