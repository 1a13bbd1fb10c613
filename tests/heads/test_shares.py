"""A corpus read by several processes: the numbers of one, each document once, whatever is killed."""

import copy
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cases import refuses
from processes import Started, command, together

from headwise.corpus.documents import Text
from headwise.corpus.tokens import Tokens
from headwise.gpt import ranks
from headwise.gpt.checkpoint import read_tensors, save_model, write_tensors
from headwise.gpt.gpt import GPT, GPTConfig
from headwise.heads import tally as sharing
from headwise.heads.documents import side_by_side
from headwise.heads.survey import survey
from headwise.heads.table import Survey
from headwise.heads.tally import Part, shares

pytestmark = pytest.mark.clock


def same(one: Survey, other: Survey) -> None:
    """Equal to the rounding of sums in float64; what is no sum is the same."""
    assert list(one) == list(other)
    assert replace(one, profiles=(), untrained=None) == replace(other, profiles=(), untrained=None)
    for name in one:
        a, b = vars(one[name]), vars(other[name])
        for key in a:
            close(a[key], b[key], f"{name} {key}")


def close(a: Any, b: Any, where: str) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            close(a[key], b[key], f"{where} {key}")
    elif isinstance(a, float | np.ndarray):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=where)
    elif isinstance(a, tuple | list):
        assert len(a) == len(b), where
        for x, y in zip(a, b, strict=True):
            close(x, y, where)
    elif hasattr(a, "__dataclass_fields__"):
        close(vars(a), vars(b), where)
    else:
        assert a == b, where


