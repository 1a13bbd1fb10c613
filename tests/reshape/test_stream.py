"""A model whose layers borrow their weights gives the same bits as one in memory, and says what it cannot do."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import every, refuses
from reshape_models import V, saved
from torch import Tensor, nn

import headwise as hw
from headwise import memory
from headwise.corpus.documents import Text
from headwise.gpt.checkpoint import tensors_in, write_shard
from headwise.heads.effect import importance
from headwise.heads.survey import survey
from headwise.heads.table import Survey
from headwise.heads.why import forecast, why
from headwise.models import ask, stream
from headwise.models import open as opening
from headwise.models.sites import is_hf
from headwise.story import Story

IDS = torch.randint(3, V, (12, 13), generator=torch.Generator().manual_seed(3))
NAMES = ("llama, GQA", "llama, tied", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random model, in many shards; "run" is one of our own."""

    return partial(saved, tmp_path_factory.mktemp("models"), max_shard_size="10KB")


def both(path: Path) -> tuple[nn.Module, nn.Module]:
    """A folder in memory, and streamed."""
    return hw.open(path, stream=False), hw.open(path, stream=True)


def text() -> Text:
    documents = [*IDS[:5].tolist(), [4, 5, 6, 7, 8, 9, 10]]
    return Text(documents, lambda ids: tuple(f"t{i}" for i in ids))


def same(result: Survey, wanted: Survey) -> None:
    for head in wanted.profiles:
        other = result[head.name]
        assert other.means == pytest.approx(head.means, abs=1e-5, nan_ok=True) and other.roles == head.roles
        assert other.uniform == pytest.approx(head.uniform, abs=1e-5)
        assert abs(other.thumbnail - head.thumbnail).max() < 1e-5


@every("name", ["bert", "mistral", "gemma3, tied", "run", *NAMES])
def test_logits_are_those_in_memory(folder: Any, name: str) -> None:
    whole, parts = both(folder(name))
    batches = [IDS[:5], IDS[5:]]
    with torch.no_grad():
        wanted = [ask.answers(whole, ids) for ids in batches]
        assert all(map(torch.equal, wanted, [ask.answers(parts, ids) for ids in batches]))
        assert all(map(torch.equal, wanted, ask.each(parts, batches, ask.answers)))
    assert ask.predicts(parts) == ask.predicts(whole)
    resting = {parameter.device.type for parameter in ask.blocks(parts)[0].parameters()}
    assert resting == {"meta"} and ask.blocks(whole)[0] is not None


