"""Training in many processes: the losses of one, one run folder, exact resume, and an end for all when one is lost."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import refuses
from processes import Ended, Started, command, together
from small_models import text_stream

from headwise import HeadwiseError
from headwise.corpus.tokens import Tokens
from headwise.corpus.training import Stream
from headwise.gpt import train as training
from headwise.gpt.checkpoint import read_tensors
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.gpt.presets import Recipe
from headwise.gpt.ranks import ALONE, Ranks, _Watch, current, joined, whole
from headwise.gpt.train import METRICS, STATE, Division, Stopped, train

pytestmark = [pytest.mark.slow, pytest.mark.clock]
STEPS = 12
RECIPE = Recipe(steps=STEPS, batch=11, lr=1e-2, warmup=7)  # 11 texts: no number of processes divides them
SHAPE: dict[str, Any] = {"context": 13, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_model": 22, "head_dim": 6}
TEXT = "".join(f"{n * n} sheep, {n * 7 % 31} goats.\n" for n in range(97))
HALF = STEPS // 2 + 1


def data() -> Stream:
    return text_stream(Tokens.characters(TEXT, boundary=False), TEXT, SHAPE["context"])


def config() -> GPTConfig:
    return GPTConfig(vocab_size=len(set(TEXT)), tied=True, d_ff=24, qk_norm=True, **SHAPE)


def learn(folder: Path, division: Division, until: int = STEPS, recipe: Recipe = RECIPE) -> None:
    """Train in a folder, to the end or to a step after which the first process hears Ctrl-C.

    The losses of these steps go to `losses12.json` there, named by their number.
    """
    losses: list[float] = []
    real = training.update, training.interrupts

    def update(loss: float, *arguments: Any) -> None:
        real[0](loss, *arguments)
        losses.append(loss)

    @contextmanager
    def interrupts() -> Iterator[Callable[[], bool]]:
        yield lambda: len(losses) == until < STEPS and current().rank == 0

    folder.mkdir(exist_ok=True)
    training.update, training.interrupts = update, interrupts
    try:
        train(folder, config(), recipe, data(), 3, lambda progress: None, division=division)
    except Stopped as stopped:
        assert stopped.step == until
    finally:
        training.update, training.interrupts = real
        if current().rank == 0:
            (folder / f"losses{len(losses)}.json").write_text(json.dumps(losses))


def losses(folder: Path, count: int = STEPS) -> list[float]:
    numbers: list[float] = json.loads((folder / f"losses{count}.json").read_text())
    return numbers


def whole_and_split() -> tuple[GPT, GPT]:
    torch.manual_seed(5)
    model, other = GPT(config()), GPT(config())
    other.load_state_dict(model.state_dict())
    other.split(current())
    return model, other


def all_checks(folder: Path) -> None:
    """What two processes do, the numbers that come of it in files."""
    with joined():
        ranks = current()
        told: dict[str, Any] = {"sum": ranks.sum(1.5, ranks.rank), "gathered": ranks.gathered(ranks.rank * 7)}
        told["merged"] = ranks.merged([ranks.rank], lambda a, b: [*a, *b])
        told["agreed"] = ranks.agree(lambda: f"from {ranks.rank}")
        try:
            ranks.require_same("the text", "ab"[ranks.rank])
        except HeadwiseError as error:
            told["differs"] = str(error)
        told["shares"] = [[rows.start, rows.stop] for rows in ranks.parts(11, 2)]
        model, split = whole_and_split()
        told["held"] = split.blocks[0].attention.q_proj.weight.to_local().shape[0]
        batch = data().batch(torch.Generator().manual_seed(1), 5)
        for each in (model, split):
            each.loss(*batch).backward()
        pairs = list(zip(model.parameters(), split.parameters(), strict=True))
        told["logits"] = (model(batch[0]) - split(batch[0])).abs().max().item()
        told["gradients"] = max((a.grad - whole(b.grad)).abs().max().item() for a, b in pairs)
        (folder / f"told{ranks.rank}.json").write_text(json.dumps(told))
        for name, division in (("ddp", Division(accumulate=3)), ("shard", Division(2, True))):
            learn(folder / name, division)
            learn(folder / f"{name} cut", division, until=HALF)
            learn(folder / f"{name} cut", division)
        learn(folder / "from one", Division(shard=True))
        learn(folder / "muon", Division(shard=True), until=3, recipe=replace(RECIPE, muon_lr=0.01))


def only_train(folder: Path) -> None:
    with joined():
        learn(folder / "four", Division())
        learn(folder / "four cut", Division(), until=HALF)
        learn(folder / "four cut", Division())


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that learns alone, to the end and to the middle."""
    folder = tmp_path_factory.mktemp("one")
    learn(folder / "alone", Division())
    learn(folder / "from one", Division(accumulate=4), until=HALF)
    return folder


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    """Two processes with all that they do; among it they go on with what the one has begun."""
    ended = together(one, 2, all_checks, one)
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    return one


