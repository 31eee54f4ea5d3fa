"""Progress of long work: on a terminal one line that is written over, elsewhere a plain line now and then."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from dicedist.console.lines import duration, put

USUAL_COLUMNS = 80
WIDTH = 24  # characters of the bar, at most a third of the line
REDRAWN, TOLD = 0.2, 10.0  # seconds between two looks: on a terminal, elsewhere by default


class SilentProgress:
    """For ranks that print nothing."""

    def show(self, done: float, figures: str = "", always: bool = False) -> None:
        """Show the count, a float with a decimal. always: even if the last line is recent.

        figures: text behind the time that is left.
        """

    def begin(self) -> None:
        """Start the clock."""

    def clear(self) -> None:
        """Remove the line, before another one is printed."""


SILENT = SilentProgress()
Stage = Callable[[int, str], SilentProgress]  # of a total and a noun: how far one piece of long work has come


def silent(total: int, noun: str) -> SilentProgress:
    return SILENT


class Progress(SilentProgress):
    """Counts `total` things, each called `noun`; `first` of them were done before.

    told: seconds between two lines where there is no terminal.
    """

    def __init__(self, total: int, noun: str, first: int = 0, stream: TextIO | None = None, told: float = TOLD):
        self.total, self.noun, self.first, self.told = total, noun, first, told
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        self.started = self.shown_at = time.monotonic()

    def show(self, done: float, figures: str = "", always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self.shown_at < (REDRAWN if self.terminal else self.told):
            return
        self.shown_at = now
        self.draw(done, f"{duration(self.left(done))} left  {figures}" if done < self.total else figures)

    def left(self, done: float) -> float:
        """Return the seconds that the rest will take."""
        return (time.monotonic() - self.started) / (done - self.first or 1) * (self.total - done)

    def begin(self) -> None:
        """Start the clock, and draw an empty bar on a terminal."""
        self.started = self.shown_at = time.monotonic()
        if self.terminal:
            self.draw(self.first, "")

    def draw(self, done: float, figures: str) -> None:
        columns = self.columns
        width = min(WIDTH, columns // 3)
        filled = round(width * done / max(1, self.total))
        bar = "█" * filled + "░" * (width - filled) + " " if self.terminal else ""
        count = f"{done:,.1f}" if isinstance(done, float) else f"{done:,}"
        text = f"{bar}{self.noun} {count}/{self.total:,}  {figures}".rstrip()
        put(self.stream, f"\r\x1b[2K{shortened(text, columns - 1)}" if self.terminal else f"{text}\n")

    @property
    def columns(self) -> int:
        """The width of this stream's own terminal: a line that wraps cannot be undone."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or USUAL_COLUMNS
        except (OSError, ValueError):
            return USUAL_COLUMNS

    def clear(self) -> None:
        if self.terminal:
            put(self.stream, "\r\x1b[2K")


def shortened(text: str, most: int) -> str:
    """Keep as many figures, which stand two spaces apart, as fit whole."""
    while len(text) > most and "  " in text:
        text = text.rpartition("  ")[0]
    return text[:most]
