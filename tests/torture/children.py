"""The command line in forked children: a fork of a process that has imported everything starts in milliseconds."""

import contextlib
import gc
import importlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headwise import cli, errors
from headwise.reshape import export

MEMORY = 3 << 29  # bytes that a child may map beyond what it starts with
LIMIT = (
    100_000  # looks of a millisecond or more after which a child counts as hanging; counted, for this process may be
)
# stopped for a while, and other work may share the machine
BUGS = ("Traceback", "this is a bug", "panicked")
FAST = 1000  # times as fast as the real one goes a clock: what is kept every ten seconds is kept every ten milliseconds
CONTROL = {*range(0x20), *range(0x7F, 0xA0)} - {*b"\t\n\r"}
TICKS = os.sysconf("SC_CLK_TCK")

Patch = Callable[[], None]  # what a child does to itself before its command


class FailedError(Exception):
    """What a campaign looks for."""


class Child:
    """One command, at work in its own process and session."""

    def __init__(self, place: Path, *arguments: object, before: Sequence[Patch] = ()) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.files = [place / f"{name}-{time.monotonic_ns()}" for name in ("out", "err")]
        for path in self.files:
            path.touch()  # the child may die before it does so
        self.pid = os.fork()
        if self.pid == 0:
            self._become(before)

    def _become(self, before: Sequence[Patch]) -> None:
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, path in enumerate((Path(os.devnull), *self.files)):
                opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(opened, number)
                os.close(opened)
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            sys.argv = ["headwise", *self.arguments]
            sys.modules["__main__"] = errors  # which processes that it starts anew read first
            for patch in before:
                patch()
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int, group: bool = False) -> None:
        """To the command alone, or, as a terminal does, to all processes that it started as well."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group may not be there yet
            (os.killpg if group else os.kill)(self.pid, number)

    def wait(self) -> tuple[int, str, str]:
        """Exit code (negative: the signal that ended it), standard output and error."""
        try:
            for _ in range(LIMIT):
                pid, status, used = os.wait4(self.pid, os.WNOHANG)
                if pid:
                    break
                time.sleep(0.001)
            else:
                raise FailedError(f"it hangs: {' '.join(self.arguments)} took over {LIMIT / 1000:.0f} s")
        except BaseException:
            self.send(signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        self.worked = used.ru_utime + used.ru_stime
        printed, said = (path.read_text(errors="replace") for path in self.files)
        for path in self.files:
            path.unlink()
        if raw := {*map(ord, printed + said)} & CONTROL:
            raise FailedError(f"control characters {sorted(raw)} reach the terminal: {printed + said!r:.600}")
        return os.waitstatus_to_exitcode(status), printed, said

    def work(self, seconds: float) -> None:
        """Wait until it, with the processes that it has started, has worked for so long, or has ended."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        while True:
            with contextlib.suppress(OSError):
                (state, _, used), pids = _stat(self.pid), children.read_text().split()
                if state == "Z" or used + sum(_stat(int(pid))[2] for pid in pids) >= seconds:
                    return
            time.sleep(0.001)

    def others(self) -> list[int]:
        """Processes of its session that are still there."""
        there = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, session, _ = _stat(int(path.name))
                if session == self.pid and state != "Z":
                    there.append(int(path.name))
        return there


def _stat(pid: int) -> tuple[str, int, float]:
    """State and session of a process, and the seconds that it and those that it waited for have worked."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3]), sum(map(int, fields[11:15])) / TICKS


def run(place: Path, *arguments: object, before: Sequence[Patch] = ()) -> tuple[int, str, str]:
    return Child(place, *arguments, before=before).wait()


def check_refusal(code: int, said: str) -> None:
    """One clear line and exit code 2."""
    before = "headwise: nothing to resume"  # is said of a work that begins
    lines = [line for line in said.splitlines() if line.startswith("headwise: ") and not line.startswith(before)]
    if code != 2 or len(lines) != 1 or any(bug in said for bug in BUGS):
        raise FailedError(f"no clear refusal, exit code {code}: {said[-600:]}")


def must(place: Path, *arguments: object, before: Sequence[Patch] = (), code: int = 0) -> tuple[str, float]:
    """A command that has to end with this code: what it printed, and the seconds that it worked.

    What it imported is imported here from then on.
    """
    seen = place / f"modules-{time.monotonic_ns()}"

    def note() -> None:
        ending = os._exit

        def end(code: int) -> None:
            seen.write_text("\n".join(sys.modules))
            ending(code)

        os._exit = end  # type: ignore[assignment]

    child = Child(place, *arguments, before=(note, *before))
    got, printed, said = child.wait()
    if got != code:
        raise FailedError(f"{' '.join(map(str, arguments))} gave {got}: {said[-600:]}")
    for name in seen.read_text().splitlines():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    seen.unlink()
    gc.collect()
    gc.freeze()  # a fork shares the more memory, the less of it is looked through
    return printed, child.worked


def hurried() -> None:
    """A clock that goes FAST, for this process."""
    clock = time.monotonic
    time.monotonic = lambda: clock() * FAST


def verified_in_a_fork() -> None:
    """The fresh process that reads an exported model, which takes seconds to begin, is a fork."""

    def forked(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                sys.stdout = io.TextIOWrapper(os.fdopen(writer, "wb"))
                folder, probe, *how = command[command.index(export.__name__) + 1 :]
                export.main(Path(folder), Path(probe), *how)
                sys.stdout.flush()
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            printed = pipe.read()
        return subprocess.CompletedProcess(command, os.waitpid(pid, 0)[1], printed, "")

    subprocess.run = forked  # type: ignore[assignment]


def interrupted_at(count: int) -> Patch:
    """Ctrl-C when a training, or a healing, asks for the so manieth time whether there was one."""
    import headwise.gpt.train
    import headwise.reshape.heal

    @contextlib.contextmanager
    def interrupts() -> Any:
        asked = iter(range(count - 1, -1, -1))
        yield lambda: next(asked) == 0

    def patch() -> None:
        headwise.gpt.train.interrupts = interrupts
        headwise.reshape.heal.interrupts = interrupts

    return patch
