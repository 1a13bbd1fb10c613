"""Ctrl-C before there is anything to save: what is there, and how to go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CODE = 130  # the exit code after Ctrl-C, as shells have it: 128 + 2, the number of SIGINT


def _nothing() -> str:
    return "nothing was written"


_endings: list[Callable[[], str]] = [_nothing]  # the `tell` of each block of `leaving` that runs, the innermost last


@contextmanager
def leaving(tell: Callable[[], str] = _nothing) -> Iterator[None]:
    """Ctrl-C within this block says, besides, what `tell` gives then: by default that nothing was written."""
    _endings.append(tell)  # for `loading`, where no KeyboardInterrupt comes
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(tell())  # the first note, that of the innermost block, is what the command says
        raise
    finally:
        _endings.pop()


def end_of_hearing() -> None:
    """From here on Ctrl-C does nothing: the process ends, and a second one would cut off what it says of the first."""
    with suppress(ValueError):  # Python raises it in any thread but the main one, which alone may change this
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def loading() -> Iterator[None]:
    """A block with imports, and nothing else: in it Ctrl-C ends the process at once, and says so in one line.

    A KeyboardInterrupt in the middle of an import often comes out as another error, such as an ImportError.
    """
    # Only the main thread may handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    # A Ctrl-C that is ignored, as behind `&` in a script, stays so; None: code that is not Python handles it.
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return

    def leave(signum: int, frame: object) -> None:  # as Python calls a handler of signals
        if os.environ.get("RANK", "0") == "0":  # of many processes the first alone speaks
            # To standard error by its number: its Python object may be in use just now.
            os.write(2, f"headwise: interrupted; {_endings[-1]()}\n".encode())
        os._exit(CODE)  # sys.exit would raise in the import, too

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