def test_whole_batches_are_shared_and_each_document_once(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.heads.documents.TOGETHER", 46)
    documents = text.documents
    for world in (1, 2, 3, 19):
        for ends in ([], [range(0, 2), range(9, 10)]):
            parts = shares(documents, {n for each in ends for n in each}, world)
            numbers = [n for ranges in (*parts, ends) for each in ranges for n in each]
            assert sorted(numbers) == list(range(len(documents))), (world, ends)
            together = [ids.shape for ids in side_by_side(documents)]
            apart = []
            for each in sorted((r for some in (*parts, ends) for r in some), key=lambda r: r.start):
                apart += [ids.shape for ids in side_by_side(Part(documents, each))]
            assert together == apart
    # What was kept with other batches may end within one of today's.
    assert shares([[0] * 5] * 19, {2, 3, 4, 5, 6, 11, 12}, 1) == [[range(2), range(7, 11), range(13, 19)]]
    sizes = [sum(len(documents[n]) for each in part for n in each) for part in shares(documents, (), 2)]
    assert max(sizes) - min(sizes) <= 2 * 46


def test_a_survey_goes_on_from_what_is_kept(
    model: GPT, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after some batches, by one process; no document is read twice, and the numbers are those of one go."""
    monkeypatch.setattr("headwise.heads.documents.TOGETHER", 23)
    monkeypatch.setattr(sharing, "SAVE_SECONDS", 0.0)
    options: dict[str, Any] = {"controls": False, "ablate": "none"}
    expected = survey(model, text, **options)
    read: list[int] = []

    def until(limit: int) -> Any:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == "running the model":
                read.append(done)
                assert total == sum(map(len, text.documents))
                if done >= limit:
                    raise KeyboardInterrupt

        return progress

    for limit in (60, 150):
        with pytest.raises(KeyboardInterrupt):
            survey(model, text, keep=tmp_path, progress=until(limit), **options)
    same(survey(model, text, keep=tmp_path, progress=until(10**9), **options), expected)
    kept = [json.loads(read_tensors(path)[1]["numbers"]) for path in sorted(tmp_path.glob("tally-*"))]
    numbers = [n for of_file in kept for n in of_file]
    assert sorted(numbers) == list(range(len(text.documents))) and len(kept) == 3
    count = len(read)
    half = tmp_path / ".tally-9-0.safetensors.17.tmp"
    half.write_bytes(b"left by a kill")
    same(survey(model, text, keep=tmp_path, progress=until(10**9), **options), expected)
    assert not half.exists()
    assert len(read) == count  # nothing is left to read
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    refuses(lambda: survey(other, text, keep=tmp_path, **options), "is of another model or text; go on with those")
    write_tensors(kept_file := tmp_path / "tally-1-0.safetensors", {}, {"format": "pt"})
    said = f"{kept_file} is damaged: it is no tally of headwise; remove it"
    refuses(lambda: survey(model, text, keep=tmp_path, **options), said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder and a corpus."""
    path = tmp_path_factory.mktemp("model")
    letters = "abcdefghij .\n"
    tokens = Tokens.characters(letters, boundary=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = GPTConfig(vocab_size=len(tokens), context=37, n_layers=2, n_heads=4, n_kv_heads=2, d_model=24)
        save_model(path / "m", GPT(config), tokens)
    words = np.random.default_rng(3).choice(list(letters[:11]), 9_007)
    (path / "corpus.txt").write_text("".join(words))
    return path


def words(folder: Path, *more: object) -> tuple[object, ...]:
    return ("heads", folder / "m", "--text", folder / "corpus.txt", "--tokens", 31, "--json", *more)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    ended = together(folder / "alone", 1, command, *words(folder))
    assert ended[0].code == 0, ended[0].err
    answer: dict[str, Any] = json.loads(ended[0].out)
    return answer


@pytest.mark.slow
def test_killed_by_a_lost_process_it_goes_on_with_three(folder: Path, alone: dict[str, Any]) -> None:
    kept = folder / "kept"
    started = Started(folder / "killed", 2, often, *words(folder, "--keep", kept))
    end = time.monotonic() + 100
    while not list(kept.glob("tally-1-1*")) and time.monotonic() < end:
        time.sleep(0.02)
    pid = started.processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ended = started.wait()
    assert ended[0].code == 1 and "headwise: rank 1 of 2 is lost" in ended[0].err, ended[0].err
    ended = together(folder / "goes on", 3, command, *words(folder, "--keep", kept))
    assert [each.code for each in ended] == [0, 0, 0], ended[0].err
    assert {each.out + each.err for each in ended[1:]} == {""}
    close(json.loads(ended[0].out), alone, "survey")


def often(*words: object) -> None:
    """The command, which keeps what it has read after every batch, takes its time, and soon misses a rank."""
    sharing.SAVE_SECONDS, ranks.SILENT = 0.0, 5
    write = sharing.Tallies.write

    def slowly(*arguments: Any, **more: Any) -> None:
        write(*arguments, **more)
        time.sleep(0.5)

    sharing.Tallies.write = slowly  # type: ignore[method-assign]
    command(*words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "own"])
def test_heads_that_are_spread_have_their_numbers_and_names(folder: Path, tmp_path: Path, kind: str) -> None:
    path = folder / "m"
    if kind == "llama":
        path = tmp_path / "m"
        config = transformers.LlamaConfig(
            vocab_size=14, hidden_size=24, intermediate_size=38, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=37, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            transformers.LlamaForCausalLM(config).save_pretrained(path)
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(str(n * n * k % 13) for n in range(1, 19)) for k in range(2, 7)))
    look = ("heads", path, "--ids", ids, "--ablate", "none", "--json")
    spread = Started(tmp_path / "spread", 2, command, *look, "--parallel", "tensor")
    three = Started(tmp_path / "three", 3 if kind == "own" else 0, command, *look, "--parallel", "tensor")
    (alone,) = together(tmp_path / "alone", 1, command, *look)
    ended, refused = spread.wait(), three.wait()
    assert [each.code for each in (*ended, alone)] == [0, 0, 0], ended[0].err + ended[1].err + alone.err
    got, expected = json.loads(ended[0].out), json.loads(alone.out)
    assert [head["name"] for head in got["profiles"]] == [head["name"] for head in expected["profiles"]]
    for head, whole in zip(got["profiles"], expected["profiles"], strict=True):
        assert set(whole["scores"]) - set(head["scores"]) == {"copying"}
        for key, score in head["scores"].items():
            assert score["mean"] == pytest.approx(whole["scores"][key]["mean"], rel=1e-4, abs=1e-5), (head["name"], key)
        np.testing.assert_allclose(head["thumbnail"], whole["thumbnail"], atol=1e-5)
    assert any("spread over 2 processes: copying, importance" in note for note in got["notes"])
    if kind == "llama":  # once is enough
        return
    assert [each.code for each in refused] == [2, 2, 2], [each.err for each in refused]
    said = [line for each in refused for line in each.err.splitlines() if line.startswith("headwise: ")]
    assert len(said) == 1 and "3 processes do not divide the 4 heads of the model; start 1 or 2, or" in said[0]
