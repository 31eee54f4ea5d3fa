"""Progress of long work: one updated line on a terminal, elsewhere a plain line every few seconds."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from dicedist.console.lines import duration, put

USUAL_COLUMNS = 80
WIDTH = 24  # characters of the bar, at most a third of the line
REDRAW_INTERVAL, INTERVAL = 0.2, 10.0  # seconds between two updates: on a terminal, elsewhere


class SilentProgress:
    """Progress that prints nothing, for all ranks but rank 0."""

    def show(self, done: float, figures: str = "", always: bool = False) -> None:
        """Show the count; a float has one decimal. always: even if the last line is recent.

        figures: text after the remaining time.
        """

    def rate(self, done: float) -> str:
        """Return the throughput since `begin`."""
        return ""

    def begin(self) -> None:
        """Start the clock."""

    def clear(self) -> None:
        """Remove the line before other output."""


SILENT = SilentProgress()
Stage = Callable[[int, str], SilentProgress]  # total and noun -> progress of one long task


def silent(total: int, noun: str) -> SilentProgress:
    return SILENT


class Progress(SilentProgress):
    """Progress over `total` things, each called `noun`; `first` of them were done before.

    interval: seconds between two lines without a terminal.
    """

    def __init__(self, total: int, noun: str, first: int = 0, stream: TextIO | None = None, interval: float = INTERVAL):
        self.total, self.noun, self.first = total, noun, first
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty()
        self.interval = REDRAW_INTERVAL if self.terminal else interval
        self.started = self.shown_at = time.monotonic()

    def show(self, done: float, figures: str = "", always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self.shown_at < self.interval:
            return
        self.shown_at = now
        self.draw(done, f"{duration(self.left(done))} left  {figures}" if done < self.total else figures)

    def left(self, done: float) -> float:
        """Return the estimated remaining seconds."""
        return (time.monotonic() - self.started) / (done - self.first or 1) * (self.total - done)

    def rate(self, done: float) -> str:
        return f"{(done - self.first) / max(time.monotonic() - self.started, 1e-9):,.0f} {self.noun}/s"

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
        """The width of this stream's terminal. A line that wraps could not be erased."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or USUAL_COLUMNS
        except (OSError, ValueError):
            return USUAL_COLUMNS

    def clear(self) -> None:
        if self.terminal:
            put(self.stream, "\r\x1b[2K")


def shortened(text: str, most: int) -> str:
    """Drop figures, which are separated by two spaces, from the end of the text until the rest fits."""
    while len(text) > most and "  " in text:
        text = text.rpartition("  ")[0]
    return text[:most]
