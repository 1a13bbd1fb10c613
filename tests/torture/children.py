"""The command line in forked children: a fork of a process that has imported everything starts in milliseconds."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headwise import cli

MEMORY = 3 << 30  # bytes that a child may map beyond what it starts with
LIMIT = 300.0  # seconds after which a child counts as hanging; other work may share the machine
BUGS = ("Traceback", "this is a bug")


class FailedError(Exception):
    """What a campaign looks for."""


class Child:
    """One command, at work in its own process and session."""

    def __init__(self, place: Path, *arguments: object, before: Callable[[], None] = lambda: None) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self.files = [place / f"{name}-{time.monotonic_ns()}" for name in ("out", "err")]
        for path in self.files:
            path.touch()  # the child may die before it does so
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(before)

    def _become(self, before: Callable[[], None]) -> None:
        code = 70
        try:
            os.setsid()
            for number, path in enumerate((Path(os.devnull), *self.files)):
                opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(opened, number)
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["headwise", *self.arguments]
            before()
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Exit code (negative: the signal that ended it), standard output and error."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.began > limit:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise FailedError(f"it hangs: {' '.join(self.arguments)} took over {limit:.0f} s")
            time.sleep(0.002)
        printed, said = (path.read_text(errors="replace") for path in self.files)
        for path in self.files:
            path.unlink()
        return os.waitstatus_to_exitcode(status), printed, said


def run(place: Path, *arguments: object, before: Callable[[], None] = lambda: None) -> tuple[int, str, str]:
    return Child(place, *arguments, before=before).wait()


def check_refusal(code: int, said: str) -> None:
    """One clear line and exit code 2."""
    lines = [line for line in said.splitlines() if line.startswith("headwise: ")]
    if code != 2 or len(lines) != 1 or any(bug in said for bug in BUGS):
        raise FailedError(f"no clear refusal, exit code {code}: {said[-600:]}")


def must(place: Path, *arguments: object) -> str:
    """A command that has to succeed; what it printed."""
    code, printed, said = run(place, *arguments)
    if code:
        raise FailedError(f"{' '.join(map(str, arguments))} gave {code}: {said[-600:]}")
    return printed
