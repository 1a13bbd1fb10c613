"""A model on another device, `toy` or a GPU, or on the disk gives what it gives on the processor."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_device
from cases import refuses
from reshape_models import V, build, saved
from torch import Tensor, nn

import headwise as hw
from headwise.backends import torch_
from headwise.corpus.documents import Text
from headwise.heads import survey as module
from headwise.models import ask
from headwise.models import open as opening

ALONE = "HEADWISE_ON_THE_STAND_IN"  # is set in the process that knows `toy`
IDS = torch.randint(3, V, (12, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(
    scope="module", params=["toy"] if ALONE in os.environ else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    """A device that is not the processor; `toy` is known to torch from here on."""
    if request.param == "toy":
        toy_device.register()
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device: what runs on one was tried on the stand-in alone")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.skipif(ALONE in os.environ, reason="this is the process of the stand-in")
def test_all_on_the_stand_in() -> None:
    """In a process of its own, for torch counts its devices when it first computes a gradient."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env=os.environ | {ALONE: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:]


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in has no float64, as MPS."""
    monkeypatch.setattr(torch_, "WITHOUT_FLOAT64", {"toy"})
    monkeypatch.setattr(toy_device.Toy, "wide", False)
    yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random model; "run" is one of our own."""

    return partial(saved, tmp_path_factory.mktemp("models"))


def survey(model: Any) -> dict[str, float]:
    text = Text([*IDS[:3].tolist(), [4, 5, 6, 7, 8, 9, 10]], lambda ids: tuple(f"t{i}" for i in ids))
    found = hw.survey(model, text, ablate="mean")
    return {f"{head.name} {key}": mean for head in found.profiles for key, mean in head.means.items()} | {
        f"{head.name} {key}": getattr(head, key) or 0.0 for head in found.profiles for key in ("importance",)
    }


def watch(model: Any) -> list[float]:
    with hw.watch(model) as seen, torch.no_grad():
        ask.logits(model, IDS[:2])
    with hw.ablate(model, ["L0.H1"], how="mean"), torch.no_grad():
        return [seen["L1.H1"].entropy, float(ask.logits(model, IDS[:2]).abs().mean())]


def written(model: Any) -> list[int]:
    options: dict[str, Any] = {"temperature": 0}
    return [
        *hw.generate(model, IDS[0].tolist()[:5], 5, **options),
        *hw.generate(model, [5, 6], 3, **options),
    ]


READING: dict[str, Callable[[Any], Any]] = {
    "survey": survey,
    "watch": watch,
    "generate": written,
    "attribute": lambda model: hw.attribute(model, IDS[0], target=3).heads,
    "why": lambda model: [head.without for head in hw.why(model, IDS[0].tolist(), IDS[1].tolist()).heads],
    "patch": lambda model: [share.mean for share in hw.patch(model, IDS[0], IDS[1]).effects.values()],
}
RESHAPING: dict[str, Callable[[Any], Any]] = {
    "share": lambda model: hw.share(model, 1, groups="best", text=IDS),
    "prune": lambda model: hw.prune(model, keep=0.5, text=IDS),
}


def agree(path: Path, device: str, calls: dict[str, Callable[[Any], Any]]) -> None:
    for name, call in calls.items():
        here, there = (call(hw.open(path, device=place)) for place in ("cpu", device))
        if isinstance(here, hw.Reshaped):
            assert there.model.training is False and ask.device_of(there.model).type == device
            here, there = vars(here.damage.loss), vars(there.damage.loss)
        assert there == pytest.approx(here, abs=2e-4, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "llama, GQA"])
def test_every_look_gives_the_same_elsewhere(folder: Any, device: str, name: str) -> None:
    agree(folder(name), device, READING)


@pytest.mark.slow
def test_reshaping_gives_the_same(folder: Any, device: str, tmp_path: Path) -> None:
    agree(folder("llama, GQA"), device, RESHAPING)
    healed = [
        hw.share(folder("run"), 1, text=IDS, heal=2, out=tmp_path / place, device=place) for place in ("cpu", device)
    ]
    here, there = (vars(each.healed.loss) for each in healed if each.healed and each.healed.loss)
    assert there == pytest.approx(here, abs=1e-2)  # Muon rounds to bfloat16
    assert "largest difference" in (healed[1].verified or "")


