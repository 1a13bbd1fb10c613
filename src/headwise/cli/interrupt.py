"""Ctrl-C while libraries are imported, before there is anything to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CODE = 130  # the exit code after Ctrl-C, as shells have it: 128 + 2, the number of SIGINT


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
        # Python's own object may be in use just now
        os.write(2, b"headwise: interrupted; no file was written\n")
        os._exit(CODE)  # sys.exit would raise in the import, too

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
