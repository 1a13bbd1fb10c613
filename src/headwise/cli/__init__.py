"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

# The order of imports is the order of the commands in --help.
from headwise.cli import train  # isort: split

from headwise.cli import generate  # isort: split

from headwise.cli import heads  # isort: split

from headwise.cli import share  # isort: split

from headwise.cli import prune  # isort: split

from headwise.cli import cost  # isort: split

from headwise.cli import trace  # isort: split

from headwise.cli import ladder  # isort: split

from headwise.cli import compare  # isort: split

from headwise.cli.app import main

__all__ = ["compare", "cost", "generate", "heads", "ladder", "main", "prune", "share", "trace", "train"]