@pytest.mark.slow
def test_a_device_without_float64(folder: Any, device: str, without_float64: None) -> None:
    if device == "toy":
        agree(folder("run"), device, READING)
        q = torch.randn(1, 3, 5, 7)  # lists, which are doubles in Python, beside it
        options: dict[str, Any] = {"mask": hw.Alibi(), "sink": [0.5, -1.5, 2.5]}
        there = hw.attend(*[q.to(device)] * 3, **options).cpu()
        assert torch.allclose(there, hw.attend(q, q, q, **options), atol=1e-5)


def test_a_device_is_refused_by_name(folder: Any, device: str, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder("run")
    monkeypatch.setattr(opening, "load_run", lambda *all: pytest.fail("it was loaded before it was refused"))
    text = ["--text", path / "config.json"]  # its device is refused before it is read
    commands = [
        ["heads", *text], ["share", "--kv-heads", "1", *text], ["prune", "--keep", ".5", *text],
        ["why", "--prompt", "a"], ["generate"],
    ]  # fmt: skip
    for command, *options in commands:
        for name in ("toy:1", "tpu", "meta"):
            code, out, err = invoke(command, path, *options, "--device", name)
            assert (code, out) == (2, "")
            assert err.startswith(f"headwise: device {name} is not on this machine; there is 1 cpu")
            assert err.count("\n") == 1
    with pytest.raises(hw.HeadwiseError, match="device= is where a folder is opened"):
        hw.share(build("rope", dtype=torch.float32), 1, text=IDS, device=device)


DISK_IDS = torch.randint(3, V, (5, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models"), "llama, GQA", max_shard_size="10KB")


@pytest.fixture
def offloaded(shards: Path, tmp_path: Path) -> nn.Module:
    pytest.importorskip("accelerate", reason="`pip install accelerate` is not done here")
    place: Any = {"device_map": "auto", "max_memory": {"cpu": "20KB"}, "offload_folder": tmp_path}
    return hw.open(shards, **place)


def numbers(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        with hw.watch(model) as seen:
            out = ask.logits(model, DISK_IDS)
        with hw.ablate(model, ["L0.H1"], how="mean"):
            without = ask.logits(model, DISK_IDS)
    effects = [share.mean for share in hw.patch(model, DISK_IDS[0], DISK_IDS[1]).effects.values()]
    heads = [[seen[name].entropy, seen[name].norm] for name in ("L0.H1", "L1.H5")]
    return [out, without, torch.tensor(heads), torch.tensor(effects)]


def test_what_is_on_the_disk_is_read(shards: Path, offloaded: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE", 10)  # so that the control is that of a large model
    whole = hw.open(shards)
    for one, other in zip(numbers(whole), numbers(offloaded), strict=True):
        torch.testing.assert_close(one, other)
    text = Text([*DISK_IDS.tolist(), [4, 5, 6, 7, 8, 9, 10]], lambda ids: tuple(f"t{i}" for i in ids))
    wanted, found = (hw.survey(model, text, ablate="none") for model in (whole, offloaded))
    assert found.untrained == wanted.untrained and found.untrained
    for head in wanted.profiles:
        assert found[head.name].means == pytest.approx(head.means, nan_ok=True), head.name
        assert "copying" in found[head.name].means
    assert {weights.device.type for weights in ask.blocks(offloaded)[1].parameters()} == {"meta"}


def test_what_needs_all_weights_says_so(offloaded: nn.Module) -> None:
    for call in (
        lambda: hw.attribute(offloaded, DISK_IDS[0], 7),
        lambda: hw.share(offloaded, 1, text=DISK_IDS),
        lambda: hw.prune(offloaded, ["L0.H1"], text=DISK_IDS),
    ):
        refuses(call, "of LlamaForCausalLM needs all its weights in memory.*open it without device_map=")
    assert "needs all its weights in memory" in " ".join(hw.why(offloaded, DISK_IDS[0].tolist()).notes)


def test_what_does_not_fit_into_memory(shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses(lambda: hw.open(saved(tmp_path, "run"), device_map="auto"), "device_map= places a model of transformers")
    if importlib.util.find_spec("accelerate") is None:
        refuses(lambda: hw.open(shards, device_map="auto"), "does not load as LlamaForCausalLM: .*accelerate")
    monkeypatch.setattr("headwise.models.open.free_memory", lambda: 1000)
    refuses(lambda: hw.open(shards), "the weights of .* take .* and 1000 B are free; pass device_map='auto'")
