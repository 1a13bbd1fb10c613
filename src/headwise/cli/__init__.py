"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

# The order of imports is the order of the commands in --help.
from headwise.cli import train  # isort: split

from headwise.cli import generate  # isort: split

from headwise.cli import heads
from headwise.cli.app import main

__all__ = ["generate", "heads", "main", "train"]
