"""Lines, tables and progress as a person sees them."""

import fcntl
import io
import pty
import struct
import termios

import pytest

from dicedist.console import progress
from dicedist.console.lines import duration, plural, printable
from dicedist.console.progress import Progress

CLEARED = b"\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_now_and_then_where_nobody_watches(clock):
    stream = io.StringIO()
    shown = Progress(100_000, "images", stream=stream)
    for clock[0], done in ((5, 1000), (20, 4000), (25, 5000), (31, 6200)):
        shown.show(done)
    assert stream.getvalue() == "images 4,000/100,000  8 min 00 s left\nimages 6,200/100,000  7 min 49 s left\n"


def test_one_line_that_is_written_over_on_a_terminal(clock):
    stream = Terminal()
    shown = Progress(4, "step", first=2, stream=stream)
    clock[0] = 10
    shown.show(3, "loss 1.0", always=True)
    shown.clear()
    bar = "█" * 18 + "░" * 6
    assert stream.getvalue() == f"\r\x1b[2K{bar} step 3/4  10 s left  loss 1.0\r\x1b[2K"


def test_a_bar_fits_the_terminal_that_it_is_drawn_on(clock):
    """A real one of 50 columns, as standard error is where standard output goes into a file."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with open(slave, "w") as stream, open(master, "rb", buffering=0) as seen:
        shown = Progress(100, "images of a set", stream=stream)
        shown.begin()
        for clock[0], done in ((1, 10), (1.1, 11), (2, 50)):
            shown.show(done, "loss 1.234  a figure that is too long")
        shown.clear()
        drawn = b""
        while drawn.count(CLEARED) < 4:  # a terminal hands over what it has, piece by piece
            drawn += seen.read(10_000)
    _, first, second, third, nothing = drawn.decode().split(CLEARED.decode())
    assert first == "░" * 16 + " images of a set 0/100", "there is a bar before anything is done"
    assert second == "█" * 2 + "░" * 14 + " images of a set 10/100  9 s left", "only whole figures"
    assert third == "█" * 8 + "░" * 8 + " images of a set 50/100  2 s left" and not nothing


def test_nothing_is_estimated_before_something_is_done(clock):
    stream = io.StringIO()
    shown = Progress(100, "step", stream=stream)
    clock[0] = 60  # spent on something else
    shown.begin()
    clock[0] = 80
    shown.show(50)
    assert stream.getvalue() == "step 50/100  20 s left\n"


def test_words():
    assert [duration(s) for s in (59, 61, 3700, 90_000)] == ["59 s", "1 min 01 s", "1 h 01 min", "1 d 1 h"]
    assert plural(1, "image") == "1 image" and plural(2000, "image") == "2,000 images"
    assert printable("a\nb\x1b[31m\udcff") == "a?b?[31m?"
