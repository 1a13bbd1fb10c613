"""The command line: thin. Each command reads its options, calls a package, and prints what comes back."""

from headwise.cli.interrupt import loading

# Each module adds its own command.
with loading():
    from headwise.cli import (  # noqa: F401
        cost,
        generate,
        heads,
        ladder,
        questions,
        reshape,
        teach,
        train,
    )
    from headwise.cli.app import main

__all__ = ["main"]
