"""Lines, tables and progress as a person sees them."""

import fcntl
import io
import pty
import struct
import termios

import pytest
import torch

from dicedist import show
from dicedist.console import progress
from dicedist.console.lines import duration, plural, printable
from dicedist.console.progress import Progress
from dicedist.data.sources import Source, Split
from dicedist.evaluation.tables import headline
from dicedist.training.announcement import sizes, where

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


def card(device, host="a"):
    return {"device": device, "host": host}


def test_the_first_lines_of_a_training_name_devices_parts_and_sizes():
    three = ["member 0", "member 1", "discriminator"]
    assert where([card("cpu")], ["member 0, member 1"]) == "one process on cpu"
    ranks = [card("cuda:0"), card("cuda:1"), card("cuda:0", "b")]
    assert where(ranks, three) == "3 ranks on cuda of 2 nodes (member 0 | member 1 | discriminator)"
    assert where(ranks * 5, three * 5) == "15 ranks on cuda of 2 nodes", "many ranks are counted, not listed"
    train, none = (Split(None, torch.tensor(labels)) for labels in ([0, 0, 1], [0]))
    source = Source("own", ["a", "b"], (0.5,), (0.5,), 32, train=train, val=none, test=none, data_digest="")
    assert sizes(source) == "3 images of 2 classes (1 to 2 of each), 1 for validation, 1 for the test"


def test_the_last_lines_of_a_training_are_three_numbers():
    own = {"accuracy": 0.944, "ece": 0.27}
    calibrated = {"measures": {"accuracy": 0.944, "ece": 0.015}, "answered": 0.75, "risk": 0.007}
    result = {
        "ensemble": own,
        "members": {"accuracy": 0.919},
        "calibration": {"temperature": 0.355, "test": calibrated},
    }
    assert headline(result).splitlines() == [
        "accuracy: ensemble 94.4 %, its members 91.9 % on average (+2.5 points)",
        "calibration: ECE 1.5 % with temperature 0.355 (27.0 % without)",
        "abstention: answers 75.0 % of the test set, of which 0.7 % are wrong (5.6 % without)",
    ]
    del result["calibration"]
    assert headline(result).splitlines()[1].startswith("calibration: ECE 27.0 %; not calibrated: ")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "name the runs to show"),
        (["--all"], "--all: there is no such option"),
        (["runs/none"], "runs/none is not a run"),
    ],
)
def test_show_refuses_in_one_line(words, refusal):
    with pytest.raises(ValueError, match=refusal):
        show.run(words)
