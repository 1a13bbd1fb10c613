"""What is printed on a console of rich, as text."""

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console


def printed(draw: Callable[..., object], *arguments: Any, width: int = 80, **options: Any) -> str:
    """What `draw(console, *arguments)` prints on a console of this width; `options` are rich's."""
    file = io.StringIO()
    draw(Console(file=file, width=width, **options), *arguments)
    return file.getvalue()


def printed_in_ascii(draw: Callable[..., object], *arguments: Any) -> str:
    """The same on 80 columns that have no other letters."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw(Console(file=file, width=80), *arguments)
    file.seek(0)
    return file.read()
