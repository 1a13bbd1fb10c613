"""OUT.partial: one job at a time, nothing lost, nothing half-written, whenever it is stopped."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise import HeadwiseError
from headwise.reshape.workplace import STATE, Workplace

pytestmark = pytest.mark.clock


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


def refused(source: Path, out: Path, words: str, force: bool = True) -> None:
    with pytest.raises(HeadwiseError, match=words), Workplace(source, out, force):
        pass


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


KILLED = """
import os, signal, sys
from pathlib import Path
from headwise.reshape import workplace as room

tmp_path, moment = Path(sys.argv[1]), int(sys.argv[2])


def counting(function):
    def count(*arguments, **options):
        global moment
        moment -= 1
        if not moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return count


for child in range(1, moment + 1):
    folder = tmp_path / str(child)
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "headwise.json").write_text("old")
    moment = child
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        continue
    with room.Workplace(tmp_path / "source", folder / "out", force=True) as place:
        (place.path / room.STATE).write_text("state")
        place.fresh.mkdir()
        (place.fresh / "headwise.json").write_text("new")
        for owner, name in ((Path, "rename"), (Path, "unlink"), (os, "fsync"), (room.shutil, "rmtree")):
            setattr(owner, name, counting(getattr(owner, name)))
        place.finish()
    os._exit(0)
"""
MOMENTS = 12  # more than `finish` and `__exit__` have calls that change the disk


@pytest.mark.slow
def test_a_job_that_is_killed_at_its_end_leaves_nothing_that_the_next_one_does_not_settle(
    source: Path, tmp_path: Path
) -> None:
    """SIGKILL before each call that changes the disk: the old model is whole, or the new one; then all is clear."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(MOMENTS)]
    subprocess.run(command, env=environment, check=True, timeout=100)
    ends, left = [], 0
    for moment in range(1, MOMENTS + 1):
        folder = tmp_path / str(moment)
        left += (folder / "out.partial").exists()
        refused(source, folder / "out", "exists already", force=False)
        ends.append((folder / "out" / "headwise.json").read_text())
        waiting = names(folder / "out.partial") if (folder / "out.partial").exists() else []
        assert waiting == ([STATE] if ends[-1] == "old" else []), moment
    assert ends == sorted(ends, reverse=True) and len(set(ends)) == 2  # first the old one, then the new one
    assert ends.count("old") < left < MOMENTS  # killed before and after the new one had its name, and not at all


def test_a_folder_that_appeared_meanwhile_is_left_alone(source: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(HeadwiseError, match=r"has no headwise\.json"),
        Workplace(source, tmp_path / "out", force=True) as workplace,
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "letter.txt").write_text("dear")
        write(workplace, "new")
    assert names(tmp_path / "out") == ["letter.txt"] and names(tmp_path) == ["out", "source"]


def test_links_and_files_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for name, words in (("link", "is a link"), ("file", "is a file"), ("no/out", "does not exist")):
        refused(source, tmp_path / name, words)
    assert names(tmp_path) == ["file", "link", "source"]


def test_hidden_files_of_others_are_in_the_way_and_stay(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / ".mine.tmp").write_text("mine")
    refused(source, tmp_path / "out", "is in the way")
    assert names(partial) == [".mine.tmp"]


def test_what_is_refused_deletes_nothing(source: Path, tmp_path: Path) -> None:
    for name in ("letters", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".letter.txt.7.tmp").write_text("dear")
    model(tmp_path / "letters.partial" / "replaced", "old")
    for place, words in (("letters", r"has no headwise\.json"), ("source", "is the source itself"), ("", "holds the")):
        refused(source, tmp_path / place, words)
    assert names(tmp_path) == ["letters", "letters.partial", "out", "source"]
    assert said(tmp_path / "letters.partial" / "replaced") == "old"
    assert names(tmp_path / "letters") == names(tmp_path / "out") == [".letter.txt.7.tmp"]


def test_a_second_job_is_refused_and_disturbs_nothing(source: Path, tmp_path: Path) -> None:
    with Workplace(source, tmp_path / "out", force=False) as workplace:
        (workplace.path / STATE).write_text("state")
        refused(source, tmp_path / "out", "another share or prune is at work in", force=False)
        assert (workplace.path / STATE).read_text() == "state"
        write(workplace, "new")
    assert names(tmp_path) == ["out", "source"]
    with Workplace(source, tmp_path / "out", force=True):
        pass
    assert said(tmp_path / "out") == "new"


def test_a_state_waits_for_its_own_job(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"share": 2, "source": "abc", "heal": {"steps": 3}}
    with pytest.raises(KeyboardInterrupt), Workplace(source, tmp_path / "out", force=False) as workplace:
        workplace.claim(settings)
        workplace.claim({"origins": ((1, 0),)})
        (workplace.path / STATE).write_text("state")
        raise KeyboardInterrupt
    assert names(tmp_path / "out.partial") == ["heal.json", STATE]
    for changes, refusal in (
        ({"source": "abd"}, r"other settings \(source: abc there, abd here\)"),
        ({"heal": {"steps": 4}}, r"other settings \(heal: \{'steps': 3\} there"),
        ({"origins": [[0, 1]]}, r"other settings \(origins: "),
        ({"prune": 2}, r"other settings \(prune: nothing there, 2 here"),
    ):
        with pytest.raises(HeadwiseError, match=refusal), Workplace(source, tmp_path / "out", force=False) as workplace:
            workplace.claim(settings | changes)
    with Workplace(source, tmp_path / "out", force=False) as workplace:
        workplace.claim(settings)
        workplace.claim({"origins": ((1, 0),)})
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
        workplace.claim({"share": 2})
