"""The command line: thin. Each command reads its options, calls a room, and prints what comes back."""

from headwise.cli.interrupt import loading

# Each module adds its own command.
with loading():
    from headwise.cli import (  # noqa: F401
        align,
        bugs,
        check,
        compare,
        cost,
        generate,
        heads,
        ladder,
        learn,
        look,
        reshape,
        trace,
        train,
        why,
        windows,
    )
    from headwise.cli.app import main

__all__ = ["main"]
