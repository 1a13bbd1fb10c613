"""A learner's file in a process of its own: it may loop, exit, fork or write, and nothing of the caller's is harmed.

The process has a time, a memory limit and an empty folder to stand in; what the file prints goes nowhere. It must not
start processes, open connections, send signals, or write and remove anything outside that folder. Where the system can,
the kernel holds it to that: Landlock lets it change files in one folder alone; a filter of system calls refuses new
processes, sockets, signals, and memory that is shared and so counts for no limit. Both hold for Python, C++ and Rust
alike, for root too, and for good. An audit hook tells what Python itself is about to do, in words, and is all where the
kernel cannot. It guards against accidents, not against malice.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headwise.teach.bugs import read_toml, speaker

# In bytes, and round: 4 GiB that the process may hold, 1 GiB of a file that it writes. A check needs far less.
MEMORY = 4 << 30
LARGEST_FILE = 1 << 30


class Ended(NamedTuple):
    """What a process left."""

    answer: str  # JSON; empty where there is none
    code: int | None  # its exit code, -9 where signal 9 ended it; None where it ran out of time
    trace: str  # what it wrote of where it stood; empty where it wrote nothing


def run_apart(
    module: str,
    request: dict[str, Any],
    seconds: float | None,
    hear: Callable[[str], None] | None = None,
    keep: Callable[[Path], None] = lambda work: None,
) -> Ended:
    """Run a module in a process of its own, which ends after some seconds, with all that it has started.

    The module finds the request as JSON in the file that its first argument names, and in it, under `answer` and
    `trace`, the files to write. It stands in an empty folder, which it may fill.

    seconds  None for no limit. With `hear` they count from the end of its output, for which it may take any time: a
             training has no limit
    hear  is called with each line of its standard output, which goes nowhere otherwise
    keep  is called with that folder, which is removed afterwards
    """
    with tempfile.TemporaryDirectory(prefix="headwise-check-") as folder:
        answer, trace, asked = (Path(folder) / name for name in ("answer.json", "trace.txt", "request.json"))
        work = Path(folder) / "work"
        work.mkdir()
        asked.write_text(json.dumps({**request, "answer": str(answer), "trace": str(trace)}), encoding="utf-8")
        # This package comes first, so that the process runs the same one. An empty entry would be its own folder.
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        # No graphics card, no window of a plot, one thread; and no file outside of the folder that it stands in.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(work)}
        environment |= {"TMPDIR": str(work), "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(asked)],
            cwd=work, env=environment, start_new_session=True,  # a session, and so a group, of its own: `killpg`
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE if hear else subprocess.DEVNULL,
        )  # fmt: skip
        try:
            if hear and process.stdout:
                with process.stdout as lines:
                    for line in lines:
                        hear(line)
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(OSError):  # of a group that has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        keep(work)
        written = answer.read_text(encoding="utf-8") if answer.exists() else ""
        return Ended(written, code, trace.read_text(errors="replace") if trace.exists() else "")


def alone(request: dict[str, Any], text: str, work: Callable[[], Any]) -> None:
    """In the process of its own: limit what code of that text may do, write the answer of `work` as JSON, and end.

    request  as `run_apart` wrote it, with `answer`, the file to write, and `lang`
    text     of the code that `work` runs, which tells whether it wants torch
    """
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        # The data alone, not all addresses: libraries such as torch map several times as much, and use little of it.
        # No core: no dump of the memory where it crashes.
        limits = {"DATA": MEMORY, "CORE": 0, "FSIZE": LARGEST_FILE}
        for name, most in limits.items():
            with contextlib.suppress(ValueError, OSError):  # one that is lower already stays
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if re.search(r"\btorch\b|\bnn\.", text):  # `nn.` alone: imports that are missing are lent
        import torch  # before the guard stands: it opens what it needs

        torch.set_num_threads(1)
    with Path(request["answer"]).open("w", encoding="utf-8") as answer:  # opened before the guard stands
        guard(Path.cwd(), request["lang"])
        answer.write(json.dumps(work()))
    os._exit(0)  # threads and handlers of the learner's code are not waited for


# Audit events of Python: what must not be called at all; what must not meet a path outside the folder; and flags with
# which a file is opened to be written.
FORBIDDEN = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg",
             "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.sendto",
             "socket.sendmsg")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.link",
           "os.symlink", "shutil.rmtree", "shutil.move", "shutil.copyfile", "os.utime")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class RefusedError(PermissionError):
    """Something that the guard does not allow."""


def guard(work: Path, lang: str) -> None:
    """From now on this process cannot touch anything outside its folder."""
    say = speaker(lang)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if key := objection(event, arguments, work):
            thing = arguments[0] if arguments else ""  # what the message names
            if key == "must_not_write":
                thing = os.fsdecode(thing)
            raise RefusedError(say(key, event=event, thing=thing))

    confine(work)
    sys.addaudithook(hook)


def objection(event: str, arguments: tuple[Any, ...], work: Path) -> str:
    """The phrase that says why Python must not do what an audit event announces; empty where it may."""

    def outside(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):  # a file that is open already, a mode, a number
            return False
        name = os.path.realpath(os.fsdecode(path))
        return name != os.devnull and not Path(name).is_relative_to(work.resolve())

    if event in FORBIDDEN:
        return "must_not_call"
    if event in CHANGES and any(map(outside, arguments)):
        return "must_not_change"
    if event == "open" and arguments[2] & WRITES and outside(arguments[0]):  # a path, a mode, flags
        return "must_not_write"
    return ""


# What the kernel of Linux holds.

# Numbers of system calls, on x86-64 and on ARM of 64 bits. Those that are refused stand in calls.toml.
# The numbers here are those of the kernel's headers: unistd.h, audit.h, seccomp.h, landlock.h, prctl.h, bpf_common.h.
CLONE3, CLONE, TGKILL, MMAP = (435, 435), (56, 220), (234, 131), (9, 222)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above; AUDIT_ARCH
SECCOMP = {"x86_64": 317, "aarch64": 277}  # the call that installs a filter
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # on both
# What a filter answers: let the call be, or refuse it with an error, whose number is added.
ALLOW, ERROR = 0x7FFF0000, 0x00050000

# Bits of what Landlock can forbid. LANDLOCK_CHANGES has, by the version of Landlock, those that change files.
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
# Bits 4 to 12 remove and make entries of each kind; 13 moves them to another folder; kernels know 13 and 14 later.
LANDLOCK_CHANGES = {1: WRITE_FILE | 0x1FF0, 2: WRITE_FILE | 0x3FF0}
ALL_CHANGES = WRITE_FILE | 0x7FF0  # from version 3 of Landlock on, Linux 6.2


def unheld(lang: str) -> str:
    """What this system cannot hold, in one line; empty where it holds all of it."""
    say = speaker(lang)
    lacks = []
    if _landlock() < 3:
        lacks.append(say("landlock" if _landlock() < 1 else "whole_landlock"))
    if not _filters():
        lacks.append(say("filter"))
    return say("unheld", lacks=say("and_not").join(lacks)) if lacks else ""


def confine(folder: Path) -> None:
    """From now on this thread, and those it starts, change files in `folder` alone and start nothing else.

    It does what this system can, which may be nothing: `unheld` says what it cannot.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # who started it may be killed, and then nobody ends it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # without which only root may install a filter
    if _landlock() > 0:
        _hold_files(folder, LANDLOCK_CHANGES.get(_landlock(), ALL_CHANGES))
    if _filters():
        program = _program()
        buffer = ctypes.create_string_buffer(program)
        # The struct sock_fprog of C: how many steps of 8 bytes, and their address, which `buffer` keeps alive.
        sock_fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
        SET_FILTER, EVERY_THREAD = 1, 1
        _call(SECCOMP[platform.machine()], SET_FILTER, EVERY_THREAD, sock_fprog)


