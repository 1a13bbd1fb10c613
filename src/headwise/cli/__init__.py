"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

# In the order of the commands in --help; each module adds its own command.
from headwise.cli import train, look, generate, heads, why, share, prune, windows, narrow, cost, trace, ladder, compare  # isort: skip # noqa: F401
from headwise.cli import check, bugs, learn  # isort: skip # noqa: F401
from headwise.cli.app import main

__all__ = ["main"]
