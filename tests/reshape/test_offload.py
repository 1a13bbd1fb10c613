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


class Bringing:
    """What accelerate attaches to a module whose weights lie on the disk (`AlignDevicesHook`), in short."""

    def __init__(self, part: nn.Module) -> None:
        self.kept = {name: weights.detach() for name, weights in part.named_parameters(recurse=False)}
        self.forward, self.part = part.forward, part
        self.post_forward(part, None)
        part._hf_hook, part.forward = self, self.run  # type: ignore[assignment]

    def pre_forward(self, part: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for name, weights in self.kept.items():
            setattr(part, name, nn.Parameter(weights, requires_grad=False))
        return args, kwargs

    def post_forward(self, part: nn.Module, out: Any) -> Any:
        for name, weights in self.kept.items():
            setattr(part, name, nn.Parameter(weights.to("meta"), requires_grad=False))
        return out

    def run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.pre_forward(self.part, *args, **kwargs)
        return self.post_forward(self.part, self.forward(*args, **kwargs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models"), "llama, GQA", max_shard_size="10KB")


@pytest.fixture(params=["in short", pytest.param("accelerate", marks=pytest.mark.slow)])
def offloaded(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "accelerate":
        pytest.importorskip("accelerate", reason="`pip install accelerate` is not done here")
        place: Any = {"device_map": "auto", "max_memory": {"cpu": "20KB"}, "offload_folder": tmp_path}
        return hw.open(folder, **place)
    model = hw.open(folder)
    for part in list(model.modules()):
        if list(part.parameters(recurse=False)):
            Bringing(part)
    return model


def numbers(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        with hw.watch(model) as seen:
            out = ask.logits(model, IDS)
        with hw.ablate(model, ["L0.H1"], how="mean"):
            without = ask.logits(model, IDS)
    effects = [share.mean for share in hw.patch(model, IDS[0], IDS[1]).effects.values()]
    heads = [[seen[name].entropy, seen[name].norm] for name in ("L0.H1", "L1.H5")]
    return [out, without, torch.tensor(heads), torch.tensor(effects)]


def test_what_is_on_the_disk_is_watched_silenced_and_surveyed(
    folder: Path, offloaded: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE", 10)  # so that the control is that of a large model
    whole = hw.open(folder)
    for one, other in zip(numbers(whole), numbers(offloaded), strict=True):
        assert torch.equal(one, other)
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


def test_a_place_is_handed_to_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    asked: list[dict[str, Any]] = []
    kind = transformers.LlamaForCausalLM
    load = kind.from_pretrained.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, *args: Any, device_map: Any = None, max_memory: Any = None, **options: Any) -> Any:
        asked.append({"device_map": device_map, "max_memory": max_memory})
        return load(cls, *args, **options)

    monkeypatch.setattr(kind, "from_pretrained", classmethod(noted))
    hw.open(folder, device_map={"": "cpu"}, max_memory={"cpu": "1GB"})
    hw.open(folder, device="auto")
    assert asked == [
        {"device_map": {"": "cpu"}, "max_memory": {"cpu": "1GB"}},
        {"device_map": "auto", "max_memory": None},
    ]


def test_what_does_not_fit_into_memory_is_refused_with_the_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuses(lambda: hw.open(saved(tmp_path, "run"), device_map="auto"), "device_map= places a model of transformers")
    if importlib.util.find_spec("accelerate") is None:
        refuses(lambda: hw.open(folder, device_map="auto"), "does not load as LlamaForCausalLM: .*accelerate")
    monkeypatch.setattr("headwise.models.open.free_memory", lambda: 1000)
    refuses(lambda: hw.open(folder), "the weights of .* take .* and 1000 B are free; pass device_map='auto'")
