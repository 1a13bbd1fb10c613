"""Ctrl-C before there is anything to save: what is there, and how to go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CODE = 130
WORDS = {"interrupted": "interrupted", "nothing": "nothing was written"}  # in the language of the command


def _nothing() -> str:
    return WORDS["nothing"]


_endings: list[Callable[[], str]] = [_nothing]  # of the blocks of `leaving` that run, the innermost last


@contextmanager
def leaving(tell: Callable[[], str] = _nothing) -> Iterator[None]:
    """Ctrl-C within this block says, besides, what `tell` gives then: by default that nothing was written."""
    _endings.append(tell)
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(tell())
        raise
    finally:
        _endings.pop()


def end_of_hearing() -> None:
    """From here on Ctrl-C does nothing: the process ends, and a second one would cut off what it says of the first."""
    with suppress(ValueError):  # only the main thread may say so
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def loading() -> Iterator[None]:
    """Imports, and nothing else: Ctrl-C ends the process at once. Raised in an import, it comes out as other errors."""
    # Only the main thread may handle signals; one that is ignored, as behind `&` in a script, stays so.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield
        return

    def leave(signum: int, frame: object) -> None:
        if os.environ.get("RANK", "0") == "0":  # of many processes the first alone speaks
            os.write(2, f"headwise: {WORDS['interrupted']}; {_endings[-1]()}\n".encode())
        os._exit(CODE)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
