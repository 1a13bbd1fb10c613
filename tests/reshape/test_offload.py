"""A model whose weights accelerate brings from the disk for each call: the same numbers, or a refusal by name."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import refuses
from reshape_models import V, saved
from torch import Tensor, nn

import headwise as hw
from headwise.corpus.documents import Text
from headwise.heads import survey as module
from headwise.models import ask

IDS = torch.randint(3, V, (5, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models"), "llama, GQA", max_shard_size="10KB")


@pytest.fixture
def offloaded(folder: Path, tmp_path: Path) -> nn.Module:
    pytest.importorskip("accelerate", reason="`pip install accelerate` is not done here")
    place: Any = {"device_map": "auto", "max_memory": {"cpu": "20KB"}, "offload_folder": tmp_path}
    return hw.open(folder, **place)


def numbers(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        with hw.watch(model) as seen:
            out = ask.logits(model, IDS)
        with hw.ablate(model, ["L0.H1"], how="mean"):
            without = ask.logits(model, IDS)
    effects = [share.mean for share in hw.patch(model, IDS[0], IDS[1]).effects.values()]
    heads = [[seen[name].entropy, seen[name].norm] for name in ("L0.H1", "L1.H5")]
    return [out, without, torch.tensor(heads), torch.tensor(effects)]


def test_what_is_on_the_disk_is_read(folder: Path, offloaded: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE", 10)  # so that the control is that of a large model
    whole = hw.open(folder)
    for one, other in zip(numbers(whole), numbers(offloaded), strict=True):
        torch.testing.assert_close(one, other)
    text = Text([*IDS.tolist(), [4, 5, 6, 7, 8, 9, 10]], lambda ids: tuple(f"t{i}" for i in ids))
    wanted, found = (hw.survey(model, text, ablate="none") for model in (whole, offloaded))
    assert found.untrained == wanted.untrained and found.untrained
    for head in wanted.profiles:
        assert found[head.name].means == pytest.approx(head.means, nan_ok=True), head.name
        assert "copying" in found[head.name].means
    assert {weights.device.type for weights in ask.blocks(offloaded)[1].parameters()} == {"meta"}


def test_what_needs_all_weights_says_so(offloaded: nn.Module) -> None:
    for call in (
        lambda: hw.attribute(offloaded, IDS[0], 7),
        lambda: hw.share(offloaded, 1, text=IDS),
        lambda: hw.prune(offloaded, ["L0.H1"], text=IDS),
    ):
        refuses(call, "of LlamaForCausalLM needs all its weights in memory.*open it without device_map=")
    assert "needs all its weights in memory" in " ".join(hw.why(offloaded, IDS[0].tolist()).notes)


def test_what_does_not_fit_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses(lambda: hw.open(saved(tmp_path, "run"), device_map="auto"), "device_map= places a model of transformers")
    if importlib.util.find_spec("accelerate") is None:
        refuses(lambda: hw.open(folder, device_map="auto"), "does not load as LlamaForCausalLM: .*accelerate")
    monkeypatch.setattr("headwise.models.open.free_memory", lambda: 1000)
    refuses(lambda: hw.open(folder), "the weights of .* take .* and 1000 B are free; pass device_map='auto'")
