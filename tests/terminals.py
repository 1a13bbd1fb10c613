"""What is printed on a screen, as text."""

import io
from collections.abc import Callable
from typing import Any

from headwise.view import Screen


def printed(draw: Callable[..., object], *arguments: Any, width: int = 80, **options: Any) -> str:
    """What `draw(screen, *arguments)` prints on a screen of this width; `options` are those of `Screen`."""
    file = io.StringIO()
    draw(Screen(file=file, width=width, **options), *arguments)
    return file.getvalue()


def printed_in_ascii(draw: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The same on 80 columns that have no other letters."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw(Screen(file=file, width=80, **options), *arguments)
    file.seek(0)
    return file.read()