@pytest.mark.slow
@every("name", ["run", "llama, GQA", "gpt2"])
def test_a_survey_is_the_same(folder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = both(folder(name))
    wanted = survey(whole, text(), ablate="none")
    result = survey(parts, text())
    same(result, wanted)
    assert result.untrained == pytest.approx(wanted.untrained, abs=1e-5)
    assert any("layer by layer" in note for note in result.notes)
    few = memory.Room(4 * 20 * ask.stream_of(parts).state_size, "memory")  # type: ignore[union-attr]
    monkeypatch.setattr(stream, "free_memory", lambda: few)  # the states of one document at a time
    assert len(survey(parts, text(), controls=False)) == len(result)


def test_each_layer_is_read_once(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    borrow = stream.Stream.borrow
    monkeypatch.setattr(stream.Stream, "borrow", lambda self, name: (read.append(name), borrow(self, name))[1])
    parts = hw.open(folder("llama"), stream=True)
    assert survey(parts, text(), controls=False)["L0.H1"].scores["induction"].n > 1
    twice = {name for name in read if read.count(name) > 1}
    assert "model.layers.1.mlp.up_proj.weight" in read and not twice
    whole, parts = both(folder("qwen3"))
    assert importance(parts, [IDS[:3]]) == importance(whole, [IDS[:3]])
    assert hw.attribute(parts, IDS[0], 7).heads == hw.attribute(whole, IDS[0], 7).heads
    import headwise.heads.survey as module

    monkeypatch.setattr(module, "WHOLE", 10)
    for model in both(folder("llama, GQA")):
        before = torch.random.get_rng_state()
        result = survey(model, text(), ablate="none")
        assert any("2 layers" in note for note in result.notes) and result.untrained
        assert torch.equal(before, torch.random.get_rng_state())


@every(
    "name, corrupt, clear, reads",
    [
        ("llama, GQA", "klcmx", 0.01, 3),  # the third for paths
        ("gpt2", "klcmx", 9, 2),
        ("qwen3", None, 9, 3),  # the second for W_O alone, whose pages come when they are touched
    ],
)
def test_a_story_is_the_same(
    folder: Any, name: str, corrupt: str | None, clear: float, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is how often each layer is read. Variants run in other batches than in memory: float32 rounds otherwise."""
    loads, loaded = Counter[int](), stream.Stream.loaded

    @contextmanager
    def counted(self: stream.Stream, layer: int) -> Iterator[None]:
        loads[layer] += not self._users[layer]
        with loaded(self, layer):
            yield

    monkeypatch.setattr(stream.Stream, "loaded", counted)
    monkeypatch.setattr(Story, "CLEAR", clear)
    whole, parts = both(folder(name))
    tokens = opening.open_folder(folder("run")).tokens
    for model in (whole, parts):
        opening.remember(model, Path("x"), tokens, name)
        ask.predicts(model)
    steps: list[tuple[str, int, int]] = []
    line = forecast(parts, "abcab", corrupt)
    assert line.startswith("layer by layer: ") and line.endswith("the reading, 2 times")
    assert not forecast(whole, "a", None)
    wanted = why(whole, "abcab", corrupt)
    loads.clear()
    stories = [why(parts, "abcab", corrupt, progress=lambda *step: steps.append(step))]
    assert set(loads.values()) == {reads} and len(loads) == 2
    assert {stage: done for stage, done, _ in steps} == {stage: total for stage, _, total in steps} != {}
    few = memory.Room(4 * 20 * ask.stream_of(parts).state_size, "memory")  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(stream, "free_memory", lambda: few)  # four variants wait between two layers
        stories.append(why(parts, "abcab", corrupt))
    assert max(loads.values()) > 2 * reads
    nats = min(1.0, abs(wanted.clean_value - (wanted.corrupted_value or 0.0)))
    close = 2**6 * torch.finfo(torch.float32).eps / nats
    for story in stories:
        assert (story.tokens, story.answer, story.other, story.notes) == (
            wanted.tokens, wanted.answer, wanted.other, wanted.notes
        )  # fmt: skip
        assert story.feed_forwards == pytest.approx(wanted.feed_forwards, abs=close)
        for head, other in zip(wanted.heads, story.heads, strict=True):
            assert (head.head, head.at, len(head.looks)) == (other.head, other.at, len(other.looks))
            numbers = [(x.adds or 0.0, x.brings or 0.0, x.without or 0.0) for x in (head, other)]
            assert numbers[1] == pytest.approx(numbers[0], abs=close) and (head.without is None) is (
                other.without is None
            )
        assert [(x.head, x.k, x.v) for x in story.keys] == [
            (x.head, pytest.approx(x.k, abs=close), pytest.approx(x.v, abs=close)) for x in wanted.keys
        ]
        paths, expected = ({(x.sender, x.receiver, x.at): x.effect for x in each.paths} for each in (story, wanted))
        assert paths == pytest.approx(expected, abs=close) and bool(paths) is (clear < 1)


def test_free_memory_knows_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory().size > 2**20
    files = {"/proc/self/cgroup": "0::/box/leaf\n"}  # a group that leaves memory to the one above it
    files |= {
        f"/sys/fs/cgroup/box/memory.{name}": text for name, text in (("max", "314\n"), ("stat", "anon 300\nshmem 7\n"))
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files.get(str(path)) or path.read_bytes().decode())
    assert memory.free_memory() == memory.Room(7, "cgroup")


def test_the_command(folder: Any, tmp_path: Path, invoke: Any) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(" ".join(map(str, row)) for row in IDS.tolist()))
    done = invoke("heads", str(folder("llama")), "--ids", str(file), "--stream", "--json")
    assert done.code == 0 and "layer by layer: " in done.err and json.loads(done.out)


def test_bad_folders(folder: Any, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder("llama"), tmp_path / "bad")
    index = tmp_path / "bad" / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    path = tmp_path / "bad" / names["model.layers.1.self_attn.o_proj.weight"]
    whole = {name: place.borrow().clone() for name, place in tensors_in(path).items()}

    def refused(tensors: dict[str, Tensor], message: str) -> None:
        write_shard(path, tensors)
        refuses(lambda: survey(hw.open(tmp_path / "bad", stream=True), text()), message)

    wrong = {**whole, "model.layers.1.self_attn.o_proj.weight": torch.zeros(3, 5)}
    refused(wrong, r"o_proj.weight is \(3, 5\) in its file, and \(24, 60\) by config.json")
    refused({name: torch.full_like(x, torch.nan) for name, x in whole.items()}, "the model has NaN or inf in ")
    refused({}, "lacks weights of LlamaForCausalLM")
    write_shard(path, {name: x.to(torch.float64) for name, x in whole.items()})
    assert hw.open(tmp_path / "bad", stream=True) is not None  # other numbers are turned into the model's
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"F16"'))  # places longer than type and shape say
    refuses(lambda: survey(hw.open(tmp_path / "bad", stream=True), text()), "lacks weights of LlamaForCausalLM")
    config = tmp_path / "bad" / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "num_hidden_layers": -1}))
    with pytest.raises(hw.HeadwiseError, match="the config of LlamaForCausalLM describes a model without layers"):
        hw.open(tmp_path / "bad", stream=True)
    config.write_text(before)
    path.unlink()
    refuses(lambda: hw.open(tmp_path / "bad", stream=True), "which is not there; the model is not whole")
    refuses(lambda: hw.open(folder("llama"), dtype="fp8"), "dtype=fp8 is not computed in")
    assert next(hw.open(folder("llama"), dtype="bfloat16", stream=True).parameters()).dtype == torch.bfloat16
    assert is_hf(hw.open(folder("llama"), stream=True))