def _call(number: int, *arguments: object) -> int:
    """A system call; -1 where it is refused."""
    # Whole numbers in all 64 bits; ctypes would pass 32. Bytes go as their address.
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *whole))


def _landlock() -> int:
    """The version of Landlock; 0 or less where there is none."""
    VERSION = 1  # a flag: no rules are made, the version comes back
    return _call(LANDLOCK_CREATE, None, 0, VERSION) if sys.platform == "linux" else 0


def _filters() -> bool:
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return False
    ACTION_AVAILABLE = 2  # asks whether a filter may answer with an error
    return _call(SECCOMP[platform.machine()], ACTION_AVAILABLE, 0, struct.pack("=I", ERROR)) == 0


def _hold_files(folder: Path, changes: int) -> None:
    """Landlock: files change beneath the folder alone, and the null device may be written to."""
    BENEATH_PATH = 1
    rules = _call(LANDLOCK_CREATE, struct.pack("=Q", changes), 8, 0)  # what is forbidden, but for the two rules below
    for path, allowed in ((folder, changes), (Path(os.devnull), changes & (WRITE_FILE | TRUNCATE))):
        opened = os.open(path, os.O_PATH)
        _call(LANDLOCK_ADD, rules, BENEATH_PATH, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    _call(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _program() -> bytes:
    """The filter, in the kernel's little language: each step is a code, two jumps and a number.

    A comparison jumps over as many steps as its first number says where it holds, and as its second where it does not.
    """
    LOAD, AND, EQUAL, AT_LEAST, END = 0x20, 0x54, 0x15, 0x35, 0x06
    REFUSE = ERROR | errno.EPERM
    NUMBER, ARCHITECTURE, FIRST = 0, 4, 16  # where a call has them; an argument takes 8 bytes, the low ones first
    column, architecture = ARCHITECTURES[platform.machine()]
    steps = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (END, 0, 0, REFUSE), (LOAD, 0, 0, NUMBER)]
    steps += [(AT_LEAST, 0, 1, 1 << 30), (END, 0, 0, REFUSE)]  # the same calls under other numbers, on x86-64
    for numbers in read_toml("calls.toml").values():  # -1: this kind of processor has no such call
        if numbers[column] >= 0:
            steps += [(EQUAL, 0, 1, numbers[column]), (END, 0, 0, REFUSE)]
    # A C library takes `clone` where there is no `clone3`, whose flags no filter can read.
    steps += [(EQUAL, 0, 1, CLONE3[column]), (END, 0, 0, ERROR | errno.ENOSYS)]
    # Of these calls one argument decides, as far as a mask leaves its bits: `clone` may start a thread and no
    # process, `mmap` may not share memory without a file, and `tgkill` may reach the threads of this process alone.
    THREAD, SHARED_AND_NAMELESS, PROCESS = 0x10000, 0x21, 0xFFFFFFFF
    for numbers, place, mask, value, if_so, else_ in (
        (CLONE, 0, THREAD, THREAD, ALLOW, REFUSE),
        (MMAP, 3, SHARED_AND_NAMELESS, SHARED_AND_NAMELESS, REFUSE, ALLOW),
        (TGKILL, 0, PROCESS, os.getpid(), ALLOW, REFUSE),  # a process may end itself, as abort() does
    ):
        # Of another call the next five steps are jumped over, and its number stays loaded.
        steps += [(EQUAL, 0, 5, numbers[column]), (LOAD, 0, 0, FIRST + 8 * place), (AND, 0, 0, mask)]
        steps += [(EQUAL, 0, 1, value), (END, 0, 0, if_so), (END, 0, 0, else_)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (END, 0, 0, ALLOW)])
