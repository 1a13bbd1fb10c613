"""OUT.partial: one job at a time, nothing lost, nothing half-written, whenever it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwise import HeadwiseError
from headwise.reshape.workplace import STATE, Workplace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def model(folder: Path, said: str) -> Path:
    """A folder as share writes it."""
    folder.mkdir(parents=True)
    (folder / "headwise.json").write_text("{}")
    (folder / "model.safetensors").write_text(said)
    return folder


def write(workplace: Workplace, said: str) -> None:
    model(workplace.fresh, said)
    workplace.finish()


def said(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_finished_gets_its_name_and_the_rest_goes(source: Path, tmp_path: Path) -> None:
    with Workplace(source, tmp_path / "out", force=False) as workplace:
        write(workplace, "new")
    assert said(tmp_path / "out") == "new" and names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_model_that_was_to_be_replaced_survives_whatever_happens(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: type[BaseException]
) -> None:
    """The first move sets it aside, the second gives the new one its name: either may fail, before or after."""
    out, rename = model(tmp_path / "out", "old"), Path.rename
    for after in (False, True):
        moves: list[Path] = []

        def fail(self: Path, target: Path, moves: list[Path] = moves, after: bool = after) -> Path:
            moves.append(target)
            if len(moves) == failing and not after:
                raise error
            moved = rename(self, target)
            if len(moves) == failing:
                raise error
            return moved

        with monkeypatch.context() as patch, pytest.raises(error), Workplace(source, out, force=True) as workplace:
            model(workplace.fresh, "new")
            patch.setattr(Path, "rename", fail)
            workplace.finish()
        assert said(out) == ("new" if failing == 2 and after else "old")
        assert names(tmp_path) == ["out", "source"]


def test_what_a_killed_job_had_set_aside_comes_back(source: Path, tmp_path: Path) -> None:
    model(tmp_path / "out.partial" / "replaced", "old")
    with pytest.raises(HeadwiseError, match="exists already"), Workplace(source, tmp_path / "out", force=False):
        pass
    assert said(tmp_path / "out") == "old" and names(tmp_path) == ["out", "source"]


def test_a_folder_that_appeared_meanwhile_is_left_alone(source: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(HeadwiseError, match=r"has no headwise\.json"),
        Workplace(source, tmp_path / "out", force=True) as workplace,
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "letter.txt").write_text("dear")
        write(workplace, "new")
    assert names(tmp_path / "out") == ["letter.txt"] and names(tmp_path) == ["out", "source"]


def test_a_second_job_is_refused_and_disturbs_nothing(source: Path, tmp_path: Path) -> None:
    with Workplace(source, tmp_path / "out", force=False) as workplace:
        (workplace.path / STATE).write_text("state")
        with (
            pytest.raises(HeadwiseError, match="another share or prune is at work in"),
            Workplace(source, tmp_path / "out", force=False),
        ):
            pass
        assert (workplace.path / STATE).read_text() == "state"
        write(workplace, "new")
    assert names(tmp_path) == ["out", "source"]
    with Workplace(source, tmp_path / "out", force=True):
        pass
    assert said(tmp_path / "out") == "new"


def test_a_state_waits_for_its_own_job(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"share": 2, "source": "abc", "heal": {"steps": 3}}
    with pytest.raises(KeyboardInterrupt), Workplace(source, tmp_path / "out", force=False) as workplace:
        workplace.claim(settings, resume=False)
        workplace.claim({"origins": ((1, 0),)}, resume=False)
        (workplace.path / STATE).write_text("state")
        raise KeyboardInterrupt
    assert names(tmp_path / "out.partial") == ["heal.json", STATE]
    for changes, resume, refusal in (
        ({}, False, "pass --resume to go on with it"),
        ({"source": "abd"}, True, r"other settings \(source: abc there, abd here\)"),
        ({"heal": {"steps": 4}}, True, r"other settings \(heal: \{'steps': 3\} there"),
        ({"origins": [[0, 1]]}, True, r"other settings \(origins: "),
    ):
        with pytest.raises(HeadwiseError, match=refusal), Workplace(source, tmp_path / "out", force=False) as workplace:
            workplace.claim(settings | changes, resume)
    with Workplace(source, tmp_path / "out", force=False) as workplace:
        workplace.claim(settings, resume=True)
        workplace.claim({"origins": ((1, 0),)}, resume=True)
        write(workplace, "new")
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_damaged_settings_are_named(source: Path, tmp_path: Path, text: str) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / STATE).write_text("state")
    (partial / "heal.json").write_text(text)
    with (
        pytest.raises(HeadwiseError, match=r"heal\.json is damaged; remove that folder to begin anew"),
        Workplace(source, tmp_path / "out", force=False) as workplace,
    ):
        workplace.claim({"share": 2}, resume=True)


def test_links_and_files_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for name, said_ in (("link", "is a link"), ("file", "is a file"), ("no/out", "does not exist")):
        with pytest.raises(HeadwiseError, match=said_), Workplace(source, tmp_path / name, force=True):
            pass
    assert names(tmp_path) == ["file", "link", "source"]


def test_hidden_files_of_others_are_in_the_way_and_stay(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / ".mine.tmp").write_text("mine")
    with pytest.raises(HeadwiseError, match="is in the way"), Workplace(source, tmp_path / "out", force=True):
        pass
    assert names(partial) == [".mine.tmp"]
