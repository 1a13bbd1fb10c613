"""Files appear whole or not at all: on success, on failure, and when the process is killed in the middle."""

import io
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import every, refuses

from headwise import HeadwiseError
from headwise.files import read_bytes, read_json, read_text, text_path, write_whole

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


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "file", b"x")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "\ud800")
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"before"


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for delay in (0.0, 0.003, 0.007, 0.011, 0.017, 0.023):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        end = time.monotonic() + 300
        started = path.stat().st_mtime_ns if path.exists() else None
        while not path.exists() or path.stat().st_mtime_ns == started:
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        content = path.read_bytes()
        assert len(content) == 3_000_017 and len(set(content)) == 1


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"before")
    (tmp_path / "link").symlink_to(Path("elsewhere") / "file")
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    write_whole(tmp_path / "chain", b"after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "chain").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"after"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere" / "new")
    write_whole(tmp_path / "dangling", b"new")
    assert (tmp_path / "elsewhere" / "new").read_bytes() == b"new" and (tmp_path / "dangling").is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "chain", "dangling", "elsewhere", "file", "link", "new",
    ]  # fmt: skip


@pytest.mark.parametrize("through_link", [False, True])
def test_a_pipe_is_written_to_and_stays(through_link: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    data = bytes(range(251)) * 1009  # more than a pipe holds at a time
    with (tmp_path / "read").open("wb") as read:
        reader = subprocess.Popen(["cat", str(pipe)], stdout=read)
        write_whole(tmp_path / "link" if through_link else pipe, data)
        reader.wait(timeout=300)
    assert (tmp_path / "read").read_bytes() == data
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


def test_standard_output_is_written_to(tmp_path: Path) -> None:
    code = "from headwise.files import write_whole; write_whole('/dev/stdout', b'one'); print('two', end='')"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"onetwo"


def test_tale_is_the_packages_book_unless_there_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = read_text(text_path("names")).split()
    assert len(names) > 190 and set("".join(names)) == set("abcdefghijklmnopqrstuvwxyz")
    book = read_text(text_path("tale"))
    assert book.isascii()
    assert book.startswith("The Village by the River\n")
    assert len(book) > 25_000
    Path("tale").write_text("mine")
    assert text_path("tale").resolve() == tmp_path / "tale"
    assert text_path("book.txt") == Path("book.txt")


def test_what_may_never_end_is_not_opened(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)  # whoever opens it waits for a writer
    loop.symlink_to(loop)
    for read in (read_text, read_json, read_bytes):
        for path, words in ((pipe, "is a pipe or a device"), (loop, "cannot be read"), (tmp_path, "is a folder")):
            with pytest.raises(HeadwiseError, match=words):
                read(path)


def test_reading_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbf" + "niño\n".encode())
    assert read_text(path) == "niño\n"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\r\ntwo")))
    assert read_text("-") == "one\ntwo"
    refuses(lambda: read_text("-"), "standard input is empty")


@every("content", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    refuses(lambda: read_json(tmp_path / "file"), r"file is no JSON: ")
