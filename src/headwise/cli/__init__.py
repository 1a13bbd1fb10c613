"""The command line: thin. Each command reads its options, calls a package, and prints what comes back."""

from __future__ import annotations

import os
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Exit code 2 for bad input, 130 for Ctrl-C; one line each, a traceback with --debug."""
    # Before torch is loaded: threads that wait in a loop take the cores from one another where the machine is busy, and
    # a training ran 30 times longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from headwise.cli.run import run

    run()
