"""What a learner's file may not do, and what it may. Every escape was open once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from invoking import Invoke

from headwise.teach import sandbox
from headwise.teach.exercises import run
from headwise.teach.sandbox import refusal

held = pytest.mark.skipif(bool(sandbox.unheld("en")), reason=sandbox.unheld("en"))
# Each is tried in the process of the check, with OUT, a folder outside, and PORT, where somebody listens.
ESCAPES = {
    "torch.save": "import torch; torch.save(torch.ones(3), OUT + '/a.pt')",
    "safetensors": "import torch, safetensors.torch as s; s.save_file({'a': torch.ones(3)}, OUT + '/a.safetensors')",
    "sqlite3": "import sqlite3; sqlite3.connect(OUT + '/a.db').execute('create table t (x)')",
    "parquet": "import pyarrow as p, pyarrow.parquet as q; q.write_table(p.table({'a': [3]}), OUT + '/a.parquet')",
    "C": "import ctypes; ctypes.CDLL(None).creat(b(OUT + '/c'), 0o600) >= 0 or refuse()",
    "cut by an open": "import os; os.open(OUT + '/kept', os.O_TRUNC)",
    "pipe": "import os; os.mkfifo(OUT + '/pipe')",
    "cut in C": "import ctypes; ctypes.CDLL(None).truncate(b(OUT + '/kept'), 0) == 0 or refuse()",
    "removed in C": "import ctypes; ctypes.CDLL(None).unlink(b(OUT + '/kept')) == 0 or refuse()",
    "answer": "import os, sys; open(os.path.join(os.getcwd(), '..', 'answer.json'), 'w')",
    "datagram": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', PORT))",
    "socket in C": "import ctypes; ctypes.CDLL(None).socket(2, 1, 0) >= 0 or refuse()",
    "spawn": "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
    "child": "import ctypes; leave() if (n := ctypes.CDLL(None).fork()) == 0 else n > 0 or refuse()",
    "signal": "import ctypes; ctypes.CDLL(None).kill(PARENT, 0) == 0 or refuse()",
    "shared memory": "import mmap; mmap.mmap(-1, 5 << 30)",
    "named memory": "from multiprocessing.shared_memory import SharedMemory as S; S(create=True, size=1 << 20)",
    "torch's shared memory": "import torch; torch.zeros(1 << 20).share_memory_()",
    "memory as a file": "import os; os.memfd_create('x')",
    "memory of System V": "import ctypes; ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0 or refuse()",
    "queue": "import ctypes as c; c.CDLL(None).syscall(425, 7, c.create_string_buffer(120)) >= 0 or refuse()",
    "a large file": "f = open('large', 'wb'); f.truncate(5 << 30)",
    # The last, since it ends all that follows.
    "program": "import ctypes; ctypes.CDLL(None).execl(b('/bin/true'), b('true'), None) == 0 or refuse()",
}
STILL_ALLOWED = {
    "a file of its own": "open('x', 'w').write('x'); import os; os.mkdir('d'); os.rename('x', 'd/x'); os.remove('d/x')",
    "torch's file": "import torch; torch.save(torch.ones(3), 'a.pt'); torch.load('a.pt')",
    "nowhere": "print('x', file=open('/dev/null', 'w'))",
    "threads": "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    "memory": "b = bytearray(1 << 20)",
    "torch, late": "import importlib; importlib.import_module('torch').ones(3).sum()",
}
FILE = """
import os, signal
PARENT = os.getppid()

def b(text):
    return text.encode()

def refuse():
    raise PermissionError

def leave():  # a child that stays, in a session of its own
    os.setsid()
    signal.pause()

def attempt(code, OUT, PORT):
    try:
        exec(code, {**globals(), "OUT": OUT, "PORT": PORT})
    except BaseException as error:
        return type(error).__name__ + ": " + str(error)
    return "done"
"""


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
        assert refusal("open", (str(outside), None, flags), inside.parent) == "must_not_write", way
        assert not refusal("open", (str(inside), None, flags), inside.parent), way
    assert not refusal("open", (str(outside), "r", os.O_RDONLY | os.O_CLOEXEC), inside.parent)
    assert not refusal("open", (3, "w", os.O_WRONLY), inside.parent)  # it is open already
    assert not refusal("open", (os.devnull, "w", os.O_WRONLY), inside.parent)
    assert refusal("open", (f"{inside.parent}-2", "w", os.O_WRONLY), inside.parent) == "must_not_write"
    assert refusal("socket.sendto", (None, ("127.0.0.1", 7)), tmp_path) == "must_not_call"
    assert refusal("os.rename", (tmp_path / "a", tmp_path / ".." / "b", -1, -1), tmp_path) == "must_not_change"
    assert not refusal("os.rename", (tmp_path / "a", tmp_path / "b", -1, -1), tmp_path)
    assert not refusal("import", ("math", None, None, None, None), tmp_path)
    assert outcomes(STILL_ALLOWED, tmp_path) == dict.fromkeys(STILL_ALLOWED, "done")


def test_what_a_system_cannot_hold_is_said(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_landlock", lambda: -1)
    path = tmp_path / "learner.py"
    path.write_text("def attention(q, k, v)\n")  # which ends before a process starts
    assert "headwise: this system has not Landlock (Linux 6.2), so code in C++" in invoke("check", path).err
    monkeypatch.setattr(sandbox, "_filters", lambda: False)
    assert not invoke("learn", tmp_path / "new").err  # which runs no file
    assert "Landlock (Linux 6.2) and not a filter of system calls, so" in invoke("learn", tmp_path / "new").err