def far(folder: Path, name: str) -> float:
    expected = losses(folder / "alone")
    return max(abs(a - b) for a, b in zip(expected, losses(folder / name), strict=True))


def test_processes_agree(two: Path) -> None:
    told = [json.loads((two / f"told{rank}.json").read_text()) for rank in range(2)]
    for each in told:
        assert each["sum"] == [3.0, 1.0] and each["gathered"] == [0, 7] and each["merged"] == [0, 1]
        assert each["agreed"] == "from 0"
        assert each["differs"] == "the text is not the same on all processes: rank 1 has another one"
    assert [each["shares"] for each in told] == [[[0, 2], [2, 5]], [[5, 8], [8, 11]]]


def test_a_model_split_by_heads_is_the_whole_one(two: Path) -> None:
    told = json.loads((two / "told1.json").read_text())
    assert told["held"] == 2 * 6  # half of the heads
    assert told["logits"] < 1e-5 and told["gradients"] < 1e-5


@pytest.mark.parametrize("name", ["ddp", "shard"])
def test_two_processes_see_the_losses_of_one(two: Path, name: str) -> None:
    assert far(two, name) < 1e-5
    alone, shared = (read_tensors(two / each / STATE)[0] for each in ("alone", name))
    assert {key: value.shape for key, value in alone.items()} == {key: value.shape for key, value in shared.items()}
    log = [json.loads(line) for line in (two / name / METRICS).read_text().splitlines()]
    assert [row["step"] for row in log] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["ddp", "shard"])
def test_resumed_by_as_many_it_ends_with_the_same_bytes(two: Path, name: str) -> None:
    assert losses(two / f"{name} cut", HALF) + losses(two / f"{name} cut", STEPS - HALF) == losses(two / name)
    assert (two / f"{name} cut" / STATE).read_bytes() == (two / name / STATE).read_bytes()


def test_resumed_by_more_it_goes_on_with_the_same_losses(two: Path) -> None:
    resumed = losses(two / "from one", HALF) + losses(two / "from one", STEPS - HALF)
    assert max(abs(a - b) for a, b in zip(resumed, losses(two / "alone"), strict=True)) < 1e-5


def test_four_processes(one: Path) -> None:
    """The sums of more than two have an order, which a resumed run must find again."""
    ended = together(one, 4, only_train, one)
    assert [each.code for each in ended] == [0] * 4, ended[0].err
    assert far(one, "four") < 1e-5
    assert (one / "four cut" / STATE).read_bytes() == (one / "four" / STATE).read_bytes()


def test_what_does_not_fit_is_said_with_numbers() -> None:
    refuses(lambda: Ranks(0, 2).parts(7, 4), r"a batch of 7 texts is too small for 2 processes of 4 passes.* 1 at most")
    with pytest.raises(HeadwiseError, match=r"3 processes do not divide the 8 heads of the model; start 1 or 2 or 4"):
        Ranks(0, 3).require_divisor({"heads": 8, "key/value heads": 4})
    with pytest.raises(
        HeadwiseError, match="shard=True spreads a model over processes; start several of them with torchrun"
    ):
        Division(shard=True).check(data(), RECIPE)
    assert current() is ALONE and ALONE.sum(2.0) == [2.0] and ALONE.gathered(3) == [3]


