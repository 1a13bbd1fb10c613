"""Files appear whole or not at all: on success, on failure, and when the process is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwise.files import write_whole

WRITER = """
import sys
from headwise.files import write_whole
number = 0
while True:
    write_whole(sys.argv[1], bytes([number % 251]) * 3_000_017)
    number += 1
"""


@pytest.mark.parametrize("data", [b"\x00\xffbytes\r\n", "niño 🙂\nñ\r\n", b"", ""])
def test_what_is_written_is_what_is_read(data: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a longer content that was here before")
    write_whole(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]
    write_whole(str(path), data)  # a path may be a string
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_earlier_file_and_nothing_else(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(*_: object) -> None:
        assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 2
        raise error

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(type(error)):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(("fsync", os.fstat(file).st_size)), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append(("replace", to.name)), replace(path, to)))
    write_whole(tmp_path / "file", b"seventeen bytes..")
    assert done[:2] == [("fsync", 17), ("replace", "file")]


def test_a_missing_folder_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_utf8_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_folder_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for delay in (0.0, 0.003, 0.007, 0.011, 0.017, 0.023):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        end = time.monotonic() + 30
        started = path.stat().st_mtime_ns if path.exists() else None
        while not path.exists() or path.stat().st_mtime_ns == started:
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        content = path.read_bytes()
        assert len(content) == 3_000_017 and len(set(content)) == 1
