"""Lines for people: messages on standard output, warnings on standard error."""

import contextlib
import re
import sys
from typing import TextIO

CREDENTIALS = re.compile(r"://[^/\s@'\"]+@")


def say(text: str) -> None:
    put(sys.stdout, f"{text}\n")


def warn(text: str) -> None:
    put(sys.stderr, f"dicedist: warning: {printable(' '.join(text.split()))}\n")


def note(text: str) -> None:
    """Print a line to standard error, so that programs that read standard output do not see it."""
    put(sys.stderr, f"dicedist: {printable(text)}\n")


def put(stream: TextIO, text: str) -> None:
    """Write to a stream, and ignore a closed stream or a full disk: neither may end a run."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(redacted(text))
        stream.flush()


def redacted(text: str) -> str:
    """Remove the user and password of every URL. All messages pass through this function."""
    return CREDENTIALS.sub("://***@", text)


def printable(text: str) -> str:
    """Replace line breaks, undecodable bytes and terminal escape codes, which file names may contain."""
    return "".join(character if character.isprintable() else "?" for character in text)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
