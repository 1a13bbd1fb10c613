"""A model folder appears whole or not at all, and what stood there is never lost."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise import HeadwiseError
from headwise.families import run_of
from headwise.reshape.job import check_place, replaced


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def fill(folder: Path, weights: str) -> Path:
    """A folder as share writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "headwise.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return folder


def read(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damaged", ["{", "[]", '{"run": 3}', '"run"'])
def test_a_damaged_record_is_named(source: Path, damaged: str) -> None:
    (source / "headwise.json").write_text(damaged)
    with pytest.raises(HeadwiseError, match=r"headwise\.json"):
        run_of(source)


@pytest.mark.parametrize("before", [None, "empty", "model"])
def test_a_new_folder_takes_the_place_of_the_one_before(source: Path, tmp_path: Path, before: str | None) -> None:
    out = tmp_path / "out"
    if before == "empty":
        out.mkdir()
    if before == "model":
        fill(out, "old")
    with replaced(source, out, force=True) as fresh:
        fill(fresh, "new")
        assert before != "model" or read(out) == "old"
    assert read(out) == "new" and names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_model_that_was_to_be_replaced_survives_whatever_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: type[BaseException]
) -> None:
    """The first rename sets it aside, the second gives the new one its name."""
    out, rename, moves = fill(tmp_path / "out", "old"), Path.rename, list[Path]()

    def fail(self: Path, target: Path) -> Path:
        moves.append(target)
        if len(moves) == failing:
            raise error
        return rename(self, target)

    with pytest.raises(error), replaced(source, out, force=True) as fresh:
        fill(fresh, "new")
        monkeypatch.setattr(Path, "rename", fail)
    assert read(out) == "old" and names(tmp_path) == ["out", "source"]


def test_work_that_fails_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replaced(source, tmp_path / "out", force=False) as fresh:
        fill(fresh, "half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["source"]


def test_a_folder_that_appeared_meanwhile_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(HeadwiseError, match="exists"), replaced(source, out, force=False) as fresh:
        fill(fresh, "new")
        fill(out, "of somebody else")
    assert read(out) == "of somebody else" and names(tmp_path) == ["out", "source"]


def test_links_files_and_folders_of_others_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    fill(tmp_path / "foreign", "mine")
    (tmp_path / "foreign" / "headwise.json").unlink()
    for name, words in {
        "file": "file",
        "link": "link",
        "foreign": "headwise.json",
        "source": "source",
        "source/below": "source",
        "nowhere/out": "nowhere",
    }.items():
        with pytest.raises(HeadwiseError, match=words):
            check_place(source, tmp_path / name, force=True)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 88, "intermediate_size": 61, "num_attention_heads": 4, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=101, max_position_embeddings=37)).to(torch.bfloat16)


IDS = torch.arange(900) * 7 % 101


def test_a_child_keeps_the_files_of_its_parent_and_says_what_was_done(source: Path, tmp_path: Path) -> None:
    llama().save_pretrained(source, max_shard_size=90_000)
    for name in ("LICENSE.txt", "chat_template.jinja"):
        (source / name).write_text(name)
    child = hw.share(source, 2, text=IDS, out=tmp_path / "out", dtype="fp16")
    assert names(tmp_path / "out") == sorted([*names(source), "README.md", "headwise.json"])
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "LICENSE.txt"
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.float16 == next(child.model.parameters()).dtype
    card = (tmp_path / "out" / "README.md").read_text()
    assert child.what in card and child.won in card and str(child.verified) in card
    assert f"| parameters | {child.damage.parameters.before:,} | {child.damage.parameters.after:,} |" in card
