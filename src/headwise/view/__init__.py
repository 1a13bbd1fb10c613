"""What people see. A screen is a terminal on which no name can do harm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from headwise.table import say

# What a terminal obeys instead of showing (codes below 0x20 and around 0x80), what changes the direction of text
# (0x202A and on), and half of a surrogate pair, which UTF-8 cannot write (0xD800 and on). Tab and line end stay. A
# carriage return alone does not: what follows it would be written over the line. As part of a line end it stays.
CONTROL = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """The text with each control character as its code: `\\x1b`, `\\u202e`. Line ends and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Screen(Console):
    """A console to which no name, sample or quoted value can send a control character."""

    def say(self, text: str) -> None:
        """Print a paragraph."""
        say(self, text)

    # rich calls these two for all that it prints: the first makes texts of strings, the second draws.
    def render_str(self, text: str, **options: Any) -> Text:
        # before rich drops some of them without a trace
        return super().render_str(harmless(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
            # Styles of single characters are dropped: their places no longer fit the longer text.
            renderable = Text(harmless(renderable.plain), renderable.style)
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        """Nobody reads on, as behind `| head`, which is no failure: rich would end the process with code 1."""
        raise BrokenPipeError
