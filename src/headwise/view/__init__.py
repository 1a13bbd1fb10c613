"""What people see. A screen is a terminal on which no name can do harm; progress of long work is shown on one."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from typing import Any

from rich import progress as rich_progress
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


# Text goes out as it is: rich neither colours numbers, nor reads [brackets] or :names:, nor breaks lines.
# results, on standard output
screen = Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)
# messages
err = Screen(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Progress:
    """How far long work is, on standard error: a bar for each stage on a terminal, plain lines elsewhere.

    A plain line comes after 2 seconds without one, then after 4, 8, 16 and every 30, also while one step takes long;
    `begins` is what it says before the first stage.
    """

    # seconds between plain lines, at first and at last: a log of hours stays short
    FIRST, LONGEST = 2.0, 30.0

    def __init__(self, begins: str) -> None:
        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[numbers]}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        # Transient: gone at the end. Speed is that of ten minutes: from steps of over 30 seconds rich would forecast
        # nothing.
        self._bar = rich_progress.Progress(
            *columns, console=err, transient=True, speed_estimate_period=600
        )
        self._tasks: dict[str, rich_progress.TaskID] = {}  # the bar of each stage
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._print_now_and_then, daemon=True)
        # What the next plain line says; when the work began, and when the latest plain line came.
        self._state, self._began, self._printed = (
            begins,
            time.monotonic(),
            time.monotonic(),
        )

    def __enter__(self) -> Progress:
        if not err.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._tasks:  # else the bar was never started
            self._bar.stop()

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        numbers: str = "",
        milestone: bool = False,
    ) -> None:
        """The stage has done so many of `total` steps (0: unknown); `numbers` are words behind them, such as a loss.

        A milestone has a plain line of its own.
        """
        if err.is_terminal:
            # Only now, not in __enter__: a running bar takes standard output over. A second start does nothing.
            self._bar.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(
                    harmless(stage), start=False, numbers=""
                )
            if done:  # a stage may be named long before it begins
                self._bar.start_task(self._tasks[stage])
            self._bar.update(
                self._tasks[stage],
                total=total or None,
                completed=done,
                numbers=harmless(numbers),
            )
            return
        self._state = f"{stage} {done}/{total}  {numbers}".strip() if total else stage
        if milestone:
            self._printed = time.monotonic()
            err.print(self._state)

    def _print_now_and_then(self) -> None:  # in the thread, until the work is done
        gap = self.FIRST
        # `wait` is true at once when the work is done. A time that is past (below zero) is not waited for.
        while not self._done.wait(self._printed + gap - time.monotonic()):
            # else a milestone was printed while this waited
            if time.monotonic() >= self._printed + gap:
                self._printed, gap = time.monotonic(), min(2 * gap, self.LONGEST)
                err.print(f"{self._state}  ({time.monotonic() - self._began:.0f} s)")
