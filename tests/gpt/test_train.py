"""Training: the schedule, the optimizers, the losses, a run that is stopped and goes on, its film, two processes."""

import json
import math
import os
import pickle
import signal
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import refuses
from processes import together
from small_models import prose, quiet, text_stream, tiny, tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headwise as hw
from headwise import HeadwiseError
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Stream
from headwise.gpt.gpt import GPT
from headwise.gpt.presets import PRESETS, Recipe
from headwise.gpt.run import Settings, film_of, read_film, run_training
from headwise.gpt.train import FRAMES, STATE, AdamW, Muon, Progress, Stopped, evaluate, make_optimizers, train

RECIPE = Recipe(steps=31, batch=5, lr=3e-3, muon_lr=0.02, warmup=7)
ADAMW = Recipe(steps=31, batch=5, lr=1e-2, warmup=7)


@pytest.fixture
def data() -> Stream:
    text = prose(150)
    tokens = Tokens.characters(text, boundary=False)
    return text_stream(tokens, text, 11)


@pytest.fixture
def config(data: Stream) -> Any:
    return tiny_config("llama", int(data._ids.max()) + 1, n_layers=1)


def same(one: GPT, other: GPT) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_schedule_warms_up_holds_and_decays() -> None:
    recipe = Recipe(steps=110, batch=1, lr=1.0, warmup=10, final_lr=0.2)
    wanted = {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.6, 85: 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2}
    assert {step: recipe.rate(step) for step in wanted} == pytest.approx(wanted)
    assert recipe.rate(109) == pytest.approx(0.2, abs=1e-3)
    for warmup, steps in ((0, 1), (0, 101), (103, 7), (7, 7)):
        recipe = Recipe(steps=steps, batch=1, lr=1.0, warmup=warmup, final_lr=0.0)
        assert all(0 < recipe.rate(step) <= 1 for step in range(steps))
    recipe = Recipe(steps=110, batch=1, lr=1.0, warmup=10, decay=0.2)
    wanted = {0: 0.1, 9: 1.0, 50: 1.0, 88: 1.0, 99: 0.5, 109: 1 / 22}
    assert {step: recipe.rate(step) for step in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("changes", [{}, {"bias": True, "qk_norm": True}], ids=str)
@pytest.mark.parametrize("muon", [None, 0.02])
def test_every_parameter_is_in_one_group(name: str, changes: Any, muon: float | None) -> None:
    model = GPT(tiny_config(name, **changes))
    recipe = replace(PRESETS[name].recipe, muon_lr=muon, weight_decay=0.7)
    optimizers = make_optimizers(model, recipe)
    names = {id(p): n for n, p in model.named_parameters()}
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found.append(names[id(p)])
                assert group["weight_decay"] == (0.7 if p.ndim == 2 else 0.0)
                by_muon = muon is not None and p.ndim == 2 and names[id(p)].startswith("blocks.")
                assert isinstance(optimizer, torch.optim.Muon) == by_muon
                assert group["lr"] == optimizer.defaults["lr"] == (muon if by_muon else recipe.lr)
    assert sorted(found) == sorted(names.values())


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_without_the_compiler_the_steps_are_torchs_own(kind: type[torch.optim.Optimizer]) -> None:
    start = torch.randn(3, 5)
    pair = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    for parameter, optimizer_class in zip(pair, (kind.__base__, kind), strict=True):
        optimizer = optimizer_class([parameter], lr=0.1)
        for _ in range(3):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        copied = pickle.loads(pickle.dumps(optimizer))
        assert type(copied) is optimizer_class and copied.state_dict().keys() == optimizer.state_dict().keys()
    assert torch.equal(*pair)
    assert not torch.equal(pair[0], start)


@pytest.mark.slow
def test_evaluation_and_reports(data: Stream, config: Any, tmp_path: Path) -> None:
    model = tiny("llama", config.vocab_size, n_layers=1)
    losses, counts = [], []
    for inputs, targets in data.held_out_batches(1):
        losses.append(model.loss(inputs, targets).item())
        counts.append(targets.numel())
    expected = sum(a * n for a, n in zip(losses, counts, strict=True)) / sum(counts)
    assert evaluate(model, data) == pytest.approx(expected, rel=1e-5)
    model = tiny("llama", config.vocab_size, n_layers=1, dropout=0.5).train()
    assert evaluate(model, data) == evaluate(model, data)
    assert model.training
    reports: list[Progress] = []
    _, curve = train(tmp_path, config, RECIPE, data, 0, reports.append)
    assert [report.step for report in reports] == [3, 6, 9, 10, 12, 15, 18, 20, 21, 24, 27, 30, 31]
    evaluated = [report for report in reports if report.held_out_loss is not None]
    assert [report.step for report in evaluated] == [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31]
    assert [vars(point) for point in curve] == [
        {"step": x.step, "train_loss": x.loss, "held_out_loss": x.held_out_loss} for x in evaluated
    ]
    assert all(math.isfinite(x.loss) and x.steps == 31 for x in reports)


def test_a_divergence_keeps_a_state(tmp_path: Path, data: Stream, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train(_folder(tmp_path / "whole"), config, RECIPE, data, 0, quiet)
    loss, folder, calls = GPT.loss, _folder(tmp_path / "run"), 0

    def broken(self: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += self.training
        return loss(self, inputs, targets) * (math.nan if self.training and calls == 14 else 1)

    monkeypatch.setattr(GPT, "loss", broken)
    with pytest.raises(HeadwiseError) as refusal:
        train(folder, config, RECIPE, data, 0, quiet, save_seconds=0)
    assert "training diverged: loss is nan at step 14" in str(refusal.value)
    assert "lower the learning rate or take another seed" in str(refusal.value)
    monkeypatch.undo()
    resumed, _ = train(folder, config, RECIPE, data, 0, quiet)
    assert same(resumed, whole)


@pytest.mark.parametrize("steps", [1, 2, 10, 31])
def test_a_rate_that_is_too_high_never_ends_well(tmp_path: Path, data: Stream, config: Any, steps: int) -> None:
    """Weights that overflow are an error, even those of the last step; they do not reach the state."""
    recipe = replace(ADAMW, steps=steps, lr=1e38, warmup=0)
    refuses(lambda: train(tmp_path, config, recipe, data, 0, quiet, save_seconds=0), "training diverged")
    if (tmp_path / STATE).exists():
        refuses(lambda: train(tmp_path, config, recipe, data, 0, quiet, save_seconds=0), "training diverged")


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def interrupted_at(step: int) -> Any:
    """A report that presses Ctrl-C once a step is reached."""

    def report(progress: Progress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return report


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, ADAMW], ids=["muon", "adamw"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_resumed_equals_left_alone(tmp_path: Path, data: Stream, config: Any, recipe: Recipe, dropout: float) -> None:
    config = replace(config, dropout=dropout)
    whole, curve = train(_folder(tmp_path / "whole"), config, recipe, data, 3, quiet)
    folder, handler = _folder(tmp_path / "run"), signal.getsignal(signal.SIGINT)
    for step in (3, 20, 31):
        with pytest.raises(Stopped, match=f"stopped after step {step},"):
            train(folder, config, recipe, data, 3, interrupted_at(step))
        assert signal.getsignal(signal.SIGINT) is handler
        torch.manual_seed(step)  # whatever the new process's random state
    resumed, again = train(folder, config, recipe, data, 3, quiet)
    assert same(resumed, whole)
    assert again == curve


def test_a_second_interrupt_does_not_wait(tmp_path: Path, data: Stream, config: Any) -> None:
    def impatient(progress: Progress) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stop:
        train(tmp_path, config, RECIPE, data, 0, impatient)
    assert not isinstance(stop.value, Stopped)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_state_of_another_model_or_a_damaged_one_is_refused(tmp_path: Path, data: Stream, config: Any) -> None:
    with pytest.raises(Stopped):
        train(tmp_path, config, RECIPE, data, 0, interrupted_at(12))
    for other in (replace(config, d_ff=29), replace(config, n_layers=2), replace(config, qk_norm=True)):
        with pytest.raises(HeadwiseError):
            train(tmp_path, other, RECIPE, data, 0, quiet)
    whole = (tmp_path / STATE).read_bytes()
    for cut in (0, 5, 1000):
        (tmp_path / STATE).write_bytes(whole[:cut])
        with pytest.raises(HeadwiseError, match=rf"state.safetensors is damaged or cut short \({cut} bytes\)"):
            train(tmp_path, config, RECIPE, data, 0, quiet)


SHAPE = {"n_layers": 2, "d_model": 12, "n_heads": 3, "context": 16}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 7, 100, 5000])
def test_its_maps_are_those_that_a_watcher_sees_at_few_steps(steps: int, tmp_path: Path) -> None:
    corpus, config, recipe = Settings(steps=steps, shape=SHAPE).resolve()
    film = film_of(tmp_path, corpus, config, recipe)
    model = GPT(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for step in range(steps + 1):
        film.see(model, step)
    read: Any = read_film(tmp_path)
    seen_at = [frame["step"] for frame in read["frames"]]
    assert {0, 1, steps} <= set(seen_at) and len(seen_at) <= FRAMES and seen_at == sorted(set(seen_at))
    assert read["steps"] == steps == seen_at[-1] and model.training
    with torch.no_grad(), hw.watch(model.eval(), maps=True) as seen:
        model(torch.tensor([film.ids]))
    maps = np.frombuffer(b64decode(read["frames"][-1]["maps"]), np.uint8).reshape(6, len(film.ids), len(film.ids))
    assert read["heads"] == list(seen)
    for name, weights in zip(seen, maps / 255, strict=True):
        assert np.abs(weights - seen[name].map).max() < 0.51 / 255


@pytest.mark.slow
def test_a_run_that_goes_on_has_all_frames(tmp_path: Path) -> None:
    settings = Settings(preset="course", steps=23, shape={"n_layers": 1, "d_model": 12, "n_heads": 3})
    run_training(tmp_path / "whole", settings)
    with pytest.raises(Stopped):
        run_training(tmp_path / "run", settings, lambda progress: signal.raise_signal(signal.SIGINT))
    assert (tmp_path / "run" / STATE).exists()
    run_training(tmp_path / "run", settings, resume=True)
    assert read_film(tmp_path / "run") == read_film(tmp_path / "whole")
    assert read_film(tmp_path) is None


STEPS = 5


def made() -> Any:
    torch.manual_seed(5)
    return hw.GPT(
        hw.GPTConfig(vocab_size=19, context=13, n_layers=2, n_heads=6, n_kv_heads=2, d_model=24, qk_norm=True)
    )


def learned(model: Any, rows: slice) -> tuple[list[float], dict[str, float]]:
    """The losses of some steps on rows of the same 4 texts, and the entropy of each head afterwards on one text."""
    ids = torch.randint(19, (4, 12), generator=torch.Generator().manual_seed(1))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids[rows, :-1]).flatten(0, 1), ids[rows, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), hw.watch(model) as seen:
        model(ids[:1, :-1])
    return losses, {name: seen[name].entropy for name in seen}


def both(folder: Path) -> None:
    """A target of `together`: what each of two processes sees, in a file."""
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), {}
    shared = slice(2 * rank, 2 * rank + 2)  # of a mean over all texts the mean of both halves
    told["ddp"] = learned(DistributedDataParallel(made()), shared)
    model = made()
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    told["fsdp"] = learned(model, shared)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_and_are_watched_as_one(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, both, tmp_path)
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    losses, entropies = learned(made(), slice(4))
    for way in ("ddp", "fsdp"):
        (a, seen), (b, also) = first[way], second[way]
        assert [(x + y) / 2 for x, y in zip(a, b, strict=True)] == pytest.approx(losses, abs=1e-5)
        assert len(seen) == 12
        assert seen == pytest.approx(entropies, abs=1e-4) and also == pytest.approx(seen, abs=1e-6)
