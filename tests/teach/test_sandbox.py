"""What a learner's file may not do, and what it may. Every escape was open once."""

import os
import socket
import tomllib
from pathlib import Path

import pytest
from invoking import Invoke

from headwise.teach import sandbox
from headwise.teach.exercises import run
from headwise.teach.sandbox import objection

held = pytest.mark.skipif(bool(sandbox.unheld("en")), reason=sandbox.unheld("en"))
TABLES = tomllib.loads(Path(__file__).with_name("escapes.toml").read_text(encoding="utf-8"))
ESCAPES, STILL_ALLOWED = TABLES["escapes"], TABLES["still_allowed"]
FILE = TABLES["file"]


def outcomes(attempts: dict[str, str], tmp_path: Path, port: int = 0) -> dict[str, str]:
    """What became of each attempt, in a process of the guard's."""
    calls = [f"attempt({code!r}, {str(tmp_path)!r}, {port})" for code in attempts.values()]
    job = {
        "name": "learner.py",
        "source": FILE,
        "setup": "",
        "calls": calls,
        "lang": "en",
        "variants": {"": "attempt = None"},
    }
    return dict(zip(attempts, run(job)["learner.py"]["values"], strict=True))


@held
@pytest.mark.slow
def test_no_way_out_is_open(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    with socket.socket(type=socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        results = outcomes(ESCAPES, tmp_path, listener.getsockname()[1])
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(7)
    assert {name: result for name, result in results.items() if result == "done"} == {}
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


@pytest.mark.slow
def test_hooks(tmp_path: Path) -> None:
    # Where the kernel holds nothing, the hook is all: each flag alone changes a file, or makes one.
    inside, outside = tmp_path / "work" / "a", tmp_path / "a"
    ways = {
        "write": os.O_WRONLY,
        "read and write": os.O_RDWR,
        "make, to read": os.O_RDONLY | os.O_CREAT,  # leaves an empty file
        "cut, to read": os.O_RDONLY | os.O_TRUNC,  # empties it
    }
    for way, flags in ways.items():
        assert objection("open", (str(outside), None, flags), inside.parent) == "must_not_write", way
        assert not objection("open", (str(inside), None, flags), inside.parent), way
    assert not objection("open", (str(outside), "r", os.O_RDONLY | os.O_CLOEXEC), inside.parent)
    assert not objection("open", (3, "w", os.O_WRONLY), inside.parent)  # it is open already
    assert not objection("open", (os.devnull, "w", os.O_WRONLY), inside.parent)
    assert objection("open", (f"{inside.parent}-2", "w", os.O_WRONLY), inside.parent) == "must_not_write"
    assert objection("socket.sendto", (None, ("127.0.0.1", 7)), tmp_path) == "must_not_call"
    assert objection("os.rename", (tmp_path / "a", tmp_path / ".." / "b", -1, -1), tmp_path) == "must_not_change"
    assert not objection("os.rename", (tmp_path / "a", tmp_path / "b", -1, -1), tmp_path)
    assert not objection("import", ("math", None, None, None, None), tmp_path)
    assert outcomes(STILL_ALLOWED, tmp_path) == dict.fromkeys(STILL_ALLOWED, "done")


def test_what_a_system_cannot_hold_is_said(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_landlock", lambda: -1)
    path = tmp_path / "learner.py"
    path.write_text("def attention(q, k, v)\n")  # which ends before a process starts
    assert "headwise: this system has not Landlock (Linux 6.2), so code in C++" in invoke("check", path).err
    monkeypatch.setattr(sandbox, "_filters", lambda: False)
    assert not invoke("learn", tmp_path / "new").err  # which runs no file
    assert "Landlock (Linux 6.2) and not a filter of system calls, so" in invoke("learn", tmp_path / "new").err
