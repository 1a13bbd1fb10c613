"""Ctrl-C while libraries are imported, before there is anything to save."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = (
    130  # the exit code after Ctrl-C, as shells have it: 128 + 2, the number of SIGINT
)


@contextmanager
def loading() -> Iterator[None]:
    """A block of imports: in it Ctrl-C ends the process at once, and says so in one line.

    A KeyboardInterrupt in the middle of an import often comes out as another error, such as an ImportError.
    """
    before = signal.getsignal(signal.SIGINT)
    # ignored, as behind `&` in a script, or another's
    if before is not signal.default_int_handler:
        yield
        return

    def leave(signum: int, frame: object) -> None:
        # Python's own streams may be in use just now, and sys.exit would raise inside the import.
        os.write(2, b"headwise: interrupted; no file was written\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
