"""What people see. A screen is a terminal with the language that is spoken there; on it no name can do harm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from headwise.table import Table, say
from headwise.words import check_lang, phrase, said, translator

# What a terminal obeys instead of showing (codes below 0x20 and around 0x80), what changes the direction of text
# (0x202A and on), and half of a surrogate pair, which UTF-8 cannot write (0xD800 and on). Tab and line end stay. A
# carriage return alone does not: what follows it would be written over the line. As part of a line end it stays.
CONTROL = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text with each control character as its code: `\\x1b`, `\\u202e`. Line ends and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Screen(Console):
    """A console to which no name, sample or quoted value can send a control character, and its language.

    A note is a text that remembers its phrase and its facts (`words.Note`), so that it can be said in any language.
    """

    def __init__(self, lang: str = "en", **options: Any) -> None:
        """`options` are those of rich. Raises HeadwiseError for a language that the table of words lacks."""
        check_lang(lang)
        super().__init__(**options)
        self.lang = lang

    def phrase(self, key: str, /, **facts: Any) -> str:
        """A phrase with its facts, in the language of this screen."""
        return phrase(key, self.lang, **facts)

    def spoken(self, text: str) -> str:
        """A note in the language of this screen, anything else as it is."""
        return str(said(text, self.lang))

    def tell(self, key: str, /, **facts: Any) -> None:
        """Print a phrase with its facts as a paragraph."""
        self.say(self.phrase(key, **facts))

    def say(self, text: str) -> None:
        """Print a paragraph: a note in the language of this screen, anything else as it is."""
        say(self, self.spoken(text))

    def show(self, table: Table, section: str, left: Iterable[int] = (0,), last: int = 0) -> None:
        """Print a table, whose labels are phrases of a section of the words.

        left  the columns of words, which stand at the left; numbers stand at the right
        last  so many rows at the end stand below a line, such as sums
        """
        table.print(self, left, last, translator(section, self.lang))

    # rich calls these two for all that it prints: the first makes texts of strings, the second draws.
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)  # before rich drops some of them without a trace

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
            # Styles of single characters are dropped: their places no longer fit the longer text.
            renderable = Text(harmless(renderable.plain), renderable.style)
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        """Nobody reads on, as behind `| head`, which is no failure: rich would end the process with code 1."""
        raise BrokenPipeError
