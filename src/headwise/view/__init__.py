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

# Characters that are replaced by their codes:
# - a carriage return outside a line end: the text behind it would overwrite the line;
# - 0x00 to 0x1F, except tab and line feed, and 0x7F to 0x9F: a terminal obeys them instead of showing them;
# - from 0x202A and from 0x2066: they change the direction of text;
# - from 0xD800: halves of surrogate pairs, which UTF-8 cannot write.
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
        # escaped first, as rich drops some control characters silently
        return super().render_str(harmless(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
            # Styles of single characters are dropped: their places no longer fit the longer text.
            renderable = Text(harmless(renderable.plain), renderable.style)
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        """A reader that stops early (`| head`) is no failure; rich would end the process with code 1."""
        raise BrokenPipeError


# Plain text: rich colours no numbers, reads no [markup] or :emoji:, and breaks no lines.
# results, on standard output
screen = Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)
# messages
err = Screen(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class Progress:
    """How far long work is, on standard error: a bar for each stage on a terminal, plain lines elsewhere.

    Plain lines are printed in a thread, so also during one long step: the first after 2 seconds, the next after 4, 8
    and 16 more, then every 30. `begins` is their text before the first stage.
    """

    # seconds between plain lines; the gap doubles, so that a log of hours stays short
    FIRST_GAP = 2.0
    LONGEST_GAP = 30.0

    def __init__(self, begins: str) -> None:
        # The bar disappears at the end. Its forecast averages over 600 seconds: rich's 30 hold too few long steps.
        self._bar = rich_progress.Progress(
            "{task.description}",
            rich_progress.MofNCompleteColumn(),
            "{task.fields[numbers]}",
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=err,
            transient=True,
            speed_estimate_period=600,
        )
        self._tasks: dict[str, rich_progress.TaskID] = {}  # the bar of each stage
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._print_now_and_then, daemon=True)
        self._state = begins  # text of the next plain line
        self._began = time.monotonic()
        self._printed = self._began  # time of the latest plain line

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
        gap = self.FIRST_GAP
        # `wait` returns True as soon as the work is done, and False when the time is over or already past.
        while not self._done.wait(self._printed + gap - time.monotonic()):
            now = time.monotonic()
            # a milestone printed meanwhile moves the next plain line back
            if now >= self._printed + gap:
                self._printed = now
                gap = min(2 * gap, self.LONGEST_GAP)
                err.print(f"{self._state}  ({now - self._began:.0f} s)")