@pytest.mark.parametrize("done", [2, 3])
def test_who_ends_when_all_are_done_is_not_lost(monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    """On a busy machine the others have ended before the last one's main thread looks again."""
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: -1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    lost: list[int] = []
    monkeypatch.setattr(_Watch, "fail", lambda self, say, code: lost.append(code))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    store = dist.HashStore()
    watch = _Watch(store, 0, 3)
    for rank in (1, 2):
        store.set(f"at/{rank}", f"{ended_process()} on this host")
    store.add("done", done)
    watch._look()
    assert lost == ([1, 1] if done < 3 else [])


def ended_process() -> str:
    """The number of a process that is no more."""
    return subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()


TRAIN = ("train", "--preset", "course", "--width", 16, "--heads", 2, "--samples", 0, "--steps")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(TEXT * 3)
    return path


def lines(ended: list[Ended]) -> list[str]:
    return [line for each in ended for line in each.err.splitlines() if line.startswith("headwise: ")]


def at_work(folder: Path, seconds: float = 60) -> int:
    """Wait until a run has saved its state; returns the step."""
    end = time.monotonic() + seconds
    while not (folder / STATE).exists() and time.monotonic() < end:
        time.sleep(0.05)
    return int(read_tensors(folder / STATE)[1]["step"])


def test_a_run_of_two_is_a_run_folder(book: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = together(tmp_path / "first", 2, command, *TRAIN, 7, book, "--out", run, "--json")
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert ended[1].out == ended[1].err == ""
    assert json.loads(ended[0].out)["facts"]["training time"].endswith("processes: 2, torch threads: 1")
    assert {path.name for path in run.iterdir()} >= {"run.json", "model.safetensors", "film.jsonl", "report.html"}
    again = Started(tmp_path / "again", 2, command, *TRAIN, 7, book, "--out", run)
    wrong = Started(tmp_path / "wrong", 2, command, *TRAIN, 7, book, "--out", tmp_path / "x", "--accumulate", 99)
    other = Started(tmp_path / "other", 2, command, "cost", "gpt2")
    for started, said in (
        (again, f"headwise: {run} holds a run already; pass --resume to go on with it, or another --out"),
        (wrong, "headwise: a batch of 64 texts is too small for 2 processes of 99 passes each; "
                "pass a smaller --accumulate"),
        (other, "headwise: headwise cost works in one process; torchrun is for heads and train"),
    ):  # fmt: skip
        refused = started.wait()
        assert [each.code for each in refused] == [2, 2]
        assert lines(refused) == [said]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_process_ends_the_others(book: Path, tmp_path: Path, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(tmp_path / "said", 2, often_saved, *TRAIN, 10_000, book, "--out", tmp_path / "run")
    saved = at_work(tmp_path / "run")
    pid = started.processes[lost].pid
    assert pid is not None and saved > 0
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    ended = started.wait()
    assert time.monotonic() - began < 30
    assert ended[lost].code == -signal.SIGKILL and ended[1 - lost].code == 1, ended[1 - lost].err
    (line,) = lines(ended)
    fact = (
        rf"rank {lost} of 2 is lost: process {pid} on \S+ has ended|the meeting point, on the host of rank 0, is lost"
    )
    assert re.match(f"headwise: ({fact}); all end, and no file is half written; ", line)
    assert "Traceback" not in ended[1 - lost].err
    assert int(read_tensors(tmp_path / "run" / STATE)[1]["step"]) >= saved  # whole, by its digest


def often_saved(*words: object) -> None:
    """The command, which saves its state after every step."""
    train.__defaults__ = (0.0, *(train.__defaults__ or ())[1:])
    command(*words)


def test_control_c_saves_and_is_told_once(book: Path, tmp_path: Path) -> None:
    started = Started(tmp_path / "said", 2, often_saved, *TRAIN, 10_000, book, "--out", tmp_path / "run")
    at_work(tmp_path / "run")
    for process in started.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    ended = started.wait()
    assert [each.code for each in ended] == [130, 130], ended[0].err
    (line,) = lines(ended)
    step = read_tensors(tmp_path / "run" / STATE)[1]["step"]
    assert line == f"headwise: stopped after step {step}, and saved; go on with --resume --out {tmp_path / 'run'}"


@pytest.mark.gpu
def test_a_gpu_learns_what_a_processor_learns(tmp_path: Path, one: Path) -> None:
    """NCCL carries the gradients: one process on one GPU, by DDP's and FSDP2's own ways."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ended = together(tmp_path, 1, shard_alone, tmp_path)
    assert ended[0].code == 0, ended[0].err
    expected = losses(one / "alone")
    assert max(abs(a - b) for a, b in zip(expected, losses(tmp_path / "shard"), strict=True)) < 1e-3


def shard_alone(folder: Path) -> None:
    with joined():
        learn(folder / "shard", Division(shard=True))
