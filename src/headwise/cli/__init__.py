"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

# In the order of the commands in --help.
from headwise.cli import train, generate, heads, share, prune, cost, trace, ladder, compare, check, learn  # isort: skip
from headwise.cli.app import main

__all__ = [
    "check",
    "compare",
    "cost",
    "generate",
    "heads",
    "ladder",
    "learn",
    "main",
    "prune",
    "share",
    "trace",
    "train",
]
